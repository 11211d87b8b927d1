"""The items of tracin: test triples, as lines of text or as records of three fields."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.workload import Item
from slurmgpu.workloads.tracin.kge.graph import Dictionary, parse_triple, triple_of

FIELDS = ("head", "relation", "tail")
"""The fields of an item that is not a line of text."""
LOOKED_AT = 100
"""At least one of so many first items must be a triple."""


def triple_in(data: Mapping[str, Any], entities: Dictionary, relations: Dictionary) -> tuple[int, int, int]:
    """The ids of an item's head, relation and tail; ItemError if it has none."""
    if "text" in data and not set(FIELDS) <= data.keys():
        return parse_triple(str(data["text"]), entities, relations)
    for name in FIELDS:
        if name not in data:
            raise ItemError(f"no field {name!r}.{did_you_mean(name, data)}")
    head, relation, tail = (str(data[name]) for name in FIELDS)
    return triple_of(head, relation, tail, entities, relations)


def line_of(item: Item) -> int:
    """The line number of a test triple, from 0: its field `line`, else its index over all input files."""
    line = item.data.get("line", item.index)
    try:
        return int(line)
    except (TypeError, ValueError):
        return item.index


def check_items(path: Path, entities: Dictionary, relations: Dictionary) -> None:
    """Refuse a file without a triple among its first items: the file or the dictionaries are wrong."""
    first: ItemError | None = None
    n_seen = 0
    for data in itertools.islice(_items(path), LOOKED_AT):
        n_seen += 1
        try:
            triple_in(data, entities, relations)
            return
        except ItemError as error:
            first = first or error
    if first is not None:
        these = f"the first {n_seen} items" if n_seen == LOOKED_AT else f"its {n_seen} items" if n_seen > 1 else ""
        none = f"None of {these} is a" if these else "Its only item is no"
        raise SlurmGPUError(
            f"{path}, line {2 if path.suffix == '.csv' else 1}: {first} {none} triple of {entities.path} and "
            f"{relations.path}. Correct the input, or the dictionaries in [settings]."
        )


def _items(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix not in (".txt", ".jsonl", ".csv"):
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
        for line in file:
            yield {"text": line} if path.suffix == ".txt" else json.loads(line)
