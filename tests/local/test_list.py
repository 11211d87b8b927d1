"""`slurmgpu list`: the runs under a directory, whatever else lies there."""

import json
import os
import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from slurmgpu.cli.views import run_list
from slurmgpu.report.status import read_status
from slurmgpu.run.recompute import Again, Recompute, write_recompute
from tests.support import pretend_runs
from tests.support.pretend_runs import pretend_run, reported, write_merged_head
from tests.support.unprivileged import unprivileged


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "work"


def ended(folder, complete=True, **what):
    """A run whose merge has ended, as far as `list` looks."""
    run = pretend_run(folder, 100_000, n_tasks=2, n_shards=8, executor="local", **what)
    run.record_submission({"submission": 1, "state": "ended"})
    report = reported(run, errors=[(item, "item_error: no") for item in range(3)])
    (run.folder / "report.json").write_text(json.dumps({**report, "complete": complete, "gpu_hours": 1.25}))
    if complete:
        write_merged_head(run, run.plan.n_items)
    return run


def rows(folder):
    return {Path(row["run_dir"]).relative_to(folder).as_posix(): row for row in run_list.list_runs(folder)["runs"]}


def test_runs_are_listed_with_how_they_stand_the_last_active_first(folder, slurmgpu, monkeypatch):
    ended(folder / "a" / "done")
    monkeypatch.setattr(pretend_runs, "BEGIN", time.time() - 400)
    working = pretend_run(folder / "b" / "my run", 400, n_tasks=4, n_shards=40, executor="local")
    for run in (folder / "a" / "done", folder / "b" / "my run"):
        at = time.time() - (7200 if run.name == "done" else 60)
        for path in (run, *run.iterdir()):
            os.utime(path, (at, at))
    value = json.loads(slurmgpu("list", folder, "--json", expect=0).stdout)
    assert (value["format"], value["version"]) == ("slurmgpu list", 1)
    first, second = value["runs"]
    assert (first["run"], first["state"], first["n_items"]) == ("my run", "running", working.plan.n_items)
    assert first["n_items_done"] == len(working.published()) * 16
    assert (second["run"], second["state"], second["n_errors"], second["gpu_hours"]) == ("done", "complete", 3, 1.25)
    assert 7200 <= second["age_s"] < 7300
    shown = slurmgpu("list", cwd=folder, expect=0).stdout
    assert "b/my run" in shown
    assert "100.0%" in shown
    assert "2 h ago" in shown


def test_items_that_are_computed_again_are_not_done_in_the_list_either(folder):
    run = ended(folder / "done")
    assert rows(folder)["done"]["n_items_done"] == run.plan.n_items
    run.record_submission({**run.submissions()[0], "submission": 2, "state": "queued"})
    write_recompute(run.folder, Recompute(2, {0: Again(1, [(0, 3)])}))
    assert rows(folder)["done"]["n_items_done"] == read_status(run)["n_items_done"] == run.plan.n_items - 3


def test_a_run_that_is_asked_for_itself_has_its_name_and_a_probe_is_told_from_its_run(folder, slurmgpu):
    probe = ended(folder / "judge-probe", look="probe").folder
    ended(folder / "mine-probe")
    found = rows(folder)
    assert found["mine-probe"]["probe_of"] is None
    assert found["judge-probe"]["probe_of"] == str(folder / "judge")
    [line] = slurmgpu("list", ".", cwd=probe, expect=0).stdout.splitlines()[1:]
    assert line.startswith("judge-probe  probe, complete ")


def test_a_narrow_terminal_shows_names_first_and_cuts_no_number(folder, monkeypatch, capsys):
    ended(folder / "llama-70b-judge-2026-11-22")
    ended(folder / "judge-probe", look="probe")
    value = run_list.list_runs(folder)
    whole = [cell for row in value["runs"] for cell in run_list._cells(row, folder).values()]
    for width in (200, 80, 50, 30):
        monkeypatch.setattr(run_list, "wide_console", lambda width=width: Console(width=width))
        run_list.show_list(value)
        told = capsys.readouterr()
        lines = [line.split("  ") for line in told.out.splitlines()[1:]]
        assert [line[0].rstrip() for line in lines] == [row["run"] for row in value["runs"]]
        assert {cell.strip() for line in lines for cell in line} <= {*whole, ""}, told.out
        assert ("Left out for lack of space: " in told.err) == (width < 200)


def test_a_run_is_what_its_merged_file_holds_whatever_its_report_says(folder):
    ended(folder / "holes", complete=False)
    stale, swept = ended(folder / "stale"), ended(folder / "swept")
    write_merged_head(stale, stale.plan.n_items - 1)
    swept.shard_path(3).unlink()
    states = {name: row["state"] for name, row in rows(folder).items()}
    assert states == {"holes": "incomplete", "stale": "incomplete", "swept": "complete"}


def test_neither_run_directories_nor_what_is_no_place_for_runs_is_searched(folder):
    ended(folder / "run")
    for hidden in ("run/shards", ".git", "node_modules", "venv/lib"):
        ended(folder / hidden / "inner")
    (folder / "venv" / "pyvenv.cfg").touch()
    assert list(rows(folder)) == ["run"]
    assert list(rows(folder / "run")) == ["."]


def test_a_link_is_followed_one_folder_deep_and_no_run_is_listed_twice(folder, tmp_path):
    ended(folder / "here")
    ended(tmp_path / "scratch" / "there")
    ended(tmp_path / "scratch" / "deep" / "er")
    (folder / "runs").symlink_to(tmp_path / "scratch")
    (folder / "again").symlink_to(folder / "here")
    (folder / "circle").symlink_to(folder)
    (folder / "nowhere").symlink_to(folder / "missing")
    assert sorted(rows(folder)) == ["here", "runs/there"]


def test_an_entry_that_cannot_be_followed_costs_itself_alone(folder, tmp_path):
    ended(folder / "here")
    (folder / "a loop").symlink_to(folder / "a loop")
    assert list(rows(folder)) == ["here"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "run.json").write_text("{"),
        lambda run: (run / "run.json").write_text("[]"),
        lambda run: (run / "run.json").write_text('{"format": "slurmgpu run", "version": 1, "name": 3}'),
        lambda run: (run / "run.json").write_text('{"format": "slurmgpu run", "version": 99}'),
        lambda run: (run / "submissions.jsonl").write_text("[]\n"),
        lambda run: (run / "submissions.jsonl").write_bytes(b"\xff\xfe\n"),
        lambda run: (run / "shards").rename(run / "gone"),
    ],
)
def test_a_damaged_run_directory_costs_one_row(folder, damage):
    ended(folder / "whole")
    damage(ended(folder / "hurt").folder)
    found = rows(folder)
    assert found["whole"]["state"] == "complete"
    assert found["whole"]["problem"] is None
    hurt = found["hurt"]
    assert hurt["problem"] or hurt["state"] != "damaged"
    assert hurt["run"] == "hurt"


@pytest.mark.parametrize("text", ["torn", "[]", "{}"])
def test_a_damaged_report_does_not_hide_how_far_the_run_is(folder, text):
    hurt = ended(folder / "hurt")
    (hurt.folder / "report.json").write_text(text)
    row = rows(folder)["hurt"]
    assert (row["state"], row["n_items_done"], row["gpu_hours"]) == ("complete", hurt.plan.n_items, None)
    assert "report.json is damaged" in row["problem"]


def test_what_cannot_be_read_is_passed_over_with_a_note():
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        ended(folder / "run")
        for closed in ("a", "b"):
            (folder / closed).mkdir(mode=0)
        with unprivileged():
            value = run_list.list_runs(folder)
    assert [row["state"] for row in value["runs"]] == ["complete"]
    assert value["notes"] == ["2 folders could not be read: Permission denied"]


@pytest.mark.parametrize("name", ["run.json", "submissions.jsonl", "merged.h5", "report.json"])
def test_a_colleagues_file_that_may_not_be_read_is_told_in_a_sentence(name):
    with tempfile.TemporaryDirectory() as top:  # pytest's own folders are closed to other users
        folder = Path(top)
        folder.chmod(0o755)
        closed = ended(folder / "run").folder / name
        closed.chmod(0)
        with unprivileged():
            [row] = run_list.list_runs(folder)["runs"]
    assert (row["state"], row["problem"]) == ("unreadable", f"{closed} cannot be read: Permission denied.")


def test_a_folder_of_many_files_is_not_looked_through_to_the_end(folder, monkeypatch):
    monkeypatch.setattr(run_list, "MAX_ENTRIES", 5)
    (folder / "data").mkdir(parents=True)
    for number in range(9):
        (folder / "data" / f"{number}.txt").touch()
    ended(folder / "run")
    value = run_list.list_runs(folder)
    assert [row["run"] for row in value["runs"]] == ["run"]
    assert value["notes"] == ["1 folder with more than 5 entries, not searched completely"]


def test_many_runs_cost_one_squeue(folder, slurmgpu, tmp_path):
    for number in range(5):
        pretend_run(folder / f"run{number}", 60, n_tasks=2, n_shards=8, executor="slurm", job=str(100 + number))
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    fields = "\\037".join([str(os.getuid()), "103_[2-5]", "PENDING", "Resources", "slurmgpu:run3", "N/A", "", "/", "x"])
    squeue.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nprintf '{fields}\\036\\n'\n")
    squeue.chmod(0o755)
    done = slurmgpu("list", folder, "--json", PATH=f"{squeue.parent}:{os.environ['PATH']}", expect=0)
    states = {row["run"]: row["state"] for row in json.loads(done.stdout)["runs"]}
    assert states == {**{f"run{number}": "ended" for number in range(5)}, "run3": "queued"}
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_a_squeue_that_does_not_answer_costs_one_line(folder, slurmgpu, tmp_path):
    pretend_run(folder / "run", 60, n_tasks=2, n_shards=8)
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    said = "squeue: error: auth/munge: no key\nsqueue: error: once more\nslurm_load_jobs error: Connection refused"
    squeue.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    squeue.chmod(0o755)
    path = {"PATH": f"{squeue.parent}:{os.environ['PATH']}"}
    assert slurmgpu("list", folder, **path, expect=0).stderr == "The queue is not known: Connection refused.\n"
    told = slurmgpu("status", folder / "run", **path, expect=0).stderr
    assert told.splitlines()[0] == "WARNING: the queue is unknown: Connection refused"


def test_a_folder_without_runs_and_none_at_all_get_a_sentence(folder, slurmgpu):
    folder.mkdir()
    done = slurmgpu("list", folder, expect=0)
    assert "No run directory under" in done.stderr
    assert done.stdout == ""
    assert "is not a directory" in slurmgpu("list", folder / "missing", expect=2).stderr
