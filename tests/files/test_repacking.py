"""Inputs without random access, and items from Python: repacked at planning into the run directory."""

from __future__ import annotations

import bz2
import datetime
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import InputSpec, Reader, find, repack_records, scan
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


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: bytes(pa.Codec("zstd").compress(content, asbytes=True)),
}


def repacked(records: Any, folder: Path) -> InputSpec:
    folder.mkdir(exist_ok=True)
    return repack_records(records, folder, folder / "index", stride=4)


def all_items(spec: InputSpec, index: Path) -> list[Any]:
    with Reader(spec, index) as reader:
        return [
            item for start in range(0, spec.n_items, 7) for item in reader.read(start, min(start + 7, spec.n_items))
        ]


def read_plan(path: Path) -> tuple[Any, list[str]] | str:
    """The columns and the items of a file, with its path left out of errors; or why it is refused."""
    index = path.with_name("index")

    def words(text: object) -> str:
        return str(text).replace(str(path), "FILE")

    try:
        spec = scan([path], index, stride=4)
    except SlurmGPUError as error:
        return words(error)
    items = all_items(spec, index)
    return spec.columns, [words(item) if isinstance(item, ItemError) else item for item in items]


JSONL = [f'{{"id": {i}, "text": "tëxt {i % 9}"}}'.encode() for i in range(3000)]


@pytest.mark.parametrize("compressed", COMPRESSORS)
@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("jsonl", b"\n".join(JSONL)),
        ("jsonl", b"\xef\xbb\xbf" + b"\r\n".join(JSONL) + b"\r\n\n\n"),
        ("jsonl", b"\n".join([*JSONL[:2500], b"not json", *JSONL[2500:]]) + b"\n"),
        ("jsonl", b"\n".join([*JSONL[:20], b"not json"])),
        ("jsonl", b"\n".join([*JSONL, b'{"cut": '])),
        ("jsonl", b"\n" * 100),
        ("jsonl", b""),
        ("csv", b'id,text\r\n1,"a\r\nb"\r\n2,"say ""x"""\r\n\r\n'),
        ("csv", b"id,text\n" + b'7,"two\nlines"\n' * 60_000 + b"8\n" + b"9,x\n" * 20_000),
        ("csv", b"id,text\n" + b"1,x\n" * 30_000 + b'2,x"y\n'),
        ("csv", b"id,text\n\n"),
        ("txt", b"a\n\nb\n\n"),
        ("txt", b"\n"),
        ("txt", b"x" * 3_000_000 + b"\n" + b"y" * 70_000 + b"\n"),
    ],
)
def test_a_compressed_file_is_read_as_the_plain_one(
    tmp_path: Path, suffix: str, content: bytes, compressed: str
) -> None:
    (tmp_path / f"a.{suffix}").write_bytes(content)
    half = len(content) // 2
    members = COMPRESSORS[compressed](content[:half]) + COMPRESSORS[compressed](content[half:])
    (tmp_path / f"a.{suffix}.{compressed}").write_bytes(members)
    assert read_plan(tmp_path / f"a.{suffix}.{compressed}") == read_plan(tmp_path / f"a.{suffix}")


@pytest.mark.parametrize("compressed", COMPRESSORS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda members: members[:-9],
        lambda members: members[: len(members) // 4],
        lambda members: members + b"junk of twenty bytes",
        lambda members: members[:60] + bytes(40) + members[100:],  # Arrow's zstd writes no checksum of the content
        lambda members: b'{"text": "not compressed"}\n',
    ],
    ids=["cut", "cut early", "with junk behind it", "altered", "plain"],
)
def test_a_damaged_archive_is_refused(tmp_path: Path, compressed: str, damage: Callable[[bytes], bytes]) -> None:
    content = b"\n".join(JSONL)
    path = tmp_path / f"a.jsonl.{compressed}"
    path.write_bytes(damage(COMPRESSORS[compressed](content) + COMPRESSORS[compressed](content)))
    with pytest.raises(SlurmGPUError, match=re.escape(str(path))):
        scan([path], tmp_path / "index", stride=4)


def test_files_of_several_compressions_are_one_input(tmp_path: Path) -> None:
    contents = [b"\n".join(JSONL[i : i + 600]) for i in range(0, 3000, 600)]
    for number, (content, suffix) in enumerate(zip(contents, [*COMPRESSORS, ""], strict=True)):
        packed = COMPRESSORS[suffix](content) if suffix else content
        (tmp_path / f"{number}.jsonl{suffix and '.'}{suffix}").write_bytes(packed)
    paths = find("*.jsonl*", tmp_path)
    spec = scan(paths, tmp_path / "index", stride=4)
    assert [item["id"] for item in all_items(spec, tmp_path / "index")] == list(range(3000))
    assert [file.sha256 for file in spec.files] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert [file.source for file in spec.files] == [*map(str, paths)]


PLAN = """
import resource, sys
from pathlib import Path
from slurmgpu.inputs import scan
import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
scan([Path(sys.argv[1])], Path(sys.argv[2]), stride=16)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_repacking_300_mb_takes_less_than_150_mb_of_memory(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 998}).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 10_000, 1) * 30)
    command = [sys.executable, "-c", PLAN, str(tmp_path / "a.jsonl.gz"), str(tmp_path / "index")]
    grown_mb = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown_mb < 150


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
