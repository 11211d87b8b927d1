"""The names of a sweep's runs, made from the values that vary; a run in sweep.json keeps its name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmgpu.plan.overrides import place_of
from slurmgpu.run.sweep_file import FILE
from slurmgpu.util.redact import hidden
from slurmgpu.util.toml import parts_of

LONGEST_TEXT, LONGEST_NAME = 40, 100
"""The longest text of a value, and of all values, in the name of a run."""

Values = Mapping[str, Any]
"""The values of a run by the keys of [sweep]."""


@dataclass(frozen=True)
class RunName:
    """The name of a run, and the other run, if any, that already has the name that these values would give."""

    name: str
    namesake: str | None = None


def names_beside(
    configurations: Sequence[Values], zipped: Sequence[str], listed: Mapping[str, Values]
) -> list[RunName]:
    """A name for each configuration, given the runs in sweep.json, whose values are `listed` without secrets.

    A run is identified by its values: a listed configuration keeps its name, whatever else [sweep] makes. Others get
    unused names.
    """
    names = names_of(configurations, zipped)
    free: dict[str, list[str]] = {}
    for name, values in listed.items():
        free.setdefault(as_text(values), []).append(name)
    kept: dict[int, str] = {}
    for number, values in enumerate(configurations):
        same = free.get(as_text(hidden(values)), [])
        if same:
            # Two runs have the same values where `random` draws them twice.
            kept[number] = names[number] if names[number] in same else same[0]
            same.remove(kept[number])
    new = [number for number in range(len(configurations)) if number not in kept]
    known = {as_text(values): values for values in listed.values()}
    among_all = names_of([*known.values(), *(configurations[number] for number in new)], zipped)[len(known) :]
    taken = {FILE, *listed}
    found = {number: RunName(name) for number, name in kept.items()}
    for number, longer in zip(new, among_all, strict=True):
        name = _free(names[number], longer, taken)
        taken.add(name)
        is_taken = names[number] in listed and names[number] not in kept.values()
        found[number] = RunName(name, names[number] if is_taken else None)
    return [found[number] for number in range(len(configurations))]


def respelled(listed: Mapping[str, Values], keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The values of runs under the names in `keys`; `settings.lr` and `lr` may name the same key of the run file."""
    spelled = {place_of(key): key for key in keys}
    return {
        name: {spelled.get(place_of(key), key): value for key, value in values.items()}
        for name, values in listed.items()
    }


def as_text(values: Values) -> str:
    """A text that is equal only for equal values."""
    return json.dumps(values, sort_keys=True)


def names_of(configurations: Sequence[Values], zipped: Sequence[str] = ()) -> list[str]:
    """A name for each configuration, from its values that vary: `small_math`, `temperature=0.5`.

    Keys in `zipped` are left out: they vary with another key, which distinguishes the runs.
    """
    numbers = range(len(configurations))
    keys = list(dict.fromkeys(key for each in configurations for key in each))
    varied = [key for key in keys if len({_value_text(each, key) for each in configurations}) > 1] or keys
    texts = {key: _texts_of(key, configurations) for key in varied}
    for chosen in ([key for key in varied if key not in zipped], varied):
        names = ["_".join(texts[key][number] for key in chosen if number in texts[key]) for number in numbers]
        if len(set(names)) == len(names) and all(0 < len(name) <= LONGEST_NAME for name in names):
            return names
    return [str(number) for number in numbers]


def _value_text(values: Values, key: str) -> str | None:
    return as_text(values[key]) if key in values else None


def _free(name: str, longer: str, taken: set[str]) -> str:
    numbered = (f"{longer}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain((name, longer), numbered) if each not in taken)


def _texts_of(key: str, configurations: Sequence[Values]) -> dict[int, str]:
    """The text for a key of each configuration that has it, by its number."""
    places = [number for number, each in enumerate(configurations) if key in each]
    return dict(zip(places, _texts(key, [configurations[number][key] for number in places]), strict=True))


def _texts(key: str, values: Sequence[Any]) -> list[str]:
    """A short text for each value, as part of a name; equal only for equal values."""
    distinct = {json.dumps(value, sort_keys=True): value for value in values}
    last = parts_of(key)[-1]
    made: list[str] = []
    if all(isinstance(value, str) for value in distinct.values()):
        texts = list(distinct.values())
        # The fewest last parts of paths, or of names with slashes, that distinguish them.
        for n_parts in (1, 2, 3):
            made = [_text_of(text, n_parts, is_file=key == "input") for text in texts]
            if len(set(made)) == len(made):
                break
    elif all(isinstance(value, bool | int | float) for value in distinct.values()):
        made = [f"{last}={json.dumps(value)}" for value in distinct.values()]
    has_secrets = any(hidden({key: value}) != {key: value} for value in values)
    if has_secrets or len(set(made)) != len(distinct) or not all(made) or max(map(len, made)) > LONGEST_TEXT:
        made = [f"{last}-{number}" for number in range(len(distinct))]
    else:
        made = [text if text[0].isalpha() else f"{last}={text}" for text in made]
    names = dict(zip(distinct, made, strict=True))
    return [names[json.dumps(value, sort_keys=True)] for value in values]


def _text_of(text: str, n_parts: int, *, is_file: bool) -> str:
    """The last parts of a text with slashes, reduced to letters, digits and a few signs."""
    pieces = [piece for piece in text.split("/") if re.search(r"\w", piece)]
    if is_file and pieces:
        stem = pieces[-1].lstrip(".").partition(".")[0]
        pieces[-1] = stem if re.search(r"\w", stem) else ""
    kept = [re.sub(r"[^\w.+=-]+", "-", piece).strip("-.") for piece in pieces]
    return "-".join([piece for piece in kept if piece][-n_parts:])
