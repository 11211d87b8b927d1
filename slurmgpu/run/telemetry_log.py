"""Read the samples in telemetry/, line by line, without damaged ones."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from slurmgpu.util.regular_files import open_file

log = logging.getLogger(__name__)

TAIL_BYTES = 16384
"""How much of a file's end is read for its last sample."""
LINE_BYTES = 256
"""If the wanted samples are further apart than this, they are read one by one instead of the whole file."""


class _Xids(TypedDict, total=False):
    xids: list[int]


class SampleLine(_Xids):
    """A line of a file: `gpus` and `host` have the values that the head line names, `xids` the driver's errors."""

    time: float
    ready: bool
    gpus: list[list[Any]]
    host: list[Any] | None


class HeadLine(TypedDict):
    """The first line, and one for each change of the GPUs."""

    format: str
    version: int
    sample_s: float
    driver: str | None
    gpus: list[dict[str, str | None]]
    gpu_values: Sequence[str]
    host_values: Sequence[str]


@dataclass(frozen=True)
class Sample:
    """One moment of an attempt, over its GPUs; None is unknown.

    `time` is in seconds since the epoch by the node's clock, `utilisation` the mean in percent, `memory_bytes` the
    largest of the GPUs', `temperature_c` that of the hottest; `power_w` and `energy_j` are sums.
    """

    time: float
    ready: bool
    utilisation: float | None
    memory_bytes: int | None
    temperature_c: int | None
    power_w: float | None
    energy_j: float | None
    rss_bytes: int | None


def telemetry_path(folder: Path, attempt: str, node: int = 0) -> Path:
    """The path of an attempt's samples in a run directory; `node` is the rank of the node."""
    return folder / "telemetry" / f"{attempt}{f'.node{node}' if node else ''}.jsonl"


def last_sample(path: Path) -> Sample | None:
    """The last sample of a file, of which only the end is read; None if there is none."""
    try:
        with open_file(path) as file:
            header = file.readline(TAIL_BYTES)
            file.seek(max(len(header), file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return next(iter(deque(_samples([header, *file], []), maxlen=1)), None)
    except OSError as error:
        log.debug("%s cannot be read: %s", path, error)
        return None


def some_samples(path: Path, n_samples: int, damaged: set[Path]) -> list[Sample]:
    """About `n_samples` samples of a file, spread evenly over it; all of them if it has few.

    A file with a damaged line is added to `damaged`.
    """
    unreadable: list[bytes] = []
    try:
        with open_file(path) as file:
            header = file.readline(TAIL_BYTES)
            size = os.fstat(file.fileno()).st_size
            step = (size - len(header)) / max(1, n_samples)
            if step <= LINE_BYTES:
                return list(_samples([header, *file], unreadable))
            places = (len(header) + int(number * step) for number in range(n_samples))
            return list(_samples([header, *(_line_after(file.fileno(), place) for place in places)], unreadable))
    except FileNotFoundError:  # nothing was sampled
        return []
    except OSError as error:
        log.debug("%s cannot be read: %s", path, error)
        unreadable.append(b"")
        return []
    finally:
        if unreadable:
            damaged.add(path)


def energy_of(path: Path) -> float | None:
    """The joules of a file's GPUs from its first sample to its last, after the last change of GPUs; None if unknown."""
    try:
        with open_file(path) as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        log.debug("%s cannot be read: %s", path, error)
        return None
    begin = max((number for number, line in enumerate(lines) if b'"gpu_values"' in line), default=0)
    ends = [_energies(lines[begin], order) for order in (lines[begin + 1 :], lines[:begin:-1])]
    grown = [last - first for first, last in zip(*ends, strict=False) if first is not None and last is not None]
    return sum(grown) if grown else None


def _energies(header: bytes, lines: Iterable[bytes]) -> list[float | None]:
    """The joules of each GPU in the first of the lines that is a sample; [] without one."""
    for line in lines:
        try:
            place = json.loads(header)["gpu_values"].index("energy_j")
            return [None if gpu[place] is None else float(gpu[place]) for gpu in json.loads(line)["gpus"]]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
            continue
    return []


def _line_after(file: int, place: int) -> bytes:
    """The first line that begins after a place of a file."""
    for n_bytes in (4 * LINE_BYTES, TAIL_BYTES):
        lines = os.pread(file, n_bytes, place - 1).split(b"\n", 2)
        if len(lines) == 3:
            return lines[1] + b"\n"
    return b""


def _samples(lines: Iterable[bytes], unreadable: list[bytes]) -> Iterator[Sample]:
    """The samples in lines; damaged lines are added to `unreadable`, except one that is still being written."""
    names: tuple[list[str], list[str]] = ([], [])
    for line in lines:
        try:
            value = json.loads(line)
            if "gpu_values" in value:
                names = (list(value["gpu_values"]), list(value["host_values"]))
                continue
            yield _sample(value, *names)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            if line.endswith(b"\n"):
                unreadable.append(line)


def _sample(value: SampleLine, gpu_names: list[str], host_names: list[str]) -> Sample:
    gpus = [dict(zip(gpu_names, numbers, strict=False)) for numbers in value["gpus"]]
    host = dict(zip(host_names, value["host"] or (), strict=False))
    utilisations, powers, energies = (_known(gpus, name) for name in ("utilisation", "power_w", "energy_j"))
    return Sample(
        time=float(value["time"]),
        ready=bool(value["ready"]),
        utilisation=sum(utilisations) / len(utilisations) if utilisations else None,
        memory_bytes=max(_known(gpus, "memory_used_bytes"), default=None),
        temperature_c=max(_known(gpus, "temperature_c"), default=None),
        power_w=sum(powers) if powers else None,
        energy_j=sum(energies) if energies else None,
        rss_bytes=host.get("rss_bytes"),
    )


def _known(gpus: list[dict[str, Any]], name: str) -> list[Any]:
    values = [gpu.get(name) for gpu in gpus]
    return [value + 0 for value in values if value is not None]  # a text among them is a TypeError
