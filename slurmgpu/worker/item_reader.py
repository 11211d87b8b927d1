"""Reads the items of a run's input for a worker."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import InputSpec, Reader
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import INPUT, class_of
from slurmgpu.run.recompute import Spans
from slurmgpu.util.shared_files import cause_raised, retried
from slurmgpu.worker.assignment import WorkerFailedError
from slurmgpu.worker.taken_shard import Read
from slurmgpu.workload import Item


class ItemReader:
    """The open input of a run. Transient errors are tried again; WorkerFailedError if it cannot be read."""

    def __init__(self, run: Run) -> None:
        self._run = run
        spec = InputSpec.from_json(run.input)
        try:
            self._reader = retried(lambda: cause_raised(lambda: Reader(spec, run.index)), run.plan.lease_s)
            retried(lambda: cause_raised(self._reader.check_some_files), run.plan.lease_s)  # before a model is loaded
        except (OSError, SlurmGPUError) as error:
            raise WorkerFailedError(class_of(error, INPUT), str(error)) from error
        self.is_indexed = self._reader.is_indexed
        self.items_are_rows = spec.are_rows

    def __enter__(self) -> ItemReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def read(self, spans: Spans) -> Read:
        """The items at these places; an item that cannot be read as (index, ItemError)."""
        items: Read = []
        plan = self._run.plan
        for start, stop in spans:
            try:
                records = self._read_span(start, stop)
            except (OSError, SlurmGPUError) as error:
                message = f"items {start}..{stop - 1} cannot be read: {error}"
                raise WorkerFailedError(class_of(error, INPUT), message) from error
            items += [
                (index, record) if isinstance(record, ItemError) else Item(index, record, plan.seed)
                for index, record in zip(plan.indices(start, stop), records, strict=True)
            ]
        return items

    def _read_span(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        def read() -> list[Mapping[str, Any] | ItemError]:
            try:
                return cause_raised(lambda: self._reader.read(start, stop))
            except OSError:
                self._reader.reopen()
                raise

        return retried(read, self._run.plan.lease_s)
