"""Copies of items for one call of the workload, which may change them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from slurmgpu.workload import Item

_UNCHANGEABLE = frozenset({str, int, float, bool, bytes, type(None)})


def own_copies(items: Sequence[Item]) -> list[Item]:
    """Deep copies of the items' data: changes in them, also in nested lists, do not reach the originals."""
    return [Item(item.index, _own_data(item.data), item.run_seed) for item in items]


def _own_data(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if type(data) is dict and _UNCHANGEABLE.issuperset(map(type, data.values())):
        return data.copy()
    try:
        return {name: _copied(value) for name, value in data.items()}
    except RecursionError:  # JSON may be nested more deeply than Python's calls
        return {**data}


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is list:
        return [each if type(each) in _UNCHANGEABLE else _copied(each) for each in value]
    if kind is dict:
        return {key: each if type(each) in _UNCHANGEABLE else _copied(each) for key, each in value.items()}
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise
    except Exception:  # an input format of another package may give what cannot be copied, as an open file
        return value
