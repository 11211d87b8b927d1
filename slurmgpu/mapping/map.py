"""`slurmgpu.map`: compute a function of items, as a run."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmgpu.api import RunHandle, overrides_of
from slurmgpu.code import functions, pickling
from slurmgpu.code.import_guard import refuse_if_importing
from slurmgpu.code.namesakes import refuse_other_modules
from slurmgpu.containers.runtime import runtime_named
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.executors.detached import Background
from slurmgpu.executors.registry import executor_named
from slurmgpu.inputs.python_items import index_names, is_table, without_index, write_values
from slurmgpu.mapping.annotations import Type, annotated_types, described
from slurmgpu.mapping.learnt_columns import learn_types, remove_probe, with_columns
from slurmgpu.operations.earlier_run import compare_earlier, earlier_run_dir
from slurmgpu.operations.submit import submission_of, submit_draft
from slurmgpu.plan.allocation import allocate
from slurmgpu.plan.overrides import SET, Overrides
from slurmgpu.plan.planner import Draft, draft_run
from slurmgpu.plan.run_file import Resources
from slurmgpu.plan.shard_size import TARGET_SHARDS
from slurmgpu.plan.site_file import GivenRunFile, read_run_file
from slurmgpu.progress import telling
from slurmgpu.run.creation import reserved_run_dir
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.mapped_function import MAPPED
from slurmgpu.shards.column_types import RESULT
from slurmgpu.shards.columns import Column
from slurmgpu.task.preflight import check_here
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.shared_files import FULL
from slurmgpu.util.users import expanded

log = logging.getLogger(__name__)

FEWEST_SHARDS, ITEMS_OF_SHARD = 256, 256
"""The least number of shards of a run with enough items, and the items of a shard beyond that: see why-elastic.md."""

ARGUMENTS = {
    "input": "the argument `items`",
    "run_dir": "the arguments `run_dir` and `name`",
    "workload.use": "the argument `function`",
    "workload.batch_size": "the argument `batch_size`",
}
"""The keys of a run file for which `map` has arguments."""

CALLED = "the arguments of slurmgpu.map"

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
    """Call a function for each item, in the tasks of a run; what it returns is a row of the results.

    `items` is the path or the glob of an input, or the items themselves: mappings, texts, numbers, a data frame, an
    Arrow table. `function(item)` returns a mapping of columns to values, a dataclass, or one value, which becomes the
    column `result`. With `load`, which each worker calls once on its node, it is called as `function(item, loaded)`.
    With `batch_size` it gets a list of items, and returns a list of rows, or columns. An exception becomes the item's
    error.

    Tasks import the function if it is defined in a module. A function of a notebook, a script or another function is
    saved by value in the run directory. `columns` are types, as in `{"score": "float32", "label": Text()}`. Without
    them, types come from the return annotation, or else from the first batch and the last item, which are computed
    before the run.

    The run directory is `run_dir`, or runs/`name`, or runs/ and the function's name. `resources` are keys of
    [resources]; `overrides` and `profile` are as in `submit`. The run works in the background: on Slurm, or with
    executor="local" in processes that outlive this one. With `wait`, the call returns once the run has ended and is
    merged. SlurmGPUError for anything that the user can fix, before anything is queued.
    """
    refuse_if_importing("slurmgpu.map")
    _refuse_unknown(resources)
    declared = _declared(columns) or annotated_types(function, batched=batch_size is not None)
    known = None if not declared or None in declared.values() else declared
    values = overrides_of(None, image, resources, overrides, profile)
    _refuse_given_twice(values)
    workload: dict[str, Any] = {"use": MAPPED, "batch_size": batch_size}
    asked = read_run_file(GivenRunFile({"workload": workload}, Path.cwd(), called=CALLED), values).resources
    with contextlib.ExitStack() as open_ones:
        # Entered first, so that the background process imports its modules while this one plans.
        background = None
        if executor_named(asked.executor).detaches:
            n_slots = allocate(asked, None).n_concurrent
            background = open_ones.enter_context(Background(asked.executor, n_slots, MAPPED))
        scratch = Path(open_ones.enter_context(tempfile.TemporaryDirectory(prefix="slurmgpu-map-")))
        given = _run_file(function, load, items, workload, known, scratch)
        target, former = _place(run_dir, name, functions.shown_name(function), given.folder / "runs", open_ones)
        if names := index_names(items):
            log.warning("Items lack the frame's index, %s: pass frame.reset_index() to include it.", ", ".join(names))
        records = without_index(items) if is_table(items) else None
        draft = open_ones.enter_context(draft_run(given, values, target, records=records, most_shards=_most_shards))
        for note in (*draft.notes, *draft.plan.placement):
            log.warning("%s", note)
        refuse_other_modules(draft.code.files, given.modules, given.folder)
        if "pickled" in draft.plan.settings:
            _refuse_other_python(draft)
            if asked.gpus and asked.device == "auto" and executor_named(asked.executor).queues:
                _warn_of_cpu(function, load)
        submission_of(draft, inject=inject)  # finds errors before an item is computed
        if known is None:
            told = {name: kind for name, kind in declared.items() if kind is not None}
            draft = with_columns(draft, {**learn_types(draft), **told})
        begun = None if former is None else _about_former(former, draft)
        submitted = submit_draft(
            draft,
            on_tick=telling(),
            inject=inject,
            begun=begun,
            background=background,
            tell=lambda note: log.warning("%s", note),
        )
        if known is None:
            remove_probe(draft)
    for note in submitted.outcome.notes if submitted.outcome else ():
        log.warning("%s", note)
    handle = RunHandle(submitted.run, submitted.outcome)
    if wait:
        handle.wait()
    return handle


def _place(
    run_dir: str | Path | None, name: str | None, stem: str, folder: Path, open_ones: contextlib.ExitStack
) -> tuple[Path, Path | None]:
    """The run directory and, if its name comes from the function's name `stem`, the previous run of that name."""
    if run_dir is not None:
        return expanded(run_dir), None
    if name is None:
        target = open_ones.enter_context(reserved_run_dir(folder, stem))
        return target, earlier_run_dir(target, stem)
    if not isinstance(name, str) or not Path(name).parts:
        raise SlurmGPUError(f"name is {name!r}; expected the name of a folder, such as 'first' for runs/first.")
    return folder / name, None


def _refuse_unknown(resources: Mapping[str, Any]) -> None:
    own = inspect.signature(map).parameters.keys() - {"resources"}
    if unknown := [name for name in resources if name not in Resources.model_fields]:
        suggestion = did_you_mean(unknown[0], own | Resources.model_fields.keys())
        raise SlurmGPUError(f"slurmgpu.map has no argument {unknown[0]!r}.{suggestion}")


def _refuse_given_twice(values: Overrides) -> None:
    """Refuse values of `overrides` or a profile that arguments of `map` set as well: they would be ignored."""
    for (table, key), given_by in values.sources.items():
        whole, source = ".".join(filter(None, (table, key))), "overrides" if given_by == SET else given_by
        if table == "sweep":
            raise SlurmGPUError(f"{source} has [sweep], but slurmgpu.map makes one run. Call it once for each value.")
        if table == "settings":
            if key in Resources.model_fields:
                raise SlurmGPUError(
                    f"{source} has {key!r}, a key of [resources]. Write it as an argument: map(…, {key}=…)."
                )
            raise SlurmGPUError(
                f"{source} has the setting {key!r}, but a function has no settings. Pass values to the function with "
                f"functools.partial or `load`."
            )
        if argument := ARGUMENTS.get(whole):
            raise SlurmGPUError(f"{source}, {whole!r}, and {argument} set the same key. Leave one of them out.")


def _run_file(
    function: Callable[..., Any],
    load: Callable[..., Any] | None,
    items: Any,
    workload: Mapping[str, Any],
    columns: Mapping[str, Type] | None,
    scratch: Path,
) -> GivenRunFile:
    """The call of `map` as a run file; `scratch` gets what moves into the run directory. None: columns are learnt."""
    base, argv = Path.cwd(), functions.arguments_read()
    settings, files, modules, texts = _functions(function, load, scratch, base, argv)
    made, settings["items"] = _written(items, scratch)
    settings["batched"] = workload["batch_size"] is not None
    settings |= {"columns": columns} if columns else {"learn": True}
    settings |= {} if argv is None else {"argv": argv}
    named = os.fspath(items) if isinstance(items, str | os.PathLike) else None
    tables = {"input": named, "workload": workload, "settings": settings}
    return GivenRunFile(tables, base, made, files, modules, texts, CALLED)


def _functions(
    function: Callable[..., Any],
    load: Callable[..., Any] | None,
    scratch: Path,
    base: Path,
    argv: Sequence[str] | None,
) -> tuple[dict[str, Any], list[Path], Sequence[str], Sequence[str]]:
    """The settings that name the functions, files for the run directory, modules that the functions need, and texts.

    The texts, from their source, may name files that the functions read.
    """
    if function is None:
        raise SlurmGPUError("function is None; expected a function that takes an item.")
    functions.check(function, load, loads=load is not None)
    names = pickling.name_of(function), None if load is None else pickling.name_of(load)
    if names[0] is not None and (load is None or names[1] is not None):
        named = [name.partition(":")[0] for name in names if name is not None]
        return {"function": names[0], "load": names[1]}, [], named, ()
    packed = functions.pack({"function": function, "load": load}, base, argv)
    files = [scratch / functions.PICKLE]
    write_bytes(files[0], packed.content, mode=0o600)
    if packed.source is not None:
        files.append(scratch / functions.SOURCE)
        files[1].write_text(packed.source, "utf-8")
    shown = {"function": functions.shown_name(function), "load": None if load is None else functions.shown_name(load)}
    return {**shown, "pickled": packed.record}, files, packed.modules, packed.texts


def _refuse_other_python(draft: Draft) -> None:
    """Refuse an image whose Python cannot read a pickle of this Python, if the image can be started here."""
    container = draft.plan.container
    if container is None or shutil.which(runtime_named(container["runtime"]).program) is None:
        return  # a worker compares the versions, too
    seen = check_here(draft.plan, 0, "cpu")
    found, here = seen.found.get("python"), functions.minor_version()
    if found is None:
        log.warning("the image's Python is unknown: %s", "; ".join(seen.problems))
    elif not f"{found}.".startswith(f"{here}."):
        raise SlurmGPUError(
            f"The image has Python {found}, but this is Python {here}, so a function cannot be sent there by value. "
            f"Put it into a module, which tasks import, or call map in Python {'.'.join(found.split('.')[:2])}."
        )


def _warn_of_cpu(*given: Callable[..., Any] | None) -> None:
    """Warn of `device = "cuda" if torch.cuda.is_available() else "cpu"` where there is no GPU, as on a login node."""
    names = {name: None for each in given if each is not None for name in pickling.of_cpu(each)}
    if names:
        log.warning(
            "%s: 'cpu' was chosen on this machine, and goes with the function to tasks that have GPUs. Choose the "
            "device in `load`, which runs there: load(task) has it as task.device.",
            ", ".join(names),
        )


def _written(items: Any, scratch: Path) -> tuple[Path | None, str]:
    """Write items in memory to a file, unless they are a table; return its path, and the items' kind."""
    if isinstance(items, str | os.PathLike) or is_table(items):
        return None, "mapping"
    if isinstance(items, Mapping | bytes | bytearray) or not _can_be_iterated(items):
        one = (
            f" Pass one of its values, such as items[{next(iter(items))!r}]."
            if isinstance(items, Mapping) and items
            else ""
        )
        raise SlurmGPUError(
            f"items has the type {type(items).__name__}; expected a list, a table, or the path of an input.{one}"
        )
    try:
        return write_values(items, scratch)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise SlurmGPUError(
            f"The items do not fit into {scratch.parent}: {error.strerror}. Free space there, or set TMPDIR to another "
            f"folder before Python starts."
        ) from error


def _can_be_iterated(items: Any) -> bool:
    try:
        return isinstance(items, Iterable) and iter(items) is not None
    except TypeError:  # a zero-dimensional array has the method, but raises
        return False


def _about_former(folder: Path, draft: Draft) -> str:
    handle = f"slurmgpu.open_run({str(folder)!r})"
    rows, resubmit = f"{handle} has its rows", f"{handle}.resubmit()"
    return compare_earlier(
        folder, draft, "function", rows, resubmit, lambda earlier: _as_pickled_in(earlier, draft.plan)
    )


def _as_pickled_in(former: Plan, plan: Plan) -> Plan:
    """The plan with the former plan's pickle if the function is the same: its pickle differs between processes."""
    then, now = (each.settings.get("pickled", {}) for each in (former, plan))
    same = then and all(then[key] == now.get(key) for key in ("same", "python"))
    return replace(plan, settings={**plan.settings, "pickled": then}) if same else plan


def _declared(columns: Columns | None) -> dict[str, Type]:
    given = columns if isinstance(columns, Mapping) else {} if columns is None else {RESULT: columns}
    if columns is not None and not given:
        raise SlurmGPUError('columns is empty; expected a type for each column, such as {"score": "float32"}.')
    for name, column in given.items():
        if not isinstance(column, str | Column):
            raise SlurmGPUError(
                f"The column {name!r} has the type {column!r}; expected text, such as {{{name!r}: 'float32'}}, or a "
                f"column such as slurmgpu.Text()."
            )
    return {name: described(column) if isinstance(column, Column) else column for name, column in given.items()}


def _most_shards(n_items: int) -> int:
    """The most shards; fewer than by default, because a call of a function may take only a millisecond."""
    return min(TARGET_SHARDS, max(FEWEST_SHARDS, n_items // ITEMS_OF_SHARD))
