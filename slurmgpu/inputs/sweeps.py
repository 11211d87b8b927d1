"""Expand [sweep] of a run file into configurations. docs/reference/run-file.md has its keys."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.util.amounts import count_of
from slurmgpu.util.atomic_files import date_in_whole_seconds

FILE = "sweep.jsonl"
"""The file of configurations in the run directory, one per line: the input of a run that names no other."""

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
"""The most characters of a value in messages."""


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
            # Rounded, because C libraries differ in the last digits of exp and log.
            found = float(f"{math.exp(math.log(low) * (1 - u) + math.log(high) * u):.12g}")
        elif self.kind == "int":
            found = low + int(u * (high - low + 1))
        else:
            found = int(math.exp(math.log(low) * (1 - u) + math.log(high + 1) * u))
        return min(max(found, low), high)


@dataclass(frozen=True)
class Axis:
    """Keys that vary together, with rows of their values; or one key whose values are drawn from a distribution."""

    keys: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]] | Distribution

    @property
    def size(self) -> float:
        """The number of rows; infinite for a distribution."""
        return math.inf if isinstance(self.rows, Distribution) else len(self.rows)

    def at(self, u: float) -> tuple[Any, ...]:
        """The values of the keys for 0 <= u < 1."""
        rows = self.rows
        return (rows.at(u),) if isinstance(rows, Distribution) else rows[int(u * len(rows))]


def expand(table: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """The configurations of [sweep], in order; they depend only on the table and the run's seed.

    Without `random` they are the grid, its last key varying fastest. With `random` they are drawn; if all keys are
    lists, without repetition and at most the whole grid. Keys that `zip` names together vary as one. SlurmGPUError for
    an invalid table.
    """
    n_random, axes = _n_random(table), _axes(table)
    if not axes:
        raise SlurmGPUError("[sweep] has no key to vary; expected at least one, such as lr = [0.1, 0.01].")
    lists = [axis.rows for axis in axes if not isinstance(axis.rows, Distribution)]
    drawn = [axis.keys[0] for axis in axes if isinstance(axis.rows, Distribution)]
    if n_random is None and drawn:
        raise SlurmGPUError(
            f"[sweep] {drawn[0]} is a distribution, so the number of configurations must be given. "
            f"Add it to [sweep], for example random = 20, or give a list of values."
        )
    size = math.prod(map(len, lists))
    found: Iterator[tuple[tuple[Any, ...], ...]]
    if n_random is not None and (drawn or n_random < size):
        found = itertools.islice(_drawn(axes, seed, distinct=not drawn), n_random)
    elif size > MOST:
        raise SlurmGPUError(
            f"[sweep] makes {size:,} configurations; expected at most {MOST:,}. "
            f"Shorten its lists, or draw from them, for example with random = 100."
        )
    else:
        found = itertools.product(*lists)
    keys = [key for axis in axes for key in axis.keys]
    configurations = (dict(zip(keys, itertools.chain(*rows), strict=True)) for rows in found)
    return [{key: each[key] for key in table if key in each} for each in configurations]


def headline(table: Mapping[str, Any], n_configurations: int, noun: str = "configuration") -> str:
    """A sweep in one line: "6 configurations: lr × width"; keys that vary together are "(lr, width)"."""
    axes = [axis for axis in _axes(table) if axis.size > 1]
    varied = [axis.keys[0] if len(axis.keys) == 1 else f"({', '.join(axis.keys)})" for axis in axes]
    is_grid = math.prod(axis.size for axis in axes) == n_configurations
    how = ", drawn" if not is_grid else ", which is the whole grid" if RANDOM in table else ""
    what = f": {(' × ' if is_grid else ', ').join(varied)}" if varied else ""
    return f"{count_of(n_configurations, noun)}{how}{what}"


def describe(data: Mapping[str, Any]) -> str:
    """A configuration in words: `lr = 0.1, width = 32`."""
    texts = {key: json.dumps(value, ensure_ascii=False, default=_in_words) for key, value in data.items()}
    shown = (f"{key} = {text if len(text) <= SHOWN else f'{text[:SHOWN]}…'}" for key, text in texts.items())
    # A file name may have bytes that are not valid Unicode.
    return ", ".join(shown).encode("utf-8", "backslashreplace").decode() or "nothing of its own"


def _in_words(value: Any) -> str:
    """A value that is not JSON, in a few words."""
    return f"{count_of(len(value), 'byte')}" if isinstance(value, bytes) else str(value)


def place_of(file: Path, number: int, data: Mapping[str, Any]) -> str:
    """The place of item `number` of an input: `[sweep], configuration 3 (lr = 0.1, width = 32)`."""
    where = "[sweep], configuration" if file.name == FILE else f"{file}, item"
    return f"{where} {number} ({describe(data)})"


def write(configurations: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the configurations as JSON lines; the modification time is whole seconds, which any copy keeps."""
    path.write_text("".join(f"{json.dumps(each, allow_nan=False)}\n" for each in configurations), "utf-8")
    date_in_whole_seconds(path)


def _drawn(axes: Sequence[Axis], seed: int, *, distinct: bool) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """Rows of the axes, drawn with `random()`, the only method that Python promises not to change.

    They are endless unless `distinct`. How many are taken changes none of them.
    """
    numbers = random.Random(seed)
    met: set[tuple[int, ...]] = set()
    # Beyond half of a grid, most of what is drawn would have come before.
    most = math.prod(axis.size for axis in axes) / 2 if distinct else math.inf
    while len(met) < most:
        us = [numbers.random() if axis.size > 1 else 0.0 for axis in axes]
        if distinct:
            places = tuple(int(u * axis.size) for u, axis in zip(us, axes, strict=True))
            if places in met:
                continue
            met.add(places)
        yield tuple(axis.at(u) for u, axis in zip(us, axes, strict=True))
    left = [each for each in itertools.product(*(range(int(axis.size)) for axis in axes)) if each not in met]
    while left:
        number = int(numbers.random() * len(left))
        left[number], left[-1] = left[-1], left[number]
        yield tuple(axis.at((place + 0.5) / axis.size) for place, axis in zip(left.pop(), axes, strict=True))


def _axes(table: Mapping[str, Any]) -> list[Axis]:
    """The axes of [sweep], in its order; a group of `zip` comes at the position of its first key."""
    groups = _groups(table)
    _refuse_flat_zip(table)
    group_of = {key: tuple(group) for group in groups for key in group}
    values = {key: _values(key, value) for key, value in table.items() if key != RANDOM and not (key == ZIP and groups)}
    _check_lengths(groups, values)
    axes = []
    for key, found in values.items():
        if isinstance(found, Distribution):
            axes.append(Axis((key,), found))
        elif key == (keys := group_of.get(key, (key,)))[0]:
            rows = [*zip(*(values[each] for each in keys), strict=True)]
            _refuse_twice(keys, rows)
            axes.append(Axis(keys, rows))
    return axes


def _n_random(table: Mapping[str, Any]) -> int | None:
    found = table.get(RANDOM)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= MOST:
        raise SlurmGPUError(
            f"[sweep] random is {_shown(found)}; expected the number of configurations to draw, from 1 to {MOST:,}."
        )
    return found


def _groups(table: Mapping[str, Any]) -> list[list[str]]:
    """The names in `zip`, each group in the table's order; empty if `zip` is itself a key to vary."""
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
            f"[sweep] zip is a list of keys; expected a list of groups of keys: write zip = {json.dumps([found])}."
        )


def _check_lengths(groups: Sequence[Sequence[str]], values: Mapping[str, list[Any] | Distribution]) -> None:
    for group in groups:
        lengths = [len(listed) if isinstance(listed := values[key], list) else 0 for key in group]
        if len(set(lengths)) > 1 or not lengths[0]:
            said = ", ".join(
                f"{key} has {count_of(length, 'value') if length else 'a distribution'}"
                for key, length in zip(group, lengths, strict=True)
            )
            raise SlurmGPUError(f"[sweep] zip: {said}; expected lists of the same length, whose values are paired.")


_MEANT_AS_LIST = re.compile(r"\[.*|[-+.e\d]+(, ?[-+.e\d]+)+|(range|\w+\.(arange|linspace))\(.*\)", re.DOTALL)
"""A text that was probably meant as a list for `-s`, but lacks its last bracket, or quotes around words, or is code."""


def _values(key: str, value: Any) -> list[Any] | Distribution:
    if isinstance(value, Mapping):
        return _distribution(key, value)
    if isinstance(value, str) and _MEANT_AS_LIST.fullmatch(value):
        raise SlurmGPUError(
            f"[sweep] {key} is the text {value!r}; expected a list, such as [0.1, 0.4] or ['a', 'b'], or in a shell "
            f'"sweep.{key}=[$(seq -s, 0 99)]". For this single text, write a list with it.'
        )
    values = value if isinstance(value, list) else [value]
    if not values:
        raise SlurmGPUError(f"[sweep] {key} is an empty list; expected at least one value, or no {key} at all.")
    for each in values:
        if not _is_plain(each):
            raise SlurmGPUError(f"[sweep] {key} has the value {_shown(each)}; expected {VALUES}.")
        if isinstance(each, Mapping) and len(each) == 1 and next(iter(each)) in DISTRIBUTIONS:
            raise SlurmGPUError(
                f"[sweep] {key} has a distribution in a list; write it without the list: {key} = {_shown(each)}."
            )
    return values


def _refuse_twice(keys: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    texts: set[str] = set()
    for row in rows:
        text = json.dumps(row, sort_keys=True)
        if text in texts:
            have = "has the value" if len(keys) == 1 else "have the values"
            said = f"{', '.join(keys)} {have} {', '.join(map(_shown, row))}"
            raise SlurmGPUError(f"[sweep] {said} twice; expected each once.")
        texts.add(text)


def _distribution(key: str, value: Mapping[str, Any]) -> Distribution:
    kind = next(iter(value), "")
    if len(value) != 1 or kind not in DISTRIBUTIONS:
        known = ", ".join(f"{{{name} = [a, b]}}" for name in DISTRIBUTIONS)
        if value and key in TABLES:
            raise SlurmGPUError(
                f"[sweep.{key}] is a table, but {kind} belongs in [sweep] itself: write {kind} = "
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
    """Whether JSON restores a value unchanged; false for NaN and dates."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))


def _shown(value: Any) -> str:
    """A value approximately as TOML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_shown(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
