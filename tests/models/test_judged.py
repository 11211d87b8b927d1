"""What a judge is given: one text of each item; anything else is refused when it is planned, or is its item's error."""

import json

import pytest

from slurmgpu import results
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.plan.planner import draft_run
from slurmgpu.shards.columns import Array, Json, Text, columns_to_json, convert_row
from slurmgpu.workload import Item
from slurmgpu.workloads.judge.rubrics import read_rubric
from slurmgpu.workloads.judge.verdicts import summarize
from slurmgpu.workloads.judge.workload import Judge
from tests.support.shard_files import join_parts, write
from tests.support.tiny_models import make_unloadable

COLUMNS = {"text": Json(), "question": Json(), "reference": Json()}
QUESTION = {"question": "1+1", "reference": "2"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_unloadable(tmp_path_factory.mktemp("model")))


def run_of(folder, text, keep=("question", "reference")):
    """A run directory: its plan, and a merged file with one failed row and one that says `text`."""
    folder.mkdir()
    rows = [ItemError("too dark"), convert_row(COLUMNS, {"text": text, **QUESTION})]
    part = write(folder / "part.h5", 0, 2, columns=COLUMNS, rows=rows)
    join_parts([(0, part, 0, 2)], folder / "merged.h5", columns=COLUMNS)
    plan = {"columns": columns_to_json(COLUMNS), "keep": {name: name for name in keep}}
    (folder / "run.json").write_text(json.dumps(plan))
    return folder / "merged.h5"


def test_a_run_with_lists_of_texts_is_refused_before_and_after_it_is_merged(tmp_path, model):
    path = run_of(tmp_path / "one", ["2", "3"])
    refused = r"has a list in 'text', as runs with n > 1 do.* such as \{text\[0\]\}"
    for has_file in (True, False):
        if not has_file:
            path.unlink()
        for settings in (
            {},
            {"rubric": {**read_rubric("correctness").to_json(), "prompt": "{final}"}, "final": "exact"},
        ):
            with pytest.raises(SlurmGPUError, match=refused):
                Judge(model=model, **settings).check_input([path], 2)
        first = {**read_rubric("correctness").to_json(), "prompt": "{question}: {text[0]}?"}
        Judge(model=model, rubric=first).check_input([path], 2)
        Judge(model=model, fields={"text": "question"}).check_input([path], 2)


@pytest.mark.parametrize("damage", ["{", "[" * 100_000, "[]"])
def test_a_run_with_a_damaged_plan_is_refused_in_a_sentence(tmp_path, model, damage):
    path, other = run_of(tmp_path / "one", "2"), run_of(tmp_path / "two", "3")
    (tmp_path / "two" / "run.json").write_text(damage)
    with pytest.raises(SlurmGPUError, match=r"two/run\.json is damaged"):
        Judge(model=model, rubric="pairwise", against=str(other))
    path.unlink()
    (tmp_path / "one" / "run.json").write_text(damage)
    with pytest.raises(SlurmGPUError, match=r"one/run\.json is damaged"):
        Judge(model=model).check_input([path], 2)


def test_a_field_of_texts_that_a_run_has_kept_is_judged(tmp_path, model):
    Judge(model=model).check_input([run_of(tmp_path / "one", "2")], 2)


def test_a_second_run_with_lists_of_texts_is_refused(tmp_path, model):
    judged, other = run_of(tmp_path / "one", "2"), run_of(tmp_path / "two", ["2"])
    with pytest.raises(SlurmGPUError, match=r"two/merged.h5 has a list in 'text'.* generate with n = 1"):
        Judge(model=model, rubric="pairwise", against=str(other)).check_input([judged], 2)


@pytest.mark.parametrize("final", [None, "numeric"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "field 'said' is null"),
        (["2"], "field 'said' holds '[\"2\"]'; expected a text"),
        (2, "holds '2'; expected"),
    ],
)
def test_what_is_no_text_is_its_items_error(model, text, problem, final):
    [error] = Judge(model=model, fields={"text": "said"}, final=final)([Item(0, {**QUESTION, "said": text})])
    assert isinstance(error, ItemError)
    assert problem in str(error)


def test_both_texts_of_a_pair_are_looked_at(model):
    item = Item(0, {"question": "1+1", "text_a": "2", "text_b": ["3"]})
    [error] = Judge(model=model, rubric="pairwise")([item])
    assert str(error) == "field 'text_b' holds '[\"3\"]'; expected a text"


@pytest.mark.parametrize(
    ("settings", "items", "problem"),
    [
        ({"rubric": "pairwise"}, {"question": "1", "text": "2"}, r"'text_a'.* set against to a second run"),
        ({}, {"question": "1", "text": "2", "answer": "3"}, r'\'reference\'.* Set fields = \{reference = "…"\} to'),
    ],
)
def test_a_field_that_no_item_has_comes_with_what_to_set(model, project, settings, items, problem):
    folder = project(items=[items], settings={"model": model, **settings})
    run_file = folder / "slurmgpu.toml"
    run_file.write_text(run_file.read_text().replace("workloads.py:Rows", "judge"))
    with pytest.raises(SlurmGPUError, match=problem), draft_run(run_file, {"resources": {"gpus": 0}}):
        pass


def test_a_setting_of_two_kinds_is_refused_for_the_one_that_is_meant(model, project):
    settings = {"model": model, "prompt": "{text}", "labels": {"a": 1, "b": "x"}}
    folder = project(items=[{"text": "x"}], settings=settings)
    run_file = folder / "slurmgpu.toml"
    run_file.write_text(run_file.read_text().replace("workloads.py:Rows", "classify"))
    expected = "setting 'labels', at 'a', should be a valid string; found 1"
    with pytest.raises(SlurmGPUError, match=expected), draft_run(run_file, {"resources": {"gpus": 0}}):
        pass


def test_truths_that_are_no_verdict_are_counted(tmp_path):
    columns = {"verdict": Text(), "score": Array("float32"), "how": Text(), "finish_reason": Text(), "truth": Text()}
    row = {"verdict": "correct", "score": 1.0, "how": "parsed", "finish_reason": "stop"}
    truths = ["correct", "incorrect", "maybe", "7", "7", ""]
    rows = [convert_row(columns, {**row, "truth": truth}) for truth in truths]
    part = write(tmp_path / "part.h5", 0, len(rows), columns=columns, rows=rows)
    join_parts([(0, part, 0, len(rows))], tmp_path / "merged.h5", columns=columns)
    with results.open(tmp_path / "merged.h5") as merged:
        summary = summarize(merged, read_rubric("correctness"), 9, with_truth=True)
    assert (summary["n_with_truth"], summary["n_unknown_truth"], summary["n_without_truth"]) == (2, 3, 1)
