"""The judge's input: texts of a judged run, and the items' truth."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu import results
from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.llm.answers.final_answers import number_of
from slurmgpu.llm.prompts.templates import take, text_of
from slurmgpu.run.plan_beside import plan_beside
from slurmgpu.shards.columns import Json, columns_from_json
from slurmgpu.workloads.judge.rubrics import Rubric

TEXTS = frozenset(("text", "text_a", "text_b"))
"""The names of judged texts in prompts."""

FIRST_ROWS = 100
"""The number of rows of a merged file that are checked for lists."""


def text_in(data: Mapping[str, Any], field: str, called: str) -> str:
    """The text in a field, named `called` in the items; ItemError for anything else."""
    value = take(data, field)
    if value is None:
        raise ItemError(f"field {called!r} is null")
    if not isinstance(value, str):
        raise ItemError(f"field {called!r} holds {text_of(value)!r:.80}; expected a text")
    return value


def check_texts(path: Path, fields: Collection[str], *, of_two: bool) -> None:
    """Refuse a run with lists of texts in these fields, by its file or plan; with `of_two` texts are compared."""
    for field in sorted(fields):
        if _has_lists(path, field):
            found = f"{path} has a list in {field!r}, as runs with n > 1 do; expected one text for each item."
            if of_two:
                how = (
                    "To compare several samples of each prompt, have it as often in the input, and generate with n = 1."
                )
            else:
                how = (
                    f'Set each = "{field}" to judge all of them, or choose one in a rubric\'s prompt, such as '
                    f"{{{field}[0]}}."
                )
            raise SlurmGPUError(f"{found} {how}")


def _has_lists(path: Path, field: str) -> bool:
    if not path.exists():  # an unfinished run: its plan has the columns
        plan = plan_beside(path)
        is_kept = field in plan.get("keep", {})
        return not is_kept and isinstance(columns_from_json(plan.get("columns", {})).get(field), Json)
    try:
        merged = results.open(path)
    except SlurmGPUError:
        return False  # another kind of file
    with merged:
        if not isinstance(merged.columns.get(field), Json):
            return False
        values = [value for value in merged[field].python_values(0, FIRST_ROWS) if value is not None]
    return bool(values) and not any(isinstance(value, str) for value in values)


def check_one_text(each: str, truth: str | None, rubric: Rubric) -> None:
    """Refuse settings that do not work with several texts for each item: comparisons of two, and one true verdict."""
    if rubric.swap:
        raise SlurmGPUError(
            f"each = {each!r} judges texts one at a time, and the rubric compares two; expected a rubric without swap, "
            f'such as "rating". Remove each, or choose another rubric.'
        )
    if truth is not None:
        raise SlurmGPUError(
            "truth is one verdict for each item, but each judges several texts of an item. Remove truth; with final, "
            "reference says which texts are right."
        )


def check_renamed(renamed: Mapping[str, str], known: Collection[str], owner: str) -> None:
    """Refuse a setting `fields` with a name that the templates of the rubric, or another `owner`, do not have."""
    for name in renamed:
        if name not in known:
            raise SlurmGPUError(
                f"fields has {name!r}, which is not in the templates of {owner}; expected TEMPLATE_NAME = "
                f'"ITEM_FIELD".{did_you_mean(name, known)}'
            )


def advice(fields: Collection[str], renamed: Mapping[str, str], alone: Collection[str]) -> dict[str, str]:
    """Advice for fields that the items lack, by field; `alone` are two texts that a second run could provide."""
    found = {renamed.get(name, name): f' Set fields = {{{name} = "…"}} to its name in the items.' for name in fields}
    compared = (
        " The rubric compares two texts: set against to a second run to compare with, or put both texts into each item."
    )
    return found | {renamed.get(name, name): compared for name in alone}


def truth_of(value: Any, rubric: Rubric) -> str:
    """The name of the verdict that equals a truth by name or value; "" for null; otherwise the truth as text.

    A CSV file has only texts: "True", "1", "1.0" and "one" equal 1, and "1,000" equals 1000.
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
    if word.casefold() in known:
        return known[word.casefold()]
    number = number_of(word)
    return None if number is None else float(number.value)
