"""Judging by a language model with a rubric: verdicts are parsed from its answers, or chosen by their probabilities."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Composed, Question, Request, Structure
from slurmgpu.llm.interface.sampling import mix
from slurmgpu.llm.prompts.jinja_templates import TemplateFormat
from slurmgpu.llm.prompts.templates import take
from slurmgpu.llm.settings import PromptedSettings, check_range, check_scored, check_temperature, prompts_of, sampling
from slurmgpu.shards.columns import Array, Column, Json, Text
from slurmgpu.workload import Item, Row
from slurmgpu.workloads.item_errors import compute_good, value_of, value_or_error
from slurmgpu.workloads.judge.orders import JudgePrompt, shares_of, verdict_row
from slurmgpu.workloads.judge.rubrics import Reader, Rubric, check_choices
from slurmgpu.workloads.judge.verdicts import summarize, summarize_each
from slurmgpu.workloads.language_model import SCORES_NOTHING, LanguageModelWorkload
from slurmgpu.workloads.samples import Samples

if TYPE_CHECKING:
    from slurmgpu.results import Merged

RETRIES, RETRY_TEMPERATURE = 2, 0.7


class ByRubric(LanguageModelWorkload):
    """Verdicts on items whose fields have the names in the rubric's templates.

    `named` gives an example's fields these names. With `has_truth` the summary compares verdicts with the column
    `truth`.
    """

    owner = "the rubric"

    def __init__(
        self,
        model: str,
        rubric: Rubric,
        structure: Structure | None,
        retries: int | None,
        retry_temperature: float | None,
        settings: PromptedSettings,
        *,
        named: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        has_truth: bool,
    ) -> None:
        if rubric.method == "score":
            check_scored(settings, [] if structure is None else [structure.kind])
        self.rubric, self._reader = rubric, Reader(rubric)
        if structure is not None and structure.kind == "choices":
            check_choices(json.loads(structure.text), self._reader, rubric)
        written: PromptedSettings = {**settings, "template_format": cast(TemplateFormat, rubric.template_format)}
        self.prompts = prompts_of(written, rubric.prompt, None, rubric.system or None, None, named=named)
        self.sampling = sampling(settings, max_tokens=rubric.max_tokens, structure=structure)
        if settings.get("engine") == "server" and rubric.method == "parse":
            self.rubric = dataclasses.replace(rubric, fallback=False)
        self._repeat(retries, retry_temperature, settings)
        self._has_truth, self._truncates = has_truth, "truncation_side" in settings
        scores = f'{SCORES_NOTHING} Set method = "parse", or choose another engine for this rubric.'
        beyond = [scores] if rubric.method == "score" else []
        max_tokens = self.sampling.max_tokens if rubric.method == "parse" else 0
        self.use_model(model, settings, max_tokens=max_tokens, beyond=beyond)

    def _repeat(self, retries: int | None, temperature: float | None, settings: PromptedSettings) -> None:
        """Take the settings of retries; SlurmGPUError for wrong ones."""
        retries = RETRIES if retries is None else retries
        temperature = RETRY_TEMPERATURE if temperature is None else temperature
        if retries < 0:
            raise SlurmGPUError(f"retries is {retries}; expected at least 0.")
        if retries and temperature == 0:
            raise SlurmGPUError(
                f"retry_temperature is {temperature}, so a retry would repeat the same answer; expected more than 0, "
                f"or retries = 0."
            )
        check_range("retry_temperature", temperature, 0, None)
        if retries:
            check_temperature("retry_temperature", temperature, settings)
        self.retries, self.retry_temperature = retries, temperature

    @property
    def asked(self) -> frozenset[str]:
        """The fields in the prompts."""
        return self.prompts.fields

    @property
    def whole_fields(self) -> frozenset[str]:
        """The fields that the prompts use without a key."""
        return self.prompts.whole_fields

    @property
    def is_raw(self) -> bool:
        """Whether scores may be negative."""
        return min(self.rubric.values.values()) < 0

    @property
    def right(self) -> Callable[[Row], bool] | None:
        """A function that says whether a row's text is right, for a rubric that measures accuracy; else None."""
        values = self.rubric.values
        is_right = self.rubric.measure == "accuracy"
        return (lambda row: bool(row["verdict"]) and values[row["verdict"]] == 1) if is_right else None

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of a verdict."""
        columns: dict[str, Column] = {"verdict": Text(), "score": Array("float32"), "rationale": Text()}
        columns |= {"parse_ok": Array("bool"), "how": Text()}
        if self._truncates:
            columns["n_truncated"] = Array("int32")
        if self.rubric.method == "score":
            columns["probabilities"] = Array("float32", (len(self.rubric.names),))
        else:
            columns["finish_reason"] = Text()
        if self.rubric.swap:
            columns |= {"agreement": Array("bool"), "verdicts": Json(), "rationale_swapped": Text()}
        return columns

    def compare(self, each: str | None) -> tuple[str, str]:
        """The names of the two texts in prompts; SlurmGPUError for a rubric that judges one at a time."""
        if len(self.rubric.swap) != 2:
            raise SlurmGPUError(
                "against is set, and the rubric judges one text at a time; expected a rubric with swap, such as "
                'rubric = "pairwise". Remove against, or choose such a rubric.'
            )
        first, second = self.rubric.swap
        return first, second

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """Settings that the plan fixes, including the rubric's text."""
        return {**super().frozen_settings, "rubric": self.rubric.to_json()}

    def sort_key(self, item: Item) -> int:
        """Long prompts first."""
        return -self.prompts.length(item.data)

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The verdict on each item, or an ItemError."""
        return compute_good(items, self._ask, self._rows)

    def _ask(self, item: Item) -> list[JudgePrompt]:
        """The prompts for an item: one, or one for each order of the two texts."""
        data, orders = item.data, [item.data]
        if self.rubric.swap:
            first, second = self.rubric.swap
            orders.append({**data, first: take(data, second), second: take(data, first)})
        prompts = [self.prompts.of(each, seed=item.seed, forms=orders) for each in orders]
        return [JudgePrompt(order, prompt, mix(item.seed, order)) for order, prompt in enumerate(prompts)]

    def _rows(self, asked: Sequence[Sequence[JudgePrompt]]) -> list[Row | ItemError]:
        prompts = [*chain.from_iterable(asked)]
        if self.rubric.method == "score":
            self._score(prompts)
        else:
            self._parse(prompts)
        return [value_or_error(verdict_row, self.rubric, each, truncates=self._truncates) for each in asked]

    def _score(self, asked: Sequence[JudgePrompt]) -> None:
        """Choose verdicts by the probabilities of their texts, each with and without a space before it."""
        choices = tuple(way for text in self.rubric.verdicts.values() for way in (text, f" {text}"))
        questions = [
            Question(number, dataclasses.replace(one.prompt, answer=Composed(self.rubric.answer)), choices, n_ways=2)
            for number, one in enumerate(asked)
        ]
        for one, scores in zip(asked, self._scores(questions), strict=True):
            try:
                found = value_of(scores)
                one.probabilities, one.n_truncated = shares_of(found), found.n_truncated
            except ItemError as error:
                one.error = str(error)
                continue
            one.verdict, one.how = self.rubric.names[int(one.probabilities.argmax())], "scored"

    def _parse(self, asked: Sequence[JudgePrompt]) -> None:
        """Parse verdicts from free answers; ask again for those without one, and finally score."""
        pending = list(asked)
        for attempt in range(self.retries + 1):
            pending = self._generate(pending, attempt)
        if self.rubric.fallback:
            self._score(pending)
            for one in pending:
                one.error = None  # a missing verdict is not an error

    def _generate(self, asked: Sequence[JudgePrompt], attempt: int) -> list[JudgePrompt]:
        """Ask once; returns the prompts without a verdict."""
        how = dataclasses.replace(self.sampling, temperature=max(self.sampling.temperature, self.retry_temperature))
        how = how if attempt else self.sampling
        requests = [Request(number, one.prompt, how, mix(one.seed, attempt)) for number, one in enumerate(asked)]
        for one, output in zip(asked, self._answers(requests), strict=True):
            try:
                answer = value_of(output)
                one.rationale, one.finish_reason = answer.text, answer.finish_reason
                one.n_truncated = answer.n_truncated
                one.verdict = self._reader.verdict(answer.text)
            except ItemError as error:
                one.error = str(error)
                continue
            if one.verdict is not None:
                one.how = "parsed again" if attempt else "parsed"
        return [one for one in asked if one.verdict is None and one.error is None]

    def summarize(self, merged: Merged, samples: Samples | None) -> dict[str, Any]:
        """Count the verdicts, and compute the rubric's measure, or the quality of choices among `samples`."""
        if samples is None:
            return summarize(merged, self.rubric, self.sampling.max_tokens, with_truth=self._has_truth)
        return samples.summarize(merged) | summarize_each(merged, self.rubric, self.sampling.max_tokens)
