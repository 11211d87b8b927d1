"""The command show: rows of a run, with filters, also while it is running."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from slurmgpu.cli.commands.export import tell_missing
from slurmgpu.cli.console import result_json, say
from slurmgpu.cli.views.rows import show_rows
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import open_items
from slurmgpu.merge.item_names import find_item
from slurmgpu.results.published import RunRows
from slurmgpu.results.selection import Selection
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import count_of
from slurmgpu.util.item_ranges import parse_item_ranges, ranges_said
from slurmgpu.util.json_values import json_value

_RANGES = re.compile(r"[\d:,\s]*", re.ASCII)

ROWS_FORMAT = "slurmgpu rows"
ROWS_VERSION = 1


@dataclass(frozen=True)
class Wanted:
    """The rows and columns that a user asks for."""

    columns: Sequence[str]
    where: str | None
    items: str | None
    failed: bool
    n: int
    n_random: int | None
    seed: int
    with_items: bool


def show(run: Run, wanted: Wanted, *, as_json: bool) -> None:
    """Print rows of a run; what is missing goes to stderr."""
    plan, stop = run.plan, run.plan.ranges[-1][1]
    spans = [(0, stop)] if wanted.items is None else _spans_of(run, wanted.items, stop)
    asked = list(plan.columns) if not wanted.columns else wanted.columns
    names = [name for name in asked if name not in ("index", "error")]
    with RunRows(run) as rows:
        selection, limit = Selection(rows, ("index", "error", *names), wanted.where, spans, wanted.failed), wanted.n
        if wanted.n_random is not None:
            selection.spans, limit = _drawn(selection, wanted.n_random, wanted.seed), wanted.n_random
        plain = list(islice(selection.plain_rows(), limit)) if as_json else []
        found = [] if as_json else list(islice(selection.rows(), limit))
        indices = [row[0] for row in plain] or [row.index for row in found]
        data = items_of(run, indices) if wanted.with_items else {}
        n_there = sum(stop - start for span in spans for start, stop in rows.present(*span))
        n_missing = sum(plan.n_before(stop) - plan.n_before(start) for start, stop in spans) - n_there
        if as_json:
            head = {"format": ROWS_FORMAT, "version": ROWS_VERSION, "run": run.name, "run_dir": str(run.folder)}
            shown = [_as_json(names, row, data) for row in plain]
            result_json({**head, "n_missing": n_missing, "damaged": rows.problems, "rows": shown})
            return
        show_rows(found, {name: rows.columns[name] for name in names}, data)
        if not found:
            say("No row was chosen." if n_there else "No row is published yet.")
        elif wanted.n_random is None and len(found) == limit < n_there:
            is_filtered = wanted.failed or wanted.where is not None
            say(f"{len(found):,} of {'up to ' if is_filtered else ''}{count_of(n_there, 'row')}; -n shows more.")
        tell_missing(run, n_missing, rows.problems)


def _spans_of(run: Run, items: str, stop: int) -> list[tuple[int, int]]:
    """The items of `10:20,35`, or the one with this name in the run's key, `q17` or `id=q17`."""
    if _RANGES.fullmatch(items) or (run.plan.key is None and "=" not in items):
        spans, plan = parse_item_ranges(items, stop, "run", clip=True), run.plan
        if not any(plan.n_before(stop) - plan.n_before(start) for start, stop in spans):
            raise SlurmGPUError(f"--items {items}: {run.folder} has the items {ranges_said(plan.ranges)}.")
        return spans
    index = find_item(run, items)
    return [(index, index + 1)]


def _drawn(selection: Selection, n: int, seed: int) -> list[tuple[int, int]]:
    """The items of `n` rows, drawn at random from undamaged shards."""
    spans = selection.spans
    while True:
        present, selection.spans = selection.source.present(), spans
        drawn = [(index, index + 1) for index in selection.draw(n, seed)]
        selection.spans = drawn
        for _ in selection.blocks():  # reading them finds what is damaged
            pass
        if selection.source.present() == present:
            return drawn


def _as_json(names: Sequence[str], row: Sequence[Any], data: Mapping[int, Any]) -> dict[str, Any]:
    index, error, *values = row
    item = {"item": json_value(data[index])} if index in data else {}
    return {"index": index, "error": error, **item, "values": dict(zip(names, values, strict=True))}


def items_of(run: Run, indices: Sequence[int]) -> Mapping[int, Any]:
    """The input's data of items; an error's text for an item that could not be read."""
    with open_items(run) as read:
        found = zip(indices, read(indices), strict=True)
        return {index: str(data) if isinstance(data, ItemError) else data for index, data in found}
