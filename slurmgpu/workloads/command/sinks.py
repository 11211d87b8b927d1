"""Sinks for a process's output: the log, or lines for the reader of answers."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from slurmgpu.util.out_of_memory import GPU_TEXTS, MEMORY_TEXTS

TAIL_BYTES = 2048
"""How many bytes from the end of stderr an error keeps."""
OF_GPUS = "CUDA", "NVML", "NVIDIA", "GPU"
"""Words in an error that make the worker check whether its GPUs still work."""
_BAR = re.compile(r"\d%\|.*\||[━╸╺█▏▎▍▌▋▊▉]{4}")
"""Progress bars of tqdm and Rich."""
_JOB = re.compile(
    r"^(.*: line \d+:)? +\d+ (Done|Exit \d+|Killed|Terminated|Aborted|Segmentation fault|Bus error|Illegal instruction|"
    r"Floating point exception|Broken pipe) {2,}"
)
"""What bash says of a process that died, and of others of its pipe, with a number that differs from call to call."""
_OTHER_OF_PIPE = re.compile(r" ?(?:Done|Exit \d+) \|")
_OF_HYDRA = "HYDRA_FULL_ERROR=1"
_RAISED = re.compile(r"(?:\[[\w ]+\]:? ?)?(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception)(?:: |:?$)|\s*what\(\): ")
"""The line that ends a Python traceback, perhaps with torchrun's rank before it, or reports a C++ exception."""
_OF_LAUNCHER = "ChildFailedError", "CalledProcessError"
"""Exceptions of what starts a program, after its traceback: of torchrun, and of `subprocess` and accelerate."""
_TELLING = (MEMORY_TEXTS, GPU_TEXTS, OF_GPUS)
MAX_BYTES = 64 << 20
"""The longest line, and the longest answer on stdout, that is accepted."""
LINE_BYTES = 1 << 16
"""A longer line is cut in the log."""
LOG_BYTES = 16 << 20
"""How many bytes a call may print to the log, for stdout and stderr each."""


class OutputError(Exception):
    """The output of a process does not have the expected form; the message continues "failed: "."""


class Sink(Protocol):
    """Takes the output from a pipe; `end` is called when the pipe is closed."""

    def take(self, chunk: bytes) -> None:
        """Take the next bytes."""

    def end(self) -> None:
        """Take the last, incomplete line."""

    def tail(self) -> str:
        """The end of the output, for an error, once all of it is in the log."""

    def headline(self, *, of_error: bool) -> str:
        """The most informative line."""


class ToLog:
    """Passes lines on to the log, after a `mark` that names their items, and keeps lines for errors.

    It keeps the end of the output, and the last line that ends a traceback of each kind: any, about memory, GPU
    memory, GPUs. `names` replace the paths of temporary files in kept lines, so that equal errors have equal bytes.
    """

    def __init__(self, mark: str, names: Mapping[str, str] | None = None) -> None:
        self.mark = mark
        self._n_bytes = 0
        self._names = names or {}
        self._tail = self._rest = b""
        self._is_cut = False
        self._raised, self._telling = "", dict[Sequence[str], str]()

    def set_mark(self, mark: str) -> None:
        """Change the mark, and forget the lines kept so far."""
        self.end()
        self.mark, self._tail, self._is_cut, self._n_bytes = mark, b"", False, 0
        self._raised, self._telling = "", {}

    def take(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self._is_cut |= len(self._tail) + len(chunk) > TAIL_BYTES
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)

    def end(self) -> None:
        """Write the last, incomplete line, and how many bytes are not in the log."""
        if self._rest:
            self._write([self._rest])
            self._rest = b""
        if self._n_bytes > LOG_BYTES:
            said = (
                f"[… {self._n_bytes - LOG_BYTES:,} more bytes are not in the log, which takes {LOG_BYTES:,} of a call]"
            )
            self._n_bytes = LOG_BYTES
            self._put(self.mark.encode() + said.encode() + b"\n")

    def tail(self) -> str:
        """The end of the output, in whole lines, with overwritten lines as a terminal shows them."""
        text = self._tail.decode(errors="replace")
        if self._is_cut and "\n" in text.rstrip("\n"):
            text = text.partition("\n")[2]
        return "\n".join(self._shown(line) for line in text.split("\n")).strip()

    def raised(self) -> list[str]:
        """The last traceback lines about memory, GPU memory and GPUs, if there are any."""
        return list(dict.fromkeys(self._telling.values()))

    def told(self) -> str:
        """The last line that ends a traceback, preferably one about memory; "" without a traceback."""
        return self._telling.get(MEMORY_TEXTS) or self._raised

    def headline(self, *, of_error: bool) -> str:
        """The most informative line; with `of_error` one that ends a traceback, also before the end.

        Otherwise the last line that is not a rule or a progress bar, or the first if Hydra ends an error with advice.
        After a traceback may come torchrun's own, and lines from trackers and warnings.
        """
        if of_error and (told := self.told()):
            return told
        lines = self.tail().split("\n")
        shown = [line for line in lines if not (_BAR.search(line) or _OTHER_OF_PIPE.match(line))] or [""]
        ordered = shown if _OF_HYDRA in shown[-1] else shown[::-1]
        return next((line for line in ordered if any(map(str.isalnum, line))), shown[-1])

    def _shown(self, line: str) -> str:
        """A line as a terminal shows it, without the paths of temporary files and bash's numbers of processes."""
        for path, name in self._names.items():
            line = line.replace(path, name)
        return _JOB.sub(r"\1 \2 ", line.rstrip("\r").rpartition("\r")[2].rstrip())

    def _note(self, line: bytes) -> None:
        """Keep a line that ends a traceback."""
        if not (b"Error" in line or b"Exception" in line or b"what()" in line):
            return
        text = self._shown(line.decode(errors="replace"))
        if _RAISED.match(text) is None or any(name in text for name in _OF_LAUNCHER):
            return
        self._raised = text.strip()
        self._telling |= {words: self._raised for words in _TELLING if any(word in text for word in words)}

    def _write(self, lines: Sequence[bytes]) -> None:
        mark, kept = self.mark.encode(), []
        for line in lines:
            self._note(line)
            if self._n_bytes < LOG_BYTES:
                kept.append(mark + line[: LOG_BYTES - self._n_bytes] + b"\n")
            self._n_bytes += len(line) + 1
        self._put(b"".join(kept))

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads the log any more, or its disk is full
            while data:
                data = data[os.write(2, data) :]


class Lines:
    """Keeps lines until they are taken; OutputError for a line of more than MAX_BYTES."""

    def __init__(self) -> None:
        self.whole: deque[bytes] = deque()
        self._parts: list[bytes] = []
        self._n_bytes = 0

    def take(self, chunk: bytes) -> None:
        """Take the next bytes."""
        first, *others = chunk.split(b"\n")
        self._add(first)
        for part in others:
            self._end_line()
            self._add(part)

    def end(self) -> None:
        """Ignore an incomplete line."""

    def tail(self) -> str:
        """Nothing: its lines are answers."""
        return ""

    def headline(self, *, of_error: bool) -> str:
        """Nothing."""
        return ""

    def _add(self, part: bytes) -> None:
        self._parts.append(part)
        self._n_bytes += len(part)
        if self._n_bytes > MAX_BYTES:
            self._end_line()
            raise OutputError(f"a line of stdout has more than {MAX_BYTES >> 20} MiB")

    def _end_line(self) -> None:
        self.whole.append(b"".join(self._parts))
        self._parts, self._n_bytes = [], 0
