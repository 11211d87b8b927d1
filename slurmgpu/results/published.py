"""The rows of a run at this moment, also while it is running: from merged.h5, and from shards that it lacks.

    rows = RunRows(run)                 # shards that are published later need a new one
    for row in rows.rows(10, 20):       # the items 10 to 19, in input order, without those that have no row yet
        print(row.index, row.error or row["text"])

`blocks` yields the same rows as ranges of open files, to read whole columns. Every byte is verified before it is
returned. A damaged shard counts as missing until a merge or another task replaces it, and is named in `problems`; if it
was a recomputed one, merged.h5 or the previous revision is read instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.results import BLOCK_BYTES, Merged
from slurmgpu.results.views import without_value
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.shards.columns import Column, columns_from_json
from slurmgpu.shards.open_file import Identity
from slurmgpu.shards.shard_file import Shapes, examine
from slurmgpu.shards.userblock import DamagedShardError, Reader
from slurmgpu.util.shared_files import exists

_MISSING, _MERGED, _FILE = range(3)


@dataclass(frozen=True)
class Row:
    """The row of an item: `row["score"]` is a column's value; `error` says why the item failed.

    The columns of a failed item are None, except for item fields that the row keeps. `dict(row)` has all columns.
    """

    index: int
    error: str | None
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise KeyError(f"The row has no column {name!r}.{did_you_mean(str(name), self.values)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def keys(self) -> Iterable[str]:
        """The names of the columns."""
        return self.values.keys()


class Block(NamedTuple):
    """The rows at positions `start` to `stop` - 1 of an open file; ascending in `file["index"]`."""

    file: Merged
    start: int
    stop: int

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        """A mask of the rows of failed items."""
        return np.diff(self.file["error"].offsets[self.start : self.stop + 1]) > 0  # type: ignore[union-attr]

    def values_of(self, name: str) -> list[Any]:
        """The values of a column, as Python numbers, strings and arrays."""
        return self.file[name].python_values(self.start, self.stop)

    def rows(self, names: Sequence[str] | None = None) -> list[Row]:
        """The rows, with the values of all columns or of `names` among them as Python numbers, strings and arrays."""
        columns = {name: self.values_of(name) for name in (self.file.columns if names is None else names)}
        indices, errors = self.values_of("index"), self.values_of("error")
        failed = self.failed
        for name, values in columns.items():
            for place in np.flatnonzero(without_value(self.file[name], failed, self.start, self.stop)):
                values[place] = None
        return [
            Row(index, error or None, {name: values[place] for name, values in columns.items()})
            for place, (index, error) in enumerate(zip(indices, errors, strict=True))
        ]


@dataclass
class RunRows:
    """The rows that a run has at this moment, in input order; a context manager.

    A shard without a later revision is read from merged.h5 if that has it, other shards from their newest file. If this
    is damaged, or older than merged.h5, its rows there are read, or an older revision; `problems` names the damaged
    files. SlurmGPUError if merged.h5 is damaged; with `verify` all of its bytes are verified at once, else those of
    each block before it is returned.
    """

    run: Run
    verify: bool = False
    problems: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        plan, self._verified = self.run.plan, dict[Path, Identity]()
        self.columns: dict[str, Column] = columns_from_json(plan.columns)
        self.merged = _open_merged(self.run, self.verify)
        self._files = self.run.shard_files()
        self._kinds = np.zeros(plan.n_shards, np.int8)
        self._kinds[list(self._files)] = _FILE
        if self.merged is not None:
            self._items = _items_in(self.merged.index, plan)
            starts = np.arange(plan.n_shards, dtype=np.int64) * plan.shard_items
            places = np.searchsorted(self._items, starts)
            is_there = places < len(self._items)
            is_there[is_there] = self._items[places[is_there]] == starts[is_there]
            is_there[[shard for shard, revisions in self._files.items() if revisions[-1]]] = False
            self._kinds[is_there] = _MERGED

    def __enter__(self) -> RunRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close merged.h5; rows that were read stay valid."""
        if self.merged is not None:
            self.merged.close()

    def __len__(self) -> int:
        plan, shards = self.run.plan, np.flatnonzero(self._kinds)
        n_rows = len(shards) * plan.shard_items
        if self._kinds[-1:].any():
            first, stop = plan.bounds(plan.n_shards - 1)
            n_rows += stop - first - plan.shard_items
        return n_rows

    def present(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """The items from `start` to `stop` - 1 that have a row, as spans; damaged shards count until they are read."""
        first, last = self._among_runs(start, stop)
        size, found = self.run.plan.shard_items, list[tuple[int, int]]()
        for is_there, group in groupby(
            range(first // size, -(-last // size)), key=lambda shard: self._kinds[shard] > 0
        ):
            shards = list(group)
            if is_there:
                found += self.run.plan.spans(max(first, shards[0] * size), min(last, (shards[-1] + 1) * size))
        return found

    def blocks(self, start: int = 0, stop: int | None = None, n_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """The rows of the items `start` to `stop` - 1, as blocks of about `n_bytes`.

        A block's file is open until the next block is asked for.
        """
        plan = self.run.plan
        start, stop = self._among_runs(start, stop)
        shards = range(start // plan.shard_items, -(-stop // plan.shard_items) if start < stop else 0)
        for kind, group in groupby(shards, key=lambda shard: int(self._kinds[shard])):
            if kind == _MERGED and self.merged is not None:
                its = list(group)
                yield from self._merged_blocks(
                    max(start, plan.bounds(its[0])[0]), plan.bounds(its[-1])[1], stop, n_bytes
                )
            elif kind == _FILE:
                for shard in group:
                    yield from self._shard_blocks(shard, start, stop, n_bytes)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[Row]:
        """The rows of the items `start` to `stop` - 1."""
        for block in self.blocks(start, stop):
            yield from block.rows()

    def _among_runs(self, start: int, stop: int | None) -> tuple[int, int]:
        """Convert items, given by their indices in the input, to positions among the run's items, from 0."""
        plan = self.run.plan
        first, last, _ = slice(start, stop).indices(plan.ranges[-1][1])
        return plan.n_before(first), plan.n_before(last)

    def _merged_blocks(self, start: int, stop: int, end: int, n_bytes: int) -> Iterator[Block]:
        assert self.merged is not None
        first, last = np.searchsorted(self._items, (start, min(stop, end))).tolist()
        for block in _cut(self.merged, first, last, n_bytes):
            self.merged.check_rows(block.start, block.stop)
            yield block

    def _shard_blocks(self, shard: int, start: int, stop: int, n_bytes: int) -> Iterator[Block]:
        first, last = self.run.plan.bounds(shard)
        *older, newest = self._files[shard]
        damaged: list[str] = []
        file = self._open(shard, newest, damaged)
        if self.merged is not None:
            places = slice(*np.searchsorted(self._items, (first, last)).tolist())
            failed = self.merged.failed[places]
            # A later file lacks no good row of merged.h5: the listing lacked that one, as from a cache of NFS.
            is_former = file is not None and len(failed) == len(file) and bool((file.failed & ~failed).any())
            if len(failed) and (file is None or is_former):
                self._add_problems(damaged, "the rows in merged.h5 are used instead")
                if file is not None:
                    file.close()
                yield from self._merged_blocks(max(start, first), last, stop, n_bytes)
                return
        for revision in reversed(older):
            file = file or self._open(shard, revision, damaged)
        if file is None:
            self._kinds[shard] = _MISSING
            self._add_problems(damaged, "its rows count as missing")
            return
        self._add_problems(damaged, "the rows from before its items were recomputed are used instead")
        with file:
            yield from _cut(file, max(start, first) - first, min(stop, last) - first, n_bytes)

    def _open(self, shard: int, revision: int, damaged: list[str]) -> Merged | None:
        """A published shard with every byte verified; None if it is missing or damaged: `damaged` gets the reason."""
        path = self.run.revision_path(shard, revision)
        try:
            _verify(path, self.run, shard, self._verified)
            return Merged(path)
        except FileNotFoundError:
            return None  # a merge has just set it aside
        except DamagedShardError as error:
            damaged.append(f"{path.name} is damaged ({error})")
            return None
        except OSError as error:
            raise SlurmGPUError(f"{path} cannot be read: {error.strerror}.") from error

    def _add_problems(self, damaged: Sequence[str], instead: str) -> None:
        for problem in damaged:
            if (sentence := f"{problem}, and {instead}.") not in self.problems:
                self.problems.append(sentence)


class FileRows:
    """The rows of a merged file or shard, with the interface of `RunRows`. A merged file's bytes are verified once."""

    def __init__(self, merged: Merged) -> None:
        self.merged, self.columns = merged, merged.columns

    def present(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """The items from `start` to `stop` - 1 that have a row, as spans."""
        first, last = self._places(start, stop)
        index = self.merged.index[first:last]
        breaks = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
        return [(int(index[one]), int(index[end - 1]) + 1) for one, end in pairwise(breaks) if one < end]

    def blocks(self, start: int = 0, stop: int | None = None, n_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """The rows of the items `start` to `stop` - 1, as blocks of about `n_bytes`."""
        for block in _cut(self.merged, *self._places(start, stop), n_bytes):
            self.merged.check_rows(block.start, block.stop)
            yield block

    def _places(self, start: int, stop: int | None) -> tuple[int, int]:
        index = self.merged.index
        after = int(index[-1]) + 1 if len(index) else 0
        first, last = np.searchsorted(index, slice(start, stop).indices(after)[:2]).tolist()
        return first, last


def _verify(path: Path, run: Run, shard: int, verified: dict[Path, Identity]) -> None:
    """Raise DamagedShardError if the file is damaged, or of another plan, in two readings."""
    start, stop = run.plan.bounds(shard)
    with Reader(path) as reader:
        if verified.get(path) == (identity := reader.file.identity):
            return

        def read() -> None:
            directory = examine(reader, fingerprint=run.plan.fingerprints, start=start, stop=stop)
            Shapes(columns_from_json(run.plan.columns)).check(directory)
            directory.verify(reader)

        reader.twice(read)
    verified[path] = identity


def _open_merged(run: Run, verify: bool) -> Merged | None:
    if not exists(run.merged):
        return None
    merged = Merged(run.merged, verify=verify)
    if merged.attributes.get("fingerprint") != run.plan.fingerprint:
        raise SlurmGPUError(
            f"{run.merged} and {run.folder / 'run.json'} belong to different plans."
            f" `slurmgpu merge {run.typed}` rewrites it from the run's shards."
        )
    return merged


def _items_in(indices: npt.NDArray[np.int64], plan: Plan) -> npt.NDArray[np.int64]:
    """Convert indices in the input to numbers of the run's items, from 0."""
    starts, stops = np.array(plan.ranges).T
    number = np.searchsorted(starts, indices, side="right") - 1
    items: npt.NDArray[np.int64] = indices - starts[number] + (np.cumsum(stops - starts) - (stops - starts))[number]
    return items


def _cut(file: Merged, start: int, stop: int, n_bytes: int) -> Iterator[Block]:
    return (Block(file, *rows) for rows in file.ranges(n_bytes, start, stop))
