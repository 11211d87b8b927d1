"""The items of a run that is planned: from files, from [sweep], or the workload's own, as one kind of input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmgpu import inputs
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import sweeps
from slurmgpu.plan.run_file import RunFile
from slurmgpu.report.build import is_complete
from slurmgpu.run.directory import Run
from slurmgpu.util.atomic_files import working_folder
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, cause_raised, retried
from slurmgpu.workload import Adapted

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


def items_of(
    config: RunFile,
    path: Path,
    workload: Adapted,
    stride: int,
    folder: Path,
    after: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    made: Path | None = None,
) -> Items:
    """The items of the run file at `path`, checked for the workload; files about them are made in `folder`.

    `after` is a run whose merged file may be the input before it exists. `made` is a file of items that is to move into
    the run directory.
    """
    index = folder / "input.idx"
    if made is not None:
        found, lines = _scan_made(made, index, stride, workload, path, None)
        return Items(found, [index, made], lines=lines)
    if config.input is not None:
        if config.sweep is not None:
            raise SlurmGPUError(f"{path}: input and [sweep] both say what the items are. Remove one of them.")
        spec = _promised(config.input, path.parent, after, index, stride)
        spec = spec or _scan(config.input, path.parent, index, stride, progress)
        lines = _check(spec, index, workload, path)
        return Items(spec, [index], lines=lines)
    configurations = None if config.sweep is None else sweeps.expand(config.sweep, config.seed)
    own = configurations or workload.default_items
    if not own:
        raise SlurmGPUError(
            f'{path}: input is missing. Name the files with the items, as in input = "items.jsonl", '
            f"or give configurations under [sweep]."
        )
    made = folder / sweeps.FILE
    sweeps.write(own, made)
    spec, lines = _scan_made(made, index, stride, workload, path, "[sweep]" if configurations else None)
    count = f"{len(own)} item{'' if len(own) == 1 else 's'} of the workload's own"
    said = sweeps.headline(config.sweep, len(own)) if config.sweep else count
    return Items(spec, [index, made], said, configurations, lines)


def _scan_made(
    made: Path, index: Path, stride: int, workload: Adapted, path: Path, called: str | None
) -> tuple[inputs.InputSpec, Sequence[str]]:
    """The spec of a file that moves into the run directory, and the workload's notes on its items."""
    spec = inputs.scan([made], index, stride=stride)
    lines = _check(spec, index, workload, path, called=called)
    # Relative to the run directory, which may be moved.
    return replace(spec, files=tuple(replace(file, path=made.name) for file in spec.files)), lines


def _check(
    spec: inputs.InputSpec,
    index: Path,
    workload: Adapted,
    path: Path,
    called: str | None = None,
) -> Sequence[str]:
    """Refuse items that the workload does not accept; its notes on the others."""
    inputs.check_fields(spec, index, workload.fields, f"Workload {workload.name}", workload.advice, called)
    if workload.check_input is None:
        return ()
    with working_folder(path.parent):
        return workload.check_input([Path(file.path) for file in spec.files], spec.n_items) or ()


def _scan(
    named: str | list[str], base: Path, index: Path, stride: int, progress: Callable[[int, int], None] | None
) -> inputs.InputSpec:
    def scan() -> inputs.InputSpec:
        return inputs.scan(inputs.find(named, base), index, stride=stride, progress=progress)

    return retried(lambda: cause_raised(scan), BRIEF_PATIENCE_S)


def _promised(
    named: str | list[str], base: Path, after: Run | None, index: Path, stride: int
) -> inputs.InputSpec | None:
    """The input that `after` will merge, if the run file names it and it is not complete yet."""
    if after is None or not isinstance(named, str) or is_complete(after):
        return None
    path = (base / Path(named).expanduser()).resolve()
    if path != after.merged.resolve():
        return None
    plan, columns = after.plan, ("index", *after.plan.columns)
    return inputs.promise(
        path, index, n_items=plan.n_items, columns=columns, fingerprint=plan.fingerprint, stride=stride
    )
