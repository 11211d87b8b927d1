"""Inputs without random access, and items from Python: repacked at planning into the run directory."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import InputSpec, Reader, repack_records
from slurmgpu.inputs.repacking import GROUP_ITEMS
from slurmgpu.plan.planner import draft_run
from slurmgpu.run.directory import Run, create_run

ROWS: list[dict[str, Any]] = [
    {"id": i, "täxt": f"wörd {i}", "at": {"x": i / 7, "tags": ["a"] * (i % 3)}} for i in range(5000)
]
DATED: list[dict[str, Any]] = [{"id": i, "on": datetime.date(2024, 1, 1 + i % 9), "raw": b"\0" * i} for i in range(300)]

WORKLOAD = """
from slurmgpu import Text

class Texts:
    columns = {"text": Text()}
    batch_size = 4
    def load(self, task):
        pass
    def __call__(self, items):
        return [{"text": str(item.data)} for item in items]
"""


def repacked(records: Any, folder: Path) -> InputSpec:
    folder.mkdir(exist_ok=True)
    return repack_records(records, folder, folder / "index", stride=4)


def all_items(spec: InputSpec, index: Path) -> list[Any]:
    with Reader(spec, index) as reader:
        return [
            item for start in range(0, spec.n_items, 7) for item in reader.read(start, min(start + 7, spec.n_items))
        ]


@pytest.mark.parametrize("records", [ROWS, DATED], ids=["json", "columns"])
def test_items_from_python_are_read_as_they_were(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    spec = repacked(records, tmp_path)
    assert all_items(spec, tmp_path / "index") == records
    again = repacked(iter(records), tmp_path / "again")
    assert again.digest == spec.digest, "the same items planned twice are the same input"
    assert Path(again.files[0].path).read_bytes() == Path(spec.files[0].path).read_bytes()


def test_tables_and_data_frames_are_read_as_their_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(DATED)
    spec = repacked(table, tmp_path / "table")
    assert (spec.columns, all_items(spec, tmp_path / "table" / "index")) == (("id", "on", "raw"), DATED)
    pieces = [table.slice(i, 17) for i in range(0, 300, 17)]
    assert repacked(pa.concat_tables(pieces), tmp_path / "pieces").digest == spec.digest
    frame = repacked(pd.DataFrame(DATED), tmp_path / "frame")
    assert all_items(frame, tmp_path / "frame" / "index") == DATED


def test_row_groups_are_bounded_in_rows_and_in_bytes(tmp_path: Path) -> None:
    about = pq.ParquetFile(repacked(ROWS, tmp_path / "rows").files[0].path).metadata
    assert [about.row_group(i).num_rows for i in range(about.num_row_groups)] == [GROUP_ITEMS, GROUP_ITEMS, 904]
    wide = [{"x": "a" * 200_000} for _ in range(600)]
    about = pq.ParquetFile(repacked(wide, tmp_path / "wide").files[0].path).metadata
    assert [about.row_group(i).num_rows for i in range(about.num_row_groups)] == [256, 256, 88]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "There are no items"),
        ([{"x": 1}, "text"], "Item 1 is of type str: expected a mapping"),
        ([{"x": b"a"}, {"y": b"b"}], "Item 1 has the keys 'y', and item 0 'x'"),
        ([{"x": np.arange(3)}, {"x": "text"}], "The values of 'x' cannot be stored in one column"),
        ([{"x": object()}], "The values of 'x' cannot be stored in one column"),
        (pa.table({"x": []}), "The table has no rows"),
        (pa.table([[1], [2]], names=["x", "x"]), "'x' names two columns"),
    ],
)
def test_items_that_cannot_be_stored_are_refused(tmp_path: Path, records: Any, words: str) -> None:
    with pytest.raises(SlurmGPUError, match=words):
        repacked(records, tmp_path)


def test_repacked_items_move_with_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "texts.py").write_text(WORKLOAD)
    (tmp_path / "run.toml").write_text('[workload]\nuse = "texts.py:Texts"\n')
    with draft_run(tmp_path / "run.toml", records=ROWS) as draft:
        plan = create_run(draft.run_dir, draft.plan, draft.items.files).plan
    assert plan.input["files"][0]["path"] == "input/00000.parquet"
    (tmp_path / "runs" / "run").rename(tmp_path / "moved")
    run = Run.open(tmp_path / "moved")
    assert all_items(InputSpec.from_json(run.input), run.index) == ROWS
    assert not list(tmp_path.glob(".*.partial")), "nothing else is left"
