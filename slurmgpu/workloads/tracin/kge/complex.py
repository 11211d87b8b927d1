"""ComplEx (Trouillon et al. 2016): the score of (h, r, t) is Re Σ h·r·t̄ over their complex embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from slurmgpu.workloads.tracin.kge.layouts import Layout
from slurmgpu.workloads.tracin.kge.shallow import Shallow


class ComplEx(Shallow):
    """Tables `entity` (N, 2d) and `relation` (R, 2d): the real halves of d complex numbers, then the imaginary ones.

    So the product of two rows as real vectors is Re Σ a·b̄.
    """

    def __init__(self, n_entities: int, n_relations: int, embedding_dim: int, dropout: float = 0.0) -> None:
        super().__init__(n_entities, n_relations, 2 * embedding_dim, dropout)

    @classmethod
    def from_layout(cls, layout: Layout) -> ComplEx:
        """The model that a checkpoint's tensors fit."""
        return cls(layout.n_entities, layout.n_relations, layout.embedding_dim)

    def combined(self, heads: Tensor, relations: Tensor) -> Tensor:
        """h·r, of complex numbers."""
        return _product(heads, relations)

    def by_rows(self, by_combined: Tensor, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """See Shallow: the transpose of a product by a complex number is that by its conjugate."""
        return _product(by_combined, _conjugate(relations)), _product(by_combined, _conjugate(heads))


def _product(a: Tensor, b: Tensor) -> Tensor:
    (real, imaginary), (by_real, by_imaginary) = a.chunk(2, -1), b.chunk(2, -1)
    return torch.cat([real * by_real - imaginary * by_imaginary, real * by_imaginary + imaginary * by_real], -1)


def _conjugate(a: Tensor) -> Tensor:
    real, imaginary = a.chunk(2, -1)
    return torch.cat([real, -imaginary], -1)
