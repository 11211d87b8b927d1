"""Write inputs without random access as Parquet files in the run directory, once, at planning.

Row groups have 2,048 items, or fewer large ones. Lines of text are stored unchanged, in one binary column `line`; rows
of tables by their columns. docs/reference/inputs.md says which inputs are repacked.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.formats import CHUNK_BYTES, Preview, refuse_changed, refuse_doubled
from slurmgpu.inputs.index import IndexWriter
from slurmgpu.inputs.lines import LineParser, Lines, sampling_distance
from slurmgpu.inputs.records import MAX_RECORD_BYTES, RecordFinder, split
from slurmgpu.inputs.spec import InputFile, InputSpec, Source
from slurmgpu.inputs.tables import Parquet, ParquetRows
from slurmgpu.util.atomic_files import date_in_whole_seconds
from slurmgpu.util.packages import check_pyarrow
from slurmgpu.util.regular_files import naming

FOLDER = "input"
"""The folder of repacked files in the run directory."""

GROUP_ITEMS = 2048
_GROUP_BYTES = 32 << 20
"""A row group ends at this many items, or at about this many bytes, because a reader holds one in memory."""

_STEP = 256  # rows of a table that are added at once, so that groups do not depend on the table's own chunks


class RowGroups:
    """Writes a Parquet file in row groups; the same rows, added in the same pieces, give the same bytes.

    `close` fsyncs the file, and sets its modification time to whole seconds, which any copy keeps.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        import pyarrow.parquet as pq

        self.n_items = 0
        self.path = path
        self._pending: list[Any] = []
        self._n_pending = self._n_bytes = 0
        path.parent.mkdir(exist_ok=True)
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close
        self._writer = pq.ParquetWriter(
            self._file,
            schema.remove_metadata(),  # pandas writes its version there
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )

    def __enter__(self) -> RowGroups:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):  # an earlier error says more; without one, `close` has written everything
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()

    def add(self, table: Any) -> None:
        """Add the rows of an Arrow table."""
        self._pending.append(table)
        self._n_pending += table.num_rows
        self._n_bytes += table.nbytes
        self.n_items += table.num_rows
        if self._n_bytes >= _GROUP_BYTES:
            self._write(self._n_pending)
        elif self._n_pending >= GROUP_ITEMS:
            self._write(self._n_pending - self._n_pending % GROUP_ITEMS)

    def close(self, sha256: str | None = None, source: Source | None = None) -> InputFile:
        """Finish the file; `sha256` identifies its items, by default by the file's bytes."""
        self._write(self._n_pending)
        with naming(self.path):
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        date_in_whole_seconds(self.path)
        status = self.path.stat()
        digest = sha256 or hash_file(self.path)
        return InputFile(str(self.path), status.st_size, status.st_mtime_ns, digest, self.n_items, source)

    def _write(self, n_items: int) -> None:
        if not n_items:
            return
        import pyarrow as pa

        table = pa.concat_tables(self._pending).unify_dictionaries().combine_chunks()
        with naming(self.path):
            self._writer.write_table(table.slice(0, n_items), row_group_size=GROUP_ITEMS)
        rest = table.slice(n_items)
        self._pending = [rest] if rest.num_rows else []
        self._n_pending, self._n_bytes = rest.num_rows, rest.nbytes


class RepackedLines:
    """The items of repacked lines; a malformed line is an ItemError that names the place in its source."""

    def __init__(self, its_format: Lines, file: InputFile, columns: Sequence[str] | None) -> None:
        self._lines = ParquetRows(file.path)
        self._lines.check_footer(file.n_items, _line_schema().names)
        self._parser = LineParser(its_format, file.source.path if file.source else "items", columns)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Items start..stop-1 of the file."""
        return [
            row if isinstance(row, ItemError) else self._parser.parse(item, row["line"].removesuffix(b"\n"))
            for item, row in enumerate(self._lines.read(start, stop), start)
        ]


def repack_table(table: Any, folder: Path, index: Path, *, stride: int) -> InputSpec:
    """Write a table in memory to `folder`, and its index to `index`; return its spec.

    The table is one of pyarrow, pandas, polars or others with an Arrow interface. SlurmGPUError if Arrow refuses it.
    """
    check_pyarrow("Items from Python need", in_tasks=True)
    import pyarrow as pa

    try:
        # pandas has this interface since 2.2, by the function that serves older versions, too.
        has_stream = hasattr(table, "__arrow_c_stream__") or not hasattr(table, "iloc")
        reader = pa.RecordBatchReader.from_stream(table if has_stream else pa.Table.from_pandas(table))
        if not reader.schema.names:
            raise SlurmGPUError("The table has no columns; expected at least one.")
        for field in reader.schema:
            if isinstance(field.type, pa.BaseExtensionType) and field.type.extension_name == "pandas.period":
                raise SlurmGPUError(
                    f"The column {field.name!r} has periods, which Arrow would turn into numbers. Convert it first: "
                    f"df[{field.name!r}] = df[{field.name!r}].astype(str)."
                )
        with RowGroups(folder / FOLDER / "00000.parquet", reader.schema) as groups:
            for piece in even(reader):
                groups.add(piece.replace_schema_metadata(None))
            if not groups.n_items:
                raise SlurmGPUError("The table has no rows; expected at least one item.")
            file = groups.close()
    except (ValueError, TypeError, NotImplementedError, OverflowError) as error:  # Arrow's errors have these bases
        raise _not_of_arrow(table, error) from error
    columns = tuple(reader.schema.names)
    refuse_doubled(columns, "The table")
    return publish(InputSpec(Parquet.name, (file,), file.n_items, stride, columns, repacked=True), index)


def _not_of_arrow(table: Any, error: Exception) -> SlurmGPUError:
    """An error that names the column for which Arrow raised `error`, and the types of its values."""
    said = "; ".join(str(each).rstrip(".") for each in error.args)
    found = re.search(r"for column (.+) with type", said)
    records = "df.to_dict('records')" if hasattr(table, "iloc") else "a list of its rows as mappings"
    if found is None or not hasattr(table, "iloc"):
        return SlurmGPUError(f"The table cannot be converted to Arrow: {said}. Correct it, or pass {records}.")
    place = [str(name) for name in table.columns].index(found[1])
    column, values = table.columns.tolist()[place], table.iloc[:, place].dropna()
    kinds = [*dict.fromkeys(type(value).__name__ for value in values)]
    wrong = (
        f"has values of several types, {', '.join(kinds)}; expected one"
        if len(kinds) > 1
        else f"has values of the type {', '.join(kinds)} that Arrow cannot hold: {error.args[0]}"
    )
    return SlurmGPUError(
        f"The column {column!r} {wrong}. Write df[{column!r}] = df[{column!r}].astype(str), or pass {records}."
    )


def pack_lines(its_format: Lines, found: Preview, path: Path, advance: Callable[[int], None]) -> InputFile:
    """Repack a file of lines, or of what its format gives as lines. It has the items and errors of the plain file.

    `advance` is called with the number of bytes read from the file.
    """
    source = Path(found.path)
    with (
        open(source, "rb", buffering=0) as file,
        RowGroups(path, _line_schema()) as groups,
        ThreadPoolExecutor(1) as beside,
    ):
        hashed, packer = _Hashed(file, found.size_bytes, advance), _LinePacker(its_format, found, groups)
        with its_format.lines_in(cast(BinaryIO, io.BufferedReader(hashed, CHUNK_BYTES)), source) as stream:
            for chunk, is_last in _until_end(_ahead(stream, beside), found.path, trims=its_format.trims):
                packer.add(chunk, is_last=is_last)
        refuse_changed(found, os.fstat(file.fileno()))
        packer.finish()
        sha256 = hashed.checksum.hexdigest()
        return groups.close(sha256, Source(found.path, found.size_bytes, found.mtime_ns, sha256))


class _LinePacker:
    """Writes the records of a stream, chunk by chunk, and checks the same sample as the scan of a plain file.

    SlurmGPUError names the line of a malformed record.
    """

    def __init__(self, its_format: Lines, found: Preview, groups: RowGroups) -> None:
        self._found, self._groups, self._quoting = found, groups, its_format.quoting
        self._parser = LineParser(its_format, found.path, found.columns)
        self._finder = RecordFinder(found.path, found.begin, sys.maxsize, line=found.line, quoting=self._quoting)
        # Errors by the number of the chunk: which chunks are in the sample is known only at the file's end.
        self._refused: dict[int, SlurmGPUError] = {}
        self._position = self._n_chunks = 0
        # The parts of the record whose end is still unknown, and where it begins.
        self._open_record: list[bytes] = []
        self._begin = found.begin

    def add(self, chunk: bytes, *, is_last: bool) -> None:
        """Write the records that end in a chunk."""
        if is_last:
            self._finder.end = self._position + len(chunk)
        if block := chunk[max(self._found.begin - self._position, 0) :]:
            starts = self._finder.starts(np.frombuffer(block, np.uint8))
            try:
                self._parser.check_sample(self._groups.n_items + 1, chunk, starts - self._position)
            except SlurmGPUError as error:
                self._refused[self._n_chunks] = error
            self._open_record.append(block)
            if len(starts):
                data, last = b"".join(self._open_record), int(starts[-1])
                self._write(data, np.concatenate([[0], starts - self._begin]).astype(np.int32))
                self._open_record, self._begin = [data[last - self._begin :]], last
        self._position += len(chunk)
        self._n_chunks += 1

    def finish(self) -> None:
        """Write the last record."""
        distance = sampling_distance(self._position)
        for number, refusal in self._refused.items():
            if number % distance == 0:
                raise refusal
        self._finder.finish()
        last = b"".join(self._open_record)
        self._parser.check(self._groups.n_items, split(last, quoting=self._quoting)[0])
        self._write(last, np.array([0, len(last)], np.int32))

    def _write(self, data: bytes, bounds: NDArray[np.int32]) -> None:
        """Write the records in `data` between neighbouring `bounds`."""
        import pyarrow as pa

        lines = pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)])
        self._groups.add(pa.table([lines], schema=_line_schema()))


class _Hashed(io.RawIOBase):
    """The first `n_bytes` of a file, hashed as they are read."""

    def __init__(self, file: io.FileIO, n_bytes: int, advance: Callable[[int], None]) -> None:
        self.checksum = hashlib.sha256()
        self._file, self._n_bytes, self._advance = file, n_bytes, advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with naming(os.fsdecode(self._file.name)):
            chunk = self._file.read(min(len(buffer), self._n_bytes))
        self.checksum.update(chunk)
        buffer[: len(chunk)] = chunk
        self._n_bytes -= len(chunk)
        self._advance(len(chunk))
        return len(chunk)


def _ahead(stream: BinaryIO, beside: ThreadPoolExecutor) -> Iterator[bytes]:
    """Chunks of equal sizes. Another thread reads the next one, so two are in memory."""
    reading = beside.submit(stream.read, CHUNK_BYTES)
    while chunk := reading.result():
        reading = beside.submit(stream.read, CHUNK_BYTES)
        yield chunk


def _until_end(chunks: Iterable[bytes], path: str, *, trims: bool) -> Iterator[tuple[bytes, bool]]:
    """The chunks, each with whether it is the last; with `trims`, without newlines at the end of the file."""
    waiting: list[bytes] = []
    for chunk in chunks:
        if not trims or chunk.strip(b"\r\n"):
            yield from ((each, False) for each in waiting)
            waiting = []
        elif len(waiting) * CHUNK_BYTES > MAX_RECORD_BYTES:
            raise SlurmGPUError(
                f"{path} has more than {MAX_RECORD_BYTES >> 20} MiB of newlines in a row; expected items. Correct it "
                f"and plan again."
            )
        waiting.append(chunk)
    if waiting:
        yield waiting[0].rstrip(b"\r\n") if trims else waiting[0], True


def publish(spec: InputSpec, index: Path) -> InputSpec:
    """Write the index of an input whose items are found without offsets, which is only a header; return the spec."""
    with IndexWriter(index, stride=spec.stride, n_files=0) as writer:
        writer.publish(spec.digest)
    return spec


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file; `progress` is called with the bytes read so far."""
    checksum, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum.update(chunk)
            done += len(chunk)
            if progress:
                progress(done)
    return checksum.hexdigest()


def _line_schema() -> Any:
    """The Arrow schema of repacked lines."""
    import pyarrow as pa

    return pa.schema([pa.field("line", pa.binary(), nullable=False)])


def even(batches: Iterable[Any]) -> Iterator[Any]:
    """The rows of Arrow batches as tables of _STEP rows, however the batches are cut."""
    import pyarrow as pa

    pending: list[Any] = []
    missing = _STEP
    for batch in batches:
        table = pa.Table.from_batches([batch])
        while table.num_rows:
            head = table.slice(0, missing)
            pending.append(head)
            missing -= head.num_rows
            table = table.slice(head.num_rows)
            if not missing:
                yield pa.concat_tables(pending)
                pending, missing = [], _STEP
    if pending:
        yield pa.concat_tables(pending)
