"""Write items from Python to a file of the run directory, and restore them for a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.atomic_files import date_in_whole_seconds

VALUE = "value"
"""The field for an item that is not a mapping."""
UNWRAP: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "mapping": lambda data: data,
    "value": lambda data: data[VALUE],
    "tuple": lambda data: tuple(data[VALUE]),
    "path": lambda data: Path(data[VALUE]),
}
"""Functions that restore an item from its data in the file, by kind."""
NAMED = "named tuple"
"""The kind of a named tuple, whose class JSON cannot restore."""
_OF_TABLES = ("__arrow_c_stream__", "to_arrow", "__dataframe__")
EXPECTED = "expected text, numbers, booleans, None, and lists and mappings of these"


def is_table(items: Any) -> bool:
    """Whether items are a table: Arrow's, or a data frame of pandas, polars or others with an Arrow interface."""
    names = ("columns", "column_names")
    return any(hasattr(items, name) for name in names) and any(hasattr(items, name) for name in _OF_TABLES)


def without_index(table: Any) -> Any:
    """The table; a pandas data frame without its index."""
    return table.reset_index(drop=True) if hasattr(table, "iloc") else table


def index_names(items: Any) -> list[str]:
    """The names of a pandas data frame's index levels, which are not columns; empty for others."""
    names = getattr(items.index, "names", ()) if is_table(items) and hasattr(items, "iloc") else ()
    return [str(name) for name in names if name is not None and name not in items.columns]


def write_values(items: Iterable[Any], folder: Path) -> tuple[Path, str]:
    """Write items as JSON lines; return the file and the kind of the items, which is the first one's.

    Kinds are `mapping`, `path` (a pathlib.Path), `tuple`, and `value`. SlurmGPUError for an item of another kind than
    the first, and for one that JSON would change.
    """
    if hasattr(items, "to_pylist"):  # an Arrow array, which iterates over its own scalar type
        items = items.to_pylist()
    path, kind, n_items = folder / "items.jsonl", "", 0
    with open(path, "w", encoding="utf-8") as file:
        for n_items, item in enumerate(items, 1):
            kind = kind or _kind_of(item)
            if _kind_of(item) == NAMED:
                raise SlurmGPUError(
                    f"Item {n_items - 1} is a {type(item).__name__}, which would come back as a plain tuple. Pass "
                    f"tuple(item), or item._asdict() so that the function gets a mapping."
                )
            if _kind_of(item) != kind:
                raise SlurmGPUError(
                    f"Item {n_items - 1} is a {_kind_of(item)}, but item 0 is a {kind}; expected one kind."
                )
            file.write(_line(item, kind, n_items - 1) + "\n")
    if not n_items:
        raise SlurmGPUError("There are no items; expected at least one.")
    date_in_whole_seconds(path)
    return path, kind


def _kind_of(item: Any) -> str:
    if isinstance(item, Mapping):
        return "mapping"
    if isinstance(item, tuple):
        return "tuple" if type(item) is tuple else NAMED
    return "path" if isinstance(item, PurePath) else "value"


def _line(item: Any, kind: str, number: int) -> str:
    value = str(item) if kind == "path" else list(item) if kind == "tuple" else item
    where = f"Item {number}"
    try:
        return json.dumps(_plain(value, where) if kind == "mapping" else {VALUE: _plain(value, where)})
    except (ValueError, RecursionError) as error:  # an integer of 5000 digits; a list within itself
        raise SlurmGPUError(f"{where} cannot be written as JSON: {error}.") from error


def _plain(value: Any, where: str) -> Any:
    """A value that JSON restores unchanged; NumPy's numbers become Python's."""
    if isinstance(value, Mapping):
        if odd := [name for name in value if not isinstance(name, str)]:
            raise SlurmGPUError(f"{where} has the key {odd[0]!r}; expected text.")
        return {name: _plain(inner, f"{where}[{name!r}]") for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, where) for inner in value]
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():
        if getattr(value.dtype, "kind", "") in "mM":  # `item` would turn times in nanoseconds into integers
            raise SlurmGPUError(f"{where} is a {value.dtype}; {EXPECTED}. Pass str(value), or an Arrow table.")
        value = value.item()
    if value is None or type(value) in (str, bool, int, float):
        return value  # also NaN and infinities, which the reader understands
    how = (
        "Pass an Arrow table, or files that the function opens; for a Hugging Face data set, the folder that "
        "save_to_disk writes."
    )
    if isinstance(value, tuple):
        how = "Pass a list: a tuple within an item does not come back as a tuple."
    elif isinstance(value, PurePath):
        how = "Pass str(path)."
    elif hasattr(value, "iloc"):
        how = "Pass the data frame itself (the function gets each row as a mapping), or row.to_dict()."
    raise SlurmGPUError(f"{where} has a value of type {type(value).__name__}; {EXPECTED}. {how}")
