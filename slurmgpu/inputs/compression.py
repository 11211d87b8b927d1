"""Compressed files as streams of their content: .gz, .bz2, .xz and .zst, of any number of members."""

from __future__ import annotations

import contextlib
import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.packages import check_pyarrow

_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""The suffixes of compressed files."""

_READ_BYTES = 1 << 18


def suffix_of(path: Path) -> str | None:
    """The suffix that says how a file is compressed; None if it is not."""
    suffix = path.suffix.lower()
    return suffix if suffix in SUFFIXES else None


def without_suffix(path: Path) -> Path:
    """The name that a file has without its compression."""
    return path.with_suffix("") if suffix_of(path) else path


@contextlib.contextmanager
def decompressing(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """The content of a file, for `read`, which gives as many bytes as are asked for until the end.

    SlurmGPUError, also from within the block, if the file is damaged, cut short, or has something behind its last
    member.
    """
    suffix = suffix_of(path)
    if suffix is None:
        yield file
        return
    try:
        yield _Xz.reading(file) if suffix == ".xz" else _arrow_stream(file, path, _CODECS[suffix])
    except (EOFError, lzma.LZMAError, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the disk
            raise
        raise SlurmGPUError(
            f"{path} is no whole {suffix} file: {error}. An interrupted copy or download leaves such a file: get it "
            f"again, or, if it is not compressed, remove the suffix from its name."
        ) from error


def _arrow_stream(file: BinaryIO, path: Path, codec: str) -> BinaryIO:
    check_pyarrow(f"Reading {path} needs")
    import pyarrow as pa

    # Unlike the modules gzip and bz2, it refuses what stands behind the last member, which may be a damaged one.
    stream: Any = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
    return cast(BinaryIO, stream)


class _Xz(io.RawIOBase):
    """The content of an .xz file. `lzma.open` takes a damaged second stream for the end of the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    @classmethod
    def reading(cls, file: BinaryIO) -> BinaryIO:
        """The content, buffered."""
        return io.BufferedReader(cls(file), _READ_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._decoder.eof:
                data = self._next_stream(self._decoder.unused_data)
                if not data:
                    return 0
                self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif self._decoder.needs_input and not (data := self._file.read(_READ_BYTES)):
                raise EOFError("it ends within a stream")
            if found := self._decoder.decompress(data, len(buffer)):
                buffer[: len(found)] = found
                return len(found)

    def _next_stream(self, data: bytes) -> bytes:
        """The first bytes of the next stream, behind zeros; empty at the end of the file."""
        while not (data := data.lstrip(b"\0")):
            if not (data := self._file.read(_READ_BYTES)):
                break
        return data
