"""Judging with any causal language model: `use = "judge"`, as in docs/how-to/judge-a-run.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Unpack

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.prompts.structures import structure_of
from slurmgpu.llm.prompts.templates import take
from slurmgpu.llm.settings import PromptedSettings
from slurmgpu.shards.columns import Column, Text
from slurmgpu.workload import FETCH, Item, Placement, Row, Share, TaskContext, Template
from slurmgpu.workloads.grading.checkers import open_checker
from slurmgpu.workloads.item_errors import compute_good
from slurmgpu.workloads.judge.by_rubric import ByRubric
from slurmgpu.workloads.judge.by_scorer import OTHER, ByScorer, check_alone
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
from slurmgpu.workloads.judge.rubrics import read_rubric
from slurmgpu.workloads.samples import MOST_PARTS, OF_PATHS, Samples, check_each, check_votes, has_failed
from slurmgpu.workloads.score.scorer import ScorerSettings

if TYPE_CHECKING:
    from slurmgpu.results import Merged

Method = Literal["parse", "score"]

FINAL = "final"
"""The name, in prompts, of the final answer that an answer checker finds in the judged text."""


class Judge:
    """A verdict on each item, usually an answer of an earlier run, by a `rubric`, or the score of a trained head.

    `rubric` is the name of a built-in one, the path of a .toml file, or a table; `scorer` is a model with a trained
    head, instead of `model` and `rubric`. `fields` renames fields of the items for their prompts. `against` is the
    merged file of a second run; its texts are compared with those of the first, by a pairwise rubric or by their
    scores. With `final`, the name of an answer checker, `{final}` in a prompt is the final answer in the field `text`.
    A prompt without a verdict is asked again up to `retries` times at `retry_temperature`. `truth` is a field with a
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
                "pattern finds the final answer in the judged text, and final is not set. Set final, or, to find the "
                "verdict in the judge's answer, set the rubric's pattern."
            )
        self.checker = None if final is None else open_checker(final, reference=reference or "", pattern=pattern)
        if scorer is not None:
            check_alone({*given, *settings})
            self.judging: ByRubric | ByScorer = ByScorer.open(scorer)
        else:
            self.judging = self._by_rubric(given, settings)
        self.opponent = None if against is None else self._compare_with(against, each)
        check_each(each, final, reference)
        if each is not None:
            check_one_text(each, truth, self.judging.rubric)
        # With `each` a checker also finds the answers for votes, so prompts need not have them.
        known = self.judging.asked if self.checker is None else self.judging.asked - {FINAL} | {"text"}
        check_renamed(self.renamed, known, self.judging.owner)
        self.whole = self.judging.whole_fields & (TEXTS | {OTHER} | set(self.judging.rubric.swap))
        self.each, self._reference = each, reference
        self.fields = self._taken(known)
        self.columns: dict[str, Column] = {**self.judging.columns, **({} if truth is None else {"truth": Text()})}
        self.samples = None
        if each is not None:
            self.most_parts = MOST_PARTS
            self.samples = Samples(each, self.columns, self.checker, reference, self.judging.is_raw, self.judging.right)
            self.columns = self.samples.columns

    def _by_rubric(self, given: Mapping[str, Any], settings: PromptedSettings) -> ByRubric:
        """The judge for a rubric, from the `given` settings and those of the engine and the prompts."""
        if "model" not in given:
            raise SlurmGPUError(
                'judge needs the setting "model", which follows the rubric, or "scorer", a model with a trained '
                "head. Put one of them under [settings]."
            )
        found = read_rubric(given.get("rubric") or "correctness", settings.get("template_format"))
        return ByRubric(
            given["model"],
            dataclasses.replace(found, **{name: given[name] for name in ("system", "method") if name in given}),
            structure_of(*map(given.get, ("schema", "choices", "regex", "grammar"))),
            given.get("retries"),
            given.get("retry_temperature"),
            settings,
            named=self._named,
            has_truth="truth" in given,
        )

    def _compare_with(self, against: str | Mapping[str, Any], each: str | None) -> Opponent:
        """Compare each text with the text of a second run; returns the second run."""
        first, second = self._pair = self.judging.compare(each)
        mine = self.renamed.get(first, "text")
        self._called = mine, mine if second == OTHER else self.renamed.get(second, "text")
        return Opponent.find(against)

    def _taken(self, names: Set[str]) -> set[str]:
        """The item fields that are read; `names` are the field names in prompts."""
        if self.opponent is None:
            taken = {self.renamed.get(name, name) for name in names}
        else:
            taken = {self.renamed.get(name, name) for name in names - {*self._pair}} | {self._called[0]}
        if self.each is not None:
            # A prompt's `text` and `steps` may come from an entry.
            taken = taken - set(OF_PATHS) | {self.each}
        if (adapters := self.judging.prompts.choice) is not None:
            taken.add(adapters.field)
        return taken | {*filter(None, (self.truth, self._reference))}

    @property
    def advice(self) -> dict[str, str]:
        """Advice that planning adds if the input lacks one of `fields`."""
        alone = () if self.opponent is not None else self.judging.rubric.swap
        return advice(self.judging.asked, self.renamed, alone)

    @property
    def batch_size(self) -> int:
        """The largest number of items in a call."""
        return self.judging.batch_size

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """Settings that the plan fixes, including the rubric's text or the scorer's head, and the second run."""
        frozen = self.judging.frozen_settings
        return frozen if self.opponent is None else {**frozen, "against": self.opponent.to_json()}

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables of workers, for the model."""
        return self.judging.environ

    @property
    def paths(self) -> list[Path]:
        """The files of the model and of the second run, which a task reads besides the input."""
        return self.judging.paths + ([] if self.opponent is None else [self.opponent.path.parent])

    @property
    def awaits(self) -> list[Path]:
        """The second run, if it is incomplete."""
        return [] if self.opponent is None or self.opponent.awaited is None else [self.opponent.path.parent]

    def fetch(self) -> str:
        """Download the model to where the tasks will look for it."""
        return self.judging.fetch()

    def check_input(self, files: Sequence[Path], n_items: int) -> list[str]:
        """Refuse runs with several texts for each item, unless all are judged, and a second run with other items."""
        if self.each is not None:
            return check_votes(files, self.samples)
        called = {name: self.renamed.get(name, name) for name in self.whole | ({"text"} if self.checker else set())}
        if self.opponent is not None:
            first, second = self._pair
            called[first], theirs = self._called
            if second in called:
                check_texts(self.opponent.path, [theirs], of_two=True)
                del called[second]
        for path in files:
            check_texts(path, set(called.values()), of_two=self.opponent is not None)
        if self.opponent is not None:
            self.opponent.check_input(files, n_items, self._called[1])
        return []

    def place(self, share: Share) -> Placement:
        """The model's placement on a task's GPUs; SlurmGPUError, with numbers, if it does not fit."""
        return self.judging.place(share)

    def check_here(self) -> None:
        """Refuse a machine that lacks what the engine, the scorer or the checker needs."""
        self.judging.check_here()
        if self.checker is not None:
            self.checker.check_here()

    def load(self, task: TaskContext) -> None:
        """Load the model, and open the second run's file."""
        if self.opponent is not None:
            self.opponent.open()
        if self.checker is not None:
            self.checker.load()
        self.judging.load(task)

    def sort_key(self, item: Item) -> int:
        """Long prompts first."""
        try:
            return self.judging.sort_key(self._shown(item if self.samples is None else next(self.samples.parts(item))))
        except ItemError:
            return 0

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The verdict on each item, or on each of its texts, or an ItemError for one that cannot be judged."""
        return self._judge(items) if self.samples is None else self.samples.compute(items, self._judge)

    def _judge(self, items: Sequence[Item]) -> list[Row | ItemError]:
        return compute_good(items, self._ask, self._rows)

    def _ask(self, item: Item) -> tuple[Item, Row]:
        """The item as prompts show it, and its row's columns besides the verdict."""
        if has_failed(item.data, self.fields):
            raise ItemError(f"the judged item failed: {item.data['error']}")
        truth = self.truth
        kept = {} if truth is None else {"truth": truth_of(take(item.data, truth), self.judging.rubric)}
        return self._shown(item), kept

    def _rows(self, asked: Sequence[tuple[Item, Row]]) -> list[Row | ItemError]:
        judged = self.judging([shown for shown, _ in asked])
        return [
            row if isinstance(row, ItemError) else {**kept, **row} for row, (_, kept) in zip(judged, asked, strict=True)
        ]

    def _shown(self, item: Item) -> Item:
        """The item with its fields named as in prompts, and with the second run's text if there is one."""
        data = self._named(item.data)
        if self.opponent is not None:
            (first, second), (mine, theirs) = self._pair, self._called
            data[first] = take(item.data, mine)
            data[second] = take(self.opponent.row(item, self._called), theirs)
        for name in self.whole:
            text_in(data, name, self.renamed.get(name, name))
        return dataclasses.replace(item, data=data)

    def _named(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """An item's fields, also under their names in templates, and its final answer if there is a checker."""
        data = {**fields, **{name: fields[field] for name, field in self.renamed.items() if field in fields}}
        if self.checker is not None:
            answer = self.checker.answer(text_in(data, "text", self.renamed.get("text", "text")))
            data[FINAL] = "(none)" if answer is None else answer
        return data

    def summarize(self, merged: Merged) -> dict[str, Any]:
        """Count the verdicts, and compute the rubric's measure; with a scorer, describe the scores."""
        return self.judging.summarize(merged, self.samples)
