"""The runs of a sweep: [sweep] with keys of the run file makes a run for each configuration."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmgpu.code.capture import git_state
from slurmgpu.code.former import changed_since
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import sweeps
from slurmgpu.plan.items import Look, Scans
from slurmgpu.plan.overrides import Overrides, place_of
from slurmgpu.plan.planner import Draft, draft_run, room_beside
from slurmgpu.plan.run_path import run_path
from slurmgpu.plan.site_file import RunFileSource, path_of, read_run_file
from slurmgpu.plan.sweep_keys import split_sweep
from slurmgpu.plan.variant_names import as_text, names_beside, respelled
from slurmgpu.run.creation import refuse_existing
from slurmgpu.run.directory import Run
from slurmgpu.run.sweep_file import listed_runs, record_runs, was_submitted
from slurmgpu.util.redact import hidden
from slurmgpu.util.shared_files import exists
from slurmgpu.util.users import resolved

MOST_RUNS = 1000
"""The most runs of a sweep; each has jobs and a directory of its own."""
REFUSED = {
    "run_dir": "it is the folder that holds all runs",
    "sweep": "it is the table itself",
}
"""Keys that are the same for all runs of a sweep, and why."""


@dataclass(frozen=True)
class Variant:
    """One run of a sweep: its values by key of [sweep], its name, and the overrides of the run file.

    `namesake` is a run in sweep.json that has other values but took the name that these would get. It may still
    compute the same: `a.txt` and `./a.txt` are one input.
    """

    name: str
    values: Mapping[str, Any]
    overrides: Overrides
    namesake: str | None


@dataclass(frozen=True)
class Variants:
    """The runs of a sweep, each in `folder` in a directory of its name; `said` describes them in a line.

    With `replace_looks` they replace earlier looks. `listed` is the content of sweep.json when it was read.
    """

    folder: Path
    runs: Sequence[Variant]
    said: str
    replace_looks: bool
    listed: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Drafts:
    """The runs of a sweep: those to submit, with their drafts, and those that exist already.

    `changed` says, by name of an existing run, which files have changed since it was submitted.
    """

    variants: Variants
    to_submit: Sequence[tuple[Variant, Draft]]
    there: Sequence[Run]
    changed: Mapping[str, str]

    def notes(self) -> list[str]:
        """A sentence for each existing run whose rows were computed by other code."""
        return [
            f"{run.name} was computed by other code: {changed} Its rows stay as they are; "
            f"slurmgpu resubmit --other-code {run.typed} recomputes them with the current code."
            for run in self.there
            if (changed := self.changed.get(run.name))
        ]

    def record(self) -> None:
        """List the runs in sweep.json, before any of them is made.

        SlurmGPUError if another command has meanwhile begun to make runs with these names or values.
        """
        record_runs(self.variants.folder, {each.name: each.values for each in self.variants.runs}, self._beside)

    def _beside(self, listed: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """The runs in the current sweep.json, under the keys of this sweep."""
        variants = self.variants
        own = {each.name: as_text(hidden(each.values)) for each in variants.runs}
        now = respelled(listed, _keys_of(variants.runs))
        for name, values in now.items():
            text = as_text(values)
            if values != variants.listed.get(name) and own.get(name) != text and (name in own or text in own.values()):
                raise SlurmGPUError(
                    f"Another command is submitting runs of this sweep, such as {variants.folder / name}. Submit again "
                    f"when it has finished: existing runs stay as they are."
                )
        return now


def variants_of(
    source: RunFileSource, overrides: Overrides, run_dir: Path | None = None, look: Look | None = None
) -> Variants | None:
    """The runs that [sweep] of a run file makes; None if it makes items, or is absent.

    With an input, each key of [sweep] is named as `-s` names it: `input`, `seed`, `settings.lr`, or `lr` for the
    setting. Without one, keys of tables, such as `settings.lr`, vary the run and all others the items.
    """
    source = resolved(source) if isinstance(source, Path) else source
    config = read_run_file(source, overrides)
    of_runs, of_items = split_sweep(config)
    if not of_runs:
        return None
    found = sweeps.expand(of_runs, config.seed)
    said = sweeps.headline(of_runs, len(found), "run")
    if len(found) > MOST_RUNS:
        raise SlurmGPUError(
            f"[sweep] makes {len(found):,} runs; expected at most {MOST_RUNS:,}, because each has its own jobs and "
            f"directory. Shorten its lists, or draw from them, for example with random = 20."
        )
    folder = run_path(config, path_of(source), run_dir, is_look=look is not None)
    if exists(folder / "run.json"):
        refuse_existing(folder)
    _refuse_twice(found[0])
    zipped = [key for group in of_runs.get(sweeps.ZIP, []) for key in group[1:]]
    listed = respelled(listed_runs(folder), found[0])
    names = names_beside(found, zipped, listed)
    runs = [
        Variant(each.name, values, _varied(overrides, values, of_items), each.namesake)
        for each, values in zip(names, found, strict=True)
    ]
    return Variants(folder, runs, said, look is not None and run_dir is None, listed)


def _keys_of(runs: Sequence[Variant]) -> list[str]:
    return list(dict.fromkeys(key for each in runs for key in each.values))


def _refuse_twice(values: Mapping[str, Any]) -> None:
    met: dict[tuple[str, ...], str] = {}
    for key in values:
        if (other := met.setdefault(place_of(key), key)) != key:
            raise SlurmGPUError(f"[sweep] varies {other} and {key}, which are the same key. Leave one of them out.")


@contextlib.contextmanager
def drafted(
    source: RunFileSource,
    variants: Variants,
    after: Sequence[Run] = (),
    look: Look | None = None,
) -> Iterator[Drafts]:
    """The drafts of all runs of a sweep, for the duration of the `with` block. SlurmGPUError if one cannot work.

    An existing run that computes the same is left out; one that computes something else is refused.
    """
    to_submit, there, found = [], [], []
    changed: dict[str, str] = {}
    replaces = variants.replace_looks
    with contextlib.ExitStack() as stack:
        scans = Scans(
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurmgpu-"))),
            functools.cache(lambda: room_beside(variants.folder / "runs", stack)),
        )
        drafting = functools.partial(
            draft_run, source, after=after, look=look, scans=scans, git=functools.cache(git_state)
        )
        for variant in variants.runs:
            with _naming(variant):
                existing = None if replaces else _existing(variant, variants.folder, source, drafting)
                if existing is None:
                    draft = drafting(variant.overrides, variants.folder / variant.name, replaces_look=replaces)
                    to_submit.append((variant, stack.enter_context(draft)))
                    found.append(variant)
                    continue
                known, run, since = existing
                found.append(known)
                there.append(run)
                changed[run.name] = since
        yield Drafts(replace(variants, runs=found), to_submit, there, changed)


def _existing(
    variant: Variant,
    folder: Path,
    source: RunFileSource,
    drafting: Callable[..., contextlib.AbstractContextManager[Draft]],
) -> tuple[Variant, Run, str] | None:
    """A run of a sweep under the name of a run in the folder that computes the same, that run, and its changed code.

    None if there is no such run; SlurmGPUError if a run of its name computes something else.
    """
    for name in filter(None, (variant.namesake, variant.name)):
        if was_submitted(folder / name):
            run = Run.open(folder / name)
            if (since := _changed_since(run, source, variant, drafting)) is not None:
                return replace(variant, name=name), run, since
            if name == variant.name:
                raise SlurmGPUError(
                    f"{run.folder} holds a run that computes something else. Name another folder with --run-dir or "
                    f"run_dir, or move that run away."
                )
    return None


def _changed_since(
    run: Run,
    source: RunFileSource,
    variant: Variant,
    drafting: Callable[..., contextlib.AbstractContextManager[Draft]],
) -> str | None:
    """The code that has changed since an existing run was submitted that computes the same as this one of [sweep].

    None if that run computes something else.
    """
    # Planning refuses a directory that exists.
    target = run.folder.with_name(f".{run.name}.again")
    with drafting(_cut_as(run, source, variant.overrides), target) as draft:
        return changed_since(run, draft.code) if draft.plan.computes_same(run.plan) else None


def _cut_as(run: Run, source: RunFileSource, overrides: Overrides) -> Overrides:
    """The overrides with the shard size of an existing run, which may have been planned for another number of tasks."""
    if read_run_file(source, overrides).shard_items is not None:
        return overrides
    found = copy.deepcopy(overrides)
    found.put({"shard_items": run.plan.shard_items}, str(run.folder))
    return found


@contextlib.contextmanager
def _naming(variant: Variant) -> Iterator[None]:
    try:
        yield
    except SlurmGPUError as error:
        raise SlurmGPUError(f"Run {variant.name} of [sweep]: {error}") from error


def _varied(overrides: Overrides, values: Mapping[str, Any], of_items: Mapping[str, Any]) -> Overrides:
    """The overrides of the run file for one run of a sweep."""
    found = copy.deepcopy(overrides)
    found.replaced["sweep"] = dict(of_items) or None
    for key, value in values.items():
        path = found.path_of(key, "[sweep]")
        if path[0] in REFUSED:
            raise SlurmGPUError(f"[sweep] cannot vary {key}: {REFUSED[path[0]]}.")
        found.assign(path, value, "[sweep]")
    return found
