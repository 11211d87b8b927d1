"""The rows that a call of the workload returned, each converted for the file, or a Failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmgpu.errors import ItemError, Retry
from slurmgpu.shards.columns import Column, convert_row, convert_rows
from slurmgpu.util.amounts import count_of
from slurmgpu.util.exceptions import described, is_of_network, message_of
from slurmgpu.worker.call_failures import Failure, may_pass, of_item

Kept = Sequence[Mapping[str, Any]] | None
"""The fields that each row keeps of its item, if any."""


@dataclass(frozen=True)
class RowConverter:
    """Converts rows to `columns`. `title` is the workload's name in messages; `explain` may add why a row misfits."""

    title: str
    columns: Mapping[str, Column]
    explain: Callable[[Any], str | None] | None = None

    def wrong_number(self, returned: Any, n_items: int) -> Failure | None:
        """The failure of a call that did not return a list with a row for each of its items."""
        is_list = isinstance(returned, list)
        if is_list and len(returned) == n_items:
            return None
        kind = "None" if returned is None else f"a {type(returned).__name__}"
        found = count_of(len(returned), "row") if is_list else kind
        message = f"{self.title} returned {found} for {count_of(n_items, 'item')}"
        message += "" if is_list else "; expected a list with a row, or an ItemError, for each of them"
        return Failure("item_error", message, ("rows",))

    def at_once(self, rows: Sequence[Any], kept: Kept) -> list[dict[str, Any]] | None:
        """All rows of a call, if all of them fit."""
        if not all(type(row) is dict for row in rows):
            return None
        if kept is not None:
            rows = [{**row, **more} for row, more in zip(rows, kept, strict=True)]
        try:
            return convert_rows(self.columns, rows)
        except Exception:  # a value of a user's class may raise any; `one_by_one` says which
            return None

    def one_by_one(self, rows: Sequence[Any], kept: Kept) -> list[Mapping[str, Any] | Failure]:
        """Each row of a call, or why it does not fit."""
        if kept is None:
            return [self._converted(row) for row in rows]
        return [self._converted(row, more) for row, more in zip(rows, kept, strict=True)]

    def _converted(self, row: Any, more: Mapping[str, Any] | None = None) -> Mapping[str, Any] | Failure:
        if isinstance(row, ItemError):
            return of_item(row)
        if isinstance(row, BaseException):  # as asyncio.gather returns it, with return_exceptions=True
            if isinstance(row, Retry) or is_of_network(row):
                return may_pass(row)
            return Failure("item_error", described(row), ("returned", type(row).__name__))
        try:
            whole = row if more is None or not isinstance(row, Mapping) else {**row, **more}
            return convert_row(self.columns, whole)
        except Exception as error:  # a row or a value of a user's class may raise any
            is_misfit = isinstance(error, ValueError)
            said = message_of(error) if is_misfit else described(error)
            message = f"{self.title}: {said}"
            if is_misfit and self.explain is not None and (explained := self.explain(row)):
                message += f". {explained}"
            return Failure("item_error", message, ("row", said))


def as_list(returned: Any, *, are_kept: bool) -> Any:
    """What a call returned, as a list if it may be rows that are kept; a generator computes while it is read."""
    is_text_or_table = isinstance(returned, str | bytes) or hasattr(returned, "keys")  # iteration gives no rows
    are_rows = are_kept and isinstance(returned, Iterable) and not is_text_or_table
    return list(returned) if are_rows or isinstance(returned, Iterator) else returned
