"""The columns of a function without types: learnt from the rows of a probe."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.fields import columns_kept, with_kept
from slurmgpu.mapping.annotations import Type
from slurmgpu.operations import probe
from slurmgpu.operations.replacement import room
from slurmgpu.plan.planner import Draft
from slurmgpu.report.report_file import Report
from slurmgpu.results import open as open_merged
from slurmgpu.run.directory import Run
from slurmgpu.shards.column_types import columns_of_types, type_for_both
from slurmgpu.shards.columns import columns_to_json
from slurmgpu.util.amounts import count_of

log = logging.getLogger(__name__)

PROBE_ENDS_S = 3
"""Seconds that the job which merged the probe gets to end."""

Types = Mapping[str, str | None]
"""The types of a row's values by column; None for a value that fits several, such as None."""


@dataclass
class _Seen:
    """The types of the good rows of a run's first items and of its last item, and how many of the first have a row."""

    first: list[Types] = field(default_factory=list)
    last: Types | None = None
    n_first: int = 0


def learn_types(draft: Draft) -> dict[str, str | None]:
    """The types of the columns, from the rows of the first batch, which a run of its own computes with the last item.

    SlurmGPUError if the first batch fails, or if rows have arrays of different shapes.
    """
    n_items, n_first = draft.plan.n_items, min(draft.plan.batch_size, draft.plan.n_items)
    # The last: an array whose length differs from item to item would have the first one's shape, and all others fail.
    last = [(n_items - 1, n_items)] if n_first < n_items else []
    and_last = " and the last one" if last else ""
    log.info("computing the first %s%s, to learn the columns", count_of(n_first, "item"), and_last)
    run, report = probe.compute_probe(probe.draft_part(draft, [(0, n_first), *last]), on_status=None)
    seen = _seen(run, n_first) if report["n_rows"] else _Seen()
    _refuse_failed(run, report, seen, n_first)
    found: dict[str, str | None] = {}
    for row in seen.first:
        found |= {name: _for_both(name, found.get(name), kind) for name, kind in row.items()}
    for name, kind in (seen.last or {}).items():
        # Of the other types the first rows decide: a last item that is odd shall not change those of all.
        known = found.get(name, "")
        if known is None or ("[" in known and "[" in (kind or "")):
            found[name] = _for_both(name, known, kind)
    # None is NaN in a column of floats or complex numbers; one of text, integers or booleans has no None.
    rows = [*seen.first, *([seen.last] if seen.last else [])]
    has_none = {name for name in found if any(row.get(name, "") is None for row in rows)}
    return {name: "json" if name in has_none and _has_no_none(kind) else kind for name, kind in found.items()}


def _has_no_none(kind: str | None) -> bool:
    return kind is not None and "[" not in kind and not kind.startswith(("float", "complex"))


def _seen(run: Run, n_first: int) -> _Seen:
    found = _Seen()
    with open_merged(run.merged) as merged:
        for index, is_bad, types in zip(merged.index.tolist(), merged.failed, merged["types"][:], strict=True):
            found.n_first += index < n_first
            if is_bad:
                continue
            if index < n_first:
                found.first.append(types)
            else:
                found.last = types
    return found


def _refuse_failed(run: Run, report: Report, seen: _Seen, n_first: int) -> None:
    """Raise SlurmGPUError if no first item has a good row, or if the probe failed before it had all of them."""
    said = "so the columns are unknown, and nothing was submitted"
    if seen.n_first < n_first and (failed := probe.why_failed(run, report)) is not None:
        raise SlurmGPUError(
            f"The function failed, {said}: {failed.failure}: {failed.message.rstrip('.')}. Its log: {failed.log}"
        )
    if not seen.first:
        first = report["errors"][0]
        name = f" ({first['name']})" if first["name"] else ""
        why = f"{first['message'].rstrip('.')}. Its log is in {run.logs}."
        declare = 'If only this item fails, declare the columns: columns={"score": "float32", "label": "text"}.'
        raise SlurmGPUError(f"Item {first['index']}{name} failed, {said}: {why} {declare}")


def _for_both(name: str, known: str | None, kind: str | None) -> str | None:
    try:
        return type_for_both(known, kind)
    except SlurmGPUError as error:
        raise SlurmGPUError(
            f"The column {name!r}, in the first batch and the last item: {error} Nothing was submitted."
        ) from error


def with_columns(draft: Draft, types: Mapping[str, Type]) -> Draft:
    """The draft of the run itself, with columns of these types. SlurmGPUError if the type of one is unknown."""
    if unknown := [name for name, kind in types.items() if kind is None]:
        line = ", ".join(f"{name!r}: {kind or 'json'!r}" for name, kind in types.items())
        raise SlurmGPUError(
            f"No item that was computed has a value in the column {unknown[0]!r} that tells its type. "
            f"Declare it: columns={{{line}}}."
        )
    plan, columns = draft.plan, columns_of_types(types, "The function's result")
    columns_kept([*plan.keep.values()], {field: name for name, field in plan.keep.items() if name != field}, columns)
    settings = {name: value for name, value in plan.settings.items() if name != "learn"} | {"columns": dict(types)}
    return replace(draft, plan=replace(plan, columns=columns_to_json(with_kept(columns, plan.keep)), settings=settings))


def remove_probe(draft: Draft) -> None:
    """Remove the probe from which the columns of a draft were learnt, unless its jobs take long to end."""
    folder = probe.probe_dir(draft.run_dir)
    for left in range(PROBE_ENDS_S, -1, -1):
        try:
            with room(folder, "probe"):  # the earlier one is removed
                return
        except (SlurmGPUError, OSError) as error:  # the run is submitted: a probe that stays does no harm
            if not left:
                log.info("%s stays: %s", folder, error)
            else:
                time.sleep(1)
