"""Fields of items: check that those in use exist, and keep some as columns of the rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.inputs.reader import Reader
from slurmgpu.inputs.spec import InputSpec
from slurmgpu.shards.columns import RESERVED_NAMES, Column, Json
from slurmgpu.util.json_values import MOST_LEVELS, is_too_deep, json_value

FIRST_ITEMS = 100
"""How many items to search for fields in an input without a header (JSONL)."""

STEP = 10


def check_fields(
    spec: InputSpec,
    index: Path,
    wanted: Collection[str],
    whose: str,
    advice: Mapping[str, str],
    called: str | None,
) -> None:
    """SlurmGPUError if an input lacks a field that `whose` uses, in its columns or in all of its first items.

    `advice` has text, beginning with a blank, to append for a missing field. `called` names the input in messages, if
    not its path.
    """
    known = spec.columns if spec.columns is not None else _first_fields(spec, index, wanted)
    called = called or f"the input {spec.files[0].path}"
    has_seen_all = spec.columns is not None or spec.n_items <= FIRST_ITEMS
    lacks = f"{called} lacks" if has_seen_all else f"none of the first {FIRST_ITEMS} items of {called} has"
    for name in sorted(wanted):
        if known and name not in {*known, "error"}:
            raise SlurmGPUError(
                f"{whose} takes the field {name!r}, which {lacks}.{did_you_mean(name, known)}{advice.get(name, '')}"
            )


def refuse_fields(
    spec: InputSpec,
    index: Path,
    unwanted: Collection[str],
    whose: str,
    advice: Mapping[str, str],
    called: str | None,
) -> None:
    """SlurmGPUError if an input has a field, in its columns or its first items, whose name means something else.

    `advice` says what, by name; it is a value under [settings] otherwise.
    """
    known = spec.columns if spec.columns is not None else _first_fields(spec, index, unwanted)
    if both := sorted({*unwanted} & {*known}):
        source = called or f"the input {spec.files[0].path}"
        if both[0] in advice:
            raise SlurmGPUError(f"{whose}: {source} has a field {both[0]!r}{advice[both[0]]}")
        raise SlurmGPUError(
            f"{whose} has a value {both[0]!r} under [settings], and {source} has a field of that name. Rename the "
            f"value."
        )


def columns_kept(keep: Sequence[str], rename: Mapping[str, str], columns: Collection[str]) -> dict[str, str]:
    """The kept fields by the names of their columns; SlurmGPUError for a name that exists twice.

    `columns` are those of the workload.
    """
    if unknown := [field for field in rename if field not in keep]:
        raise SlurmGPUError(
            f"rename has {unknown[0]!r}, which keep does not have; expected a field of keep = the name of its column."
            f"{did_you_mean(unknown[0], keep)}"
        )
    found: dict[str, str] = {}
    for field in keep:
        name = rename.get(field, field)
        if name in columns or name in RESERVED_NAMES:
            whose = "a column that the run computes" if name in columns else "a column that slurmgpu adds"
            said = f"keep has {name!r}" if name == field else f"rename has {name!r}"
            raise SlurmGPUError(
                f'{said}, which is {whose}; give its column another name, rename = {{{field} = "input_{field}"}}, '
                f"or remove it."
            )
        if name in found:
            said = "named twice" if found[name] == field else f"also the column of {found[name]!r}"
            raise SlurmGPUError(f"keep has {name!r}, which is {said}; remove one of them, or rename it.")
        found[name] = field
    return found


def with_kept(columns: Mapping[str, Column], kept: Mapping[str, str]) -> dict[str, Column]:
    """The columns of a workload and those of kept fields."""
    return {**columns, **dict.fromkeys(kept, Json())}


def check_kept(kept: Mapping[str, str], data: Mapping[str, Any]) -> None:
    """ItemError if an item lacks a field that its row keeps, or has one that no column can hold."""
    for field in kept.values():
        if field not in data:
            raise ItemError(f"no field {field!r}, which the row keeps.{did_you_mean(field, data)}")
        if is_too_deep(data[field]):
            raise ItemError(
                f"the field {field!r}, which the row keeps, has more than {MOST_LEVELS} lists and mappings in one "
                f"another"
            )


def kept_values(kept: Mapping[str, str], data: Mapping[str, Any]) -> dict[str, Any]:
    """The values of those kept fields that an item has, by column; without those that no column can hold."""
    there = {name: data[field] for name, field in kept.items() if field in data}
    return {name: json_value(value) for name, value in there.items() if not is_too_deep(value)}


def _first_fields(spec: InputSpec, index: Path, wanted: Collection[str]) -> Collection[str]:
    """The fields of the first items; reads no more than needed to find all `wanted` ones."""
    found: set[str] = set()
    n_items = min(FIRST_ITEMS, spec.n_items) if wanted else 0
    with Reader(spec, index) as reader:
        for start in range(0, n_items, STEP):
            items = reader.read(start, min(start + STEP, n_items))
            found.update(name for data in items if not isinstance(data, ItemError) for name in data)
            if found.issuperset(wanted):
                break
    return found
