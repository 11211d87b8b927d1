"""Looks: runs of some items of an input, by --limit and --items."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time

import pytest

import slurmgpu as package
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import live_tasks
from slurmgpu.operations import replacement, submit
from slurmgpu.operations.probe import draft_probe
from slurmgpu.plan.items import Look
from slurmgpu.plan.planner import draft_run
from slurmgpu.results.published import RunRows
from slurmgpu.run.directory import Run


def refuse(why):
    raise SlurmGPUError(why)


LOCAL = ("submit", "--executor", "local", "--gpus", "0")


def test_a_look_has_the_rows_of_the_full_run_under_their_numbers(project, slurmgpu):
    folder = project(100, settings={"faults": {"35": "exception", "60": "segfault"}})
    slurmgpu(*LOCAL, "--items", "60,8:20,35,16:22,98:", cwd=folder, expect=0)
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    indices = [*range(8, 22), 35, 60, 98, 99]
    with package.open(folder / "run-look" / "merged.h5") as look, package.open(folder / "run" / "merged.h5") as full:
        assert look.index.tolist() == indices
        assert look.errors == full.errors
        assert [str(look.row(place)) for place in range(18)] == [str(full.row(index)) for index in indices]
    report = json.loads((folder / "run-look" / "report.json").read_text())
    assert [(item["index"], json.loads(item["name"].partition("x = ")[2])) for item in report["errors"]] == [
        (35, 35),
        (60, 60),
    ]
    said = slurmgpu("logs", "run-look", "--item", "35", cwd=folder, expect=0).stdout
    assert "Item 35 failed in attempt local1_0.0" in said
    assert "cannot do item 35" in said
    said = slurmgpu("logs", "run-look", "--item", "1", cwd=folder, expect=2).stderr
    assert "has the items 8 to 21, 35, 60, 98 to 99." in said
    said = slurmgpu("resubmit", "run-look", cwd=folder, expect=2).stderr
    assert "for all of them submit again without --limit and --items, with another --run-dir" in " ".join(said.split())
    # Failed items are computed again under their numbers, too.
    source = folder / "workloads.py"
    source.write_text(source.read_text().replace("if fault := self.faults.get(item.index):", "if fault := None:"))
    slurmgpu("resubmit", "run-look", "--failed", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    with package.open(folder / "run-look" / "merged.h5") as look:
        assert (look.index.tolist(), look.errors) == (indices, {})
        assert look["double"][:].tolist() == [2.0 * index for index in indices]


def test_the_rows_of_a_look_are_found_by_their_numbers(project):
    run = package.submit(project(100) / "slurmgpu.toml", items="8:22,35", executor="debug", gpus=0).run

    def indices(*span):
        with RunRows(run) as rows:
            return [row.index for row in rows.rows(*span)]

    assert (indices(), indices(19, 36)) == ([*range(8, 22), 35], [19, 20, 21, 35])
    run.merged.unlink()
    assert (indices(), indices(19, 36)) == ([*range(8, 22), 35], [19, 20, 21, 35])
    run.shard_path(0).unlink()
    assert (indices(), indices(10, 18)) == ([*range(16, 22), 35], [16, 17])


def test_a_look_can_be_probed(project):
    with draft_run(project(100) / "slurmgpu.toml", look=Look("10:30,50:70")) as draft:
        small = draft_probe(draft, 12)
    assert (small.plan.look, small.run_dir.name) == ("probe", "run-look-probe")
    assert small.plan.indices(0, small.plan.n_items) == [*range(14, 18), *range(50, 54), *range(62, 66)]


def test_a_look_at_a_sweep_has_its_configurations(project):
    folder = project(batch_size=1, shard_items=1, sweep={"text": ["a", "b", "c"], "x": [1, 2]})
    path = folder / "slurmgpu.toml"
    path.write_text(path.read_text().replace('input = "items.jsonl"\n', ""))
    with draft_run(path, look=Look("1:3,5")) as draft:
        assert draft.items.configurations == [{"text": "a", "x": 2}, {"text": "b", "x": 1}, {"text": "c", "x": 2}]
        assert (draft.plan.n_items, draft.run_dir.name) == (3, "run-look")


@pytest.mark.parametrize(
    ("items", "limit", "ranges"),
    [
        (None, 3, [(0, 3)]),
        (None, 1000, [(0, 100)]),
        ("10:20,35", None, [(10, 20), (35, 36)]),
        ("35,10:20", 4, [(10, 14)]),
        ("35,10:20", 11, [(10, 20), (35, 36)]),
        ("10:20,15:30,30:31, 5", None, [(5, 6), (10, 31)]),
        (":5,90:", None, [(0, 5), (90, 100)]),
        (":", None, [(0, 100)]),
        ("7,7,7:8", None, [(7, 8)]),
    ],
)
def test_items_are_counted_from_0_and_ranges_joined(items, limit, ranges):
    assert Look(items, limit).ranges(100) == ranges


@pytest.mark.parametrize(
    ("items", "limit", "said"),
    [
        (None, 0, "--limit 0: expected the number of items"),
        ("", None, "--items names no item; expected numbers and ranges"),
        ("100", None, "--items 100 is not within the input, whose items are 0 to 99."),
        ("90:101", None, "--items 90:101 is not within the input"),
        ("5:5", None, "--items 5:5 is empty."),
        ("-3:", None, "such as 10:20,35"),
        ("1,,2", None, "such as 10:20,35"),
        ("1:9:2", None, "such as 10:20,35"),
    ],
)
def test_items_that_there_are_not_are_refused(items, limit, said):
    with pytest.raises(SlurmGPUError, match=said):
        Look(items, limit).ranges(100)


def test_a_look_takes_the_place_of_an_earlier_one_and_of_no_other_run(project, monkeypatch):
    path = project(100) / "slurmgpu.toml"
    prints = []
    for items in ("0:8", "8:16"):
        with draft_run(path, look=Look(items)) as draft:
            prints.append(draft.plan.fingerprint)
    assert prints[0] != prints[1]

    def look(items, **given):
        return package.submit(path, items=items, executor="debug", gpus=0, **given)

    look("0:8")
    second = look("4:7")
    assert (second.folder.name, second.results().index[:].tolist()) == ("run-look", [4, 5, 6])
    with pytest.raises(SlurmGPUError, match="run-look already holds a run"):
        look("0:2", run_dir=second.folder)
    with monkeypatch.context() as patch:
        patch.setattr(live_tasks, "alive", lambda run: "process 7 works on it")
        with pytest.raises(SlurmGPUError, match=r"process 7 .* look again, .* has ended, name another --run-dir"):
            look("0:2")
    assert len(second.results()) == 3
    second.folder.rename(path.parent / "a-look")
    package.submit(path, executor="debug", gpus=0, run_dir=second.folder)
    with pytest.raises(SlurmGPUError, match="run-look already holds a run"):
        look("0:2")
    shutil.rmtree(second.folder)
    look("0:2")
    (path.parent / "run-look").rename(path.parent / "run-probe")
    with pytest.raises(SlurmGPUError, match="is not a probe"):
        package.probe(path, 8, executor="debug", gpus=0)


def test_a_look_at_other_items_says_which_rows_it_removes(project):
    """As of `--items 50:` after `--limit 50`, by somebody who wants the rest."""
    path = project(100) / "slurmgpu.toml"
    package.submit(path, items="0:8", executor="debug", gpus=0)
    with draft_run(path, look=Look("8:")) as draft:
        assert f"and its 8 rows in {draft.run_dir}. To keep the rows of a look, give it a --run-dir." in draft.notes[-1]
    with draft_run(path, look=Look("0:8")) as draft:
        assert not [note for note in draft.notes if "replaces" in note]


@pytest.fixture
def looking(project):
    """Looks at some items of a project, each in place of the one before: `looking("0:2")`."""
    path = project(20) / "slurmgpu.toml"
    return lambda items: package.submit(path, items=items, executor="debug", gpus=0)


def test_a_look_stays_if_the_next_one_is_refused(looking, monkeypatch):
    first = looking("0:2")
    with monkeypatch.context() as patch:
        patch.setattr(submit, "start", lambda *_, **__: refuse("Slurm refuses it."))
        with pytest.raises(SlurmGPUError, match="Slurm refuses it"):
            looking("4:7")
    assert package.open(first.folder / "merged.h5").index[:].tolist() == [0, 1]
    assert looking("4:7").results().index[:].tolist() == [4, 5, 6]
    assert [path.name for path in first.folder.parent.iterdir() if "look" in path.name] == ["run-look"]


def test_a_look_that_cannot_be_put_back_is_not_removed(looking, monkeypatch):
    first, rename = looking("0:2"), replacement.replace

    def fail(source, target):
        return rename(source, target) if source == first.folder else refuse("The disk fails.")

    monkeypatch.setattr(submit, "start", lambda *_, **__: refuse("Slurm refuses it."))
    monkeypatch.setattr(replacement, "replace", fail)
    with pytest.raises(SlurmGPUError, match="The disk fails"):
        looking("4:7")
    [aside] = [path for path in first.folder.parent.iterdir() if "run-look" in path.name]
    assert package.open(aside / "merged.h5").index[:].tolist() == [0, 1]


def test_a_look_that_is_just_being_made_is_not_replaced(looking, monkeypatch):
    made = looking("0:2").folder
    (made / "submissions.jsonl").unlink()
    with pytest.raises(SlurmGPUError, match="another process may be submitting it"):
        looking("4:7")
    assert (made / "merged.h5").exists()
    monkeypatch.setattr(replacement, "MAKING_S", 0.0)
    assert looking("4:7").results().index[:].tolist() == [4, 5, 6]


def test_the_age_of_a_look_is_by_the_clock_that_dates_its_files(looking, monkeypatch):
    """Else an abandoned look on a file server that is an hour ahead would be new for an hour."""
    made, real = looking("0:2").folder, time.time
    (made / "submissions.jsonl").unlink()
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    with pytest.raises(SlurmGPUError, match="another process may be submitting it"):
        looking("4:7")
    os.utime(made / "run.json", (real() - 61, real() - 61))
    assert looking("4:7").results().index[:].tolist() == [4, 5, 6]


def test_a_refused_look_leaves_what_another_process_made_in_its_place(looking, monkeypatch):
    def replaced(run, *_, **__):
        (run.folder / "run.json").rename(run.folder / "former.json")
        shutil.copy(run.folder / "former.json", run.folder / "run.json")
        folders.append(run.folder)
        refuse("Slurm refuses it.")

    folders = []
    monkeypatch.setattr(submit, "start", replaced)
    with pytest.raises(SlurmGPUError, match="Slurm refuses it"):
        looking("0:2")
    assert (folders[0] / "run.json").exists()


def test_a_look_that_was_planned_is_replaced_at_once(project, slurmgpu):
    folder = project(100)
    for limit in (8, 4):
        slurmgpu("plan", "--limit", limit, "--gpus", "0", cwd=folder, expect=0)
        assert Run.open(folder / "run-look").plan.n_items == limit
    slurmgpu(*LOCAL, "--limit", "2", cwd=folder, expect=0)
    assert not (folder / "run-look" / ".planned").exists()


def test_a_replacement_that_was_killed_leaves_nothing_once_another_look_is_made(project):
    def look():
        return package.submit(folder / "slurmgpu.toml", items="0:8", executor="debug", gpus=0)

    folder = project(100)
    target = look().folder
    code = f"""
import os, pathlib
from slurmgpu.operations.replacement import room
with room(pathlib.Path({str(target)!r}), "look"):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    [left] = folder.glob(".run-look.*.partial")
    assert not target.exists()
    # That of a process that may live stays, and so does what is no run's.
    alive = folder / left.name.replace("run-look.", "run-look.elsewhere.")
    shutil.copytree(left, alive)
    lock = alive / ".submitting"
    lock.write_text(lock.read_text().replace(platform.node(), "elsewhere").replace('"boot": "', '"boot": "0'))
    other = folder / ".run-look.other.partial"
    other.mkdir()
    look()
    assert not left.exists()
    assert (alive.exists(), other.exists()) == (True, True)
    with replacement.room(target, "look"):
        [mine] = set(folder.glob(".run-look.*.partial")) - {alive, other}
        replacement.remove_left(target)
        assert mine.exists()
    assert not mine.exists()


def test_a_link_in_the_place_of_a_look_is_refused(looking):
    made = looking("0:2").folder
    made.rename(made.with_name("elsewhere"))
    made.symlink_to("elsewhere")
    with pytest.raises(SlurmGPUError, match="is a symbolic link"):
        looking("4:7")
