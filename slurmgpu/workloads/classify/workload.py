"""Classification with any causal language model: `use = "classify"`, as in docs/how-to/classify-text.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers import metrics
from slurmgpu.llm.answers.parsing import Labels, check_labels, compile_pattern, json_field, search_last
from slurmgpu.llm.interface.engine import Output, Prompt, Question, Request, Scores
from slurmgpu.llm.interface.sampling import mix
from slurmgpu.llm.models.adapters import choice_of
from slurmgpu.llm.prompts.structures import structure_of
from slurmgpu.llm.prompts.templates import Last, take, text_of
from slurmgpu.llm.server_engine.settings import uses_chat
from slurmgpu.llm.settings import PromptedSettings, check_scored, prompts_of, sampling
from slurmgpu.shards.columns import Array, Column, Text
from slurmgpu.workload import FETCH, Item, Placement, Row, Share, TaskContext, Template
from slurmgpu.workloads.item_errors import compute_good, value_of, value_or_error
from slurmgpu.workloads.language_model import (
    SCORES_NOTHING,
    LanguageModelWorkload,
    ends_summary,
    good_values,
    n_truncated,
)

if TYPE_CHECKING:
    from slurmgpu.results import Merged

Method = Literal["score", "parse"]

FOR_ANSWERS = ("pattern", "json", "schema", "regex", "grammar")
"""Settings of free answers."""

NO_CONTENT = "N/A"
"""The fields of an item when the prompt alone is scored: the content-free input of Zhao et al. 2021."""

MAX_GROUPS = 100
"""The most groups in a summary, the largest ones."""

MAX_UNKNOWN = 10
"""The most truths that are no labels in a summary, the most frequent ones."""


class Asked(NamedTuple):
    """The prompt of an item, its seed, the values of the row's columns `truth` and `group`, and what is scored.

    `choices` are the spellings of each label; of fewer labels than there are if the item has fewer choices.
    """

    prompt: Prompt
    seed: int
    values: Mapping[str, Any]
    choices: tuple[tuple[str, ...], ...]


class Classify(LanguageModelWorkload):
    """One of `labels` for each item, chosen by a model that is asked `prompt`, or the chat in `messages`.

    With `method = "score"` it is the most likely answer among the labels; with "parse" the label that the free answer
    names. `truth` and `group` are fields of the input: the first adds metrics to the report, the second metrics for
    each group. docs/reference/language-models.md has all settings.
    """

    template = Template(
        Path(__file__).with_name("template.toml"),
        items=[{"text": text} for text in ("We are glad to have you here.", "All of them are vermin.", "It may rain.")],
        first=FETCH,
    )

    texts = ("prompt", "system", "fewshot", "target", "schema", "grammar")

    def __init__(
        self,
        *,
        model: str,
        labels: list[str] | dict[str, str],
        prompt: str | None = None,
        messages: str | None = None,
        last: Last | None = None,
        system: str | None = None,
        method: Method = "score",
        choices: str | Sequence[str] = (),
        length_normalize: bool = False,
        calibrate: bool = False,
        pattern: str | None = None,
        json: str | None = None,
        schema: str | dict[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        truth: str | None = None,
        group: str | None = None,
        keep: Sequence[str] = (),
        **settings: Unpack[PromptedSettings],
    ) -> None:
        self.labels = check_labels(list(labels))
        self.method, self.length_normalize, self.calibrate = method, length_normalize, calibrate
        self.truth, self.group, self.kept_fields = truth, group, tuple(keep)
        given: dict[str, Any] = {"length_normalize": length_normalize, "calibrate": calibrate}
        given |= {"pattern": pattern, "json": json, "schema": schema, "regex": regex, "grammar": grammar}
        _check_method(method, [name for name, value in given.items() if value], settings)
        self.choices_field = choices if isinstance(choices, str) else None
        if self.choices_field is not None:
            _check_choices_field(method, f"{prompt} {system} {messages}", calibrate=calibrate)
        self.choices = _choices(self.labels, () if isinstance(choices, str) else choices)
        kept_to = [each for [each] in self.choices] if choices and method == "parse" else None
        structure = structure_of(schema, kept_to, regex, grammar)
        # An answer that is kept to a choice is that choice.
        self._by_choice = {} if kept_to is None else dict(zip(kept_to, self.labels, strict=True))
        self.prompts = prompts_of(settings, prompt, messages, system, last, {"labels": _described(labels)})
        is_described = isinstance(labels, dict) and any(labels.values())
        self._hides_descriptions = is_described and messages is None and "labels" not in f"{prompt} {system}"
        if calibrate:
            _check_calibrated(prompt, settings)
        self.sampling = sampling(settings, structure=structure)
        if pattern is not None and json is not None:
            raise SlurmGPUError("pattern and json are two ways to find the label in an answer; set one of them.")
        self._pattern = None if pattern is None else compile_pattern(pattern)
        self._truncates = "truncation_side" in settings
        self._json, self._finder = json, Labels(self.labels)
        self._offsets = np.zeros(len(self.labels))
        self.columns = self._own_columns()
        self.fields = {*self.prompts.fields, *filter(None, (truth, group, self.choices_field))}
        beyond = [*self.prompts.beyond(chat=uses_chat(settings))]
        if method == "score":
            beyond.append(f'{SCORES_NOTHING} Set method = "parse", and choose another engine for "score".')
        max_tokens = self.sampling.max_tokens if method == "parse" else 0
        self.use_model(model, settings, max_tokens=max_tokens, beyond=beyond)

    def _own_columns(self) -> dict[str, Column]:
        columns: dict[str, Column] = {"label": Text()}
        if self.method == "score":
            columns |= {"scores": Array("float32", (len(self.labels),)), "margin": Array("float32")}
        else:
            columns |= {"raw": Text(), "finish_reason": Text()}
        columns["parse_ok"] = Array("bool")
        if self._truncates:
            columns["n_truncated"] = Array("int32")
        return columns | {name: Text() for name in ("truth", "group") if getattr(self, name) is not None}

    def load(self, task: TaskContext) -> None:
        """Load the model, and score the prompt without an item if calibrate is set."""
        super().load(task)
        if self.calibrate:
            # Once and alone: the offsets of all scores must not depend on a batch.
            [found] = self._scores([_question(0, self.prompts.fill(NO_CONTENT), self.choices)])
            if isinstance(found, ItemError):
                raise SlurmGPUError(f"calibrate: the prompt without an item cannot be scored: {found}")
            self._offsets = self._by_label(found)

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The label of each item, or an ItemError for one without a prompt or an answer."""
        return compute_good(items, self._ask, self._rows)

    def _ask(self, item: Item) -> Asked:
        values = {}
        for name, field in (("truth", self.truth), ("group", self.group)):
            if field is not None:
                value = take(item.data, field)
                values[name] = "" if value is None else text_of(value)
        if values.get("truth", "") not in ("", *self.labels):
            values["truth"] = self._finder.exactly(values["truth"]) or values["truth"]
        choices = self.choices if self.choices_field is None else self._own_choices(item.data)
        truth = values.get("truth", "")
        if truth in self.labels[len(choices) :]:
            raise ItemError(f"the truth {truth!r} is beyond the item's {len(choices)} choices")
        return Asked(self.prompts.of(item.data, item.seed), item.seed, values, choices)

    def _own_choices(self, data: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
        """The spellings of each of the item's choices, in the order of the labels."""
        assert self.choices_field is not None
        given = take(data, self.choices_field)
        is_texts = isinstance(given, list) and all(isinstance(each, str | int | float) for each in given)
        if not is_texts or not 2 <= len(given) <= len(self.labels):
            raise ItemError(
                f"the field {self.choices_field!r} is {given!r}; expected a list of 2 to {len(self.labels)} texts, at "
                f"most one for each label"
            )
        return _spelt([text_of(each) for each in given])

    def _rows(self, asked: Sequence[Asked]) -> list[Row | ItemError]:
        rows: list[Row | ItemError]
        if self.method == "score":
            found = self._scores([_question(number, one.prompt, one.choices) for number, one in enumerate(asked)])
            rows = [value_or_error(self._scored, scores) for scores in found]
        else:
            requests = [Request(i, one.prompt, self.sampling, mix(one.seed, 0)) for i, one in enumerate(asked)]
            rows = [value_or_error(self._parsed, answer) for answer in self._answers(requests)]
        return [
            row if isinstance(row, ItemError) else {**row, **one.values} for row, one in zip(rows, asked, strict=True)
        ]

    def _scored(self, given: Scores | ItemError) -> Row:
        scores = value_of(given)
        found = self._by_label(scores) - self._offsets
        # One label may be impossible (-inf), but not all; NaN is an overflow.
        if np.isnan(found).any() or not np.isfinite(found.max()):
            raise ItemError('the labels\' scores are not finite: they overflow; precision = "fp32" has a larger range')
        shares = np.exp(found - found.max())
        shares /= shares.sum()
        best, second = np.sort(shares)[::-1][:2]
        label = self.labels[int(shares.argmax())]
        row = {"label": label, "scores": shares, "margin": best - second, "parse_ok": True}
        return row | self._truncated(scores)

    def _truncated(self, found: Scores | Output) -> dict[str, Any]:
        """The column that says how much of the prompt was cut, if it may be."""
        return {"n_truncated": found.n_truncated} if self._truncates else {}

    def _by_label(self, scores: Scores) -> npt.NDArray[np.float64]:
        """The labels' log p(label | prompt): summed over spellings, or the best mean over a spelling's tokens.

        -inf for labels beyond the item's choices.
        """
        logprobs = np.asarray(scores.logprobs, np.float64).reshape(-1, len(self.choices[0]))
        if self.length_normalize:
            found = (logprobs / np.reshape(scores.n_tokens, logprobs.shape)).max(axis=1)
        else:
            found = np.logaddexp.reduce(logprobs, axis=1)
        by_label = np.full(len(self.labels), -np.inf)
        by_label[: len(found)] = found
        return by_label

    def _parsed(self, given: Output | ItemError) -> Row:
        answer = value_of(given)
        label = self.label_of(answer.text)
        row = {"label": label or "", "raw": answer.text, "finish_reason": answer.finish_reason}
        return {**row, "parse_ok": label is not None, **self._truncated(answer)}

    def label_of(self, text: str) -> str | None:
        """The label that an answer names; None if it names none, or several."""
        if text in self._by_choice:
            return self._by_choice[text]
        if self._json is not None:
            value = json_field(text, self._json)
            return None if value is None else self._finder.exactly(text_of(value))
        if self._pattern is not None:
            found = search_last(self._pattern, text)
            return None if found is None else self._finder.exactly(found) or self._finder.within(found)
        return self._finder.within(text)

    def place(self, share: Share) -> Placement:
        """The model's placement, with a note if the prompt does not show the labels' descriptions."""
        found = super().place(share)
        if not self._hides_descriptions:
            return found
        unseen = (
            "The prompt has no {labels}, so the model does not see the labels' descriptions. Add {labels} to show them."
        )
        return replace(found, lines=(*found.lines, unseen))

    def summarize(self, merged: Merged) -> dict[str, Any]:
        """Count the labels; with true labels add metrics."""
        counted = self._count(merged)
        n_failed = int(merged.failed.sum())
        labels = Counter[str]()
        for (_, _, label), count in counted.items():
            labels[label] += count
        summary: dict[str, Any] = {"n_failed": n_failed, "n_unparsed": labels.pop("", 0)}
        if self._truncates:
            summary["n_truncated"] = n_truncated(merged)
        summary["labels"] = {label: labels[label] for label in self.labels}
        if self.method == "parse":
            summary |= ends_summary(Counter(good_values(merged, "finish_reason")), self.sampling.max_tokens)
        return summary if self.truth is None else summary | self._metrics(counted, n_failed)

    def _count(self, merged: Merged) -> Counter[tuple[str, str, str]]:
        """The number of items by group, true label and label; "" for a missing one."""
        truths = repeat("") if self.truth is None else good_values(merged, "truth")
        groups = repeat("") if self.group is None else good_values(merged, "group")
        return Counter(zip(groups, truths, good_values(merged, "label"), strict=False))

    def _metrics(self, counted: Mapping[tuple[str, str, str], int], n_failed: int) -> dict[str, Any]:
        pairs, by_group = Counter[tuple[str, str]](), dict[str, Counter[tuple[str, str]]]()
        for (group, truth, label), count in counted.items():
            pairs[truth, label] += count
            by_group.setdefault(group, Counter())[truth, label] += count
        known = set(self.labels)
        unknown = Counter[str]()
        for (truth, _), count in pairs.items():
            if truth not in known and truth:
                unknown[truth] += count
        summary: dict[str, Any] = {
            "n_without_truth": sum(count for (truth, _), count in pairs.items() if truth == ""),
            "n_unknown_truth": unknown.total(),
        }
        if unknown:
            summary["unknown_truths"] = dict(
                sorted(unknown.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_UNKNOWN]
            )
        summary |= metrics.classification_summary(metrics.count_matrix(pairs, self.labels), self.labels, n_failed)
        return summary if self.group is None else summary | self._group_metrics(by_group)

    def _group_metrics(self, by_group: Mapping[str, Counter[tuple[str, str]]]) -> dict[str, Any]:
        largest = sorted(by_group, key=lambda group: (-by_group[group].total(), group))[:MAX_GROUPS]
        matrices = {group: metrics.count_matrix(by_group[group], self.labels) for group in sorted(largest)}
        accuracy = {
            group: {
                "n": int(counts.sum()),
                "accuracy": metrics.ratio(int(np.trace(counts)), int(counts.sum())),
                "macro_f1": metrics.macro_f1(counts),
            }
            for group, counts in matrices.items()
        }
        rates = {
            label: {group: metrics.label_rates(counts, place) for group, counts in matrices.items()}
            for place, label in enumerate(self.labels)
        }
        return {"n_groups": len(by_group), "by_group": accuracy, "label_by_group": rates}


def _check_calibrated(prompt: str | None, settings: PromptedSettings) -> None:
    """Refuse settings that calibration cannot use: it scores one prompt, without an item."""
    if prompt is None:
        raise SlurmGPUError("calibrate scores the prompt without an item, and prompt is not set. Set it to a template.")
    if "images" in settings:
        raise SlurmGPUError(
            "calibrate scores the prompt without an item, and images is set: there is no image without content. "
            "Remove calibrate."
        )
    if choice_of(settings) is not None:
        raise SlurmGPUError(
            "calibrate scores the prompt without an item, but a field of each item chooses the adapter. Remove "
            "calibrate, or make a run for each adapter."
        )
    if "num_fewshot" in settings:
        raise SlurmGPUError(
            "calibrate scores one prompt for all items, but num_fewshot draws examples for each item. Remove "
            "calibrate, or remove num_fewshot: all items then get all examples."
        )


def _check_method(method: Method, given: Sequence[str], settings: PromptedSettings) -> None:
    if method == "score":
        check_scored(settings, [name for name in FOR_ANSWERS if name in given])
    elif wrong := [name for name in ("length_normalize", "calibrate") if name in given]:
        raise SlurmGPUError(
            f"{wrong[0]} is set, and method is 'parse'; it needs method = \"score\". Remove it, or set method."
        )


def _choices(labels: Sequence[str], choices: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The spellings of each label: its text in `choices`, else its name with and without a space before it.

    A model writes one or the other depending on the prompt's end and the chat template; both mean the label.
    """
    if not choices:
        return _spelt(labels)
    if len(choices) != len(labels):
        raise SlurmGPUError(f"choices has {len(choices)} texts for {len(labels)} labels; expected one for each.")
    return tuple((choice,) for choice in check_labels(choices, "choices"))


def _spelt(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((name, f" {name}") for name in names)


def _question(number: int, prompt: Prompt, choices: tuple[tuple[str, ...], ...]) -> Question:
    return Question(number, prompt, tuple(way for ways in choices for way in ways), len(choices[0]))


def _check_choices_field(method: Method, prompt: str, *, calibrate: bool) -> None:
    """Refuse settings that need the same choices for all items."""
    if method == "parse":
        raise SlurmGPUError(
            "choices names a field, and method is 'parse', which reads a label in the answer. Remove choices, or set "
            'method = "score".'
        )
    if calibrate:
        raise SlurmGPUError(
            "calibrate scores the prompt without an item, but choices names a field, and each item has its own. Remove "
            "calibrate."
        )
    if "{labels}" in prompt:
        raise SlurmGPUError(
            "The prompt has {labels}, which are the same for all items, but choices names a field, and each item has "
            "its own. Remove {labels}; the item's fields may show its choices."
        )


def _described(labels: Sequence[str] | Mapping[str, str]) -> str:
    """The text of `{labels}` in a prompt: a line for each described label, else the names."""
    if isinstance(labels, Mapping):
        return "\n".join(f"- {name}: {description}" for name, description in labels.items())
    return ", ".join(labels)
