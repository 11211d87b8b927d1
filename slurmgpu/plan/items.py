"""The items of a planned run, from files, from [sweep] or from the workload itself, as one kind of input."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slurmgpu import inputs
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import file_items, sweeps
from slurmgpu.inputs.keys import check_names
from slurmgpu.loader.adapted import Adapted
from slurmgpu.loader.names import title_of
from slurmgpu.plan.extension import link_or_copy
from slurmgpu.plan.run_file import RunFile
from slurmgpu.plan.site_file import named
from slurmgpu.report.completeness import is_complete
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import count_of
from slurmgpu.util.item_ranges import parse_item_ranges
from slurmgpu.util.process_wide import working_folder
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, cause_raised, retried, status_of
from slurmgpu.util.users import expanded, resolved

Configurations = Sequence[Mapping[str, Any]]
SWEEP = "[sweep]"
"""The name of an input that is made from [sweep]."""


@dataclass(frozen=True)
class Items:
    """The input of the plan, and the files about it for the run directory.

    `said` describes items that are not from the user's files; `configurations` are those of a sweep; `lines` are the
    workload's notes on the items.
    """

    spec: inputs.InputSpec
    files: Sequence[Path]
    said: str | None = None
    configurations: Configurations | None = None
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Look:
    """Some items of an input: the first `limit` of those in `items`, such as "10:20,35"."""

    items: str | None
    limit: int | None = None

    def __str__(self) -> str:
        """The options that the user gave for it."""
        options = {"--items": self.items, "--limit": self.limit}
        return " ".join(f"{name} {value}" for name, value in options.items() if value is not None)

    def ranges(self, n_items: int) -> list[tuple[int, int]]:
        """The items as ranges (start, stop), in input order; SlurmGPUError if the input lacks one."""
        left = n_items if self.limit is None else self.limit
        if left < 1:
            raise SlurmGPUError(f"--limit {self.limit}: expected the number of items to compute, at least 1.")
        if self.items is not None and not self.items.strip():
            raise SlurmGPUError("--items names no item; expected numbers and ranges, such as 0:100,417.")
        found = parse_item_ranges(self.items or "0:", n_items, "input")
        for place, (start, stop) in enumerate(found):
            if left <= stop - start:
                return [*found[:place], (start, start + left)]
            left -= stop - start
        return found


def look_at(items: str | None, limit: int | None) -> Look | None:
    """The look that these options ask for; None if they ask for all items."""
    return None if items is None and limit is None else Look(items, limit)


@dataclass(frozen=True)
class Scans:
    """The inputs that were read for the runs of a sweep: their indices in `folder`, repacked files in `room`."""

    folder: Path
    room: Callable[[], Path]
    _found: dict[Any, tuple[inputs.InputSpec, Path]] = field(default_factory=dict)
    _repacked: dict[Any, inputs.InputSpec] = field(default_factory=dict)

    def scan(
        self, named: str, paths: Sequence[Path], asked: ItemRequest, read: Callable[[], inputs.InputSpec]
    ) -> inputs.InputSpec:
        """The result of `read` for these files, and their index; `read` is called once for equal files.

        Repacked files are linked, so that each run has them in its directory. `named` is a query, or "".
        """
        # If a file is missing, `read` raises the error.
        files = (
            named,
            *(
                (path, (status := status_of(path)) and (status.st_ino, status.st_size, status.st_mtime_ns))
                for path in paths
            ),
        )
        if (known := self._found.get(key := (asked.stride, files))) is not None:
            shutil.copyfile(known[1], asked.index)
            return known[0]
        if (repacked := self._repacked.get(files)) is not None:
            return inputs.publish(replace(_linked(repacked, asked.room()), stride=asked.stride), asked.index)
        spec = read()
        if spec.repacked:  # these move into the directory of one run
            self._repacked[files] = _linked(spec, self.room() / str(len(self._repacked)))
        else:
            kept = self.folder / f"{len(self._found)}.idx"
            self._found[key] = spec, shutil.copyfile(asked.index, kept)
        return spec


def _linked(spec: inputs.InputSpec, room: Path) -> inputs.InputSpec:
    """Repacked files in another room."""
    folder = room / inputs.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for file in spec.files:
        link_or_copy(Path(file.path), folder / Path(file.path).name)
    return replace(spec, files=tuple(replace(file, path=str(folder / Path(file.path).name)) for file in spec.files))


@dataclass(frozen=True)
class ItemRequest:
    """The run file at `path` and its workload, and what is needed to read the workload's items.

    `kept` are the fields that rows keep. Files about the items are written to `folder`; repacked files, which may be
    large, to the folder that `room` returns. The index has one entry per `stride` items. The merged file of a run in
    `after` may be the input before it exists. `progress` is called with the bytes of the input that were read so far,
    and with the total. `scans` has the inputs of a sweep's other runs.
    """

    config: RunFile
    path: Path
    workload: Adapted
    kept: Collection[str]
    folder: Path
    room: Callable[[], Path]
    stride: int
    after: Sequence[Run]
    progress: Callable[[int, int], None] | None
    scans: Scans | None

    @property
    def index(self) -> Path:
        """The index that is made."""
        return self.folder / "input.idx"

    def check(self, spec: inputs.InputSpec, called: str | None = None) -> Sequence[str]:
        """Refuse items that the workload does not accept; notes on the others."""
        workload, key, title = self.workload, self.config.key, title_of(self.workload.name)
        given = spec.files[0].source or spec.files[0]  # the user does not know the path of a repacked file
        fields = inputs.InputFields(spec, self.index, called or f"the input {given.path}")
        fields.require(self.kept, "keep")
        fields.require([key] if key else (), "key")
        notes = [said] if key and (said := check_names(spec, self.index, key)) else []
        advice = workload.advice
        if called == SWEEP:
            also = " Add it to [sweep], or name an input whose items have it."
            advice = {name: f"{advice.get(name, '')}{also}" for name in workload.fields}
        fields.require(workload.fields, title, advice)
        fields.refuse(workload.not_fields, title, workload.advice)
        if workload.check_input is None:
            return notes
        with working_folder(self.path.parent):
            return [*notes, *(workload.check_input(spec.readable, spec.n_items) or ())]

    def repacked(self, spec: inputs.InputSpec, called: str | None = None) -> Items:
        """The items of files that were repacked, and move into the run directory."""
        folder, lines = Path(spec.files[0].path).parent.parent, self.check(spec, called)
        files = (replace(file, path=str(Path(file.path).relative_to(folder))) for file in spec.files)
        return Items(replace(spec, files=tuple(files)), [self.index, folder / inputs.FOLDER], lines=lines)


def items_of(asked: ItemRequest, *, records: Any = None, made: Path | None = None) -> Items:
    """The items of a run file, checked for its workload.

    `records` is a table from Python that replaces `input`; `made` is a file of items that moves into the run directory.
    """
    if made is not None:
        found = inputs.scan([made], asked.index, stride=asked.stride)
        return Items(_in_run(found), [asked.index, made], lines=asked.check(found, "items"))
    if records is not None:
        return asked.repacked(inputs.repack_table(records, asked.room(), asked.index, stride=asked.stride), "the table")
    return _without_files(asked) if asked.config.input is None else _of_input(asked)


def _of_input(asked: ItemRequest) -> Items:
    config, base = asked.config, asked.path.parent
    assert config.input is not None
    if config.sweep is not None:
        sweeps.expand(config.sweep, config.seed)  # raises: [sweep] has no key
    passed = [note] if (note := inputs.passed_over(config.input, base)) else []
    if (listed := _listed(asked, config.input)) is not None:
        lines = asked.check(listed.spec, f"the input {config.input}")
        items = replace(listed, spec=_in_run(listed.spec), lines=[*listed.lines, *lines])
    else:
        spec = _promised(asked, config.input) or _scan(asked, config.input)
        items = asked.repacked(spec) if spec.repacked else Items(spec, [asked.index], lines=asked.check(spec))
    return replace(items, lines=[*passed, *items.lines])


def _without_files(asked: ItemRequest) -> Items:
    """The items of [sweep], or the workload's own."""
    config = asked.config
    configurations = None if config.sweep is None else sweeps.expand(config.sweep, config.seed)
    own = configurations or asked.workload.default_items
    if not own:
        raise SlurmGPUError(
            f'{named(asked.path)}: input is missing. Name the files with the items, such as input = "items.jsonl", '
            f"or give configurations in [sweep]."
        )
    made = asked.folder / sweeps.FILE
    sweeps.write(own, made)
    spec = inputs.scan([made], asked.index, stride=asked.stride)
    lines = asked.check(spec, SWEEP if configurations else None)
    said = (
        sweeps.headline(config.sweep, len(own))
        if config.sweep
        else f"{count_of(len(own), 'item')} of the workload's own"
    )
    return Items(_in_run(spec), [asked.index, made], said, configurations, lines)


def items_of_look(items: Items, look: Look | None) -> Items:
    """The items of a look; all items without one."""
    if look is None:
        return items
    spec = items.spec.taking(look.ranges(items.spec.n_items))
    files = "" if items.said else f" in {count_of(len(spec.files), 'file')}"
    said = f"a look: {spec.n_items:,} of {count_of(items.spec.n_items, 'item')}{files}, by {look}"
    configurations = items.configurations
    if configurations is not None:
        configurations = [each for span in spec.ranges or () for each in configurations[slice(*span)]]
    said = f"{items.said}; {said}" if items.said else said
    return replace(items, spec=spec, said=said, configurations=configurations)


def _in_run(spec: inputs.InputSpec) -> inputs.InputSpec:
    """The spec of files in the run directory, relative to that, as it may be moved."""
    return replace(spec, files=tuple(replace(file, path=Path(file.path).name) for file in spec.files))


def _scan(asked: ItemRequest, named: str | list[str]) -> inputs.InputSpec:
    base, index, stride, progress = asked.path.parent, asked.index, asked.stride, asked.progress
    query = inputs.query_in(named, base)

    def scan() -> inputs.InputSpec:
        if query is None:
            paths = inputs.find(named, base)
            read = partial(inputs.scan, paths, index, stride=stride, progress=progress, room=asked.room)
        else:
            paths = [query.path]
            read = partial(inputs.repack_query, query, asked.room(), index, stride=stride, progress=progress)
        return read() if asked.scans is None else asked.scans.scan(str(query or ""), paths, asked, read)

    return retried(lambda: cause_raised(scan), BRIEF_PATIENCE_S)


def _listed(asked: ItemRequest, named: str | list[str]) -> Items | None:
    """The files of an input as items, with their listing; None for files that hold items."""
    made = asked.folder / file_items.FILE

    def scan() -> Items | None:
        if (found := inputs.list_files(named, asked.path.parent)) is None:
            return None
        said, folders = found.write(made)
        spec = inputs.scan([made], asked.index, stride=asked.stride, of_format=file_items.Files())
        lines = _same_names(asked, found.same_keys)
        return Items(replace(spec, folders=folders), [asked.index, made], said, lines=lines)

    return retried(lambda: cause_raised(scan), BRIEF_PATIENCE_S)


def _same_names(asked: ItemRequest, same_keys: tuple[int, str] | None) -> list[str]:
    """A note if calls get the key of a file, by which they may name what they write, and files share it."""
    if same_keys is None or "key" not in asked.workload.fields:
        return []
    n_files, key = same_keys
    return [
        f"Of the files, {n_files} share their key with another, such as {key!r}: what calls write under {{key}} is "
        "overwritten."
    ]


def _promised(asked: ItemRequest, named: str | list[str]) -> inputs.InputSpec | None:
    """The input, if the run file names merged files of runs before that are not complete yet; else None."""
    names = [named] if isinstance(named, str) else named
    before = {name: run for name in names if (run := _incomplete(asked, name)) is not None}
    if not before:
        return None
    specs = [_promise(asked, before[name]) if name in before else _scan(asked, [name]) for name in names]
    return inputs.concatenate(specs, asked.index)


def _incomplete(asked: ItemRequest, name: str) -> Run | None:
    path = resolved(asked.path.parent / expanded(name))
    before = next((run for run in asked.after if run.merged.resolve() == path), None)
    return None if before is None or is_complete(before) else before


def _promise(asked: ItemRequest, before: Run) -> inputs.InputSpec:
    plan, columns = before.plan, ("index", *before.plan.columns)
    path = before.merged.resolve()
    return inputs.promise(
        path, n_items=plan.n_items, columns=columns, fingerprint=plan.fingerprint, stride=asked.stride
    )
