"""Parquet files, and the merged files of earlier runs, as inputs."""

from __future__ import annotations

import datetime
import errno
import gzip
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import Reader, check_input, concatenate, find, promise, scan
from slurmgpu.inputs.keys import check_names
from slurmgpu.inputs.tables import ParquetRows
from slurmgpu.merge.join import join
from slurmgpu.merge.sources import Source
from slurmgpu.shards.columns import Array, Ragged, Text
from slurmgpu.shards.piece_table import pieces_of
from slurmgpu.shards.shard_file import write_shard
from slurmgpu.shards.userblock import Reader as BytesReader
from slurmgpu.shards.userblock import read_userblock

ROWS: list[dict[str, Any]] = [
    {
        "id": i,
        "text": None if i % 7 == 3 else f"täxt {i}",
        "tags": [i] * (i % 3),
        "on": datetime.date(2024, 1, 1 + i % 9),
    }
    for i in range(50)
]


def write_parquet(path: Path, rows: list[dict[str, Any]], rows_in_group: int) -> None:
    pq.write_table(
        pa.Table.from_pylist(rows, schema=pa.Table.from_pylist(ROWS).schema),
        path,
        row_group_size=rows_in_group,
        write_page_checksum=True,
        use_dictionary=False,
    )


@pytest.mark.parametrize(("stride", "rows_in_group"), [(1, 50), (4, 1), (7, 9), (64, 20)])
def test_any_range_of_parquet_is_its_rows(tmp_path: Path, stride: int, rows_in_group: int) -> None:
    write_parquet(tmp_path / "a.parquet", ROWS[:30], rows_in_group)
    write_parquet(tmp_path / "b.parquet", ROWS[30:], rows_in_group)
    spec = scan(find("*.parquet", tmp_path), tmp_path / "index", stride=stride)
    assert (spec.format, spec.n_items, spec.columns) == ("parquet", 50, ("id", "text", "tags", "on"))
    assert [file.n_items for file in spec.files] == [30, 20]
    with Reader(spec, tmp_path / "index") as reader:
        for start in range(51):
            for stop in {start, start + 1, start + 8, start + 19, 50}:
                assert reader.read(start, min(stop, 50)) == ROWS[start:stop]


def test_damage_in_one_row_group_is_that_groups_items_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, ROWS, 10)
    spec = scan([path], tmp_path / "index", stride=10)
    column = pq.ParquetFile(path).metadata.row_group(2).column(1)
    with open(path, "r+b") as file:
        file.seek(column.data_page_offset + column.total_compressed_size - 8)
        file.write(b"\xff" * 8)
    os.utime(path, ns=(0, spec.files[0].mtime_ns))
    with Reader(spec, tmp_path / "index") as reader:
        items = reader.read(0, 50)
    assert items[:20] + items[30:] == ROWS[:20] + ROWS[30:]
    assert all(isinstance(item, ItemError) for item in items[20:30])
    assert f"{path}, row group 2: expected Parquet, found damage" in str(items[25])


def test_a_row_group_that_cannot_be_read_at_the_moment_is_no_items_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **options: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = str(tmp_path / "a.parquet")
    write_parquet(tmp_path / "a.parquet", ROWS, 10)
    monkeypatch.setattr(ParquetRows, "load", fail)
    with closing(ParquetRows(path)) as rows, pytest.raises(OSError, match="Input/output error"):
        rows.read(0, 3)
    monkeypatch.setattr(pq, "ParquetFile", fail)
    with pytest.raises(OSError, match="Input/output error"):
        ParquetRows(path)  # nor is it another kind of file


FOOTERS = {
    "the name of a column": (b"line", b"lime", b"text", b"test"),
    "a name that is no UTF-8": (b"line", b"\xeeine", b"text", b"\xeeext"),
    "the number of rows": (b"\x16\x64", b"\x16\x62", b"\x16\x14", b"\x16\x12"),  # as integers of Thrift's
}


@pytest.mark.parametrize("name", FOOTERS)
@pytest.mark.parametrize("suffix", ["jsonl.gz", "parquet"])
def test_a_footer_with_other_rows_or_columns_than_planned_is_refused(tmp_path: Path, suffix: str, name: str) -> None:
    """No checksum covers the footer of a Parquet file."""
    path, is_packed = tmp_path / f"a.{suffix}", suffix != "parquet"
    write_parquet(path, ROWS, 10)
    if is_packed:
        path.write_bytes(gzip.compress(b'{"n": 1}\n' * 50))
    spec = scan([path], tmp_path / "index", stride=10)
    packed, mtime_ns = Path(spec.files[0].path), spec.files[0].mtime_ns
    whole, (former, wrong) = packed.read_bytes(), FOOTERS[name][:2] if is_packed else FOOTERS[name][2:]
    begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    assert former in whole[begin:]
    packed.write_bytes(whole[:begin] + whole[begin:].replace(former, wrong))
    os.utime(packed, ns=(mtime_ns, mtime_ns))
    with pytest.raises(SlurmGPUError, match=r"parquet is (damaged|not a Parquet file)"):
        Reader(spec, tmp_path / "index").read(0, 50)


def test_a_value_that_python_cannot_have_is_its_items_error(tmp_path: Path) -> None:
    whens = pa.array([0] * 3 + [300_000_000_000] + [0] * 6, pa.timestamp("s"))  # beyond the year 9999
    texts = pa.array([b"a"] * 8 + [b"\xff"] + [b"a"]).view(pa.string())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(10), "when": whens, "text": texts}), path)
    spec = scan([path], tmp_path / "index", stride=10)
    with Reader(spec, tmp_path / "index") as reader:
        items = reader.read(0, 10)
        assert reader.read(4, 8) == items[4:8]
    assert [number for number, item in enumerate(items) if isinstance(item, ItemError)] == [3, 8]
    assert [item["n"] for item in items if not isinstance(item, ItemError)] == [0, 1, 2, 4, 5, 6, 7, 9]
    assert f"{path}, row 3, column 'when': " in str(items[3])
    assert f"{path}, row 8, column 'text': UnicodeDecodeError: " in str(items[8])


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for content in (b"", b"PAR1", b"id,text\n1,x\n" * 100):
        path.write_bytes(content)
        with pytest.raises(SlurmGPUError, match=r"a.parquet is not a Parquet file"):
            scan([path], tmp_path / "index", stride=1)
    write_parquet(path, [], 1)
    with pytest.raises(SlurmGPUError, match=r"a.parquet is empty"):
        scan([path], tmp_path / "index", stride=1)
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), path)
    with pytest.raises(SlurmGPUError, match=r"two columns are named 'a'"):
        scan([path], tmp_path / "index", stride=1)


def test_parquet_files_of_other_columns_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "text": ["x"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(SlurmGPUError, match=r"b.parquet has the columns 'id'; expected those of .*a.parquet"):
        scan(find("*", tmp_path), tmp_path / "index", stride=1)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", ROWS, 10)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SlurmGPUError, match=r"needs pyarrow: pip install 'slurmgpu\[parquet\]'"):
        scan(find("*", tmp_path), tmp_path / "index", stride=1)


def write_results(path: Path, start: int, stop: int, n_items: int | None = None) -> list[dict[str, Any]]:
    """A file of an earlier run, and the data that its rows are as items."""
    columns = {"score": Array("float32"), "vector": Array("int16", (2,)), "text": Text(), "lengths": Ragged("int8")}
    rows: list[Any] = [
        {
            "score": np.float32(i / 2),
            "vector": np.array([i, -i], "int16"),
            "text": f"täxt {i}".encode(),
            "lengths": np.arange(i % 3, dtype="int8"),
        }
        for i in range(start, stop)
    ]
    rows[1] = ItemError("too long")
    shard = path.with_suffix(".shard")
    write_shard(shard, columns, start=start, rows=rows, fingerprint="f", notes={}, made_by={})
    parts, n_items = [Source(0, shard, start, stop)], n_items or stop - start
    join(parts, columns, fingerprints=["f"], n_items=n_items, target=path, attributes={})
    expected = [
        {"index": i, "score": i / 2, "vector": [i, -i], "text": f"täxt {i}", "lengths": list(range(i % 3))}
        for i in range(start, stop)
    ]
    expected[1] |= {**dict.fromkeys(columns), "error": "too long"}
    return expected


def plain(item: Any) -> dict[str, Any]:
    """An item's data in plain values, NaN as None, to compare them."""
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in item.items()}
    return {name: None if value != value else value for name, value in values.items()}


def test_any_range_of_an_earlier_runs_file_is_its_rows(tmp_path: Path) -> None:
    expected = write_results(tmp_path / "a.h5", 0, 5) + write_results(tmp_path / "b.h5", 40, 44)
    spec = scan(find("*.h5", tmp_path), tmp_path / "index", stride=2)
    assert (spec.format, spec.n_items) == ("h5", 9)
    assert spec.columns == ("index", "score", "vector", "text", "lengths")
    with Reader(spec, tmp_path / "index") as reader:
        for start in range(10):
            for stop in range(start, 10):
                assert [plain(item) for item in reader.read(start, stop)] == expected[start:stop]


def test_the_merged_file_of_an_incomplete_run_is_refused(tmp_path: Path) -> None:
    write_results(tmp_path / "a.h5", 0, 5, n_items=6)
    with pytest.raises(SlurmGPUError, match="its run is incomplete"):
        scan(find("a.h5", tmp_path), tmp_path / "index", stride=2)


def test_a_file_that_was_waited_for_has_to_be_the_one_that_its_run_promised(tmp_path: Path) -> None:
    expected = write_results(tmp_path / "a.h5", 0, 5)

    def read(*, n_items: int = 5, fingerprint: str = "f") -> list[dict[str, Any]]:
        columns = ["index", "score", "vector", "text", "lengths"]
        promised = promise(tmp_path / "a.h5", n_items=n_items, columns=columns, fingerprint=fingerprint, stride=2)
        spec = concatenate([promised], tmp_path / "index")
        with Reader(spec, tmp_path / "index") as reader:
            return [plain(item) for item in reader.read(0, n_items)]

    assert read() == expected
    for given in ({"n_items": 4}, {"fingerprint": "g"}):
        with pytest.raises(SlurmGPUError, match=r"a\.h5 has 5 rows of plan f; expected .*, which this run waited for"):
            read(**given)


def test_a_file_that_another_run_has_yet_to_write_is_not_missing(tmp_path: Path) -> None:
    promised = promise(tmp_path / "a.h5", n_items=5, columns=["index", "text"], fingerprint="f", stride=2)
    spec = concatenate([promised], tmp_path / "index")
    check_input(spec, tmp_path / "index")
    with pytest.raises(SlurmGPUError, match=r"a\.h5 cannot be read"), Reader(spec, tmp_path / "index") as reader:
        reader.check_some_files()


def test_names_of_items_that_are_still_promised_are_not_looked_at(tmp_path: Path) -> None:
    promised = promise(tmp_path / "a.h5", n_items=5, columns=["index", "text"], fingerprint="f", stride=2)
    assert check_names(concatenate([promised], tmp_path / "index"), tmp_path / "index", "text") is None


def test_an_h5_file_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(5000))
    with pytest.raises(SlurmGPUError, match=r"a\.h5 is an HDF5 file of another program; .* items, write its arrays"):
        scan(find("*", tmp_path), tmp_path / "index", stride=1)


def turn(path: Path, piece: str) -> None:
    """Turn a bit of a merged file in the bytes of one piece, and leave its time as it was."""
    with BytesReader(path) as reader:
        directory, table, _ = read_userblock(reader)
    [offset] = [found.offset for found in pieces_of(directory, table) if found.name == piece]
    status, content = path.stat(), bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_an_earlier_runs_file_is_verified_at_planning_and_as_it_is_read(tmp_path: Path) -> None:
    path, columns = tmp_path / "merged.h5", {"score": Array("float32")}
    parts = []
    for shard in range(3):
        rows = [{"score": np.float32(i)} for i in range(4 * shard, 4 * shard + 4)]
        parts.append(Source(shard, tmp_path / f"{shard}.h5", 4 * shard, 4 * shard + 4))
        write_shard(parts[-1].path, columns, start=4 * shard, rows=rows, fingerprint="f", notes={}, made_by={})
    join(parts, columns, fingerprints=["f"], n_items=12, target=path, attributes={})
    (tmp_path / "run.json").write_text("{}")
    spec = scan([path], tmp_path / "index", stride=4)
    turn(path, "score of shard 1")
    said = "the checksum of score of shard 1 differs"
    merged_anew = f"`slurmgpu merge {tmp_path}` rewrites merged.h5 from the run's shards"
    with Reader(spec, tmp_path / "index") as reader:
        assert [item["score"] for item in reader.read(0, 4)] == [0, 1, 2, 3]
        assert [item["score"] for item in reader.read(8, 12)] == [8, 9, 10, 11]
        for _ in range(2):
            with pytest.raises(SlurmGPUError, match=said) as raised:
                reader.read(3, 5)
            assert merged_anew in str(raised.value)
            assert "Then plan this run again" in str(raised.value)
    with pytest.raises(SlurmGPUError, match=said) as raised:
        scan([path], tmp_path / "index", stride=4)
    assert merged_anew in str(raised.value)
