"""Make a plan from a run file: everything is checked here, before anything is queued or written."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmgpu import __version__
from slurmgpu.code import snapshots
from slurmgpu.code.capture import git_state, snapshot_of, version_of
from slurmgpu.code.namesakes import importing_anew, namesakes_hidden
from slurmgpu.code.snapshots import Snapshot
from slurmgpu.containers.settings import Container
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.fields import columns_kept, with_kept
from slurmgpu.loader.adapted import Adapted, near_misses
from slurmgpu.loader.names import hidden_by_built_in, title_of
from slurmgpu.plan.allocation import Allocation, allocate
from slurmgpu.plan.checked_workload import batch_size_of, build_workload
from slurmgpu.plan.container_spec import contain
from slurmgpu.plan.executors import EXECUTORS
from slurmgpu.plan.extension import Extension, extend
from slurmgpu.plan.items import ItemRequest, Items, Look, Scans, items_of, items_of_look
from slurmgpu.plan.placement import place
from slurmgpu.plan.run_file import Resources, RunFile
from slurmgpu.plan.run_path import refuse_odd_path, run_path
from slurmgpu.plan.shard_size import TARGET_SHARDS, ShardSize, shard_size
from slurmgpu.plan.site_file import GivenRunFile, RunFileSource, path_of, read_run_file, substitutions
from slurmgpu.plan.sweep_keys import refuse_variants
from slurmgpu.plan.written_keys import written_in
from slurmgpu.run.creation import refuse_existing
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan, Provenance
from slurmgpu.run.submissions import Git
from slurmgpu.shards.columns import Column, check_columns, columns_to_json
from slurmgpu.util.amounts import count_of
from slurmgpu.util.process_wide import working_folder
from slurmgpu.util.shared_files import status_of
from slurmgpu.util.users import resolved
from slurmgpu.workload import Placement


@dataclass(frozen=True)
class Draft:
    """A run that is not written yet: its plan, directory, items (in temporary files) and code.

    `resumes`: the workload keeps the progress of its items; `notes` are for the user. With `replaces_look`, an earlier
    look in its directory is removed first.
    """

    plan: Plan
    run_dir: Path
    items: Items
    resources: Resources
    code: Snapshot
    resumes: bool
    notes: tuple[str, ...]
    extension: Extension | None
    replaces_look: bool

    @property
    def n_missing(self) -> int:
        """The number of shards to compute."""
        return self.plan.n_shards - (len(self.extension.shards) if self.extension else 0)

    def fill(self, run: Run) -> None:
        """Write what the run directory holds before submission: code, and shards of the run that this one extends."""
        snapshots.write(run.folder, self.code)
        if self.extension is not None:
            self.extension.put_into(run)


@contextlib.contextmanager
def draft_run(
    run_file: RunFileSource,
    overrides: Mapping[str, Any] | None = None,
    run_dir: Path | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    after: Sequence[Run] = (),
    look: Look | None = None,
    extends: Run | None = None,
    records: Any = None,
    replaces_look: bool = False,
    most_shards: Callable[[int], int] = lambda n_items: TARGET_SHARDS,
    scans: Scans | None = None,
    git: Callable[[Path], Git | None] = git_state,
) -> Iterator[Draft]:
    """The plan of a run file, for the duration of the `with` block. Raises SlurmGPUError if anything cannot work.

    `run_file` is its path, or a `GivenRunFile`. This run waits for the runs in `after`, one of whose merged files may
    be the input before it exists. A `look` computes some of the items, in a directory next to the one of the whole run;
    it replaces an earlier look, unless it has a `run_dir`, and with `replaces_look` also there. `extends` is a run of
    fewer items, whose shards are reused. `records` is a table from Python with an Arrow form that replaces `input`.
    `most_shards` gives the most shards for a number of items, unless the run file or the tasks say otherwise. `scans`
    has the inputs of a sweep's other runs, and `git` gives the state of a folder's repository.
    """
    source = resolved(run_file) if isinstance(run_file, Path) else run_file
    config, folder = read_run_file(source, overrides), path_of(source).parent
    written = written_in(path_of(source))  # now, as it may be edited while its input is read
    refuse_variants(config, path_of(source))
    if look is not None and extends is not None:
        raise SlurmGPUError("--extend computes all items that were added to the input; leave out --items and --limit.")
    given = source if isinstance(source, GivenRunFile) else GivenRunFile({}, folder)
    target = run_path(config, path_of(source), run_dir, is_look=look is not None)
    refuse_odd_path(target, EXECUTORS.make(config.resources.executor).not_in_paths)
    replaces_look = look is not None and (replaces_look or run_dir is None) and _is_look(target)
    if not replaces_look:
        refuse_existing(target)
    tasks = allocate(config.resources, n_shards=None)
    asked = _Asked(source, config, written, overrides or {}, target, tasks, extends, is_look=look is not None)
    with tempfile.TemporaryDirectory(prefix="slurmgpu-") as scratch, contextlib.ExitStack() as stack:
        with namesakes_hidden(folder):
            (full_name, settings, workload), imported = importing_anew(
                folder, lambda: build_workload(config, folder, overrides)
            )
            built = _built(asked, full_name, settings, workload)
            _refuse_incomplete(workload, after)
            request = ItemRequest(
                config,
                asked.path,
                workload,
                kept=built.keep.values(),
                folder=Path(scratch),
                room=functools.cache(lambda: room_beside(target, stack)),
                stride=min(built.batch_size, asked.shard_items or built.batch_size),
                after=after,
                progress=progress,
                scans=scans,
            )
            items = items_of(request, records=records, made=given.items)
            items = items_of_look(replace(items, files=[*items.files, *given.files]), look)
            size = _size_of(asked, built, items.spec.n_items, most_shards)
            plan = _plan_of(asked, built, items, size, git(folder))
            notes = [*built.notes, *([size.note] if size.note else [])]
            notes += _replaced(target, plan) if replaces_look else []
            extension = None if extends is None else extend(extends, plan, Path(scratch), workload.files_of_item)
            notes += [extension.describe(plan)] if extension else []
            also = [*imported, *given.modules]
            code = snapshot_of(plan, plan.container, plan.provenance["git"], also=also, texts=given.texts)
            draft = Draft(
                plan, target, items, config.resources, code, workload.resumes, tuple(notes), extension, replaces_look
            )
        yield draft


@dataclass(frozen=True)
class _Asked:
    """The run that a run file and its overrides ask for; `extends` is a run of fewer items."""

    source: RunFileSource
    config: RunFile
    written: dict[str, str]
    overrides: Mapping[str, Any]
    run_dir: Path
    tasks: Allocation
    extends: Run | None
    is_look: bool

    @property
    def path(self) -> Path:
        return path_of(self.source)

    @property
    def shard_items(self) -> int | None:
        """The items of a shard, if they are asked for."""
        return self.config.shard_items or (None if self.extends is None else self.extends.plan.shard_items)


@dataclass(frozen=True)
class _Built:
    """The workload, built and checked, and the parts of it that go into the plan."""

    full_name: str
    settings: Mapping[str, Any]
    workload: Adapted
    placement: Placement
    paths: Sequence[str]
    environ: Mapping[str, str]
    scripts: Sequence[str]
    container: Container | None
    columns: Mapping[str, Column]
    keep: Mapping[str, str]
    batch_size: int
    notes: Sequence[str]


def _built(asked: _Asked, full_name: str, settings: dict[str, Any], workload: Adapted) -> _Built:
    config, folder = asked.config, asked.path.parent
    with working_folder(folder):
        placement = place(workload, config.resources, asked.tasks.gpus_per_task)
        settings |= workload.frozen_settings
        paths, environ, scripts = workload.paths, workload.environ, workload.scripts
        workload.check()
    notes = substitutions(asked.source) + hidden_by_built_in(config.workload.use) + near_misses(workload)
    container = contain(config.container, full_name, asked.source, asked.overrides)
    if container is None:
        notes += _check_here(workload, config, folder)
    own = check_columns(workload.columns, title_of(full_name, "workload"))
    keep = columns_kept([*config.keep, *workload.kept_fields], config.rename, own)
    columns = check_columns(with_kept(own, keep), "keep")
    size = batch_size_of(config, workload)
    return _Built(
        full_name, settings, workload, placement, paths, environ, scripts, container, columns, keep, size, notes
    )


def _size_of(asked: _Asked, built: _Built, n_items: int, most_shards: Callable[[int], int]) -> ShardSize:
    """The shards' size: as asked for, as in the run that is extended, or as suits the tasks."""
    # An item that resumes keeps its progress in one task, and the processes of a group call it together.
    divides = built.placement.processes == "one" and not built.workload.resumes
    most_parts = built.workload.most_parts if divides else 1
    if asked.shard_items is None:
        return shard_size(n_items, built.batch_size, asked.tasks.n_concurrent, most_shards(n_items), most_parts)
    if asked.extends is not None and asked.shard_items == asked.extends.plan.shard_items:
        return ShardSize(asked.shard_items, min(asked.extends.plan.parts, most_parts))
    return ShardSize(asked.shard_items)


def _plan_of(asked: _Asked, built: _Built, items: Items, size: ShardSize, git: Git | None) -> Plan:
    config, workload = asked.config, built.workload
    return Plan(
        name=asked.run_dir.name,
        input=items.spec.to_json(),
        input_digest=items.spec.digest,
        n_items=items.spec.n_items,
        workload=built.full_name,
        search_path=str(asked.path.parent),
        settings=built.settings,
        columns=columns_to_json(built.columns),
        batch_size=min(built.batch_size, size.n_items),
        shard_items=size.n_items,
        seed=config.seed,
        lease_s=config.lease_s,
        margin_s=config.margin_s,
        auto_resubmit=config.auto_resubmit,
        resources=config.resources.model_dump(),
        slurm=config.slurm,
        merge=config.merge,
        provenance=_provenance(asked, git, asked.overrides.get("container", {}) if built.container else {}),
        container=built.container.to_json() if built.container else None,
        processes=built.placement.processes,
        placement=(*built.placement.lines, *items.lines),
        paths=built.paths,
        environ=built.environ,
        sample_s=config.sample_s,
        on_end=config.on_end or None,
        html=config.html,
        retries=config.workload.retries,
        keep=built.keep,
        key=config.key,
        track=config.track.to if config.track else (),
        look="look" if asked.is_look else "",
        extends=() if asked.extends is None else asked.extends.plan.fingerprints,
        scripts=built.scripts,
        summarizes=workload.summarize is not None,
        exports=sorted(workload.exports),
        parts=size.parts,
    )


def _replaced(folder: Path, plan: Plan) -> list[str]:
    """A note on the rows of an earlier look at other items, which this look removes."""
    earlier = Run.open(folder)
    if earlier.plan.input["ranges"] == plan.input["ranges"] or not (published := earlier.published()):
        return []
    n_rows = sum(stop - start for start, stop in map(earlier.plan.bounds, published))
    return [
        f"This look replaces the former one, at other items, and its {count_of(n_rows, 'row')} in {folder}. To keep "
        "the rows of a look, give it a --run-dir."
    ]


def _is_look(folder: Path) -> bool:
    return status_of(folder / "run.json") is not None and Run.open(folder).plan.look == "look"


def _refuse_incomplete(workload: Adapted, after: Sequence[Run]) -> None:
    """Refuse a workload that reads the merged file of an incomplete run that this run does not wait for."""
    waited_for = {run.folder.resolve() for run in after}
    for folder in map(Path, workload.awaits):
        if folder.resolve() not in waited_for:
            raise SlurmGPUError(
                f"{title_of(workload.name)} reads {folder / 'merged.h5'}, but that run is not complete. If it is "
                f"queued or running, make this run wait for it: --after {shlex.quote(str(folder))} (in Python: "
                f"after=[…]). Otherwise `slurmgpu resubmit {shlex.quote(str(folder))}` completes it."
            )


def _check_here(workload: Adapted, config: RunFile, folder: Path) -> list[str]:
    """Let the workload check this machine; return a note instead of its error if the tasks' nodes may differ."""
    if workload.check_here is None:
        return []
    try:
        with working_folder(folder):
            workload.check_here()
    except SlurmGPUError as error:
        if not (config.slurm.get("setup") and EXECUTORS.make(config.resources.executor).queues):
            raise
        return [f"{error} [slurm] setup may provide it, so the tasks check again."]
    return []


def room_beside(run_dir: Path, stack: contextlib.ExitStack) -> Path:
    """A temporary folder on the run directory's file system: files move there without a copy, and /tmp may be small."""
    there = next(folder for folder in run_dir.parents if folder.is_dir())
    room = tempfile.TemporaryDirectory(
        prefix=f".{run_dir.name}.", suffix=".partial", dir=there if os.access(there, os.W_OK) else None
    )
    return Path(stack.enter_context(room))


def _provenance(asked: _Asked, git: Git | None, container: Mapping[str, Any]) -> Provenance:
    versions = {"python": platform.python_version(), "slurmgpu": __version__}
    versions |= {name: version_of(name) for name in ("numpy", "h5py", "submitit")}
    return {
        "run_file": str(asked.path),
        "written": asked.written,
        "versions": versions,
        "git": git,
        "container": dict(container),
    }
