"""Standard output and error, which may be pipes whose reader closes early, as `head` does."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class Stream(io.FileIO):
    """A standard stream that discards what is written after its reader has closed.

    With `unread`, the command exits with this code instead.
    """

    def __init__(self, fd: int, *, unread: int | None = None) -> None:
        super().__init__(fd, "w", closefd=False)
        self._unread = unread

    def write(self, data: Any, /) -> int:
        """The number of bytes that were written or discarded."""
        try:
            return super().write(data)
        except OSError as error:
            # Python flushes the rest at exit, and would exit with 120.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if not isinstance(error, BrokenPipeError):
                raise
            # Typer and Rich would exit with 1 for a broken pipe.
            if self._unread is not None:
                raise SystemExit(self._unread) from None
            return len(data)


def prepare_streams(*, unread: int | None) -> None:
    """Make stdout and stderr such streams; a command exits with `unread` once its stdout is closed.

    With None it continues: its work and its exit code do not depend on the reader.
    """
    sys.stdout, sys.stderr = _prepared(sys.stdout, unread), _prepared(sys.stderr)


def _prepared(stream: TextIO | None, unread: int | None = None) -> TextIO:
    if stream is None:  # closed by the shell: >&-
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    # File names may be any bytes: undecodable ones become escapes, which in UTF-8 are valid in JSON, too.
    stream.reconfigure(errors="backslashreplace")
    if not isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
        return stream  # a test's, in memory
    raw = Stream(stream.fileno(), unread=unread)
    buffer: Any = raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw)  # raw with PYTHONUNBUFFERED
    return io.TextIOWrapper(
        buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )
