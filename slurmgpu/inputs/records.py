"""Find the starts of records in the bytes of a line-based file."""

from __future__ import annotations

from itertools import pairwise
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import SlurmGPUError

NEWLINE, QUOTE = ord("\n"), ord('"')

MAX_RECORD_BYTES = 1 << 28
"""Longer records are refused: they are usually errors, and a batch of them may not fit in memory."""

# RFC 4180: a quote opens a field at its start; a quote after a quote is the second half of an escaped one.
_MAY_PRECEDE_QUOTE = np.zeros(256, dtype=bool)
_MAY_PRECEDE_QUOTE[[ord(","), NEWLINE, QUOTE]] = True


def split(data: bytes, *, quoting: bool) -> list[bytes]:
    """The records in `data`, which begins with one; with `quoting`, newlines in quotes do not end a record."""
    if not (quoting and b'"' in data):
        return data.split(b"\n")
    block = np.frombuffer(data, np.uint8)
    ends = _outside_quotes(np.flatnonzero(block == NEWLINE), np.flatnonzero(block == QUOTE), 0)
    bounds = [-1, *ends.tolist(), len(data)]
    return [data[before + 1 : end] for before, end in pairwise(bounds)]


def _outside_quotes(newlines: NDArray[np.intp], quotes: NDArray[np.intp], n_before: int) -> NDArray[np.intp]:
    """The newlines after an even number of quotes, with `n_before` quotes in earlier blocks."""
    outside: NDArray[np.bool_] = (np.searchsorted(quotes, newlines) + n_before) % 2 == 0
    return newlines[outside]


class RecordFinder:
    """Finds the starts of records in a file that is given block by block, beginning with the first record.

    `last_start` and `last_line` are the byte offset and the line, from 1, of the last record. `end` may be set as late
    as before the last block.
    """

    def __init__(self, path: str, begin: int, end: int, *, line: int, quoting: bool) -> None:
        self.path = path
        self.last_start = begin
        self.last_line = line
        self._position = begin  # of the next block
        self.end = end
        self._quoting = quoting
        self._n_newlines = line - 1  # before the next block
        self._n_quotes = 0
        self._last_byte = NEWLINE

    def starts(self, block: NDArray[np.uint8]) -> NDArray[np.intp]:
        """The offsets of records that start after a newline in `block`, the next one of the file."""
        newlines = np.flatnonzero(block == NEWLINE)
        ends = self._find_ends(block, newlines) if self._quoting else newlines
        starts = ends + (self._position + 1)
        starts = starts[: np.searchsorted(starts, self.end)]  # nothing starts after the last newline
        self._check_length(int(starts[0]) - 1 if len(starts) else self._position + len(block))
        if len(starts):
            self.last_start = int(starts[-1])
            self.last_line = self._n_newlines + int(np.searchsorted(newlines, ends[len(starts) - 1])) + 2
        self._position += len(block)
        self._n_newlines += len(newlines)
        return starts

    def finish(self) -> None:
        """SlurmGPUError if the file ends inside quotes."""
        if self._n_quotes % 2:
            self._refuse(self.last_line, "a quote that is opened in this record and never closed")

    def _find_ends(self, block: NDArray[np.uint8], newlines: NDArray[np.intp]) -> NDArray[np.intp]:
        quotes = np.flatnonzero(block == QUOTE)
        ends = _outside_quotes(newlines, quotes, self._n_quotes)
        # All quotes are checked, not a sample: after a stray one, text inside and outside of quotes is swapped.
        openers = quotes[self._n_quotes % 2 :: 2]
        before = block[openers - 1]
        if len(openers) and openers[0] == 0:
            before[0] = self._last_byte
        stray = ~_MAY_PRECEDE_QUOTE[before]
        if stray.any():
            line = self._n_newlines + int(np.searchsorted(newlines, openers[stray.argmax()])) + 1
            self._refuse(line, "a quote in a field that does not begin with one")
        self._n_quotes += len(quotes)
        self._last_byte = int(block[-1])
        return ends

    def _check_length(self, end: int) -> None:
        if end - self.last_start > MAX_RECORD_BYTES:
            self._refuse(self.last_line, f"a record of more than {MAX_RECORD_BYTES >> 20} MiB that starts here")

    def _refuse(self, line: int, found: str) -> NoReturn:
        expected = (
            "CSV as in RFC 4180, where a field with a quote in it is quoted as a whole and its quotes are doubled"
            if self._quoting
            else "one record on each line"
        )
        raise SlurmGPUError(
            f"{self.path}, line {line}: expected {expected}; found: {found}. Correct it and plan again."
        )
