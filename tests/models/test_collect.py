"""The built-in workload `collect`: paths and trees, of a model whose steps can be checked."""

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import slurmgpu as library
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Output
from slurmgpu.shards.columns import convert_row
from slurmgpu.workload import Item
from slurmgpu.workloads.collect.totals import pass_rates
from slurmgpu.workloads.collect.workload import Collect
from tests.support.engines import load_on_cpu
from tests.support.runs import datasets, make_project, report
from tests.support.shard_files import join_parts, write
from tests.support.tiny_models import sum_steps

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
SETTINGS = {"prompt": "{question}=", "temperature": 1.6, "max_tokens": 40, "precision": "fp32"}


def questions(n, seed=0):
    rng = random.Random(seed)
    sums = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(n)]
    return [{"id": f"q{i}", "question": f"{a}+{b}", "answer": a + b} for i, (a, b) in enumerate(sums)]


def items_of(data, seed=5):
    return [Item(index, each, seed) for index, each in enumerate(data)]


def loaded(adder, **settings):
    return load_on_cpu(Collect(**{"model": str(adder), **SETTINGS, **settings}))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"paths": 0}, "paths is 0; expected at least 1"),
        ({"rollouts": -1}, "rollouts is -1"),
        ({"tree": [4, 0]}, r"tree is \[4, 0\]"),
        ({"tree": [100, 100, 100, 100]}, "100,000,000 paths for each question; expected at most 10,000"),
        ({"stop": ["END", "\n"]}, "every path would end after its first step"),
        ({"tree": [4, 2], "paths": 8}, "tree and paths are both set"),
        ({"tree": [4, 2], "rollouts": 8}, "tree and rollouts are both set"),
        (
            {"tree": [4, 2], "pass_at": [8]},
            r"pass_at is \[8\]; expected whole numbers from 1 to 4, the number of paths",
        ),
        ({"pass_at": [1, 5]}, r"pass_at is \[1, 5\]; expected whole numbers from 1 to 4"),
        ({"temperature": 0.0}, "makes all paths the same"),
        ({"step_delimiter": ""}, "step_delimiter is empty"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"checker": "numerical"}, "Did you mean 'numeric'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(nothing, settings, problem):
    with pytest.raises(SlurmGPUError, match=problem):
        Collect(model=nothing, **{**SETTINGS, **({} if "tree" in settings else {"paths": 4}), **settings})


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, [1, 2, 4, 8, 10]), ({"pass_at": [10, 3, 3]}, [3, 10]), ({"pass_at": [5]}, [5])]
)
def test_pass_at_k_is_the_unbiased_estimate_for_every_k_asked_for(nothing, settings, expected):
    workload = Collect(model=nothing, **{**SETTINGS, "paths": 10, **settings})
    rates = pass_rates({3: 2, 0: 1}, 10, 4, workload.pass_at)  # the fourth question failed
    assert rates == {str(k): pytest.approx(2 * (1 - math.comb(7, k) / math.comb(10, k)) / 4) for k in expected}


# With an engine that says what it is told


class Told:
    """An engine whose answers are those of a function of the request; it notes what it was asked at once."""

    def __init__(self, answer):
        self.answer, self.waves = answer, []

    def generate(self, requests):
        self.waves.append(list(requests))
        for request in reversed(requests):
            yield self.answer(request)


def collect(nothing, answer, data, **settings):
    workload = Collect(model=nothing, **{"prompt": "{question}", **settings})
    workload.engine = Told(answer)
    rows = workload(items_of(data))
    return workload, [row if isinstance(row, ItemError) else convert_row(workload.columns, row) for row in rows]


def says(*texts, cut=()):
    """Each sample from the question says the next of `texts`; a completion always ends with the right answer."""
    said = iter(texts)

    def answer(request):
        text = "c\n#7" if request.prompt.generated else next(said)
        return Output(request.id, text, tokens=np.arange(3), finish_reason="length" if text in cut else "stop")

    return answer


def test_a_beginning_that_paths_share_is_completed_once(nothing):
    answer = says("a\nb\n#7", "a\nb\n#7", "a\nc\n#8", "a\nb\n#9")
    workload, [row] = collect(nothing, answer, [{"question": "1+6", "answer": 7}], paths=4, rollouts=3)
    first, completions = workload.engine.waves
    assert len(first) == 4
    assert sorted(request.prompt.so_far for request in completions) == sorted(3 * ["a\n", "a\nb\n", "a\nc\n"])
    assert len({request.key for request in (*first, *completions)}) == 4 + 9
    paths = json.loads(row["paths"])
    assert [path["correct"] for path in paths] == row["rewards"].tolist() == [False, False, True, True]
    values = [row["values"][node] for node in paths[1]["nodes"]]
    assert (values, row["visits"][paths[1]["nodes"]].tolist()) == ([1, 1, 0], [3, 3, 1])
    assert [row["depths"][node] for node in paths[0]["nodes"]] == [1, 2, 3]
    assert (row["n_correct"], row["n_rollouts"], row["vote"], bool(row["vote_correct"])) == (2, 9, b"7", True)
    assert row["n_tokens"] == 3 * 13
    assert {(request.sampling.max_tokens, request.sampling.fit) for request in first} == {(512, False)}
    assert {(request.sampling.max_tokens, request.sampling.fit) for request in completions} == {(512, True)}


def test_rollouts_go_on_from_the_beginning_that_a_chat_gives(nothing):
    def answer(request):
        text = "#7" if request.prompt.generated else "a\n#7"
        return Output(request.id, text, tokens=np.arange(3))

    chat = [{"role": "user", "content": "1+6"}, {"role": "assistant", "content": "So "}]
    settings = {"prompt": None, "messages": "chat", "last": "continue", "paths": 1, "rollouts": 1}
    workload, [row] = collect(nothing, answer, [{"chat": chat, "answer": 7}], **settings)
    assert [[each.prompt.so_far for each in wave] for wave in workload.engine.waves] == [[""], ["a\n"]]
    assert all(each.prompt.messages == tuple(chat) for wave in workload.engine.waves for each in wave)
    assert (row["prompt"], row["n_correct"]) == (b"1+6", 1)


def test_a_cut_path_is_wrong_and_counted_and_has_no_vote(nothing):
    answer = says("#7", "#7", "#8", cut=["#7"])
    _, [row] = collect(nothing, answer, [{"question": "1+6", "answer": 7}], paths=3)
    assert (row["n_correct"], row["n_cut"], row["vote"]) == (0, 2, b"8")
    assert [path["cut"] for path in json.loads(row["paths"])] == [False, True, True]


def test_a_run_with_cut_paths_has_a_hint(nothing, tmp_path):
    workload, rows = collect(
        nothing, says("a\nb", "a", cut={"a"}), [{"question": "1", "answer": 7}], paths=2, rollouts=0
    )
    part = write(tmp_path / "part.h5", 0, 1, columns=workload.columns, rows=rows)
    join_parts([(0, part, 0, 1)], tmp_path / "merged.h5", columns=workload.columns)
    with library.open(tmp_path / "merged.h5") as merged:
        assert "1 of 2 paths were cut at max_tokens = " in workload.summarize(merged)["hint"]


def test_a_rambling_path_costs_so_many_completions_and_is_counted(nothing):
    answer = says("a\n" * 40 + "#7", "a\n#7")
    _, [row] = collect(nothing, answer, [{"question": "1+6", "answer": 7}], paths=2, rollouts=2, max_steps=4)
    assert (row["n_rollouts"], row["n_long"], row["n_correct"]) == (3 * 2, 1, 2)
    steps = [path["steps"] for path in json.loads(row["paths"])]
    assert sorted(map(len, steps)) == [2, 4]
    assert "\n".join(max(steps, key=len)) == "a\n" * 40 + "#7"


def test_a_pattern_that_takes_for_ever_is_its_items_error(nothing, monkeypatch):
    monkeypatch.setattr("slurmgpu.llm.answers.parsing.TIME_LIMIT_S", 0.05)
    texts = {"1+5": "a\n" + "a" * 60 + "!", "1+6": "a\n7"}

    def answer(request):
        return Output(request.id, texts[request.prompt.text])

    data = [{"question": "1+5", "answer": 6}, {"question": "1+6", "answer": 7}]
    _, rows = collect(nothing, answer, data, paths=2, rollouts=1, pattern=r"^((?:a|aa)+|\d)$")
    assert "to search a text" in str(rows[0])
    assert rows[1]["n_correct"] == 2


def test_what_fails_is_one_items_error_and_costs_nothing_more(nothing):
    def answer(request):
        failed = request.prompt.text == "too long"
        return Output(request.id, "#7", error="it is too long" if failed else None)

    data = [{"question": "no answer"}, {"question": "too long", "answer": 7}, {"question": "1+6", "answer": 7}]
    workload, rows = collect(nothing, answer, data, paths=2)
    assert "no right answer in field 'answer'" in str(rows[0])
    assert str(rows[1]) == "it is too long"
    assert rows[2]["n_correct"] == 2
    assert {request.prompt.text for request in workload.engine.waves[0]} == {"too long", "1+6"}


def test_a_tree_has_so_many_branches_at_each_depth_and_counts_those_it_has(nothing):
    def answer(request):
        step = request.key % 5
        return Output(request.id, f"s{step}\nt{step}\n#{step}" if not request.prompt.so_far else f"u{step}\n#{step}")

    workload, [row] = collect(nothing, answer, [{"question": "?", "answer": 3}], tree=[4, 3, 2])
    parents, depths = row["parents"].tolist(), row["depths"].tolist()
    assert len(workload.engine.waves) == 3
    paths = [path["nodes"] for path in json.loads(row["paths"])]
    leaves = {nodes[-1] for nodes in paths}
    for node, depth in enumerate(depths):
        if node not in leaves and depth < 3:
            passed = sum(node in nodes for nodes in paths)
            assert passed >= [4, 3, 2][depth]
    assert all(parents[node] < node for node in range(len(parents)))
    assert row["n_paths"] == sum(len(wave) for wave in workload.engine.waves)
    drawn = {
        node: sum(row["draws"][parents == np.array(node)]) for node in range(-1, len(parents)) if node not in leaves
    }
    assert all(
        drawn[node] >= [4, 3, 2][depths[node] if node >= 0 else 0] for node in drawn if node < 0 or depths[node] < 3
    )
    assert row["weights"].sum() == pytest.approx(1)


def test_estimates_of_trees_are_those_of_independent_paths(nothing, tmp_path):
    """Of a model that often begins as half of its right answers do not: by each node's branches it is right more often.

    Beginnings a (0.9) and b; right after a with 0.2, after b with 1. So a path is right with 0.28.
    """

    def answer(request):
        rng = random.Random(request.key)
        begins = request.prompt.so_far[:1] or ("a" if rng.random() < 0.9 else "b")
        is_right = rng.random() < (0.2 if begins == "a" else 1.0)
        rest = f"{rng.choice('cd')}\n#{3 if is_right else rng.choice([4, 5])}"
        return Output(request.id, rest if request.prompt.so_far else f"{begins}\n{rest}", tokens=np.arange(3))

    data = [{"question": "?", "answer": 3}] * 1_000
    with_tree, rows = collect(nothing, answer, data, tree=[4, 3])
    independent, others = collect(nothing, answer, data, paths=4, rollouts=0)
    accuracies = np.array([row["accuracy"] for row in rows])
    error = accuracies.std() / len(rows) ** 0.5
    assert abs(accuracies.mean() - 0.28) < 4 * error
    assert np.mean([row["n_correct"] / row["n_paths"] for row in rows]) > 0.28 + 6 * error
    for row in rows[:100]:
        assert row["accuracy"] == pytest.approx(row["weights"] @ row["rewards"])
        roots = row["parents"] == -1
        assert row["accuracy"] == pytest.approx(np.average(row["values"][roots], weights=row["draws"][roots]))
    of_a, of_b = (
        [
            value
            for row in rows
            for step, value, depth in zip(json.loads(row["steps"]), row["values"], row["depths"], strict=True)
            if (step, depth) == (begin, 1)
        ]
        for begin in "ab"
    )
    assert abs(np.mean(of_a) - 0.2) < 4 * np.std(of_a) / len(of_a) ** 0.5
    assert set(of_b) == {1.0}

    def summary(workload, rows):
        path = write(tmp_path / f"{len(workload.tree)}.h5", columns=workload.columns, rows=rows)
        with library.open(path) as merged:
            return workload.summarize(merged)

    found, expected = summary(with_tree, rows), summary(independent, others)
    assert found["accuracy"] == pytest.approx(accuracies.mean(), abs=1e-6)
    assert found["pass_rate"] == expected["pass_rate"]  # the paths of the same samples, from the question itself


# With a model that can add


@pytest.mark.model
def test_the_value_of_a_step_tells_whether_it_is_right(adder):
    data = questions(10)
    rows = loaded(adder, paths=6, rollouts=8)(items_of(data))
    right, wrong = [], []
    for each, row in zip(data, rows, strict=True):
        wanted = sum_steps(*map(int, each["question"].split("+"))).split("\n")
        for path in row["paths"]:
            assert path["correct"] == (path["answer"] == str(each["answer"]))
            for n_steps, node in enumerate(path["nodes"], 1):
                (right if path["steps"][:n_steps] == wanted[:n_steps] else wrong).append(row["values"][node])
    assert len(wrong) > 20
    assert np.mean(np.array(right) > 0.4) > 0.9
    assert np.mean(np.array(wrong) < 0.4) > 0.9


@pytest.mark.model
def test_a_path_depends_on_seed_item_and_path_alone(adder):
    data = questions(4)
    items = items_of(data)
    workload = loaded(adder, paths=4, rollouts=2)
    together = workload(items)
    assert [row for item in reversed(items[:2]) for row in workload([item])] == [together[1], together[0]]
    more = loaded(adder, paths=6, rollouts=0)(items)
    for row, other in zip(together, more, strict=True):
        assert [path["text"] for path in other["paths"][:4]] == [path["text"] for path in row["paths"]]
    alone, together = ([*loaded(adder, tree=[3, 2, 2])(some)] for some in (items[1:2], items))
    assert alone == [together[1]]
    [other_seed] = loaded(adder, paths=4, rollouts=0)([Item(0, data[0], 6)])
    assert [p["text"] for p in other_seed["paths"]] != [p["text"] for p in more[0]["paths"][:4]]


def collecting(folder, adder):
    """A project of 20 questions, and one without an answer, in six shards."""
    settings = {"model": str(adder), **SETTINGS, "keep": ["id", "answer"], "paths": 4, "rollouts": 2}
    items = [*questions(20), {"id": "q20", "question": "1+1", "answer": None}]
    make_project(folder, items=items, batch_size=4, settings=settings, seed=3, shard_items=4)
    text = (folder / "slurmgpu.toml").read_text()
    (folder / "slurmgpu.toml").write_text(text.replace("workloads.py:Rows", "collect"))
    return folder


@pytest.fixture(scope="module")
def collected(tmp_path_factory, slurmgpu, adder):
    """The project after a run, and what that printed."""
    folder = collecting(tmp_path_factory.mktemp("collected") / "project", adder)
    done = slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0, COLUMNS="200", **ONE_THREAD)
    return folder, done.stdout


@pytest.mark.nightly
@pytest.mark.model
def test_paths_and_values_are_the_same_with_two_tasks_of_which_one_was_killed(collected, tmp_path, slurmgpu, adder):
    folder = collecting(tmp_path / "project", adder)
    words = ("submit", "--executor", "local", "--gpus", "0", "--tasks", "2", "--inject", "kill@9")
    slurmgpu(*words, cwd=folder, expect=0, **ONE_THREAD)
    assert datasets(folder) == datasets(collected[0])


@pytest.mark.model
def test_the_report_and_the_tensors_have_the_totals(collected, slurmgpu, adder):
    folder, shown = collected
    assert "vote accuracy" in shown
    summary = report(folder)["summary"]
    with library.open(folder / "run" / "merged.h5") as merged:
        n_right = merged["n_correct"][:20].tolist()
        assert (summary["n_questions"], summary["n_failed"], summary["n_paths"]) == (21, 1, 80)
        assert summary["accuracy"] == sum(n_right) / 80
        assert summary["vote_accuracy"] == pytest.approx(merged["vote_correct"][:20].sum() / 21)
        assert summary["n_steps"] == sum(map(len, merged["steps"][:20]))
    for k in (1, 2, 4):
        wanted = sum(1 - math.comb(4 - n, k) / math.comb(4, k) for n in n_right) / 21
        assert summary["pass_rate"][str(k)] == pytest.approx(wanted)
    torch = pytest.importorskip("torch")
    slurmgpu("export", "run", "-o", "merged.pt", cwd=folder, expect=0)
    found = torch.load(folder / "merged.pt", weights_only=True)
    assert found["n_correct"].tolist()[:20] == n_right
    assert len(found["paths"][0]) == len(found["rewards"][0]) == 4
    about = json.loads((folder / "merged.pt.json").read_text())
    assert about["summary"] == summary
    assert about["settings"]["temperature"] == 1.6


@pytest.mark.model
def test_the_script_of_the_docs_makes_rows_for_a_trainer(collected):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "collect-paths.md").read_text()
    [script] = re.findall(r"^```python\n(# stepwise\.py\n.*?)^```$", page, re.M | re.S)
    command = [sys.executable, "-c", script, "run/merged.h5"]
    lines = subprocess.run(command, cwd=collected[0], check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 80
    assert all(len(row["completions"]) == len(row["labels"]) for row in rows)
