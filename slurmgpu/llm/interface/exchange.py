"""Convert the outputs of engines to JSON and back, exactly, for tasks that compute parts of one item."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from slurmgpu.llm.interface.engine import Generated

T = TypeVar("T")


def to_json(found: Any) -> dict[str, Any]:
    """An `Output`, `Scores` or another dataclass of numbers, texts and arrays, as JSON."""
    return {field.name: _plain(getattr(found, field.name)) for field in dataclasses.fields(found)}


def from_json(kind: type[T], value: Mapping[str, Any]) -> T:
    """The dataclass `kind` from its JSON."""
    return kind(**{name: _back(each) for name, each in value.items()})


def digest_of_request(asked: Any) -> str:
    """A digest of a request; two tasks compare it to check that they make the same request."""
    return hashlib.blake2b(repr(_brief(asked)).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _brief(value: Any) -> Any:
    """The value with images replaced by digests: repr() of bytes takes 90 ms a megabyte."""
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).digest()
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(_brief, value)]
    if dataclasses.is_dataclass(value):
        return [
            type(value).__name__,
            *((each.name, _brief(getattr(value, each.name))) for each in dataclasses.fields(value)),
        ]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "shape": value.shape, "values": value.ravel().tolist()}
    return to_json(value) if isinstance(value, Generated) else value


def _back(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return np.array(value["values"], value["dtype"]).reshape(value["shape"])
    return Generated(tuple(value["thoughts"]), tuple(value["answer"]), value["mark"])
