"""Judging with any causal language model: `use = "judge"`, as in docs/how-to/judge-a-run.md."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from typing_extensions import Unpack

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Composed, Question, Request, Structure
from slurmgpu.llm.interface.sampling import mix
from slurmgpu.llm.prompts.structures import check_structure, structure_of
from slurmgpu.llm.prompts.templates import take
from slurmgpu.llm.settings import PromptedSettings, check_range, check_scored, check_temperature, prompts_of, sampling
from slurmgpu.shards.columns import Array, Column, Json, Text
from slurmgpu.workload import FETCH, Item, Placement, Row, Share, TaskContext, Template
from slurmgpu.workloads.checkers import open_checker
from slurmgpu.workloads.judge.judged import (
    TEXTS,
    advice,
    check_one_text,
    check_renamed,
    check_texts,
    text_in,
    truth_of,
)
from slurmgpu.workloads.judge.opponents import Opponent
from slurmgpu.workloads.judge.orders import Asked, shares_of, verdict_row
from slurmgpu.workloads.judge.rubrics import Reader, Rubric, check_choices, read_rubric
from slurmgpu.workloads.judge.scored import (
    COMPARED,
    PREFERENCE,
    check_alone,
    check_compared,
    compared,
    judging_scorer,
    summarize_compared,
)
from slurmgpu.workloads.judge.verdicts import summarize, summarize_each
from slurmgpu.workloads.language_model import SCORES_NOTHING, LanguageModelWorkload
from slurmgpu.workloads.samples import MOST_PARTS, OF_PATHS, Samples, check_each, has_failed
from slurmgpu.workloads.score.scorer import ScorerSettings, scorer_table
from slurmgpu.workloads.score.workload import Score

if TYPE_CHECKING:
    from slurmgpu.results import Merged

Method = Literal["parse", "score"]
T = TypeVar("T")

RETRIES, RETRY_TEMPERATURE = 2, 0.7

FINAL = "final"
"""The name in prompts of the final answer that an answer checker finds in the judged text."""


class Judge(LanguageModelWorkload):
    """A verdict on each item, usually an answer of an earlier run, by a `rubric`, or the score of a trained head.

    `rubric` is the name of a built-in one, the path of a .toml file, or a table; `scorer` is a model with a trained
    head, in place of `model` and `rubric`. `fields` renames fields of the items for their prompts. `against` is the
    merged file of a second run, whose texts are compared with those of the first, by a pairwise rubric or by their
    scores. With `final`, the name of an answer checker, `{final}` in a prompt is the final answer in the field `text`.
    An answer without a verdict is repeated up to `retries` times at `retry_temperature`. `truth` is a field with a
    verdict to compare with. docs/reference/language-models.md has all settings.
    """

    texts = ("system", "fewshot", "target", "schema", "grammar")

    template = Template(
        Path(__file__).with_name("template.toml"),
        items=[
            {"question": "What is the capital of France?", "reference": "Paris", "text": "It is Paris."},
            {"question": "What is 6 times 7?", "reference": "42", "text": "6 times 7 is 48."},
        ],
        first=FETCH,
    )

    def __init__(
        self,
        *,
        model: str | None = None,
        scorer: str | ScorerSettings | None = None,
        rubric: str | dict[str, Any] | None = None,
        system: str | None = None,
        method: Method | None = None,
        fields: dict[str, str] | None = None,
        against: str | dict[str, Any] | None = None,
        each: str | None = None,
        final: str | None = None,
        pattern: str | None = None,
        reference: str | None = None,
        retries: int | None = None,
        retry_temperature: float | None = None,
        truth: str | None = None,
        schema: str | dict[str, Any] | None = None,
        choices: Sequence[str] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        keep: Sequence[str] = (),
        **settings: Unpack[PromptedSettings],
    ) -> None:
        self.renamed, self.truth, self.kept_fields = dict(fields or {}), truth, tuple(keep)
        own: dict[str, Any] = {"model": model, "rubric": rubric, "system": system, "method": method, "truth": truth}
        own |= {"retries": retries, "retry_temperature": retry_temperature}
        own |= {"schema": schema, "choices": choices, "regex": regex, "grammar": grammar}
        given = {name: value for name, value in own.items() if value is not None}
        if final is None and pattern is not None:
            raise SlurmGPUError(
                "pattern finds the final answer in the judged text, and final is not set. To find the verdict in the "
                "judge's answer, set the rubric's pattern."
            )
        self.checker = None if final is None else open_checker(final, reference=reference or "", pattern=pattern)
        self._truncates = "truncation_side" in settings
        self.scorer: Score | None = None
        if scorer is not None:
            check_alone({*given, *settings})
            self._score_by(scorer)
        else:
            rules = {name: given[name] for name in ("system", "method") if name in given}
            found = read_rubric(rubric or "correctness", settings.get("template_format"))
            structure = structure_of(schema, choices, regex, grammar)
            self._follow(dataclasses.replace(found, **rules), settings, structure)
            self._repeat(retries, retry_temperature, settings)
        if against is not None:
            self._check_compares(each)
        self.names = self.rubric.names
        self.opponent = None if against is None else Opponent.find(against)
        check_each(each, final, reference)
        if each is not None:
            check_one_text(each, truth, self.rubric)
        # With `each` a checker also finds the answers for votes, and no prompt need have them.
        known = self._asked if self.checker is None else self._asked - {FINAL} | {"text"}
        check_renamed(self.renamed, known, "the rubric" if self.scorer is None else "the scorer")
        whole = self.prompts.whole_fields if self.scorer is None else self.scorer.whole_fields
        self.whole = whole & (TEXTS | set(self.rubric.swap))
        self.each, self._reference = each, reference
        self.fields = self._taken()
        self.columns = self._own_columns()
        self.samples = None
        if each is not None:
            right = self._is_right if self.rubric.measure == "accuracy" else None
            is_raw = min(self.rubric.values.values()) < 0 if self.scorer is None else self.scorer.is_raw
            self.most_parts = MOST_PARTS
            self.samples = Samples(each, self.columns, self.checker, reference, is_raw, right)
            self.columns = self.samples.columns
        if self.scorer is not None:
            self.use_model_of(self.scorer)
        elif model is None:
            raise SlurmGPUError(
                'judge needs the setting "model", which follows the rubric, or "scorer", a model with a trained head. '
                "Put one of them under [settings]."
            )
        else:
            self._use_judge(model, settings)

    def _score_by(self, scorer: str | ScorerSettings) -> None:
        """Take the scorer in place of a rubric."""
        self._scorer_table, self.scorer = scorer_table(scorer), judging_scorer(scorer)
        self.rubric, self.prompts, self._asked = PREFERENCE, self.scorer.prompts, frozenset(self.scorer.fields)

    def _check_compares(self, each: str | None) -> None:
        """Refuse a second run where single texts are judged."""
        if self.scorer is not None:
            check_compared(self.scorer, each)
        elif len(self.rubric.swap) != 2:
            raise SlurmGPUError(
                "against is set, and the rubric judges one text at a time; expected one with swap, such as "
                'rubric = "pairwise". Remove against, or choose such a rubric.'
            )

    def _follow(self, rubric: Rubric, settings: Mapping[str, Any], structure: Structure | None) -> None:
        """Take the rubric; SlurmGPUError for settings that do not go with it."""
        if rubric.method not in ("parse", "score"):
            raise SlurmGPUError(f"method is {rubric.method!r}; expected 'parse' or 'score'.")
        if rubric.method == "score":
            check_scored(settings, [] if structure is None else [structure.kind])
        self.rubric, self._reader = rubric, Reader(rubric)
        if structure is not None and structure.kind == "choices":
            check_choices(json.loads(structure.text), self._reader, rubric)
        written = {**settings, "template_format": rubric.template_format}
        self.prompts = prompts_of(written, rubric.prompt, None, rubric.system or None, None, named=self._named)
        self._asked = self.prompts.fields
        self.sampling = sampling({"max_tokens": rubric.max_tokens, **settings}, structure=structure)
        if settings.get("engine") == "server" and rubric.method == "parse":
            self.rubric = dataclasses.replace(rubric, fallback=False)

    def _repeat(self, retries: int | None, temperature: float | None, settings: Mapping[str, Any]) -> None:
        """Take the settings of retries; SlurmGPUError for wrong ones."""
        retries = RETRIES if retries is None else retries
        temperature = RETRY_TEMPERATURE if temperature is None else temperature
        if retries < 0:
            raise SlurmGPUError(f"retries is {retries}; expected at least 0.")
        if retries and temperature == 0:
            raise SlurmGPUError(
                f"retry_temperature is {temperature}, which repeats the same answer; expected more than 0, or "
                f"retries = 0."
            )
        check_range("retry_temperature", temperature, 0, None)
        if retries:
            check_temperature("retry_temperature", temperature, settings)
        self.retries, self.retry_temperature = retries, temperature

    def _use_judge(self, model: str, settings: Mapping[str, Any]) -> None:
        scores = f'{SCORES_NOTHING} Set method = "parse", or choose another engine for this rubric.'
        beyond = [scores] if self.rubric.method == "score" else []
        max_tokens = self.sampling.max_tokens if self.rubric.method == "parse" else 0
        self.use_model(model, settings, max_tokens=max_tokens, beyond=beyond)

    def _taken(self) -> set[str]:
        names = set(self._asked)
        if self.checker is not None:
            names = names - {FINAL} | {"text"}
        if self.opponent is not None and self.rubric.swap:
            first, second = self.rubric.swap
            names = names - {first, second} | {self.renamed.get(first, "text")}
        taken = {self.renamed.get(name, name) for name in names}
        if self.each is not None:
            # A prompt's `text` and `steps` may be those of an entry.
            taken = taken - set(OF_PATHS) | {self.each}
        return taken | {*filter(None, (self.truth, self._reference))}

    @property
    def advice(self) -> dict[str, str]:
        """Advice that planning adds if the input lacks one of `fields`."""
        alone = () if self.opponent is not None else self.rubric.swap
        return advice(self._asked, self.renamed, alone)

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """Settings that the plan fixes: also the rubric's text, or what the scorer's head says, and the second run."""
        if self.scorer is None:
            frozen = {**super().frozen_settings, "rubric": self.rubric.to_json()}
        else:
            frozen = {"scorer": {**self._scorer_table, **self.scorer.frozen_settings}}
        return frozen if self.opponent is None else {**frozen, "against": self.opponent.to_json()}

    @property
    def paths(self) -> list[Path]:
        """The model's files and the second run's, which a task reads beside the input."""
        return super().paths + ([] if self.opponent is None else [self.opponent.path.parent])

    def check_input(self, files: Sequence[Path], n_items: int) -> None:
        """Refuse runs with several texts in each item, and a second run of other items."""
        if self.each is not None:
            return
        called = {name: self.renamed.get(name, name) for name in self.whole | ({"text"} if self.checker else set())}
        if self.opponent is not None and self.scorer is not None:
            check_texts(self.opponent.path, [called["text"]])
        elif self.opponent is not None:
            first, second = self.rubric.swap
            called[first] = self.renamed.get(first, "text")
            if second in called:
                check_texts(self.opponent.path, [self.renamed.get(second, "text")])
                del called[second]
        for path in files:
            check_texts(path, set(called.values()))
        if self.opponent is not None:
            self.opponent.check_input(files, n_items)

    def place(self, share: Share) -> Placement:
        """The judge's placement, or the scorer's, on a task's GPUs; SlurmGPUError, with numbers, if it does not fit."""
        if self.scorer is not None:
            return self.scorer.place(share)
        if self.sampling.structure is not None:
            check_structure(self.sampling.structure, self.options.engine, self.sampling.stop)
        return super().place(share)

    def check_here(self) -> None:
        """Refuse a machine that lacks what the engine, the scorer or the checker needs."""
        if self.scorer is None:
            super().check_here()
        else:
            self.scorer.check_here()
        if self.checker is not None:
            self.checker.check_here()

    def load(self, task: TaskContext) -> None:
        """Load the model, and open the second run's file."""
        if self.opponent is not None:
            self.opponent.open()
        if self.checker is not None:
            self.checker.load()
        if self.scorer is None:
            super().load(task)
        else:
            self.scorer.load(task)

    def sort_key(self, item: Item) -> int:
        """Long prompts first."""
        try:
            first = item if self.samples is None else next(self.samples.parts(item))
            if self.scorer is not None:
                return self.scorer.sort_key(self._shown(first))
            return -self.prompts.length(self._orders(first)[0])
        except ItemError:
            return 0

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The verdict on each item, or on each of its texts, or an ItemError for one that cannot be judged."""
        return self._judge(items) if self.samples is None else self.samples.compute(items, self._judge)

    def _judge(self, items: Sequence[Item]) -> list[Row | ItemError]:
        if self.scorer is not None:
            return self._score_texts(self.scorer, items)
        asked: list[Asked] = []
        rows: list[dict[str, Any] | ItemError] = []
        for number, item in enumerate(items):
            try:
                row, questions = self._kept(item), self._ask(number, item)
            except ItemError as error:
                rows.append(error)
                continue
            rows.append(row)
            asked += questions
        if self.rubric.method == "score":
            self._score(asked)
        else:
            self._parse(asked)
        by_item: dict[int, list[Asked]] = {}
        for one in asked:
            by_item.setdefault(one.item, []).append(one)
        return [
            row
            if isinstance(row, ItemError)
            else _joined(row, verdict_row(self.rubric, by_item[number], truncates=self._truncates))
            for number, row in enumerate(rows)
        ]

    def _score_texts(self, scorer: Score, items: Sequence[Item]) -> list[Row | ItemError]:
        """The scores of items, or their comparisons with those of the second run."""
        asked: list[tuple[Item, ...] | ItemError] = []
        for item in items:
            try:
                self._kept(item)
                first = self._shown(item)
                if self.opponent is None:
                    asked.append((first,))
                    continue
                field = self.renamed.get("text", "text")
                second = {**first.data, "text": take(self.opponent.row(item, [field]), field)}
                asked.append((first, dataclasses.replace(first, data=second)))
            except ItemError as error:
                asked.append(error)
        rows = iter(scorer([one for each in asked if not isinstance(each, ItemError) for one in each]))
        found = [each if isinstance(each, ItemError) else [next(rows) for _ in each] for each in asked]
        return [each if isinstance(each, ItemError) else compared(*each) for each in found]

    def _shown(self, item: Item) -> Item:
        """The item as a scorer is shown it, with fields by the names in its templates."""
        data = self._named(item.data)
        self._check_texts(data)
        return dataclasses.replace(item, data=data)

    def summarize(self, merged: Merged) -> dict[str, Any]:
        """Count the verdicts, and compute the rubric's measure; by a scorer, describe the scores."""
        if self.scorer is not None:
            is_compared = self.opponent is not None
            return summarize_compared(merged) if is_compared else self.scorer.summarize(merged, self.samples)
        if self.samples is not None:
            found = self.samples.summarize(merged)
            return found | summarize_each(merged, self.rubric, self.sampling.max_tokens)
        return summarize(merged, self.rubric, self.sampling.max_tokens, with_truth=self.truth is not None)

    def _is_right(self, row: Row) -> bool:
        """Whether a rubric that measures accuracy says that a text is right."""
        return bool(row["verdict"]) and self.rubric.values[row["verdict"]] == 1

    def _own_columns(self) -> dict[str, Column]:
        if self.scorer is not None:
            return {**self.scorer.columns, **(COMPARED if self.opponent is not None else {})}
        columns: dict[str, Column] = {"verdict": Text(), "score": Array("float32"), "rationale": Text()}
        columns |= {"parse_ok": Array("bool"), "how": Text()}
        if self._truncates:
            columns["n_truncated"] = Array("int32")
        if self.rubric.method == "score":
            columns["probabilities"] = Array("float32", (len(self.names),))
        else:
            columns["finish_reason"] = Text()
        if self.rubric.swap:
            columns |= {"agreement": Array("bool"), "verdicts": Json(), "rationale_swapped": Text()}
        return columns if self.truth is None else columns | {"truth": Text()}

    def _kept(self, item: Item) -> dict[str, Any]:
        if has_failed(item.data, self.fields):
            raise ItemError(f"the judged item failed: {item.data['error']}")
        return {} if self.truth is None else {"truth": truth_of(take(item.data, self.truth), self.rubric)}

    def _ask(self, number: int, item: Item) -> list[Asked]:
        orders = self._orders(item)
        prompts = [self.prompts.of(each, seed=item.seed, forms=orders) for each in orders]
        return [Asked(number, order, prompt, mix(item.seed, order)) for order, prompt in enumerate(prompts)]

    def _orders(self, item: Item) -> list[dict[str, Any]]:
        """The fields for the prompt: once, or once for each order of the two texts."""
        data = self._named(item.data)
        if self.opponent is not None:
            first, second = self.rubric.swap
            data[first] = take(item.data, self.renamed.get(first, "text"))
            compared = [self.renamed.get(name, "text") for name in (first, second)]
            data[second] = take(self.opponent.row(item, compared), compared[1])
        self._check_texts(data)
        if not self.rubric.swap:
            return [data]
        first, second = self.rubric.swap
        return [data, {**data, first: take(data, second), second: take(data, first)}]

    def _named(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """An item's fields, also by the names in templates, and its final answer if there is a checker."""
        data = {**fields, **{name: fields[field] for name, field in self.renamed.items() if field in fields}}
        if self.checker is not None:
            answer = self.checker.answer(text_in(data, "text", self.renamed.get("text")))
            data[FINAL] = "(none)" if answer is None else answer
        return data

    def _check_texts(self, data: Mapping[str, Any]) -> None:
        for name in self.whole:
            text_in(data, name, self.renamed.get(name))

    def _score(self, asked: Sequence[Asked]) -> None:
        """Choose verdicts by the probabilities of their texts, each with and without a space before it."""
        choices = tuple(way for text in self.rubric.verdicts.values() for way in (text, f" {text}"))
        questions = [
            Question(number, dataclasses.replace(one.prompt, answer=Composed(self.rubric.answer)), choices, n_ways=2)
            for number, one in enumerate(asked)
        ]
        for one, scores in zip(asked, self._scores(questions), strict=True):
            try:
                found = _expect(scores)
                one.probabilities, one.n_truncated = shares_of(found), found.n_truncated
            except ItemError as error:
                one.error = str(error)
                continue
            one.verdict, one.how = self.names[int(one.probabilities.argmax())], "scored"

    def _parse(self, asked: Sequence[Asked]) -> None:
        """Find verdicts in free answers; without one ask again, and finally score."""
        pending = list(asked)
        for attempt in range(self.retries + 1):
            pending = self._generate(pending, attempt)
        if self.rubric.fallback:
            self._score(pending)
            for one in pending:
                one.error = None  # no verdict is not an error

    def _generate(self, asked: Sequence[Asked], attempt: int) -> list[Asked]:
        """Ask once; returns the prompts without a verdict."""
        how = dataclasses.replace(self.sampling, temperature=max(self.sampling.temperature, self.retry_temperature))
        how = how if attempt else self.sampling
        requests = [Request(number, one.prompt, how, mix(one.seed, attempt)) for number, one in enumerate(asked)]
        for one, output in zip(asked, self._answers(requests), strict=True):
            try:
                answer = _expect(output)
                one.rationale, one.finish_reason, one.n_truncated = (
                    answer.text,
                    answer.finish_reason,
                    answer.n_truncated,
                )
                one.verdict = self._reader.verdict(answer.text)
            except ItemError as error:
                one.error = str(error)
                continue
            if one.verdict is not None:
                one.how = "parsed again" if attempt else "parsed"
        return [one for one in asked if one.verdict is None and one.error is None]


def _expect(found: T | ItemError) -> T:
    if isinstance(found, ItemError):
        raise found
    return found


def _joined(row: Mapping[str, Any], verdict: Row | ItemError) -> Row | ItemError:
    return verdict if isinstance(verdict, ItemError) else {**row, **verdict}
