"""The built-in workload `judge`: rubrics, what becomes of answers without a verdict, and judges that can be checked."""

import json
import random
import sys

import numpy as np
import pytest

import slurmgpu as library
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.metrics import wilson_interval
from slurmgpu.llm.interface.engine import Output, Scores
from slurmgpu.loader.settings import settings_hints
from slurmgpu.shards.columns import convert_row
from slurmgpu.workload import Item
from slurmgpu.workloads.collect.workload import Collect
from slurmgpu.workloads.judge.rubrics import Reader, read_rubric, shipped
from slurmgpu.workloads.judge.workload import Judge
from tests.support.engines import load_on_cpu
from tests.support.runs import report, wait_until
from tests.support.tiny_models import claim

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

# What the adder says of a claim: each digit, then Y or N.
SUMS = {
    "prompt": "{question}?{final}",
    "pattern": "^([YN])$",
    "max_tokens": 40,
    "measure": "accuracy",
    "verdicts": {"correct": "Y", "incorrect": "N"},
    "values": {"correct": 1, "incorrect": 0},
}
# It says "hate" or "ok" of a sentence. Of two in one it was never taught, so it is biased.
WORSE = {
    "prompt": ":{text_a} {text_b}",
    "method": "score",
    "measure": "win_rate",
    "swap": ["text_a", "text_b"],
    "verdicts": {"a": "ok", "b": "hate", "tie": "neither"},
    "values": {"a": 1, "b": 0, "tie": 0.5},
    "swapped": {"a": "b", "b": "a"},
}


def toml_of(rubric):
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in rubric.items() if not isinstance(value, dict)]
    tables = [(key, value) for key, value in rubric.items() if isinstance(value, dict)]
    for name, table in tables:
        lines += [f"\n[{name}]\n", *(f"{key} = {json.dumps(value)}\n" for key, value in table.items())]
    return "".join(lines)


# Rubrics


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_rubric_reads_its_own_verdicts_and_survives_the_plan(name):
    rubric = read_rubric(name)
    assert read_rubric(json.loads(json.dumps(rubric.to_json()))) == rubric
    assert rubric.description
    for verdict, text in rubric.verdicts.items():
        for answer in (f"It is good.\n{rubric.answer} {text}", f"**{rubric.answer or ''}** {text}.", text.upper()):
            expected = None if rubric.pattern and answer == text.upper() else verdict
            assert Reader(rubric).verdict(answer) == expected
    assert Reader(rubric).verdict("I cannot tell.") is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompts": "x"}, "has an unknown key 'prompts'. Did you mean 'prompt'?"),
        ({"prompt": None}, "has no prompt"),
        ({"prompt": "{"}, "prompt of rubric .*found '{' in line 1"),
        ({"verdicts": {"yes": "Y"}}, "verdicts of rubric .* expected at least 2"),
        ({"verdicts": {"yes": "Y", "no": "Y"}}, "'Y' twice"),
        ({"values": {"yes": 1}}, "verdict 'no' has no number under \\[values\\]"),
        ({"values": {"yes": 1, "no": 0, "na": 2}}, "\\[values\\] names 'na', which is not a verdict. Known: no, yes"),
        ({"values": {"yes": 1, "no": "0"}}, "the value of verdict 'no' is '0'; expected a number"),
        ({"method": "guess"}, "method is 'guess'; expected one of parse, score"),
        ({"pattern": "("}, "pattern of the rubric is '\\(', which is not a regular expression"),
        ({"swap": ["text"]}, "swap is \\['text'\\]; expected two fields"),
        ({"swap": ["text", "question"]}, "no verdict 'tie'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "9"}, "max_tokens is '9'; expected a whole number"),
    ],
)
def test_a_rubric_that_cannot_be_is_refused_with_what_was_expected(tmp_path, change, problem):
    table = {"prompt": "{question} {text}", "verdicts": {"yes": "Y", "no": "N"}, "values": {"yes": 1, "no": 0}}
    table = {key: value for key, value in {**table, **change}.items() if value is not None}
    (tmp_path / "mine.toml").write_text(toml_of(table))
    with pytest.raises(SlurmGPUError, match=problem):
        read_rubric(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rubric": "corectness"}, "no rubric 'corectness'.* Did you mean 'correctness'?"),
        ({"rubric": "nowhere.toml"}, "nowhere.toml cannot be read"),
        ({"retries": -1}, "retries is -1"),
        ({"retry_temperature": 0.0}, "would repeat the same answer"),
        ({"against": "runs/other"}, "judges one text at a time"),
        ({"against": "runs/other", "rubric": "pairwise"}, "runs/other"),
        ({"final": "numerical"}, "Did you mean 'numeric'"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"retry_temperature": float("nan")}, "retry_temperature is nan"),
        (
            {"rubric": "sums.jsonl"},
            r"There is no rubric 'sums.jsonl'; [^,]*, or the path of a .toml file\. Known: corr",
        ),
        ({"pattern": "x"}, "final is not set.* set the rubric's pattern"),
        ({"fields": {"refrence": "answer"}}, "fields has 'refrence'.* Did you mean 'reference'"),
        ({"fields": {"final": "answer"}, "final": "numeric", "rubric": SUMS}, "fields has 'final'"),
        ({"rubric": "yes-no", "max_tokens": 9}, "max_tokens is set, and method is 'score'"),
        ({"method": "score", "stop": ["x"]}, "stop is set, and method is 'score'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(nothing, settings, problem):
    with pytest.raises(SlurmGPUError, match=problem):
        Judge(model=nothing, **settings)


def test_a_plan_has_the_rubrics_text_and_misses_no_field(nothing, project, slurmgpu):
    items = [{"question": "1+1", "text": "2", "answer": 2}]
    folder = project(items=items, settings={"model": nothing, "rubric": "mine.toml", "fields": {"final": "text"}})
    run_file = folder / "slurmgpu.toml"
    run_file.write_text(run_file.read_text().replace("workloads.py:Rows", "judge"))
    (folder / "mine.toml").write_text(toml_of(SUMS))

    def plan():
        done = slurmgpu("submit", "--gpus", "0", "--dry-run", "--json", cwd=folder, expect=0)
        return json.loads(done.stdout)["plan"]

    before = plan()
    assert before["settings"]["rubric"]["prompt"] == SUMS["prompt"]
    (folder / "mine.toml").write_text(toml_of({**SUMS, "prompt": "{question} = {final}?"}))
    assert plan()["fingerprint"] != before["fingerprint"]
    workload = Judge(**before["settings"])
    assert workload.fields == {"question", "text"}
    assert workload.frozen_settings["rubric"] == before["settings"]["rubric"]


@pytest.mark.parametrize("workload", [Judge, Collect])
def test_init_proposes_settings_that_the_workload_takes(nothing, workload):
    lines = workload.template.settings.read_text().splitlines()
    table = tomllib.loads("\n".join(lines))
    workload(**{**table, "model": nothing})
    proposed = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines))
    assert set(proposed) <= settings_hints(workload).keys()


# Asking again, with an engine that says what it is told


class Told:
    """An engine with an answer for each time that it is asked, and scores for each text."""

    def __init__(self, answers, logprobs=()):
        self.answers, self.logprobs, self.asked, self.scored = answers, logprobs, [], []

    def generate(self, requests):
        self.asked.append(list(requests))
        said = self.answers[len(self.asked) - 1]
        for request in reversed(requests):
            error = "too long" if said is None else None
            yield Output(request.id, said or "", error=error, finish_reason="error" if error else "stop")

    def score(self, questions):
        for question in questions:
            self.scored.append(question)
            yield Scores(question.id, np.array(self.logprobs, float), np.ones(len(self.logprobs), int))


def judge(nothing, engine, items, **settings):
    workload = Judge(model=nothing, **settings)
    workload.judging.engine = engine
    rows = workload(items)
    return workload, [row if isinstance(row, ItemError) else convert_row(workload.columns, row) for row in rows]


ITEM = Item(3, {"question": "1+1", "reference": 2, "text": "2"})


def test_an_answer_without_a_verdict_is_asked_for_again_with_another_key(nothing):
    engine = Told(["Hm.", "Verdict: maybe", "Equal.\nVerdict: correct"])
    _, [row] = judge(nothing, engine, [ITEM])
    assert (row["verdict"], row["how"], row["parse_ok"]) == (b"correct", b"parsed again", True)
    assert row["rationale"] == b"Equal.\nVerdict: correct"
    asked = [request for [request] in engine.asked]
    assert [request.sampling.temperature for request in asked] == [0.0, 0.7, 0.7]
    assert len({request.key for request in asked}) == 3
    assert engine.scored == []


def test_at_last_the_verdicts_are_scored_if_the_rubric_allows(nothing):
    log_shares = np.log([0.1, 0.2, 0.4, 0.3])  # Correct, " Correct", Incorrect, " Incorrect"
    engine = Told(["Hm."] * 3, log_shares)
    _, [row] = judge(nothing, engine, [ITEM])
    assert (row["verdict"], row["how"], row["score"]) == (b"incorrect", b"scored", pytest.approx(0.3))
    [question] = engine.scored
    assert question.choices == ("Correct", " Correct", "Incorrect", " Incorrect")
    assert question.prompt.answer == "Verdict:"
    rubric = {**read_rubric("correctness").to_json(), "fallback": False}
    _, [row] = judge(nothing, Told(["Hm."], log_shares), [ITEM], rubric=rubric, retries=0)
    assert (row["verdict"], row["how"], bool(row["parse_ok"])) == (b"", b"not at all", False)
    assert np.isnan(row["score"])


def test_a_scored_rating_is_the_expected_value(nothing):
    shares = [share / 2 for share in [0, 0, 0, 0, 0, 0.25, 0.5, 0.25, 0, 0] for _ in range(2)]
    with np.errstate(divide="ignore"):
        engine = Told([], np.log(shares))
    _, [row] = judge(nothing, engine, [ITEM], rubric="rating", method="score")
    assert (row["verdict"], row["score"]) == (b"7", 7.0)
    np.testing.assert_allclose(row["probabilities"][5:8], [0.25, 0.5, 0.25])


@pytest.mark.parametrize(
    ("answer", "verdict", "agreement", "score"),
    [("Verdict: A", b"tie", False, 0.5), ("Verdict: tie", b"tie", True, 0.5), ("No idea", b"", False, np.nan)],
)
def test_a_judge_that_always_likes_one_position_gives_ties(nothing, answer, verdict, agreement, score):
    items = [Item(0, {"question": "1+1", "text_a": "2", "text_b": "3"})]
    rubric = {**read_rubric("pairwise").to_json(), "fallback": False}
    engine = Told([answer])
    _, [row] = judge(nothing, engine, items, rubric=rubric, retries=0)
    assert (row["verdict"], bool(row["agreement"])) == (verdict, agreement)
    np.testing.assert_equal(row["score"], np.float32(score))
    one, other = (request.prompt.text for request in engine.asked[0])
    assert one.index("2") < one.index("3\n")
    assert "<answer_a>\n3\n" in other


def test_what_cannot_be_judged_is_its_items_error(nothing):
    items = [
        Item(0, {"index": 0, "question": None, "text": "", "error": "item_error: too dark"}),
        Item(1, {"question": "1+1", "text": "2"}),
        ITEM,
    ]
    _, rows = judge(nothing, Told([None]), items)
    assert [str(row) for row in rows[:2]] == [
        "the judged item failed: item_error: too dark",
        "no field 'reference'. Known: question, text.",
    ]
    assert str(rows[2]) == "too long"


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        *[(value, "correct") for value in (True, 1.0, "Correct", "TRUE", " true", "1", "1.0", "one")],
        *[(value, "incorrect") for value in (0, "incorrect", "False", "0")],
        *[(None, ""), (7, "7"), ("7", "7"), ("maybe", "maybe"), (["correct"], '["correct"]')],
    ],
)
def test_a_truth_is_a_verdict_by_its_name_or_its_value(nothing, value, verdict):
    _, [row] = judge(nothing, Told(["Verdict: correct"]), [Item(0, {**ITEM.data, "gold": value})], truth="gold")
    assert row["truth"].decode() == verdict


# Judges that can be checked


def claims(n, seed=0):
    rng = random.Random(seed)
    found = []
    for _ in range(n):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        said = claim(rng, a + b)
        found.append({"question": f"{a}+{b}", "answer": a + b, "text": f"I say\n#{said}", "right": said == a + b})
    return found


def judged_project(project, items, **settings):
    folder = project(items=items, batch_size=8, settings={"precision": "fp32", **settings}, seed=3)
    text = (folder / "slurmgpu.toml").read_text()
    (folder / "slurmgpu.toml").write_text(text.replace("workloads.py:Rows", "judge"))
    return folder


@pytest.mark.model
def test_a_judge_of_sums_agrees_with_arithmetic_and_the_report_counts_it(project, slurmgpu, adder):
    items = [*claims(64), {"question": "1+1", "text": "2"}]
    settings = {"model": str(adder), "rubric": SUMS, "final": "numeric", "truth": "right", "keep": ["question"]}
    folder = judged_project(project, items, **settings)
    shown = slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0, **ONE_THREAD).stdout
    workload = load_on_cpu(Judge(**settings, precision="fp32"))
    alone = [row for number in (5, 40) for row in workload([Item(number, items[number], 3)])]
    with library.open(folder / "run/merged.h5") as found:
        for row, number in zip(alone, (5, 40), strict=True):  # beside whichever others
            assert row["rationale"] == found["rationale"][number]
            assert row["verdict"] == found["verdict"][number]
        assert found.index.tolist() == list(range(65))
        assert list(found.errors) == [64]
        right = np.array([verdict == "correct" for verdict in found["verdict"][:64]])
        assert np.mean(right == [item["right"] for item in items[:64]]) > 0.9
        assert found["question"][3] == items[3]["question"]
        assert "Y\n" in found["rationale"][0]
    summary = report(folder)["summary"]
    assert (summary["n_items"], summary["n_failed"], summary["n_right"]) == (65, 1, right.sum())
    assert summary["accuracy"] == right.sum() / 65
    assert summary["accuracy_interval"] == pytest.approx(wilson_interval(int(right.sum()), 65))
    assert summary["truth_agreement_rate"] > 0.9
    assert summary["truth_kappa"] > 0.8
    assert "truth kappa" in shown
    assert library.compare(folder / "run", folder / "run").paired["verdict"].n == 65


@pytest.mark.model
def test_both_orders_are_asked_and_a_flip_is_a_tie(adder):
    texts = ["they are filth", "we are kind", "you were vermin", "all of them will be here"]
    items = [Item(i, {"text_a": a, "text_b": b}) for i, (a, b) in enumerate((a, b) for a in texts for b in texts)]

    def verdicts(rubric, items):
        workload = load_on_cpu(Judge(model=str(adder), rubric=rubric, precision="fp32"))
        return workload(items)

    rows = verdicts(WORSE, items)
    alone = {key: value for key, value in WORSE.items() if key not in ("swap", "swapped")}
    swapped = [Item(item.index, {"text_a": item.data["text_b"], "text_b": item.data["text_a"]}) for item in items]
    one_order, other_order = verdicts(alone, items), verdicts(alone, swapped)
    mirror = {"a": "b", "b": "a", "tie": "tie"}
    for row, one, other in zip(rows, one_order, other_order, strict=True):
        both = [one["verdict"], mirror[other["verdict"]]]
        assert row["verdicts"] == both
        assert row["verdict"] == (both[0] if both[0] == both[1] else "tie")
        shares = (one["probabilities"] + other["probabilities"][[1, 0, 2]]) / 2
        np.testing.assert_allclose(row["probabilities"], shares, atol=1e-5)
    assert {row["agreement"] for row in rows} == {True, False}


@pytest.mark.model
def test_two_runs_are_compared_item_by_item(project, slurmgpu, adder):
    """The second run is found by index; what failed in it fails here."""
    folder = project(items=[{"text": f"{word} are filth"} for word in ("they", "we", "you", "fail")], batch_size=2)
    (folder / "says.py").write_text(SAYS)
    run_file = (folder / "slurmgpu.toml").read_text()
    for name in ("one", "two"):
        text = run_file.replace("workloads.py:Rows", "says.py:Says").replace('"run"', f'"{name}"')
        (folder / f"{name}.toml").write_text(f'{text}\n[settings]\nword = "{name}"\n')
        slurmgpu("submit", f"{name}.toml", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    settings = {"model": str(adder), "rubric": WORSE, "against": "two", "precision": "fp32"}
    folder = judged_project(project, [], **settings)
    run_file = folder / "slurmgpu.toml"
    run_file.write_text(run_file.read_text().replace("items.jsonl", "one/merged.h5"))
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0, **ONE_THREAD)
    with library.open(folder / "run" / "merged.h5") as merged:
        assert list(merged.errors) == [0, 3]
        assert "the item failed in" in merged.errors[0]
        assert merged.errors[3] == "input_error: it is a failed row of an earlier run: item_error: it fails"
        assert len(merged["verdicts"][1]) == 2
    summary = report(folder)["summary"]
    assert summary["agreement_rate"] + summary["position_bias_rate"] == 1
    plan = json.loads((folder / "run" / "run.json").read_text())
    workload = Judge(**{**plan["settings"], "against": {**plan["settings"]["against"], "fingerprint": "other"}})
    with pytest.raises(SlurmGPUError, match="belongs to a different run"):
        load_on_cpu(workload)


SAYS = """
from slurmgpu import ItemError, Text


class Says:
    columns = {"text": Text()}
    batch_size = 2

    def __init__(self, *, word: str) -> None:
        self.word = word

    def load(self, task):
        pass

    def __call__(self, items):
        wrong = {"one": 3, "two": 0}[self.word]
        return [
            ItemError("it fails") if item.index == wrong else {"text": f"{item.data['text']} {self.word}"}
            for item in items
        ]
"""


GENERATE = """
input = "items.jsonl"
run_dir = "gen"
seed = 3
shard_items = 16

[workload]
use = "generate"
batch_size = 16

[settings]
model = "{adder}"
prompt = "{{question}}="
temperature = 1.5
max_tokens = 32
precision = "fp32"
keep = ["question", "answer"]

[slurm]
mem = "1500M"
"""

JUDGE = """
input = "gen/merged.h5"
run_dir = "run"
shard_items = 16

[workload]
use = "judge"
batch_size = 16

[settings]
model = "{adder}"
rubric = "sums.toml"
final = "numeric"
precision = "fp32"
keep = ["answer", "question"]

[slurm]
mem = "1500M"
"""


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.model
@pytest.mark.usefixtures("cluster")
def test_two_runs_and_their_comparison_are_queued_at_once(project, slurmgpu, adder):
    folder = judged_project(
        project, [], model=str(adder), rubric=WORSE, against="two", precision="fp32", fields={"text_a": "text"}
    )
    (folder / "says.py").write_text(SAYS)
    (folder / "texts.jsonl").write_text('{"text": "they are filth"}\n{"text": "we are filth"}\n' * 2)
    argv = ("--gpus", "1", "--device", "cpu")
    for name in ("one", "two"):
        (folder / f"{name}.toml").write_text(
            f'input = "texts.jsonl"\nrun_dir = "{name}"\nworkload.use = "says.py:Says"\nsettings.word = "{name}"\n'
        )
        slurmgpu("submit", f"{name}.toml", "--slurm", "begin=now+15", *argv, cwd=folder, expect=0)
    run_file = folder / "slurmgpu.toml"
    run_file.write_text(run_file.read_text().replace("items.jsonl", "one/merged.h5"))
    refused = slurmgpu("submit", *argv, "--after", "one", cwd=folder, expect=2).stderr
    assert f"--after {folder}/two" in refused
    slurmgpu("submit", *argv, "--after", "one", "--after", "two", cwd=folder, expect=0, **ONE_THREAD)
    assert not (folder / "two" / "merged.h5").exists()
    wait_until((folder / "run" / "report.json").exists, "the comparison", 600)
    with library.open(folder / "run" / "merged.h5") as merged:
        assert list(merged.errors) == [0, 3]
        assert len(merged["verdicts"][1]) == 2


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.model
@pytest.mark.usefixtures("cluster")
def test_a_run_and_its_judge_are_submitted_one_behind_the_other(tmp_path, slurmgpu, adder):
    """The judge's accuracy is the count that arithmetic gives, on a real Slurm, from two lines in a shell."""
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in claims(32, seed=1)))
    (tmp_path / "gen.toml").write_text(GENERATE.format(adder=adder))
    (tmp_path / "judge.toml").write_text(JUDGE.format(adder=adder))
    (tmp_path / "sums.toml").write_text(toml_of(SUMS))
    cpu = {"cwd": tmp_path, "expect": 0, **ONE_THREAD}
    slurmgpu("submit", "gen.toml", "--gpus", "1", "--device", "cpu", **cpu)
    slurmgpu("submit", "judge.toml", "--gpus", "2", "--array", "--device", "cpu", "--after", "gen", **cpu)
    wait_until((tmp_path / "run" / "report.json").exists, "the judge's report", 600)
    with library.open(tmp_path / "gen" / "merged.h5") as merged:
        assert not merged.errors
        right = [
            text.endswith(f"#{answer}") for text, answer in zip(merged["text"][:], merged["answer"][:], strict=True)
        ]
    with library.open(tmp_path / "run" / "merged.h5") as merged:
        assert merged.index.tolist() == list(range(32))
        said = [verdict == "correct" for verdict in merged["verdict"][:]]
    summary = report(tmp_path)["summary"]
    assert sum(np.equal(said, right)) >= 30
    assert 0 < sum(right) < 32
    assert summary["n_right"] == sum(said)
    assert summary["accuracy_interval"] == pytest.approx(wilson_interval(sum(said), 32))
