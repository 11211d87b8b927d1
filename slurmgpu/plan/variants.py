"""The runs of a sweep: [sweep] with keys of the run file makes a run for each configuration."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import sweeps
from slurmgpu.plan.items import Look
from slurmgpu.plan.overrides import Overrides, parts_of
from slurmgpu.plan.planner import LOOK, Draft, draft_run
from slurmgpu.plan.site_file import RunFileSource, path_of, read_run_file
from slurmgpu.plan.sweep_keys import split_sweep
from slurmgpu.run.directory import Run, refuse_existing
from slurmgpu.run.sweep_file import record_runs
from slurmgpu.util.shared_files import exists

MOST_RUNS = 1000
"""The most runs of a sweep; each has jobs and a directory of its own."""
LONGEST_TEXT, LONGEST_NAME = 40, 100
"""The longest text of a value, and of all values, in the name of a run."""
REFUSED = {
    "run_dir": "the runs lie in the folder run_dir, by their values",
    "sweep": "it is the table itself",
}
"""Keys that are the same for all runs of a sweep, and why."""


@dataclass(frozen=True)
class Variant:
    """One run of a sweep: its values by key of [sweep], its name, and the values over the run file that it has."""

    name: str
    values: Mapping[str, Any]
    overrides: Overrides


@dataclass(frozen=True)
class Variants:
    """The runs of a sweep, each in a directory of its name in `folder`; `said` are they in a line.

    With `replace_looks` they take the place of earlier looks.
    """

    folder: Path
    runs: Sequence[Variant]
    said: str
    replace_looks: bool = False


@dataclass(frozen=True)
class Drafts:
    """The runs of a sweep: those to submit, with their drafts, and those that are there already."""

    variants: Variants
    to_submit: Sequence[tuple[Variant, Draft]]
    there: Sequence[Run]

    def record(self) -> None:
        """Write into the folder of the sweep which runs it has."""
        record_runs(self.variants.folder, {each.name: each.values for each in self.variants.runs})


def variants_of(
    source: RunFileSource, overrides: Overrides, run_dir: Path | None = None, look: Look | None = None
) -> Variants | None:
    """The runs that [sweep] of a run file stands for; None if it stands for items, or is absent.

    With an input, each key of [sweep] is named as `-s` names it: `input`, `seed`, `settings.lr`, or `lr` for the
    setting. Without one, keys of tables, such as `settings.lr`, vary the run and all others the items.
    """
    source = source.expanduser().resolve() if isinstance(source, Path) else source
    config = read_run_file(source, overrides)
    of_runs, of_items = split_sweep(config)
    if not of_runs:
        return None
    found = sweeps.expand(of_runs, config.seed)
    said = sweeps.headline(of_runs, len(found), "run")
    if len(found) > MOST_RUNS:
        raise SlurmGPUError(
            f"[sweep] stands for {len(found):,} runs; expected at most {MOST_RUNS:,}, as each has jobs and a directory "
            f"of its own. Shorten its lists, or draw from them with random = 20, for example."
        )
    path = path_of(source)
    named = Path(config.run_dir or f"runs/{path.stem}").expanduser()
    named = named.with_name(f"{named.name}{LOOK}") if look is not None else named
    folder = (path.parent / named if run_dir is None else run_dir.expanduser()).absolute()
    if exists(folder / "run.json"):
        refuse_existing(folder)
    names = names_of(found, [key for group in of_runs.get(sweeps.ZIP, []) for key in group[1:]])
    runs = [
        Variant(name, values, _varied(overrides, values, of_items)) for name, values in zip(names, found, strict=True)
    ]
    return Variants(folder, runs, said, look is not None and run_dir is None)


@contextlib.contextmanager
def drafted(
    source: RunFileSource,
    variants: Variants,
    after: Run | None = None,
    look: Look | None = None,
) -> Iterator[Drafts]:
    """The drafts of all runs of a sweep, while the `with` block lasts; SlurmGPUError if one of them cannot work.

    A run that exists, and computes the same, is left out; one that computes something else is refused.
    """
    to_submit, there = [], []
    with contextlib.ExitStack() as stack:
        for variant in variants.runs:
            folder = variants.folder / variant.name
            replaces = variants.replace_looks
            is_there = not replaces and exists(folder / "run.json")
            # The directory of a run that is there cannot be planned once more.
            target = folder.with_name(f".{variant.name}.again") if is_there else folder
            with _naming(variant):
                overrides = variant.overrides
                if is_there:
                    there.append(Run.open(folder))
                    overrides = _cut_as(there[-1], source, overrides)
                draft = stack.enter_context(
                    draft_run(source, overrides, target, None, after, look, replaces_look=replaces)
                )
                if not is_there:
                    to_submit.append((variant, draft))
                    continue
                if there[-1].plan.fingerprint != draft.plan.fingerprint:
                    raise SlurmGPUError(
                        f"{folder} holds a run that computes something else. Name another folder, by --run-dir or "
                        f"run_dir, or move that run away."
                    )
        yield Drafts(variants, to_submit, there)


def _cut_as(run: Run, source: RunFileSource, overrides: Overrides) -> Overrides:
    """The values with the shards of a run that is there, which may have been planned for another number of tasks."""
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


def names_of(configurations: Sequence[Mapping[str, Any]], zipped: Sequence[str] = ()) -> list[str]:
    """A name for each configuration, from its values that vary: `small_math`, `temperature=0.5`.

    Keys in `zipped` vary with another one, which tells the runs apart.
    """
    keys = list(configurations[0])
    varied = [key for key in keys if len({json.dumps(each[key]) for each in configurations}) > 1] or keys
    texts = {key: _texts(key, [each[key] for each in configurations]) for key in varied}
    names: list[str] = []
    for chosen in ([key for key in varied if key not in zipped], varied):
        names = ["_".join(texts[key][number] for key in chosen) for number in range(len(configurations))]
        if len(set(names)) == len(names) and max(map(len, names)) <= LONGEST_NAME:
            return names
    return [str(number) for number in range(len(configurations))]


def _texts(key: str, values: Sequence[Any]) -> list[str]:
    """A short text for each value, as part of a name; equal for equal values alone."""
    distinct = {json.dumps(value, sort_keys=True): value for value in values}
    last = parts_of(key)[-1]
    made: list[str] = []
    if all(isinstance(value, str) for value in distinct.values()):
        texts = list(distinct.values())
        # As few parts of paths, and of names with slashes, as tell them apart.
        for n_parts in (1, 2, 3):
            made = [_text_of(text, n_parts, is_file=key == "input") for text in texts]
            if len(set(made)) == len(made):
                break
    elif all(isinstance(value, bool | int | float) for value in distinct.values()):
        made = [f"{last}={json.dumps(value)}" for value in distinct.values()]
    if len(set(made)) != len(distinct) or not all(made) or max(map(len, made)) > LONGEST_TEXT:
        made = [f"{last}-{number}" for number in range(len(distinct))]
    else:
        made = [text if text[0].isalpha() else f"{last}={text}" for text in made]
    names = dict(zip(distinct, made, strict=True))
    return [names[json.dumps(value, sort_keys=True)] for value in values]


def _text_of(text: str, n_parts: int, *, is_file: bool) -> str:
    """The last parts of a text with slashes, with letters, digits and a few signs alone."""
    pieces = [piece for piece in text.split("/") if re.search(r"\w", piece)]
    if is_file and pieces:
        stem = pieces[-1].lstrip(".").partition(".")[0]
        pieces[-1] = stem if re.search(r"\w", stem) else ""
    kept = [re.sub(r"[^\w.+=-]+", "-", piece).strip("-.") for piece in pieces]
    return "-".join([piece for piece in kept if piece][-n_parts:])


def _varied(overrides: Overrides, values: Mapping[str, Any], of_items: Mapping[str, Any]) -> Overrides:
    """The values over the run file for one run of a sweep."""
    found = copy.deepcopy(overrides)
    found.replaced["sweep"] = dict(of_items) or None
    for key, value in values.items():
        path = found.path_of(key, "[sweep]")
        if path[0] in REFUSED:
            raise SlurmGPUError(f"[sweep] varies {key}, which is one for all of its runs: {REFUSED[path[0]]}.")
        found.assign(path, value, "[sweep]")
    return found
