"""Scores of the steps of collected paths by a process reward model, with rollouts or instead of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.metrics import accuracy, best_of, vote_weights
from slurmgpu.llm.answers.steps import Path, Tree
from slurmgpu.llm.heads.head import head_memory, place_head
from slurmgpu.llm.interface.engine import EngineOptions, HeadMemory
from slurmgpu.llm.placement.needs import ROW_TOKENS
from slurmgpu.llm.prompts.templates import Last
from slurmgpu.shards.columns import Array, Column, Json, Ragged, Text
from slurmgpu.util.amounts import gb
from slurmgpu.workload import Item, Row, Share
from slurmgpu.workloads.language_model import good_values, total
from slurmgpu.workloads.score.outputs import distribution
from slurmgpu.workloads.score.scorer import INPUTS, ScorerSettings, open_scorer, scorer_table
from slurmgpu.workloads.score.workload import Score

if TYPE_CHECKING:
    from slurmgpu.results import Merged

STEPS = "the steps of a path"
"""The field with a path's steps for the scorer; no item has a field of this name."""

GIVEN = ("steps", "step_delimiter", "answer", "pair", "cut")
"""Settings of `score` that say what is scored; here that is always the paths."""

SCORED: Mapping[str, Column] = {
    "scores": Ragged("float32"),
    "step_scores": Ragged("float32"),
    "unscored": Json(),
    "best": Array("int32"),
    "best_correct": Array("bool"),
    "weighted_vote": Text(),
    "weighted_vote_correct": Array("bool"),
}
"""The columns of a scorer; `step_scores` has an entry for each node, as `values` has."""


@dataclass(frozen=True)
class ScoredTree:
    """The `scores` of a tree's paths, with the `errors` of those without one, and the scores of its nodes' `steps`.

    A missing score is NaN. `worth` is each path's weight in a vote: its score, or the exponential of a raw score.
    """

    scores: list[float]
    errors: list[str | None]
    steps: list[float]
    worth: list[float]

    @property
    def best(self) -> int:
        """The number of the first path with the highest score; -1 if no path has a score."""
        return best_of(self.scores)


class StepsScorer:
    """A model that scores the steps of paths, given after their prompt or after the scorer's own."""

    def __init__(
        self,
        scorer: str | ScorerSettings,
        prompt: Mapping[str, Any],
        last: Last | None,
        delimiter: str,
    ) -> None:
        """Check the settings; `prompt` has the settings of the paths' prompt, None for those not set."""
        self._table = scorer_table(scorer)
        for name in GIVEN:
            if name in self._table:
                raise SlurmGPUError(f"scorer has {name}, but it always scores the steps of the paths. Remove {name}.")
        own = any(name in self._table for name in INPUTS)
        if not own and last == "continue":
            raise SlurmGPUError(
                'last is "continue", so each path begins inside the prompt, but the scorer sees only the path. Set '
                'last = "drop", or give the scorer its own prompt: scorer = {model = "…", prompt = "…"}.'
            )
        shown = {} if own else dict(prompt)
        # Its batches must leave the rest of the memory to the other model.
        shown |= {"steps": STEPS, "step_delimiter": delimiter, "batch_tokens": ROW_TOKENS}
        self.score = open_scorer(scorer, {name: value for name, value in shown.items() if value is not None}, Score)

    @property
    def fields(self) -> set[str]:
        """The item fields that the scorer sees."""
        return {*self.score.fields} - {STEPS}

    def frozen(self) -> dict[str, Any]:
        """The setting as the plan fixes it."""
        return {**self._table, **self.score.frozen_settings}

    def beside(self) -> HeadMemory:
        """The scorer's memory on GPUs that it shares with another model; SlurmGPUError if it does not score steps."""
        self.score.check_head()
        return head_memory(self.score.options)

    def lines(self, share: Share, options: EngineOptions) -> tuple[str, ...]:
        """Lines of a plan that say where the scorer computes; SlurmGPUError if a server leaves it too little memory."""
        other = self.beside()
        if options.engine != "server":
            where = "on the same CPUs" if share.gpus == 0 else "on the same GPUs, in the same process"
            return (
                f"{other.name} scores steps {where}: {gb(other.weights)} of weights, and {gb(other.batch)} for its "
                f"batches.",
            )
        own = place_head(self.score.options, share.gpus, share.gpu_memory)
        if options.url or share.gpus == 0:
            return own
        needed = gb(other.on_each(share.gpus))
        return (
            *own,
            f"The server started by serve uses the same GPUs: it must leave {needed} free on each, in vLLM with "
            f"--gpu-memory-utilization.",
        )

    def each(self, trees: Sequence[tuple[Item, Tree]]) -> list[ScoredTree]:
        """The scores of each tree's paths; paths with the same nodes are scored once."""
        asked: dict[tuple[int, tuple[int, ...]], Item] = {}
        for number, (item, tree) in enumerate(trees):
            for path in tree.paths:
                steps = [tree.nodes[node].text for node in path.nodes]
                asked.setdefault((number, path.nodes), Item(item.index, {**item.data, STEPS: steps}, item.run_seed))
        rows = dict(zip(asked, self.score([*asked.values()]), strict=True))
        return [
            self._tree(tree, [rows[number, path.nodes] for path in tree.paths])
            for number, (_, tree) in enumerate(trees)
        ]

    def _tree(self, tree: Tree, rows: Sequence[Row | ItemError]) -> ScoredTree:
        scores = [math.nan if isinstance(row, ItemError) else float(row["score"]) for row in rows]
        return ScoredTree(
            scores,
            [str(row) if isinstance(row, ItemError) else None for row in rows],
            _by_node(tree.paths, rows, len(tree.nodes)),
            vote_weights(scores, is_raw=self.score.is_raw),
        )


def _by_node(paths: Sequence[Path], rows: Sequence[Row | ItemError], n_nodes: int) -> list[float]:
    """The score of each node's step except the root, from its first path that has scores."""
    found: dict[int, float] = {}
    for path, row in zip(paths, rows, strict=True):
        if not isinstance(row, ItemError):
            for node, score in zip(path.nodes, row["step_scores"], strict=True):
                found.setdefault(node, float(score))
    return [found.get(node, math.nan) for node in range(1, n_nodes)]


def scored_totals(merged: Merged) -> dict[str, Any]:
    """The shares of questions with a right best path and with a right weighted vote, and the scores' distribution."""
    scores = np.concatenate([np.empty(0), *good_values(merged, "scores")])
    summary: dict[str, Any] = {"n_unscored": int(np.isnan(scores).sum())}
    for name in ("best", "weighted_vote"):
        summary |= accuracy(total(merged, f"{name}_correct"), len(merged), f"{name}_")
    return summary | distribution(scores)
