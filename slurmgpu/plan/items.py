"""The items of a run that is planned: from files, from [sweep], or the workload's own, as one kind of input."""

from __future__ import annotations

import re
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
from slurmgpu.util.plurals import count_of
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


@dataclass(frozen=True)
class Look:
    """Some items of an input: those of `items`, such as "10:20,35", and of these the first `limit`."""

    items: str | None = None
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
        found: list[tuple[int, int]] = []
        for start, stop in sorted(_range(part, n_items) for part in (self.items or "0:").split(",")):
            start = max(start, found[-1][1] if found else 0)
            if found and found[-1][1] == start:
                start = found.pop()[0]
            if start < stop:
                found.append((start, stop))
        for place, (start, stop) in enumerate(found):
            if left <= stop - start:
                return [*found[:place], (start, start + left)]
            left -= stop - start
        return found


def look_at(items: str | None, limit: int | None) -> Look | None:
    """The look that these options ask for; None if they ask for all items."""
    return None if items is None and limit is None else Look(items, limit)


def _range(text: str, n_items: int) -> tuple[int, int]:
    """The items of `10:20`, `10:`, `:20` or `35`, counted from 0, without the end, as in Python."""
    if (match := re.fullmatch(r"\s*(?:(\d*):(\d*)|(\d+))\s*", text, re.ASCII)) is None:
        raise SlurmGPUError(f"--items {text!r}: expected items and ranges of them, such as 10:20,35 or 90: or :10.")
    start = int(match[3] or match[1] or 0)
    stop = start + 1 if match[3] else int(match[2] or n_items)
    if not start < stop <= n_items:
        what = (
            "is empty" if stop <= start < n_items else f"is not within the input, whose items are 0 to {n_items - 1:,}"
        )
        raise SlurmGPUError(f"--items {text.strip()} {what}. The end of a range is the first item that is not in it.")
    return start, stop


def items_of(
    config: RunFile,
    path: Path,
    workload: Adapted,
    stride: int,
    folder: Path,
    after: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
    look: Look | None = None,
    *,
    made: Path | None = None,
) -> Items:
    """The items of the run file at `path`, checked for the workload; files about them are made in `folder`.

    `after` is a run whose merged file may be the input before it exists. With `look`, only some of the items. `made` is
    a file of items that is to move into the run directory.
    """
    items = _all_items_of(config, path, workload, stride, folder, after, progress, made)
    if look is None:
        return items
    spec = items.spec.taking(look.ranges(items.spec.n_items))
    files = "" if items.said else f" in {count_of(len(spec.files), 'file')}"
    said = f"a look: {spec.n_items:,} of {count_of(items.spec.n_items, 'item')}{files}, by {look}"
    configurations = items.configurations
    if configurations is not None:
        configurations = [each for span in spec.ranges or () for each in configurations[slice(*span)]]
    return replace(
        items, spec=spec, said=f"{items.said}; {said}" if items.said else said, configurations=configurations
    )


def _all_items_of(
    config: RunFile,
    path: Path,
    workload: Adapted,
    stride: int,
    folder: Path,
    after: Run | None,
    progress: Callable[[int, int], None] | None,
    made: Path | None,
) -> Items:
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
