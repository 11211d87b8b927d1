"""The state of an item while its reasoning paths are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from slurmgpu.errors import ItemError
from slurmgpu.llm.answers.steps import Tree
from slurmgpu.llm.interface.engine import Prompt
from slurmgpu.workload import Item
from slurmgpu.workloads.collect.steps_scorer import ScoredTree


@dataclass
class Search:
    """The state of one item while its paths are sampled; an `error` ends the sampling."""

    item: Item
    prompt: Prompt
    tree: Tree
    n_tokens: int = 0
    n_truncated: int = 0
    n_rollouts: int = 0
    scored: ScoredTree | None = None
    error: ItemError | None = None


@dataclass(frozen=True)
class Draw:
    """A completion to sample: the node where it starts, and its number there."""

    search: Search
    node: int
    number: int


def missing_branches(search: Search, depth: int, n_branches: int) -> list[Draw]:
    """The branches that a tree lacks at a depth; a path that began higher up counts as a branch of its nodes."""
    tree = search.tree
    return [
        Draw(search, node, number)
        for node in tree.open_nodes(depth)
        for number in range(n_branches - tree.n_drawn(node))
    ]
