"""Reads single keys, and handles signals, for a full-screen program."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Any

KEYS = {
    **dict.fromkeys((b"\x1b[A", b"\x1bOA", b"k"), "up"),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB", b"j"), "down"),
    **dict.fromkeys((b"\x1b[5~", b"b"), "page up"),
    **dict.fromkeys((b"\x1b[6~", b" ", b"f"), "page down"),
    **dict.fromkeys((b"\x1b[H", b"\x1bOH", b"\x1b[1~", b"g"), "home"),
    **dict.fromkeys((b"\x1b[F", b"\x1bOF", b"\x1b[4~", b"G"), "end"),
    **dict.fromkeys((b"q", b"Q"), "quit"),
    b"\x1a": "suspend",
}
"""Sequences of terminals (xterm's ctlseqs, "PC-Style Function Keys"), and the keys of less and vi."""
SEQUENCE = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|[^\x1b]")


class Keyboard:
    """Waits for keys; `wake` ends the wait from another thread."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._closing = threading.RLock()  # a signal handler may call `wake` during `wake`
        self._is_closed = False
        self._input: int | None = sys.stdin.fileno() if sys.stdin.isatty() else None

    def wake(self) -> None:
        """End the wait for keys."""
        # After `close` the file descriptor may belong to another file.
        with self._closing, contextlib.suppress(OSError):
            if not self._is_closed:
                os.write(self._writer, b".")

    def wait(self, timeout_s: float) -> list[str]:
        """The names of pressed keys; returns at a key, at `wake` or after the timeout."""
        ready, _, _ = select.select([fd for fd in (self._reader, self._input) if fd is not None], [], [], timeout_s)
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)
        if self._input is None or self._input not in ready:
            return []
        content = os.read(self._input, 1024)
        if not content:
            self._input = None  # the terminal is gone
        return [KEYS[part] for part in SEQUENCE.findall(content) if part in KEYS]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Read keys unbuffered, and restore the terminal afterwards.

        SIGTERM and SIGHUP raise SystemExit. Ctrl-C is unchanged, Ctrl-Z becomes a key.
        """
        before = None if self._input is None else termios.tcgetattr(self._input)
        handlers = {signal.SIGTERM: _exit, signal.SIGHUP: _exit, signal.SIGWINCH: lambda *_: self.wake()}
        former: dict[int, Any] = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
        try:
            if self._input is not None:
                tty.setcbreak(self._input, termios.TCSADRAIN)
                raw = termios.tcgetattr(self._input)
                raw[6][termios.VSUSP] = b"\0"  # _POSIX_VDISABLE
                termios.tcsetattr(self._input, termios.TCSADRAIN, raw)
            yield
        finally:
            if before is not None and self._input is not None:
                termios.tcsetattr(self._input, termios.TCSADRAIN, before)
            for signum, handler in former.items():
                signal.signal(signum, handler)

    def close(self) -> None:
        """Close the pipe of `wake`."""
        with self._closing:
            self._is_closed = True
            os.close(self._reader)
            os.close(self._writer)


def _exit(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
