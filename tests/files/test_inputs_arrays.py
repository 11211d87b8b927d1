"""NumPy's and Arrow's files, and saved data sets, as inputs."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import Reader, arrays, find, list_files, scan, tables
from slurmgpu.inputs.formats import named

ROWS = [{"id": i, "text": f"täxt {i}", "image": {"bytes": bytes([i, 0]), "path": None}} for i in range(30)]
TABLE = pa.Table.from_pylist(ROWS)


def read(pattern: str | list[str], folder: Path, stride: int = 7) -> list[Any]:
    """The items of an input, read in every way that a batch or a part of it may be."""
    assert list_files(pattern, folder) is None
    spec = scan(find(pattern, folder), folder / "index", stride=stride)
    with Reader(spec, folder / "index") as reader:
        whole = reader.read(0, spec.n_items)
        assert str([reader.read(i, i + 1)[0] for i in range(spec.n_items)]) == str(whole)
    with mock.patch.object(tables, "_AT_ONCE", stride):
        planned = [item for path in find(pattern, folder) for item in named(spec.format).items(path)]
    assert str(planned) == str(whole)  # as workloads read at planning
    return whole


def write_stream(path: Path, table: Any, rows_in_batch: int, **options: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    options = {"options": pa.ipc.IpcWriteOptions(**options)}
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=rows_in_batch)


def refuse(path: Path, said: str) -> None:
    with pytest.raises(SlurmGPUError, match=said):
        scan([path], path.parent / "index", stride=4)


@pytest.mark.parametrize("dtype", ["float32", ">i2", "U5", "bool"])
def test_the_rows_of_an_array_are_items(tmp_path: Path, dtype: str) -> None:
    array = np.arange(60).reshape(20, 3).astype(dtype)
    np.save(tmp_path / "a.npy", array[:12])
    np.save(tmp_path / "b.npy", array[12:])
    found = read("*.npy", tmp_path)
    assert all(list(item) == ["array"] and item["array"].dtype == array.dtype for item in found)
    np.testing.assert_array_equal(np.stack([item["array"] for item in found]), array)
    found[0]["array"][0] = 0  # a workload may write to it


def test_fields_of_an_array_are_columns_and_single_values_are_values(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([(1, 2.5), (3, 4.5)], dtype=[("x", "i4"), ("y", "f8")]))
    assert read("a.npy", tmp_path) == [{"x": 1, "y": 2.5}, {"x": 3, "y": 4.5}]
    np.save(tmp_path / "a.npy", np.arange(3))
    assert read("a.npy", tmp_path) == [{"array": 0}, {"array": 1}, {"array": 2}]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_one_length_are_columns(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", x=np.arange(10.0).reshape(5, 2), label=np.arange(5))
    found = read("a.npz", tmp_path)
    assert [item["label"] for item in found] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(np.stack([item["x"] for item in found]), np.arange(10.0).reshape(5, 2))


def test_large_arrays_of_one_file_are_read_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MOST_BYTES", 100)
    path = tmp_path / "a.npz"
    rng = np.random.default_rng(0)
    wanted = {
        "x": rng.random((30, 2)),
        "näme": np.array([f"t{i}" for i in range(30)]),
        "one": np.arange(30, dtype="u1"),
    }
    np.savez(path, **wanted)
    monkeypatch.setattr(np, "load", None)
    found = read("a.npz", tmp_path)
    for name, array in wanted.items():
        assert found[0][name].dtype.kind == array.dtype.kind
        np.testing.assert_array_equal(np.stack([item[name] for item in found]), array)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"t\0\0\0", b"s\0\0\0", 1))
    refuse(path, "texts: Bad CRC-32 for file 'näme.npy'")
    np.savez(path, x=np.asfortranarray(np.ones((30, 2))))
    refuse(path, "in Fortran order")
    np.savez(path, x=np.array([None] * 30))
    refuse(path, "has Python objects")
    np.savez(path, x=np.ones(30), y=np.ones(31))
    refuse(path, "expected the same number of rows")
    np.savez_compressed(path, **wanted)
    refuse(path, "bytes of compressed arrays, but at most 100 are read into memory. Write it with np.savez")


def test_arrays_that_have_no_rows_or_are_not_whole_are_refused(tmp_path: Path) -> None:
    path, packed = tmp_path / "a.npy", tmp_path / "a.npz"
    np.save(path, np.arange(100))
    content = path.read_bytes()
    for part in (content[:-1], content[:50], b"", b"text" * 100):
        path.write_bytes(part)
        refuse(path, r"a.npy has no intact array of numbers or texts")
    # What Python's tokenizer and its parser raise for a header that is no dictionary.
    for wrong in (b"'<i8'(", b"'<i8'="):
        path.write_bytes(content.replace(b"'<i8',", wrong))
        refuse(path, r"a.npy has no intact array of numbers or texts")
    path.write_bytes(content * 2)
    refuse(path, "bytes after its array; expected one array")
    np.save(path, np.float32(1))
    refuse(path, "has a single value")
    np.save(path, np.asfortranarray(np.ones((3, 4))))
    refuse(path, "in Fortran order")
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    refuse(path, "without pickle")
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("text.npy", "no array")
    refuse(packed, "its member 'text' is no array")
    np.save(path, np.ones((0, 4)))
    refuse(path, "a.npy is empty")
    np.savez(packed, x=np.arange(3), y=np.arange(4))
    refuse(packed, r"has the arrays x \(3,\), y \(4,\); expected the same number of rows")
    for first in (np.arange(3), np.float32(1)):
        np.savez(packed, x=first, y=np.float32(1))
        refuse(packed, "expected the same number of rows")
    np.savez(packed, x=np.array([None]))
    refuse(packed, "has no intact arrays of numbers or texts")
    np.savez(packed, x=np.arange(3000))
    damaged = bytearray(packed.read_bytes())
    damaged[2000] ^= 1
    packed.write_bytes(damaged)
    refuse(packed, "texts: Bad CRC-32")
    np.savez(packed, x=np.arange(3))
    content = packed.read_bytes()
    for method in (zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED):
        packed.write_bytes(content.replace(bytes(2) + b"\0\0!\0", bytes([method, 0]) + b"\0\0!\0"))
        refuse(packed, "has no intact arrays of numbers or texts")


@pytest.mark.parametrize("compression", ["uncompressed", "lz4"])
def test_the_rows_of_arrow_files_are_items(tmp_path: Path, compression: str) -> None:
    pyarrow.feather.write_feather(TABLE.slice(0, 20), tmp_path / "a.feather", compression=compression, chunksize=6)
    options = {"compression": None if compression == "uncompressed" else compression}
    write_stream(tmp_path / "b.arrow", TABLE.slice(20), 4, **options)
    assert read(["a.feather", "b.arrow"], tmp_path) == ROWS


def test_a_path_may_have_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xffn\ne w")
    folder.mkdir()
    with open(folder / "a.parquet", "wb") as file:
        pyarrow.parquet.write_table(TABLE, file)
    with open(folder / "a.feather", "wb") as file:
        pyarrow.feather.write_feather(TABLE, file)
    for name in ("a.parquet", "a.feather"):
        assert read(name, folder) == ROWS


def test_an_arrow_file_that_is_cut_after_it_was_opened_kills_no_process(tmp_path: Path) -> None:
    path, index = tmp_path / "a.arrow", tmp_path / "index"
    pyarrow.feather.write_feather(pyarrow.table({"x": range(99_999)}), path, compression="uncompressed", chunksize=999)
    with Reader(scan([path], index, stride=8), index) as reader:
        assert reader.read(0, 1) == [{"x": 0}]
        os.truncate(path, 4096)
        with pytest.raises(SlurmGPUError, match="The input has changed since the run was planned"):
            reader.read(90_000, 90_001)


def test_arrow_files_that_are_cut_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    for name, said in (("stream", "was truncated"), ("file", "is not an Arrow file, or was truncated")):
        if name == "stream":
            write_stream(path, TABLE, 10)
        else:
            pyarrow.feather.write_feather(TABLE, path, chunksize=10)
        content = path.read_bytes()
        for size in range(8, len(content), 104):
            path.write_bytes(content[:size])
            refuse(path, said)
    write_stream(path, TABLE, 10)
    path.write_bytes(path.read_bytes() * 2)
    refuse(path, "bytes after its end; expected one stream")
    path.write_bytes(b"")
    refuse(path, "is not an Arrow file")
    path.write_bytes(b"FEA1" + bytes(100))
    refuse(path, "version 1")
    for write in (pyarrow.feather.write_feather, pyarrow.parquet.write_table):
        path = tmp_path / ("a.arrow" if write is pyarrow.feather.write_feather else "a.parquet")
        write(pyarrow.table({"name": [1]}), path)
        path.write_bytes(path.read_bytes().replace(b"name", b"n\xffme"))
        refuse(path, f"{path} is not an? (Arrow|Parquet) file")


def test_damage_in_one_batch_is_that_batchs_items_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_stream(path, TABLE, 10)
    spec = scan([path], tmp_path / "index", stride=10)
    content = path.read_bytes()
    path.write_bytes(content.replace("täxt 15".encode(), b"t\xff\xffxt 15"))
    os.utime(path, ns=(0, spec.files[0].mtime_ns))
    with Reader(spec, tmp_path / "index") as reader:
        found = reader.read(0, 30)
    assert found[:10] + found[20:] == ROWS[:10] + ROWS[20:]
    assert all(isinstance(item, ItemError) for item in found[10:20])
    assert f"{path}, record batch 1: expected Arrow, found damage" in str(found[12])


def save(folder: Path, state: Any = None) -> None:
    """A data set as `save_to_disk` writes it, in files whose order is not that of their names."""
    write_stream(folder / "data-2.arrow", TABLE.slice(0, 12), 5)
    write_stream(folder / "data-1.arrow", TABLE.slice(12), 5)
    files = [{"filename": "data-2.arrow"}, {"filename": "data-1.arrow"}]
    (folder / "state.json").write_text(json.dumps(state or {"_data_files": files, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_data_set_is_its_rows_in_its_order(tmp_path: Path) -> None:
    save(tmp_path / "ds")
    assert read("ds", tmp_path) == read("ds/", tmp_path) == ROWS


def test_a_data_set_of_splits_is_named_by_one(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    save(tmp_path / "ds/train")
    with pytest.raises(SlurmGPUError, match=r"ds is a data set with several splits. Name one, such as '.*/ds/train'"):
        read("ds", tmp_path)
    assert read("ds/train", tmp_path) == ROWS


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"_data_files": []}, "ds has no files"),
        ({"x": 1}, "state.json that save_to_disk did not write"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow does not exist"),
        ({"_data_files": [{"filename": "data-1.arrow"}], "_indices_data_files": [{}]}, "through a table of indices"),
    ],
)
def test_a_data_set_that_is_not_whole_is_refused(tmp_path: Path, state: Any, said: str) -> None:
    save(tmp_path / "ds", state)
    with pytest.raises(SlurmGPUError, match=said):
        read("ds", tmp_path)


def test_a_workload_that_changes_an_array_changes_no_later_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)))
    spec = scan([tmp_path / "a.npz"], tmp_path / "index", stride=2)
    with Reader(spec, tmp_path / "index") as reader:
        for _ in range(2):
            [item] = reader.read(1, 2)
            assert not isinstance(item, ItemError)
            assert item["x"].tolist() == [0, 0]
            item["x"][:] = 1


def test_an_array_that_is_cut_after_planning_is_no_content(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((4, 90_000)))
    spec = scan([tmp_path / "a.npy"], tmp_path / "index", stride=1)
    with Reader(spec, tmp_path / "index") as reader:
        rows = reader._rows(0)  # as if it were cut right after the reader has looked at its size
        os.truncate(tmp_path / "a.npy", 1000)
        with pytest.raises(SlurmGPUError, match="was truncated while it was read"):
            rows.read(3, 4)
