"""A finding: a function that returns figures, or raises `NotHeld` or `NotMeasured`."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

HELD, NOT_HELD, NOT_MEASURED = "held", "did not hold", "not measured"

LOG_LINES = 60

P = ParamSpec("P")
T = TypeVar("T")


class NotHeld(Exception):  # noqa: N818 - a result of a measurement
    """The claim does not hold; the message has the figures, `details` are printed below it."""

    def __init__(self, figures: str, details: str = "") -> None:
        super().__init__(figures)
        self.details = details


class NotMeasured(Exception):  # noqa: N818 - a result of a measurement
    """The finding cannot be measured here; the message says what is missing."""


@dataclass(frozen=True)
class Machine:
    """Where a part computes: PyTorch's `device`, the number of GPUs, and a `folder` of its own, which starts empty."""

    device: str
    n_gpus: int
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return self.n_gpus > 0

    def pick(self, gpu: T, cpu: T) -> T:
        """A size for a GPU, or the toy size."""
        return gpu if self.on_gpu else cpu

    def needs_gpu(self) -> None:
        """Raise NotMeasured without a GPU."""
        if not self.on_gpu:
            raise NotMeasured("there is no GPU")

    def needs_compiler(self) -> None:
        """Raise NotMeasured on a GPU without a C compiler or Python.h: Triton builds its launchers with them."""
        if self.on_gpu and not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))):
            raise NotMeasured("there is no C compiler, which Triton needs to build its launchers")
        if self.on_gpu and not Path(header := f"{sysconfig.get_path('include')}/Python.h").exists():
            raise NotMeasured(f"there is no {header}, which Triton needs to build its launchers")

    def hold_with_cores(self, holds: bool, figures: str, n_cores: int) -> str:
        """The figures; NotHeld if it does not hold, NotMeasured if the host has fewer cores than it needs."""
        n_here = len(os.sched_getaffinity(0))
        if self.on_gpu and not holds and n_here < n_cores:
            raise NotMeasured(f"{figures}; it needs {n_cores} cores, and has {n_here}")
        return hold(holds, figures)


@dataclass(frozen=True)
class Finding:
    """A function and the seconds that it may take; `claim` is the first line of its docstring."""

    function: Callable[[Machine], str]
    limit_s: float

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def claim(self) -> str:
        """What must hold."""
        return (self.function.__doc__ or "").strip().splitlines()[0].rstrip(".")


def finding(limit_s: float = 30.0) -> Callable[[Callable[[Machine], str]], Finding]:
    """Decorator: make a function a finding; findings run in the order of their module."""
    return lambda function: Finding(function, limit_s)


def findings_of(module: ModuleType) -> list[Finding]:
    """The findings of a part, in order."""
    return [each for each in vars(module).values() if isinstance(each, Finding)]


def shared(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: what several findings need, computed once; if that fails, each of them fails with the same error."""
    found: dict[Any, T | Exception] = {}

    @functools.wraps(function)
    def once(*args: P.args, **kwargs: P.kwargs) -> T:
        key = args, *sorted(kwargs.items())
        if key not in found:
            try:
                found[key] = function(*args, **kwargs)
            except Exception as error:
                found[key] = error
        value = found[key]
        if isinstance(value, Exception):
            raise value
        return value

    return once


def hold(holds: bool, figures: str, details: str = "") -> str:
    """The figures; NotHeld with them if it does not hold."""
    if not holds:
        raise NotHeld(figures, details)
    return figures


def logs_of(*runs: Path) -> str:
    """The last lines of each log of some run directories."""
    found = []
    for path in sorted(log for run in runs for log in run.glob("logs/*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        found += [f"{path.parent.parent.name}/{path.name}:", *lines]
    return "\n".join(found)


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Wall seconds of `work`, including the kernels that it launched."""
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def best_of(n_rounds: int, work: Callable[[], object], device: str) -> float:
    """The fewest seconds of several rounds, after a warm-up round."""
    work()
    return min(seconds_of(work, device) for _ in range(n_rounds))


def bandwidth(machine: Machine) -> float:
    """Bytes per second of a copy on the device, read plus written."""
    import torch

    source = torch.empty(machine.pick(2 << 30, 1 << 20), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return float(2 * source.nbytes) / best_of(5, lambda: target.copy_(source), machine.device)
