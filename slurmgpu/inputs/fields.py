"""Check that the items of an input have the fields that are used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.inputs.reader import Reader
from slurmgpu.inputs.spec import InputSpec

FIRST_ITEMS = 100
"""How many items to search for fields in an input without a header (JSONL)."""

STEP = 10

NOTHING: Mapping[str, str] = {}


def check_fields(
    spec: InputSpec,
    index: Path,
    wanted: Collection[str],
    whose: str,
    advice: Mapping[str, str] = NOTHING,
    called: str | None = None,
) -> None:
    """SlurmGPUError if an input lacks a field that `whose` uses, in its columns or in all of its first items.

    `advice` has text, beginning with a blank, to append for a missing field. `called` names the input in messages, if
    not its path.
    """
    known = spec.columns if spec.columns is not None else _first_fields(spec, index, wanted)
    called = called or f"the input {spec.files[0].path}"
    where = "has none" if spec.columns is not None else f"has none, in its first {FIRST_ITEMS} items,"
    for name in sorted(wanted):
        if known and name not in {*known, "error"}:
            raise SlurmGPUError(
                f"{whose} takes the field {name!r}, and {called} {where} of that name."
                f"{did_you_mean(name, known)}{advice.get(name, '')}"
            )


def refuse_fields(
    spec: InputSpec, index: Path, unwanted: Collection[str], whose: str, called: str | None = None
) -> None:
    """SlurmGPUError if an input has a field, in its columns or its first items, whose name means something else."""
    known = spec.columns if spec.columns is not None else _first_fields(spec, index, unwanted)
    if both := sorted({*unwanted} & {*known}):
        raise SlurmGPUError(
            f"{whose} has a value {both[0]!r} under [settings], and {called or f'the input {spec.files[0].path}'} "
            f"has a field of that name. Rename the value."
        )


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
