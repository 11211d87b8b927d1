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


def items_of(
    config: RunFile,
    path: Path,
    workload: Adapted,
    stride: int,
    folder: Path,
    after: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    room: Callable[[], Path],
    kept: Collection[str] = (),
    records: Any = None,
    made: Path | None = None,
) -> Items:
    """The items of the run file at `path`, checked for the workload; files about them are made in `folder`.

    `after` is a run whose merged file may be the input before it exists. `kept` are fields that rows keep. `records`
    is a table from Python, in place of `input`; `made` is a file of items that is to move into the run directory. What
    is repacked, and may be large, is made in the folder that `room` gives.
    """
    index = folder / "input.idx"
    if made is not None:
        found = inputs.scan([made], index, stride=stride)
        lines = _check(found, index, workload, path, config.key, kept, "items")
        return Items(_in_run(found), [index, made], lines=lines)
    if records is not None:
        packed = inputs.repack_table(records, room(), index, stride=stride)
        return _repacked(packed, index, workload, path, config.key, kept)
    if config.input is not None:
        if config.sweep is not None:
            sweeps.expand(config.sweep, config.seed)  # which refuses it: there is no key in it
        passed = [note] if (note := inputs.passed_over(config.input, path.parent)) else []
        if (listed := _listed(config.input, path.parent, folder, index, stride)) is not None:
            lines = _check(listed.spec, index, workload, path, config.key, kept, f"the input {config.input}")
            return replace(listed, spec=_in_run(listed.spec), lines=[*passed, *lines])
        spec = _promised(config.input, path.parent, after, index, stride)
        spec = spec or _scan(config.input, path.parent, index, stride, progress, room)
        if spec.repacked:
            repacked = _repacked(spec, index, workload, path, config.key, kept)
            return replace(repacked, lines=[*passed, *repacked.lines])
        lines = _check(spec, index, workload, path, config.key, kept)
        return Items(spec, [index], lines=[*passed, *lines])
    configurations = None if config.sweep is None else sweeps.expand(config.sweep, config.seed)
    own = configurations or workload.default_items
    if not own:
        raise SlurmGPUError(
            f'{named(path)}: input is missing. Name the files with the items, as in input = "items.jsonl", '
            f"or give configurations under [sweep]."
        )
    made = folder / sweeps.FILE
    sweeps.write(own, made)
    spec = inputs.scan([made], index, stride=stride)
    called = "[sweep]" if configurations else None
    lines = _check(spec, index, workload, path, config.key, kept, called)
    spec = _in_run(spec)
    count = f"{len(own)} item{'' if len(own) == 1 else 's'} of the workload's own"
    said = sweeps.headline(config.sweep, len(own)) if config.sweep else count
    return Items(spec, [index, made], said, configurations, lines)


def some_of(items: Items, look: Look | None) -> Items:
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


def _repacked(
    spec: inputs.InputSpec, index: Path, workload: Adapted, path: Path, key: str | None, kept: Collection[str]
) -> Items:
    """The items of files that were repacked, and move into the run directory."""
    folder = Path(spec.files[0].path).parent.parent
    lines = _check(spec, index, workload, path, key, kept)
    files = (replace(file, path=str(Path(file.path).relative_to(folder))) for file in spec.files)
    return Items(replace(spec, files=tuple(files)), [index, folder / inputs.FOLDER], lines=lines)


def _check(
    spec: inputs.InputSpec,
    index: Path,
    workload: Adapted,
    path: Path,
    key: str | None,
    kept: Collection[str],
    called: str | None = None,
) -> Sequence[str]:
    """Refuse items that the workload does not accept; notes on the others."""
    inputs.check_fields(spec, index, kept, "keep", {}, called)
    inputs.check_fields(spec, index, [key] if key else (), "key", {}, called)
    notes = [said] if key and (said := check_names(spec, index, key)) else []
    inputs.check_fields(spec, index, workload.fields, title_of(workload.name), workload.advice, called)
    inputs.refuse_fields(spec, index, workload.not_fields, title_of(workload.name), workload.advice, called)
    if workload.check_input is None:
        return notes
    with working_folder(path.parent):
        return [*notes, *(workload.check_input(spec.readable, spec.n_items) or ())]


def _scan(
    named: str | list[str],
    base: Path,
    index: Path,
    stride: int,
    progress: Callable[[int, int], None] | None,
    room: Callable[[], Path],
) -> inputs.InputSpec:
    query = inputs.query_in(named, base)

    def scan() -> inputs.InputSpec:
        if query is not None:
            return inputs.repack_query(query, room(), index, stride=stride, progress=progress)
        return inputs.scan(inputs.find(named, base), index, stride=stride, progress=progress, room=room)

    return retried(lambda: cause_raised(scan), BRIEF_PATIENCE_S)


def _listed(named: str | list[str], base: Path, folder: Path, index: Path, stride: int) -> Items | None:
    """The files of an input as items, if they are; their listing lies in `folder`."""
    made = folder / file_items.FILE

    def scan() -> Items | None:
        if (found := inputs.list_files(named, base)) is None:
            return None
        said, folders = found.write(made)
        spec = inputs.scan([made], index, stride=stride, of_format=file_items.Files())
        return Items(replace(spec, folders=folders), [index, made], said)

    return retried(lambda: cause_raised(scan), BRIEF_PATIENCE_S)


def _promised(
    named: str | list[str], base: Path, after: Run | None, index: Path, stride: int
) -> inputs.InputSpec | None:
    """The input that `after` will merge, if the run file names it and it is not complete yet."""
    if after is None or not isinstance(named, str) or is_complete(after):
        return None
    path = (base / expanded(named)).resolve()
    if path != after.merged.resolve():
        return None
    plan, columns = after.plan, ("index", *after.plan.columns)
    return inputs.promise(
        path, index, n_items=plan.n_items, columns=columns, fingerprint=plan.fingerprint, stride=stride
    )
