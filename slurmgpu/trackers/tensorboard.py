"""TensorBoard: `--to tensorboard:DIR` writes event files, in a folder for each run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from slurmgpu.errors import SlurmGPUError
from slurmgpu.trackers.interface import TrackedRun, Tracker, package
from slurmgpu.util.users import expanded


class TensorBoard(Tracker):
    """Writes event files by TensorBoard's own writer."""

    name: ClassVar[str] = "tensorboard"

    def open(self, where: str, run: TrackedRun) -> int:
        """Begin another event file in DIR/NAME-ID; returns the last step in the existing ones."""
        self._summaries = package("tensorboard.compat.proto.summary_pb2", self.name)
        self._events = package("tensorboard.compat.proto.event_pb2", self.name)
        writers = package("tensorboard.summary.writer.event_file_writer", self.name)
        folder = expanded(where) / f"{run.name}-{run.id}"
        try:
            last = _last_step(folder)
            self._writer: Any = writers.EventFileWriter(str(folder), flush_secs=5)
        except OSError as error:
            raise SlurmGPUError(f"{folder} cannot be written: {error.strerror}. Name another folder.") from error
        return last

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Append a scalar for each value."""
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summaries.Summary(value=scalars)
        self._writer.add_event(self._events.Event(wall_time=time, step=step, summary=summary))

    def close(self, summary: Mapping[str, float], *, finished: bool) -> None:
        """Close the event file; it has no place for a summary."""
        self._writer.close()


def _last_step(folder: Path) -> int:
    loaders = package("tensorboard.backend.event_processing.event_file_loader", TensorBoard.name)
    last = -1
    for path in sorted(folder.glob("events.out.tfevents.*")) if folder.is_dir() else ():
        for event in loaders.EventFileLoader(str(path)).Load():
            if event.HasField("summary"):
                last = max(last, event.step)
    return last
