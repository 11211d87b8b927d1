"""Read any range of an input's items, and those of a run by their indices in its input."""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.formats import Rows, changed_error, named
from slurmgpu.inputs.index import Index
from slurmgpu.inputs.lines import Lines
from slurmgpu.inputs.repack import RepackedLines, hash_file
from slurmgpu.inputs.spec import InputFile, InputSpec
from slurmgpu.inputs.tables import Groups, MergedRows
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import PROMISED
from slurmgpu.run.recompute import spans_of
from slurmgpu.util.process_wide import working_folder
from slurmgpu.util.shared_files import retried

_N_LOOKED_AT = 64
_TOLD_BYTES = 1 << 30
"""A comparison of so many bytes takes seconds, and is told."""

log = logging.getLogger(__name__)


class Reader:
    """Reads items of a planned input, with one file open; SlurmGPUError if a file has changed since planning."""

    def __init__(self, spec: InputSpec, index: Path) -> None:
        self._spec = spec
        self._format = named(spec.format)
        self._bounds = [0, *accumulate(file.n_items for file in spec.files)]
        self._index = Index(index, spec)
        self._planned = _Planned(spec)
        self._open: tuple[int, Rows] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_indexed(self) -> bool:
        """Whether reading a few items is as fast, per item, as reading many."""
        return self._format.is_indexed

    def check_some_files(self) -> None:
        """SlurmGPUError if one of some evenly spread files has changed; `read` checks each file that it reads."""
        for file in _some_files(self._spec):
            self._planned.check(file)

    def close(self) -> None:
        """Close all files."""
        self._close_file()
        self._index.close()

    def reopen(self) -> None:
        """Open the file again at the next read, because a stale descriptor stays stale."""
        with contextlib.suppress(OSError):
            self._close_file()

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """The data of items start..stop-1, in order; an ItemError in place of a malformed item.

        A range may span files. Nothing before the last multiple of the stride up to `start` is read.
        """
        if not 0 <= start <= stop <= self._spec.n_items:
            raise ValueError(f"items {start} to {stop} of an input of {self._spec.n_items}")
        data: list[Mapping[str, Any] | ItemError] = []
        for at, end in self._spec.spans(start, stop):
            while at < end:
                number = bisect_right(self._bounds, at) - 1
                first, after = self._bounds[number], min(end, self._bounds[number + 1])
                self._planned.check(self._spec.files[number])  # an Arrow file that was truncated would kill the process
                data += self._rows(number).read(at - first, after - first)
                self._planned.check(self._spec.files[number])  # after reading, so that the planned file was read
                at = after
        return data

    def _rows(self, number: int) -> Rows:
        """The items of a file, which is opened if it is not the open one."""
        if self._open is not None and self._open[0] == number:
            return self._open[1]
        self._close_file()
        path = self._spec.files[number].path
        items = range(self._bounds[number], self._bounds[number + 1])

        def find(start: int, stop: int) -> tuple[int, int, int]:
            first, begin, end = self._index.span(number, items, items.start + start, items.start + stop)
            return first - items.start, begin, end

        rows: Rows
        if self._spec.repacked and isinstance(self._format, Lines):
            rows = RepackedLines(self._format, self._spec.files[number], self._spec.columns)
        else:
            rows = self._format.open(path, self._spec.columns, find)
        if isinstance(rows, Groups):
            rows.check_footer(len(items), self._spec.columns)
        if self._spec.files[number].size_bytes == PROMISED:
            _check_promise(self._spec.files[number], rows)
        self._open = (number, rows)
        return rows

    def _close_file(self) -> None:
        if self._open is not None:
            rows, self._open = self._open[1], None
            rows.close()


@contextlib.contextmanager
def open_items(run: Run) -> Iterator[Callable[[Sequence[int]], list[Mapping[str, Any] | ItemError]]]:
    """A function that reads the data of a run's items by ascending indices; an ItemError for a malformed one.

    Within the block, the working directory is the run file's folder, if it is there: paths of the input may be relative
    to it.
    """
    spec = InputSpec.from_json(run.input)
    with working_folder(Path(run.plan.search_path), may_be_gone=True), Reader(spec, run.index) as reader:

        def read(indices: Sequence[int]) -> list[Mapping[str, Any] | ItemError]:
            places = [run.plan.n_before(index) for index in indices]
            return [data for span in spans_of(places) for data in reader.read(*span)]

        yield read


def check_input(spec: InputSpec, index: Path) -> None:
    """SlurmGPUError if tasks cannot use the index, or if one of the files that they look at first has changed.

    A merged file that another run has yet to write is not looked for.
    """
    Index(index, spec).close()
    planned = _Planned(spec)
    for file in _some_files(spec):
        if file.size_bytes != PROMISED:
            planned.check(file)


def _some_files(spec: InputSpec) -> tuple[InputFile, ...]:
    """Some files of the input, evenly spread: it may have 100,000."""
    return spec.files[:: max(1, -(-len(spec.files) // _N_LOOKED_AT))]


class _Planned:
    """Compares files of an input with those of the plan.

    A copy, or a file from an archive, may have another time, and another merge of an earlier run gives its file one:
    then the content decides. It is compared once for each time that is met.
    """

    def __init__(self, spec: InputSpec) -> None:
        self._are_repacked = spec.repacked
        self._alike: set[tuple[str, int]] = set()

    def check(self, file: InputFile) -> None:
        """SlurmGPUError if a file has changed since planning."""
        try:
            status = retried(Path(file.path).stat)
            if file.size_bytes == PROMISED or (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.mtime_ns):
                return
            if status.st_size == file.size_bytes and self._is_alike(file, status.st_mtime_ns):
                return
        except OSError as error:
            raise changed_error(f"{file.path} cannot be read ({error.strerror})") from error
        raise changed_error(
            f"{file.path} had {file.size_bytes} bytes, written {_time(file.mtime_ns)}; it has {status.st_size}, "
            f"written {_time(status.st_mtime_ns)}"
        )

    def _is_alike(self, file: InputFile, mtime_ns: int) -> bool:
        """Whether a file with another time, but of the planned size, has the planned bytes."""
        if self._are_repacked:  # its digest is that of the source; each page has a checksum
            return True
        if (file.path, mtime_ns) not in self._alike:
            if file.size_bytes >= _TOLD_BYTES:
                log.warning("%s has another time than planned: comparing its content", file.path)
            if retried(lambda: hash_file(Path(file.path))) != file.sha256:
                return False
            self._alike.add((file.path, mtime_ns))
        return True


def _check_promise(file: InputFile, rows: Rows) -> None:
    """SlurmGPUError unless a merged file is the complete one of the expected plan."""
    assert isinstance(rows, MergedRows)
    if len(rows) != file.n_items or rows.fingerprint != file.sha256:
        raise SlurmGPUError(
            f"{file.path} has {len(rows)} rows of plan {rows.fingerprint}; expected {file.n_items} rows of "
            f"plan {file.sha256}, which this run waited for. Complete that run, then resubmit this one."
        )


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9).isoformat(" ", "microseconds")
