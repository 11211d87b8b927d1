"""The items of a call in the file `{in}`: JSON lines with their data, or their fields as JSON, CSV or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError
from slurmgpu.workloads.command.placeholders import PARQUET, as_json, plain

OF_ROWS = ("index", "error")
"""Reserved names: they describe the item itself, so no field may have them in forms that mix both."""
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
"""Texts of true and false, in lower case."""


def request_of(index: int, seed: int, data: Mapping[str, object], form: str, *, has_index: bool) -> bytes:
    """The line of an item with its data; ItemError if JSON cannot hold the data, or `form` the fields."""
    taken = next((name for name in OF_ROWS if name in data and (has_index or name != "index")), None)
    if form != "items" and taken is not None:
        raise ItemError(f"it has a field {taken!r}{taken_for(taken, form)}")
    try:
        return as_json({"index": index, "seed": seed, "data": dict(data)}).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ItemError(f"the item's data cannot be written as JSON: {error}") from error


def taken_for(name: str, form: str) -> str:
    """Why items in this form of `{in}` cannot have a field of this name; continues "it has a field"."""
    return (
        f", a name that {{in:{form}}} reserves. Use {{in}}, whose lines have the fields under "
        f"data{', or --set match=index' if name == 'index' else ''}."
    )


def write_items(
    path: Path, form: str, requests: Mapping[int, bytes], *, has_index: bool
) -> dict[int, Mapping[str, Any]]:
    """Write the items of a call; returns by index the fields that a program may write back with the columns.

    Their index stands before their fields if the form `has_index`, as rows need it.
    """
    if form == "items":
        path.write_bytes(b"".join(requests.values()))
        return {}
    items = [json.loads(line) for line in requests.values()]
    records = [{**({"index": item["index"]} if has_index else {}), **item["data"]} for item in items]
    given = {item["index"]: item["data"] for item in items}
    if form == "jsonl":
        path.write_text("".join(as_json(record) + "\n" for record in records), "ascii")
        return given
    if form == "json":
        path.write_text(as_json(records), "ascii")
        return given
    if form == PARQUET:
        from slurmgpu.workloads.command import parquet_files  # pyarrow is an extra, and slow to import

        return dict(zip(given, parquet_files.write_items(path, records), strict=False))
    names = list(dict.fromkeys(name for record in records for name in record))
    lines = [names, *([as_field(record.get(name)) for name in names] for record in records)]
    # Before 3.13 Python quotes no field for a carriage return, which readers take for the end of a line.
    has_returns = any("\r" in field for line in lines for field in line)
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator="\n", quoting=csv.QUOTE_ALL if has_returns else csv.QUOTE_MINIMAL).writerows(
        lines
    )
    try:
        content = written.getvalue().encode("utf-8", "surrogateescape")  # a path may have any bytes
    except UnicodeEncodeError:
        content = written.getvalue().encode("utf-8", "backslashreplace")
    path.write_bytes(content)
    return given


def as_field(value: Any) -> str:
    """A value as the text of a field of CSV; a list or a mapping as JSON."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=_in_json)


def _in_json(value: Any) -> Any:
    try:
        return plain(value)
    except TypeError:  # a field that no argument can have: a decimal of Parquet
        return str(value)
