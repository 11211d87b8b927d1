"""HDF5 files as regions of bytes: the user block that lists them, and the reader that verifies them.

Nothing here opens a file with libhdf5, which may hang on a damaged one. docs/reference/hdf5.md has the byte layout.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

from slurmgpu.shards.made_by import MadeBy
from slurmgpu.shards.open_file import Identity, OpenFile, ReplacedFileError
from slurmgpu.util.regular_files import UnusableFileError
from slurmgpu.util.shared_files import PATIENCE_S, retried

FORMAT_VERSION = 1
SHARD = "slurmgpu shard"
MERGED = "slurmgpu merged"

_MAGIC = b"slurmgpu"
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"  # begins an HDF5 file without a user block
# Magic, version, CRC-32 of the rest of the block; sizes of the block, its JSON and its table.
_HEADER = struct.Struct("<8sIIQQQ")
_CRC_FROM = 16
_SMALLEST_USERBLOCK = 512  # HDF5's minimum; larger sizes are powers of 2 times this
BUFFER_BYTES = 1 << 20  # fits the L2 cache, so checksum and copy find the bytes there
_PAGE_BYTES = 4096
_SMALL_USERBLOCK = 1 << 20
_LARGEST_USERBLOCK = 1 << 31  # a merged file of a million shards and a hundred columns needs less
_T = TypeVar("_T")


class DamagedShardError(Exception):
    """The bytes of a file differ from those written; the message says which."""


class OtherHDF5Error(DamagedShardError):
    """An HDF5 file that another program wrote."""


class Region(NamedTuple):
    """The place of a dataset's bytes. An empty dataset has offset 0 and 0 bytes."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    crc32: int


class _OfBoth(TypedDict):
    attributes: dict[str, Any]
    n_rows: int
    n_errors: int
    file_size: int
    rest_crc32: int
    datasets: Sequence[Region]


class FileDirectory(_OfBoth, total=False):
    """The directory in a user block. A region that was read is a list."""

    notes: dict[str, Any]
    """Of a shard, as `made_by`."""
    made_by: MadeBy
    code: Sequence[tuple[int, int, str | None]]
    """Of a merged file."""


class Piece(NamedTuple):
    """Bytes with their own checksum, and a name for messages."""

    name: str
    offset: int
    n_bytes: int
    crc32: int


def same_size(before: Identity, now: Identity) -> bool:
    """Whether to go on reading a replaced shard: another task publishes the same bytes, and checksums are checked."""
    return before.size == now.size


def in_file_order(regions: Sequence[Region]) -> list[Region]:
    """The non-empty regions by offset; libhdf5 may not place them in order of creation."""
    return sorted((region for region in regions if region.n_bytes), key=lambda region: region.offset)


class Reader:
    """Reads a file forwards through one buffer; a small file takes one open and one read.

    Transient errors are retried for `patience_s`, then raised: a failed read says nothing about the bytes.
    Anything but a regular file is a DamagedShardError, and so is a file of another size that replaced this one.
    `file` is open as long as something refers to it, unless the reader is closed.
    """

    def __init__(
        self,
        path: os.PathLike[str],
        buffer_bytes: int = BUFFER_BYTES,
        patience_s: float = PATIENCE_S,
        *,
        same: Callable[[Identity, Identity], bool] = same_size,
    ) -> None:
        try:
            self.file = OpenFile(path, patience_s, same)
        except UnusableFileError as error:
            raise DamagedShardError(str(error.strerror)) from error
        self.size = self.file.identity.size
        self._view = memoryview(bytearray(min(buffer_bytes, -(-self.size // _PAGE_BYTES) * _PAGE_BYTES)))
        self._start = self._stop = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def chunks(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes from `start` to `stop`; each chunk is valid until the next one is requested.

        Chunks end at multiples of 4096 bytes of the file, so that no number is split.
        """
        while start < stop:
            if not self._start <= start < self._stop:
                self._fill(start // _PAGE_BYTES * _PAGE_BYTES)
            if start >= self._stop:
                raise DamagedShardError(f"the file ends at byte {self._stop}, before byte {stop}")
            end = min(stop, self._stop)
            yield self._view[start - self._start : end - self._start]
            start = end

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`."""
        return b"".join(map(bytes, self.chunks(start, stop)))

    def whole(self) -> memoryview | None:
        """The whole file if it fits the buffer; valid after the reader is closed."""
        if self.size > len(self._view):
            return None
        if self._start or self._stop < self.size:
            self._fill(0)
        if self._stop < self.size:
            raise DamagedShardError(f"the file ends at byte {self._stop}, before byte {self.size}")
        return self._view[: self.size]

    def forget_cache(self) -> None:
        """Make the next read bypass the page cache, if the kernel honours the hint."""
        self.file.forget_cache()
        self._start = self._stop = 0

    def twice(self, read: Callable[[], _T]) -> _T:
        """The result of `read()`, which reads this file; once more, not from a cache, if it finds damage."""
        try:
            return read()
        except DamagedShardError:
            self.forget_cache()
            return read()

    def _fill(self, start: int) -> None:
        self._start = self._stop = start
        part = self._view[: max(0, self.size - start)]
        try:
            self._stop += self.file.read_into(part, start)
        except ReplacedFileError as error:
            raise DamagedShardError(str(error)) from error


class Content:
    """The bytes of a whole file in memory, read as by a Reader."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.size = len(content)

    def chunks(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes from `start` to `stop`, as one chunk."""
        if stop > self.size:
            raise DamagedShardError(f"the file ends at byte {self.size}, before byte {stop}")
        yield self._content[start:stop]


def write_at(fd: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of `content`; near a full disk, one system call may write only a part."""
    rest = memoryview(content)
    while rest:
        n_written = retried(lambda: os.pwrite(fd, rest, offset))  # noqa: B023  (called at once)
        rest, offset = rest[n_written:], offset + n_written


def new_directory(attributes: dict[str, Any], n_rows: int, datasets: Sequence[Region]) -> FileDirectory:
    """The directory of a file before it is written; numbers that depend on its bytes are 0."""
    numbers = {"n_rows": n_rows, "n_errors": 0, "file_size": 0, "rest_crc32": 0}
    return cast(FileDirectory, {"attributes": attributes, **numbers, "datasets": datasets})


def userblock_size(directory: FileDirectory, *, n_table_bytes: int = 0) -> int:
    """A sufficient size of the user block, whatever numbers are filled in later."""
    n_numbers = 4 + 3 * len(directory["datasets"])
    needed = _HEADER.size + len(_to_json(directory)) + 20 * n_numbers + n_table_bytes
    size = _SMALLEST_USERBLOCK
    while size < needed:
        size *= 2
    return size


def pack_userblock(directory: FileDirectory, size: int, table: bytes = b"") -> bytes:
    """The user block, `size` bytes: header, directory as JSON, table, zeros."""
    content = _to_json(directory)
    behind = struct.pack("<QQQ", size, len(content), len(table)) + content + table
    behind = behind.ljust(size - _CRC_FROM, b"\0")
    block = _MAGIC + struct.pack("<II", FORMAT_VERSION, zlib.crc32(behind)) + behind
    if len(block) != size:
        raise ValueError(f"the directory needs {len(block)} bytes, the user block has {size}")
    return block


def read_userblock(reader: Reader, *, quick: bool = False) -> tuple[FileDirectory, bytes, int]:
    """The directory, table and size of a user block; DamagedShardError if it is not as written.

    `quick` skips the table, and the checksum of a large block.
    """
    if reader.size < _SMALLEST_USERBLOCK:
        raise DamagedShardError(f"the file has {reader.size} bytes, too few for a file of slurmgpu")
    magic, version, crc32, size, n_json, n_table = _HEADER.unpack(reader.read(0, _HEADER.size))
    if magic == _HDF5_MAGIC:
        raise OtherHDF5Error("it is an HDF5 file of another program")
    if magic != _MAGIC:
        raise DamagedShardError("it does not begin with slurmgpu's user block")
    if version != FORMAT_VERSION:
        raise DamagedShardError(f"its format has version {version}; this slurmgpu reads {FORMAT_VERSION}")
    if not _HEADER.size + n_json + n_table <= size <= min(reader.size, _LARGEST_USERBLOCK):
        raise DamagedShardError("the sizes in its user block are impossible")
    if not (quick and size > _SMALL_USERBLOCK) and _checksum(reader, _CRC_FROM, size) != crc32:
        raise DamagedShardError("the checksum of its user block differs")
    behind_json = _HEADER.size + n_json
    directory = _parsed(reader.read(_HEADER.size, behind_json))
    if reader.size != directory["file_size"]:
        raise DamagedShardError(f"it has {reader.size} bytes, but had {directory['file_size']} when it was written")
    return directory, b"" if quick else reader.read(behind_json, behind_json + n_table), size


def _parsed(content: bytes) -> FileDirectory:
    try:
        directory = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedShardError(f"its directory is not valid JSON: {error}") from error
    if not isinstance(directory, dict) or type(directory.get("file_size")) is not int:
        raise DamagedShardError("its directory does not give the size of the file")
    return cast(FileDirectory, directory)


def verify(
    reader: Reader | Content,
    pieces: Iterable[Piece],
    *,
    start: int,
    rest_crc32: int,
    sink: Callable[[str, memoryview], None] | None = None,
) -> Iterator[str]:
    """Yield a sentence for each piece that differs, and one for the rest, HDF5's own metadata.

    Reads everything from `start` on once, in file order, which is the order of `pieces`. `sink` gets the name and the
    bytes of each piece on the way.
    """
    position, rest = start, 0
    for name, offset, n_bytes, expected in pieces:
        rest = _checksum(reader, position, offset, rest)
        position = offset + n_bytes
        crc32 = 0
        for chunk in reader.chunks(offset, position):
            crc32 = zlib.crc32(chunk, crc32)
            if sink:
                sink(name, chunk)
        if crc32 != expected:
            yield f"the checksum of {name} differs"
    if _checksum(reader, position, reader.size, rest) != rest_crc32:
        yield "the checksum of the HDF5 metadata differs"


def _checksum(reader: Reader | Content, start: int, stop: int, crc32: int = 0) -> int:
    for chunk in reader.chunks(start, stop):
        crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _to_json(directory: FileDirectory) -> bytes:
    return json.dumps(directory, separators=(",", ":")).encode()
