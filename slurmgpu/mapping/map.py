"""`slurmgpu.map`: hand over a function and items, and get a run."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmgpu import api
from slurmgpu.api import RunHandle
from slurmgpu.code import functions
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import probe
from slurmgpu.inputs.python_items import is_table, write_table, write_values
from slurmgpu.mapping.annotations import Type, annotated_types, described
from slurmgpu.plan.planner import TARGET_SHARDS, Draft, allocate, draft_run
from slurmgpu.plan.site_file import GivenRunFile
from slurmgpu.results import open as open_merged
from slurmgpu.shards.column_types import RESULT, columns_of_types, type_for_both
from slurmgpu.shards.columns import Column, columns_to_json
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.plurals import count_of
from slurmgpu.util.shared_files import status_of

log = logging.getLogger(__name__)

WORKLOAD = "slurmgpu.workloads.function:Function"
FEWEST_SHARDS, ITEMS_OF_SHORT_SHARD = 128, 64
"""A run has so many shards, if it has as many items, and more only of so many items each."""

Columns = Column | str | Mapping[str, Column | str]


def map(  # noqa: A001 - slurmgpu.map, as the built-in map and multiprocessing's
    function: Callable[..., Any],
    items: str | os.PathLike[str] | Iterable[Any],
    *,
    load: Callable[..., Any] | None = None,
    columns: Columns | None = None,
    batch_size: int | None = None,
    name: str | None = None,
    run_dir: str | Path | None = None,
    image: str | Path | None = None,
    inject: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    profile: str | None = None,
    wait: bool = False,
    **resources: Any,
) -> RunHandle:
    """Call a function for each item, in the tasks of a run; its rows are the columns of the results.

    `items` are the path or the glob of an input, or the items themselves: mappings, text, numbers, a data frame, an
    Arrow table. `function(item)` returns a mapping of columns to values, a dataclass, or one value, the column
    `result`. It is called as `function(item, load())` if there is `load`, which each worker calls once, on its node;
    with `batch_size` it gets a list of items, and returns a list. What it raises is the error of its item.

    A function of a module is imported by tasks; one of a notebook, a script or another function is kept in the run
    directory by value. `columns` are types, as in `{"score": "float32", "label": Text()}`; else the annotation of
    the returned value says them, else the first item, which is computed before anything else.

    The run directory is `run_dir`, or runs/`name`, or by the function's name. `resources` are keys of [resources],
    `overrides` and `profile` as in `submit`. The run works in the background: on Slurm, or with executor="local" in
    processes that outlive this one; with `wait` it has ended, and is merged, when this returns.
    """
    base, is_batched = Path.cwd(), batch_size is not None
    declared = _declared(columns) or annotated_types(function, batched=is_batched)
    known = None if not declared or None in declared.values() else declared
    target = Path(run_dir).expanduser() if run_dir is not None else _target(base, name, function)
    with tempfile.TemporaryDirectory(prefix="slurmgpu-map-") as scratch:
        settings, files, modules = _function(function, load, Path(scratch), base)
        made, settings["items"], named = _items(items, Path(scratch))
        settings |= {"batched": is_batched, **({"columns": known} if known else {"learn": True})}
        tables = {"input": named, "workload": {"use": WORKLOAD, "batch_size": batch_size}, "settings": settings}
        values = api.overrides_of(None, image, resources, overrides, profile)
        with draft_run(GivenRunFile(tables, base, made, files, modules), values, target) as draft:
            for note in draft.plan.placement:
                log.warning("%s", note)
            draft = _with_larger_shards(draft, values)
            api.submission_of(draft, None, inject)  # finds errors before an item is computed
            if known is None:
                draft = _with_columns(draft, {**_learnt(draft), **{k: v for k, v in declared.items() if v is not None}})
            handle = api.submit_draft(draft, None, inject=inject, detach=True)
    for note in handle.outcome.notes if handle.outcome else ():
        log.warning("%s", note)
    if wait:
        handle.wait()
    return handle


def _function(
    function: Callable[..., Any], load: Callable[..., Any] | None, scratch: Path, base: Path
) -> tuple[dict[str, Any], list[Path], Sequence[str]]:
    """The settings that name the functions, files with them for the run directory, and modules that they need."""
    for each in (function, load):
        if each is not None and not callable(each):
            raise SlurmGPUError(f"{each!r} is no function; expected one that takes an item.")
    if inspect.iscoroutinefunction(function):
        raise SlurmGPUError(f"{functions.shown_name(function)} is a coroutine: expected a plain function.")
    names = functions.name_of(function), None if load is None else functions.name_of(load)
    if names[0] is not None and (load is None or names[1] is not None):
        return {"function": names[0], "load": names[1]}, [], ()
    packed = functions.pack({"function": function, "load": load}, base)
    files = [scratch / functions.PICKLE]
    write_bytes(files[0], packed.content, mode=0o600)
    if packed.source is not None:
        files.append(scratch / functions.SOURCE)
        files[1].write_text(packed.source, "utf-8")
    pickled = {"sha256": packed.sha256, "python": functions.minor_version()}
    shown = {"function": functions.shown_name(function), "load": None if load is None else functions.shown_name(load)}
    return {**shown, "pickled": pickled}, files, packed.modules


def _items(items: Any, scratch: Path) -> tuple[Path | None, str, str | None]:
    """The file of items that are in memory, how the function gets them back, and the input if they are in files."""
    if isinstance(items, str | os.PathLike):
        return None, "mapping", os.fspath(items)
    if is_table(items):
        return write_table(items, scratch), "mapping", None
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise SlurmGPUError(f"items is a {type(items).__name__}; expected a list, a table, or the path of an input.")
    made, kind = write_values(items, scratch)
    return made, kind, None


def _target(base: Path, name: str | None, function: Callable[..., Any]) -> Path:
    """The run directory: of that name, or the next that is free of those by the function's name."""
    if name is not None:
        return base / "runs" / name
    stem = functions.shown_name(function)
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    return next(path for each in names if status_of(path := base / "runs" / each) is None)


def _declared(columns: Columns | None) -> dict[str, Type]:
    given = columns if isinstance(columns, Mapping) else {} if columns is None else {RESULT: columns}
    if columns is not None and not given:
        raise SlurmGPUError('columns is empty; expected a type for each column, as in {"score": "float32"}.')
    return {name: described(column) if isinstance(column, Column) else column for name, column in given.items()}


def _with_larger_shards(draft: Draft, values: Mapping[str, Any]) -> Draft:
    """The draft with fewer shards than by default: calls of a function may take a millisecond each."""
    plan = draft.plan
    if values.get("shard_items") is not None:
        return draft
    n_tasks = allocate(draft.resources, n_shards=None).n_tasks
    n_shards = min(TARGET_SHARDS, max(FEWEST_SHARDS, 4 * n_tasks, plan.n_items // ITEMS_OF_SHORT_SHARD))
    n_batches = -(-plan.n_items // (plan.batch_size * n_shards))
    return replace(draft, plan=replace(plan, shard_items=plan.batch_size * n_batches))


def _learnt(draft: Draft) -> dict[str, Type]:
    """The types of the columns by the rows of the first batch, which a run of its own computes."""
    log.info("computing the first %s, to learn the columns", count_of(draft.plan.batch_size, "item"))
    small = probe.draft_part(draft, [(0, min(draft.plan.batch_size, draft.plan.n_items))])
    run, report = api.compute_probe(small, on_status=None)
    said = "so that the columns are not known, and nothing was submitted"
    if report["complete"] and (errors := report["errors"]):
        raise SlurmGPUError(
            f"Item {errors[0]['index']} failed, {said}: {errors[0]['message']} Its log is in {run.logs}."
        )
    if (failed := probe.why_failed(run, report)) is not None:
        raise SlurmGPUError(f"The first item failed, {said}: {failed.failure}: {failed.message} Its log: {failed.log}")
    with open_merged(run.merged) as merged:
        rows: list[dict[str, str | None]] = merged["types"][:]
    types: dict[str, Type] = {}
    for row in rows:
        for name, kind in row.items():
            known = types.get(name)
            types[name] = type_for_both(known if isinstance(known, str) else None, kind)
    return types


def _with_columns(draft: Draft, types: Mapping[str, Type]) -> Draft:
    """The draft of the run itself, with its columns."""
    if unknown := [name for name, kind in types.items() if kind is None]:
        line = ", ".join(f"{name!r}: {kind or 'text'!r}" for name, kind in types.items())
        raise SlurmGPUError(
            f"The first item has nothing in the column {unknown[0]!r} that would tell its type. "
            f"Say it, as in columns={{{line}}}."
        )
    columns = columns_of_types(types, "The function's result")
    settings = {name: value for name, value in draft.plan.settings.items() if name != "learn"}
    plan = replace(draft.plan, columns=columns_to_json(columns), settings={**settings, "columns": dict(types)})
    return replace(draft, plan=plan)
