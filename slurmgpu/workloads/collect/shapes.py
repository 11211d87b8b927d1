"""How many paths a question has, and where they end: which settings of `collect` cannot be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slurmgpu.errors import SlurmGPUError

MAX_LEAVES = 10_000
"""Paths of a question that a tree may have; they are all kept in memory until the question is done."""


def check_shape(tree: Sequence[int], paths: int | None, rollouts: int | None) -> None:
    """Refuse numbers of paths, of branches and of completions that cannot be."""
    for name, value in (("paths", paths), ("rollouts", rollouts)):
        if tree and value is not None:
            raise SlurmGPUError(f"tree and {name} are both set; a tree's own leaves tell its values. Leave one out.")
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
            f"tree is {list(tree)}, which is {n_leaves:,} paths of each question; expected {MAX_LEAVES:,} at most. "
            f"Take fewer branches, or fewer depths."
        )


def check_stops(stops: Sequence[str], delimiter: str) -> None:
    """Refuse a stop text that leaves no path a second step."""
    for stop in stops:
        if stop in delimiter:
            raise SlurmGPUError(
                f"stop has {stop!r}, and step_delimiter is {delimiter!r}, so that a path would end with its first "
                f"step. Leave that stop text out."
            )
