"""DistMult (Yang et al. 2015): the score of (h, r, t) is Σ h·r·t over their embeddings."""

from __future__ import annotations

from torch import Tensor

from slurmgpu.workloads.tracin.kge.layouts import Layout
from slurmgpu.workloads.tracin.kge.shallow import Shallow


class DistMult(Shallow):
    """Tables `entity` (N, d) and `relation` (R, d)."""

    @classmethod
    def from_layout(cls, layout: Layout) -> DistMult:
        """The model that a checkpoint's tensors fit."""
        return cls(layout.n_entities, layout.n_relations, layout.embedding_dim)

    def combined(self, heads: Tensor, relations: Tensor) -> Tensor:
        """h·r, number by number."""
        return heads * relations

    def by_rows(self, by_combined: Tensor, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """See Shallow."""
        return by_combined * relations, by_combined * heads
