"""How well a model ranks true tails: filtered ranks (Bordes et al. 2013) and what is counted of them."""

from __future__ import annotations

import torch
from torch import Tensor

from slurmgpu.workloads.tracin.kge.differentiable import Model
from slurmgpu.workloads.tracin.kge.queries import Known, Queries

BATCH = 256
"""Triples that are ranked at a time."""


def filtered_ranks(model: Model, known: Known, triples: Tensor, n_relations: int) -> Tensor:
    """The rank (n,) of each tail of `triples` (n, 3) among all entities but the other `known` tails of its query.

    Relations are rows of the model's table, which has `n_relations`. Where scores are equal it is the mean of the best
    and the worst rank, so that a model which gives all entities one score ranks by chance. The model is in evaluation
    mode.
    """
    with torch.no_grad():
        batches = (batch.unbind(1) for batch in triples.split(BATCH))
        queries = (Queries.of_examples(heads, rows, tails, n_relations) for heads, rows, tails in batches)
        return torch.cat([_ranks(model, known, some) for some in queries])


def _ranks(model: Model, known: Known, queries: Queries) -> Tensor:
    tails = queries.tails[:, None]
    scores = model.scores(queries.heads, queries.relations)
    others = torch.ones_like(scores, dtype=torch.bool)
    others[known.tails(queries)] = False
    scores, others = scores[queries.of], others[queries.of]
    others.scatter_(1, tails, False)
    own = scores.gather(1, tails)
    better, equal = ((scores > own) & others).sum(1), ((scores == own) & others).sum(1)
    # A model whose scores are NaN ranks last, not first.
    worst = torch.full_like(better, scores.shape[1])
    return torch.where(own[:, 0].isnan(), worst, 1 + better + equal / 2)


def summary(ranks: Tensor) -> dict[str, float]:
    """The mean reciprocal rank, and the shares of ranks up to 1, 3 and 10."""
    found = {"mrr": float((1 / ranks.double()).mean())}
    return found | {f"hits@{k}": float((ranks <= k).double().mean()) for k in (1, 3, 10)}
