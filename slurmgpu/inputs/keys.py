"""The field that names the items: `key` in the run file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu.errors import ItemError
from slurmgpu.inputs.reader import Reader
from slurmgpu.inputs.spec import PROMISED, InputSpec
from slurmgpu.util.json_values import json_value
from slurmgpu.util.plurals import count_of

LENGTH = 160
"""A name is cut at this many characters."""
READ_AT_ONCE = 1024


def name_by(key: str, data: Mapping[str, Any]) -> str | None:
    """The name of an item by its field `key`, in one line; None if that is missing or null."""
    text = _text(data.get(key))
    return None if text is None else _cut(text)


def check_names(spec: InputSpec, index: Path, key: str) -> str | None:
    """A sentence on items without a name by `key`, and on those that share one; None if all have their own.

    Reads the input once, and holds 8 bytes for each item.
    """
    if any(file.size_bytes == PROMISED for file in spec.files):
        return None
    hashes = np.zeros(spec.n_items, np.int64)
    is_named = np.zeros(spec.n_items, bool)
    for number, text in _names(spec, index, key):
        if text is not None:
            hashes[number], is_named[number] = hash(text), True
    n_named = int(is_named.sum())
    said = []
    if n_named < spec.n_items:
        said.append(f"{count_of(spec.n_items - n_named, 'item')} without it, named by index alone")
    hashes = hashes[is_named]
    hashes.sort()
    shared = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    if len(shared) and (pair := _first_pair(spec, index, key, set(shared.tolist()))):
        n_shared = int(np.isin(hashes, shared).sum())
        said.append(f"{count_of(n_shared, 'item')} share theirs, as items {pair[0]} and {pair[1]} do, {pair[2]!r:.80}")
    return f"key = {key!r}: {'; '.join(said)}." if said else None


def items_named(spec: InputSpec, index: Path, key: str, name: str) -> list[int]:
    """The items with this name, at most two."""
    found: list[int] = []
    for number, text in _names(spec, index, key):
        if text is not None and name in (text, _cut(text)):
            found.append(number)
            if len(found) == 2:
                break
    return found


def _first_pair(spec: InputSpec, index: Path, key: str, hashes: Collection[int]) -> tuple[int, int, str] | None:
    """The first two items of the same name among those with these hashes."""
    met: dict[str, int] = {}
    for number, text in _names(spec, index, key):
        if text is not None and hash(text) in hashes and met.setdefault(text, number) != number:
            return met[text], number, text
    return None


def _names(spec: InputSpec, index: Path, key: str) -> Iterator[tuple[int, str | None]]:
    with Reader(spec, index) as reader:
        for start in range(0, spec.n_items, READ_AT_ONCE):
            for number, data in enumerate(reader.read(start, min(start + READ_AT_ONCE, spec.n_items)), start):
                yield number, None if isinstance(data, ItemError) else _text(data.get(key))


def _cut(text: str) -> str:
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 1]}…"


def _text(value: Any) -> str | None:
    """A key as text, in one line and as it is typed: texts as they are, others as JSON."""
    if value is None:
        return None
    plain = json_value(value)
    return " ".join((plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)).split())
