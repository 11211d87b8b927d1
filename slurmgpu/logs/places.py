"""Positions in log files of any size: by line number, by time, and by content."""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from slurmgpu.logs.times import BLOCK_BYTES, Clock, zone_of
from slurmgpu.util.regular_files import open_file

LINE_BYTES = 1 << 16
"""Longer lines are cut: a progress bar may write megabytes without a newline."""
TAIL_BYTES = 1 << 22
"""The longest tail of a file, however few lines that is."""
SEARCH_BYTES = 1 << 20
"""The block size for searches by content."""
MATCH_BYTES = 64
"""Bytes read beyond it, for a match that begins at its end."""
FIRST_BYTES, PROBE_BYTES = 1 << 13, 1 << 17
"""The first and the later block sizes when searching for a dated line."""
STAMP_BYTES = 200
"""Bytes read beyond a block, for a time that begins at its end."""
HOLE_BYTES = 1 << 25
"""The ends of a longer stretch without times are found by probing."""
MAX_HOLES = 8
"""With more such undated stretches, positions by time are approximate."""
DAY_S = 86_400.0
MAX_COUNTED = 64

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))
_counted: dict[Path, tuple[int, list[tuple[int, int]]]] = {}


@contextlib.contextmanager
def search_until(deadline: float) -> Iterator[None]:
    """Make searches of large files give up at this time of time.monotonic()."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def _is_late() -> bool:
    return time.monotonic() > _deadline.get()


# By the number of lines


def tail_start(path: Path, n_lines: int, stop: int | None = None) -> int:
    """The offset of the last `n_lines` lines of a file, or of its part before `stop`; reads only the end."""
    with contextlib.suppress(OSError), open_file(path) as file:
        end = file.seek(0, os.SEEK_END)
        begin = end = end if stop is None else min(stop, end)
        left = n_lines + 1  # the last line's own end is one more
        while begin > 0 and end - begin < TAIL_BYTES:
            size = min(BLOCK_BYTES, begin)
            file.seek(begin - size)
            block = file.read(size)
            if begin == end and not block.endswith(b"\n"):
                left -= 1
            n_ends = block.count(b"\n")
            if n_ends >= left:
                at = len(block)
                for _ in range(left):
                    at = block.rindex(b"\n", 0, at)
                return begin - size + at + 1
            left -= n_ends
            begin -= size
        return begin
    return 0


def last_end(path: Path, stop: int | None = None) -> int:
    """The end of the last complete line of a file, or of its part before `stop`; 0 if it cannot be read.

    A line longer than LINE_BYTES counts as complete.
    """
    with contextlib.suppress(OSError), open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        size = size if stop is None else min(stop, size)
        begin = max(0, size - LINE_BYTES)
        file.seek(begin)
        found = file.read(size - begin).rfind(b"\n")
        return begin + found + 1 if found >= 0 else (size if begin else 0)
    return 0


def line_number(path: Path, offset: int) -> int:
    """The number of the line that begins at an offset, from 1; 0 if time was up. Counts are cached: files only grow."""
    with contextlib.suppress(OSError), open_file(path) as file:
        inode, known = _counted.get(path, (0, []))
        about = os.fstat(file.fileno())
        if inode != about.st_ino or known[-1][0] > about.st_size:
            if len(_counted) >= MAX_COUNTED:
                _counted.clear()
            known = [(0, 1)]
            _counted[path] = (about.st_ino, known)
        place = bisect.bisect_right(known, (offset, float("inf"))) - 1
        at, number = known[place]
        file.seek(at)
        while at < offset and (block := file.read(min(SEARCH_BYTES, offset - at))):
            if _is_late():
                return 0
            number, at = number + block.count(b"\n"), at + len(block)
        if at != known[place][0]:
            known.insert(place + 1, (at, number))
        return number
    return 0


# By time


def time_start(path: Path, when: float, *, since: float = 0.0, start: int = 0) -> int:
    """The offset of the first line from the time `when` on, not before `start`; the file's size if there is none.

    Uses bisection, also around long stretches without times. `since` is the start of the writer: times more than a day
    earlier are taken for text.
    """
    clock = Clock(zone_of(path), since - DAY_S)
    with contextlib.suppress(OSError), open_file(path) as file:
        end = file.seek(0, os.SEEK_END)
        return _time_start(file, when, clock, min(start, end), end)
    return 0


def _time_start(file: BinaryIO, when: float, clock: Clock, low: int, end: int) -> int:
    # Invariant: the line begins between `low` and `high`, or at `answer`.
    high = answer = end
    n_holes = 0
    while high - low > BLOCK_BYTES:
        middle = before = (low + high) // 2
        found = _first_dated(file, middle, high, clock, max_bytes=HOLE_BYTES)
        if found is None and high - middle > HOLE_BYTES:
            n_holes += 1
            if n_holes > MAX_HOLES:
                break
            found = _behind_hole(file, middle, high, clock)
            before = middle if found is not None and found[1] < when else _before_hole(file, low, middle, clock)
        if found is not None and found[1] < when:
            low = found[0]
        else:
            high, answer = before, answer if found is None else found[0]
    first = _first_dated(file, low, high, clock, when, max_bytes=HOLE_BYTES)
    return answer if first is None else first[0]


def _behind_hole(file: BinaryIO, start: int, high: int, clock: Clock) -> tuple[int, float] | None:
    """Offset and time of the first dated line after an undated stretch, found in growing steps."""
    found, step = None, PROBE_BYTES
    while high - start > BLOCK_BYTES:
        place = start + step if found is None and start + step < high else (start + high) // 2
        probed = _first_dated(file, place, high, clock)
        if probed is None:
            start, step = place, 2 * step
        else:
            high, found = place, probed
    return found


def _before_hole(file: BinaryIO, low: int, stop: int, clock: Clock) -> int:
    """The beginning of the undated stretch around `stop`, found in growing steps."""
    is_found, step = False, PROBE_BYTES
    while stop - low > BLOCK_BYTES:
        place = stop - step if not is_found and stop - step > low else (low + stop) // 2
        probed = _first_dated(file, place, stop, clock)
        if probed is None:
            stop, step = place, 2 * step
        else:
            low, is_found = probed[0], True
    return stop


def _first_dated(
    file: BinaryIO, start: int, stop: int, clock: Clock, when: float = 0.0, *, max_bytes: int = PROBE_BYTES
) -> tuple[int, float] | None:
    """Offset and time of the first dated line from `when` on that begins not far after `start`."""
    begin, head = (start - 1, b"") if start else (0, b"\n")
    size = FIRST_BYTES
    while begin < min(stop, start + max_bytes) and not _is_late():
        file.seek(begin)
        block = head + file.read(size + STAMP_BYTES)
        begin -= len(head)
        for place, told in clock.read_all(block):
            if begin + place >= stop or place > size:
                break
            if told >= when:
                return begin + place, told
        begin, head, size = begin + size, b"", PROBE_BYTES
    return None


# By what is written


def places_of(path: Path, words: bytes, start: int, stop: int, *, backwards: bool = False) -> Iterator[int]:
    """The positions of some bytes in a part of a file, forwards or backwards, until time is up."""
    more = len(words) - 1
    with contextlib.suppress(OSError), open_file(path) as file:
        begins = range(start, stop, SEARCH_BYTES)
        for begin in reversed(begins) if backwards else begins:
            if _is_late():
                return
            file.seek(begin)
            block = file.read(min(SEARCH_BYTES + more, stop - begin))
            at = block.rfind(words) if backwards else block.find(words)
            while at >= 0:
                yield begin + at
                at = block.rfind(words, 0, at + more) if backwards else block.find(words, at + 1)


def matches_of(path: Path, pattern: re.Pattern[bytes], start: int, stop: int) -> Iterator[tuple[int, re.Match[bytes]]]:
    """The matches of a pattern, each of at most MATCH_BYTES, in a part of a file, and where they begin."""
    with contextlib.suppress(OSError), open_file(path) as file:
        for begin in range(start, stop, SEARCH_BYTES):
            if _is_late():
                return
            file.seek(begin)
            for match in pattern.finditer(file.read(min(SEARCH_BYTES + MATCH_BYTES, stop - begin))):
                if match.start() < SEARCH_BYTES:
                    yield begin + match.start(), match


def raw_lines(stream: BinaryIO, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their offsets, from `start` to `stop`; long ones in pieces of LINE_BYTES.

    After a piece of zeros it continues at the file's next data: a file that was extended by accident would be read for
    hours.
    """
    stream.seek(start)
    while (stop is None or start < stop) and (raw := stream.readline(LINE_BYTES)):
        yield start, raw
        start += len(raw)
        if len(raw) == LINE_BYTES and not raw.strip(b"\0"):
            start = _seek_data(stream, start)


def _seek_data(stream: BinaryIO, offset: int) -> int:
    """Move to the file's next data, or to its end; returns the new position."""
    try:
        # By the stream: after os.lseek it would read what its buffer holds once more.
        return stream.seek(offset, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: no more data; else the file system does not support SEEK_DATA.
        return stream.seek(0, os.SEEK_END) if error.errno == errno.ENXIO else offset


def line_around(path: Path, offset: int) -> tuple[int, bytes]:
    """The line around an offset and its beginning; only a part of a long or overwritten line."""
    with contextlib.suppress(OSError), open_file(path) as file:
        begin = max(0, offset - LINE_BYTES)
        file.seek(begin)
        before = file.read(offset - begin)
        at = max(before.rfind(b"\n"), before.rfind(b"\r")) + 1
        begin = begin + at if at or not begin else offset
        file.seek(begin)
        return begin, file.readline(LINE_BYTES)
    return offset, b""
