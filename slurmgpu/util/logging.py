"""slurmgpu's log format on nodes: lines that begin with a time and its offset from UTC."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import TextIO

OWN = "slurmgpu"
"""The parent of all of slurmgpu's loggers."""


class LogFormatter(logging.Formatter):
    """Lines that begin with a time in ISO 8601, with milliseconds and the offset from UTC, which differs in images."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        """The time of a line."""
        date, offset = _second(int(record.created), time.tzname)
        return f"{date}.{int(record.msecs):03d}{offset}"


@functools.lru_cache(maxsize=1)
def _second(seconds: int, _: tuple[str, str]) -> tuple[str, str]:
    """A whole second's date and time in a time zone, which is the process's, and its offset from UTC."""
    text = datetime.fromtimestamp(seconds, timezone.utc).astimezone().isoformat()
    return text[:19], text[19:]


def mark_of(first: int, last: int) -> str:
    """The prefix of a line that a program has printed while it computed these items."""
    return f"item {first} | " if first == last else f"items {first}..{last} | "


def log_to_stderr(*, force: bool = False) -> None:
    """Log to standard error in this format; with `force`, existing handlers are removed."""
    logging.basicConfig(level=logging.INFO, handlers=[_handler(sys.stderr)], force=force)


def log_own_lines() -> None:
    """Log slurmgpu's lines in this format, whatever a workload does to the root logger."""
    own = logging.getLogger(OWN)
    stream = open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - as long as the process
    own.addHandler(_handler(stream))  # not sys.stderr, which a workload may close
    own.setLevel(logging.INFO)
    own.propagate = False


def enable_own_loggers() -> None:
    """Enable slurmgpu's loggers again: `logging.config` disables all existing loggers."""
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == OWN]:
        logging.getLogger(name).disabled = False


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """Let another library's logger of this name log errors alone while the block lasts."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _handler(stream: TextIO) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter())
    return handler
