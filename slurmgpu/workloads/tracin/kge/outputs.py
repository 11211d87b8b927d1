"""What models share that score an entity by a dot product, s_k = e_k · v + b_k: losses, deltas and the table's part."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slurmgpu.influence.tables import Rows, Spread
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
    """From query vectors (u, d), the table of entities (N, d) and its bias (N,)."""
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
    """The gradient of the table as that by which entities are scored."""
    deltas = found.deltas
    values = deltas.values[:, :, None] * vectors[queries.of][:, None, :]
    return Rows(deltas.index, values, _spread(deltas, vectors, queries))


def bias_part(found: Output, queries: Queries) -> Rows:
    """The gradient of the entities' bias."""
    deltas = found.deltas
    ones = deltas.values.new_ones(len(queries.heads), 1)
    return Rows(deltas.index, deltas.values[:, :, None], _spread(deltas, ones, queries))


def _spread(deltas: Deltas, vectors: Tensor, queries: Queries) -> Spread | None:
    return None if deltas.dense is None else Spread(deltas.dense, vectors, queries.of, deltas.scale)
