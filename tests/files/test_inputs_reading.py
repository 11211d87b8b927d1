"""Any range of any input equals what the plain parser of its format makes of the whole file."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import Reader, scan, scanner
from slurmgpu.inputs import lines as line_formats
from slurmgpu.inputs.formats import named

BOM = codecs.BOM_UTF8
NEWLINES = st.sampled_from(["\n", "\r\n"])

# Blocks down to one byte: every state at every boundary.
BLOCKS = st.sampled_from([1, 2, 3, 7, 64, 1 << 20])


def check_ranges(suffix: str, contents: Sequence[bytes], expected: list[Any], data: st.DataObject) -> None:
    """Plan over files of these contents and compare ranges of all kinds with the slices of `expected`."""
    stride = data.draw(st.integers(1, 9), label="stride")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}{suffix}" for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        index = Path(folder) / "index"
        with (
            mock.patch.object(scanner, "CHUNK_BYTES", data.draw(BLOCKS, label="chunk")),
            mock.patch.object(line_formats, "_HEAD_BYTES", data.draw(BLOCKS, label="head")),
            mock.patch.object(line_formats, "CHUNK_BYTES", data.draw(BLOCKS, label="block")),
        ):
            spec = scan(paths, index, stride=stride)
            assert [item for path in paths for item in named(spec.format).items(path)] == expected
        assert spec.n_items == len(expected)
        with Reader(spec, index) as reader:
            assert reader.read(0, spec.n_items) == expected
            for start in range(0, spec.n_items, stride):
                assert reader.read(start, min(start + stride, spec.n_items)) == expected[start : start + stride]
            for _ in range(3):
                start = data.draw(st.integers(0, spec.n_items))
                stop = data.draw(st.integers(start, spec.n_items))
                assert reader.read(start, stop) == expected[start:stop]


JSON_TEXT = st.text(st.characters(codec="utf-8"))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | JSON_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(JSON_TEXT, inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
def test_any_range_of_jsonl_is_what_the_json_module_reads(data: st.DataObject) -> None:
    objects = st.fixed_dictionaries({"id": JSON_VALUES, "text": JSON_VALUES})
    files = data.draw(st.lists(st.lists(objects, min_size=1, max_size=25), min_size=1, max_size=3))
    contents = []
    for file in files:
        newline, ascii_only = data.draw(NEWLINES), data.draw(st.booleans())
        end = data.draw(st.sampled_from(["", newline, newline * 3]))
        content = newline.join(json.dumps(value, ensure_ascii=ascii_only) for value in file) + end
        contents.append(data.draw(st.sampled_from([b"", BOM])) + content.encode())
    check_ranges(".jsonl", contents, [value for file in files for value in file], data)


@given(data=st.data())
def test_any_range_of_csv_is_what_the_csv_module_reads(data: st.DataObject) -> None:
    text = st.text(
        st.characters(codec="utf-8", exclude_characters="\0\ufeff") | st.sampled_from("\",\r\n' "), max_size=9
    )
    columns = data.draw(st.lists(text, min_size=2, max_size=4, unique=True))
    rows = st.lists(text, min_size=len(columns), max_size=len(columns))
    files = data.draw(st.lists(st.lists(rows, min_size=1, max_size=25), min_size=1, max_size=3))
    contents, expected = [], []
    for file in files:
        text_file, newline = io.StringIO(newline=""), data.draw(NEWLINES)
        # A field with a bare \r is quoted by QUOTE_MINIMAL only where \r is part of the newline.
        quoting = csv.QUOTE_ALL if newline == "\n" else data.draw(st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))
        csv.writer(text_file, lineterminator=newline, quoting=quoting).writerows([columns, *file])
        content = text_file.getvalue()
        if data.draw(st.booleans()):
            content = content.removesuffix(newline)
        contents.append(data.draw(st.sampled_from([b"", BOM])) + content.encode())
        expected += list(csv.DictReader(io.StringIO(content, newline="")))
    check_ranges(".csv", contents, expected, data)


@given(data=st.data())
def test_any_range_of_txt_is_its_lines(data: st.DataObject) -> None:
    lines = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\ufeff"), max_size=9)
    files = data.draw(st.lists(st.lists(lines, min_size=1, max_size=25), min_size=1, max_size=3))
    contents = []
    for file in files:
        newline = data.draw(NEWLINES)
        content = newline.join(file)
        if data.draw(st.booleans()) or not file[-1]:
            content += newline
        contents.append(data.draw(st.sampled_from([b"", BOM])) + content.encode())
    check_ranges(".txt", contents, [{"text": line} for file in files for line in file], data)


@given(data=st.data(), suffix=st.sampled_from([".jsonl", ".csv", ".txt"]))
def test_no_bytes_stop_the_other_items(data: st.DataObject, suffix: str) -> None:
    """Bytes of any kind after the part that planning looks at: each line is an item or an error, never an exception."""
    good = {".jsonl": b'{"a": 1}', ".csv": b"1,2", ".txt": b"x"}[suffix]
    lines = data.draw(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"").replace(b'"', b""))))
    content = b"\n".join([b"a,b"] * (suffix == ".csv") + [good] * 100 + lines + [good])
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(line_formats, "_N_SAMPLED_RECORDS", 1):
        path, index = Path(folder) / f"a{suffix}", Path(folder) / "index"
        path.write_bytes(content)
        spec = scan([path], index, stride=7)
        with Reader(spec, index) as reader:
            items = reader.read(0, spec.n_items)
    assert len(items) == 101 + len(lines)
    assert not any(isinstance(item, ItemError) for item in (*items[:100], items[-1]))
    for number, (line, item) in enumerate(zip(lines, items[100:], strict=False), 101):
        if isinstance(item, ItemError):
            assert f"{'record' if suffix == '.csv' else 'line'} {number}: expected" in str(item)
        elif suffix == ".txt":
            assert item == {"text": line.removesuffix(b"\r").decode()}


@pytest.mark.parametrize(
    ("suffix", "content", "expected"),
    [
        (".txt", b"\n", [{"text": ""}]),
        (".txt", b"\n\n", [{"text": ""}] * 2),
        (".txt", b"a\n\nb\n\n", [{"text": "a"}, {"text": ""}, {"text": "b"}, {"text": ""}]),
        (".txt", b"a\r\n\r\nb", [{"text": "a"}, {"text": ""}, {"text": "b"}]),
        (".txt", "a\u2028b\x0bc\x85d\n".encode(), [{"text": "a\u2028b\x0bc\x85d"}]),
        (".jsonl", b'{"a": 1}', [{"a": 1}]),
        (".jsonl", b'{}\n{"a": Infinity}\n\r\n\n', [{}, {"a": float("inf")}]),
        (".csv", b"a\n1\n", [{"a": "1"}]),
        (".csv", b'a\n""\n" "\n', [{"a": ""}, {"a": " "}]),
        (".csv", b'"a\n","b"""\n1,2\n', [{"a\n": "1", 'b"': "2"}]),
        (".csv", b",b\n1,2", [{"": "1", "b": "2"}]),
        (".csv", b"a;b,c\n1,2\n", [{"a;b": "1", "c": "2"}]),
        (".csv", b"a,b\n1,\n,\n", [{"a": "1", "b": ""}, {"a": "", "b": ""}]),
    ],
)
def test_what_is_an_item(
    tmp_path: Path, suffix: str, content: bytes, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, index = tmp_path / f"a{suffix}", tmp_path / "index"
    path.write_bytes(content)
    spec = scan([path], index, stride=2)
    with Reader(spec, index) as reader:
        assert reader.read(0, spec.n_items) == expected
    for block in (1, 2, 3, 1 << 20):
        monkeypatch.setattr(line_formats, "CHUNK_BYTES", block)
        assert [*named(suffix[1:]).items(path)] == expected  # as workloads read at planning


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt", ".jsonl.gz"])
def test_reading_all_items_keeps_only_a_block_of_a_file_in_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    with gzip.open(path, "wb") if suffix.endswith(".gz") else open(path, "wb") as file:
        file.write(b"text\n" if suffix == ".csv" else b"")
        for _ in range(40):
            file.write((b'{"text": "%s"}\n' if suffix.startswith(".jsonl") else b'"%s"\n') % (b"x" * 2000) * 500)
    [*itertools.islice(named(suffix[1:].removesuffix(".gz")).items(path), 10)]  # imports
    tracemalloc.start()
    try:
        assert sum(1 for _ in named(suffix[1:].removesuffix(".gz")).items(path)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 10 << 20  # the lines have 40 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_a_stray_quote_is_found_wherever_a_block_ends(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "CHUNK_BYTES", block)
    (tmp_path / "a.csv").write_text("a,b\n" + '"1\n",2\n' * 200 + '5" disk,2\n' + '1,"2"\n' * 20)
    monkeypatch.setattr(line_formats, "_HEAD_BYTES", block)
    with pytest.raises(SlurmGPUError, match=r"a.csv, line 402: .* a quote in a field"):
        scan([tmp_path / "a.csv"], tmp_path / "index", stride=2)


@pytest.mark.parametrize("write", [lambda text: f'"{text}"', lambda text: text])
def test_a_csv_field_may_be_longer_than_the_csv_modules_limit(tmp_path: Path, write: Callable[[str], str]) -> None:
    path, index, text = tmp_path / "a.csv", tmp_path / "index", "x" * 3_000_000
    path.write_text(f"a,b\n1,2\n3,{write(text)}\n5,6\n")
    spec = scan([path], index, stride=1)
    with Reader(spec, index) as reader:
        assert reader.read(1, 3) == [{"a": "3", "b": text}, {"a": "5", "b": "6"}]


def test_scattered_items_of_a_block_are_read_from_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(640)))
    spec = scan([path], tmp_path / "index", stride=64)
    with Reader(spec, tmp_path / "index") as reader:
        reader.read(0, 1)
        file = mock.Mock(wraps=reader._rows(0)._file)
        reader._rows(0)._file = file
        for n in range(1, 640, 2):
            assert reader.read(n, n + 1) == [{"n": n}]
        assert file.read.call_count == 9  # the first of ten blocks has been read


def test_newlines_at_the_end_of_a_compressed_file_are_no_items_wherever_they_begin(tmp_path: Path) -> None:
    for name, before in [("items.jsonl.gz", ""), ("items.csv.gz", "name\n")]:
        for n_missing in range(-2, 6):
            first = before + ('{"name": "a"}' if not before else "a")
            padded = '{"name": "%s"}' if not before else "%s"
            n_bytes = line_formats._HEAD_BYTES + len(BOM) - n_missing - len(first) - len(padded % "") - 1
            content = f"{first}\n{padded % ('b' * n_bytes)}" + "\r\n" * 4
            (tmp_path / name).write_bytes(gzip.compress(content.encode(), 1))
            spec = scan([tmp_path / name], tmp_path / "index", stride=1, room=lambda: tmp_path)
            assert spec.n_items == 2, (name, n_missing)
            assert len(list(named(spec.format).items(tmp_path / name))) == 2
