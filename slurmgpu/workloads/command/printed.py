"""The row in what a call of one item prints, among the lines that scripts print of their progress."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slurmgpu.shards.columns import Array, Column
from slurmgpu.workloads.command.process import MAX_BYTES, OutputError, ToLog

_OPENS = re.compile(rb'\s*\{\s*(?:"|\}|$)')
"""How a JSON object begins; a dictionary as Python prints it begins otherwise."""
_NUMBER = re.compile(rb"\s*(?:-?(?:\d|NaN|Infinity)|true|false)")
_LINE_ENDS = re.compile(r"[^\S\n]*(?:\n|\Z)")
_OF_PYTHON = re.compile(rb"\s*\{\s*'")
_BESIDE_COLUMNS = frozenset({"index", "retry", "error"})


class Printed:
    """Takes the row out of what a call prints, and passes all else on to `log`, as it comes.

    The row is the only JSON object that begins with a line and ends with one, or the only one with these columns. Of a
    single column of numbers it may also be a number, `true` or `false`, if nothing else is printed.
    """

    def __init__(self, columns: Mapping[str, Column], log: ToLog) -> None:
        self._columns = columns
        self._log = log
        self._parts: list[bytes] = []
        self._n_bytes = 0
        self._open: list[bytes] = []
        self._number = self._last = b""
        self._has_others = False
        self._held: dict[bool, tuple[dict[str, Any], bytes]] = {}
        self._n_objects = {True: 0, False: 0}

    def take(self, chunk: bytes) -> None:
        """Take the next bytes; OutputError at a line, or an object, of more than MAX_BYTES."""
        first, *others = chunk.split(b"\n")
        self._add(first)
        for part in others:
            self._end_line()
            self._add(part)

    def end(self) -> None:
        """Take what is left of a line."""
        if self._parts:
            self._end_line()
        if self._open and not self._take_object(b"\n".join(self._open)):
            self._take_apart(is_end=True)
        self._open = []
        self._log.end()

    def row(self, *, is_logged: bool = False) -> dict[str, Any]:
        """The row, which goes to the log as well if it `is_logged`; OutputError if there is none, or more than one."""
        self.end()
        fits = bool(self._n_objects[True])
        if self._n_objects[fits] == 1:
            found, text = self._held.pop(fits)
            self._pass_on_held()
            if is_logged:
                self._pass_on(text)
                self._log.end()
            return found
        if self._number and not self._has_others:
            return {name: json.loads(self._number) for name in self._columns}
        shown = ", ".join(f'"{each}": …' for each in self._columns)
        if n_objects := self._n_objects[fits]:
            which = "with these columns" if fits else "with other columns"
            raise OutputError(f"stdout has {n_objects:,} JSON objects {which}; expected one, {{{shown}}}")
        last = self._last[:80].decode(errors="replace").strip()
        seen = f"; its last line is {last!r}" if last else ""
        if _OF_PYTHON.match(self._last):
            seen += ", a dictionary as Python prints it: print json.dumps(…) of it"
        raise OutputError(f"stdout has no JSON object, such as {{{shown}}}{seen}")

    def tail(self) -> str:
        """The end of what was printed; all of it goes to the log."""
        self.end()
        self._pass_on_held()
        return self._log.tail()

    def headline(self, *, of_error: bool) -> str:
        """The line of it that tells most."""
        return self._log.headline(of_error=of_error)

    def _add(self, part: bytes) -> None:
        self._n_bytes += len(part)
        if self._n_bytes > MAX_BYTES:
            raise OutputError(f"stdout has more than {MAX_BYTES >> 20} MiB in a line or an object")
        if part:
            self._parts.append(part)

    def _end_line(self) -> None:
        line, self._parts = b"".join(self._parts), []
        if not self._open:
            self._open = self._take_line(line)
        else:
            self._open.append(line)
            n_lines = len(self._open)
            may_end = line.rstrip() == _indent(self._open[0]) + b"}"
            if may_end or n_lines & (n_lines - 1) == 0:  # seldom enough to cost no more than the lines themselves
                text = b"\n".join(self._open)
                if may_end and self._take_object(text):
                    self._open = []
                elif not _is_cut(text):
                    self._take_apart()
        if not self._open:
            self._n_bytes = 0

    def _take_line(self, line: bytes) -> list[bytes]:
        """Take a line; what it has of an object that further lines may end is not taken, and given back."""
        # Behind a byte order mark, or a bar that was written over.
        text = line.removeprefix(b"\xef\xbb\xbf").rstrip().rpartition(b"\r")[2]
        if not text.strip() or (_OPENS.match(text) and self._take_object(text)):
            return []
        if _OPENS.match(text) and _is_cut(text):
            return [text]
        self._take_other(line)
        return []

    def _take_apart(self, *, is_end: bool = False) -> None:
        """Take lines that are no object as a whole, until one that further lines may end: there are none at the end."""
        lines, self._open = self._open, []
        text = b"\n".join(lines).decode(errors="surrogateescape")
        at = done = 0
        for number, line in enumerate(lines):
            start, at = at, at + len(line.decode(errors="surrogateescape")) + 1
            if start < done or not self._take_line(line):
                continue
            found, is_cut = _object_at(text, text.index("{", start))
            if found and self._take_object(text[start:found].encode(errors="surrogateescape")):
                done = found
            elif is_cut and number and not is_end:
                self._open = lines[number:]
                self._n_bytes = sum(map(len, self._open))
                return
            else:
                self._take_other(line)

    def _take_other(self, line: bytes) -> None:
        """Pass on a line that is no object; a number may be the row, if it stays alone."""
        self._last = line.rstrip().rpartition(b"\r")[2]
        is_first = not self._has_others and not self._number
        if is_first and self._is_number(self._last):
            self._number = self._last
        else:
            self._has_others = True
            self._pass_on_number()
            self._pass_on(line)

    def _is_number(self, text: bytes) -> bool:
        [column, *others] = self._columns.values()
        if others or not isinstance(column, Array) or _NUMBER.match(text) is None:
            return False
        try:
            return isinstance(json.loads(text), int | float)
        except ValueError:
            return False

    def _take_object(self, text: bytes) -> bool:
        """Hold back what may be the row; False if it is no JSON object, or one of a list of several."""
        if self._last.endswith(b"},"):
            return False
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return False
        if not isinstance(found, dict):
            return False
        error = found.get("error")  # beside its epoch a number may be the error of a model
        fits = (isinstance(error, str) and error != "") or found.keys() - _BESIDE_COLUMNS == self._columns.keys()
        self._has_others = True
        self._n_objects[fits] += 1
        if fits in self._held or self._n_objects[fits] > 1:
            self._pass_on(text)
        else:
            self._held[fits] = found, text
        return True

    def _pass_on_held(self) -> None:
        self._pass_on_number()
        for _, text in self._held.values():
            self._pass_on(text)
        self._held = {}
        self._log.end()

    def _pass_on_number(self) -> None:
        if self._number:
            self._pass_on(self._number)
            self._number = b""

    def _pass_on(self, line: bytes) -> None:
        self._log.take(line + b"\n")


def _indent(line: bytes) -> bytes:
    return line[: len(line) - len(line.lstrip())]


def _object_at(text: str, start: int) -> tuple[int, bool]:
    """The end of the object that begins in a text, if it ends a line, or 0; and whether it is the text that ends."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as error:
        return 0, error.pos >= len(text)
    except RecursionError:
        return 0, False
    return (end if _LINE_ENDS.match(text, end) else 0), False


def _is_cut(text: bytes) -> bool:
    """Whether a text that is no JSON may be the first line of some: what is wrong with it is that it ends."""
    decoded = text.decode(errors="replace")
    try:
        json.loads(decoded)
    except json.JSONDecodeError as error:
        return error.pos >= len(decoded)
    except RecursionError:
        return False
    return False
