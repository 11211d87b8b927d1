"""Shards: one HDF5 file per range of items, published whole or not at all, and verified as bytes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from slurmgpu.errors import ItemError
from slurmgpu.shards.columns import Column, stored_columns
from slurmgpu.shards.hdf5_layout import Attributes, Skeleton, file_attributes, make_skeleton, unplaced_regions
from slurmgpu.shards.made_by import MadeBy
from slurmgpu.shards.numbers import OFFSET_DTYPE
from slurmgpu.shards.userblock import (
    SHARD,
    Content,
    DamagedShardError,
    Piece,
    Reader,
    Region,
    in_file_order,
    new_directory,
    pack_userblock,
    read_userblock,
    userblock_size,
    verify,
)
from slurmgpu.util.atomic_files import fsync_dir
from slurmgpu.util.shared_files import link_first, remove

log = logging.getLogger(__name__)

FINISHING_PATIENCE_S = 5.0
"""How long to retry removing the partial file of a published shard; the merge removes what stays."""
_BLOCK_BYTES = 4 << 20
_BUFFER_BYTES = 64 << 10
HEAD_BYTES = 16 << 10  # holds the user block of a shard with up to about a hundred columns
Fingerprint = str | Sequence[str]
"""The fingerprint that a shard must carry, or those that it may carry."""


class ForeignShardError(DamagedShardError):
    """A whole shard, but of another plan or range of items."""


class FailedRow(ItemError):  # noqa: N818 - what is stored in place of a row
    """The stored row of a failed item: its error, and the stored `values` of columns for which it still has one."""

    def __init__(self, message: str, values: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.values = values


@dataclass(frozen=True)
class Directory:
    """A shard's user block: items `start` to `stop` - 1, and the place of each dataset."""

    fingerprint: str
    start: int
    stop: int
    n_rows: int
    n_errors: int
    datasets: tuple[Region, ...]
    userblock_size: int
    file_size: int
    rest_crc32: int
    notes: dict[str, Any]
    made_by: MadeBy

    def n_values(self, offsets: str) -> int:
        """The number of values that the dataset `offsets` (NAME/offsets) points into."""
        values = offsets.removesuffix("/offsets") + "/values"
        return next(region.shape[0] for region in self.datasets if region.path == values)

    def verify(self, reader: Reader | Content, sink: Callable[[str, memoryview], None] | None = None) -> None:
        """Read every byte, and pass those of the datasets to `sink`; DamagedShardError if any differs."""
        pieces = [Piece(path, *place) for path, _, _, *place in in_file_order(self.datasets)]
        if problems := list(verify(reader, pieces, start=self.userblock_size, rest_crc32=self.rest_crc32, sink=sink)):
            raise DamagedShardError("; ".join(problems))


def write_shard(
    path: Path,
    columns: Mapping[str, Column],
    *,
    start: int,
    rows: Sequence[Mapping[str, Any] | ItemError],
    fingerprint: str,
    notes: Mapping[str, Any],
    made_by: MadeBy,
    indices: Sequence[int] | None = None,
) -> None:
    """Write the rows of the items from `start` on to `path`, closed and fsynced; `indices` are their indices.

    `rows` are as `convert_row` returns them. An ItemError is stored as the text `error` with blank columns, except for
    the values of a FailedRow. `notes` and `made_by` go into the user block and change no dataset. The note `not_finite`
    is added: the number of rows with NaN, unless the column has `nan_is_unknown`, and with infinities, by column. On
    any failure, such as a full disk, the file is removed and the OSError raised.
    """
    contents = _contents(columns, range(start, start + len(rows)) if indices is None else indices, rows)
    identity: Attributes = {"fingerprint": fingerprint, "start": start, "stop": start + len(rows)}
    attributes = file_attributes(SHARD, columns, identity)
    regions = unplaced_regions(columns, len(rows), _n_values(contents))
    # Reserve space for the largest numbers: they are known once the values are written.
    largest = {name: [len(rows)] * 2 for name, column in columns.items() if column.dtype.kind in "fc"}
    notes = {**notes, "not_finite": largest}
    directory = new_directory(attributes, len(rows), regions)
    directory["notes"], directory["made_by"] = notes, made_by
    directory["n_errors"] = sum(isinstance(row, ItemError) for row in rows)
    size = userblock_size(directory)
    skeleton = make_skeleton(regions, attributes, size)
    try:
        with open(path, "wb", buffering=_BUFFER_BYTES) as file:
            file.seek(size)
            odd: set[str] = set()
            directory["datasets"], directory["rest_crc32"] = _write_behind_userblock(file, skeleton, contents, odd)
            odd_columns = {name: columns[name] for name in sorted(odd & largest.keys())}
            notes["not_finite"] = _count_not_finite(odd_columns, rows)
            directory["file_size"] = skeleton.size
            file.seek(0)
            file.write(pack_userblock(directory, size))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):  # a disk that cannot be written may not be unlinked on either
            path.unlink()
        raise


def publish(partial: Path, target: Path, *, sync: bool = True) -> bool:
    """Make a shard appear at `target`; False if one was there already, since the first one published wins.

    `partial` is removed in both cases. After publication no error is raised. An OSError before it, including a
    `partial` that another process removed, means that the shard must be written again. Without `sync`, a crash of the
    machine may lose the name until `sync_names` is called.
    """
    first = link_first(partial, target)
    try:
        remove(partial, FINISHING_PATIENCE_S)
    except OSError as error:
        log.warning("%s is published, but cleaning up failed: %s", target.name, error)
    if sync:
        sync_names(target.parent)
    return first


def sync_names(folder: Path) -> None:
    """Make the names of shards survive a power failure; errors are only logged, because the shards exist."""
    try:
        fsync_dir(folder)
    except OSError as error:
        log.warning("shards in %s are published, but not synced: %s", folder, error)


def read_directory(path: Path) -> Directory:
    """A shard's directory, from its user block alone; DamagedShardError if two readings find damage."""
    with Reader(path, buffer_bytes=HEAD_BYTES) as reader:
        return reader.twice(lambda: examine(reader))


def verify_shard(
    path: Path, *, fingerprint: Fingerprint | None = None, start: int | None = None, stop: int | None = None
) -> Directory:
    """The directory of a fully verified shard; DamagedShardError or ForeignShardError otherwise."""
    with Reader(path) as reader:
        directory = examine(reader, fingerprint=fingerprint, start=start, stop=stop)
        directory.verify(reader)
    return directory


def examine(
    reader: Reader, *, fingerprint: Fingerprint | None = None, start: int | None = None, stop: int | None = None
) -> Directory:
    """The directory of the open shard; ForeignShardError if it is another shard than the requested one."""
    found, _, size = read_userblock(reader)
    try:
        attributes = found["attributes"]
        if attributes["format"] != SHARD:
            raise DamagedShardError(f"its format is {attributes['format']!r}, not {SHARD!r}")
        datasets = tuple(Region(path, dtype, tuple(shape), *place) for path, dtype, shape, *place in found["datasets"])
        identity = {key: attributes[key] for key in ("fingerprint", "start", "stop")}
        fingerprints = (fingerprint,) if isinstance(fingerprint, str) or fingerprint is None else fingerprint
        for key, expected in {"fingerprint": fingerprints, "start": (start,), "stop": (stop,)}.items():
            if expected != (None,) and identity[key] not in expected:
                there = f"{key} is {identity[key]!r}, expected {' or '.join(map(repr, expected))}"
                raise ForeignShardError(f"it belongs to another plan: {there}")
        return Directory(
            **identity,
            n_rows=found["n_rows"],
            n_errors=found["n_errors"],
            datasets=datasets,
            userblock_size=size,
            file_size=found["file_size"],
            rest_crc32=found["rest_crc32"],
            notes=found["notes"],
            made_by=found["made_by"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedShardError(f"its directory is invalid ({type(error).__name__}: {error})") from error


def read_errors(reader: Reader, directory: Directory) -> list[tuple[int, str]]:
    """The index and error text of each failed item of a shard."""
    if not directory.n_errors:
        return []
    places = {region.path: (region.offset, region.offset + region.n_bytes) for region in directory.datasets}
    return errors_in({name: reader.read(*places[name]) for name in ("error/offsets", "error/values")}, directory)


def errors_in(contents: Mapping[str, bytes | memoryview], directory: Directory) -> list[tuple[int, str]]:
    """Like `read_errors`, from the bytes of the datasets by name."""
    if not directory.n_errors:
        return []
    texts, offsets = bytes(contents["error/values"]), np.frombuffer(contents["error/offsets"], OFFSET_DTYPE)
    failed = np.flatnonzero(np.diff(offsets))
    return [
        (directory.start + int(row), texts[offsets[row] : offsets[row + 1]].decode("utf-8", "replace"))
        for row in failed
    ]


def read_rows(
    path: Path, columns: Mapping[str, Column], *, fingerprint: Fingerprint, start: int, stop: int, again: bool = False
) -> tuple[list[dict[str, Any] | ItemError], Directory]:
    """The rows of a shard as `write_shard` takes them, and its directory; every byte is verified.

    `again` is for a second reading, which should not come from a cache. Raises as `verify_shard` does.
    """
    contents: dict[str, bytearray] = {}
    with Reader(path) as reader:
        if again:
            reader.forget_cache()
        directory = examine(reader, fingerprint=fingerprint, start=start, stop=stop)
        Shapes(columns).check(directory)
        directory.verify(reader, lambda name, chunk: contents.setdefault(name, bytearray()).extend(chunk))
    return rows_from(contents, columns, stop - start), directory


def rows_from(
    contents: Mapping[str, bytes | bytearray], columns: Mapping[str, Column], n_rows: int
) -> list[dict[str, Any] | ItemError]:
    """Rows as `write_shard` takes them, from the bytes of datasets by name; a missing name has no values."""
    values = {name: _values(contents, name, column, n_rows) for name, column in stored_columns(columns).items()}
    errors = values["error"]
    rows = [{name: values[name][row] for name in columns} for row in range(n_rows)]
    return [
        FailedRow(error.decode("utf-8", "replace"), row) if error else row
        for row, error in zip(rows, errors, strict=True)
    ]


def _values(contents: Mapping[str, bytes | bytearray], name: str, column: Column, n_rows: int) -> Sequence[Any]:
    if column.shape is not None:
        return list(np.frombuffer(contents.get(name, b""), column.dtype).reshape(n_rows, *column.shape))
    values = np.frombuffer(contents.get(f"{name}/values", b""), column.dtype)
    return column.split(values, np.frombuffer(contents[f"{name}/offsets"], OFFSET_DTYPE).tolist())


class Shapes:
    """The datasets that every shard of a plan must have."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._regions = []
        for region in unplaced_regions(columns, 0, {}):
            row_bytes = np.dtype(region.dtype).itemsize * math.prod(region.shape[1:])
            self._regions.append((region.path, region.dtype, region.shape[1:], row_bytes))

    def check(self, directory: Directory) -> None:
        """Raise ForeignShardError unless the shard has these datasets, with one row per item."""
        n_rows = directory.stop - directory.start
        if directory.n_rows != n_rows:
            raise ForeignShardError(f"it has {directory.n_rows} rows for {n_rows} items")
        if len(directory.datasets) != len(self._regions):
            raise ForeignShardError("its datasets are not those of the plan's columns")
        for region, (path, dtype, tail, row_bytes) in zip(directory.datasets, self._regions, strict=True):
            if region.path != path or region.dtype != dtype or region.shape[1:] != tail:
                raise ForeignShardError("its datasets are not those of the plan's columns")
            length = region.shape[0]
            n_found = length - 1 if path.endswith("/offsets") else n_rows if path.endswith("/values") else length
            if n_found != n_rows or region.n_bytes != length * row_bytes:
                raise ForeignShardError(f"its dataset {path} has {length} entries for {n_rows} items")


def _n_values(contents: Mapping[str, list[Any]]) -> dict[str, int]:
    ends = {path.removesuffix("/offsets"): offsets for path, offsets in contents.items() if path.endswith("/offsets")}
    return {f"{name}/values": int(offsets[0][-1]) for name, offsets in ends.items()}


def _contents(
    columns: Mapping[str, Column], indices: Sequence[int], rows: Sequence[Mapping[str, Any] | ItemError]
) -> dict[str, list[Any]]:
    blank = {name: column.blank() for name, column in columns.items()}
    filled = [{**blank, **_values_of(row)} if isinstance(row, ItemError) else row for row in rows]
    values = {name: [row[name] for row in filled] for name in columns}
    values["index"] = [np.array(indices, dtype="<i8")]
    values["error"] = [_error_text(row) if isinstance(row, ItemError) else b"" for row in rows]
    contents: dict[str, list[Any]] = {}
    for name, column in stored_columns(columns).items():
        if column.shape is not None:
            contents[name] = values[name]
        else:
            offsets = np.zeros(len(rows) + 1, OFFSET_DTYPE)
            np.cumsum([len(value) for value in values[name]], out=offsets[1:])
            contents[f"{name}/offsets"] = [offsets]
            contents[f"{name}/values"] = values[name]
    return contents


def _values_of(error: ItemError) -> Mapping[str, Any]:
    return error.values if isinstance(error, FailedRow) else {}


def _error_text(error: ItemError) -> bytes:
    # Never empty, since a text marks an item as failed. A file name in it need not be UTF-8.
    return (str(error) or type(error).__name__).encode("utf-8", "backslashreplace")


def _count_not_finite(
    columns: Mapping[str, Column], rows: Sequence[Mapping[str, Any] | ItemError]
) -> dict[str, tuple[int, int]]:
    """The number of rows with NaN, unless it is a value like any other, and with infinities, by column that has any."""
    found = {}
    for name, column in columns.items():
        values = [row[name] for row in rows if not isinstance(row, ItemError)]
        n_nan = 0 if column.nan_is_unknown else sum(bool(np.isnan(value).any()) for value in values)
        n_infinite = sum(bool(np.isinf(value).any()) for value in values)
        if n_nan or n_infinite:
            found[name] = n_nan, n_infinite
    return found


def _write_behind_userblock(
    file: BinaryIO, skeleton: Skeleton, contents: Mapping[str, Sequence[Any]], odd: set[str]
) -> tuple[list[Region], int]:
    """Write all but the user block; return the datasets with their checksums, and that of the metadata between them.

    Adds a column to `odd` if one of its floats is not finite.
    """
    rest_crc32, crc32s = 0, dict.fromkeys(contents, 0)
    for (_, metadata), region in zip_longest(skeleton.metadata, in_file_order(skeleton.regions)):
        file.write(metadata)
        rest_crc32 = zlib.crc32(metadata, rest_crc32)
        if region is not None:
            crc32s[region.path] = _write(file, region, contents[region.path], odd)
    return [region._replace(crc32=crc32s[region.path]) for region in skeleton.regions], rest_crc32


def _write(file: BinaryIO, region: Region, values: Sequence[Any], odd: set[str]) -> int:
    """Write the values of a dataset; return their checksum."""
    n_bytes = crc32 = 0
    dtype = np.dtype(region.dtype)
    for block in _blocks(values, region.n_bytes):
        if dtype.kind in "fc" and not np.isfinite(np.frombuffer(block, dtype)).all():
            odd.add(region.path.removesuffix("/values"))
        file.write(block)
        n_bytes, crc32 = n_bytes + len(block), zlib.crc32(block, crc32)
    if n_bytes != region.n_bytes:
        raise ValueError(f"{region.path}: {n_bytes} bytes, expected {region.n_bytes}; use convert_row")
    return crc32


def _blocks(values: Sequence[Any], n_bytes: int) -> Iterator[bytes]:
    """The values' bytes in blocks of a few megabytes, to avoid a second copy of large rows."""
    step = max(1, len(values) * _BLOCK_BYTES // max(1, n_bytes))
    for first in range(0, len(values), step):
        yield b"".join(values[first : first + step])
