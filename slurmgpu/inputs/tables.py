"""Table formats: .parquet, and .h5, the merged file of an earlier run."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

import numpy as np

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.formats import ADVICE, Find, Format, Preview, Rows, refuse_doubled
from slurmgpu.util.exceptions import described
from slurmgpu.util.packages import check_pyarrow

_AFTERWARDS = (
    "Then plan this run again, because its input was rewritten; if it was submitted with --after, type "
    "`slurmgpu resubmit` instead."
)
"""What to do about a damaged input, in error messages."""
_AT_ONCE = 1024


class Groups(ABC):
    """The rows of a file that pyarrow reads in groups; the group that was read last stays in memory.

    `unit` and `kind` name a group and the format in messages; `sizes` are the groups' numbers of rows.
    """

    unit: ClassVar[str]
    kind: ClassVar[str]

    def __init__(self, path: str, sizes: Iterable[int], columns: Iterable[str]) -> None:
        self.columns = tuple(columns)
        self._path = path
        self._bounds: list[int] = [0, *accumulate(sizes)]
        self._cached: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self._bounds[-1]

    @abstractmethod
    def load(self, group: int) -> Any:
        """A group, as a pyarrow table or record batch."""

    def close(self) -> None:
        """Drop the group in memory."""
        self._cached = None

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Rows start..stop-1; an ItemError for each row of a damaged group."""
        items: list[Mapping[str, Any] | ItemError] = []
        while start < stop:
            group = bisect_right(self._bounds, start) - 1
            end = min(stop, self._bounds[group + 1])
            try:
                rows = self._group(group).slice(start - self._bounds[group], end - start)
            except damage() as error:
                raise_if_disk_failed(error)
                found = f"{self._path}, {self.unit} {group}: expected {self.kind}, found damage ({error})"
                items += [ItemError(found)] * (end - start)
            else:
                items += self._values(rows, start)
            start = end
        return items

    def check_footer(self, n_rows: int, columns: Sequence[str] | None) -> None:
        """SlurmGPUError unless the rows are as many as planned, of these columns: footers have no checksum."""
        if len(self) != n_rows or self.columns != tuple(columns or self.columns):
            found = f"{len(self)} rows with the columns {', '.join(map(repr, self.columns))}"
            planned = f"{n_rows} with {', '.join(map(repr, columns or ()))}"
            raise SlurmGPUError(f"{self._path} is damaged: it has {found}; planned were {planned}. {ADVICE}")

    def _values(self, rows: Any, start: int) -> list[Mapping[str, Any] | ItemError]:
        """Rows as mappings; an ItemError for each row with a value that Python cannot represent."""
        try:
            found: list[Mapping[str, Any] | ItemError] = rows.to_pylist()
            return found
        except Exception as error:  # ValueError, OverflowError, UnicodeDecodeError, or Arrow's own, as for time zones
            if rows.num_rows > 1:
                cut = rows.num_rows // 2
                return self._values(rows.slice(0, cut), start) + self._values(rows.slice(cut), start + cut)
            return [ItemError(f"{self._path}, row {start}, {self._wrong_column(rows)}: {described(error)}")]

    def _wrong_column(self, row: Any) -> str:
        for name in row.schema.names:
            try:
                row.select([name]).to_pylist()
            except Exception:
                return f"column {name!r}"
        return "as a whole"

    def _group(self, group: int) -> Any:
        if self._cached is None or self._cached[0] != group:
            self._cached = None  # freed first: two groups may not fit in memory
            self._cached = (group, self.load(group))
        return self._cached[1]


class ParquetRows(Groups):
    """The rows of a .parquet file, by row groups."""

    unit, kind = "row group", "Parquet"

    def __init__(self, path: str) -> None:
        check_pyarrow(f"Reading {path} needs")
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            # As bytes: a path may have some that are no UTF-8.
            self._file = pq.ParquetFile(pa.OSFile(os.fsencode(path)), page_checksum_verification=True)
        except damage() as error:
            raise_if_disk_failed(error)
            raise SlurmGPUError(f"{path} is not a Parquet file: {error}.") from error
        about = self._file.metadata
        sizes = (about.row_group(i).num_rows for i in range(about.num_row_groups))
        super().__init__(path, sizes, self._file.schema_arrow.names)

    def close(self) -> None:
        """Close the file and drop the row group."""
        super().close()
        self._file.close(force=True)

    def load(self, group: int) -> Any:
        """A row group."""
        return self._file.read_row_group(group)


class MergedRows:
    """The rows of an earlier run's merged.h5: `index`, its columns, and `error` where the item failed.

    A failed item's columns are None, except for fields that the earlier run kept.

    Checksums are verified: all of them at once with `verify`, else each shard's when its first row is read.
    """

    def __init__(self, path: str, *, verify: bool = False) -> None:
        from slurmgpu import results

        self._merged = results.open(path, verify=verify)
        if not self._merged.complete:
            self._merged.close()
            raise SlurmGPUError(
                f"{path} lacks rows because its run is incomplete. Complete that run with `slurmgpu resubmit` first."
            )
        self.columns = ("index", *self._merged.columns)
        self.fingerprint = str(self._merged.attributes["fingerprint"])

    def __len__(self) -> int:
        return len(self._merged)

    def close(self) -> None:
        """Close the file."""
        self._merged.close()

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Rows start..stop-1; SlurmGPUError if their bytes have changed."""
        try:
            self._merged.check_rows(start, stop)
        except SlurmGPUError as error:
            raise SlurmGPUError(f"{error} {_AFTERWARDS}") from error.__cause__ or error
        from slurmgpu.results.views import without_value

        rows, failed = self._merged.rows(start, stop), self._merged.failed[start:stop]
        for name in self._merged.columns if failed.any() else ():
            for place in np.flatnonzero(without_value(self._merged[name], failed, start, stop)):
                rows[place][name] = None
        for place in np.flatnonzero(failed):
            rows[place]["error"] = self._merged.errors[rows[place]["index"]]
        return list[Mapping[str, Any] | ItemError](rows)


class Table(Rows, Protocol):
    """Rows with a known number and known columns."""

    columns: tuple[str, ...]

    def __len__(self) -> int: ...


class Tables(Format):
    """A format with a known number of rows and random access."""

    @abstractmethod
    def table(self, path: str, *, verify: bool = False) -> Table:
        """The rows of a file; SlurmGPUError for another format or, with `verify`, any damage."""

    def preview(self, file: BinaryIO, found: Preview) -> Preview:
        """The columns, and the number of rows as `end`."""
        with closing(self.table(found.path, verify=True)) as table:
            columns, n_items = table.columns, len(table)
        refuse_doubled(columns, found.path)
        return replace(found, columns=columns, end=n_items)

    def open(self, path: str, columns: Sequence[str] | None, find: Find) -> Table:
        """The rows of a file."""
        return self.table(path)

    def items(self, path: Path) -> Iterator[Mapping[str, Any] | ItemError]:
        """All rows of a file."""
        with closing(self.table(str(path))) as table:
            for start in range(0, len(table), _AT_ONCE):
                yield from table.read(start, min(start + _AT_ONCE, len(table)))


class Parquet(Tables, format="parquet"):
    """Parquet, read by pyarrow."""

    def table(self, path: str, *, verify: bool = False) -> ParquetRows:
        """The rows of a file; each page has its own checksum."""
        return ParquetRows(path)


class Merged(Tables, format="h5"):
    """The merged file of an earlier run."""

    def table(self, path: str, *, verify: bool = False) -> MergedRows:
        """The rows of a file; with `verify`, every byte is checked first."""
        return MergedRows(path, verify=verify)


def damage() -> tuple[type[Exception], ...]:
    """The exceptions of pyarrow for a damaged file."""
    import pyarrow as pa

    return (pa.ArrowException, OSError, UnicodeDecodeError)  # the last for the name of a column


def raise_if_disk_failed(error: BaseException) -> None:
    """Raise errors of the file system; pyarrow's OSError for damaged contents has no errno."""
    if getattr(error, "errno", None) is not None:
        raise error
