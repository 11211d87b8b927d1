"""The setting `scorer`: a reward model in place of a judge's rubric, and a process reward model beside rollouts."""

import json
from pathlib import Path

import numpy as np
import pytest

from slurmgpu import results
from slurmgpu.errors import SlurmGPUError
from slurmgpu.shards.columns import convert_row
from slurmgpu.workload import Item, Share, TaskContext
from slurmgpu.workloads.judge.workload import Judge
from slurmgpu.workloads.score.workload import Score
from tests.support.runs import report
from tests.support.tiny_heads import CHAT, make_head

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A Llama with one output, and a chat template."""
    return str(make_head(tmp_path_factory.mktemp("reward"), num_labels=1, template=CHAT))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A BERT of three classes."""
    labels = {"id2label": {0: "bad", 1: "good", 2: "other"}, "label2id": {"bad": 0, "good": 1, "other": 2}}
    return str(make_head(tmp_path_factory.mktemp("classifier"), "bert", **labels))


def alone(model, data, **settings):
    """The rows that `score` computes of each item by itself."""
    workload = Score(model=model, precision="fp32", **settings)
    workload.load(TaskContext("cpu", 0, Path()))
    return [workload([Item(0, each)])[0] for each in data]


def fp32(model, **settings):
    return {"model": model, "precision": "fp32", **settings}


def loaded(**settings):
    workload = Judge(**settings)
    workload.load(TaskContext("cpu", 0, Path()))
    return workload


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
    with pytest.raises(SlurmGPUError, match=r"and the scorer is shown question; expected \{text\}"):
        Judge(scorer=one, against="runs/other")
    with pytest.raises(SlurmGPUError, match="against compares one text of an item with one of another run"):
        Judge(scorer={**one, "prompt": "{text}"}, against="runs/other", each="text")
    with pytest.raises(SlurmGPUError, match='judge needs the setting "model", which follows the rubric, or "scorer"'):
        Judge()
