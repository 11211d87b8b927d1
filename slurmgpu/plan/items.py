"""The items of a run that is planned: from files, from [sweep], or the workload's own, as one kind of input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmgpu import inputs
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import file_items, sweeps
from slurmgpu.inputs.keys import check_names
from slurmgpu.loader.adapted import Adapted
from slurmgpu.loader.names import title_of
from slurmgpu.plan.run_file import RunFile
from slurmgpu.plan.site_file import named
from slurmgpu.report.build import is_complete
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import count_of
from slurmgpu.util.item_ranges import parse_item_ranges
from slurmgpu.util.process_wide import working_folder
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, cause_raised, retried
from slurmgpu.util.users import expanded

Configurations = Sequence[Mapping[str, Any]]
Progress = Callable[[int, int], None] | None
"""Is called with the bytes of the input that were read, and with all of them."""
Room = Callable[[], Path]
SWEEP = "[sweep]"
"""What an input made of [sweep] is called."""


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
    """Some items of an input: those of `items`, such as "10:20,35", and of these the first `limit`."""

    items: str | None
    limit: int | None = None

    def __str__(self) -> str:
        """The options that ask for it."""
        options = {"--items": self.items, "--limit": self.limit}
        return " ".join(f"{name} {value}" for name, value in options.items() if value is not None)

    def ranges(self, n_items: int) -> list[tuple[int, int]]:
        """The items as ranges (start, stop), in input order; SlurmGPUError if the input lacks one."""
        left = n_items if self.limit is None else self.limit
        if left < 1:
            raise SlurmGPUError(f"--limit {self.limit}: expected how many items to compute, 1 at least.")
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
class _Asked:
    """The run file at `path` and its workload, whose items are read; `kept` are fields that rows keep.

    `index` is the index to make, with a place for each `stride` items.
    """

    config: RunFile
    path: Path
    workload: Adapted
    kept: Collection[str]
    index: Path
    stride: int

    def check(self, spec: inputs.InputSpec, called: str | None = None) -> Sequence[str]:
        """Refuse items that the workload does not accept; notes on the others."""
        workload, key, title = self.workload, self.config.key, title_of(self.workload.name)
        inputs.check_fields(spec, self.index, self.kept, "keep", {}, called)
        inputs.check_fields(spec, self.index, [key] if key else (), "key", {}, called)
        notes = [said] if key and (said := check_names(spec, self.index, key)) else []
        advice = workload.advice
        if called == SWEEP:
            also = " Vary it as well, or name an input whose items have it."
            advice = {name: f"{advice.get(name, '')}{also}" for name in workload.fields}
        inputs.check_fields(spec, self.index, workload.fields, title, advice, called)
        inputs.refuse_fields(spec, self.index, workload.not_fields, title, workload.advice, called)
        if workload.check_input is None:
            return notes
        with working_folder(self.path.parent):
            return [*notes, *(workload.check_input(spec.readable, spec.n_items) or ())]

    def repacked(self, spec: inputs.InputSpec) -> Items:
        """The items of files that were repacked, and move into the run directory."""
        folder, lines = Path(spec.files[0].path).parent.parent, self.check(spec)
        files = (replace(file, path=str(Path(file.path).relative_to(folder))) for file in spec.files)
        return Items(replace(spec, files=tuple(files)), [self.index, folder / inputs.FOLDER], lines=lines)


def items_of(
    config: RunFile,
    path: Path,
    workload: Adapted,
    stride: int,
    folder: Path,
    after: Run | None,
    progress: Progress,
    *,
    room: Room,
    kept: Collection[str],
    records: Any,
    made: Path | None,
) -> Items:
    """The items of the run file at `path`, checked for the workload; files about them are made in `folder`.

    `after` is a run whose merged file may be the input before it exists. `kept` are fields that rows keep. `records`
    is a table from Python, in place of `input`; `made` is a file of items that is to move into the run directory. What
    is repacked, and may be large, is made in the folder that `room` gives.
    """
    asked = _Asked(config, path, workload, kept, folder / "input.idx", stride)
    if made is not None:
        found = inputs.scan([made], asked.index, stride=stride)
        return Items(_in_run(found), [asked.index, made], lines=asked.check(found, "items"))
    if records is not None:
        return asked.repacked(inputs.repack_table(records, room(), asked.index, stride=stride))
    return _without_files(asked, folder) if config.input is None else _of_input(asked, folder, after, progress, room)


def _of_input(asked: _Asked, folder: Path, after: Run | None, progress: Progress, room: Room) -> Items:
    config, base = asked.config, asked.path.parent
    assert config.input is not None
    if config.sweep is not None:
        sweeps.expand(config.sweep, config.seed)  # which refuses it: there is no key in it
    passed = [note] if (note := inputs.passed_over(config.input, base)) else []
    if (listed := _listed(asked, config.input, folder)) is not None:
        lines = asked.check(listed.spec, f"the input {config.input}")
        items = replace(listed, spec=_in_run(listed.spec), lines=lines)
    else:
        spec = _promised(asked, config.input, after) or _scan(asked, config.input, progress, room)
        items = asked.repacked(spec) if spec.repacked else Items(spec, [asked.index], lines=asked.check(spec))
    return replace(items, lines=[*passed, *items.lines])


def _without_files(asked: _Asked, folder: Path) -> Items:
    """The items of [sweep], or the workload's own."""
    config = asked.config
    configurations = None if config.sweep is None else sweeps.expand(config.sweep, config.seed)
    own = configurations or asked.workload.default_items
    if not own:
        raise SlurmGPUError(
            f'{named(asked.path)}: input is missing. Name the files with the items, as in input = "items.jsonl", '
            f"or give configurations under [sweep]."
        )
    made = folder / sweeps.FILE
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
    """The items of a look; all of them without one."""
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


def _scan(asked: _Asked, named: str | list[str], progress: Progress, room: Room) -> inputs.InputSpec:
    base, index, stride = asked.path.parent, asked.index, asked.stride
    query = inputs.query_in(named, base)

    def scan() -> inputs.InputSpec:
        if query is not None:
            return inputs.repack_query(query, room(), index, stride=stride, progress=progress)
        return inputs.scan(inputs.find(named, base), index, stride=stride, progress=progress, room=room)

    return retried(lambda: cause_raised(scan), BRIEF_PATIENCE_S)


def _listed(asked: _Asked, named: str | list[str], folder: Path) -> Items | None:
    """The files of an input as items, if they are; their listing lies in `folder`."""
    made = folder / file_items.FILE

    def scan() -> Items | None:
        if (found := inputs.list_files(named, asked.path.parent)) is None:
            return None
        said, folders = found.write(made)
        spec = inputs.scan([made], asked.index, stride=asked.stride, of_format=file_items.Files())
        return Items(replace(spec, folders=folders), [asked.index, made], said)

    return retried(lambda: cause_raised(scan), BRIEF_PATIENCE_S)


def _promised(asked: _Asked, named: str | list[str], after: Run | None) -> inputs.InputSpec | None:
    """The input that `after` will merge, if the run file names it and it is not complete yet."""
    if after is None or not isinstance(named, str) or is_complete(after):
        return None
    path = (asked.path.parent / expanded(named)).resolve()
    if path != after.merged.resolve():
        return None
    plan, columns = after.plan, ("index", *after.plan.columns)
    return inputs.promise(
        path, asked.index, n_items=plan.n_items, columns=columns, fingerprint=plan.fingerprint, stride=asked.stride
    )
