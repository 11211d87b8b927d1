"""TransE (Bordes et al. 2013): the score of (h, r, t) is -‖h + r - t‖ over their embeddings."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.linalg import vector_norm

from slurmgpu.influence.parts import Part
from slurmgpu.influence.tables import Rows
from slurmgpu.workloads.tracin.kge.layouts import Layout
from slurmgpu.workloads.tracin.kge.losses import Loss
from slurmgpu.workloads.tracin.kge.outputs import Output
from slurmgpu.workloads.tracin.kge.queries import Queries
from slurmgpu.workloads.tracin.kge.shallow import Shallow, n_candidates, relation_part


class TransE(Shallow):
    """Tables `entity` (N, d) and `relation` (R, d), and the `norm` p of the distance: 1 as in PyKEEN, or 2."""

    def __init__(
        self, n_entities: int, n_relations: int, embedding_dim: int, norm: float = 1, dropout: float = 0.0
    ) -> None:
        super().__init__(n_entities, n_relations, embedding_dim, dropout)
        self.norm = norm

    @classmethod
    def from_layout(cls, layout: Layout) -> TransE:
        """The model that a checkpoint's tensors fit, with the norm that it or a setting tells."""
        if layout.norm is None:
            raise ValueError("the layout has no norm, and so is not one of TransE")
        return cls(layout.n_entities, layout.n_relations, layout.embedding_dim, layout.norm)

    def combined(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The sum h + r."""
        return heads + relations

    def scores(self, heads: Tensor, relations: Tensor, tails: Tensor | None = None) -> Tensor:
        """The scores of all entities as tails (u, N), or of `tails` (u, s). All take u·N·d numbers on the way."""
        compared = self.entity if tails is None else self.entity[tails]
        found: Tensor = -vector_norm(self.queries(heads, relations)[:, None] - compared, self.norm, -1)
        return found

    def is_factored(self, loss: Loss) -> bool:
        """Not where a loss reaches all entities: each then has a gradient of its own, and none is a product."""
        return not loss.reaches_all

    def factors(self, queries: Queries, loss: Loss, wanted: Collection[str]) -> tuple[dict[str, Part], Output]:
        """The rows that each example's gradient has: those of the candidates, of the head and of the relation."""
        candidates, heads = loss.candidates(queries), queries.heads[queries.of]
        queried = self.combined(self.entity[heads], self.relation[queries.relations[queries.of]])[:, None]
        differences = queried - self.entity[candidates]
        scores = -vector_norm(differences, self.norm, -1)
        losses, deltas = loss.of_scores(scores, queries)
        by_tails = self._by_tails(differences, scores) * deltas.values[:, :, None]
        by_query = -by_tails.sum(1)
        parts: dict[str, Part] = {}
        if "entity" in wanted:
            index = torch.cat([candidates, heads[:, None]], dim=1)
            parts["entity"] = Rows(index, torch.cat([by_tails, by_query[:, None]], dim=1))
        if "relation" in wanted:
            parts["relation"] = relation_part(queries, by_query)
        return parts, Output(losses, scores[:, 0], deltas, by_query)

    def _by_tails(self, differences: Tensor, scores: Tensor) -> Tensor:
        """The derivatives of scores (…) by the tails' rows, from h + r - t (…, d): 0 where the distance is."""
        powers = differences.sign() * differences.abs() ** (self.norm - 1)
        lengths = (-scores) ** (self.norm - 1)
        return powers / lengths.where(scores != 0, 1.0)[..., None]

    def bytes_of_work(self, loss: Loss) -> int:
        """See Model."""
        n_slots = n_candidates(loss)
        return self.bytes_of_result(loss) + (6 * n_slots + 4) * self._row_bytes + 64 * n_slots
