"""The rows of a run of some items, whose indices are those in the input: shown, exported and compared."""

import json
from itertools import product
from shutil import copytree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slurmgpu
from slurmgpu.cli.views.report import show_report
from slurmgpu.merge.item_names import find_item, name_by_key
from slurmgpu.merge.merge import merge
from slurmgpu.operations import wait
from slurmgpu.report.report_file import last_report
from slurmgpu.results.published import RunRows
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan

INDICES = [0, 1, 2, 10, 11, 12, 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.support.runs import make_project

    folder = make_project(tmp_path_factory.mktemp("looks") / "project", 24, shard_items=4, key="x")
    options = {"executor": "debug", "gpus": 0}
    slurmgpu.submit(folder / "slurmgpu.toml", items="10:13,0:3,20", **options)
    slurmgpu.submit(folder / "slurmgpu.toml", **options)
    return folder


@pytest.mark.parametrize("is_merged", [True, False])
def test_they_are_found_by_their_indices(folder, is_merged):
    run = Run.open(folder / "run-look")
    hidden = run.merged.with_suffix(".away")
    if not is_merged:
        run.merged.rename(hidden)
    try:
        with RunRows(run) as rows:
            assert [row.index for row in rows.rows()] == INDICES
            assert [row.index for row in rows.rows(2, 12)] == [2, 10, 11]
            assert rows.present() == [(0, 3), (10, 13), (20, 21)]
            assert rows.present(1, 11) == [(1, 3), (10, 11)]
            assert len(rows) == len(INDICES)
    finally:
        if not is_merged:
            hidden.rename(run.merged)


def test_they_are_shown_with_their_items_and_exported(slurmgpu, folder):
    shown = slurmgpu("show", "run-look", "--with-items", "--items", "2:21", "--json", cwd=folder, expect=0).stdout
    found = json.loads(shown)
    assert [(row["index"], row["item"]["x"]) for row in found["rows"]] == [(i, i) for i in INDICES[2:]]
    assert found["n_missing"] == 0
    slurmgpu("export", "run-look", "-o", "rows.jsonl", cwd=folder, expect=0)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == INDICES


@pytest.mark.parametrize("key", [None, "x"])
def test_they_equal_those_of_the_run_of_all_items(folder, key):
    found = slurmgpu.compare(folder / "run-look", folder / "run", key=key)
    assert (found.n_common, found.n_different, found.a.n_only, found.b.n_only) == (7, 0, 0, 17)


def test_each_has_the_code_that_computed_it(folder):
    for run in (folder / "run-look", folder / "run"):
        [code] = last_report(Run.open(run))["code"]
        for path in (run / "merged.h5", run / "shards" / "00001.h5"):
            with slurmgpu.open(path) as rows:
                assert rows.code.tolist() == [code["digest"]] * len(rows)


def test_a_missing_shard_is_named_by_its_items_in_the_input(folder, tmp_path, capsys):
    run = Run.open(copytree(folder / "run-look", tmp_path / "run"))
    run.shard_path(1).unlink()
    run.merged.unlink()
    report = merge(run)
    assert report["missing"] == [{"shard": 1, "start": 11, "stop": 21, "damaged": None}]
    assert (report["n_missing_items"], report["n_rows"]) == (3, 4)
    show_report(report)
    assert "missing  3 items in 1 shard\n  shard 1: items 11..20\n" in capsys.readouterr().out


def test_they_are_followed_while_the_run_is_at_work(folder, monkeypatch):
    def one_look(run, pause):
        yield
        raise AssertionError("rows that are published were left for later")

    monkeypatch.setattr(wait, "_while_alive", one_look)
    assert [row.index for row in slurmgpu.open_run(folder / "run-look").rows()] == INDICES


def test_their_items_go_by_their_key(folder):
    run = Run.open(folder / "run-look")
    assert [name_by_key(run, index) for index in (2, 11, 20)] == ["2", "11", "20"]
    assert [find_item(run, f"x={index}") for index in (2, 11, 20)] == [2, 11, 20]
    assert name_by_key(run, 3) is None


def test_one_is_shown_by_its_key(slurmgpu, folder):
    for name in ("x=11", "11"):
        shown = json.loads(slurmgpu("show", "run-look", "--items", name, "--json", cwd=folder).stdout)
        assert [row["index"] for row in shown["rows"]] == [11]
    assert "has no item whose x is '3'" in slurmgpu("show", "run-look", "--items", "x=3", cwd=folder, expect=2).stderr


class _Ranges(list):
    """Ranges that count how often one is looked at."""

    n_looks = 0

    def __getitem__(self, number):
        self.n_looks += 1
        return super().__getitem__(number)

    def __iter__(self):
        return (self[number] for number in range(len(self)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=6))
def test_places_and_indices_are_those_of_the_ranges(gaps):
    ranges, at = [], 0
    for gap, size in gaps:
        ranges.append([at + gap, at + gap + size])
        at += gap + size + 1
    indices = [index for span in ranges for index in range(*span)]
    plan = plan_of(ranges, len(indices))
    assert [plan.place(index) for index in range(at + 2)] == [
        indices.index(index) if index in indices else None for index in range(at + 2)
    ]
    assert [plan.n_before(index) for index in range(at + 2)] == [
        sum(each < index for each in indices) for index in range(at + 2)
    ]
    for start, stop in product(range(len(indices) + 1), range(len(indices) + 2)):
        assert plan.indices(start, stop) == indices[start:stop]
        assert all(first < last for first, last in plan.spans(start, stop))


def test_an_item_of_a_look_is_found_without_a_look_at_each_range():
    ranges = _Ranges([2 * number, 2 * number + 1] for number in range(10_000))
    plan = plan_of(ranges, 10_000)
    assert (plan.indices(0, 1), plan.place(0)) == ([0], 0)
    ranges.n_looks = 0
    assert [plan.indices(place, place + 1) for place in (7, 9_999)] == [[14], [19_998]]
    assert [plan.place(index) for index in (14, 15, 19_998)] == [7, None, 9_999]
    assert ranges.n_looks < 200


def plan_of(ranges, n_items):
    values = dict.fromkeys(Plan.__dataclass_fields__, None)
    return Plan(**{**values, "look": "look", "input": {"ranges": ranges}, "n_items": n_items})


def test_items_are_read_after_the_run_files_folder_has_gone(slurmgpu, tmp_path, project):
    folder = project(12, input=str(tmp_path / "items.jsonl"), key="x")
    (folder / "items.jsonl").rename(tmp_path / "items.jsonl")
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    (folder / "run").rename(tmp_path / "kept")
    folder.rename(tmp_path / "gone")
    shown = slurmgpu("show", "kept", "--items", "x=11", "--with-items", "--json", cwd=tmp_path, expect=0).stdout
    [row] = json.loads(shown)["rows"]
    assert row["item"] == {"text": "item 11 of many", "x": 11}
    (tmp_path / "items.jsonl").unlink()
    said = slurmgpu("show", "kept", "--with-items", cwd=tmp_path, expect=2).stderr
    assert f"{tmp_path}/items.jsonl cannot be read (No such file or directory)" in said
