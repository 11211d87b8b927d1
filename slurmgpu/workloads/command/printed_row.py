"""Finds the row that a call for one item prints, among the progress lines of its script."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slurmgpu.shards.columns import Array, Column
from slurmgpu.workloads.command.sinks import MAX_BYTES, Lines, OutputError, ToLog

_JSON = json.JSONDecoder()
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
"""A string of JSON, which ends on its line."""
_MAX_DEPTH = 500
"""Nested brackets that every Python version can parse: the maximum depth of its JSON parser varies."""
_OF_PYTHON = re.compile(rb"\s*\{\s*'")
_BEHIND = re.compile(rb"[^{]\{\s*\".*\}\Z")
_BESIDE_COLUMNS = frozenset({"index", "retry", "error"})
_NOTHING, _NUMBER, _TEXT, _OBJECT, _WIDER, _ROW = range(6)
"""Kinds of output: a lone number, other lines, objects with other columns, with extra columns, with these columns."""


class PrintedRow:
    """Takes the row out of a call's stdout, and passes everything else on to `log` as it comes.

    The row is the only JSON object that begins at the start of a line and ends at the end of one, or the only such
    object with these columns. For a single numeric column it may also be a number, `true` or `false`, if nothing else
    is printed.
    """

    def __init__(self, columns: Mapping[str, Column], log: ToLog) -> None:
        self._columns = columns
        self._log = log
        self._lines = Lines()
        self._open: list[bytes] = []
        """The lines of an unfinished object."""
        self._depth = self._n_bytes = self._n_read = 0
        """The open brackets and the bytes of these lines, and the bytes that they had when they were last read."""
        self._last = b""
        """The last of the other lines."""
        self._kind, self._n_found = _NOTHING, 0
        """The greatest kind printed so far, and its number of objects."""
        self._held: tuple[dict[str, Any], bytes] | None = None
        """The row so far and its text; another object of its kind or a greater one replaces it."""

    def take(self, chunk: bytes) -> None:
        """Take the next bytes; OutputError at a line, or an object, of more than MAX_BYTES."""
        self._lines.take(chunk)
        while self._lines.whole:
            self._take_line(self._lines.whole.popleft())

    def end(self) -> None:
        """Take the last, incomplete line, and an unfinished object."""
        self.take(b"\n")
        while self._open:
            self._read(is_end=True)
            self.take(b"")
        self._log.end()

    def row(self, *, is_logged: bool = False) -> dict[str, Any]:
        """The row; OutputError if there is none, or more than one.

        It also goes to the log if it `is_logged`, or has other keys than the columns.
        """
        self.end()
        if self._held is not None:
            found, text = self._held
            if is_logged or self._kind in (_OBJECT, _WIDER):
                self._pass_on(text)
                self._log.end()
            return found
        shown = ", ".join(f'"{each}": …' for each in self._columns)
        if self._n_found:
            which = "with these columns" if self._kind == _ROW else "with other columns"
            raise OutputError(f"stdout has {self._n_found:,} JSON objects {which}; expected one, {{{shown}}}")
        last = self._last[:80].decode(errors="replace").strip()
        seen = f"; its last line is {last!r}" if last else ""
        if self._number(self._last) is not None:
            seen += ". A number alone is a row only if nothing else is printed to stdout"
        elif _OF_PYTHON.match(self._last):
            seen += ", a dictionary as Python prints it: print json.dumps(…) instead"
        elif self._last.endswith(b"}") and _BEHIND.search(self._last):
            seen += ", where text precedes the object: print a newline before it, and no logger's prefix"
        raise OutputError(f"stdout has no JSON object, such as {{{shown}}}{seen}")

    def tail(self) -> str:
        """The end of stdout; all of it goes to the log."""
        self.end()
        self._pass_on_held()
        self._log.end()
        return self._log.tail()

    def headline(self, *, of_error: bool) -> str:
        """The most informative line."""
        return self._log.headline(of_error=of_error)

    def _take_line(self, line: bytes) -> None:
        """Take a line; from the start of an object, hold lines back until it ends or turns out not to be JSON."""
        text = line if self._open else _shown(line)
        if not self._open:
            if not text.lstrip().startswith(b"{"):
                self._take_other(line)
                return
            self._depth = self._n_bytes = self._n_read = 0
        self._open.append(line)
        self._n_bytes += len(line) + 1
        if self._n_bytes > MAX_BYTES:
            self._take_open_as_other()
            raise OutputError(f"an object on stdout has more than {MAX_BYTES >> 20} MiB")
        bare = _STRING.sub(b"", text)
        self._depth += sum(map(bare.count, (b"{", b"["))) - sum(map(bare.count, (b"}", b"]")))
        if self._depth > _MAX_DEPTH:
            self._take_open_as_other()
        # Parse where the object must end, and otherwise seldom enough to cost no more than reading the lines.
        elif self._depth <= 0 or self._n_bytes >= 2 * self._n_read:
            self._n_read = self._n_bytes
            self._read()

    def _take_open_as_other(self) -> None:
        lines, self._open = self._open, []
        for each in lines:
            self._take_other(each)

    def _read(self, *, is_end: bool = False) -> None:
        """Take the object in the held lines once it ends; if they are not JSON, pass them on as other lines.

        So nothing inside a broken object is a row, and only the line where it breaks is read twice.
        """
        text = b"\n".join([_shown(self._open[0]), *self._open[1:]]).decode(errors="surrogateescape")
        row = None
        try:
            found, end = _JSON.raw_decode(text, text.index("{"))
            n_lines = text.count("\n", 0, end) + 1
            ends_line = not text[end:].partition("\n")[0].strip()
            if ends_line and not self._last.endswith(b"},"):  # else it is one of a list
                row = found, text[:end].encode()
        except UnicodeEncodeError as error:
            n_lines = text.count("\n", 0, error.start)
        except json.JSONDecodeError as error:
            is_cut = error.pos >= len(text)
            if is_cut and not is_end:
                return
            n_lines = len(self._open) if is_cut else error.lineno - 1
        except (ValueError, RecursionError):  # a number of thousands of digits, or as many brackets
            n_lines = len(self._open)
        n_lines = max(n_lines, 1)
        if row is None:
            for line in self._open[:n_lines]:
                self._take_other(line)
        else:
            self._hold(self._kind_of(row[0]), *row)
        self._lines.whole.extendleft(reversed(self._open[n_lines:]))
        self._open = []

    def _kind_of(self, found: dict[str, Any]) -> int:
        error = found.get("error")
        names = found.keys() - (_BESIDE_COLUMNS - {"error"} if is_metric(error) else _BESIDE_COLUMNS)
        if (isinstance(error, str) and error != "") or names == self._columns.keys():
            return _ROW
        return _WIDER if names > self._columns.keys() else _OBJECT

    def _take_other(self, line: bytes) -> None:
        """Pass on a line that is not an object; a lone number may be the row."""
        if not (shown := _shown(line)):
            return
        self._last = shown
        if self._kind == _NOTHING and (number := self._number(shown)) is not None:
            self._hold(_NUMBER, dict.fromkeys(self._columns, number), shown)
            return
        if self._kind < _TEXT:
            self._pass_on_held()
            self._kind, self._n_found = _TEXT, 0
        self._pass_on(line)

    def _number(self, text: bytes) -> int | float | None:
        [column, *others] = self._columns.values()
        if others or not isinstance(column, Array):
            return None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, int | float) else None

    def _hold(self, kind: int, row: dict[str, Any], text: bytes) -> None:
        """Hold back an object that may be the row; of each kind only the first."""
        if kind > self._kind:
            self._pass_on_held()
            self._kind, self._n_found = kind, 1
            self._held = row, text
            return
        if kind == self._kind:
            self._n_found += 1
            self._pass_on_held()
        self._pass_on(text)

    def _pass_on_held(self) -> None:
        if self._held is not None:
            self._pass_on(self._held[1])
            self._held = None

    def _pass_on(self, line: bytes) -> None:
        self._log.take(line + b"\n")


def is_metric(error: object) -> bool:
    """Whether a row's `error` is a number, such as a model's error, and not a reason why there is no row."""
    return isinstance(error, int | float) and not isinstance(error, bool)


def _shown(line: bytes) -> bytes:
    """A line without its end, a byte order mark, and the bars that it was written over."""
    return line.removeprefix(b"\xef\xbb\xbf").rstrip().rpartition(b"\r")[2]
