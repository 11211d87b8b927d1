"""The setting `scorer`: a reward model in place of a judge's rubric, and a process reward model beside rollouts."""

import json
from pathlib import Path

import numpy as np
import pytest

from slurmgpu import results
from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.answers.metrics import wilson_interval
from slurmgpu.llm.heads.engine import HeadEngine
from slurmgpu.llm.interface.engine import HeadMemory, Output
from slurmgpu.llm.vllm_engine.limits import memory_share
from slurmgpu.shards.columns import convert_row
from slurmgpu.workload import Item, Share
from slurmgpu.workloads.collect.workload import Collect
from slurmgpu.workloads.judge.workload import Judge
from slurmgpu.workloads.score.workload import Score
from tests.support.engines import load_on_cpu
from tests.support.runs import report
from tests.support.tiny_heads import CHAT, make_head

pytestmark = pytest.mark.usefixtures("one_thread")


def alone(model, data, **settings):
    """The rows that `score` computes of each item by itself."""
    workload = load_on_cpu(Score(model=model, precision="fp32", **settings))
    return [workload([Item(0, each)])[0] for each in data]


def fp32(model, **settings):
    return {"model": model, "precision": "fp32", **settings}


def loaded(**settings):
    return load_on_cpu(Judge(**settings))


# A judge by a reward model.


def test_a_reward_model_judges_each_text_as_score_does_and_the_report_compares_the_choices(
    slurmgpu, tmp_path, reward_model
):
    texts = [["it is 7", "so 8", "hm"], ["8", "8", "7"], "no list"]
    items = [{"asked": "3+4", "text": text, "answer": "7"} for text in texts]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(each) + "\n" for each in items))
    (tmp_path / "best.toml").write_text(
        'input = "items.jsonl"\nrun_dir = "run"\nworkload.use = "judge"\n[settings]\neach = "text"\n'
        'fields = {question = "asked"}\nfinal = "numeric"\nreference = "answer"\n'
        f'scorer = {{model = "{reward_model}", precision = "fp32"}}\n'
        '[resources]\ngpus = 0\nexecutor = "debug"\n'
    )
    slurmgpu("submit", "best.toml", cwd=tmp_path, expect=0)
    parts = [{"question": "3+4", "text": text} for item in items[:2] for text in item["text"]]
    expected = [row["score"] for row in alone(reward_model, parts, prompt="{question}", answer="{text}")]
    with results.open(tmp_path / "run" / "merged.h5") as merged:
        assert merged.failed.tolist() == [False, False, True]
        found = np.concatenate([merged["score"][row] for row in range(2)])
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.ptp(found) > 0.1
        assert list(merged["best"][:2]) == [int(np.argmax(expected[:3])), int(np.argmax(expected[3:]))]
        best = [bool(each) for each in merged["best_correct"][:2]]
    plan = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["scorer"]
    assert (plan["labels"], plan["activation"]) == (["LABEL_0"], "none")
    assert "model.safetensors" in plan["model_files"]
    summary = report(tmp_path)["summary"]
    assert (summary["n_items"], summary["n_failed"], summary["n_texts"]) == (3, 1, 6)
    assert summary["best_accuracy"] == pytest.approx(sum(best) / 3)
    assert summary["vote_accuracy"] == pytest.approx(1 / 3)
    assert summary["mean_score"] == pytest.approx(np.mean(expected), abs=1e-4)


def test_two_runs_are_compared_by_their_rewards_and_the_report_has_the_win_rate(slurmgpu, tmp_path, reward_model):
    ours, theirs = ["it is 7", "so 8", "same", None], ["hm, 9?", "we are kind", "same", "here"]

    def run_of(name, texts):
        """A run whose rows are its items, of which one fails."""
        (tmp_path / "items.jsonl").write_text("".join(json.dumps({"question": "3+4"}) + "\n" for _ in texts))
        (tmp_path / f"{name}.py").write_text(
            "from slurmgpu.errors import ItemError\nfrom slurmgpu.shards.columns import Text\n"
            f"SAID = {texts!r}\n\n\nclass Says:\n    columns = {{'text': Text()}}\n    batch_size = 4\n\n"
            "    def __call__(self, items):\n"
            "        return [{'text': SAID[i.index]} if SAID[i.index] else ItemError('dark') for i in items]\n"
        )
        (tmp_path / f"{name}.toml").write_text(
            f'input = "items.jsonl"\nrun_dir = "{name}"\nkeep = ["question"]\nworkload.use = "{name}.py:Says"\n'
            '[resources]\ngpus = 0\nexecutor = "debug"\n'
        )
        slurmgpu("submit", f"{name}.toml", cwd=tmp_path)

    run_of("ours", ours)
    run_of("theirs", theirs)
    (tmp_path / "judge.toml").write_text(
        'input = "ours/merged.h5"\nrun_dir = "run"\nworkload.use = "judge"\n[settings]\nagainst = "theirs"\n'
        f'scorer = {{model = "{reward_model}", precision = "fp32"}}\n[resources]\ngpus = 0\nexecutor = "debug"\n'
    )
    slurmgpu("submit", "judge.toml", cwd=tmp_path)
    first, second = (
        [row["score"] for row in alone(reward_model, data, prompt="{q}", answer="{t}")]
        for data in ([{"q": "3+4", "t": text} for text in texts[:3]] for texts in (ours, theirs))
    )
    verdicts = ["tie" if a == b else "a" if a > b else "b" for a, b in zip(first, second, strict=True)]
    assert len({*verdicts}) > 1
    with results.open(tmp_path / "run" / "merged.h5") as merged:
        assert list(merged["verdict"][:3]) == verdicts
        np.testing.assert_allclose(merged["score"][:3], first, atol=1e-4)
        np.testing.assert_allclose(merged["score_b"][:3], second, atol=1e-4)
        assert merged.failed.tolist() == [False] * 3 + [True]
    summary = report(tmp_path)["summary"]
    won = verdicts.count("a") + verdicts.count("tie") / 2
    assert (summary["win_rate"], summary["scored_win_rate"]) == pytest.approx((won / 4, won / 3))
    assert summary["win_rate_interval"] == pytest.approx(wilson_interval(won, 4))
    assert summary["scored_win_rate_interval"] == pytest.approx(wilson_interval(won, 3))
    assert summary["verdicts"] == {name: verdicts.count(name) for name in ("a", "b", "tie")}
    assert summary["mean_score_b"] == pytest.approx(np.mean(second), abs=1e-4)


def test_a_classifiers_label_and_a_reranker_judge_as_well(classifier, tmp_path):
    [row] = loaded(scorer=fp32(classifier, prompt="{text}", positive="good"))([Item(0, {"text": "they are kind"})])
    [expected] = alone(classifier, [{"text": "they are kind"}], prompt="{text}", positive="good")
    assert row["label"] == expected["label"]
    assert row["score"] == pytest.approx(expected["score"])
    reranker = str(make_head(tmp_path, "bert", num_labels=1))
    data = [{"question": "who?", "text": text} for text in ("we are here", "a")]
    judge = loaded(scorer=fp32(reranker, pair=["{question}", "{text}"]))
    expected = alone(reranker, data, pair=["{question}", "{text}"])
    rows = judge([Item(number, each) for number, each in enumerate(data)])
    assert [row["score"] for row in rows] == pytest.approx([row["score"] for row in expected], abs=1e-4)


def test_a_process_reward_model_judges_the_paths_of_collect(tmp_path):
    model = str(make_head(tmp_path, task="TokenClassification", template=CHAT))
    paths = [{"text": "7\n8", "steps": ["7", "8"], "correct": True}, {"text": "a", "steps": ["a"], "correct": False}]
    item = {"question": "3+4", "paths": paths, "weights": [0.5, 0.5]}
    judge = loaded(scorer=fp32(model, steps="steps"), each="paths", final="exact")
    assert judge.fields == {"question", "paths"}
    [row] = judge([Item(0, item)])
    convert_row(judge.columns, row)
    data = [{"question": "3+4", "steps": path["steps"]} for path in paths]
    expected = alone(model, data, prompt="{question}", steps="steps")
    np.testing.assert_allclose(row["score"], [each["score"] for each in expected], atol=1e-5)
    for found, each in zip(row["step_scores"], expected, strict=True):
        np.testing.assert_allclose(found, each["step_scores"], atol=1e-5)
    assert row["best_correct"] == row["correct"][int(np.argmax(row["score"]))]


def test_a_judge_by_scores_is_planned_as_score_is_and_its_merge_needs_no_model(reward_model):
    judge = Judge(scorer=reward_model)
    assert judge.fields == {"question", "text"}
    assert "On one GPU of 10.0 GB" in judge.place(Share(1, gpu_memory=10**10)).lines[1]
    with pytest.raises(SlurmGPUError, match="That does not fit one GPU of"):
        judge.place(Share(1, gpu_memory=1_500_000_000))
    frozen = judge.frozen_settings
    gone = Judge(**{**frozen, "scorer": {**frozen["scorer"], "model": "/gone"}})
    assert gone.columns == judge.columns
    assert Path(reward_model) in {path if path.is_dir() else path.parent for path in judge.paths}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rubric": "rating"}, "scorer and rubric are both set; a scorer is a model with a trained head"),
        ({"model": "x"}, "scorer and model are both set; .* Remove model, or scorer."),
        ({"precision": "fp32"}, r'Put it into the table: scorer = \{model = "…", precision = …\}.'),
        ({"max_tokens": 4}, "Remove max_tokens, or scorer."),
        ({"truth": "gold"}, "scorer and truth are both set"),
        ({"scorer": {"step_end": "x"}}, "scorer has no model; expected"),
        ({"scorer": {"model": "x", "path_bye": "min"}}, "scorer has no setting 'path_bye'. Did you mean 'path_by'"),
        ({"fields": {"txt": "a"}}, "fields has 'txt', which is not in the templates of the scorer"),
        ({"reference": "answer"}, "and each is not set"),
    ],
)
def test_what_does_not_go_with_a_scorer_is_refused(reward_model, settings, said):
    with pytest.raises(SlurmGPUError, match=said):
        Judge(**{"scorer": reward_model, **settings})


def test_a_classifier_without_a_positive_label_and_a_comparison_without_texts_are_refused(classifier, tmp_path):
    with pytest.raises(SlurmGPUError, match="scorer: the model has a score for each of bad, good, other; set positive"):
        Judge(scorer=classifier)
    one = {"model": classifier, "positive": "good", "prompt": "{question}"}
    with pytest.raises(SlurmGPUError, match=r"but the scorer sees question; expected \{text\}"):
        Judge(scorer=one, against="runs/other")
    with pytest.raises(SlurmGPUError, match="against compares one text of each item with one of another run"):
        Judge(scorer={**one, "prompt": "{text}"}, against="runs/other", each="text")
    with pytest.raises(SlurmGPUError, match='judge needs the setting "model", which follows the rubric, or "scorer"'):
        Judge()


# Paths of collect by a process reward model.


@pytest.fixture(scope="module")
def process_model(tmp_path_factory):
    """A Llama with two classes for each token."""
    return str(make_head(tmp_path_factory.mktemp("process"), task="TokenClassification"))


SAMPLED = {"prompt": "{question}=", "temperature": 1.6, "max_tokens": 40, "precision": "fp32", "paths": 4}
SUMS = [{"question": "47+85", "answer": 132}, {"question": "12+34", "answer": 46}, {"question": "90+19", "answer": 109}]


def collecting(adder, **settings):
    return load_on_cpu(Collect(model=str(adder), **{**SAMPLED, **settings}))


def sums(workload, data=SUMS):
    rows = workload([Item(number, each, 5) for number, each in enumerate(data)])
    for row in rows:
        convert_row(workload.columns, row)
    return rows


@pytest.mark.model
@pytest.mark.parametrize("shape", [{}, {"rollouts": 2}, {"paths": None, "tree": [3, 2]}])
def test_each_step_of_each_path_has_the_process_reward_models_score(adder, process_model, shape):
    workload = collecting(adder, scorer=fp32(process_model, activation="none"), **shape)
    rows = sums(workload)
    assert {bool(row["n_rollouts"]) for row in rows} == {"rollouts" in shape}
    every = [(row, number, path) for row in rows for number, path in enumerate(row["paths"])]
    data = [
        {"q": item["question"], "s": path["steps"]}
        for row, item in zip(rows, SUMS, strict=True)
        for path in row["paths"]
    ]
    expected = alone(process_model, data, prompt="{q}=", steps="s", activation="none")
    for (row, number, path), wanted in zip(every, expected, strict=True):
        assert row["scores"][number] == pytest.approx(wanted["score"], abs=1e-4)
        np.testing.assert_allclose(
            [row["step_scores"][node] for node in path["nodes"]], wanted["step_scores"], atol=1e-4
        )
    assert np.ptp(np.concatenate([row["scores"] for row in rows])) > 0.1
    for row in rows:
        assert row["best"] == int(np.argmax(row["scores"]))
        assert row["best_correct"] == row["paths"][row["best"]]["correct"]
        votes = {}
        for path, weight, score in zip(row["paths"], row["weights"], row["scores"], strict=True):
            if path["answer"] is not None and not path["cut"]:
                votes[path["answer"]] = votes.get(path["answer"], 0) + weight * np.exp(score)  # raw scores
        assert row["weighted_vote"] == max(votes, key=votes.get)


@pytest.mark.model
def test_a_path_that_the_scorer_cannot_read_costs_its_score_alone(adder, process_model):
    wild = {"temperature": 3.0, "paths": 12}
    [whole] = sums(collecting(adder, scorer=fp32(process_model), **wild), SUMS[:1])
    shown = [len("47+85=") + len(path["text"]) + 2 for path in whole["paths"]]  # the beginning, and the last step's end
    assert whole["unscored"] == [None] * 12
    assert len({*shown}) > 1
    [row] = sums(collecting(adder, scorer=fp32(process_model, max_context=max(shown) - 1), **wild), SUMS[:1])
    lost = [number for number, said in enumerate(row["unscored"]) if said is not None]
    assert lost == [number for number, length in enumerate(shown) if length == max(shown)]
    assert "the model takes at most" in row["unscored"][lost[0]]
    assert [number for number, score in enumerate(row["scores"]) if np.isnan(score)] == lost
    assert row["best"] not in lost
    assert [path["text"] for path in row["paths"]] == [path["text"] for path in whole["paths"]]


@pytest.mark.model
def test_a_run_with_a_scorer_reports_its_choices_and_its_plan_has_both_models(slurmgpu, tmp_path, adder, process_model):
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*SUMS, {"question": "1+1"}]))
    (tmp_path / "collect.toml").write_text(
        'input = "items.jsonl"\nrun_dir = "run"\nseed = 5\nworkload.use = "collect"\n[settings]\n'
        f'model = "{adder}"\nprompt = "{{question}}="\ntemperature = 1.6\nmax_tokens = 40\nprecision = "fp32"\n'
        "paths = 4\n"
        f'scorer = {{model = "{process_model}", precision = "fp32"}}\n[resources]\ngpus = 0\nexecutor = "debug"\n'
    )
    said = slurmgpu("submit", "collect.toml", "--dry-run", cwd=tmp_path, expect=0).stdout
    assert "scores steps on the same CPUs" in said
    slurmgpu("submit", "collect.toml", cwd=tmp_path)
    with results.open(tmp_path / "run" / "merged.h5") as merged:
        assert merged.failed.tolist() == [False] * 3 + [True]
        scores = np.concatenate([merged["scores"][row] for row in range(3)])
        best = int(merged["best_correct"][:3].sum())
    summary = report(tmp_path)["summary"]
    assert summary["n_unscored"] == 0
    assert summary["best_accuracy"] == pytest.approx(best / 4)
    assert summary["mean_score"] == pytest.approx(scores.mean(), abs=1e-5)
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["model_files"].keys() >= {"model.safetensors"}
    assert settings["scorer"]["model_files"].keys() >= {"model.safetensors"}
    assert settings["scorer"]["labels"] == ["LABEL_0", "LABEL_1"]
    Collect(**{**settings, "model": "/gone", "scorer": {**settings["scorer"], "model": "/gone"}})  # as a merge does


def test_both_models_must_fit_the_gpus_that_they_share(adder, process_model):
    room = 1_633_000_000  # of which the reserve takes nearly all
    Collect(model=str(adder), batch_tokens=64, **SAMPLED).place(Share(1, gpu_memory=room))
    both = Collect(model=str(adder), batch_tokens=64, scorer=process_model, **SAMPLED)
    with pytest.raises(
        SlurmGPUError, match=rf"of weights and .* of cache, and .* of {process_model}, and .* can be used"
    ):
        both.place(Share(1, gpu_memory=room))
    lines = both.place(Share(1, gpu_memory=10**10)).lines
    assert any(f"of {process_model}, of the" in line for line in lines)
    assert any("scores steps on the same GPUs, in the same process" in line for line in lines)
    with pytest.raises(SlurmGPUError, match=f"{process_model} runs in the same process"):
        both.place(Share(2, gpu_memory=10**10, processes="per-gpu"))
    assert both.place(Share(2, gpu_memory=10**10)).processes == "one"


def test_vllm_and_servers_leave_room_for_the_scorer(adder, process_model):
    other = HeadMemory("prm", weights=14e9, batch=1e9, layers=28)
    assert memory_share(other, 1, 80 * 10**9) == pytest.approx(0.92 - 16.5 / 80)
    assert other.on_each(4) == pytest.approx(14e9 * (1 / 4 + 1 / 28) + 1e9)
    settings = {"prompt": "{question}=", "scorer": process_model, "engine": "server", "chat": False}
    own = Collect(model=str(adder), serve=["serve", "{model}", "{port}"], **settings)
    assert (
        "The server started by serve uses the same GPUs: it must leave"
        in own.place(Share(1, gpu_memory=10**10)).lines[-1]
    )
    with pytest.raises(SlurmGPUError, match="That does not fit one GPU of"):
        own.place(Share(1, gpu_memory=1_500_000_000))
    far = Collect(model="name", url="http://host:8000", **settings)
    assert "On one GPU of 10.0 GB" in far.place(Share(1, gpu_memory=10**10)).lines[2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scorer": {"model": "{reward}"}}, "scorer: model .* it scores texts, not steps"),
        (
            {"scorer": {"model": "{prm}", "steps": "x"}},
            "scorer has steps, but it always scores the steps of the paths",
        ),
        ({"prompt": None, "messages": "chat", "last": "continue"}, 'last is "continue", so each path begins'),
        (
            {"scorer": {"model": "{prm}", "engine": "vllm"}},
            "scorer: engine is 'vllm'; score only runs with transformers",
        ),
    ],
)
def test_what_no_scorer_of_paths_can_do_is_refused(adder, process_model, reward_model, settings, said):
    scorer = settings.pop("scorer", {"model": "{prm}"})
    named = scorer["model"].format(prm=process_model, reward=reward_model)
    with pytest.raises(SlurmGPUError, match=said):
        Collect(**{**SAMPLED, "model": str(adder), "scorer": {**scorer, "model": named}, **settings})


@pytest.mark.parametrize("engine", ["server", "transformers"])
def test_a_scorer_computes_beside_any_engine_and_leaves_transformers_the_memory_to_measure(
    adder, process_model, monkeypatch, engine
):
    order = []

    class Says:
        """An engine that gives each question two paths."""

        def __init__(self):
            order.append("engine")

        def generate(self, requests):
            for request in requests:
                yield Output(request.id, "7+5=12\n132" if request.id % 2 else "it is 3", finish_reason="stop")

    load = HeadEngine.__init__
    monkeypatch.setattr("slurmgpu.workloads.language_model.open_engine", lambda options, where: Says())
    monkeypatch.setattr(HeadEngine, "__init__", lambda *given, **more: order.append("scorer") or load(*given, **more))
    where = {"server": {"model": "name", "url": "http://host:8000"}, "transformers": {"model": str(adder)}}[engine]
    settings = {"prompt": "{question}", "paths": 2, "engine": engine, "scorer": fp32(process_model)}
    workload = load_on_cpu(Collect(**where, **settings))
    assert order == (["scorer", "engine"] if engine == "transformers" else ["engine", "scorer"])
    [row] = sums(workload, SUMS[:1])
    expected = alone(
        process_model, [{"q": "47+85", "s": s} for s in ("it is 3", "7+5=12\n132")], prompt="{q}", steps="s"
    )
    np.testing.assert_allclose(row["scores"], [each["score"] for each in expected], atol=1e-5)


def test_a_model_with_a_head_that_is_set_as_the_judges_model_is_told_scorer(reward_model, tmp_path):
    said = "does not generate text; .* or judge with scorer instead of model"
    with pytest.raises(SlurmGPUError, match=said):
        Judge(model=reward_model).place(Share(0))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForProcessRewardModel"]})
    )
    with pytest.raises(SlurmGPUError, match=said):
        Judge(model=str(tmp_path)).place(Share(0))
