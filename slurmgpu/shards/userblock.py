"""An HDF5 file as regions of bytes: the user block that lists them, and the reader that verifies them.

Nothing here opens a file with libhdf5, which may hang on a damaged one. docs/reference/hdf5.md has the byte layout.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from slurmgpu.util.shared_files import PATIENCE_S, UnusableFileError, is_transient, naming, open_regular, retried

FORMAT_VERSION = 1
SHARD = "slurmgpu shard"
MERGED = "slurmgpu merged"

_MAGIC = b"slurmgpu"
# Magic, version, CRC-32 of the rest of the block; sizes of the block, its JSON and its table.
_HEADER = struct.Struct("<8sIIQQQ")
_CRC_FROM = 16
_SMALLEST_USERBLOCK = 512  # HDF5's minimum; larger sizes are powers of 2 times this
_BUFFER_BYTES = 1 << 20  # fits the L2 cache, so checksum and copy find the bytes there
_PAGE_BYTES = 4096
_SMALL_USERBLOCK = 1 << 20
_LARGEST_USERBLOCK = 1 << 31  # a merged file of a million shards and a hundred columns needs less


Identity: TypeAlias = tuple[int, int, int, int]
"""A file's device, inode, size, and time of change in nanoseconds."""


class DamagedShardError(Exception):
    """The bytes of a file differ from those written; the message says which."""


class Region(NamedTuple):
    """The place of a dataset's bytes. An empty dataset has offset 0 and 0 bytes."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    crc32: int


class Piece(NamedTuple):
    """Bytes with their own checksum, and a name for messages."""

    name: str
    offset: int
    n_bytes: int
    crc32: int


def in_file_order(regions: Sequence[Region]) -> list[Region]:
    """The non-empty regions by offset; libhdf5 may not place them in order of creation."""
    return sorted((region for region in regions if region.n_bytes), key=lambda region: region.offset)


class Reader:
    """Reads a file forwards through one buffer; a small file takes one open and one read.

    Transient errors are retried for `patience_s`, then raised: a failed read says nothing about the bytes.
    Anything but a regular file is a DamagedShardError.
    """

    def __init__(
        self, path: os.PathLike[str], buffer_bytes: int = _BUFFER_BYTES, patience_s: float = PATIENCE_S
    ) -> None:
        self._path, self._patience_s = path, patience_s
        try:
            self._fd, self.size = retried(lambda: _opened(path), patience_s)
        except UnusableFileError as error:
            raise DamagedShardError(str(error.strerror)) from error
        self._view = memoryview(bytearray(min(buffer_bytes, -(-self.size // _PAGE_BYTES) * _PAGE_BYTES)))
        self._start = self._stop = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    @property
    def identity(self) -> Identity:
        """What tells the open file from another one at its path, and from itself after a change."""
        found = os.fstat(self._fd)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

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
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._start = self._stop = 0

    def duplicate(self, onto: int | None = None) -> int:
        """A descriptor of the open file, which the caller closes; `onto` is one that becomes it."""
        return os.dup(self._fd) if onto is None else os.dup2(self._fd, onto, inheritable=False)

    def _fill(self, start: int) -> None:
        self._start = self._stop = start
        while (n_filled := self._stop - start) < min(len(self._view), self.size - start):
            with naming(self._path):
                n_read = retried(lambda: self._read(n_filled), self._patience_s)
            if not n_read:
                break
            self._stop += n_read

    def _read(self, n_filled: int) -> int:
        try:
            return os.preadv(self._fd, [self._view[n_filled:]], self._stop)
        except OSError as error:
            if is_transient(error):
                self._reopen()
            raise

    def _reopen(self) -> None:
        """Open the file again: a stale NFS handle stays stale."""
        try:
            fd, size = _opened(self._path)
        except OSError:
            return  # the next try raises
        os.close(self._fd)
        self._fd = fd
        if size != self.size:
            raise DamagedShardError(f"it has {size} bytes, and had {self.size} a moment ago")


def _opened(path: os.PathLike[str]) -> tuple[int, int]:
    fd = open_regular(path)
    try:
        return fd, os.fstat(fd).st_size
    except BaseException:
        os.close(fd)
        raise


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


def new_directory(
    attributes: Mapping[str, Any], n_rows: int, datasets: Sequence[Region], **more: Any
) -> dict[str, Any]:
    """The directory of a file before it is written; numbers that depend on its bytes are 0."""
    numbers = {"n_rows": n_rows, "n_errors": 0, "file_size": 0, "rest_crc32": 0}
    return {"attributes": attributes, **numbers, "datasets": datasets, **more}


def userblock_size(directory: Mapping[str, Any], *, n_table_bytes: int = 0) -> int:
    """A sufficient size of the user block, whatever numbers are filled in later."""
    n_numbers = 4 + 3 * len(directory["datasets"])
    needed = _HEADER.size + len(_to_json(directory)) + 20 * n_numbers + n_table_bytes
    size = _SMALLEST_USERBLOCK
    while size < needed:
        size *= 2
    return size


def pack_userblock(directory: Mapping[str, Any], size: int, table: bytes = b"") -> bytes:
    """The user block, `size` bytes: header, directory as JSON, table, zeros."""
    content = _to_json(directory)
    behind = struct.pack("<QQQ", size, len(content), len(table)) + content + table
    behind = behind.ljust(size - _CRC_FROM, b"\0")
    block = _MAGIC + struct.pack("<II", FORMAT_VERSION, zlib.crc32(behind)) + behind
    if len(block) != size:
        raise ValueError(f"the directory needs {len(block)} bytes, the user block has {size}")
    return block


def read_userblock(reader: Reader, *, quick: bool = False) -> tuple[dict[str, Any], bytes, int]:
    """The directory, table and size of a user block; DamagedShardError if it is not as written.

    `quick` skips the table, and the checksum of a large block.
    """
    if reader.size < _SMALLEST_USERBLOCK:
        raise DamagedShardError(f"the file has {reader.size} bytes, fewer than any file of slurmgpu")
    magic, version, crc32, size, n_json, n_table = _HEADER.unpack(reader.read(0, _HEADER.size))
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
        raise DamagedShardError(f"it has {reader.size} bytes, and had {directory['file_size']} when it was written")
    return directory, b"" if quick else reader.read(behind_json, behind_json + n_table), size


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        directory = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedShardError(f"its directory is not valid JSON: {error}") from error
    if not isinstance(directory, dict) or type(directory.get("file_size")) is not int:
        raise DamagedShardError("its directory does not give the size of the file")
    return directory


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


def _to_json(directory: Mapping[str, Any]) -> bytes:
    return json.dumps(directory, separators=(",", ":")).encode()
