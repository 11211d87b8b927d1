"""Files of a run directory that were edited, or that somebody wrote to do harm: a sentence, and never a traceback."""

import itertools
import json

import pytest

from slurmgpu.run.directory import Run
from tests.support.pretend_runs import pretend_run

DEEP = json.dumps({"submission": 2, "executor": "local", "state": "ended"})[:-1] + ', "after": ' + "[" * 100_000
LOOKS = (("status",), ("logs",), ("show",), ("cancel",), ("merge", "--verify"))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("margin_s", None, "its margin_s is None"),
        ("shard_items", 0, "its shard_items is 0"),
        ("parts", [], "its parts is []"),
        ("exports", 7, "its exports is 7"),
        ("track", [["x"]], "its track is [['x']]"),
        ("provenance", {"run_fime": "/a.toml"}, "its provenance lacks run_file"),
    ],
)
def test_a_plan_that_cannot_be_one_is_said_to_be_damaged(tmp_path, slurmgpu, name, value, told):
    path = pretend_run(tmp_path / "run", 60).folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    for command, *options in LOOKS:
        done = slurmgpu(command, path.parent, *options, expect=2)
        assert done.stderr == f"error: {path} is damaged: {told}.\n"


WRONG_INPUTS = [
    (lambda given: given.pop("files"), "files is missing"),
    (lambda given: given.update(files=5), "files is 5"),
    (lambda given: given["files"][0].update(n_items="x"), "files: n_items is 'x'"),
    (lambda given: given["files"][0].pop("size_bytes"), "files: size_bytes is missing"),
    (lambda given: given.update(columns=[1]), "columns is 1"),
    (lambda given: given.update(ranges=[[0, 1, 2]]), "ranges is [[0, 1, 2]]"),
]


def test_an_input_in_a_plan_that_cannot_be_one_is_refused(project, slurmgpu):
    folder = project(n_items=4)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", "--run-dir", "run", cwd=folder, expect=0)
    path = folder / "run/run.json"
    planned = path.read_text()
    for (edit, told), command in zip(
        WRONG_INPUTS, itertools.cycle((("show", "--with-items"), ("logs", "--item", "1")))
    ):
        plan = json.loads(planned)
        edit(plan["input"])
        path.write_text(json.dumps(plan))
        done = slurmgpu(command[0], path.parent, *command[1:], expect=2)
        assert done.stderr == f"error: {path} is damaged: its input: {told}.\n"
    for n_items, n_planned, told in ((5, 4, "has 4 items, but its files and ranges have 5."), (5, 5, "another plan")):
        plan = json.loads(planned)
        plan["input"]["n_items"] = n_planned
        plan["input"]["files"][0]["n_items"] = n_items
        path.write_text(json.dumps(plan))
        assert told in slurmgpu("show", path.parent, "--with-items", expect=2).stderr
    slurmgpu("show", path.parent, expect=0)


def test_a_plan_that_lacks_a_value_is_said_to_lack_it(tmp_path, slurmgpu):
    path = pretend_run(tmp_path / "run", 60).folder / "run.json"
    plan = json.loads(path.read_text())
    del plan["lease_s"]
    path.write_text(json.dumps(plan))
    assert slurmgpu("status", path.parent, expect=2).stderr == f"error: {path} is damaged: it lacks lease_s.\n"


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        *(
            {"submission": 2, "state": "queued", "executor": "local", **odd}
            for odd in ({"executor": []}, {"pids": "x"})
        ),
    ],
)
def test_a_line_of_submissions_that_cannot_be_one_counts_as_torn(tmp_path, slurmgpu, line):
    run = pretend_run(tmp_path / "run", 60)
    before = run.submissions()
    with open(run.folder / "submissions.jsonl", "a") as file:
        file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    assert Run.open(run.folder).submissions() == before
    for command in ("status", "logs"):
        slurmgpu(command, run.folder, expect=0)


def test_a_line_is_read_whatever_in_it_is_null(tmp_path):
    run = pretend_run(tmp_path / "run", 60)
    odd = {"gpu_type": None, "message": None, "array_name": None, "n_tasks": 1, "time": 7, "cancelled": True}
    run.record_submission({"submission": 2, "executor": "slurm", "state": "ended", **odd})
    assert run.submissions()[-1].items() >= odd.items()
