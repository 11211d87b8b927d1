"""trackio: `--to trackio:PROJECT`, kept on this machine below TRACKIO_DIR."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from slurmgpu.trackers.interface import TrackedRun, Tracker, package


class Trackio(Tracker):
    """Sends a run by trackio, whose runs are known by their names."""

    name: ClassVar[str] = "trackio"

    def open(self, where: str, run: TrackedRun) -> int:
        """Begin or resume the run NAME-ID."""
        trackio = package("trackio", self.name)
        storage = package("trackio.sqlite_storage", self.name).SQLiteStorage
        name = f"{run.name}-{run.id}"
        last = storage.get_max_step_for_run(where, name)
        with contextlib.redirect_stdout(sys.stderr):
            self._run: Any = trackio.init(
                project=where,
                name=name,
                group=run.group,
                config={key.lstrip("_"): value for key, value in run.config.items()},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return -1 if last is None else int(last)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log a step; trackio takes the time of the call for it."""
        self._run.log(dict(values), step=step)

    def close(self, summary: Mapping[str, float], *, finished: bool) -> None:
        """Wait until all has been written; trackio keeps no summary."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
