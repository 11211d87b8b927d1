"""Reasoning paths with values for their steps: `use = "collect"`, as in docs/how-to/collect-paths.md."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.steps import ROOT, Tree, prefix_key
from slurmgpu.llm.interface.engine import EngineOptions, Output, Request
from slurmgpu.llm.interface.sampling import mix
from slurmgpu.llm.prompts.templates import Last
from slurmgpu.llm.server_engine.settings import uses_chat
from slurmgpu.llm.settings import PromptedSettings, prompts_of, sampling
from slurmgpu.shards.columns import Array, Json
from slurmgpu.util.users import expanded
from slurmgpu.workload import FETCH, Item, Placement, Row, Share, TaskContext, Template
from slurmgpu.workloads.collect.rows import COLUMNS, row_of
from slurmgpu.workloads.collect.search import Draw, Search, missing_branches
from slurmgpu.workloads.collect.steps_scorer import SCORED, StepsScorer, scored_totals
from slurmgpu.workloads.collect.totals import checked_pass_at, totals
from slurmgpu.workloads.grading.checkers import open_checker
from slurmgpu.workloads.item_errors import compute_good
from slurmgpu.workloads.language_model import LanguageModelWorkload, cut_hint, good_values, n_truncated
from slurmgpu.workloads.score.scorer import ScorerSettings

if TYPE_CHECKING:
    from slurmgpu.results import Merged


MAX_LEAVES = 10_000
"""The most paths of a tree; they are kept in memory until the question is done."""


class Collect(LanguageModelWorkload):
    """Several reasoning paths for each question, whether each is right, and the value of each step.

    With `paths`, that many are sampled for each question, and the values of steps come from `rollouts` completions of
    each beginning. With `tree`, the number of branches at each depth, the values come from the tree's leaves. `checker`
    compares a path's answer with the item's field `reference`. docs/reference/language-models.md has all settings.
    """

    batch_size = 32
    texts = ("prompt", "system", "fewshot", "target")
    template = Template(
        FilePath(__file__).with_name("template.toml"),
        items=[
            {"question": "Ada has 3 apples and buys 4 more. How many has she?", "answer": "7"},
            {"question": "A train goes 60 km in an hour. How many km does it go in 3 hours?", "answer": "180"},
        ],
        first=FETCH,
    )

    def __init__(
        self,
        *,
        model: str,
        prompt: str | None = None,
        messages: str | None = None,
        last: Last | None = None,
        system: str | None = None,
        paths: int | None = None,
        tree: Sequence[int] = (),
        rollouts: int | None = None,
        scorer: str | ScorerSettings | None = None,
        pass_at: Sequence[int] = (),
        step_delimiter: str = "\n",
        max_steps: int = 64,
        reference: str = "answer",
        checker: str = "numeric",
        pattern: str | None = None,
        tolerance: float | None = None,
        keep: Sequence[str] = (),
        **settings: Unpack[PromptedSettings],
    ) -> None:
        self.prompts = prompts_of(settings, prompt, messages, system, last)
        self._truncates = "truncation_side" in settings
        self.tree = tuple(tree)
        _check_shape(self.tree, paths, rollouts)
        self.n_paths = 8 if paths is None else paths
        self.n_independent = self.most_parts = self.tree[0] if self.tree else self.n_paths
        self.pass_at = checked_pass_at(pass_at, self.n_independent)
        self.rollouts = 0 if self.tree else rollouts if rollouts is not None else 4 if scorer is None else 0
        if not step_delimiter:
            raise SlurmGPUError('step_delimiter is empty; expected the text between two steps, such as "\\n".')
        if max_steps < 1:
            raise SlurmGPUError(f"max_steps is {max_steps}; expected at least 1 for each path.")
        self.delimiter, self.max_steps = step_delimiter, max_steps
        self._rules = checker.rpartition(":")[0]
        self.checker = open_checker(checker, reference=reference, pattern=pattern, tolerance=tolerance)
        self.sampling = sampling(settings, temperature=1.0)
        _check_stops(self.sampling.stop, step_delimiter)
        if self.sampling.temperature == 0:
            raise SlurmGPUError("temperature is 0, which makes all paths the same; expected more than 0.")
        self.kept_fields = tuple(keep)
        self.fields = {*self.prompts.fields, *([] if ":" in checker else [reference])}
        self.columns = {**COLUMNS, **({"n_truncated": Array("int32")} if self._truncates else {})}
        self._tells_failures = checker == "python"
        if self._tells_failures:
            self.columns["failures"] = Json()
        if "images" in settings:
            _check_with_images(self.rollouts, self.tree, scorer)
        shown: dict[str, Any] = {"prompt": prompt, "messages": messages, "system": system}
        shown |= {name: settings.get(name) for name in ("template_format", "truncation_side")}
        self.steps_scorer = None if scorer is None else StepsScorer(scorer, shown, last, step_delimiter)
        if self.steps_scorer is not None:
            self.columns |= SCORED
            self.fields |= self.steps_scorer.fields
        beyond = [*self.prompts.beyond(chat=uses_chat(settings))]
        if (self.rollouts or len(self.tree) > 1) and uses_chat(settings):
            beyond.append(
                "in a chat it cannot continue from given steps. Set chat = false, or collect whole paths only: "
                "rollouts = 0, and no tree."
            )
        self.use_model(model, settings, max_tokens=self.sampling.max_tokens, beyond=beyond)

    @property
    def paths(self) -> list[FilePath]:
        """The models' files and the checker's file, which a task reads beside the input."""
        rules = [expanded(self._rules).absolute().parent] if self._rules.endswith(".py") else []
        return super().paths + rules + ([] if self.steps_scorer is None else self.steps_scorer.score.paths)

    @functools.cached_property
    def options(self) -> EngineOptions:
        """The model and the engine's settings, with the scorer beside it; SlurmGPUError if there is no such model."""
        own = super().options
        if self.steps_scorer is None or own.engine == "server":
            return own
        return dataclasses.replace(own, beside=self.steps_scorer.beside())

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """Settings that the plan fixes: also what the scorer's head says, and its model."""
        own = super().frozen_settings
        return own if self.steps_scorer is None else {**own, "scorer": self.steps_scorer.frozen()}

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables of workers, for both models."""
        return {**({} if self.steps_scorer is None else self.steps_scorer.score.environ), **super().environ}

    def fetch(self) -> str:
        """Download the models to where the tasks will look for them."""
        return "; ".join([super().fetch(), *([] if self.steps_scorer is None else [self.steps_scorer.score.fetch()])])

    def place(self, share: Share) -> Placement:
        """The model's placement, with a scorer on the same GPUs; SlurmGPUError, with numbers, if both do not fit."""
        found = super().place(share)
        if self.steps_scorer is None:
            return found
        return Placement(found.processes, (*found.lines, *self.steps_scorer.lines(share, self.options)))

    def check_here(self) -> None:
        """Refuse a machine that lacks what the engine or the checker needs."""
        super().check_here()
        self.checker.check_here()

    def load(self, task: TaskContext) -> None:
        """Load the models and what the checker needs."""
        self.checker.load()
        if self.steps_scorer is None:
            super().load(task)
        elif self.options.engine == "transformers":
            # First, since the engine makes its batches as large as the memory that is free then.
            self.steps_scorer.score.load(task)
            super().load(task)
        else:
            # vLLM and servers take their share of a GPU that must be free.
            super().load(task)
            self.steps_scorer.score.load(task)

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The paths of each item, or an ItemError for one without a prompt or a reference answer."""
        return compute_good(items, self._begin, self._rows)

    def _rows(self, searches: Sequence[Search]) -> list[Row | ItemError]:
        self._sample([Draw(search, ROOT, number) for search in searches for number in range(self.n_independent)])
        for depth, n_branches in enumerate(self.tree[1:], 1):
            self._sample([draw for search in searches for draw in missing_branches(search, depth, n_branches)])
        if self.rollouts:
            self._roll_out(searches)
        good = [search for search in searches if search.error is None]
        if self.steps_scorer is not None:
            for search, scored in zip(good, self.steps_scorer.each([(s.item, s.tree) for s in good]), strict=True):
                search.scored = scored
        return [self._row(search) if search.error is None else search.error for search in searches]

    def _row(self, search: Search) -> Row:
        return row_of(search, self.checker, truncates=self._truncates, tells_failures=self._tells_failures)

    def _begin(self, item: Item) -> Search:
        prompt = self.prompts.of(item.data, seed=item.seed)
        self.checker.check_item(item.data)
        return Search(item, prompt, Tree(self.delimiter, self.max_steps))

    def _complete(self, draws: Sequence[Draw]) -> list[tuple[Draw, Output]]:
        """The completions of the draws, in order, without those of failed items.

        A sample depends only on its item, on the steps before it, and on its number there; not on other samples.
        """
        requests = []
        for number, draw in enumerate(draws):
            start = draw.search.tree.nodes[draw.node]
            key = mix(mix(draw.search.item.seed, prefix_key(start.prefix, start.generated.hidden)), draw.number)
            prompt, how = draw.search.prompt, self.sampling
            if draw.node != ROOT:
                prompt = dataclasses.replace(prompt, so_far=start.prefix, generated=start.generated)
                # A question needs room for a whole answer; a continued path uses what is left of the context.
                how = dataclasses.replace(how, fit=True)
            requests.append(Request(number, prompt, how, key))
        found = []
        for draw, output in zip(draws, self._answers(requests), strict=True):
            if isinstance(output, ItemError):
                draw.search.error = output
                continue
            draw.search.n_tokens += output.n_tokens
            draw.search.n_truncated = max(draw.search.n_truncated, output.n_truncated)
            found.append((draw, output))
        return found

    def _sample(self, draws: Sequence[Draw]) -> None:
        for draw, output in self._complete([draw for draw in draws if draw.search.error is None]):
            tree, cut = draw.search.tree, output.finish_reason == "length"
            checked = self._check(draw.search, tree.whole_text(draw.node, output.text), cut)
            if checked is not None:
                failure, answer = checked
                tree.add(
                    draw.node,
                    output.text,
                    answer=answer,
                    correct=failure is None,
                    cut=cut,
                    reasoning=output.reasoning,
                    failure=failure,
                    generated=output.generated,
                )

    def _roll_out(self, searches: Sequence[Search]) -> None:
        """Complete every prefix of the paths to estimate its value; a prefix that several paths share, once."""
        draws = [
            Draw(search, node, number)
            for search in searches
            if search.error is None
            for node in search.tree.open_nodes()
            for number in range(self.rollouts)
        ]
        for draw, output in self._complete(draws):
            node = draw.search.tree.nodes[draw.node]
            checked = self._check(draw.search, node.prefix + output.text, output.finish_reason == "length")
            if checked is not None:
                node.visits += 1
                node.hits += checked[0] is None
                draw.search.n_rollouts += 1

    def _check(self, search: Search, text: str, cut: bool) -> tuple[str | None, str | None] | None:
        """Why an answer is wrong, None if it is right, and the answer; a truncated answer is not right.

        None if the checker fails: that is the item's error, and the checker, which may be slow, is not run again.
        """
        if search.error is not None:
            return None
        try:
            return "cut" if cut else self.checker.failure(text, search.item.data), self.checker.answer(text)
        except ItemError as error:  # a function of the user's raised, or a pattern takes too long
            search.error = error
            return None

    def summarize(self, merged: Merged) -> dict[str, Any]:
        """Count paths, right paths, and answered questions; a failed question counts as not answered."""
        found = totals(merged, self.n_independent, self.pass_at)
        if self._truncates:
            found["n_truncated"] = n_truncated(merged)
        if "failures" in merged.columns:
            failures = Counter(each for row in good_values(merged, "failures") for each in row if each is not None)
            found["failures"] = dict(sorted(failures.items()))
        if self.steps_scorer is not None:
            found |= scored_totals(merged)
        return found | cut_hint(found["n_cut"], found["n_paths"], self.sampling.max_tokens, "paths")


def _check_shape(tree: Sequence[int], paths: int | None, rollouts: int | None) -> None:
    for name, value in (("paths", paths), ("rollouts", rollouts)):
        if tree and value is not None:
            raise SlurmGPUError(f"tree and {name} are both set; a tree needs no {name}. Remove one.")
    if paths is not None and paths < 1:
        raise SlurmGPUError(f"paths is {paths}; expected at least 1 for each question.")
    if rollouts is not None and rollouts < 0:
        raise SlurmGPUError(f"rollouts is {rollouts}; expected at least 0.")
    if any(n_branches < 1 for n_branches in tree):
        raise SlurmGPUError(
            f"tree is {list(tree)}; expected the branches at each depth, at least 1, such as [4, 2, 2]."
        )
    if (n_leaves := math.prod(tree)) > MAX_LEAVES:
        raise SlurmGPUError(
            f"tree is {list(tree)}, which is {n_leaves:,} paths for each question; expected at most {MAX_LEAVES:,}. "
            f"Use fewer branches, or fewer depths."
        )


def _check_with_images(rollouts: int, tree: Sequence[int], scorer: object) -> None:
    """Refuse settings that images exclude."""
    if rollouts or len(tree) > 1:
        raise SlurmGPUError(
            "images is set, and slurmgpu does not continue paths from given steps after images. Collect whole paths "
            "only: set rollouts = 0, and no tree."
        )
    if scorer is not None:
        raise SlurmGPUError("images and scorer are both set, but a scorer does not see images. Remove one of them.")


def _check_stops(stops: Sequence[str], delimiter: str) -> None:
    for stop in stops:
        if stop in delimiter:
            raise SlurmGPUError(
                f"stop has {stop!r}, and step_delimiter is {delimiter!r}: every path would end after its first step. "
                f"Remove that stop text."
            )
