"""Queries, each with a row of scores, and their tails in the training triples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slurmgpu.workloads.tracin.kge.parameter_names import Inverse


@dataclass(frozen=True)
class Queries:
    """The queries of n examples: u different pairs of a head and a row of the relation table.

    `heads` (u,), `relations` (u,); example i asks query `of[i]` for `tails[i]`: (n,) each.
    """

    heads: Tensor
    relations: Tensor
    of: Tensor
    tails: Tensor

    @classmethod
    def of_examples(cls, heads: Tensor, relations: Tensor, tails: Tensor, n_relations: int) -> Queries:
        """The queries of n heads, rows of the relation table and tails, ordered by head, then relation."""
        keys, of = torch.unique(heads * n_relations + relations, return_inverse=True)
        return cls(keys // n_relations, keys % n_relations, of, tails)

    def __len__(self) -> int:
        return len(self.tails)


class Known:
    """The distinct tails of triples (n, 3), with relations as rows of the table, by query."""

    def __init__(self, triples: Tensor, n_relations: int) -> None:
        heads, relations, tails = triples.T
        self._n_relations = n_relations
        pairs = torch.unique(torch.stack([heads * n_relations + relations, tails], dim=1), dim=0)
        self._keys, self._tails = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()

    def tails(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """All known tails of the u queries, as positions (p,) among the queries and entities (p,)."""
        keys = queries.heads * self._n_relations + queries.relations
        start, stop = torch.searchsorted(self._keys, keys), torch.searchsorted(self._keys, keys, right=True)
        counts = stop - start
        query = torch.repeat_interleave(torch.arange(len(keys), device=keys.device), counts)
        within = torch.arange(len(query), device=keys.device) - (counts.cumsum(0) - counts)[query]
        return query, self._tails[start[query] + within]


def rows_of(inverse: Inverse | None, n_relations: int) -> tuple[Tensor, Tensor | None]:
    """The rows (R,) of relations in the model's table, and the rows of their inverses, if it has any."""
    relations = torch.arange(n_relations)
    if inverse == "interleaved":
        return 2 * relations, 2 * relations + 1
    return relations, relations + n_relations if inverse == "appended" else None


def with_rows(triples: Tensor, rows: Tensor, inverse_rows: Tensor | None) -> Tensor:
    """Triples (n, 3) with rows of the table for relations, followed by their inverses if `inverse_rows` are given."""
    heads, relations, tails = triples.T
    found = [torch.stack([heads, rows[relations], tails], dim=1)]
    if inverse_rows is not None:
        found.append(torch.stack([tails, inverse_rows[relations], heads], dim=1))
    return torch.cat(found)
