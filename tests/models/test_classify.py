"""The built-in workload `classify`: what it refuses, how it scores, parses and counts, and runs of a real model."""

import csv
import random

import numpy as np
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers import parsing
from slurmgpu.llm.interface.engine import Output, Scores
from slurmgpu.shards.columns import convert_row
from slurmgpu.workload import Item, Share
from slurmgpu.workloads.classify.workload import Classify
from tests.support.engines import load_on_cpu
from tests.support.runs import report
from tests.support.tiny_models import sentence

LABELS = ["hate", "ok"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"labels": ["hate"]}, "labels has 1: ['hate']; expected at least 2."),
        ({"labels": ["ok", "ok"]}, "labels holds 'ok' twice"),
        ({"labels": {"ok": "fine", "": "?"}}, "labels holds ''; expected a text to choose."),
        ({"prompt": None}, "neither is set"),
        ({"prompt": "Which of {labels}?"}, "has no field"),
        ({"choices": ["A"]}, "choices has 1 texts for 2 labels; expected one for each."),
        ({"choices": ["A", "A"]}, "choices holds 'A' twice"),
        ({"choices": "answers", "method": "parse"}, "choices names a field, and method is 'parse'"),
        ({"choices": "answers", "calibrate": True}, "calibrate scores the prompt without an item, but choices names"),
        ({"choices": "answers", "prompt": "{text} {labels}"}, "The prompt has {labels}, which are the same"),
        ({"pattern": "(.*)"}, "pattern is set, and method is 'score'"),
        ({"temperature": 1.0}, "temperature is set, and method is 'score'"),
        ({"method": "parse", "calibrate": True}, "calibrate is set, and method is 'parse'"),
        ({"method": "parse", "pattern": "(a)(b)"}, "pattern is '(a)(b)', which has 2 groups"),
        ({"method": "parse", "pattern": "(.*)", "json": "label"}, "two ways to find the label"),
        ({"prompt": None, "messages": "chat", "calibrate": True}, "Set it to a template"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(nothing, settings, said):
    with pytest.raises(SlurmGPUError) as raised:
        Classify(**{"model": nothing, "labels": LABELS, "prompt": "{text}", **settings})
    assert said in str(raised.value)


def test_planning_knows_which_fields_are_taken(nothing):
    workload = Classify(model=nothing, labels=LABELS, prompt="{labels}: {text}", truth="gold", group="who", keep=["id"])
    assert (workload.fields, workload.kept_fields) == ({"text", "gold", "who"}, ("id",))


def test_an_item_without_a_field_is_told_of_its_own_fields_alone(nothing):
    workload = Classify(model=nothing, labels=LABELS, prompt="{labels}: {text}")
    [row] = workload([Item(0, {"body": "x", "source": "y"})])
    assert str(row) == "no field 'text'. Known: body, source."


# Scores


class Table:
    """An engine that looks scores and answers up: by prompt, then by choice."""

    def __init__(self, found):
        self.found, self.asked = found, []

    def score(self, questions):
        for question in questions:
            self.asked.append(question)
            found = self.found[question.prompt.text]
            values = np.array([found.get(choice, -np.inf) for choice in question.choices])
            n_tokens = np.array([max(1, len(choice.split())) for choice in question.choices])
            error = found.get("error")
            yield Scores(question.id, values, n_tokens, error)

    def generate(self, requests):
        for request in requests:
            yield Output(request.id, self.found[request.prompt.text], finish_reason="stop")


def scored(nothing, found, texts=("x",), **settings):
    workload = Classify(**{"model": nothing, "labels": ["a", "b c"], "prompt": "{text}", **settings})
    workload.engine = Table(found)
    rows = workload([Item(i, {"text": text}) for i, text in enumerate(texts)])
    return workload, rows


def test_scores_are_the_labels_probabilities_beside_each_other(nothing):
    workload, [row] = scored(nothing, {"x": {"a": np.log(0.1), " a": np.log(0.2), "b c": np.log(0.1)}})
    assert workload.engine.asked[0].choices == ("a", " a", "b c", " b c")
    assert convert_row(workload.columns, row)["label"] == b"a"
    assert row["scores"] == pytest.approx([0.75, 0.25])  # with a space and without are one label
    assert row["margin"] == pytest.approx(0.5)
    assert row["parse_ok"] is True


def test_choices_are_scored_as_they_stand(nothing):
    workload, [row] = scored(nothing, {"x": {"A": np.log(0.2), "B": np.log(0.6)}}, choices=["A", "B"])
    assert workload.engine.asked[0].choices == ("A", "B")
    assert (row["label"], row["scores"].tolist()) == ("b c", pytest.approx([0.25, 0.75]))


def test_length_normalized_scores_are_means_over_a_labels_tokens(nothing):
    found = {"x": {"a": -2.0, "b c": -3.0}}
    assert scored(nothing, found)[1][0]["label"] == "a"
    [row] = scored(nothing, found, length_normalize=True)[1]
    assert row["label"] == "b c"
    assert row["scores"] == pytest.approx(np.exp([-2, -1.5]) / np.exp([-2, -1.5]).sum())


def test_an_item_without_scores_is_an_error_and_its_neighbours_are_not(nothing):
    found = {"x": {"error": "too long"}, "y": {}, "z": {"a": -1.0}}
    _, rows = scored(nothing, found, ["x", "y", "z"])
    assert [isinstance(row, ItemError) for row in rows] == [True, True, False]
    assert "not finite" in str(rows[1])
    assert rows[2]["scores"].tolist() == [1, 0]


# Parsing


@pytest.mark.parametrize(
    ("settings", "answer", "label"),
    [
        ({}, "Hate.", "hate"),
        ({}, "ok? No: hate!\n\nLabel: ok", "ok"),
        ({}, "ok or hate", ""),
        ({"pattern": r"Label: (.*)"}, "Label: hate\nLabel: ok, I say", "ok"),
        ({"pattern": r"Label: (.*)"}, "hate", ""),
        ({"json": "label"}, '```json\n{"label": "OK", "why": "hate"}\n```', "ok"),
        ({"json": "label"}, '{"label": null}', ""),
        ({"json": "label"}, "ok", ""),
    ],
)
def test_a_label_is_read_from_an_answer_or_the_answer_is_not_ok(nothing, settings, answer, label):
    workload, [row] = scored(nothing, {"x": answer}, labels=LABELS, method="parse", **settings)
    assert convert_row(workload.columns, row).keys() == {"label", "raw", "finish_reason", "parse_ok"}
    assert (row["label"], row["raw"], row["parse_ok"]) == (label, answer, bool(label))


def test_a_pattern_that_never_ends_is_the_error_of_its_item_alone(nothing, monkeypatch):
    monkeypatch.setattr(parsing, "TIME_LIMIT_S", 0.1)
    settings = {"method": "parse", "labels": ["a", "b"], "pattern": "(?:a+)+b"}
    _, rows = scored(nothing, {"x": "a" * 5000, "y": "b\nab"}, ["x", "y"], **settings)
    assert str(rows[0]).startswith("pattern '(?:a+)+b' took more than 0.1 s")
    assert not isinstance(rows[1], ItemError)


def test_truth_and_group_come_from_the_item(nothing):
    workload = Classify(model=nothing, labels=["0", "1"], prompt="{x}", truth="y", group="g")
    workload.engine = Table({"x": {"0": -1.0, "1": -2.0}})
    items = [{"y": 1, "g": True}, {"y": None, "g": None}, {"g": "g"}]
    rows = workload([Item(i, {"x": "x", **item}) for i, item in enumerate(items)])
    assert [(row["truth"], row["group"]) for row in rows[:2]] == [("1", "true"), ("", "")]
    assert str(rows[2]).startswith("no field 'y'.")


@pytest.mark.parametrize(
    ("labels", "truth", "label"),
    [
        *[(["0", "1"], truth, "1") for truth in (1, 1.0, "1.0", "one")],
        (["100", "1000"], "1,000", "1000"),
        (["ok", "hate"], "Hate", "hate"),
        *[(["0", "1"], truth, str(truth)) for truth in (1.5, 7, "100%")],
        (["1", "1.0"], "1.0", "1.0"),
    ],
)
def test_a_truth_in_another_writing_is_the_label(nothing, labels, truth, label):
    workload = Classify(model=nothing, labels=labels, prompt="{x}", truth="y")
    workload.engine = Table({"x": dict.fromkeys(labels, -1.0)})
    assert workload([Item(0, {"x": "x", "y": truth})])[0]["truth"] == label


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("1.0", "1"),
        ("It is 1.0.", "1"),
        ("It is 1.5.", None),
        ("Of 3.5 it gets a 3", "3"),
        ("1\n1.5", None),
        ("Three", "3"),
    ],
)
def test_labels_that_are_numbers_are_read_as_numbers(answer, label):
    assert parsing.Labels(["1", "3", "5"]).within(answer) == label


# What a model that has learnt two labels says


def sentences(n, seed=0):
    rng = random.Random(seed)
    found = [sentence(rng) for _ in range(n)]
    return [{"id": i, "text": text, "gold": label, "who": text.split()[0]} for i, (text, label) in enumerate(found)]


def loaded(adder, **settings):
    return load_on_cpu(
        Classify(**{"model": str(adder), "labels": LABELS, "prompt": ":{text}", "precision": "fp32", **settings})
    )


@pytest.mark.model
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"calibrate": True},
        {"length_normalize": True},
        {"choices": ["hate", "ok"]},
        {"method": "parse", "max_tokens": 8},
    ],
    ids=str,
)
def test_a_model_that_has_learnt_labels_gives_them(adder, settings):
    data = sentences(48)
    rows = loaded(adder, **settings)([Item(i, each) for i, each in enumerate(data)])
    assert np.mean([row["label"] == each["gold"] for row, each in zip(rows, data, strict=True)]) > 0.9
    if "method" not in settings:
        assert np.sum([row["scores"] for row in rows], axis=1) == pytest.approx(1)
        assert all(row["margin"] == pytest.approx(abs(np.diff(row["scores"])[0])) for row in rows)


@pytest.mark.model
def test_a_label_that_begins_with_another_can_win(adder):
    """The adder answers "hate", which begins with "ha": with both as labels it must be the one that it says."""
    for settings in ({}, {"calibrate": True}, {"length_normalize": True}):
        [row] = loaded(adder, labels=["ha", "hate", "ok"], **settings)([Item(0, {"text": "they are filth"})])
        assert (row["label"], bool(row["scores"][1] > row["scores"][0])) == ("hate", True)


@pytest.mark.model
@pytest.mark.parametrize("settings", [{}, {"length_normalize": True}])
def test_an_item_may_have_choices_of_its_own_and_fewer_than_there_are_labels(adder, settings):
    [named] = loaded(adder, **settings)([Item(0, {"text": "they are filth"})])
    workload = loaded(adder, labels=["0", "1", "2"], choices="answers", truth="gold", **settings)
    assert "answers" in workload.fields
    lists = [
        ["hate", "ok"],
        ["ok", "hate"],
        ["ok", "hate", "wool"],
        ["hate"],
        ["a", "b", "c", "d"],
        "hate",
        None,
        ["ok", None],
    ]
    items = [Item(i, {"text": "they are filth", "answers": given, "gold": 1}) for i, given in enumerate(lists)]
    first, second, third, *wrong = workload(items)
    assert (first["label"], second["label"], third["label"], second["truth"]) == ("0", "1", "1", "1")
    assert first["scores"] == pytest.approx([*named["scores"], 0], rel=1e-4)
    assert second["scores"] == pytest.approx([*named["scores"][::-1], 0], rel=1e-4)
    assert third["scores"][2] > 0
    for row, given in zip(wrong, lists[3:], strict=True):
        said = f"the field 'answers' is {given!r}; expected a list of 2 to 3 texts, at most one for each label"
        assert str(row) == said
    [beyond] = workload([Item(0, {"text": "they are filth", "answers": ["hate", "ok"], "gold": 2})])
    assert str(beyond) == "the truth '2' is beyond the item's 2 choices"


@pytest.mark.model
def test_calibration_takes_away_what_the_model_says_to_no_item(adder):
    plain, calibrated = loaded(adder), loaded(adder, calibrate=True)
    items = [Item(i, each) for i, each in enumerate(sentences(4))]
    [empty] = plain([Item(0, {"text": "N/A"})])
    for before, after in zip(plain(items), calibrated(items), strict=True):
        weighed = before["scores"] / empty["scores"]
        assert after["scores"] == pytest.approx(weighed / weighed.sum(), rel=1e-3)
    [nothing_said] = calibrated([Item(0, {"text": "N/A"})])
    assert nothing_said["scores"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.model
def test_a_run_with_true_labels_reports_metrics(project, slurmgpu, adder):
    items = sentences(40)
    items[3]["gold"], items[4]["gold"] = "spam", None
    del items[5]["text"]
    settings = {"model": str(adder), "prompt": ":{text}", "precision": "fp32", "labels": LABELS}
    settings |= {"truth": "gold", "group": "who", "keep": ["id"]}
    folder = project(items=items, batch_size=8, settings=settings)
    text = (folder / "slurmgpu.toml").read_text()
    (folder / "slurmgpu.toml").write_text(text.replace("workloads.py:Rows", "classify"))
    shown = slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0, **ONE_THREAD).stdout
    slurmgpu("export", "run", "--format", "csv", "-o", "out.csv", cwd=folder, expect=0)
    rows = list(csv.DictReader((folder / "out.csv").open()))
    right = sum(row["label"] == row["truth"] for row in rows if not row["error"])
    summary = report(folder)["summary"]
    assert (summary["n_failed"], summary["n_unknown_truth"], summary["n_without_truth"]) == (1, 1, 1)
    assert summary["unknown_truths"] == {"spam": 1}
    assert summary["accuracy"] == right / 38  # the failed one is wrong; the other two have no truth to be told by
    assert summary["accuracy_interval"][0] < summary["accuracy"] < summary["accuracy_interval"][1]
    assert sum(summary["labels"].values()) == 39
    assert sum(sum(row.values()) for row in summary["confusion"].values()) == 37
    assert sum(group["n"] for group in summary["by_group"].values()) == 37
    assert summary["by_group"].keys() == {row["group"] for row in rows if not row["error"]}
    assert summary["label_by_group"].keys() == set(LABELS)

    lines = [line.split() for line in shown.splitlines()]
    confusion = lines.index(["confusion", "hate", "ok", "(none)"])
    assert lines[confusion + 1] == ["hate", *map(str, summary["confusion"]["hate"].values())]
    assert ["accuracy", f"{summary['accuracy']:.1%}"] in lines


@pytest.mark.parametrize("prompt", ["{labels}: {text}", "{text}"])
def test_a_plan_says_that_no_prompt_shows_the_descriptions_of_labels(nothing, prompt):
    described, names = {"hate": "attacks people", "ok": "anything else"}, {"hate": "", "ok": ""}
    lines = Classify(model=nothing, labels=described, prompt=prompt).place(Share(0)).lines
    assert ("does not see the labels' descriptions" in lines[-1]) == ("{labels}" not in prompt)
    for labels in (names, list(names)):
        lines = Classify(model=nothing, labels=labels, prompt=prompt).place(Share(0)).lines
        assert "descriptions" not in lines[-1]
