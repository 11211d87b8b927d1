"""Items from Python as a file of the run directory, and how a function gets them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.atomic_files import date_in_whole_seconds

VALUE = "value"
"""The field of an item that is no mapping."""
UNWRAP: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "mapping": lambda data: data,
    "value": lambda data: data[VALUE],
    "tuple": lambda data: tuple(data[VALUE]),
    "path": lambda data: Path(data[VALUE]),
}
"""An item as it was given, from the data in the file, by its kind."""
NAMED = "named tuple"
"""The kind of a tuple of a class of its own, which JSON does not give back."""
_OF_TABLES = ("__arrow_c_stream__", "to_arrow", "__dataframe__")
EXPECTED = "expected text, numbers, booleans, None, and lists and mappings of these"


def is_table(items: Any) -> bool:
    """Whether items are a table: of Arrow, or a data frame of pandas, polars or others that speak Arrow."""
    names = ("columns", "column_names")
    return any(hasattr(items, name) for name in names) and any(hasattr(items, name) for name in _OF_TABLES)


def without_index(table: Any) -> Any:
    """The table; one of pandas without its index, which stands for the order of rows."""
    return table.reset_index(drop=True) if hasattr(table, "iloc") else table


def index_names(items: Any) -> list[str]:
    """The names of the index of a data frame of pandas that are no columns, if any."""
    names = getattr(items.index, "names", ()) if is_table(items) and hasattr(items, "iloc") else ()
    return [str(name) for name in names if name is not None and name not in items.columns]


def write_values(items: Iterable[Any], folder: Path) -> tuple[Path, str]:
    """Write items, one after the other, as JSON lines; and of which kind all are, as the first one.

    They are `mapping`, `path` (a pathlib.Path), `tuple`, or `value`. SlurmGPUError for an item of another kind, and for
    one that JSON changes.
    """
    if hasattr(items, "to_pylist"):  # an array of Arrow, whose values are its own
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
    """A value that JSON gives back as it was; numbers of NumPy are Python's."""
    if isinstance(value, Mapping):
        if odd := [name for name in value if not isinstance(name, str)]:
            raise SlurmGPUError(f"{where} has the key {odd[0]!r}; expected text.")
        return {name: _plain(inner, f"{where}[{name!r}]") for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, where) for inner in value]
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():
        if getattr(value.dtype, "kind", "") in "mM":  # `item` makes plain integers of nanoseconds
            raise SlurmGPUError(f"{where} is a {value.dtype}; {EXPECTED}. Pass str(value), or an Arrow table.")
        value = value.item()
    if value is None or type(value) in (str, bool, int, float):
        return value  # NaN and infinities, too: what reads them knows them
    how = (
        "Pass an Arrow table, or files that the function opens; for a Hugging Face data set, the folder that "
        "save_to_disk writes."
    )
    if isinstance(value, tuple):
        how = "Pass a list: a tuple within an item does not come back as a tuple."
    elif hasattr(value, "iloc"):
        how = "Pass the data frame itself (the function gets each row as a mapping), or row.to_dict()."
    raise SlurmGPUError(f"{where} has a value of type {type(value).__name__}; {EXPECTED}. {how}")
