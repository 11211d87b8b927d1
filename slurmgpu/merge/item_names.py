"""Names of items: from the run's key; without one the report uses their settings or first fields.

Of a row of an earlier run it uses what that run kept of its items: what it computed tells the items less apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import InputSpec, file_items, open_items, sweeps
from slurmgpu.inputs.keys import cut, items_named, name_by
from slurmgpu.report.report_file import FailedItem
from slurmgpu.run.directory import Run
from slurmgpu.run.plan_beside import plan_beside
from slurmgpu.util.process_wide import working_folder

log = logging.getLogger(__name__)

MAX_NAMED = 200
"""The report names at most this many failed items …"""
MAX_S = 5.0
"""… and stops after this time: items of a large Parquet file may be far apart."""
N_FIELDS = 3
MOST_DIGITS = 18
"""A text with more digits is not an item's number."""


def name_items(run: Run, items: Sequence[FailedItem]) -> None:
    """Set `name` of the report's first failed items; None if the input cannot tell."""
    if not items:
        return
    until = time.monotonic() + MAX_S
    try:
        paths = [Path(file.path) for file in InputSpec.from_json(run.input).files]
        names = {path.name for path in paths}
        kept = {name for path in paths for name in plan_beside(path).get("keep", ())}
        is_sweep, is_file = sweeps.FILE in names, file_items.FILE in names
        with open_items(run) as read:
            for item in items[:MAX_NAMED]:
                if time.monotonic() > until:
                    break
                [data] = read([item["index"]])
                if not isinstance(data, ItemError):
                    by_key = name_by(run.plan.key, data) if run.plan.key else None
                    told = {name: data[name] for name in data if name in kept} or data
                    told = {"name": data["name"]} if is_file else told
                    item["name"] = by_key or name_of(told, None if is_sweep else N_FIELDS)
    except (OSError, SlurmGPUError, ValueError) as error:
        log.info("failed items are listed without names: %s", error)


def find_item(run: Run, asked: str) -> int:
    """The index of an item by its number or its name; `KEY=NAME` is always a name."""
    key = run.plan.key
    if asked.isdecimal() and len(asked) <= MOST_DIGITS:
        return int(asked)
    if key is None:
        raise SlurmGPUError(
            f"{asked!r} is not a number, and the items of {run.folder} have no names: give a number from 0 to "
            f'{run.plan.n_items - 1}. To give items names, set key in the run file, for example key = "id".'
        )
    name = " ".join(asked.removeprefix(f"{key}=").split())
    with working_folder(Path(run.plan.search_path), may_be_gone=True):
        places = items_named(InputSpec.from_json(run.input), run.index, key, name)
    found = [index for place in places for index in run.plan.indices(place, place + 1)]
    if not found:
        raise SlurmGPUError(f"{run.folder} has no item whose {key} is {name!r}.")
    if len(found) > 1:
        raise SlurmGPUError(
            f"{run.folder} has several items whose {key} is {name!r}, such as {found[0]} and {found[1]}: give a number."
        )
    return found[0]


def name_by_key(run: Run, index: int) -> str | None:
    """The name of an item by the run's key; None without one, or if its input cannot be read."""
    if run.plan.key is None or run.plan.place(index) is None:
        return None
    try:
        with open_items(run) as read:
            [data] = read([index])
    except (OSError, SlurmGPUError, ValueError) as error:
        log.info("item %d is named by its index: %s", index, error)
        return None
    return None if isinstance(data, ItemError) else name_by(run.plan.key, data)


def name_of(data: Mapping[str, Any], n_fields: int | None = None) -> str | None:
    """The first fields of an item's data, or all, as one line; None if it has none."""
    fields = dict(list(data.items())[:n_fields])
    text = " ".join(sweeps.describe(fields).split()) if fields else ""
    return cut(text) or None
