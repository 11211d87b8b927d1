"""Standard output and error, which may be pipes whose reader, `head` say, has seen enough."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class Stream(io.FileIO):
    """A standard stream: what is written to it when nobody reads it any more goes nowhere, and is no error.

    With `unread` the command does nothing but write to it, and ends then, with this exit code.
    """

    def __init__(self, fd: int, *, unread: int | None = None) -> None:
        super().__init__(fd, "w", closefd=False)
        self._unread = unread

    def write(self, data: Any, /) -> int:
        """The number of bytes that were written, or that would have been if anybody had read them."""
        try:
            return super().write(data)
        except OSError as error:
            # Python flushes what is left when it exits, and would exit with 120.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if not isinstance(error, BrokenPipeError):
                raise
            # Neither Typer nor Rich sees a broken pipe, for which both exit with 1.
            if self._unread is not None:
                raise SystemExit(self._unread) from None
            return len(data)


def prepare_streams(*, unread: int | None) -> None:
    """Make stdout and stderr such streams; a command ends with `unread` when nobody reads its output any more.

    With None it goes on: what it does, and its exit code, do not depend on who looks.
    """
    sys.stdout, sys.stderr = _prepared(sys.stdout, unread), _prepared(sys.stderr)


def _prepared(stream: TextIO | None, unread: int | None = None) -> TextIO:
    if stream is None:  # closed before Python began, as by >&-
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    # Names of files are any bytes: what has no letter becomes an escape, in JSON the one that JSON has for it.
    stream.reconfigure(errors="backslashreplace")
    if not isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
        return stream  # a test's, in memory
    raw = Stream(stream.fileno(), unread=unread)
    buffer: Any = raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw)  # raw with PYTHONUNBUFFERED
    return io.TextIOWrapper(
        buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )
