"""What the models without layers share: a table of entities, one of relations, and gradients that are rows of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from slurmgpu.influence.parts import Part
from slurmgpu.influence.tables import Rows
from slurmgpu.workloads.tracin.kge.losses import Loss
from slurmgpu.workloads.tracin.kge.outputs import Output, output, table_part
from slurmgpu.workloads.tracin.kge.queries import Queries


class Shallow(nn.Module):
    """Tables `entity` (N, w) and `relation` (R, w); the score of a tail is its row · `combined` rows of the query.

    Dropout, of what the tails are compared with, is for training.
    """

    groups: Mapping[str, str] = {"entity": "entity", "relation": "relation"}

    def __init__(self, n_entities: int, n_relations: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.entity = nn.Parameter(nn.init.xavier_normal_(torch.empty(n_entities, width)))
        self.relation = nn.Parameter(nn.init.xavier_normal_(torch.empty(n_relations, width)))
        self.dropout = nn.Dropout(dropout)

    def combined(self, heads: Tensor, relations: Tensor) -> Tensor:
        """What tails are compared with, from rows of the two tables: (u, w) each."""
        raise NotImplementedError

    def by_rows(self, by_combined: Tensor, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives by the rows of head and relation, from those by what they were combined to: (n, w) each."""
        raise NotImplementedError

    def queries(self, heads: Tensor, relations: Tensor) -> Tensor:
        """What is compared with each tail's row: (u, w)."""
        found: Tensor = self.dropout(self.combined(self.entity[heads], self.relation[relations]))
        return found

    def scores(self, heads: Tensor, relations: Tensor, tails: Tensor | None = None) -> Tensor:
        """The scores of all entities as tails (u, N), or of `tails` (u, s)."""
        queries = self.queries(heads, relations)
        return queries @ self.entity.T if tails is None else (queries[:, None] * self.entity[tails]).sum(-1)

    def is_factored(self, loss: Loss) -> bool:
        """Always: at most three rows and a loss's candidates, and what is spread is a product."""
        return True

    def factors(self, queries: Queries, loss: Loss, wanted: Collection[str]) -> tuple[dict[str, Part], Output]:
        """The rows that each example's gradient has, and what a loss that reaches all entities spreads over them."""
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
        """See Model: both what the loss gathers and the copies that the parts take."""
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


def relation_part(queries: Queries, by_relation: Tensor) -> Rows:
    """The gradient of the table of relations: each example's is one row (n, w)."""
    return Rows(queries.relations[queries.of][:, None], by_relation[:, None])


def n_candidates(loss: Loss) -> int:
    """The entities that a loss has for each example, beside all that it may reach."""
    if loss.reaches_all:
        return 2
    zero = torch.zeros(1, dtype=torch.long)
    return int(loss.candidates(Queries(zero, zero, zero, zero)).shape[1])
