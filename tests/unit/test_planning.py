"""What is refused before anything is queued, and what a plan depends on."""

import datetime
import json
import os
import re
import shutil
import sys

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.resubmission import fewer_tasks, first_submission
from slurmgpu.inputs import Reader
from slurmgpu.loader import settings as of_workloads
from slurmgpu.plan.allocation import Allocation, allocate
from slurmgpu.plan.planner import draft_run
from slurmgpu.plan.run_file import Resources, read_toml
from slurmgpu.plan.shard_size import default_shard_items, shard_size
from slurmgpu.plan.site_file import GivenRunFile
from slurmgpu.plan.written_keys import edited_notes
from slurmgpu.run.directory import Run
from slurmgpu.util import packages


def plan(folder, **overrides):
    with draft_run(folder / "slurmgpu.toml", overrides) as draft:
        return draft.plan


def refused(folder, **overrides):
    with pytest.raises(SlurmGPUError) as caught:
        plan(folder, **overrides)
    return str(caught.value)


def edit(folder, old, new):
    path = folder / "slurmgpu.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("n_items", "batch_size", "expected"),
    [(1, 16, 16), (1000, 16, 16), (32768, 16, 16), (32769, 16, 32), (10**9, 64, 488320), (5, 1, 1)],
)
def test_shards_are_whole_batches_and_at_most_2048(n_items, batch_size, expected):
    assert default_shard_items(n_items, batch_size) == expected
    assert -(-n_items // expected) <= 2048


@pytest.mark.parametrize(
    ("n_items", "batch_size", "n_tasks", "expected"),
    [
        (100, 128, 1, 128),
        (100, 128, 4, 25),
        (101, 128, 4, 26),
        (5, 128, 4, 2),  # three shards of at most two items end as soon as four do
        (3, 128, 8, 1),
        (1, 128, 8, 128),
        (1000, 128, 8, 128),
        (1000, 128, 9, 112),
        (100, 1, 200, 1),
        (4, 2, 3, 2),  # two shards of two, and equal parts would be two of two
        (10**6, 1, 3000, 334),
    ],
)
def test_a_small_input_is_cut_into_a_shard_for_each_task(n_items, batch_size, n_tasks, expected):
    found = shard_size(n_items, batch_size, n_tasks)
    assert found.n_items == expected
    by_input = default_shard_items(n_items, batch_size)
    assert (found.note is None) == (expected == by_input)
    # No task computes more items than the fullest would of equal parts, nor of the shards by the input's size.
    n_shards, most = -(-n_items // expected), -(-n_items // n_tasks)
    assert -(-n_shards // n_tasks) * expected <= max(most, by_input)


def without_size(folder):
    edit(folder, "shard_items = 8\n", "")
    return folder


@pytest.mark.parametrize(
    ("resources", "cut"),
    [
        ({"gpus": 1}, (128, 128)),
        ({"gpus": 4}, (128, 128)),  # one task holds all of them
        ({"gpus": 4, "array": True}, (25, 25)),
        ({"gpus": 4, "array": True, "tasks": 20}, (25, 25)),  # of which four run at once
        ({"gpus": 8, "gpus_per_task": 4, "array": True}, (50, 50)),
        ({"gpus": 0, "tasks": 7}, (15, 15)),
    ],
)
def test_shards_of_a_small_input_are_for_the_tasks_that_run_at_once(project, resources, cut):
    folder = without_size(project(100, batch_size=128))
    with draft_run(folder / "slurmgpu.toml", {"resources": resources}) as draft:
        made, notes = draft.plan, draft.notes
    assert (made.shard_items, made.batch_size) == cut
    if cut[0] == 128:
        assert notes == ()
    else:
        n = made.n_shards
        assert notes == (
            f"100 items are cut into {n} shards of {cut[0]} (instead of 1 of 128), so that {n} tasks have one each; "
            "shard_items sets another size.",
        )
    assert plan(folder, resources=resources, shard_items=64).n_shards == 2


@pytest.mark.parametrize(
    ("n_items", "resources", "members", "parts"),
    [
        (2, {"gpus": 8, "array": True}, "most_parts = 64", 4),
        (2, {"gpus": 8, "array": True}, "most_parts = 3", 3),
        (2, {"gpus": 8, "array": True}, "", 1),
        (1, {"gpus": 3, "array": True}, "most_parts = 64", 3),
        (3, {"gpus": 8, "array": True}, "most_parts = 64", 2),
        (5, {"gpus": 8, "array": True}, "most_parts = 64", 1),
        (2, {"gpus": 8}, "most_parts = 64", 1),
        (2, {"gpus": 8, "array": True, "processes": "per-gpu"}, "most_parts = 64", 1),
        (2, {"gpus": 8, "array": True}, "most_parts = 64; resumes = True", 1),
    ],
)
def test_items_are_in_parts_where_there_are_tasks_for_several_of_each(project, n_items, resources, members, parts):
    folder = without_size(project(n_items, batch_size=32, workload="Divided"))
    # A file's module is imported once, so each has a class of its own.
    with open(folder / "workloads.py", "a") as file:
        file.write(f"class Divided(Rows):\n    {members or 'pass'}\n")
    with draft_run(folder / "slurmgpu.toml", {"resources": resources}) as draft:
        made, notes = draft.plan, draft.notes
    assert made.parts == parts
    submission = first_submission(made.resources, made.most_tasks(made.n_shards))
    each = "The item is" if n_items == 1 else f"Each of {n_items} items is"
    said = f"{each} computed in {parts} parts, so that {n_items * parts} tasks have one each; shard_items = 1 computes "
    assert any(note.startswith(said) for note in notes) == (parts > 1)
    if parts > 1:
        assert submission.n_tasks == n_items * parts
        more = allocate(Resources(**resources), None).n_tasks > submission.n_tasks
        assert fewer_tasks(submission, made, made.n_shards) == (
            [
                f"8 tasks (8 GPUs) were asked for; the run has {n_items} shards of {parts} parts, so there are "
                f"{n_items * parts} tasks, one for each."
            ]
            if more
            else []
        )
    pinned = plan(folder, resources=resources, shard_items=1)
    assert (pinned.parts, pinned.n_shards) == (1, n_items)


@pytest.mark.parametrize("members", ["most_parts = 0", "most_parts = 2.5", 'most_parts = "all"'])
def test_parts_that_are_no_number_are_refused(project, members):
    folder = project(2, workload="Divided")
    with open(folder / "workloads.py", "a") as file:
        file.write(f"class Divided(Rows):\n    {members}\n")
    assert "has most_parts = " in refused(folder)


def test_shards_of_a_large_input_and_given_ones_do_not_depend_on_the_tasks(project):
    resources = ({"gpus": 1}, {"gpus": 8, "array": True}, {"gpus": 0, "tasks": 7})
    large, given = without_size(project(1000, batch_size=16)), project(100, batch_size=128)
    for folder in (large, given):
        plans = [plan(folder, resources=each) for each in resources]
        assert len({(each.shard_items, each.batch_size, each.fingerprint) for each in plans}) == 1


def test_the_fingerprint_covers_what_the_rows_depend_on(project):
    folder = project(100)
    before = plan(folder).fingerprint
    assert plan(folder, seed=1).fingerprint != before
    assert plan(folder, settings={"item_s": 1.0}).fingerprint != before
    assert plan(folder, shard_items=16).fingerprint != before
    assert plan(folder, lease_s=7.0, auto_resubmit=2).fingerprint == before
    (folder / "items.jsonl").write_text((folder / "items.jsonl").read_text().replace("item 7", "item 8"))
    assert plan(folder).fingerprint != before


def test_the_last_shard_has_what_is_left(project):
    p = plan(project(100))
    assert (p.n_shards, p.bounds(0), p.bounds(12)) == (13, (0, 8), (96, 100))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"gpus": 4, "array": True}, (4, 4, 1)),
        ({"gpus": 4}, (1, 1, 4)),
        ({"gpus": 8, "gpus_per_task": 4, "array": True}, (2, 2, 4)),
        ({"gpus": 4, "array": True, "tasks": 20}, (20, 4, 1)),
        ({"gpus": 0}, (1, 1, 0)),
        ({"gpus": 0, "tasks": 3}, (3, 3, 0)),
        ({}, (1, 1, 1)),
    ],
)
def test_gpus_tasks_and_array_are_what_the_reference_says(asked, expected):
    assert allocate(Resources(**asked), n_shards=1000) == Allocation(*expected)


def test_there_are_no_more_tasks_than_shards():
    assert allocate(Resources(gpus=64, array=True), n_shards=5) == Allocation(5, 5, 1)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": 6, "gpus_per_task": 4, "array": True}, "not a multiple"),
        ({"gpus": 8, "gpus_per_task": 4}, "add --array"),
        ({"gpus": 0, "gpus_per_task": 1}, "CPUs"),
        ({"gpus": 6, "array": True, "tasks_per_node": 4}, "but 6 tasks may run at once; expected a multiple of 4"),
        ({"gpus": 0, "tasks": 5, "tasks_per_node": 2}, "Correct tasks or tasks_per_node"),
        ({"gpus": 4, "tasks_per_node": 4}, "one task holds all of gpus = 4; add --array"),
        (
            {"gpus": 8, "gpus_per_task": 4, "nodes_per_task": 2, "array": True, "tasks_per_node": 2},
            "Give one of both",
        ),
    ],
)
def test_contradicting_resources_are_refused(asked, said):
    with pytest.raises(SlurmGPUError, match=said):
        allocate(Resources(**asked), n_shards=10)


@pytest.mark.parametrize("asked", [{"gpus": 6, "array": True}, {"gpus": 4}, {"gpus": 4, "nodes_per_task": 2}])
def test_executors_that_share_no_nodes_do_without_tasks_per_node(asked):
    alone = Resources(executor="local", processes="per-gpu", **asked)
    assert allocate(alone.model_copy(update={"tasks_per_node": 4}), 10) == allocate(alone, 10)


def test_an_unknown_key_is_refused_with_a_suggestion(project):
    folder = project()
    edit(folder, "shard_items", "shard_itms")
    assert "unknown key shard_itms. Did you mean 'shard_items'?" in refused(folder)


def test_an_unknown_key_in_a_table_names_the_table(project):
    folder = project(resources={"gpu": 4})
    assert "[resources] gpu. Did you mean 'gpus'?" in refused(folder)


def test_a_value_of_a_wrong_type_is_refused(project):
    assert "[resources] gpus" in refused(project(resources={"gpus": "four"}))


@pytest.mark.parametrize("given", [{"seed": 2**63}, {"seed": -(2**63) - 1}, {"batch_size": 2**63}])
def test_a_number_that_no_file_of_the_run_could_hold_is_refused(project, given):
    assert f"{next(iter(given))}: should be" in refused(project(**given))


def test_a_workload_may_take_batches_of_any_size(project):
    folder = project(10)
    (folder / "workloads.py").write_text(
        "from slurmgpu import Array\n\n\nclass Rows:\n    columns = {'n': Array('int64')}\n    batch_size = 10**30\n\n"
        "    def __call__(self, items):\n        return [{'n': 1} for _ in items]\n"
    )
    edit(without_size(folder), "batch_size = 4", "")
    assert plan(folder).batch_size == 2**63 - 1


@pytest.mark.parametrize(
    ("tables", "name"),
    [
        ({"input": "a\0b"}, "input"),
        ({"input": ["items.jsonl", "a\0b"]}, "input"),
        ({"on_end": "a\0b"}, "on_end"),
        ({"container": {"image": "a\0b"}}, r"[container] image"),
        ({"slurm": {"setup": ["a\0b"]}}, "setup"),
    ],
)
def test_a_text_that_would_end_at_a_nul_character_is_refused(project, tables, name):
    found = refused(project(**tables))
    assert name in found
    assert "holds a NUL character" in found


@pytest.mark.parametrize(
    "tables",
    [{"input": "circle.jsonl"}, {"container": {"image": "circle.sif"}}, {"workload": {"use": "circle.py:Rows"}}],
)
def test_a_circle_of_links_is_refused_in_a_sentence(project, tables, slurmgpu):
    folder = project(**tables)
    for name in ("circle.jsonl", "circle.sif", "circle.py", "circle.toml"):
        (folder / name).symlink_to(name)
    for run_file in ("slurmgpu.toml", "circle.toml"):
        done = slurmgpu("submit", "--dry-run", run_file, cwd=folder, expect=2)
        assert "error: " in done.stderr
        assert "circle." in done.stderr


def test_a_name_that_would_write_a_line_of_sbatchs_script_is_refused(project):
    written = project(slurm={})
    edit(written, "[slurm]", '[slurm]\n"comment=x\\n#SBATCH --wrap" = "rm"')
    assert "is not an option of sbatch" in refused(written)


def test_sbatch_options_that_slurmgpu_sets_itself_are_refused(project):
    assert "'array' cannot be set here" in refused(project(slurm={"array": "0-3"}))


@pytest.mark.parametrize(("shard_items", "batch_size"), [(10, 4), (4, 4), (3, 3), (1, 1)])
def test_a_batch_is_no_larger_than_a_shard(project, shard_items, batch_size):
    made = plan(project(100, shard_items=shard_items))
    assert (made.shard_items, made.batch_size) == (shard_items, batch_size)


@pytest.mark.parametrize(
    ("n_items", "top", "resources", "said"),
    [
        (
            100,
            {"shard_items": 128, "batch_size": 128},
            {"gpus": 0, "tasks": 4},
            "4 tasks were asked for; the run has 1 shard, so there is 1 task, one for each. shard_items = 25 makes 4 "
            "shards, with batches of 25 items instead of 100.",
        ),
        (
            1000,
            {"shard_items": 128, "batch_size": 128},
            {"gpus": 0, "tasks": 9},
            "9 tasks were asked for; the run has 8 shards, so there are as many tasks, one for each. shard_items = 112 "
            "makes 9 shards, with batches of 112 items instead of 128.",
        ),
        (
            100,
            {"batch_size": 128},
            {"gpus": 4, "array": True, "tasks": 20},
            "20 tasks (4 GPUs) were asked for; the run has 4 shards, so there are as many tasks, one for each. "
            "shard_items = 5 makes 20 shards, with batches of 5 items instead of 25.",
        ),
        (
            3,
            {"batch_size": 1},
            {"gpus": 0, "tasks": 4},
            "4 tasks were asked for; the run has 3 shards, so there are as many tasks, one for each.",
        ),
        (
            1,
            {"batch_size": 2},
            {"gpus": 0, "tasks": 2},
            "2 tasks were asked for; the run has 1 shard, so there is 1 task, one for each.",
        ),
        (
            5,
            {"shard_items": 2, "batch_size": 2},
            {"gpus": 0, "tasks": 4},
            "4 tasks were asked for; the run has 3 shards, so there are as many tasks, one for each.",
        ),
        (100, {"batch_size": 128}, {"gpus": 0, "tasks": 4}, None),
        (100, {"shard_items": 10, "batch_size": 10}, {"gpus": 0, "tasks": 10}, None),
    ],
)
def test_who_asks_for_more_tasks_than_shards_is_told_a_size_that_makes_them(project, n_items, top, resources, said):
    folder = project(n_items, resources=resources, **top)
    if "shard_items" not in top:
        without_size(folder)
    made = plan(folder)
    submission = first_submission(made.resources, made.n_shards)
    assert fewer_tasks(submission, made, made.n_shards) == ([] if said is None else [said])
    if said and "shard_items" in said:
        wanted = int(re.search(r"shard_items = (\d+)", said)[1])
        assert plan(folder, shard_items=wanted).n_shards == resources["tasks"]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("workloads.py:Rws", "Did you mean 'Rows'?"),
        ("nowhere.py:Rows", "there is no file"),
        ("nowhere.at_all:Rows", "no module 'nowhere'"),
        ("embd", "Did you mean 'embed'?"),
        ("workloads.py", "of the form"),
    ],
)
def test_a_workload_that_cannot_be_found_is_refused_with_a_hint(project, use, said):
    assert said in refused(project(), workload={"use": use})


def test_imported_classes_that_compute_nothing_are_named_to_nobody(project):
    folder = project()
    (folder / "mine.py").write_text(
        "from slurmgpu import ItemError, Text\nclass W:\n    def __call__(self, items): ...\n"
    )
    assert refused(folder, workload={"use": "mine.py:X"}).endswith("has no class 'X'. Known: W.")
    (folder / "its.py").write_text("from slurmgpu import Text\nclass W: ...\n")
    assert refused(folder, workload={"use": "its.py:X"}).endswith("has no class 'X'. Known: W.")
    (folder / "theirs.py").write_text("from mine import W\n")
    assert refused(folder, workload={"use": "theirs.py:X"}).endswith("has no class 'X'. Known: W.")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"item_z": 1.0}, "no setting 'item_z'. Did you mean 'item_s'?"),
        ({"seed": 5}, "seed is a key at the top of the run file, above its tables: set it there, or with -s .seed=…."),
        ({"gpus": 5}, "gpus is a key of [resources] in the run file: set it there, or with -s resources.gpus=…."),
        ({"faults.x": False}, "A table is set as a whole: faults={x=false}."),
        ({"item_s": "long"}, "'item_s' should be a valid number; found 'long'"),
        ({"faults": 3}, "setting 'faults'"),
        ({"faults": datetime.date(2026, 1, 2)}, 'Put it in quotes: faults = "2026-01-02".'),
        ({"faults": datetime.time(1, 2)}, 'Put it in quotes: faults = "01:02:00".'),
    ],
)
def test_wrong_settings_name_the_workload_and_the_setting(project, settings, said):
    message = refused(project(), settings=settings)
    assert "workloads.py:Rows" in message
    assert said in message


def test_a_setting_that_is_none_of_its_choices_is_refused(project):
    folder = project()
    source = """
from typing import Literal
class Chooses(Rows):
    def __init__(self, how: Literal["mean", "cls"] | None = None) -> None:
        super().__init__()
"""
    (folder / "chooses.py").write_text((folder / "workloads.py").read_text() + source)
    message = refused(folder, workload={"use": "chooses.py:Chooses"}, settings={"how": "max"})
    assert "setting 'how' should be 'mean' or 'cls'; found 'max'" in message


def test_a_missing_setting_is_asked_for(project):
    folder = project()
    source = (folder / "workloads.py").read_text().replace("item_s: float = 0.0", "item_s: float")
    (folder / "workloads.py").write_text(source)
    assert "needs the setting 'item_s'" in refused(folder)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ('{"index": Array("int32")}', "'index'"),
        ("{}", "at least one"),
        ('{"x": "float32"}', "Array(dtype, shape), Text(), Json() or Ragged(dtype)"),
        ('{"x": Array("object")}', "Text()"),
    ],
)
def test_columns_that_cannot_be_stored_are_refused(project, columns, said):
    folder = project(workload="Broken")
    source = (folder / "workloads.py").read_text().replace('{"x": Array("float32")}', columns)
    (folder / "workloads.py").write_text(source)
    assert said in refused(folder)


@pytest.mark.parametrize("derived", ["", "(slurmgpu.Workload)"])
def test_a_workload_without_call_is_refused(project, derived):
    folder = project(workload="Broken")
    source = (folder / "workloads.py").read_text().replace("def __call__(", "def call(")
    source = "import slurmgpu\n" + source.replace("class Broken", f"class Broken{derived}")
    (folder / "workloads.py").write_text(source)
    assert "no method '__call__'" in refused(folder)


def test_for_a_function_in_place_of_a_class_what_maps_it_is_said(project):
    folder = project(workload="Broken")
    (folder / "workloads.py").write_text("def Broken(item): return {'x': 1}\n")
    assert "Broken is a function; a run file names a class" in refused(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "items.jsonl"),
        ("", "empty"),
        ('{"text": "a"}\nnot json\n', "line 2"),
        ("[1, 2]\n", "line 1"),
    ],
)
def test_inputs_that_cannot_be_read_are_refused_before_anything_is_written(project, text, said):
    folder = project()
    (folder / "items.jsonl").unlink()
    if text is not None:
        (folder / "items.jsonl").write_text(text)
    assert said in refused(folder)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([{"q": "a", "id": 1}] * 200, ".jsonl has. Did you mean 'question'?"),
        ([{"q": "a"}] * 99 + [{"question": "b"}], None),
        ([{"question": "a"}], None),
    ],
)
def test_a_field_that_none_of_the_first_json_objects_has_is_refused(project, items, said):
    folder = project(items=[{**item, "questiom": 1} if said else item for item in items])
    source = (folder / "workloads.py").read_text()
    assert "class Rows:\n" in source
    fields = 'class Rows:\n    fields = ("question",)\n'
    (folder / "workloads.py").write_text(source.replace("class Rows:\n", fields, 1))
    if said is None:
        assert plan(folder).n_items == len(items)
    else:
        assert said.replace("'question'", "'questiom'") in refused(folder)


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ('workload = "workloads.py:Lengths"', "workload"),
        ('resources = 4\n[workload]\nuse = "workloads.py:Lengths"', "resources"),
        ('slurm = "gpu"\n[workload]\nuse = "workloads.py:Lengths"', "slurm"),
        ('[[settings]]\n[workload]\nuse = "workloads.py:Lengths"', "settings"),
    ],
)
def test_a_value_in_place_of_a_table_is_told_of_the_table(project, written, named):
    folder = project()
    (folder / "slurmgpu.toml").write_text(f'input = "items.jsonl"\n{written}\n')
    assert f"slurmgpu.toml: {named}: should be a table, [{named}] with its keys" in refused(folder)


def test_a_run_file_that_is_missing_or_no_toml_is_refused(tmp_path, project):
    with pytest.raises(SlurmGPUError, match="slurmgpu init"), draft_run(tmp_path / "none.toml"):
        pass
    folder = project()
    (folder / "slurmgpu.toml").write_text("input = \n")
    assert "is not TOML" in refused(folder)
    (folder / "train.py").write_text("import torch\n")
    with pytest.raises(SlurmGPUError, match=r"not TOML: .* -- python train\.py …$"), draft_run(folder / "train.py"):
        pass
    said = r"not TOML: .* --each items\.jsonl --col NAME:TYPE -- PROGRAM …$"
    with pytest.raises(SlurmGPUError, match=said), draft_run(folder / "items.jsonl"):
        pass


@pytest.mark.parametrize(
    ("name", "typed"),
    [("a b;c.py", "-- python 'a b;c.py' …"), ("-e.sh", "-- bash ./-e.sh …"), ("$x.csv", "--each '$x.csv' ")],
)
def test_the_command_for_a_script_that_is_given_as_a_run_file_names_it_as_a_shell_reads_it(tmp_path, name, typed):
    (tmp_path / name).write_text("import os\n")
    with pytest.raises(SlurmGPUError) as caught, draft_run(tmp_path / name, {}):
        pass
    assert typed in str(caught.value)


def test_a_run_file_may_begin_with_a_byte_order_mark_as_editors_of_windows_write_it(project):
    folder = project()
    text = (folder / "slurmgpu.toml").read_text("utf-8")
    (folder / "slurmgpu.toml").write_text(text, "utf-8-sig")
    with draft_run(folder / "slurmgpu.toml") as draft:
        assert draft.plan.n_items


def test_a_run_file_is_utf_8_whatever_the_locale(project, slurmgpu):
    folder = project(8, "Named", settings={"name": "here"})
    with open(folder / "workloads.py", "a") as file:
        file.write("class Named(Rows):\n    def __init__(self, *, name: str):\n        super().__init__()\n")
    edit(folder, '"here"', '"né – 日本"')
    planned = plan(folder)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0, **ascii_only)
    found = json.loads((folder / "run" / "run.json").read_bytes())
    assert (found["settings"]["name"], found["fingerprint"]) == ("né – 日本", planned.fingerprint)
    slurmgpu("status", "run", cwd=folder, expect=0, **ascii_only)
    slurmgpu("report", "run", "--html", "page.html", cwd=folder, expect=0, **ascii_only)
    assert "né – 日本" in (folder / "page.html").read_text("utf-8")


def test_paths_in_settings_are_relative_to_the_run_file(project, slurmgpu, tmp_path):
    folder = project(8, workload="Reader")
    (folder / "word.txt").write_text("hello")
    (folder / "workloads.py").write_text(
        "from pathlib import Path\nfrom slurmgpu import Text\n\n\nclass Reader:\n    columns = {'word': Text()}\n"
        "    batch_size = 4\n\n    def __init__(self, *, path: Path):\n        Path(path).read_text()\n"
        "        self.path = path\n\n    def load(self, task):\n        self.word = Path(self.path).read_text()\n\n"
        "    def __call__(self, items):\n        return [{'word': self.word} for _ in items]\n"
    )
    for number, executor in enumerate(("debug", "local")):
        argv = ("--executor", executor, "--gpus", "0", "--set", "path=word.txt", "--run-dir", f"run{number}")
        slurmgpu("submit", folder / "slurmgpu.toml", *argv, cwd=tmp_path, expect=0)
        assert (tmp_path / f"run{number}" / "merged.h5").exists()


def test_merged_files_of_several_runs_are_one_input_before_they_exist(project, slurmgpu):
    folder = project(12)
    text = (folder / "slurmgpu.toml").read_text()
    for number, name in enumerate(("merged", "first", "second")):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i}"}}\n' for i in range(4 + number)))
        (folder / "one.toml").write_text(text.replace("items.jsonl", f"{name}.jsonl"))
        slurmgpu("plan", "one.toml", "--run-dir", name, cwd=folder, expect=0)

    def merge(name):
        slurmgpu("resubmit", name, "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)

    merge("merged")
    after = [Run.open(folder / name) for name in ("first", "second", "merged")]

    def draft(*names):
        return draft_run(folder / "slurmgpu.toml", {"input": [f"{name}/merged.h5" for name in names]}, after=after)

    with draft("second", "merged", "first") as planned:
        spec, index = planned.items.spec, folder / "index"
        shutil.copyfile(planned.items.files[0], index)
    assert [file.n_items for file in spec.files] == [6, 4, 5]
    assert spec.files[1].size_bytes == (folder / "merged" / "merged.h5").stat().st_size  # it was read
    merge("first")
    merge("second")
    with Reader(spec, index) as reader:
        names = [item["shout"] for item in reader.read(4, 12)]
    assert names == ["SECOND 4", "SECOND 5", *(f"MERGED {i}" for i in range(4)), "FIRST 0", "FIRST 1"]


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ("second/merged.h5", "names {}/second/merged.h5 twice. Leave one of them out."),
        ("items.jsonl", "mixes formats, h5 ({0}/second/merged.h5) and jsonl ({0}/items.jsonl); expected one format."),
        ("other/merged.h5", "{}/other/merged.h5 does not exist. Relative paths are relative to {}."),
    ],
)
def test_what_cannot_follow_a_merged_file_that_does_not_exist_yet_is_refused(also, said, project, slurmgpu):
    folder = project(4)
    slurmgpu("plan", "--run-dir", "second", cwd=folder, expect=0)
    with (
        pytest.raises(SlurmGPUError, match=re.escape(said.format(folder, folder))),
        draft_run(folder / "slurmgpu.toml", {"input": ["second/merged.h5", also]}, after=[Run.open(folder / "second")]),
    ):
        pass


def test_run_json_freezes_where_everything_came_from(project, slurmgpu):
    folder = project(8)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    frozen = json.loads((folder / "run" / "run.json").read_text())
    assert frozen["provenance"]["versions"].keys() >= {"python", "slurmgpu", "numpy", "h5py", "submitit"}
    assert frozen["input"]["files"][0]["sha256"]
    assert frozen["workload"] == f"{folder / 'workloads.py'}:Rows"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": 6, "nodes_per_task": 4}, "expected a multiple of 4, so that each node has the same number"),
        ({"gpus": 0, "nodes_per_task": 2}, "but a task has 0 GPUs"),
        ({"gpus": 4, "nodes_per_task": 2, "processes": "one"}, "one process sees the GPUs of its own node only"),
        ({"gpus": 4, "nodes_per_task": 2}, 'Set processes = "per-gpu" in [resources] if it can run in several'),
        ({"processes": "two"}, "[resources] processes"),
    ],
)
def test_contradicting_nodes_and_processes_are_refused(project, asked, said):
    assert said in refused(project(resources=asked))


def test_the_run_file_says_how_many_processes_a_task_has_and_else_the_workload(project):
    folder = project(8)
    assert plan(folder).processes == "one"
    assert plan(folder, resources={"processes": "per-gpu"}).processes == "per-gpu"
    source = (folder / "workloads.py").read_text()
    # Another file, since a file's module is imported once.
    (folder / "others.py").write_text(source.replace("class Rows:", 'class Rows:\n    processes = "per-gpu"\n'))
    other = {"use": "others.py:Rows"}
    assert plan(folder, workload=other).processes == "per-gpu"
    assert plan(folder, workload=other, resources={"processes": "one"}).processes == "one"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"image": "missing.sif"}, "missing.sif"),
        ({"image": "items.jsonl"}, "items.jsonl"),
        ({"imag": "x.sif"}, "unknown key [container] imag. Did you mean 'image'?"),
        ({"runtime": "docker"}, "[container] runtime"),
        ({"image": "items.jsonl", "env": {"bad-name": "1"}}, "'bad-name' is not a valid name of a variable"),
        ({"stage": "disk"}, "[container] stage"),
    ],
)
def test_a_container_that_cannot_be_is_refused_before_anything_is_written(project, table, said):
    folder = project(8, container=table)
    assert said in refused(folder)
    assert not (folder / "run").exists()


def test_without_a_runtime_the_image_is_not_looked_at(project):
    folder = project(8, container={"image": "missing.sif", "runtime": "none"})
    assert plan(folder).container is None


@pytest.mark.parametrize("where", ["top", "init"])
def test_a_module_that_only_the_image_has_is_no_bug_of_the_workload(project, slurmgpu, where):
    folder = project(8)
    source = (folder / "workloads.py").read_text()
    there = "import os\n" if where == "top" else "        self.faults ="
    indent = "" if where == "top" else "        "
    (folder / "workloads.py").write_text(source.replace(there, f"{indent}import onlyinimage.parts\n{there}", 1))
    said = refused(folder)
    assert "workloads.py:Rows needs the module 'onlyinimage', which is not installed here." in said
    assert "import the module in `load`" in said
    assert "needs the module 'onlyinimage'" in slurmgpu("check", cwd=folder, expect=2).stdout


def test_an_image_that_is_named_but_would_not_be_used_is_refused(project):
    folder = project(8, container={"image": "site.sif", "runtime": "none"})
    said = refused(folder, container={"image": "/no.sif"})
    assert said.startswith(
        '--image names an image, but [container] runtime = "none" in slurmgpu.toml runs without one.'
    )


@pytest.mark.parametrize(
    ("name", "executor", "sentence"),
    [
        ("at %j", "local", "has a %, which in the paths of logs Slurm replaces by job numbers"),
        ("100%", "slurm", "has a %, which in the paths of logs Slurm replaces by job numbers"),
        ("a\n#SBATCH --wrap=id", "local", r"has the control character '\\n'"),
        ("it's", "slurm", "has ', which versions of Slurm read"),
        ("caf\udce9", "local", r"has '\\udce9', a byte that is not valid in UTF-8"),
        ('a "b" \\ c', "slurm", r'has " and \\, which versions of Slurm read'),
    ],
)
def test_a_path_that_slurm_would_not_take_as_it_is_is_refused_before_anything_is_written(
    name, executor, sentence, project
):
    folder = project(4, resources={"executor": executor})
    with pytest.raises(SlurmGPUError, match=sentence), draft_run(folder / "slurmgpu.toml", run_dir=folder / name):
        pass
    assert not (folder / name).exists()


def test_a_path_that_the_locale_reads_otherwise_than_as_utf8_is_refused(project, monkeypatch):
    """run.json would name files that a shell with another locale does not find."""
    folder = project(4, resources={"executor": "local"})
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    mistaken = "日".encode().decode("latin-1")  # which has a control character
    match = pytest.raises(SlurmGPUError, match="reads as iso8859-1")
    with match, draft_run(folder / "slurmgpu.toml", run_dir=folder / mistaken):
        pass
    assert plan(folder).n_items == 4


def test_spaces_and_quotes_in_a_path_do_what_they_say_on_this_machine(project, slurmgpu):
    folder = project(4)
    name = 'it\'s a "run" of $HOME & ünïcode'
    slurmgpu("submit", "--executor", "local", "--device", "cpu", "--run-dir", name, cwd=folder, expect=0)
    assert (folder / name / "merged.h5").exists()


def test_a_mapping_plans_what_the_run_file_plans(project):
    folder = project(20, resources={"gpus": 2, "array": True}, slurm={"--cpus-per-task": 2})
    tables = {**read_toml(folder / "slurmgpu.toml"), "run_dir": folder / "run", "on_end": None}
    with draft_run(GivenRunFile(tables, folder)) as draft:
        given = draft.plan
    named = plan(folder)
    assert given.fingerprint == named.fingerprint
    assert (given.resources, given.slurm, given.search_path) == (named.resources, named.slurm, named.search_path)
    assert given.provenance["run_file"] == str(folder / "slurmgpu.submit")


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"resources": {"gpu": 1}}, r"the given run file: unknown key \[resources\] gpu\. Did you mean 'gpus'\?"),
        ({"input": None}, r"^the given run file: input is missing"),
        ({"sweep": {"item_s": [1, 2]}}, r"^the given run file: \[sweep\] varies item_s, which makes a run for each"),
        ({"input": 3}, "the given run file: input: should be a valid string; found 3"),
    ],
)
def test_a_mapping_is_refused_as_a_run_file_is(project, tables, sentence):
    folder = project(20)
    with (
        pytest.raises(SlurmGPUError, match=sentence),
        draft_run(GivenRunFile({**read_toml(folder / "slurmgpu.toml"), **tables}, folder)),
    ):
        pass


def test_all_gpus_are_counted_once_at_planning_wherever_all_and_the_executor_are_given(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    folder = project(8, resources={"gpus": "all", "array": True})
    assert 'gpus = "all" counts the GPUs of this machine, but the executor slurm computes elsewhere' in refused(folder)
    assert plan(folder, resources={"executor": "local"}).resources["gpus"] == 2
    assert plan(folder, resources={"gpus": 1}).resources["gpus"] == 1
    edit(folder, 'gpus = "all"', 'executor = "local"')
    assert plan(folder, resources={"gpus": "all"}).resources["gpus"] == 2


def test_a_training_without_pytorch_is_refused_unless_the_node_may_bring_it(project, monkeypatch):
    folder = project(4, workload="train")
    methods = ("model(self)", "data(self, split)", "loss(self, model, batch)")
    (folder / "mine.py").write_text("class Mine:\n" + "".join(f"    def {each}: ...\n" for each in methods))
    settings = {"training": "mine.py:Mine", "epochs": 1}
    tables = {"workload": {"use": "train"}, "settings": settings, "sweep": {"lr": [0.1]}}
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    expected = r"train needs PyTorch, which .* cannot import: pip install 'slurmgpu\[torch\]'"
    with pytest.raises(SlurmGPUError, match=expected), draft_run(GivenRunFile(tables, folder)):
        pass
    on_a_node = {**tables, "resources": {"executor": "slurm"}, "slurm": {"setup": ["module load pytorch"]}}
    with draft_run(GivenRunFile(on_a_node, folder)) as draft:
        assert any("train needs PyTorch" in note and "the tasks check again" in note for note in draft.notes)


@pytest.mark.parametrize(
    ("resources", "is_told"),
    [
        ({"gpus": 4}, True),
        ({"gpus": 1}, False),
        ({"gpus": 4, "array": True}, False),
        ({"gpus": 4, "gpus_per_task": 4}, False),
        ({"gpus": 4, "processes": "per-gpu"}, False),
    ],
)
def test_several_gpus_of_one_process_are_told_unless_they_were_asked_for_as_such(project, resources, is_told):
    lines = list(plan(project(20), resources=resources).placement)
    said = "One task with one process has all 4 GPUs. For a task on each GPU: array = true, --array."
    assert lines == ([said] if is_told else [])


def test_an_edit_of_the_run_file_while_its_input_is_read_is_noticed_later(project):
    folder = without_size(project(20, settings={"item_s": 0.0}))

    def read_long(n_items):
        edit(folder, "item_s = 0.0", "item_s = 0.5")
        return n_items

    with draft_run(folder / "slurmgpu.toml", most_shards=read_long) as draft:
        assert draft.plan.settings["item_s"] == 0.0
        assert "planned: settings.item_s. The run keeps" in edited_notes(draft.plan)[0]


class Prompted:
    texts = ("prompt",)


def test_of_a_huge_file_that_a_setting_names_only_the_beginning_is_read(tmp_path, monkeypatch):
    path = tmp_path / "corpus.txt"
    path.write_text("é" * 100_000)
    monkeypatch.setattr(of_workloads, "MOST_CHARACTERS", 10)
    expected = rf"prompt is 'file:{path}', but {path} cannot be read: it has more than 10 characters"
    with pytest.raises(SlurmGPUError, match=expected):
        of_workloads.texts_of_files("workloads:Prompted", Prompted, {"prompt": f"file:{path}"})
    path.write_text("é" * 10)
    found = of_workloads.texts_of_files("workloads:Prompted", Prompted, {"prompt": f"file:{path}"})
    assert found == {"prompt": "é" * 10}


def test_a_fifo_that_a_setting_names_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "prompt")
    with pytest.raises(SlurmGPUError, match="cannot be read: it is a FIFO, not a file"):
        of_workloads.texts_of_files("workloads:Prompted", Prompted, {"prompt": f"file:{tmp_path / 'prompt'}"})
