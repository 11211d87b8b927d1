"""The summary of a tracin run: the groups' shares, the precision, and the training triples listed most often."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import SlurmGPUError
from slurmgpu.workloads.tracin.planning import PlannedSettings

if TYPE_CHECKING:
    from slurmgpu.results import Merged

log = logging.getLogger(__name__)

KEYS = (
    *("n_tests", "n_failed", "n_training_triples", "n_checkpoints", "median_self_influence"),
    *("median_counted", "least_counted", "n_none_counted"),
    *("precision_error", "top10_overlap", "group_share", "listed_most_often", "hint"),
)
"""The keys that a summary may have."""

BLOCK_ROWS = 4096
N_LISTED = 10
"""The number of training triples in the summary."""
FEW_IN_COMMON = 0.9
"""The mean overlap of the ten strongest below which the summary warns about the reduced precision."""


def summarize(settings: PlannedSettings, merged: Merged) -> dict[str, Any]:
    """Count tests, the influence of each parameter group, and the training triples that are listed most often."""
    good = ~merged.failed
    own = np.asarray(merged["self_influence"][:], np.float64)[good]
    summary: dict[str, Any] = {
        "n_tests": int(good.sum()),
        "n_failed": int(merged.failed.sum()),
        "n_training_triples": settings.facts.n_train,
        "n_checkpoints": len(settings.facts.checkpoints),
        "median_self_influence": float(np.median(own)) if len(own) else None,
    }
    hints: list[str] = []
    if settings.n_hops is not None and "n_counted" in merged.columns and len(own):
        summary |= _counted(np.asarray(merged["n_counted"][:])[good], settings.n_listed, hints)
    if settings.is_reduced and len(own):
        summary |= _precision(merged, good, settings.precision, hints)
    if settings.top_k:
        summary |= _lists(settings, merged)
    return {**summary, "hint": " ".join(hints)} if hints else summary


def _counted(counts: NDArray[np.int64], n_listed: int, hints: list[str]) -> dict[str, Any]:
    n_none, n_few = int((counts == 0).sum()), int((counts < n_listed).sum())
    if n_none:
        few = f"leaves no training triple for {n_none:,} of {len(counts):,} test triples: their lists are empty"
        hints.append(f"The filter {few}. Raise n_hops, or lower min_degree.")
    elif n_few:
        few = f"leaves fewer than {n_listed:,} training triples for {n_few:,} of {len(counts):,} test triples"
        hints.append(f"The filter {few}: their lists are shorter.")
    return {"median_counted": float(np.median(counts)), "least_counted": int(counts.min()), "n_none_counted": n_none}


def _precision(merged: Merged, good: NDArray[np.bool_], precision: str, hints: list[str]) -> dict[str, Any]:
    errors, overlaps = (np.asarray(merged[name][:], float)[good] for name in ("precision_error", "top10_overlap"))
    found: dict[str, Any] = {
        "precision_error": {"mean": float(errors.mean()), "worst": float(errors.max())},
        "top10_overlap": {"mean": float(overlaps.mean()), "worst": float(overlaps.min())},
    }
    if overlaps.mean() < FEW_IN_COMMON:
        hints.append(
            f'With precision = "{precision}", {overlaps.mean():.0%} of the ten strongest training triples are right '
            f'on average; with precision = "fp32" all are.'
        )
    return found


def _lists(settings: PlannedSettings, merged: Merged) -> dict[str, Any]:
    groups = settings.facts.groups
    shares = np.zeros(len(groups))
    counts = {side: np.zeros(settings.facts.n_train, np.int64) for side in ("proponent", "opponent")}
    for side, count in counts.items():
        for lines, split in _blocks(merged, side):
            count += np.bincount(lines[lines >= 0], minlength=len(count))
            shares += np.abs(split, dtype=np.float64).sum((0, 1))
    whole = float(shares.sum())
    by_group = {name: share / whole if whole else None for name, share in zip(groups, shares.tolist(), strict=True)}
    total = counts["proponent"] + counts["opponent"]
    most = np.lexsort((np.arange(len(total)), -total))[:N_LISTED]
    listed = {
        name: {"n_tests": int(total[line]), **{f"as_{side}": int(count[line]) for side, count in counts.items()}}
        for line, name in zip(most.tolist(), _names(settings, most), strict=True)
        if total[line]
    }
    return {"group_share": by_group, "listed_most_often": listed}


def _blocks(merged: Merged, side: str) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    for start in range(0, len(merged), BLOCK_ROWS):
        good = ~merged.failed[start : start + BLOCK_ROWS]
        rows = slice(start, start + BLOCK_ROWS)
        yield merged[f"{side}s"][rows][good], merged[f"{side}_shares"][rows][good]


def _names(settings: PlannedSettings, lines: NDArray[np.int64]) -> list[str]:
    """Training triples as text with their line numbers, from 0; only the numbers if the files are gone."""
    try:
        graph = settings.read_graph()
    except SlurmGPUError as error:
        log.warning("training triples have no names in the summary: %s", error)
        return [f"train[{line}]" for line in lines.tolist()]
    entities, relations = graph.entities.names, graph.relations.names
    return [
        f"train[{line}]: {entities[head]} {relations[relation]} {entities[tail]}"
        for line, (head, relation, tail) in zip(lines.tolist(), graph.train[lines].tolist(), strict=True)
    ]
