"""Lines of log files with their times, merged over files. Files may be of any size and are never read whole."""

from __future__ import annotations

import heapq
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from slurmgpu.logs.files import LogFile
from slurmgpu.logs.places import DAY_S, raw_lines
from slurmgpu.logs.times import BLOCK_BYTES, Clock, zone_of
from slurmgpu.util.ansi import ESCAPES
from slurmgpu.util.regular_files import open_file

log = logging.getLogger(__name__)

NEAR_BYTES = (BLOCK_BYTES, 1 << 20)
"""An undated line has the time of the last dated line before it, searched within these distances."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class Line(NamedTuple):
    """A line and its time since the epoch: its own if it `is_dated`, else that of the previous dated line.

    `text` has no control characters except for colours; `offset` and `end` are its range of bytes in the file.
    """

    time: float
    text: str
    file: LogFile
    offset: int
    end: int
    is_dated: bool


def merged(
    files: Iterable[LogFile],
    *,
    since: float = 0.0,
    starts: Mapping[Path, int] | None = None,
    stops: Mapping[Path, int] | None = None,
) -> Iterator[Line]:
    """The lines of several files ordered by time, read lazily.

    `starts` and `stops` are ranges of bytes. `since` is the start of their writer: times more than a day earlier are
    taken for text.
    """
    files, starts, stops = list(files), starts or {}, stops or {}
    zones = {file: zone_of(file.path) for file in files}
    # Submitit's own lines lack the zone; those of the task beside them have it.
    usual = next((zone for file, zone in zones.items() if zone is not None and not file.is_worker), None)
    readers = []
    for file, zone in zones.items():
        zone = usual if zone is None and not file.is_worker else zone
        start, stop = starts.get(file.path, 0), stops.get(file.path)
        readers.append(read_lines(file, start, stop, since=since, zone=zone))
    return heapq.merge(*readers, key=lambda line: line.time)


def read_lines(
    file: LogFile, start: int = 0, stop: int | None = None, *, since: float = 0.0, zone: float | None = None
) -> Iterator[Line]:
    """The lines of a file from `start`, the beginning of a line, to `stop`; none if it cannot be read.

    `zone` is the offset from UTC in seconds for times without one; None for that of this process.
    """
    try:
        with open_file(file.path) as stream:
            latest = os.fstat(stream.fileno()).st_mtime + DAY_S
            clock = Clock(zone, since - DAY_S, latest)
            time = since
            if start:
                time = _time_before(stream, start, clock) or since
            is_new = True
            for offset, raw in raw_lines(stream, start, stop):
                told = clock.read(raw) if is_new else None
                time = time if told is None else told
                yield Line(time, text_of(raw), file, offset, offset + len(raw), told is not None)
                is_new = raw.endswith(b"\n")
    except OSError as error:
        log.debug("%s cannot be read: %s", file.path, error)


def _time_before(stream: BinaryIO, offset: int, clock: Clock) -> float | None:
    """The time of the last dated line not far before an offset, if there is one."""
    for size in NEAR_BYTES:
        begin = max(0, offset - size)
        stream.seek(begin)
        head = b"" if begin else b"\n"
        told = [time for _, time in clock.read_all(head + stream.read(offset - begin))]
        if told or not begin:
            break
    return told[-1] if told else None


def text_of(raw: bytes) -> str:
    """A line as a terminal finally shows it: without overwritten text, and with no control characters but colours."""
    text = raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
    if not _CONTROL.search(text):
        return text
    text = ESCAPES.sub(lambda match: match[0] if _COLOUR.fullmatch(match[0]) else "", text)
    parts = re.split(f"({_COLOUR.pattern})", text)
    return "".join(part if number % 2 else _CONTROL.sub("", part) for number, part in enumerate(parts))


def without_colours(text: str) -> str:
    """A line's text without colours."""
    return _COLOUR.sub("", text)
