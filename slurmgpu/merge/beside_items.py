"""Join rows with the data of their items, for exports: the columns `item.FIELD`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.inputs import open_items
from slurmgpu.results.selection import Selection, Source, check_names
from slurmgpu.run.directory import Run
from slurmgpu.shards.columns import stored_columns
from slurmgpu.util.json_values import json_value

if TYPE_CHECKING:
    import pyarrow as pa

    from slurmgpu.results.constants import Constants

log = logging.getLogger(__name__)

PREFIX = "item."
_AT_ONCE = 256
"""How many items are read at a time."""
_IN_TABLE = 2048
"""The most rows of an Arrow table."""

Read = Callable[[Sequence[int]], list[Mapping[str, Any] | ItemError]]


@dataclass
class BesideItems:
    """The rows of a selection, with a column for each field of their items; replaces `Selection` in exports.

    `names` are columns and `item.FIELD`; by default all. `constants` are as in `Selection`. Fields of an item that
    cannot be read are null.
    """

    source: Source
    run: Run
    names: Sequence[str]
    where: str | None
    constants: Constants | None = None

    def __post_init__(self) -> None:
        of_items = [name for name in self.names if name.startswith(PREFIX)]
        check_names(self.names, [*stored_columns(dict(self.source.columns)), *of_items])
        own = [name for name in self.names if name not in of_items]
        asked = ["index", *(name for name in own if name != "index")] if self.names else []
        self._rows = Selection(self.source, asked, self.where, constants=self.constants)
        self.columns = list(self.names) or [*self._rows.columns, *(f"{PREFIX}{name}" for name in self._fields())]

    @property
    def n_seen(self) -> int:
        """The number of rows that were read, chosen or not."""
        return self._rows.n_seen

    @property
    def n_failed(self) -> int:
        """The number of chosen rows of failed items."""
        return self._rows.n_failed

    def plain_rows(self, *, as_cells: bool = False) -> Iterator[tuple[Any, ...]]:
        """The chosen rows as JSON values, or as cells of CSV, in the order of `columns`."""
        own = list(self._rows.columns)
        with open_items(self.run) as read:
            rows = self._rows.plain_rows(as_cells=as_cells)
            while some := list(islice(rows, _AT_ONCE)):
                places = own.index("index")
                for row, data in zip(some, _data(read, [row[places] for row in some]), strict=True):
                    values = {**dict(zip(own, row, strict=True)), **{f"{PREFIX}{k}": v for k, v in data.items()}}
                    yield tuple(values.get(name) for name in self.columns)

    def tables(self) -> Iterator[pa.Table]:
        """The chosen rows as Arrow tables of one schema, of at most `_IN_TABLE` rows."""
        types = self._item_types
        with open_items(self.run) as read:
            for table in self._rows.tables():
                for start in range(0, len(table), _IN_TABLE):
                    some = table.slice(start, _IN_TABLE)
                    yield self._beside(some, _data(read, some["index"].to_pylist()), types)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the tables."""
        return self._beside(self._rows.schema.empty_table(), [], self._item_types).schema

    def _beside(
        self, table: pa.Table, items: Sequence[Mapping[str, Any]], types: Mapping[str, pa.DataType | None]
    ) -> pa.Table:
        from slurmgpu.results.arrow import array_of_json

        for name, kind in types.items():
            table = table.append_column(f"{PREFIX}{name}", array_of_json([data.get(name) for data in items], kind))
        return table.select(self.columns)

    @functools.cached_property
    def _item_types(self) -> Mapping[str, pa.DataType | None]:
        """The common Arrow types of the items' fields among the columns, over all chosen rows."""
        from slurmgpu.results.json_types import common_types

        def values_in(some: Sequence[Mapping[str, Any]]) -> Callable[[str], list[Any]]:
            return lambda name: [data.get(name) for data in some]

        return common_types(fields_among(self.columns), map(values_in, self._items_met()))

    def known_fields(self) -> set[str]:
        """The fields of the first chosen items, if these have all that were asked for; else of all chosen items."""
        wanted, known = fields_among(self.columns), set[str]()
        for fields in self._fields_met() if wanted else ():
            known.update(fields)
            if known.issuperset(wanted):
                break
        return known

    def _fields(self) -> list[str]:
        """The fields of all chosen items, in order of appearance."""
        return list(dict.fromkeys(name for fields in self._fields_met() for name in fields))

    def _fields_met(self) -> Iterator[Iterable[str]]:
        for some in self._items_met():
            yield from some

    def _items_met(self) -> Iterator[list[Mapping[str, Any]]]:
        """The items of the chosen rows, some at a time."""
        indices = (
            row[0] for row in Selection(self.source, ["index"], self.where, constants=self.constants).plain_rows()
        )
        with open_items(self.run) as read:
            while some := list(islice(indices, _AT_ONCE)):
                yield _data(read, some)


def fields_among(names: Iterable[str]) -> list[str]:
    """The fields of items that columns name: `text` for `item.text`."""
    return [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]


def refuse_unknown_fields(names: Iterable[str], known: Collection[str]) -> None:
    """Raise SlurmGPUError if a column names a field that no chosen item has; `known` are the fields of all of them."""
    if known and (unknown := next((name for name in fields_among(names) if name not in known), None)) is not None:
        raise SlurmGPUError(f"No item has the field {unknown!r}.{did_you_mean(unknown, known)}")


def refuse_bare_fields(run: Run, names: Sequence[str], known: Collection[str]) -> None:
    """Raise SlurmGPUError for the first name that is not a column but a field of the first item."""
    unknown = next((name for name in names if name not in known), None)
    if unknown is None:
        return
    try:
        with open_items(run) as read:
            first = _data(read, run.plan.indices(0, 1))[0]
    except (OSError, SlurmGPUError, ValueError) as error:
        log.info("whether %s is a field of the input is unknown: %s", unknown, error)
        return  # the caller says that there is no such column
    if unknown in first:
        raise SlurmGPUError(f"There is no column {unknown!r}; for the field of the items write {PREFIX}{unknown}.")


def _data(read: Read, indices: Sequence[int]) -> list[Mapping[str, Any]]:
    return [{} if isinstance(data, ItemError) else json_value(data) for data in read(indices)]
