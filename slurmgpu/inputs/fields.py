"""Fields of items: check that those in use exist, and keep some as columns of the rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.inputs.reader import Reader
from slurmgpu.inputs.spec import InputSpec
from slurmgpu.shards.columns import RESERVED_NAMES, Column, Json
from slurmgpu.util.json_values import MOST_LEVELS, is_too_deep, json_value

KEPT_BEFORE = " Rows have a field of the items they are for only if the earlier run's keep names it."
_FIRST_ITEMS = 100
"""How many items to search for fields in an input without a header (JSONL)."""
_STEP = 10
"""The number of items in each read of that search."""


@dataclass(frozen=True)
class InputFields:
    """The fields of an input at planning: its columns or, without a header, the fields of its first items.

    `called` names the input in messages.
    """

    spec: InputSpec
    index: Path
    called: str

    def require(self, wanted: Collection[str], whose: str, advice: Mapping[str, str] | None = None) -> None:
        """SlurmGPUError if the input lacks a field that `whose` uses.

        `advice` has text, beginning with a blank, to append for a missing field.
        """
        known = self._known(wanted)
        has_seen_all = self.spec.columns is not None or self.spec.n_items <= _FIRST_ITEMS
        lacks = (
            f"{self.called} lacks" if has_seen_all else f"none of the first {_FIRST_ITEMS} items of {self.called} has"
        )
        for name in sorted(wanted):
            if known and name not in {*known, "error"}:
                raise SlurmGPUError(
                    f"{whose} takes the field {name!r}, which {lacks}.{did_you_mean(name, known)}"
                    f"{(advice or {}).get(name, '')}{KEPT_BEFORE if self.spec.are_rows else ''}"
                )

    def refuse(self, unwanted: Collection[str], whose: str, advice: Mapping[str, str]) -> None:
        """SlurmGPUError if the input has an `unwanted` field, whose name means something else to `whose`.

        `advice` says what it means, by name; for other names it is a value under [settings].
        """
        if both := sorted({*unwanted} & {*self._known(unwanted)}):
            if both[0] in advice:
                raise SlurmGPUError(f"{whose}: {self.called} has a field {both[0]!r}{advice[both[0]]}")
            raise SlurmGPUError(
                f"{whose} has a value {both[0]!r} in [settings], but {self.called} has a field of that name. Rename "
                f"the value."
            )

    def _known(self, wanted: Collection[str]) -> Collection[str]:
        """The columns, or the fields of the first items; reads only until all `wanted` ones are found."""
        if self.spec.columns is not None:
            return self.spec.columns
        found: set[str] = set()
        n_items = min(_FIRST_ITEMS, self.spec.n_items) if wanted else 0
        with Reader(self.spec, self.index) as reader:
            for start in range(0, n_items, _STEP):
                items = reader.read(start, min(start + _STEP, n_items))
                found.update(name for data in items if not isinstance(data, ItemError) for name in data)
                if found.issuperset(wanted):
                    break
        return found


def columns_kept(keep: Sequence[str], rename: Mapping[str, str], columns: Collection[str]) -> dict[str, str]:
    """The fields to keep, by the names of their columns; SlurmGPUError if two columns have one name.

    `columns` are those of the workload.
    """
    if unknown := [field for field in rename if field not in keep]:
        raise SlurmGPUError(
            f"rename has {unknown[0]!r}, which is not in keep; expected FIELD = COLUMN with a field of keep."
            f"{did_you_mean(unknown[0], keep)}"
        )
    found: dict[str, str] = {}
    for field in keep:
        name = rename.get(field, field)
        if name in columns or name in RESERVED_NAMES:
            whose = "a column that the run computes" if name in columns else "a column that slurmgpu adds"
            said = f"keep has {name!r}" if name == field else f"rename has {name!r}"
            raise SlurmGPUError(
                f'{said}, which is {whose}. Give its column another name, rename = {{{field} = "input_{field}"}}, '
                f"or remove it."
            )
        if name in found:
            said = "named twice" if found[name] == field else f"also the column of {found[name]!r}"
            raise SlurmGPUError(f"keep has {name!r}, which is {said}; remove one of them, or rename it.")
        found[name] = field
    return found


def with_kept(columns: Mapping[str, Column], kept: Mapping[str, str]) -> dict[str, Column]:
    """The columns of a workload, and those for the fields that rows keep."""
    return {**columns, **dict.fromkeys(kept, Json())}


def check_kept(kept: Mapping[str, str], data: Mapping[str, Any]) -> None:
    """ItemError if an item lacks a field that its row keeps, or has one that no column can hold."""
    for field in kept.values():
        if field not in data:
            raise ItemError(f"no field {field!r}, which the row keeps.{did_you_mean(field, data)}")
        if is_too_deep(data[field]):
            raise ItemError(
                f"the field {field!r}, which the row keeps, has more than {MOST_LEVELS} nested lists and mappings"
            )


def kept_values(kept: Mapping[str, str], data: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an item's kept fields, by column; without fields that it lacks or that no column can hold."""
    there = {name: data[field] for name, field in kept.items() if field in data}
    return {name: json_value(value) for name, value in there.items() if not is_too_deep(value)}
