"""From a run file to a plan: everything is checked here, before anything is queued or written."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from slurmgpu import __version__
from slurmgpu.code import importer, snapshots
from slurmgpu.code.loaded import namesakes_hidden
from slurmgpu.code.locator import own_modules
from slurmgpu.code.snapshots import Snapshot
from slurmgpu.code.taking import git_state, snapshot_of
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.kept import columns_kept, with_kept
from slurmgpu.loader.adapted import Adapted, near_misses
from slurmgpu.loader.build import build
from slurmgpu.loader.modules import at_planning, load_class
from slurmgpu.loader.names import hidden_by_built_in, resolve_use, title_of
from slurmgpu.loader.settings import UnknownSettingError, names_of_settings, settings_hints, texts_of_files
from slurmgpu.plan.container_spec import contain
from slurmgpu.plan.executors import EXECUTORS
from slurmgpu.plan.extension import Extension, extend
from slurmgpu.plan.items import Items, Look, items_of, some_of
from slurmgpu.plan.overrides import TABLES, Overrides
from slurmgpu.plan.placement import place
from slurmgpu.plan.run_file import Resources, RunFile, table_of
from slurmgpu.plan.shard_size import TARGET_SHARDS, parts_of, shard_size
from slurmgpu.plan.site_file import GivenRunFile, RunFileSource, path_of, read_run_file, substitutions
from slurmgpu.plan.sweep_keys import refuse_variants
from slurmgpu.run.directory import Run, refuse_existing
from slurmgpu.run.frozen_plan import Plan, Provenance
from slurmgpu.shards.columns import check_columns, columns_to_json
from slurmgpu.util import process_wide
from slurmgpu.util.atomic_files import working_folder
from slurmgpu.util.gpus import number_of
from slurmgpu.util.home import expanded
from slurmgpu.util.shared_files import status_of

LOOK = "-look"
"""What follows the name of a run in that of a look at it."""


@dataclass(frozen=True)
class Draft:
    """A run that is not written yet: its plan, directory, items, whose files are temporary, and code.

    `resumes`: the workload keeps the progress of its items; `notes` are for the user. With `replaces_look` an earlier
    look in its directory is removed before it is made.
    """

    plan: Plan
    run_dir: Path
    items: Items
    resources: Resources
    code: Snapshot
    resumes: bool = False
    notes: tuple[str, ...] = ()
    extension: Extension | None = None
    replaces_look: bool = False

    @property
    def n_missing(self) -> int:
        """How many shards are to be computed."""
        return self.plan.n_shards - (len(self.extension.shards) if self.extension else 0)

    def fill(self, run: Run) -> None:
        """Put into its run directory what is there before anything is submitted: code, and shards of another run."""
        snapshots.write(run.folder, self.code)
        if self.extension is not None:
            self.extension.put_into(run)


@dataclass(frozen=True)
class Allocation:
    """The number of tasks, how many of them may run at once, and the GPUs of each."""

    n_tasks: int
    n_concurrent: int
    gpus_per_task: int


@contextlib.contextmanager
def draft_run(
    run_file: RunFileSource,
    overrides: Mapping[str, Any] | None = None,
    run_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    after: Run | None = None,
    look: Look | None = None,
    extends: Run | None = None,
    records: Any = None,
    replaces_look: bool = False,
    most_shards: Callable[[int], int] = lambda n_items: TARGET_SHARDS,
) -> Iterator[Draft]:
    """The plan of a run file, while the `with` block lasts; SlurmGPUError if anything in it cannot work.

    `run_file` is its path, or a `GivenRunFile`.
    `after` is a run that this one waits for: its merged file may be the input before it exists. A `look` is a run of
    some of the items, beside the directory that the run of all would have. `extends` is a run of fewer items, whose
    shards are taken. `records` is a table from Python with an Arrow form, in place of `input`. A look takes the place
    of an earlier one, unless it has a `run_dir`; with `replaces_look` also there. `most_shards` says how many shards
    so many items have at most, unless the run file or the tasks say otherwise.
    """
    source = expanded(run_file).resolve() if isinstance(run_file, Path) else run_file
    path, config = path_of(source), read_run_file(source, overrides)
    refuse_variants(config, path)
    given = source if isinstance(source, GivenRunFile) else GivenRunFile({}, path.parent)
    asked = allocate(config.resources, n_shards=None)
    named = expanded(config.run_dir or f"runs/{path.stem}")
    if look is not None:
        if extends is not None:
            raise SlurmGPUError("--extend computes what an input has more than a run; leave out --items and --limit.")
        named = named.with_name(f"{named.name}{LOOK}")
    target = (path.parent / named if run_dir is None else expanded(run_dir)).absolute()
    refuse_odd_path(target, EXECUTORS.make(config.resources.executor).not_in_paths)
    replaces_look = look is not None and (replaces_look or run_dir is None) and _is_look(target)
    if not replaces_look:
        refuse_existing(target)
    with tempfile.TemporaryDirectory(prefix="slurmgpu-") as scratch, contextlib.ExitStack() as stack:
        with namesakes_hidden(path.parent):
            importer.forget_changed()
            before = set(sys.modules)
            full_name, settings, workload = _build(config, path.parent, overrides)
            imported = importer.note_imported(own_modules(sys.modules.keys() - before), path.parent)
            with working_folder(path.parent):
                placement = place(workload, config.resources, asked.gpus_per_task)
                settings |= workload.frozen_settings
                paths, environ, scripts = workload.paths, workload.environ, workload.scripts
                workload.check()
            notes = substitutions(source) + hidden_by_built_in(config.workload.use) + near_misses(workload)
            container = contain(config.container, full_name, source, overrides)
            if container is None and workload.check_here is not None:
                try:
                    with working_folder(path.parent):
                        workload.check_here()
                except SlurmGPUError as error:
                    if not (config.slurm.get("setup") and EXECUTORS.make(config.resources.executor).queues):
                        raise
                    notes.append(f"{error} As [slurm] setup may bring it, this is left to the tasks, which look again.")
            own = check_columns(workload.columns, title_of(full_name, "workload"))
            keep = columns_kept([*config.keep, *workload.kept_fields], config.rename, own)
            columns = columns_to_json(check_columns(with_kept(own, keep), "keep"))
            shard_items = config.shard_items or (None if extends is None else extends.plan.shard_items)
            batch_size, parts = _batch_size(config, workload), 1
            room = functools.cache(lambda: _room_beside(target, stack))
            fields = keep.values()
            items = items_of(
                config,
                path,
                workload,
                min(batch_size, shard_items or batch_size),
                Path(scratch),
                after,
                progress,
                room=room,
                kept=fields,
                records=records,
                made=given.items,
            )
            items = some_of(replace(items, files=[*items.files, *given.files]), look)
            spec = items.spec
            # The progress of an item that resumes is one task's, and the processes of a group call it together.
            divides = placement.processes == "one" and not workload.resumes
            if extends is not None and shard_items == extends.plan.shard_items and divides:
                parts = min(extends.plan.parts, workload.most_parts)
            if shard_items is None:
                size = shard_size(spec.n_items, batch_size, asked.n_concurrent, most_shards(spec.n_items))
                shard_items = size.n_items
                note = size.note
                if divides and min(shard_items, spec.n_items) == 1:
                    parts, in_parts = parts_of(spec.n_items, asked.n_concurrent, workload.most_parts)
                    note = in_parts or note
                notes += [note] if note else []
            plan = Plan(
                name=target.name,
                input=spec.to_json(),
                input_digest=spec.digest,
                n_items=spec.n_items,
                workload=full_name,
                search_path=str(path.parent),
                settings=settings,
                columns=columns,
                batch_size=min(batch_size, shard_items),
                shard_items=shard_items,
                seed=config.seed,
                lease_s=config.lease_s,
                margin_s=config.margin_s,
                auto_resubmit=config.auto_resubmit,
                resources=config.resources.model_dump(),
                slurm=config.slurm,
                merge=config.merge,
                provenance=_provenance(path, (overrides or {}).get("container", {}) if container else {}),
                container=container.to_json() if container else None,
                processes=placement.processes,
                placement=(*placement.lines, *items.lines),
                paths=paths,
                environ=environ,
                sample_s=config.sample_s,
                on_end=config.on_end or None,
                html=config.html,
                retries=config.workload.retries,
                keep=keep,
                key=config.key,
                track=config.track.to if config.track else (),
                look="look" if look else "",
                extends=() if extends is None else extends.plan.fingerprints,
                scripts=scripts,
                summarizes=workload.summarize is not None,
                exports=sorted(workload.exports),
                parts=parts,
            )
            extension = None if extends is None else extend(extends, plan, Path(scratch), workload.files_of_item)
            notes += [extension.describe(plan)] if extension else []
            also = [*imported, *given.modules]
            code = snapshot_of(plan, plan.container, plan.provenance["git"], also=also, texts=given.texts)
            draft = Draft(
                plan, target, items, config.resources, code, workload.resumes, tuple(notes), extension, replaces_look
            )
        yield draft


def _is_look(folder: Path) -> bool:
    return status_of(folder / "run.json") is not None and Run.open(folder).plan.look == "look"


def _room_beside(run_dir: Path, stack: contextlib.ExitStack) -> Path:
    """A temporary folder on the disk of the run directory, where what is made needs no copy and /tmp may be small."""
    there = next(folder for folder in run_dir.parents if folder.is_dir())
    room = tempfile.TemporaryDirectory(
        prefix=f".{run_dir.name}.", suffix=".partial", dir=there if os.access(there, os.W_OK) else None
    )
    return Path(stack.enter_context(room))


def workload_of(run_file: Path, overrides: Mapping[str, Any] | None = None) -> Adapted:
    """The workload that a run file names, with its settings, checked."""
    path = expanded(run_file).resolve()
    return _build(read_run_file(path, overrides), path.parent, overrides)[2]


def _build(config: RunFile, base: Path, overrides: Mapping[str, Any] | None) -> tuple[str, dict[str, Any], Adapted]:
    """The workload's full name, its settings as they will be frozen, and the workload."""
    full_name = resolve_use(config.workload.use, base)
    with process_wide.one_thread(), working_folder(base), at_planning(full_name):
        settings = _settings(full_name, config.settings, base)
        if isinstance(overrides, Overrides):
            overrides.refuse_ambiguous(full_name, names_of_settings(load_class(full_name, base)))
        try:
            return full_name, settings, build(full_name, settings, base)
        except UnknownSettingError as error:
            raise SlurmGPUError(f"{error}{_where_it_belongs(error.name, settings)}") from error


def _where_it_belongs(name: str, settings: Mapping[str, Any]) -> str:
    outer, dot, inner = name.partition(".")
    if dot:
        return f" A table is set whole: {outer}={{{inner}={json.dumps(settings[name])}}}."
    if name in RunFile.model_fields:
        return f" {name} is a key at the top of the run file, above its tables: set it there, or with -s .{name}=…."
    for table in TABLES:
        if (model := table_of((table,))) is not None and name in model.model_fields:
            return f" {name} is a key of [{table}] in the run file: set it there, or with -s {table}.{name}=…."
    return ""


def allocate(resources: Resources, n_shards: int | None) -> Allocation:
    """Tasks and GPUs by [resources], with at most as many tasks as shards: docs/reference/cli.md has the rule."""
    gpus, per_task, nodes = resources.gpus, resources.gpus_per_task, resources.nodes_per_task
    if gpus == 0:
        if per_task is not None:
            raise SlurmGPUError("gpus = 0 runs on CPUs, so gpus_per_task cannot be set; tasks says how many tasks.")
        n_concurrent, per_task = resources.tasks or 1, 0
    elif resources.array:
        per_task = per_task or 1
        if gpus % per_task:
            raise SlurmGPUError(f"gpus = {gpus} is not a multiple of gpus_per_task = {per_task}.")
        n_concurrent = gpus // per_task
    else:
        if per_task not in (None, gpus):
            raise SlurmGPUError(
                f"Without --array one task holds all of gpus = {gpus}, but gpus_per_task = {per_task}; add --array."
            )
        n_concurrent, per_task = 1, gpus
    if nodes > 1 and (per_task == 0 or per_task % nodes):
        raise SlurmGPUError(
            f"nodes_per_task = {nodes}, but a task has {number_of(per_task)}: expected a multiple of {nodes}, "
            f"the same number on each node. Correct gpus or gpus_per_task."
        )
    if nodes > 1 and resources.processes == "one":
        raise SlurmGPUError(
            f'nodes_per_task = {nodes}, but processes = "one": one process sees the GPUs of its own node only. '
            f'Set processes = "per-gpu".'
        )
    limit = n_shards or sys.maxsize
    n_tasks = min(resources.tasks or n_concurrent, limit)
    return Allocation(n_tasks, min(n_concurrent, n_tasks), per_task)


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
NOT_UTF8 = re.compile(r"[\ud800-\udfff]")
"""How Python has the bytes of a path that are no UTF-8."""


def refuse_odd_path(run_dir: Path, not_in_paths: str) -> None:
    """Raise SlurmGPUError for a run directory whose path Slurm would change, or that is no UTF-8.

    The executor refuses `not_in_paths`. Submitit and Slurm replace %j and other patterns anywhere in the path of a log;
    a backslash turns that off. A line break ends a line of #SBATCH, and versions of sbatch differ in how they read a
    quote in one.
    """
    path = str(run_dir)
    if found := CONTROL.search(path):
        what = f"the control character {found[0]!a}"
    elif found := NOT_UTF8.search(path):
        what = f"{found[0]!a}, a byte that is no UTF-8, as the files of a run and Slurm's messages are"
    elif "%" in path:
        what = "a %, which Slurm replaces by numbers of jobs in the paths of logs"
    elif odd := sorted({each for each in path if each in not_in_paths}):
        what = f"{' and '.join(odd)}, which versions of Slurm read differently"
    else:
        return
    raise SlurmGPUError(
        f"The path of the run directory {path!r} has {what}. "
        f"Name another with --run-dir, or run_dir in the run file, or rename the folder."
    )


def _batch_size(config: RunFile, workload: Adapted) -> int:
    asked = config.workload.batch_size
    if workload.takes_one:
        if asked in (None, 1):
            return 1
        own = " Under [settings], batch_size is its own." if "batch_size" in _hints(type(workload.user)) else ""
        raise SlurmGPUError(
            f"[workload] batch_size = {asked}, and {title_of(workload.name, 'workload')} computes items one by one: "
            f"remove it.{own}"
        )
    size = asked or workload.batch_size
    if size is None:
        raise SlurmGPUError(
            f"{title_of(workload.name)} has no batch_size, a whole number of at least 1. "
            f"Set it in the class or in [workload]."
        )
    return size


def _hints(cls: type) -> dict[str, Any]:
    try:
        return settings_hints(cls)
    except (NameError, TypeError):
        return {}  # annotations that exist for type checkers only


def _settings(full_name: str, settings: Mapping[str, Any], search_path: Path) -> dict[str, Any]:
    """The settings to freeze: plain JSON, of the types that the workload's __init__ is annotated with."""
    try:
        frozen: dict[str, Any] = json.loads(json.dumps(settings))
    except TypeError as error:
        raise SlurmGPUError(
            f"[settings] of {title_of(full_name, 'workload')}: {error}; use text, numbers, booleans and lists."
        ) from error
    cls = load_class(full_name, search_path)
    frozen |= texts_of_files(full_name, cls, frozen)
    hints = _hints(cls)
    for name, value in frozen.items():
        if name in hints:
            _check_type(full_name, name, value, hints[name])
    return frozen


def _check_type(full_name: str, name: str, value: Any, hint: Any) -> None:
    try:
        is_model = isinstance(hint, type) and hasattr(hint, "model_fields")
        adapter = TypeAdapter(hint, config=None if is_model else ConfigDict(arbitrary_types_allowed=True))
    except PydanticSchemaGenerationError:
        return
    try:
        # JSON mode, strict: "5" is no int, but 5 is a float and a list is a tuple.
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        # If a setting may be of several types, the deepest error is of the one that was meant.
        worst = max(error.errors(), key=lambda each: len(each["loc"]))
        problem, found, place = worst["msg"].removeprefix("Input "), worst.get("input", value), worst["loc"]
        where = f"setting {name!r}" + (f", at {place[-1]!r}," if place and found != value else "")
        as_text = _as_text(name, place, value) if worst["type"] == "string_type" else ""
        raise SlurmGPUError(f"{title_of(full_name)}: {where} {problem}; found {found!r}.{as_text}") from error


def _as_text(name: str, place: Sequence[str | int], value: Any) -> str:
    """How a number, true or false is written as text in the run file and with -s, to append to an error."""
    keys = [name]
    for part in place:
        if not isinstance(value, Mapping) or part not in value:
            break  # a list, or one of several types
        keys, value = [*keys, str(part)], value[part]
    if not isinstance(value, int | float):
        return ""
    text = f'"{json.dumps(value)}"'
    return f" As text: {keys[-1]} = {text}, on the command line -s '{'.'.join(keys)}={text}'."


def _provenance(run_file: Path, container: Mapping[str, Any]) -> Provenance:
    versions = {"python": platform.python_version(), "slurmgpu": __version__}
    versions |= {name: importlib.metadata.version(name) for name in ("numpy", "h5py", "submitit")}
    return {
        "run_file": str(run_file),
        "versions": versions,
        "git": git_state(run_file.parent),
        "container": dict(container),
    }
