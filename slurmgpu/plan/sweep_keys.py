"""The keys of [sweep] that vary the run, and those that vary its items."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import sweeps
from slurmgpu.plan.overrides import TABLES
from slurmgpu.plan.run_file import RunFile
from slurmgpu.plan.site_file import named
from slurmgpu.util.toml import parts_of


def split_sweep(config: RunFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """[sweep] as the part that varies the run, with keys such as `settings.lr`, and the part that varies items."""
    table = config.sweep or {}
    has_input = config.input is not None or "input" in table
    if has_input:
        return dict(_flat(table, deep=True)), {}
    flat = dict(_flat(table))
    names = {key for key in flat if _is_of_table(key)}
    if not names:
        return {}, dict(table)
    of_runs: dict[str, Any] = {}
    of_items: dict[str, Any] = {}
    for key, value in flat.items():
        if key == sweeps.ZIP and isinstance(value, list):
            for group in value:
                inside = [name in names for name in group] if isinstance(group, list) else []
                if any(inside) and not all(inside):
                    raise SlurmGPUError(
                        f"[sweep] zip: {', '.join(map(str, group))} mix keys of the run with keys of its items, which "
                        f"vary independently. Put them into separate groups, or name an input."
                    )
                part = of_runs if any(inside) else of_items
                part.setdefault(key, []).append(group)
        else:
            (of_runs if key in names else of_items)[key] = value
    if set(of_items) == {sweeps.RANDOM}:  # there is nothing else that may be drawn
        return {**of_runs, **of_items}, {}
    return of_runs, of_items


def refuse_variants(config: RunFile, path: Path) -> None:
    """Raise SlurmGPUError if [sweep] of a run file makes several runs."""
    of_runs, _ = split_sweep(config)
    if of_runs:
        keys = ", ".join(key for key in of_runs if key not in (sweeps.ZIP, sweeps.RANDOM))
        raise SlurmGPUError(
            f"{named(path)}: [sweep] varies {keys}, which makes a run for each value; expected a single run here. "
            f"`slurmgpu submit` and slurmgpu.submit_all submit all of them."
        )


def _flat(table: Mapping[str, Any], before: str = "", *, deep: bool = False) -> Iterator[tuple[str, Any]]:
    """The keys of [sweep], those within tables of the run file as `settings.lr`; with `deep` within any table."""
    for name, value in table.items():
        # A name at the top may be a dotted one in quotes already.
        key = f"{before}.{_quoted(name)}" if before else name
        is_distribution = isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in sweeps.DISTRIBUTIONS
        if isinstance(value, Mapping) and value and not is_distribution and (deep or before or name in TABLES):
            yield from _flat(value, key)
        else:
            yield key, value


def _quoted(name: str) -> str:
    return json.dumps(name) if "." in name else name


def _is_of_table(key: str) -> bool:
    first, *rest = parts_of(key)
    return bool(rest) and first in TABLES
