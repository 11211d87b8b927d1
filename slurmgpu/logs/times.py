"""Times at the beginning of log lines, in the formats of most loggers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

from slurmgpu.util.regular_files import open_file

BLOCK_BYTES = 1 << 16

_STAMP = rb"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(?: ?(Z|[+-]\d\d:?\d\d))?"
_DATED = re.compile(rb"(?:\[?|submitit [A-Z]{1,16} \()" + _STAMP)
"""A time at the beginning of a line, or in parentheses after Submitit's name and level."""
_BEGUN = re.compile(rb"\n" + _DATED.pattern)


class Clock:
    """Reads times of lines; an offset from UTC applies also to later lines without one."""

    def __init__(self, zone: float | None, earliest: float = 0.0, latest: float = float("inf")) -> None:
        self.zone, self._earliest, self._latest = zone, earliest, latest

    def read(self, raw: bytes) -> float | None:
        """The time at the beginning of a line, in seconds since the epoch."""
        match = _DATED.match(raw)
        return None if match is None else self._told(match)

    def read_all(self, block: bytes) -> Iterator[tuple[int, float]]:
        """Positions and times of the dated lines after each newline in a block."""
        for match in _BEGUN.finditer(block):
            if (told := self._told(match)) is not None:
                yield match.start() + 1, told

    def _told(self, match: re.Match[bytes]) -> float | None:
        *numbers, fraction, offset = match.groups()
        try:
            year, month, day, hour, minute, second = map(int, numbers)
            naive = datetime(year, month, day, hour, minute, second, int((fraction or b"0").ljust(6, b"0")))
            seconds = self.zone if offset is None else _seconds(offset)
            zone = None if seconds is None else timezone(timedelta(seconds=seconds))
            told = naive.replace(tzinfo=zone).timestamp()
        except (ValueError, OverflowError):
            return None  # such as the 31st of February
        if not self._earliest <= told <= self._latest:
            return None
        self.zone = seconds
        return told


def _seconds(offset: bytes) -> float:
    if offset == b"Z":
        return 0.0
    return (-1 if offset[:1] == b"-" else 1) * (int(offset[1:3]) * 3600.0 + int(offset[-2:]) * 60.0)


def zone_of(path: Path) -> float | None:
    """The offset from UTC in seconds in a file's first lines; None without one."""
    clock = Clock(None)
    try:
        with open_file(path) as file:
            for _ in clock.read_all(b"\n" + file.read(BLOCK_BYTES)):
                if clock.zone is not None:
                    break
    except OSError:
        pass
    return clock.zone
