"""Compressed files as streams of their content: .gz, .bz2, .xz and .zst, of any number of members."""

from __future__ import annotations

import bz2
import contextlib
import functools
import io
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.packages import check_pyarrow

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""The suffixes of compressed files."""

_READ_BYTES = 1 << 18


def suffix_of(path: Path) -> str | None:
    """The suffix that says how a file is compressed; None if it is not."""
    suffix = path.suffix.lower()
    return suffix if suffix in _SUFFIXES else None


def without_suffix(path: Path) -> Path:
    """The name that a file has without its compression."""
    return path.with_suffix("") if suffix_of(path) else path


@contextlib.contextmanager
def decompressing(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """The content of a file as a stream, whose `read` returns as many bytes as asked for, until the end.

    SlurmGPUError, also from within the block, if the file is damaged, truncated, or has other bytes after its last
    member.
    """
    suffix = suffix_of(path)
    if suffix is None:
        yield file
        return
    try:
        yield _stream(file, path, suffix)
    except (EOFError, _DamagedError, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the disk failed
            raise
        raise SlurmGPUError(
            f"{path} is not a complete {suffix} file: {error}. If a copy or download was interrupted, repeat it; "
            f"if the file is not compressed, remove the suffix from its name."
        ) from error


def _stream(file: BinaryIO, path: Path, suffix: str) -> BinaryIO:
    members: _Members | None = None
    if suffix == ".xz":
        members = _Members(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError, padding=b"\0")
    elif suffix == ".bz2":
        members = _Members(file, bz2.BZ2Decompressor, OSError)
    elif suffix == ".gz":
        with contextlib.suppress(ImportError):
            from isal import igzip_lib  # three times as fast as zlib

            make = functools.partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP)
            members = _Members(file, make, cast(type[Exception], igzip_lib.IsalError))
    if members is not None:
        return io.BufferedReader(members, _READ_BYTES)
    check_pyarrow(f"Reading {path} needs")
    import pyarrow as pa

    # Unlike the module gzip, it refuses bytes after the last member, which may be a damaged member.
    return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(file, mode="r"), _CODECS[suffix]))


class _DamagedError(Exception):
    """A decoder found that its bytes are damaged."""


class _Decoder(Protocol):
    """Decodes one member; the interface of `lzma.LZMADecompressor`."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Members(io.RawIOBase):
    """The content of a file with several members; `lzma.open` takes a damaged second member for the end of the file.

    Each member has its own decoder, which raises `damage`. Bytes of `padding` may lie between members.
    """

    def __init__(
        self, file: BinaryIO, make: Callable[[], _Decoder], damage: type[Exception], padding: bytes = b""
    ) -> None:
        self._file, self._make, self._damage, self._padding = file, make, damage, padding
        self._decoder = make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._decoder.eof:
                data = self._next_member(self._decoder.unused_data)
                if not data:
                    return 0
                self._decoder = self._make()
            elif self._decoder.needs_input and not (data := self._file.read(_READ_BYTES)):
                raise EOFError("it ends within a stream")
            try:
                found = self._decoder.decompress(data, len(buffer))
            except self._damage as error:
                raise _DamagedError(str(error)) from error
            if found:
                buffer[: len(found)] = found
                return len(found)

    def _next_member(self, data: bytes) -> bytes:
        """The first bytes of the next member, after padding; empty at the end of the file."""
        while not (data := data.lstrip(self._padding)):
            if not (data := self._file.read(_READ_BYTES)):
                break
        return data
