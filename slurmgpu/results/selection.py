"""A choice of columns and rows, block by block: what `show`, `export` and `compare` read."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.results import BLOCK_BYTES
from slurmgpu.results.published import Block, Row
from slurmgpu.results.views import without_value
from slurmgpu.shards.columns import Column, stored_columns
from slurmgpu.util.packages import check_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

    from slurmgpu.results.conditions import Condition
    from slurmgpu.results.constants import Constants

ROW_GROUP_BYTES = 32 << 20
"""The most bytes of an Arrow table, approximately."""


def check_names(names: Sequence[str], known: Collection[str]) -> None:
    """Raise SlurmGPUError for the first name that is not that of a known column, or is named twice."""
    for number, name in enumerate(names):
        if name not in known:
            raise SlurmGPUError(f"There is no column {name!r}.{did_you_mean(name, known)}")
        if name in names[:number]:
            raise SlurmGPUError(f"The column {name!r} is named twice; name it once.")


class Source(Protocol):
    """Rows in input order: those of a run, or of a file."""

    @property
    def columns(self) -> Mapping[str, Column]:
        """The workload's columns."""
        ...

    def present(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """The items from `start` to `stop` - 1 that have a row, as spans."""
        ...

    def blocks(self, start: int = 0, stop: int | None = None, n_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """The rows of the items `start` to `stop` - 1, as blocks of about `n_bytes`."""
        ...


class Chosen(NamedTuple):
    """The chosen rows of a block: all of them, or those of a mask."""

    block: Block
    mask: npt.NDArray[np.bool_] | None

    def of(self, values: Sequence[Any]) -> list[Any]:
        """The values of the chosen rows; `values` has one for each row of the block."""
        return list(values if self.mask is None else compress(values, self.mask))


@dataclass
class Selection:
    """The rows of a source that a user asks for; SlurmGPUError if the request does not fit its columns.

    `names` are columns in the order of the result, including `index` and `error`; by default all. `where` is a
    condition, which may also name `constants`. `spans` are the items, as (start, stop); by default all. `failed`
    selects only failed items. `n_seen` counts all rows that were read, `n_failed` the selected rows of failed items.
    """

    source: Source
    names: Sequence[str] = ()
    where: str | None = None
    spans: Sequence[tuple[int, int | None]] = ((0, None),)
    failed: bool = False
    constants: Constants | None = None
    n_seen: int = field(default=0, init=False)
    n_failed: int = field(default=0, init=False)
    _types: dict[str, pa.DataType | None] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        known = stored_columns(dict(self.source.columns))
        check_names(self.names, known)
        self.columns = {name: known[name] for name in self.names or known}
        self._condition: Condition | None = None
        if self.where is not None:
            self._condition = _condition(self.where, [*known, *(self.constants.values if self.constants else ())])
            self._tested = {name: known[name] for name in self._condition.columns if name in known}
            self._chosen_of(self._condition, self._empty(self._tested), 0)

    def blocks(self, n_bytes: int = BLOCK_BYTES) -> Iterator[Chosen]:
        """The chosen rows, block by block; blocks without any are left out."""
        self.n_seen = self.n_failed = 0
        for block in self._all_blocks(n_bytes):
            self.n_seen += block.stop - block.start
            mask = block.failed if self.failed else None
            if self._condition is not None:
                table = self._table_of(block, self._tested)
                found = self._chosen_of(self._condition, table, block.stop - block.start)
                mask = found if mask is None else mask & found
            self.n_failed += int((block.failed if mask is None else block.failed & mask).sum())
            if mask is None or mask.any():
                yield Chosen(block, mask)

    def rows(self) -> Iterator[Row]:
        """The chosen rows."""
        names = [name for name in self.columns if name not in ("index", "error")]
        for chosen in self.blocks():
            yield from chosen.of(chosen.block.rows(names))

    def plain_rows(self, *, as_cells: bool = False) -> Iterator[tuple[Any, ...]]:
        """The chosen rows as JSON values, or as cells of CSV, in the order of `columns`."""
        for chosen in self.blocks(BLOCK_BYTES):
            block = chosen.block
            failed, values = block.failed, []
            for name, column in self.columns.items():
                data = block.file[name]
                stored = data.stored(block.start, block.stop)
                of_rows = column.cells(stored) if as_cells else column.plain(stored)
                if name == "error":
                    of_rows = [message or None for message in of_rows]
                elif name != "index":
                    for row in np.flatnonzero(without_value(data, failed, block.start, block.stop)):
                        of_rows[row] = None
                values.append(chosen.of(of_rows))
            yield from zip(*values, strict=True)

    def draw(self, n: int, seed: int) -> list[int]:
        """The items of `n` chosen rows, drawn at random with `seed`, ascending; all if there are fewer.

        With a condition, or `failed`, all rows are read, with memory for one block and `n` numbers.
        """
        numbers, drawn, n_before = random.Random(seed), list[int](), 0
        if self._condition is None and not self.failed:
            spans = [range(*found) for span in self.spans for found in self.source.present(*span)]
            ends = list(accumulate(map(len, spans)))
            for place in sorted(numbers.sample(range(ends[-1]), min(n, ends[-1]))) if spans else ():
                number = bisect_right(ends, place)
                drawn.append(spans[number][place - ends[number]])
            return drawn
        for chosen in self.blocks():
            block = chosen.block
            for index in chosen.of(block.file["index"].python_values(block.start, block.stop)):
                if n_before < n:  # algorithm R of Vitter, Random sampling with a reservoir, 1985
                    drawn.append(index)
                elif (place := numbers.randrange(n_before + 1)) < n:
                    drawn[place] = index
                n_before += 1
        return sorted(drawn)

    def tables(self) -> Iterator[pa.Table]:
        """The chosen rows as Arrow tables of one schema, each of at most about ROW_GROUP_BYTES."""
        for chosen in self.blocks(ROW_GROUP_BYTES):
            table = self._table_of(chosen.block, self.columns)
            yield table if chosen.mask is None else table.filter(chosen.mask)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the tables."""
        return self._empty(self.columns).schema

    def _chosen_of(self, condition: Condition, table: pa.Table, n_rows: int) -> npt.NDArray[np.bool_]:
        table = self._with_nulls(table)
        if self.constants is not None:
            table = self.constants.beside(table, condition.columns, n_rows)
        return condition.chosen(table)

    def _all_blocks(self, n_bytes: int) -> Iterator[Block]:
        for start, stop in self.spans:
            yield from self.source.blocks(start, stop, n_bytes)

    def _types_of(self, columns: Mapping[str, Column]) -> Mapping[str, pa.DataType | None]:
        """The common types of the values of JSON columns, over all rows of the spans."""
        from slurmgpu.results.arrow import value_types

        new = {name: column for name, column in columns.items() if name not in self._types}
        self._types |= value_types(new, (block.values_of for block in self._all_blocks(BLOCK_BYTES)))
        return self._types

    def _table_of(self, block: Block, columns: Mapping[str, Column]) -> pa.Table:
        from slurmgpu.results.arrow import to_arrow

        found = {name: block.file[name] for name in columns}
        return to_arrow(found, block.failed, block.start, block.stop, self._types_of(columns))

    def _with_nulls(self, table: pa.Table) -> pa.Table:
        """The table for a condition. A JSON column with only null keeps the null type, which fits any operation."""
        import pyarrow as pa

        for place, name in enumerate(table.column_names):
            if self._types.get(name) == pa.null():
                table = table.set_column(place, name, pa.nulls(len(table)))
        return table

    def _empty(self, columns: Mapping[str, Column]) -> pa.Table:
        from slurmgpu.results.arrow import empty

        return empty(columns, self._types_of(columns))


def _condition(text: str, names: Sequence[str]) -> Condition:
    check_pyarrow("A condition needs")
    from slurmgpu.results.conditions import Condition

    return Condition(text, names)
