"""What a judge is given: texts of a judged run, and the truth that items carry."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu import results
from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.llm.prompts import take, text_of
from slurmgpu.shards.columns import Json, columns_from_json
from slurmgpu.workloads.judge.opponents import plan_beside
from slurmgpu.workloads.judge.rubrics import Rubric

TEXTS = frozenset(("text", "text_a", "text_b"))
"""What prompts call a judged text."""

FIRST_ROWS = 100
"""Rows of a merged file that tell whether a column of JSON values has lists."""


def text_in(data: Mapping[str, Any], field: str, called: str | None = None) -> str:
    """The text in a field, which the items call `called`; ItemError for a field that holds anything else."""
    value = take(data, field)
    called = called or field
    if value is None:
        raise ItemError(f"field {called!r} is null")
    if not isinstance(value, str):
        raise ItemError(f"field {called!r} holds {text_of(value)!r:.80}; expected a text")
    return value


def check_texts(path: Path, fields: Collection[str]) -> None:
    """Refuse a run whose items have lists of texts where a judge is to see one, as far as its file or plan tells."""
    for field in sorted(fields):
        if _has_lists(path, field):
            raise SlurmGPUError(
                f"{path} has no text in {field!r} but a list, as of a run with n > 1; a judge takes one text of each "
                f"item. Name one of them in a rubric's prompt, such as {{{field}[0]}}, or judge a run with n = 1."
            )


def _has_lists(path: Path, field: str) -> bool:
    if not path.exists():  # a run that is still at work: its plan tells
        plan = plan_beside(path)
        is_kept = field in plan.get("settings", {}).get("keep", ())
        return not is_kept and isinstance(columns_from_json(plan.get("columns", {})).get(field), Json)
    try:
        merged = results.open(path)
    except SlurmGPUError:
        return False  # some other table
    with merged:
        if not isinstance(merged.columns.get(field), Json):
            return False
        values = [value for value in merged[field].python_values(0, FIRST_ROWS) if value is not None]
    return bool(values) and not any(isinstance(value, str) for value in values)


def check_renamed(renamed: Mapping[str, str], known: Collection[str]) -> None:
    """Refuse a setting `fields` that renames what no text of the rubric names."""
    for name in renamed:
        if name not in known:
            raise SlurmGPUError(
                f"fields has {name!r}, which no text of the rubric names; expected what the rubric calls a field = "
                f"what the items call it.{did_you_mean(name, known)}"
            )


def advice(fields: Collection[str], renamed: Mapping[str, str], alone: Collection[str]) -> dict[str, str]:
    """What to do about a field that no item has; `alone` are two texts of which a second run could have one."""
    found = {
        renamed.get(name, name): f' The setting fields = {{{name} = "…"}} says what the items call it.'
        for name in fields
    }
    compared = (
        " The rubric compares two texts: against names a second run, whose texts the input's are compared with; "
        "without it each item has both."
    )
    return found | {renamed.get(name, name): compared for name in alone}


def has_failed(data: Mapping[str, Any]) -> bool:
    """Whether an item is the row of one that failed, in a merged file or an export of one.

    Other data may have a field `error`, too; but beside its index and why it failed, such a row says nothing.
    """
    if not (isinstance(data.get("error"), str) and data["error"] and "index" in data):
        return False
    rest = (value for name, value in data.items() if name not in ("index", "error"))
    return not any(isinstance(value, str | list | dict) and value for value in rest)


def truth_of(value: Any, rubric: Rubric) -> str:
    """The name of the verdict that a truth stands for, by its name or its worth; "" for none, else what it says.

    From a CSV file all values are texts: "True", "1" and "1.0" are worth as much as 1 is.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        word = value.strip()
        named = [name for name in rubric.names if name.casefold() == word.casefold()]
        if named:
            return word if word in named else named[0]
        worth = _number(word)
    else:
        worth = float(value) if isinstance(value, bool | int | float | np.number | np.bool_) else None
    return next((name for name, its_worth in rubric.values.items() if its_worth == worth), text_of(value))


def _number(word: str) -> float | None:
    known = {"true": 1.0, "false": 0.0}
    try:
        return known[word.casefold()] if word.casefold() in known else float(word)
    except ValueError:
        return None
