"""The field that names the items: `key` in the run file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu.errors import ItemError
from slurmgpu.inputs.reader import Reader
from slurmgpu.inputs.spec import InputSpec
from slurmgpu.util.amounts import count_of
from slurmgpu.util.json_values import json_value

LENGTH = 160
"""The most characters of a name; longer ones are cut."""
READ_AT_ONCE = 1024


def name_by(key: str, data: Mapping[str, Any]) -> str | None:
    """The name of an item by its field `key`, in one line; None if that is missing or null."""
    text = _text(data.get(key))
    return None if text is None else cut(text)


def check_names(spec: InputSpec, index: Path, key: str) -> str | None:
    """A note on items without a name, and on items that share one; None if the field `key` names all items uniquely.

    Reads the input once, and needs about 40 bytes of memory for each item.
    """
    if spec.promised:
        return None
    hashes = np.zeros(spec.n_items, np.int64)
    is_named = np.zeros(spec.n_items, bool)
    for number, text in _names(spec, index, key):
        if text is not None:
            hashes[number], is_named[number] = hash(text), True
    n_named = int(is_named.sum())
    said = []
    if n_named < spec.n_items:
        said.append(f"{count_of(spec.n_items - n_named, 'item')} without it, named only by index")
    numbers, hashes = np.flatnonzero(is_named), hashes[is_named]
    order = np.argsort(hashes, kind="stable")
    is_same = hashes[order[1:]] == hashes[order[:-1]]
    if is_same.any():
        # The first item that has the name of an earlier one, and that one.
        place = np.flatnonzero(is_same)[np.argmin(order[1:][is_same])]
        first, second = numbers[order[place : place + 2]].tolist()
        n_shared = int((np.append(is_same, False) | np.append(False, is_same)).sum())
        with Reader(spec, index) as reader:
            [data] = reader.read(first, first + 1)
        text = "" if isinstance(data, ItemError) else _text(data.get(key))
        said.append(f"{count_of(n_shared, 'item')} share theirs, such as items {first} and {second}: {text!r:.80}")
    return f"key = {key!r}: {'; '.join(said)}." if said else None


def items_named(spec: InputSpec, index: Path, key: str, name: str) -> list[int]:
    """The items with this name, at most two."""
    found: list[int] = []
    for number, text in _names(spec, index, key):
        if text is not None and name in (text, cut(text)):
            found.append(number)
            if len(found) == 2:
                break
    return found


def _names(spec: InputSpec, index: Path, key: str) -> Iterator[tuple[int, str | None]]:
    with Reader(spec, index) as reader:
        for start in range(0, spec.n_items, READ_AT_ONCE):
            for number, data in enumerate(reader.read(start, min(start + READ_AT_ONCE, spec.n_items)), start):
                yield number, None if isinstance(data, ItemError) else _text(data.get(key))


def cut(text: str) -> str:
    """The name of an item, cut at LENGTH characters."""
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 1]}…"


def _text(value: Any) -> str | None:
    """A key as text in one line: a text unchanged, other values as JSON."""
    plain = json_value(value)
    if plain is None:  # also for NaN, by which pandas marks missing values
        return None
    text = " ".join((plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)).split())
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
