"""Judge or score all texts of an item: their rows joined into one, and the choice among them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.metrics import accuracy, best_of, ratio, vote, vote_weights
from slurmgpu.llm.interface.sampling import mix
from slurmgpu.llm.prompts.templates import take
from slurmgpu.loader.names import BUILT_IN
from slurmgpu.run.plan_beside import plan_beside
from slurmgpu.shards.columns import Array, Column, Json, Ragged, Text
from slurmgpu.workload import Item, Row
from slurmgpu.workloads.grading.checkers import Checker
from slurmgpu.workloads.item_errors import compute_good, value_or_error
from slurmgpu.workloads.language_model import good_blocks, good_values, total

if TYPE_CHECKING:
    from slurmgpu.results import Merged

OF_PATHS = ("text", "steps")
"""The keys of an entry, such as a path of `collect`, that replace the item's own fields in the prompt."""

NUMBER = (int, float, np.integer, np.floating)

MOST_PARTS = 64
"""The most parts that an item's texts are divided into; the number of texts is known only when it is computed."""

CHOICES = ("best", "vote", "weighted_vote")

SELECTED: Mapping[str, Column] = {
    "n_texts": Array("int32"),
    "errors": Json(),
    "best": Array("int32"),
    "best_text": Text(),
}
VOTED: Mapping[str, Column] = {
    "answers": Json(),
    "correct": Ragged("bool"),
    "vote": Text(),
    "weighted_vote": Text(),
    "accuracy": Array("float32"),
    **dict.fromkeys([*(f"{name}_correct" for name in CHOICES), "any_correct"], Array("bool")),
}
"""The columns of a choice among texts, and those of votes on their final answers."""


@dataclass(frozen=True)
class Samples:
    """The texts in the field `each` of an item, which a workload computes one by one.

    With a `checker`, votes are counted over the texts' final answers. A truncated text has no answer and is wrong, as
    in `collect`; in an item of `generate`, `finish_reason` says which texts were truncated. For other texts the checker
    decides whether they are right if `reference` is set, else `correct` of the entry, as `collect` writes it, else
    `right`, which takes the row. `is_raw` says that scores may be negative, so that votes are weighted by their
    exponentials.
    """

    each: str
    own: Mapping[str, Column]
    checker: Checker | None = None
    reference: str | None = None
    is_raw: bool = False
    right: Callable[[Row], bool] | None = None

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of a joined row."""
        clashes = [name for name in self.own if name in SELECTED or name in VOTED]
        assert not clashes, clashes
        joined = {name: _joined(column) for name, column in self.own.items()}
        return {**joined, **SELECTED, **(VOTED if self.checker is not None else {})}

    def compute(
        self, items: Sequence[Item], rows_of: Callable[[Sequence[Item]], Sequence[Row | ItemError]]
    ) -> list[Row | ItemError]:
        """A row for each item, from the rows of its texts; an ItemError if all texts failed."""

        def join(parts: Sequence[Sequence[Item]]) -> list[Row | ItemError]:
            rows = iter(rows_of([*chain.from_iterable(parts)]))
            return [value_or_error(self._join, each, [*islice(rows, len(each))]) for each in parts]

        return compute_good(items, lambda item: [*self.parts(item)], join)

    def parts(self, item: Item) -> Iterator[Item]:
        """An item with its own seed for each text; ItemError for anything but a list of texts."""
        if has_failed(item.data, [self.each]):
            raise ItemError(f"the judged item failed: {item.data['error']}")
        entries = take(item.data, self.each)
        if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence) or not entries:
            raise ItemError(f"field {self.each!r} holds {entries!r:.80}; expected a list of texts")
        for number, entry in enumerate(entries):
            more = {self.each: entry}
            if isinstance(entry, Mapping) and isinstance(entry.get("text"), str):
                more |= {name: entry[name] for name in OF_PATHS if name in entry}
            elif not isinstance(entry, str):
                raise ItemError(
                    f"entry {number} of field {self.each!r} holds {entry!r:.80}; expected a text, or a mapping with one"
                )
            yield Item(item.index, {**item.data, **more}, mix(item.run_seed, number))

    def _join(self, parts: Sequence[Item], rows: Sequence[Row | ItemError]) -> Row:
        errors = [row for row in rows if isinstance(row, ItemError)]
        if len(errors) == len(rows):
            raise errors[0]
        joined: dict[str, Any] = {
            name: _all(column, [None if isinstance(row, ItemError) else row[name] for row in rows])
            for name, column in self.own.items()
        }
        scores = [math.nan if isinstance(row, ItemError) else float(row["score"]) for row in rows]
        best = best_of(scores)
        joined |= {
            "n_texts": len(rows),
            "errors": [str(row) if isinstance(row, ItemError) else None for row in rows],
            "best": best,
            "best_text": "" if best < 0 else text_of_entry(parts[best].data[self.each]),
        }
        return joined if self.checker is None else joined | self._voted(self.checker, parts, rows, scores, best)

    def _voted(
        self,
        checker: Checker,
        parts: Sequence[Item],
        rows: Sequence[Row | ItemError],
        scores: Sequence[float],
        best: int,
    ) -> dict[str, Any]:
        texts = [text_of_entry(part.data[self.each]) for part in parts]
        cut = [_is_cut(part, self.each, number, len(parts)) for number, part in enumerate(parts)]
        answers = [None if is_cut else checker.answer(text) for text, is_cut in zip(texts, cut, strict=True)]
        correct = [
            not is_cut and self._is_right(checker, part, text, row)
            for part, text, row, is_cut in zip(parts, texts, rows, cut, strict=True)
        ]
        shares = _shares(parts[0].data, len(parts))  # the same in all parts of an item
        worth = vote_weights(scores, is_raw=self.is_raw)
        normal = [None if answer is None else checker.normal(answer) for answer in answers]
        voted = vote(normal, shares)
        weighted = vote(normal, [share * weight for share, weight in zip(shares, worth, strict=True)])
        chosen = {"best": best, "vote": voted, "weighted_vote": weighted}
        return {
            "answers": answers,
            "correct": correct,
            "vote": "" if voted < 0 else answers[voted] or "",
            "weighted_vote": "" if weighted < 0 else answers[weighted] or "",
            "accuracy": sum(share for share, is_right in zip(shares, correct, strict=True) if is_right) / sum(shares),
            "any_correct": any(correct),
            **{f"{name}_correct": number >= 0 and correct[number] for name, number in chosen.items()},
        }

    def _is_right(self, checker: Checker, part: Item, text: str, row: Row | ItemError) -> bool:
        if self.reference is not None:
            return checker.is_correct(text, part.data)
        entry = part.data[self.each]
        if isinstance(entry, Mapping) and isinstance(entry.get("correct"), bool):
            return bool(entry["correct"])
        if self.right is None:
            raise ItemError(f"the entries of field {self.each!r} have no `correct`, and reference is not set; set it")
        return not isinstance(row, ItemError) and self.right(row)

    def summarize(self, merged: Merged) -> dict[str, Any]:
        """Count texts; with votes, how often each choice among an item's texts is right. Failed items are wrong."""
        n, n_lost = len(merged), sum(error is not None for error in flat(merged, "errors"))
        summary: dict[str, Any] = {"n_items": n, "n_failed": int(merged.failed.sum())}
        summary |= {"n_texts": total(merged, "n_texts"), "n_failed_texts": n_lost}
        if self.checker is None:
            return summary
        shares = sum(float(each.sum(dtype=np.float64)) for each in good_blocks(merged, "accuracy"))
        summary["accuracy"] = ratio(shares, n)
        for name in (*CHOICES, "any"):
            summary |= accuracy(total(merged, f"{name}_correct"), n, f"{name}_")
        return summary


def check_each(each: str | None, final: str | None, reference: str | None) -> None:
    """Refuse settings for votes without several texts or without a checker."""
    if reference is not None and (each is None or final is None):
        missing = "each" if each is None else "final"
        raise SlurmGPUError(
            f"reference is for votes among an item's texts, which need each and final, and {missing} is not set; "
            f'expected each = "text" and final = "numeric", or another checker. Remove reference, or set them.'
        )


def check_votes(files: Sequence[Path], samples: Samples | None) -> list[str]:
    """A warning that the report will not say which paths of a run of `collect` are right, because `final` is not set.

    SlurmGPUError for votes among the answers of a run of `generate`, if nothing says which are right.
    """
    if samples is None:
        return []
    for plan in map(plan_beside, files):
        workload, settings = str(plan.get("workload")), plan.get("settings", {})
        if workload == BUILT_IN["collect"] and samples.checker is None and samples.each == "paths":
            given = {"final": settings.get("checker", "numeric"), "pattern": settings.get("pattern")}
            how = ", ".join(f"{name} = {json.dumps(value)}" for name, value in given.items() if value is not None)
            return [
                f"The report will not say how often the best path is right, nor how the paths vote. Set {how}, the "
                f"checker of {plan['name']}: its paths say which of them are right."
            ]
        if workload == BUILT_IN["generate"] and samples.checker and samples.reference is None and samples.right is None:
            kept = f" The run has kept {', '.join(plan['keep'])}." if plan.get("keep") else ""
            raise SlurmGPUError(
                f"final lets the texts of an item vote, and nothing says which are right. Set reference to the field "
                f"with the right answer, or remove final.{kept}"
            )
    return []


_FAILURE = re.compile(r"[a-z]+(_[a-z]+)*: ")


def text_of_entry(entry: str | Mapping[str, Any]) -> str:
    """The text of an entry: the entry itself, or its `text`."""
    return entry if isinstance(entry, str) else str(entry["text"])


def has_failed(data: Mapping[str, Any], fields: Collection[str]) -> bool:
    """Whether an item is a failed row of a merged file or its export; `fields` are the fields that are read.

    Other data may have an index and a field `error`, too; but a failed row's error begins with a failure class, its
    computed columns are empty, and it has only the fields that its run kept.
    """
    error = data.get("error")
    if not (isinstance(error, str) and _FAILURE.match(error) and "index" in data):
        return False
    read = (data[name] for name in fields if name in data)
    return any(value is None or (isinstance(value, str | list | dict) and not value) for value in read)


def flat(merged: Merged, name: str) -> Iterator[Any]:
    """A column's values of all texts of the items that did not fail."""
    return chain.from_iterable(good_values(merged, name))


def _shares(data: Mapping[str, Any], n: int) -> list[float]:
    """Each text's share of the independent samples: equal, except for the paths of a tree."""
    weights = data.get("weights")
    if isinstance(weights, Sequence | np.ndarray) and len(weights) == n and all(isinstance(w, NUMBER) for w in weights):
        try:
            found = [float(weight) for weight in weights]
        except OverflowError:  # an integer of hundreds of digits belongs to an unrelated field with this name
            found = []
        if all(weight >= 0 for weight in found) and 0 < sum(found) < math.inf:
            return found
    return [1 / n] * n


def _is_cut(part: Item, each: str, number: int, n: int) -> bool:
    """Whether a text was truncated: a path of `collect` says so, and for answers of `generate` the item does."""
    if isinstance(entry := part.data[each], Mapping):
        return entry.get("cut") is True
    reasons = part.data.get("finish_reason")
    return isinstance(reasons, list) and len(reasons) == n and reasons[number] == "length"


def _joined(column: Column) -> Column:
    """The column for all texts' values: numbers concatenated, everything else as a list."""
    return Ragged(column.dtype) if isinstance(column, Array) else Json()


def _all(column: Column, values: Sequence[Any]) -> Any:
    """The values for all texts, with NaN, 0, false or null for a text without a row."""
    if not isinstance(column, Array):
        return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    blank = np.full(column.shape, np.nan if column.dtype.kind == "f" else 0, column.dtype)
    return np.concatenate([np.atleast_1d(blank if value is None else np.asarray(value)) for value in values])
