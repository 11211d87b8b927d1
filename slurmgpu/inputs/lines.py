"""Line-based formats: .jsonl, .csv and .txt."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.compression import decompressing
from slurmgpu.inputs.formats import CHUNK_BYTES, Find, Format, Preview, Rows, changed_error, refuse_doubled
from slurmgpu.inputs.index import IndexWriter
from slurmgpu.inputs.records import RecordFinder, split

_JSON_NAMES = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
_OF_LINES = {
    "{": "an object over several lines: jq -c . OLD > NEW writes each in one",
    "[": "a list over several lines: name the file .json",
}
_DECODER = json.JSONDecoder()
BOM = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8."""

_HEAD_BYTES = 1 << 16
_N_RECORDS = 100
_N_SAMPLED_CHUNKS = 64  # in each file, evenly spread
_N_SAMPLED_RECORDS = 8  # in each of these chunks
_NOT_UTF8 = "expected UTF-8, found 0x"


class Lines(Format):
    """A format whose items are lines, or records of several lines; the index has every `stride`-th item's offset."""

    is_indexed = may_be_compressed = grows = True
    quoting: ClassVar[bool] = False
    """Whether quoted fields may contain newlines."""
    has_header: ClassVar[bool] = False
    trims: ClassVar[bool] = True
    """Whether trailing newlines are ignored."""
    unit: ClassVar[str] = "line"
    """What errors call an item."""

    @abstractmethod
    def parse(self, record: bytes, columns: Sequence[str]) -> Mapping[str, Any]:
        """The data of a record; ItemError if it is malformed."""

    def header(self, record: bytes, path: str) -> tuple[str, ...]:
        """The column names, for formats with a header; SlurmGPUError if the header is invalid."""
        raise NotImplementedError

    def lines_in(self, file: BinaryIO, path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
        """The decompressed content of a file as a stream; see `decompressing`."""
        return decompressing(file, path)

    def preview(self, file: BinaryIO, found: Preview) -> Preview:
        """The range of the records, the columns of the header, and the keys of the first objects."""
        end = self._end_of_records(file, found.size_bytes)
        file.seek(0)
        begin = len(BOM) if file.read(len(BOM)) == BOM else 0
        found = replace(found, begin=begin, end=end)
        return found if found.is_empty else self._preview_records(self._first_records(file, found), found)

    def preview_stream(self, stream: BinaryIO, found: Preview) -> Preview:
        """Like `preview`, for a file that can only be read from its beginning; `end` is after the first items."""
        head, size = b"", len(BOM) + _HEAD_BYTES
        while True:
            head += stream.read(size + 1 - len(head))
            if len(head) <= size:
                return self.preview(io.BytesIO(head), replace(found, size_bytes=len(head)))
            begin = len(BOM) if head.startswith(BOM) else 0
            found = replace(found, begin=begin, end=size + 1)
            records = self._first_records(io.BytesIO(head[:size]), found)
            if len(records) > 1:
                while self.trims and len(records) > 1 and not records[-1].strip(b"\r"):
                    records.pop()  # it may be at the end of the file
                return self._preview_records(records, found)
            size *= 2

    def _preview_records(self, records: list[bytes], found: Preview) -> Preview:
        if self.has_header:
            header = records.pop(0)
            line = found.line + header.count(b"\n") + 1
            columns = self.header(header, found.path)
            found = replace(found, begin=found.begin + len(header) + 1, line=line, columns=columns)
        source = LineParser(self, found.path, found.columns)
        items = [source.check(item, record) for item, record in enumerate(records[:_N_RECORDS])]
        return replace(found, keys=frozenset[str]().union(*items))

    def index(self, found: Preview, file: BinaryIO, chunks: Iterable[bytes], writer: IndexWriter) -> int:
        """Add the offsets of a file's records to the index; return their number."""
        source = LineParser(self, found.path, found.columns)
        finder = RecordFinder(found.path, found.begin, found.end, line=found.line, quoting=self.quoting)
        n_before = writer.n_items
        writer.begin_file(found.begin)
        sampled = sampling_distance(found.size_bytes)
        position = 0
        for n_chunks, chunk in enumerate(chunks):
            low, high = max(found.begin - position, 0), found.end - position
            block = np.frombuffer(chunk, np.uint8)[low : max(high, 0)]
            if len(block):
                starts = finder.starts(block)
                if n_chunks % sampled == 0:
                    source.check_sample(writer.n_items - n_before, chunk, starts - position)
                writer.add(starts)
            position += len(chunk)
        finder.finish()
        n_items = writer.n_items - n_before
        file.seek(finder.last_start)
        last = file.read(found.end - finder.last_start)
        source.check(n_items - 1, split(last, quoting=self.quoting)[0])  # finds an interrupted copy
        return n_items

    def open(self, path: str, columns: Sequence[str] | None, find: Find) -> Rows:
        """The items of a file, found by the index."""
        return LineRows(LineParser(self, path, columns), find)

    def items(self, path: Path) -> Iterator[Mapping[str, Any] | ItemError]:
        """All items of a file, a block of which is in memory at a time."""
        with open(path, "rb") as file, self.lines_in(file, path) as stream:
            found = self.preview_stream(stream, Preview(str(path), 0, 0))
        source = LineParser(self, found.path, found.columns)
        with open(path, "rb") as file, self.lines_in(file, path) as stream:
            for number, record in enumerate(self._records(stream, found.begin)):
                yield source.parse(number, record)

    def _records(self, stream: BinaryIO, begin: int) -> Iterator[bytes]:
        """The records from byte `begin` on; no item begins after the last newline."""
        stream.read(begin)
        held: list[bytes] = []  # empty lines, which are items if others follow
        left = b""
        while block := stream.read(max(CHUNK_BYTES, len(left))):
            *records, left = split(left + block, quoting=self.quoting)
            if self.trims:
                records = held + records
                n_kept = next((n for n in range(len(records), 0, -1) if records[n - 1].strip(b"\r")), 0)
                records, held = records[:n_kept], records[n_kept:]
            yield from records
        if left.strip(b"\r") if self.trims else left:
            yield from (*held, left)

    def _end_of_records(self, file: BinaryIO, end: int) -> int:
        while self.trims and end > 0:
            start = max(0, end - _HEAD_BYTES)
            file.seek(start)
            tail = file.read(end - start).rstrip(b"\r\n")
            end = start + len(tail)
            if tail:
                break
        return end

    def _first_records(self, file: BinaryIO, found: Preview) -> list[bytes]:
        """The first complete records: at least two (the header and another) if there are two."""
        begin, end = found.begin, found.end
        file.seek(begin)
        finder = RecordFinder(found.path, begin, end, line=1, quoting=self.quoting)
        data, n_starts = b"", 0
        while n_starts < 2 and (block := file.read(min(max(_HEAD_BYTES, len(data)), end - begin - len(data)))):
            n_starts += len(finder.starts(np.frombuffer(block, np.uint8)))
            data += block
        records = split(data, quoting=self.quoting)
        if begin + len(data) < end:
            return records[:-1]
        finder.finish()
        return records


class Jsonl(Lines, format="jsonl"):
    """A JSON object on each line."""

    def parse(self, record: bytes, columns: Sequence[str]) -> Mapping[str, Any]:
        """The object."""
        return json_object(record)


class Csv(Lines, format="csv"):
    """CSV as in RFC 4180, with a header."""

    quoting = has_header = True
    unit = "record"

    def parse(self, record: bytes, columns: Sequence[str]) -> Mapping[str, Any]:
        """The fields by the header's names."""
        fields = _csv_fields(record)
        if len(fields) != len(columns):
            raise ItemError(f"expected {len(columns)} fields, as in the header; found {len(fields)}")
        return dict(zip(columns, fields, strict=True))

    def header(self, record: bytes, path: str) -> tuple[str, ...]:
        """The column names in the header, without duplicates."""
        try:
            columns = tuple(_csv_fields(record.removesuffix(b"\r")))
        except ItemError as error:
            raise refused(f"{path}, header: {error}") from error
        refuse_doubled(columns, f"{path}, header")
        if len(columns) == 1 and (marks := [mark for mark in ";\t" if mark in columns[0]]):
            raise SlurmGPUError(
                f"{path}, header: expected names separated by commas, found {columns[0]!r}. Write it with commas, in "
                f"Python pandas.read_csv(path, sep={marks[0]!r}).to_csv('items.csv', index=False)."
            )
        return columns


class Txt(Lines, format="txt"):
    """A text on each line; lines may be empty."""

    trims = False

    def parse(self, record: bytes, columns: Sequence[str]) -> Mapping[str, Any]:
        """The line as `text`."""
        return {"text": _decode(record)}


def sampling_distance(size_bytes: int) -> int:
    """The distance between sampled chunks of a file, in chunks."""
    return 1 + size_bytes // (CHUNK_BYTES * _N_SAMPLED_CHUNKS)


@dataclass(frozen=True)
class LineParser:
    """Parses the records of one file; `columns` are those of its header."""

    format: Lines
    path: str
    columns: Sequence[str] | None

    def parse(self, item: int, record: bytes) -> Mapping[str, Any] | ItemError:
        """The data of the file's `item`-th item, from 0; an ItemError if it is malformed.

        The error names its line; if items may span lines, their number instead, from 1, without the header.
        """
        try:
            return self.format.parse(record.removesuffix(b"\r"), self.columns or ())
        except ItemError as error:
            return ItemError(f"{self.path}, {self.format.unit} {item + 1}: {error}")

    def check(self, item: int, record: bytes) -> Mapping[str, Any]:
        """Like `parse`, but a malformed record is a SlurmGPUError, for planning."""
        data = self.parse(item, record)
        if isinstance(data, ItemError):
            raise refused(str(data))
        return data

    def check_sample(self, item: int, chunk: bytes, starts: NDArray[np.intp]) -> None:
        """Check a few of the complete records in a chunk; the first one is `item`."""
        bounds = starts.tolist()
        for i in range(0, len(bounds) - 1, 1 + len(bounds) // _N_SAMPLED_RECORDS):
            self.check(item + i, chunk[bounds[i] : bounds[i + 1] - 1])


class LineRows:
    """The items of one file of lines."""

    def __init__(self, source: LineParser, find: Find) -> None:
        self._source = source
        self._find = find
        self._file: BinaryIO = open(source.path, "rb")  # noqa: SIM115 - closed by close
        self._place: tuple[int, int] | None = None
        self._block: list[bytes] = []

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Items start..stop-1 of this file.

        If few items of a block are read, the block stays in memory: later calls, such as for recomputed items, may read
        others of it.
        """
        first, begin, end = self._find(start, stop)
        if (begin, end) == self._place:
            block = self._block
        else:
            self._file.seek(begin)
            data = self._file.read(end - begin)
            block = split(data, quoting=self._source.format.quoting)
            # Attributes from a cache may hide that the file was cut, and a part of a text is a text.
            if len(block) < stop - first or len(data) < end - begin:
                raise changed_error(f"{self._source.path} lacks items behind byte {begin}")
            is_kept = 2 * (stop - start) <= len(block)
            self._place, self._block = ((begin, end), block) if is_kept else (None, [])
        return [
            self._source.parse(item, record) for item, record in enumerate(block[start - first : stop - first], start)
        ]


def _decode(record: bytes) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise ItemError(f"{_NOT_UTF8}{record[error.start]:02x} at byte {error.start + 1}") from error


def refused(found: str) -> SlurmGPUError:
    """The error for an input that has such a record."""
    if _NOT_UTF8 not in found:
        return SlurmGPUError(f"{found}. Correct it and plan again.")
    return SlurmGPUError(
        f"{found}. Convert the file to UTF-8 with `iconv -f LATIN1 -t UTF-8 OLD > NEW` (with `-f UTF-16` if it "
        f"begins with 0xff or 0xfe), and plan again."
    )


def json_object(record: bytes) -> dict[str, Any]:
    """The JSON object in a line; ItemError says what was found instead."""
    try:
        text = record.decode()
        value, end = _DECODER.raw_decode(text)  # takes half the time of json.loads, which also skips blanks
        if end == len(text) and type(value) is dict:
            return value
    except (ValueError, RecursionError):
        pass  # the code below finds out what is wrong
    if not record:
        raise ItemError("expected a JSON object, found an empty line")
    text = _decode(record)
    if text.startswith("\ufeff"):
        raise ItemError(
            "expected a JSON object, found a byte order mark, which may only begin a file (were files joined?): "
            "sed 's/^\\xEF\\xBB\\xBF//' OLD > NEW removes it"
        )
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        of_lines = _OF_LINES.get(text.strip())
        found = of_lines or f"text that is not JSON ({error.msg} at column {error.colno})"
        raise ItemError(f"expected a JSON object, found {found}") from error
    except (ValueError, RecursionError) as error:  # also a number of more than 4300 digits, and deep nesting
        raise ItemError(f"expected a JSON object, found text that is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ItemError(f"expected a JSON object, found {_JSON_NAMES.get(type(value), 'null')}")
    return value


def _csv_fields(record: bytes) -> list[str]:
    if not record:
        raise ItemError("expected a CSV record, found an empty line")
    text = _decode(record)
    if len(text) > csv.field_size_limit():
        csv.field_size_limit(len(text))  # the limit is the whole process's, 128 KiB by default
    try:
        [fields] = csv.reader([text], strict=True)
    except csv.Error as error:
        raise ItemError(f"expected a CSV record as in RFC 4180: {error}") from error
    return fields
