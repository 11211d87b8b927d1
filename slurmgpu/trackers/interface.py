"""The interface of a tracker: three methods, called by one process for one tracker run at a time."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from slurmgpu.errors import SlurmGPUError


@dataclass(frozen=True)
class TrackedRun:
    """A tracker's run: for a whole run of slurmgpu, or for one item if the workload takes one item at a time.

    `id` is unique, and the same at every call. `config` has settings by name, as JSON values. `group` is the name of
    the run of slurmgpu.
    """

    id: str
    name: str
    group: str
    config: Mapping[str, Any]


class Tracker(ABC):
    """Sends one run to a tracker. Created without arguments; `name` is the name of its entry point."""

    name: ClassVar[str]

    @abstractmethod
    def open(self, where: str, run: TrackedRun) -> int:
        """Begin or resume a run; returns the last step that the tracker has, -1 if it has none.

        SlurmGPUError if the tracker's package is missing or `where` cannot be used.
        """

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Send the values of a step; steps increase. Values may be NaN or infinite.

        `time` is when they were logged, in seconds since the epoch.
        """

    @abstractmethod
    def close(self, summary: Mapping[str, float], *, finished: bool) -> None:
        """Close the connection once everything has arrived; `finished` unless the run goes on."""


def package(name: str, extra: str) -> Any:
    """Import a tracker's package; SlurmGPUError that names the extra if it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name.split(".")[0] != error.name.split(".")[0]:
            raise
        raise SlurmGPUError(
            f"--to {extra} needs the package {error.name!r}, which is not installed here: "
            f"pip install 'slurmgpu[{extra}]'."
        ) from error
