"""Files of JSON objects in a list, which are read as JSON lines."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.compression import decompressing
from slurmgpu.inputs.formats import CHUNK_BYTES
from slurmgpu.inputs.lines import BOM, Jsonl, refused
from slurmgpu.inputs.records import MAX_RECORD_BYTES
from slurmgpu.util.amounts import some_of

_DECODER = json.JSONDecoder(parse_int=str)  # int raises for 4300 digits, which are one item's error
_BLANKS = re.compile(r"[ \t\r\n]*")
_KINDS = {'"': "a string", "[": "an array", **dict.fromkeys("tf", "a boolean"), "n": "null"}
_KINDS |= dict.fromkeys("-0123456789", "a number")
_OF_UTF16 = "\xff\xfe"
_BATCH_CHARS = 1 << 16
_CUT = re.compile(r"\\?[\w.+-]*\s*")
"""What follows the place of an error if the file ends there, or within a word, a number or an escape."""


class Json(Jsonl, format="json"):
    """A list of JSON objects, or objects one after another."""

    is_repacked = True
    grows = False
    unit = "element"

    @contextlib.contextmanager
    def lines_in(self, file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
        """The objects as lines; SlurmGPUError, also from within the block, if the file has anything else."""
        with decompressing(file, path) as stream:
            yield cast(BinaryIO, io.BufferedReader(_Joined(_Objects(stream, path).lines()), CHUNK_BYTES))


class _Joined(io.RawIOBase):
    """Pieces of text as one file."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = memoryview(next(self._pieces, "").encode("latin-1"))
        n_bytes = min(len(buffer), len(self._left))
        buffer[:n_bytes] = self._left[:n_bytes]
        self._left = self._left[n_bytes:]
        return n_bytes


class _Objects:
    """Finds the JSON objects of a stream.

    A character of its text is a byte, so that an object's text is kept as it is: JSON's syntax is all ASCII, and the
    line that an object becomes is decoded when it is parsed.
    """

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream, self._path = stream, path
        self._text = ""  # from the element that is looked at
        self._at = self._n_found = 0
        self._n_newlines = self._n_bytes = 0  # before it

    def lines(self) -> Iterator[str]:
        """The objects, several at once, each in a line."""
        head = self._stream.read(len(BOM))
        self._text, self._n_bytes = ("", len(head)) if head == BOM else (head.decode("latin-1"), 0)
        is_list = self._next() == "["
        self._at += is_list
        batch, n_chars = list[str](), 0
        line = ""
        while (mark := self._next()) != ("]" if is_list else ""):
            if is_list and self._n_found:
                if mark != ",":
                    self._refuse("a comma or the end of the list", mark)
                self._at += 1
                mark = self._next()
            if mark != "{":
                self._refuse("a JSON object", mark)
            line = self._object()
            batch.append(line)
            self._n_found += 1
            if (n_chars := n_chars + len(line)) > _BATCH_CHARS:
                yield "".join(batch)
                batch, n_chars = [], 0
        if is_list:
            self._at += 1
            if mark := self._next():
                self._refuse("nothing after the list", mark)
            if not self._n_found:
                raise SlurmGPUError(f"Input {self._path} is an empty list; expected at least one object.")
        elif self._n_found == 1:
            raise _of_one_object(self._path, line)
        yield "".join(batch)

    def _object(self) -> str:
        """The object here, as a line."""
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                if not self._read():
                    self._refuse_syntax(error)
            except RecursionError as error:
                raise SlurmGPUError(
                    f"{self._place()}: expected JSON, found {error}. Correct it and plan again."
                ) from error
        parts = self._text[self._at : end].split("\n")  # no string of JSON has a line break
        self._at = end
        return "".join([part.strip(" \t\r") for part in parts]) + "\n"

    def _next(self) -> str:
        """The next character that is not blank, which stays; empty at the end of the file."""
        while True:
            found = _BLANKS.match(self._text, self._at)
            assert found
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def _read(self) -> bool:
        """Forget what has been looked at, and read on: twice as much each time, within a long object."""
        n_left = len(self._text) - self._at
        if n_left > MAX_RECORD_BYTES:
            raise SlurmGPUError(
                f"{self._place()}: expected a list of objects; found one of more than {MAX_RECORD_BYTES >> 20} MiB. "
                f"Correct it and plan again."
            )
        block = self._stream.read(max(n_left, CHUNK_BYTES))
        if not block:
            return False
        self._n_newlines += self._text.count("\n", 0, self._at)
        self._n_bytes += self._at
        self._text, self._at = self._text[self._at :] + block.decode("latin-1"), 0
        return True

    def _place(self, at: int | None = None) -> str:
        """The file, the element and the line of a character, by default of the next one."""
        line = 1 + self._n_newlines + self._text.count("\n", 0, self._at if at is None else at)
        return f"{self._path}, element {self._n_found + 1} (line {line})"

    def _refuse(self, expected: str, mark: str) -> NoReturn:
        if not mark:
            raise SlurmGPUError(_cut(self._place(), "the list"))
        if mark in _OF_UTF16:
            raise refused(f"{self._place()}: expected UTF-8, found 0x{ord(mark):02x}")
        found = _KINDS.get(mark) or (repr(mark) if mark < "\x80" else f"0x{ord(mark):02x}")
        advice = "Write each element as an object" if expected == "a JSON object" and mark in _KINDS else "Correct it"
        raise SlurmGPUError(f"{self._place()}: expected {expected}, found {found}. {advice} and plan again.")

    def _refuse_syntax(self, error: json.JSONDecodeError) -> NoReturn:
        place = self._place(error.pos)
        if error.msg.startswith("Unterminated") or _CUT.fullmatch(self._text, error.pos):
            raise SlurmGPUError(_cut(place, "an object")) from error
        raise SlurmGPUError(
            f"{place}: expected a JSON object, found text that is not JSON ({error.msg} at byte "
            f"{self._n_bytes + error.pos + 1}). Correct it and plan again."
        ) from error


def _cut(place: str, what: str) -> str:
    return f"{place}: the file ends within {what}. If a copy or download was interrupted, repeat it."


def _of_one_object(path: Path, line: str) -> SlurmGPUError:
    """The error for a file that is one object, with a command for the list in it."""
    value, _ = _DECODER.raw_decode(line.encode("latin-1").decode(errors="replace"))
    names = [name for name, inner in value.items() if _has_objects(inner)]
    advice = "Write its items as a list. "
    if names:
        wanted = shlex.quote(f".[{json.dumps(names[0])}][]")
        what = "lists of objects" if len(names) > 1 else "a list of objects"
        advice = (
            f"It has {what} in {some_of(map(repr, names), 3)}: jq -c {wanted} {shlex.quote(str(path))} > items.jsonl. "
        )
    return SlurmGPUError(
        f"Input {path} is one object; expected a list of objects. {advice}If it is one line of JSON lines, name it "
        f".jsonl; if each file is an item, write 'files:' before the path or the pattern."
    )


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
