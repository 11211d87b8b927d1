"""The command line on a terminal of a given size, and what the terminal shows."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pyte


class Terminal:
    """A process on a terminal: `display` has the lines that the terminal shows.

    `under` is a command that gets the one to run as its arguments.
    """

    def __init__(self, *argv, cwd, size=(80, 24), under=(), **env):
        self._ours, its = pty.openpty()
        self.screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self.screen)
        self._set_size(*size)
        environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [*under, sys.executable, "-m", "slurmgpu", *map(str, argv)],
            cwd=cwd,
            env={**environ, "TERM": "xterm-256color", **env},
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C reaches what is in front
        )
        self.modes = termios.tcgetattr(its)
        self._its = its
        self.written = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)

    @property
    def display(self):
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self):
        return "\n".join(self.display)

    def resize(self, columns, lines):
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)

    def send(self, keys):
        os.write(self._ours, keys)

    def see(self, condition, timeout_s=120):
        """Read until the display is as expected, and return it."""
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < deadline, f"waited {timeout_s} s; the screen:\n{self.text}"
            self._read(0.1)
        return self.display

    def end(self, timeout_s=120):
        """The exit code, after the process has ended and the display has all its output."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on; the screen:\n{self.text}"
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def _read(self, timeout_s):
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return False
        part = os.read(self._ours, 65536)
        self.written += part
        self._stream.feed(part)
        return True

    def _set_size(self, columns, lines):
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
