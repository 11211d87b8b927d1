"""Shards: an HDF5 file for each range of items, which appears whole or not at all, and is verified as bytes."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu.columns import Array, Column, stored_columns
from slurmgpu.errors import ItemError
from slurmgpu.files import fsync_dir
from slurmgpu.regions import (
    OFFSET_DTYPE,
    SHARD,
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
    write_at,
)
from slurmgpu.skeletons import Attributes, draw, file_attributes, unplaced_regions

__all__ = [
    "DamagedShardError",
    "Directory",
    "ForeignShardError",
    "publish",
    "read_directory",
    "read_errors",
    "shard_name",
    "verify_shard",
    "write_shard",
]

_BLOCK_BYTES = 4 << 20
HEAD_BYTES = 16 << 10  # holds the user block of a shard of up to about a hundred columns
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class ForeignShardError(DamagedShardError):
    """A shard that is whole, but of another plan or of another range of items."""


@dataclass(frozen=True)
class Directory:
    """What a shard's user block says: the items `start` to `stop` - 1, and where each dataset's bytes lie."""

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
    made_by: dict[str, Any]

    @property
    def pieces(self) -> list[Piece]:
        """The datasets' bytes in the order of the file, as `regions.verify` takes them."""
        return [Piece(path, *place) for path, _, _, *place in in_file_order(self.datasets)]


def shard_name(shard: int) -> str:
    """The name of a shard's file: `00042.h5`."""
    return f"{shard:05d}.h5"


def write_shard(
    path: Path,
    columns: Mapping[str, Column],
    *,
    start: int,
    rows: Sequence[Mapping[str, Any] | ItemError],
    fingerprint: str,
    notes: Mapping[str, Any],
    made_by: Mapping[str, Any],
) -> None:
    """Put the rows of the items from `start` on at `path`, closed and fsynced.

    `rows` are as `convert_row` returns them. Of an ItemError the text is stored as `error`, and its columns
    are blank. `notes` and `made_by` go into the user block and change no dataset. When the disk is full, or
    anything else goes wrong, the file is removed and the OSError raised.
    """
    contents = _contents(columns, start, rows)
    identity: Attributes = {"fingerprint": fingerprint, "start": start, "stop": start + len(rows)}
    attributes = file_attributes(SHARD, columns, identity)
    regions = unplaced_regions(columns, len(rows), _n_values(contents))
    directory = new_directory(attributes, len(rows), regions, notes=dict(notes), made_by=dict(made_by))
    directory["n_errors"] = sum(isinstance(row, ItemError) for row in rows)
    size = userblock_size(directory)
    skeleton = draw(regions, attributes, size)
    try:
        with open(path, "wb", buffering=0) as file:
            fd = file.fileno()
            directory["datasets"] = [_write(fd, region, contents[region.path]) for region in skeleton.regions]
            for offset, content in skeleton.metadata:
                write_at(fd, content, offset)
                directory["rest_crc32"] = zlib.crc32(content, directory["rest_crc32"])
            directory["file_size"] = skeleton.size
            write_at(fd, pack_userblock(directory, size), 0)
            os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def publish(partial: Path, target: Path) -> bool:
    """Make a shard appear at `target`; False if one was there already, for the first one published wins.

    `partial` is gone afterwards in either case.
    """
    try:
        os.link(partial, target)
        first = True
    except FileExistsError:
        # NFS may answer so although it made the link: the reply was lost, and the request sent again.
        first = partial.samefile(target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # Without hard links two that publish at the same moment may both be told that they were first. The
        # file is whole in any case, and both copies hold the same datasets.
        first = not target.exists()
        if first:
            partial.rename(target)
    partial.unlink(missing_ok=True)
    fsync_dir(target.parent)
    return first


def read_directory(path: Path) -> Directory:
    """A shard's directory, from its user block alone; DamagedShardError unless block and size are right."""
    with Reader(path, buffer_bytes=HEAD_BYTES) as reader:
        return examine(reader)


def verify_shard(
    path: Path, *, fingerprint: str | None = None, start: int | None = None, stop: int | None = None
) -> Directory:
    """The directory of a shard of which every byte has been read and is as it was written.

    Raises DamagedShardError otherwise, and ForeignShardError when it is not the shard that is asked for.
    """
    with Reader(path) as reader:
        directory = examine(reader, fingerprint=fingerprint, start=start, stop=stop)
        first = directory.userblock_size
        problems = list(verify(reader, directory.pieces, start=first, rest_crc32=directory.rest_crc32))
    if problems:
        raise DamagedShardError("; ".join(problems))
    return directory


def examine(
    reader: Reader, *, fingerprint: str | None = None, start: int | None = None, stop: int | None = None
) -> Directory:
    """The directory of the shard that `reader` reads, once it is known to be the one that is asked for."""
    found, _, size = read_userblock(reader)
    attributes = found.pop("attributes")
    if attributes["format"] != SHARD:
        raise DamagedShardError(f"it is a {attributes['format']!r}, not a {SHARD!r}")
    datasets = tuple(Region(path, dtype, tuple(shape), *place) for path, dtype, shape, *place in found.pop("datasets"))
    identity = {key: attributes[key] for key in ("fingerprint", "start", "stop")}
    for key, expected in {"fingerprint": fingerprint, "start": start, "stop": stop}.items():
        if expected is not None and identity[key] != expected:
            raise ForeignShardError(f"it belongs to another plan: {key} is {identity[key]!r}, expected {expected!r}")
    return Directory(**identity, **found, datasets=datasets, userblock_size=size)


def read_errors(reader: Reader, directory: Directory) -> list[tuple[int, str]]:
    """The index of each failed item of a shard, and what went wrong."""
    if not directory.n_errors:
        return []
    places = {region.path: (region.offset, region.offset + region.n_bytes) for region in directory.datasets}
    texts = reader.read(*places["error/values"])
    offsets = np.frombuffer(reader.read(*places["error/offsets"]), OFFSET_DTYPE)
    failed = np.flatnonzero(np.diff(offsets))
    return [(directory.start + int(row), texts[offsets[row] : offsets[row + 1]].decode()) for row in failed]


def _n_values(contents: Mapping[str, list[Any]]) -> dict[str, int]:
    """How many values each column with offsets has, by the name of their dataset."""
    ends = {path.removesuffix("/offsets"): offsets for path, offsets in contents.items() if path.endswith("/offsets")}
    return {f"{name}/values": int(offsets[0][-1]) for name, offsets in ends.items()}


def _contents(
    columns: Mapping[str, Column], start: int, rows: Sequence[Mapping[str, Any] | ItemError]
) -> dict[str, list[Any]]:
    """For each dataset the values whose bytes, one after the other, are its own."""
    blank = {name: column.blank() for name, column in columns.items()}
    filled = [blank if isinstance(row, ItemError) else row for row in rows]
    values = {name: [row[name] for row in filled] for name in columns}
    values["index"] = [np.arange(start, start + len(rows), dtype="<i8")]
    values["error"] = [_error_text(row) if isinstance(row, ItemError) else b"" for row in rows]
    contents: dict[str, list[Any]] = {}
    for name, column in stored_columns(columns).items():
        if isinstance(column, Array):
            contents[name] = values[name]
        else:
            offsets = np.zeros(len(rows) + 1, OFFSET_DTYPE)
            np.cumsum([len(value) for value in values[name]], out=offsets[1:])
            contents[f"{name}/offsets"] = [offsets]
            contents[f"{name}/values"] = values[name]
    return contents


def _error_text(error: ItemError) -> bytes:
    # Never empty, for the text is how an item is known to have failed; and a file name in it need not be UTF-8.
    return (str(error) or type(error).__name__).encode("utf-8", "backslashreplace")


def _write(fd: int, region: Region, values: Sequence[Any]) -> Region:
    """The region with its checksum, once the values are in their place."""
    offset, crc32 = region.offset, 0
    for block in _blocks(values, region.n_bytes):
        write_at(fd, block, offset)
        offset, crc32 = offset + len(block), zlib.crc32(block, crc32)
    if offset != region.offset + region.n_bytes:
        raise ValueError(f"{region.path}: {offset - region.offset} bytes, expected {region.n_bytes}; use convert_row")
    return region._replace(crc32=crc32)


def _blocks(values: Sequence[Any], n_bytes: int) -> Iterator[bytes]:
    """The values' bytes in blocks of a few megabytes, so that large rows are not held twice."""
    step = max(1, len(values) * _BLOCK_BYTES // max(1, n_bytes))
    for first in range(0, len(values), step):
        yield b"".join(values[first : first + step])
