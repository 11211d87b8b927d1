"""Losses, their derivatives with respect to scores, and gradients of tables, for all models.

Entities are scored by a dot product, s_k = e_k · v + b_k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slurmgpu.influence.table_parts import Rows, Spread
from slurmgpu.workloads.tracin.kge.losses import Deltas, Loss
from slurmgpu.workloads.tracin.kge.queries import Queries


@dataclass(frozen=True)
class Output:
    """Losses (n,), the tails' scores (n,), the derivatives by scores, and those by the query vectors (n, d)."""

    losses: Tensor
    scores: Tensor
    deltas: Deltas
    by_vector: Tensor


def output(vectors: Tensor, table: Tensor, bias: Tensor | None, queries: Queries, loss: Loss) -> Output:
    """The output from query vectors (u, d), the table of entities (N, d) and its bias (N,)."""
    if not loss.reaches_all:
        candidates = loss.candidates(queries)
        rows = table[candidates]  # (n, s, d)
        scores = (rows @ vectors[queries.of][:, :, None])[:, :, 0]
        if bias is not None:
            scores = scores + bias[candidates]
        losses, deltas = loss.of_scores(scores, queries)
        return Output(losses, scores[:, 0], deltas, (deltas.values[:, None, :] @ rows)[:, 0])
    scores = vectors @ table.T  # (u, N)
    if bias is not None:
        scores += bias
    losses, deltas = loss.of_scores(scores, queries)
    assert deltas.dense is not None
    by_vector = (deltas.dense @ table)[queries.of]
    if deltas.scale is not None:
        by_vector *= deltas.scale[:, None]
    # An index of -1 takes the last row, times 0.
    by_vector += (deltas.values[:, None, :] @ table[deltas.index])[:, 0]
    return Output(losses, scores[queries.of, queries.tails], deltas, by_vector)


def table_part(found: Output, vectors: Tensor, queries: Queries) -> Rows:
    """The gradient of the table of entities, as the tails' rows."""
    deltas = found.deltas
    values = deltas.values[:, :, None] * vectors[queries.of][:, None, :]
    return Rows(deltas.index, values, _spread(deltas, vectors, queries))


def bias_part(found: Output, queries: Queries) -> Rows:
    """The gradient of the entities' bias."""
    deltas = found.deltas
    ones = deltas.values.new_ones(len(queries.heads), 1)
    return Rows(deltas.index, deltas.values[:, :, None], _spread(deltas, ones, queries))


def relation_part(queries: Queries, by_relation: Tensor) -> Rows:
    """The gradient of the table of relations: one row (n, w) for each example."""
    return Rows(queries.relations[queries.of][:, None], by_relation[:, None])


def n_candidates(loss: Loss) -> int:
    """The number of candidate entities of a loss for each example, without the entities that it reaches densely."""
    if loss.reaches_all:
        return 2
    zero = torch.zeros(1, dtype=torch.long)
    return int(loss.candidates(Queries(zero, zero, zero, zero)).shape[1])


def _spread(deltas: Deltas, vectors: Tensor, queries: Queries) -> Spread | None:
    return None if deltas.dense is None else Spread(deltas.dense, vectors, queries.of, deltas.scale)
