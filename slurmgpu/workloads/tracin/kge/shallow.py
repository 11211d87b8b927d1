"""The models without layers: a table of entities and a table of relations; gradients are a few rows of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from slurmgpu.influence.parts import Part
from slurmgpu.influence.table_parts import Rows
from slurmgpu.workloads.tracin.kge.layouts import Layout
from slurmgpu.workloads.tracin.kge.losses import Loss
from slurmgpu.workloads.tracin.kge.outputs import Output, n_candidates, output, relation_part, table_part
from slurmgpu.workloads.tracin.kge.queries import Queries

S = TypeVar("S", bound="Shallow")


class Shallow(nn.Module):
    """Tables `entity` (N, w) and `relation` (R, w). A tail's score is its row times the query's `combined` rows.

    The dropout applies to the combined rows, in training only.
    """

    groups: Mapping[str, str] = {"entity": "entity", "relation": "relation"}

    def __init__(self, n_entities: int, n_relations: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.entity = nn.Parameter(nn.init.xavier_normal_(torch.empty(n_entities, width)))
        self.relation = nn.Parameter(nn.init.xavier_normal_(torch.empty(n_relations, width)))
        self.dropout = nn.Dropout(dropout)

    @classmethod
    def from_layout(cls: type[S], layout: Layout) -> S:
        """The model that a checkpoint's tensors fit."""
        return cls(layout.n_entities, layout.n_relations, layout.embedding_dim)

    def combined(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The combination of rows of the two tables, (u, w) each, for the product with tails."""
        raise NotImplementedError

    def by_rows(self, by_combined: Tensor, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives by the rows of head and relation, from the derivatives by their combination: (n, w) each."""
        raise NotImplementedError

    def queries(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The query vectors for the product with tails: (u, w)."""
        found: Tensor = self.dropout(self.combined(self.entity[heads], self.relation[relations]))
        return found

    def scores(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The scores of all entities as tails: (u, N)."""
        return self.queries(heads, relations) @ self.entity.T

    def is_factored(self, loss: Loss) -> bool:
        """True: gradients of every loss have factors."""
        return True

    def factors(self, queries: Queries, loss: Loss, wanted: Collection[str]) -> tuple[dict[str, Part], Output]:
        """The rows of each example's gradient, and a dense part for a loss that reaches all entities."""
        heads, relations = self.entity[queries.heads], self.relation[queries.relations]
        vectors = self.combined(heads, relations)
        found = output(vectors, self.entity, None, queries, loss)
        by_head, by_relation = self.by_rows(found.by_vector, heads[queries.of], relations[queries.of])
        parts: dict[str, Part] = {}
        if "entity" in wanted:
            table = table_part(found, vectors, queries)
            index = torch.cat([table.index, queries.heads[queries.of][:, None]], dim=1)
            parts["entity"] = Rows(index, torch.cat([table.values, by_head[:, None]], dim=1), table.spread)
        if "relation" in wanted:
            parts["relation"] = relation_part(queries, by_relation)
        return parts, found

    def bytes_of_work(self, loss: Loss) -> int:
        """See Model: what the loss gathers, and the copies in the parts."""
        n_slots = n_candidates(loss)
        scores = 7 * len(self.entity) * self._item if loss.reaches_all else 0
        return self.bytes_of_result(loss) + (2 * n_slots + 8) * self._row_bytes + scores + 64 * n_slots

    def bytes_of_result(self, loss: Loss) -> int:
        """See Model."""
        spread = len(self.entity) * self._item + self._row_bytes + 16 if loss.reaches_all else 0
        return (n_candidates(loss) + 2) * (self._row_bytes + 8) + spread + 2 * self._item

    @property
    def _item(self) -> int:
        return int(self.entity.element_size())

    @property
    def _row_bytes(self) -> int:
        return int(self.entity.shape[1]) * self._item


class DistMult(Shallow):
    """DistMult (Yang et al. 2015): the score of (h, r, t) is Σ h·r·t over their embeddings (d)."""

    def combined(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The element-wise product h·r."""
        return heads * relations

    def by_rows(self, by_combined: Tensor, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """See Shallow."""
        return by_combined * relations, by_combined * heads


class ComplEx(Shallow):
    """ComplEx (Trouillon et al. 2016): the score of (h, r, t) is Re Σ h·r·t̄ over their complex embeddings.

    A row holds the real parts of d complex numbers, then the imaginary parts, so that the product of two rows as real
    vectors is Re Σ a·b̄.
    """

    def __init__(self, n_entities: int, n_relations: int, embedding_dim: int, dropout: float = 0.0) -> None:
        super().__init__(n_entities, n_relations, 2 * embedding_dim, dropout)

    def combined(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The complex product h·r."""
        return _product(heads, relations)

    def by_rows(self, by_combined: Tensor, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """See Shallow: the transpose of a product with a complex number is the product with its conjugate."""
        return _product(by_combined, _conjugate(relations)), _product(by_combined, _conjugate(heads))


def _product(a: Tensor, b: Tensor) -> Tensor:
    (real, imaginary), (by_real, by_imaginary) = a.chunk(2, -1), b.chunk(2, -1)
    return torch.cat([real * by_real - imaginary * by_imaginary, real * by_imaginary + imaginary * by_real], -1)


def _conjugate(a: Tensor) -> Tensor:
    real, imaginary = a.chunk(2, -1)
    return torch.cat([real, -imaginary], -1)


class TransE(Shallow):
    """TransE (Bordes et al. 2013): the score of (h, r, t) is -‖h + r - t‖ over their embeddings (d).

    `norm` is the p of the distance: 1 as in PyKEEN, or 2.
    """

    def __init__(
        self, n_entities: int, n_relations: int, embedding_dim: int, norm: float = 1, dropout: float = 0.0
    ) -> None:
        super().__init__(n_entities, n_relations, embedding_dim, dropout)
        self.norm = norm

    @classmethod
    def from_layout(cls, layout: Layout) -> TransE:
        """The model that a checkpoint's tensors fit, with the norm from the checkpoint or a setting."""
        if layout.norm is None:
            raise ValueError("the layout has no norm, so it is not for TransE")
        return cls(layout.n_entities, layout.n_relations, layout.embedding_dim, layout.norm)

    def combined(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The sum h + r."""
        return heads + relations

    def scores(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The scores of all entities as tails: (u, N); needs u·N·d numbers."""
        found: Tensor = -vector_norm(self.queries(heads, relations)[:, None] - self.entity, self.norm, -1)
        return found

    def is_factored(self, loss: Loss) -> bool:
        """False for a loss that reaches all entities: each entity has its own gradient, which is not a product."""
        return not loss.reaches_all

    def factors(self, queries: Queries, loss: Loss, wanted: Collection[str]) -> tuple[dict[str, Part], Output]:
        """The rows of each example's gradient: for the candidates, the head and the relation."""
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
        """The derivatives of scores (…) by the tails' rows, from h + r - t (…, d): 0 where the distance is 0."""
        powers = differences.sign() * differences.abs() ** (self.norm - 1)
        lengths = (-scores) ** (self.norm - 1)
        return powers / lengths.where(scores != 0, 1.0)[..., None]

    def bytes_of_work(self, loss: Loss) -> int:
        """See Model."""
        n_slots = n_candidates(loss)
        return self.bytes_of_result(loss) + (6 * n_slots + 4) * self._row_bytes + 64 * n_slots
