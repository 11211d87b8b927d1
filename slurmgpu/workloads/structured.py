"""Columns for structured answers: the properties of a JSON schema, and their values in an answer."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Output, Structure
from slurmgpu.shards.columns import Array, Column, Json, Text

TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
"""JSON Schema's names for types."""

PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
}
"""Python types of JSON values, by JSON Schema's names; a bool is not an integer."""

DTYPES = {"integer": "int64", "number": "float64", "boolean": "bool"}

MOST_REFERENCES = 32
INT64 = range(-(2**63), 2**63)
FLOAT64 = range(-int(sys.float_info.max), int(sys.float_info.max) + 1)


@dataclass(frozen=True)
class Property:
    """A property of a schema: its JSON `type`, "json" for other or several types, and whether it may be missing."""

    type: str
    is_optional: bool

    def column(self, n: int) -> Column:
        """The column of `n` answers' values: numbers and booleans as arrays, text as text, everything else as JSON.

        A missing number is NaN; for types without a missing value the column is JSON, which has null.
        """
        if self.type == "number" or (self.type in DTYPES and not self.is_optional):
            return Array(DTYPES[self.type], () if n == 1 else (n,), nan_is_unknown=self.is_optional)
        return Text() if self.type == "string" and n == 1 and not self.is_optional else Json()

    def value(self, name: str, found: Any) -> Any:
        """A value for the column; ItemError if its type is wrong, or if the column cannot hold it."""
        if self.type == "integer" and isinstance(found, float) and found.is_integer():
            found = int(found)  # in JSON Schema 5.0 is an integer
        types = PYTHON_TYPES.get(self.type)
        if types is not None and type(found) not in types and not (found is None and self.is_optional):
            raise ItemError(f"property {name!r} of the answer is {found!r:.40}; expected a value of type {self.type}")
        if self.type == "number":
            if found is None:
                return math.nan
            value = float(found) if not isinstance(found, int) or found in FLOAT64 else math.inf
            if not math.isfinite(value):
                raise ItemError(f"property {name!r} of the answer is {found!r:.40}, beyond what float64 holds")
            return value
        if self.type == "integer" and isinstance(found, int) and found not in INT64:
            raise ItemError(f"property {name!r} of the answer is {found!r:.40}, beyond what int64 holds")
        return found


class Answers:
    """Checks structured answers, and makes columns from the properties of a schema."""

    def __init__(self, structure: Structure, n: int, max_tokens: int) -> None:
        self._structure, self._n, self._max_tokens = structure, n, max_tokens
        self._properties = properties_of(json.loads(structure.text)) if structure.kind == "schema" else {}

    def columns(self, others: Collection[str]) -> dict[str, Column]:
        """The columns of the properties; SlurmGPUError if a name clashes with another column."""
        if clash := sorted(self._properties.keys() & {*others}):
            raise SlurmGPUError(
                f"schema has the property {clash[0]!r}, but there is already a column with this name. Rename the "
                f"property in the schema."
            )
        return {name: each.column(self._n) for name, each in self._properties.items()}

    def values(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The columns' values from an item's answers; ItemError for an answer that is truncated or invalid."""
        rows = [self._values(output) for output in outputs]
        if self._n == 1:
            return rows[0]
        return {name: [row[name] for row in rows] for name in self._properties}

    def _values(self, output: Output) -> dict[str, Any]:
        if output.finish_reason == "length":
            raise ItemError(
                f"the answer was cut at max_tokens = {self._max_tokens}, before its {self._structure.kind} was complete"
            )
        if self._structure.kind != "schema":
            return {}
        try:
            found = json.loads(output.text)
            output.text.encode()
            json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:  # also for half of a surrogate pair
            raise ItemError(f"the answer is not JSON of the schema: {error}: {output.text!r:.80}") from error
        if not self._properties:
            return {}
        if not isinstance(found, Mapping):
            raise ItemError(f"the answer is JSON, but not an object, as the schema requires: {output.text!r:.80}")
        missing = [name for name, each in self._properties.items() if not each.is_optional and name not in found]
        if missing:
            raise ItemError(f"the answer lacks the property {missing[0]!r} of the schema: {output.text!r:.80}")
        return {name: each.value(name, found.get(name)) for name, each in self._properties.items()}


def properties_of(schema: Mapping[str, Any]) -> dict[str, Property]:
    """The properties of a schema for objects, by name; {} for any other schema."""
    root = _resolve(schema, schema)
    properties, required = root.get("properties"), root.get("required", ())
    if not isinstance(properties, Mapping):
        return {}
    found = {}
    for name, each in properties.items():
        types = _types(each, schema)
        kinds = types - {"null"}
        if kinds == {"integer", "number"}:
            kinds = frozenset(["number"])
        is_simple = len(kinds) == 1 and kinds <= {*DTYPES, "string"}
        found[name] = Property(
            next(iter(kinds)) if is_simple else "json", is_optional=name not in required or "null" in types
        )
    return found


def _types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a value may have; includes "json" if they are not known.

    A reference of a schema to itself adds no types.
    """
    types: set[str] = set()
    seen: dict[int, Mapping[str, Any]] = {}
    waiting = [schema]
    while waiting:
        found = _resolve(waiting.pop(), root)
        if id(found) in seen:
            continue
        seen[id(found)] = found
        choices = next((found[name] for name in ("anyOf", "oneOf") if isinstance(found.get(name), list)), None)
        if "const" in found or isinstance(found.get("enum"), list):
            values = [found["const"]] if "const" in found else found["enum"]
            types.update(TYPES.get(type(value), "json") for value in values)
        elif "type" in found:
            types.update([found["type"]] if isinstance(found["type"], str) else found["type"])
        elif choices is not None:
            waiting += choices
        else:
            types.add("json")
    return frozenset(types)


def _resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema after resolving references within `root`; an empty one if the result is not a schema."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for part in reference.lstrip("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return {}
