"""Names of failed items for the report: their settings or first fields."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu import inputs
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import sweeps
from slurmgpu.report.build import FailedItem
from slurmgpu.run.directory import Run
from slurmgpu.util.atomic_files import working_folder

log = logging.getLogger(__name__)

MAX_NAMED = 200
"""The report names at most this many failed items …"""
MAX_S = 5.0
"""… and stops after this time: items of a large Parquet file may be far apart."""
N_FIELDS = 3
LENGTH = 160


def name_items(run: Run, items: Sequence[FailedItem]) -> None:
    """Set `name` of the report's first failed items; None if the input cannot tell."""
    if not items:
        return
    until = time.monotonic() + MAX_S
    try:
        with working_folder(Path(run.plan.search_path)):
            spec = inputs.InputSpec.from_json(run.input)
            is_sweep = any(Path(file.path).name == sweeps.FILE for file in spec.files)
            with inputs.Reader(spec, run.index) as reader:
                for item in items[:MAX_NAMED]:
                    if time.monotonic() > until:
                        break
                    place = run.plan.place(item["index"])
                    assert place is not None
                    [data] = reader.read(place, place + 1)
                    item["name"] = (
                        None if isinstance(data, ItemError) else name_of(data, None if is_sweep else N_FIELDS)
                    )
    except (OSError, SlurmGPUError, ValueError) as error:
        log.info("failed items are listed without names: %s", error)


def name_of(data: Mapping[str, Any], n_fields: int | None = None) -> str | None:
    """The first fields of an item's data, or all, as one line; None if it has none."""
    fields = dict(list(data.items())[:n_fields])
    text = " ".join(sweeps.describe(fields).split()) if fields else ""
    return (text if len(text) <= LENGTH else f"{text[: LENGTH - 1]}…") or None
