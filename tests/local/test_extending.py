"""submit --extend: a run takes the shards of a run of fewer items, and computes the others."""

import dataclasses
import errno
import gzip
import json
import math
import os

import pytest

import slurmgpu as package
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.extension import OF_INPUT, extend
from slurmgpu.plan.items import Look
from slurmgpu.plan.planner import draft_run
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import PROMISED
from tests.support.nightly import by_night
from tests.support.runs import make_project


def lines(start, stop):
    return "".join(json.dumps({"text": f"item {i} of many", "x": i}) + "\n" for i in range(start, stop))


@pytest.fixture
def old(tmp_path):
    """A folder with a run of 36 items in two files, of which item 3 failed; shards have 8."""
    (tmp_path / "marks").mkdir()
    settings = {"faults": {"3": "item_error"}, "marks": str(tmp_path / "marks")}
    folder = make_project(tmp_path / "project", settings=settings, input="data/*.jsonl", run_dir="old/run")
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_text(lines(0, 20))
    (folder / "data" / "b.jsonl").write_text(lines(20, 36))
    package.submit(folder / "slurmgpu.toml", executor="debug", gpus=0)
    return folder


def submit(folder, name, **options):
    return package.submit(folder / "slurmgpu.toml", run_dir=folder / name, executor="debug", gpus=0, **options)


def times_computed(folder):
    return {int(path.name): len(path.read_text().splitlines()) for path in (folder.parent / "marks").iterdir()}


def test_an_extended_run_has_the_bytes_of_a_full_one_and_computes_what_is_new(old):
    with open(old / "data" / "b.jsonl", "a") as file:
        file.write(lines(36, 45))
    before = times_computed(old)
    handle = submit(old, "more/run", extend=old / "old" / "run")
    computed = times_computed(old)
    assert {item for item, n in computed.items() if n != before.get(item)} == {*range(32, 45)}
    assert handle.report()["complete"] is True
    assert [item["index"] for item in handle.report()["errors"]] == [3]
    assert (old / "old" / "run" / "shards" / "00003.h5").samefile(handle.folder / "shards" / "00003.h5")
    (old / "data" / "c.jsonl").write_text(lines(45, 60))
    # An extended run is extended, and the former one is not needed any more.
    (old / "old").rename(old / "gone")
    again = submit(old, "most/run", extend=handle.folder)
    full = submit(old, "full/run")
    assert (again.folder / "merged.h5").read_bytes() == (full.folder / "merged.h5").read_bytes()
    # An item that failed in the first run is computed again in the last one.
    source = old / "workloads.py"
    source.write_text(source.read_text().replace("if fault := self.faults.get(item.index):", "if fault := None:"))
    again.resubmit(failed=True)
    with package.open(again.folder / "merged.h5") as merged:
        assert (merged.index.tolist(), merged.errors) == ([*range(60)], {})
        assert merged["double"][:].tolist() == [2.0 * index for index in range(60)]


KEEPS = '''

class Keeps(Rows):
    """Writes each item down in a file of its own as well; of item 5 it is lost."""

    def load(self, task):
        super().load(task)
        self.folder = task.run_dir / "kept"
        self.folder.mkdir(exist_ok=True)

    def __call__(self, items):
        for item in items:
            if item.index != 5:
                (self.folder / f"{item.index}.txt").write_text(item.data["text"])
        return super().__call__(items)

    def files_of_item(self, index):
        return [f"kept/{index}.txt"]
'''


LENGTHS = """
from slurmgpu import Array

class Lengths:
    columns = {"n": Array("int64")}
    batch_size = 4

    def __call__(self, items):
        return [{"n": len(item["text"])} for item in items]
"""


def test_the_code_of_rows_that_were_taken_is_not_looked_for_here(tmp_path, caplog):
    """The warning said that resubmit takes a new snapshot, which these rows do not need."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    (tmp_path / "slurmgpu.toml").write_text(
        'input = "a.jsonl"\nshard_items = 4\n[workload]\nuse = "lengths.py:Lengths"\n'
    )
    (tmp_path / "a.jsonl").write_text(lines(0, 8))
    [before] = submit(tmp_path, "old").report()["code"]
    (tmp_path / "lengths.py").write_text(LENGTHS.replace("len(", "1 * len("))
    (tmp_path / "a.jsonl").write_text(lines(0, 12))
    found = submit(tmp_path, "more", extend=tmp_path / "old").report()["code"]
    assert [(each["items"], each["files"] is None) for each in found] == [(8, True), (4, False)]
    assert found[0]["digest"] == before["digest"] != found[1]["digest"]
    assert "cannot be used" not in caplog.text


def test_files_that_a_workload_keeps_for_a_row_come_with_it(old):
    with open(old / "workloads.py", "a") as file:
        file.write(KEEPS)
    run_file = old / "slurmgpu.toml"
    run_file.write_text(run_file.read_text().replace("workloads.py:Rows", "workloads.py:Keeps"))
    submit(old, "kept/run")
    (old / "data" / "c.jsonl").write_text(lines(36, 45))
    submit(old, "more/run", extend=old / "kept" / "run")
    there = {int(path.stem): path for path in (old / "more" / "run" / "kept").iterdir()}
    assert sorted(there) == [index for index in range(45) if index != 5]
    assert there[0].samefile(old / "kept" / "run" / "kept" / "0.txt")  # of a shard that was taken
    assert not there[32].samefile(old / "kept" / "run" / "kept" / "32.txt")
    assert there[31].read_text() == "item 31 of many"
    source = (old / "workloads.py").read_text().replace('f"kept/{index}.txt"]', 'f"kept/../../{index}.txt"]')
    (old / "workloads.py").write_text(source)
    with pytest.raises(SlurmGPUError, match=r"files_of_item\(0\) returned 'kept/../../0.txt'; expected paths"):
        submit(old, "most/run", extend=old / "kept" / "run")
    assert not (old / "most").exists()


def test_shards_are_copied_where_they_cannot_be_linked(old, monkeypatch):
    (old / "data" / "c.jsonl").write_text(lines(36, 45))

    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with draft_run(old / "slurmgpu.toml", None, old / "new", extends=Run.open(old / "old" / "run")) as draft:
        assert draft.n_missing == 2
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
        monkeypatch.setattr(os, "link", refuse)
        draft.fill(run)
    assert sorted(path.name for path in run.shards.iterdir()) == [f"{shard:05d}.h5" for shard in range(4)]
    for path in run.shards.iterdir():
        assert path.read_bytes() == (old / "old" / "run" / "shards" / path.name).read_bytes()
        assert path.stat().st_nlink == 1


def test_a_damaged_shard_of_the_former_run_is_computed_again(old):
    shard = old / "old" / "run" / "shards" / "00001.h5"
    content = bytearray(shard.read_bytes())
    content[-8] ^= 1
    shard.write_bytes(content)
    (old / "data" / "c.jsonl").write_text(lines(36, 45))
    handle = submit(old, "new", extend=old / "old" / "run")
    assert [hole["shard"] for hole in handle.report()["missing"]] == [1]
    assert shard.read_bytes() == content  # the former run is left as it was
    assert handle.resubmit().report()["complete"] is True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: None, "the input has no items after its 36 items"),
        (
            lambda data: (data / "aa.jsonl").write_text(lines(36, 40)),
            "aa.jsonl comes before .*b.jsonl, which was file 2",
        ),
        (
            lambda data: (data / "b.jsonl").write_text(lines(19, 35) + lines(36, 40)),
            "by more than lines added at its end",
        ),
        (lambda data: (data / "b.jsonl").write_text(lines(20, 30)), "by more than lines added at its end"),
        (
            lambda data: (data / "a.jsonl").write_text(lines(0, 20) + lines(36, 40)),
            "other files of the input follow it",
        ),
        (lambda data: (data / "b.jsonl").unlink(), "which the new input lacks"),
    ],
)
def test_an_input_that_does_not_begin_with_the_former_one_is_refused(old, change, said):
    change(old / "data")
    with pytest.raises(SlurmGPUError, match=said), extending(old):
        pass
    assert not (old / "new").exists()


def test_a_line_that_was_not_ended_and_goes_on_is_another_item(old):
    path = old / "data" / "b.jsonl"
    path.write_text(lines(20, 36).rstrip("\n"))
    submit(old, "second")
    path.write_text(lines(20, 36).rstrip("\n") + " \n" + lines(36, 40))
    with pytest.raises(SlurmGPUError, match="by more than lines added"), extending(old, "second"):
        pass
    path.write_text(lines(20, 40))
    with extending(old, "second") as draft:
        assert draft.n_missing == 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"settings": {"item_s": 0.1}}, "settings.item_s is 0.1, and in that run it was not set"),
        ({"seed": 7}, "seed is 7, and in that run it was 0"),
        by_night({"workload": {"batch_size": 2}}, "batch_size is 2, and in that run it was 4"),
        ({"shard_items": 4}, "shard_items is 4, and in that run it was 8"),
    ],
)
def test_what_else_the_rows_depend_on_is_the_same_or_named(old, overrides, said):
    (old / "data" / "c.jsonl").write_text(lines(36, 45))
    with pytest.raises(SlurmGPUError, match=said), extending(old, overrides=overrides):
        pass


def test_whatever_is_in_the_fingerprint_keeps_a_run_from_being_extended(old):
    (old / "data" / "c.jsonl").write_text(lines(36, 45))
    run = Run.open(old / "old" / "run")
    others = {
        "workload": "workloads.py:Other",
        "settings": {"other": 1},
        "columns": {},
        "batch_size": 3,
        "shard_items": 5,
        "seed": 9,
        "keep": {"column": "x"},
        "parts": 2,
    }
    with extending(old) as draft:
        base = draft.items.files[0].parent
        plan = draft.plan
        assert {*others} == plan.basis.keys() - OF_INPUT
        for name, value in others.items():
            other = dataclasses.replace(plan, **{name: value})
            assert other.fingerprint != plan.fingerprint, name
            with pytest.raises(SlurmGPUError, match=f"cannot be extended: {name}.* is "):
                extend(run, other, base)
        assert extend(run, plan, base).shards.keys() == {0, 1, 2, 3}
        # NaN, which the run file may have, differs from itself in Python.
        settings = {**plan.settings, "threshold": math.nan}
        with_nan = dataclasses.replace(run, plan=dataclasses.replace(run.plan, settings=settings))
        assert extend(with_nan, dataclasses.replace(plan, settings=settings), base).shards.keys() == {0, 1, 2, 3}
        with pytest.raises(SlurmGPUError, match=r"settings\.item_s is 1, and in that run it was not set"):
            extend(with_nan, dataclasses.replace(plan, settings={**settings, "item_s": 1}), base)


def test_an_input_of_another_kind_or_one_that_was_waited_for_is_not_continued(old):
    (old / "data" / "c.jsonl").write_text(lines(36, 45))
    run = Run.open(old / "old" / "run")
    with extending(old) as draft:
        base, plan = draft.items.files[0].parent, draft.plan
        first, *others = plan.input["files"]
        for change, said in (
            ({"format": "txt"}, "its input is jsonl, and the new one is txt"),
            ({"columns": ["x"]}, "its input is jsonl, and the new one is jsonl with the columns x"),
            ({"files": [{**first, "size_bytes": PROMISED}, *others]}, "did not exist yet"),
        ):
            with pytest.raises(SlurmGPUError, match=said):
                extend(run, dataclasses.replace(plan, input={**plan.input, **change}), base)


def test_a_column_that_another_field_fills_is_not_continued(old):
    (old / "data" / "c.jsonl").write_text(lines(36, 45))
    submit(old, "kept", overrides={"keep": ["x"], "rename": {"x": "kept"}, "input": "data/[ab].jsonl"})
    renamed = {"keep": ["text"], "rename": {"text": "kept"}}
    with pytest.raises(SlurmGPUError, match=r"keep\.kept is 'text', and in that run it was 'x'"):
        submit(old, "more", overrides=renamed, extend=old / "kept")


def test_a_compressed_file_that_has_grown_is_refused_by_its_name(old):
    path = old / "data.jsonl.gz"
    path.write_bytes(gzip.compress(lines(0, 12).encode()))
    submit(old, "packed", overrides={"input": str(path)})
    (old / "more.jsonl.gz").write_bytes(gzip.compress(lines(12, 16).encode()))
    with extending(old, "packed", {"input": [str(path), str(old / "more.jsonl.gz")]}) as draft:
        assert draft.extension.shards.keys() == {0}
    path.write_bytes(gzip.compress(lines(0, 16).encode()))
    said = rf"extended: {path} differs from the former {path}, and with compressed files .* lines into a file of"
    with pytest.raises(SlurmGPUError, match=said), extending(old, "packed", {"input": str(path)}):
        pass


def test_a_look_extends_nothing_and_is_not_extended(old):
    (old / "data" / "c.jsonl").write_text(lines(36, 45))
    submit(old, "look", limit=8)
    with pytest.raises(SlurmGPUError, match="it computed only some items of its input"), extending(old, "look"):
        pass
    with pytest.raises(SlurmGPUError, match="leave out --items and --limit"), extending(old, look=Look("1:2")):
        pass


def extending(folder, run="old/run", overrides=None, **options):
    return draft_run(folder / "slurmgpu.toml", overrides, folder / "new", extends=Run.open(folder / run), **options)
