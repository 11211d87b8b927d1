"""The row of an item: its paths, the nodes of its tree of steps, and the votes on its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from slurmgpu.llm.answers.metrics import vote
from slurmgpu.llm.answers.steps import Path
from slurmgpu.shards.columns import Array, Column, Json, Ragged, Text
from slurmgpu.workload import Row
from slurmgpu.workloads.collect.search import Search
from slurmgpu.workloads.collect.steps_scorer import ScoredTree
from slurmgpu.workloads.grading.checkers import Checker

COLUMNS: Mapping[str, Column] = {
    **dict.fromkeys(("n_paths", "n_correct"), Array("int32")),
    "accuracy": Array("float32"),
    **dict.fromkeys(("n_cut", "n_long", "n_rollouts"), Array("int32")),
    "n_tokens": Array("int64"),
    "vote": Text(),
    "vote_correct": Array("bool"),
    "prompt": Text(),
    "paths": Json(),
    **dict.fromkeys(("rewards", "weights"), Ragged("float32")),
    "steps": Json(),
    **dict.fromkeys(("parents", "depths"), Ragged("int32")),
    "values": Ragged("float32"),
    **dict.fromkeys(("visits", "draws"), Ragged("int32")),
}
"""The columns; those from `steps` on have an entry for each node of the tree of steps."""


def row_of(search: Search, checker: Checker, *, truncates: bool, tells_failures: bool) -> Row:
    """The row of an item whose paths are sampled; `truncates` and `tells_failures` add a column each."""
    tree, paths, prompt = search.tree, search.tree.paths, search.prompt
    values, nodes, weights = tree.values()[1:], tree.nodes[1:], tree.weights()
    voted = _vote(checker, paths, weights)
    row: dict[str, Any] = {
        "n_paths": len(paths),
        "n_correct": sum(path.correct for path in paths),
        "accuracy": float(sum(weight for path, weight in zip(paths, weights, strict=True) if path.correct)),
        "n_cut": sum(path.cut for path in paths),
        "n_long": sum(path.is_long for path in paths),
        "n_rollouts": search.n_rollouts,
        "n_tokens": search.n_tokens,
        "vote": "" if voted is None else voted.answer,
        "vote_correct": voted is not None and voted.correct,
        "prompt": prompt.messages[-1 - prompt.continues]["content"] if prompt.messages else prompt.text,
        "paths": [
            {
                "text": path.text,
                "steps": [tree.nodes[node].text for node in path.nodes],
                "nodes": [node - 1 for node in path.nodes],
                "answer": path.answer,
                "correct": path.correct,
                "cut": path.cut,
                "reasoning": path.reasoning,
            }
            for path in paths
        ],
        "rewards": [float(path.correct) for path in paths],
        "weights": [float(weight) for weight in weights],
        "steps": [node.text for node in nodes],
        "parents": [node.parent - 1 for node in nodes],
        "depths": [node.depth for node in nodes],
        "values": [value for value, _ in values],
        "visits": [n_visits for _, n_visits in values],
        "draws": tree.draws()[1:],
    }
    if truncates:
        row["n_truncated"] = search.n_truncated
    if tells_failures:
        row["failures"] = [path.failure for path in paths]
    return row if search.scored is None else {**row, **_chosen(checker, search.scored, paths, weights)}


def _chosen(checker: Checker, scored: ScoredTree, paths: Sequence[Path], weights: Sequence[Fraction]) -> Row:
    """The columns of a scorer: the best path, and the vote with each path weighted by its score."""
    best = scored.best
    voted = _vote(checker, paths, [float(weight) * w for weight, w in zip(weights, scored.worth, strict=True)])
    return {
        "scores": scored.scores,
        "step_scores": scored.steps,
        "unscored": scored.errors,
        "best": best,
        "best_correct": best >= 0 and paths[best].correct,
        "weighted_vote": "" if voted is None else voted.answer,
        "weighted_vote_correct": voted is not None and voted.correct,
    }


def _vote(checker: Checker, paths: Sequence[Path], weights: Sequence[Fraction | float]) -> Path | None:
    """The first path with the answer that wins the vote; None without an answer."""
    answers = [None if path.answer is None or path.cut else checker.normal(path.answer) for path in paths]
    winner = vote(answers, weights)
    return paths[winner] if winner >= 0 else None
