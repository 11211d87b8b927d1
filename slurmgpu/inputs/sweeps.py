"""Expand [sweep] of a run file into configurations. docs/reference/run-file.md has its keys."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.util.amounts import count_of
from slurmgpu.util.atomic_files import date_in_whole_seconds

FILE = "sweep.jsonl"
"""The configurations in the run directory, one per line: the input of a run without another one."""

MOST = 1_000_000
"""The largest grid; larger ones are usually mistakes."""

RANDOM = "random"
ZIP = "zip"
DISTRIBUTIONS = ("uniform", "loguniform", "int", "logint")
VALUES = "text, true or false, finite numbers, and lists and tables of them"
TABLES = ("settings", "arguments")
"""Tables of the run file whose keys [sweep] varies."""
EXACT = 2**53
"""All integers up to this one are exact as floats."""
SHOWN = 60
"""How many characters of a value to show in messages."""


@dataclass(frozen=True)
class Distribution:
    """Numbers from `low` to `high`, inclusive; integers if `kind` is int or logint."""

    kind: str
    low: float
    high: float

    def at(self, u: float) -> Any:
        """The number for 0 <= u < 1."""
        low, high = self.low, self.high
        if self.kind == "uniform":
            found = low * (1 - u) + high * u
        elif self.kind == "loguniform":
            # C libraries differ in the last digits of exp and log.
            found = float(f"{math.exp(math.log(low) * (1 - u) + math.log(high) * u):.12g}")
        elif self.kind == "int":
            found = low + int(u * (high - low + 1))
        else:
            found = int(math.exp(math.log(low) * (1 - u) + math.log(high + 1) * u))
        return min(max(found, low), high)


def expand(table: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """The configurations of [sweep], in order; they depend only on the table and the run's seed.

    Without `random` they are the grid, its last key varying fastest. With `random` they are drawn; if all keys are
    lists, without repetition and at most the whole grid. Keys that `zip` names together vary as one. SlurmGPUError for
    an invalid table.
    """
    n_random, groups = _n_random(table), _groups(table)
    _refuse_flat_zip(table)
    axes = {
        key: _axis(key, value, is_zipped=any(key in group for group in groups))
        for key, value in table.items()
        if key != RANDOM and not (key == ZIP and groups)
    }
    _check_lengths(groups, axes)
    leads = _leads(groups, axes)
    if not axes:
        raise SlurmGPUError("[sweep] has no key to vary; expected at least one, such as lr = [0.1, 0.01].")
    drawn = [key for key, axis in axes.items() if isinstance(axis, Distribution)]
    if n_random is None and drawn:
        raise SlurmGPUError(
            f"[sweep] {drawn[0]} is a distribution, so the number of configurations must be given. "
            f"Add random = 20, for example, to [sweep], or give a list of values."
        )
    values = [axis for key, axis in axes.items() if isinstance(axis, list) and leads[key] == key]
    size = math.prod(map(len, values))
    if n_random is not None and (drawn or n_random < size):
        return list(itertools.islice(_drawn(axes, leads, seed, distinct=not drawn), n_random))
    if size > MOST:
        raise SlurmGPUError(
            f"[sweep] stands for {size:,} configurations; expected at most {MOST:,}. "
            f"Shorten its lists, or draw from them with random = 100, for example."
        )
    lists = {key: axis for key, axis in axes.items() if isinstance(axis, list)}
    free = [key for key in axes if leads[key] == key]
    found = []
    for each in itertools.product(*(range(len(lists[key])) for key in free)):
        places = dict(zip(free, each, strict=True))
        found.append({key: values[places[leads[key]]] for key, values in lists.items()})
    return found


def headline(table: Mapping[str, Any], n_configurations: int, noun: str = "configuration") -> str:
    """A sweep in one line: "6 configurations: lr × width"; keys that vary together are "(lr, width)"."""
    groups = _groups(table)
    leads = _leads(groups, table)
    varied = [
        key
        for key, value in table.items()
        if leads[key] == key
        and not (key == ZIP and groups)
        and (isinstance(value, Mapping) or (isinstance(value, list) and len(value) > 1))
    ]
    counts = [len(table[key]) if isinstance(table[key], list) else math.inf for key in varied]
    together = {group[0]: f"({', '.join(group)})" for group in groups}
    varied = [together.get(key, key) for key in varied]
    is_grid = math.prod(counts) == n_configurations
    how = ", drawn" if not is_grid else ", which is the whole grid" if RANDOM in table else ""
    what = f": {(' × ' if is_grid else ', ').join(varied)}" if varied else ""
    return f"{count_of(n_configurations, noun)}{how}{what}"


def describe(data: Mapping[str, Any]) -> str:
    """A configuration in words: `lr = 0.1, width = 32`."""
    texts = {key: json.dumps(value, ensure_ascii=False, default=_in_words) for key, value in data.items()}
    shown = (f"{key} = {text if len(text) <= SHOWN else f'{text[:SHOWN]}…'}" for key, text in texts.items())
    # The name of a file may have bytes that are no text.
    return ", ".join(shown).encode("utf-8", "backslashreplace").decode() or "nothing of its own"


def _in_words(value: Any) -> str:
    """A value that is no JSON, in a few words."""
    return f"{count_of(len(value), 'byte')}" if isinstance(value, bytes) else str(value)


def place_of(file: Path, number: int, data: Mapping[str, Any]) -> str:
    """The place of item `number` of an input: `[sweep], configuration 3 (lr = 0.1, width = 32)`."""
    where = "[sweep], configuration" if file.name == FILE else f"{file}, item"
    return f"{where} {number} ({describe(data)})"


def write(configurations: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the configurations as JSON lines; the modification time is whole seconds, which any copy keeps."""
    path.write_text("".join(f"{json.dumps(each, allow_nan=False)}\n" for each in configurations), "utf-8")
    date_in_whole_seconds(path)


def _drawn(
    axes: Mapping[str, list[Any] | Distribution], leads: Mapping[str, str], seed: int, *, distinct: bool
) -> Iterator[dict[str, Any]]:
    """Endless configurations, by `random()`, the only method that stays the same in later versions of Python."""
    numbers = random.Random(seed)
    met: set[tuple[int, ...]] = set()
    single = {key for key, axis in axes.items() if isinstance(axis, list) and len(axis) == 1}
    while True:
        us = {key: 0.0 if key in single else numbers.random() for key in axes if leads[key] == key}
        places = {key: int(us[leads[key]] * len(axis)) for key, axis in axes.items() if isinstance(axis, list)}
        if distinct:
            if tuple(places.values()) in met:
                continue
            met.add(tuple(places.values()))
        yield {key: axis[places[key]] if isinstance(axis, list) else axis.at(us[key]) for key, axis in axes.items()}


def _n_random(table: Mapping[str, Any]) -> int | None:
    found = table.get(RANDOM)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= MOST:
        raise SlurmGPUError(
            f"[sweep] random is {_shown(found)}; expected how many configurations are drawn, from 1 to {MOST:,}."
        )
    return found


def _groups(table: Mapping[str, Any]) -> list[list[str]]:
    """The names in `zip`, each group in the table's order; empty if `zip` is a key that is varied, as any other."""
    found = table.get(ZIP)
    if not (isinstance(found, list) and found and all(isinstance(group, list) and group for group in found)):
        return []
    names = [name for group in found for name in group]
    if not all(isinstance(name, str) for name in names) or not any(name in table for name in names):
        return []
    for name in names:
        if name not in table or name in (ZIP, RANDOM):
            raise SlurmGPUError(
                f"[sweep] zip names {name!r}, which [sweep] does not vary."
                f"{did_you_mean(name, table.keys() - {ZIP, RANDOM})}"
            )
        if names.count(name) > 1:
            raise SlurmGPUError(f"[sweep] zip names {name!r} twice; expected each key in one group.")
    return [[key for key in table if key in group] for group in found]


def _refuse_flat_zip(table: Mapping[str, Any]) -> None:
    found, keys = table.get(ZIP), table.keys() - {ZIP, RANDOM}
    if isinstance(found, list) and found and all(isinstance(name, str) and name in keys for name in found):
        raise SlurmGPUError(
            f"[sweep] zip is a list of keys; expected a list of groups of them: write zip = {json.dumps([found])}."
        )


def _check_lengths(groups: Sequence[Sequence[str]], axes: Mapping[str, list[Any] | Distribution]) -> None:
    for group in groups:
        lengths = [len(axis) if isinstance(axis := axes[key], list) else 0 for key in group]
        if len(set(lengths)) > 1 or not lengths[0]:
            said = ", ".join(
                f"{key} has {count_of(length, 'value') if length else 'a distribution'}"
                for key, length in zip(group, lengths, strict=True)
            )
            raise SlurmGPUError(f"[sweep] zip: {said}; expected lists of one length, whose values belong together.")


def _leads(groups: Sequence[Sequence[str]], keys: Iterable[str]) -> dict[str, str]:
    """The key by whose place each key's value is chosen: the first of its group, or itself."""
    return {key: next((group[0] for group in groups if key in group), key) for key in keys}


_MEANT_AS_LIST = re.compile(r"\[.*|[-+.e\d]+(, ?[-+.e\d]+)+", re.DOTALL)
"""A text that `-s` could not read as a list: one without its last bracket, or with words that lack quotes."""


def _axis(key: str, value: Any, *, is_zipped: bool) -> list[Any] | Distribution:
    if isinstance(value, Mapping):
        return _distribution(key, value)
    if isinstance(value, str) and _MEANT_AS_LIST.fullmatch(value):
        raise SlurmGPUError(
            f"[sweep] {key} is the text {value!r}; expected a list, such as [0.1, 0.4] or ['a', 'b']. "
            f"If this text is meant, write it alone in a list."
        )
    values = value if isinstance(value, list) else [value]
    if not values:
        raise SlurmGPUError(f"[sweep] {key} is an empty list; expected one value at least, or no {key} at all.")
    texts: set[str] = set()
    for each in values:
        if not _is_plain(each):
            raise SlurmGPUError(f"[sweep] {key} has the value {_shown(each)}; expected {VALUES}.")
        if isinstance(each, Mapping) and len(each) == 1 and next(iter(each)) in DISTRIBUTIONS:
            raise SlurmGPUError(
                f"[sweep] {key} has a distribution in a list; expected it alone: {key} = {_shown(each)}."
            )
        text = json.dumps(each, sort_keys=True)
        if text in texts and not is_zipped:
            raise SlurmGPUError(f"[sweep] {key} has the value {_shown(each)} twice; expected each once.")
        texts.add(text)
    return values


def _distribution(key: str, value: Mapping[str, Any]) -> Distribution:
    kind = next(iter(value), "")
    if len(value) != 1 or kind not in DISTRIBUTIONS:
        known = ", ".join(f"{{{name} = [a, b]}}" for name in DISTRIBUTIONS)
        if value and key in TABLES:
            raise SlurmGPUError(
                f"[sweep.{key}] is a table; expected all keys in [sweep] itself: write {kind} = "
                f"{_shown(value[kind])} there."
            )
        hint = did_you_mean(kind, DISTRIBUTIONS) if len(value) == 1 else ""
        raise SlurmGPUError(
            f"[sweep] {key} is the table {_shown(value)}; expected a value, a list of values, or one of {known}.{hint}"
        )
    bounds = value[kind]
    whole, positive = kind in ("int", "logint"), kind in ("loguniform", "logint")
    if not _are_bounds(bounds, whole=whole, positive=positive):
        numbers = f"{'whole' if whole else 'finite'} numbers{' above 0' if positive else ''}"
        raise SlurmGPUError(
            f"[sweep] {key} is {_shown(value)}; expected {kind} = [a, b] with two {numbers}, the smaller first."
        )
    low, high = bounds if whole else map(float, bounds)
    return Distribution(kind, low, high)


def _are_bounds(bounds: Any, *, whole: bool, positive: bool) -> bool:
    if not isinstance(bounds, list) or len(bounds) != 2:
        return False
    if any(isinstance(bound, bool) or not isinstance(bound, int if whole else (int, float)) for bound in bounds):
        return False
    if any(abs(bound) > EXACT if isinstance(bound, int) else not math.isfinite(bound) for bound in bounds):
        return False
    low, high = bounds
    return bool(low <= high and (low > 0 or not positive))


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value unchanged: no NaN, no date."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))


def _shown(value: Any) -> str:
    """A value approximately as in TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_shown(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
