"""A knowledge-graph embedding at one checkpoint, for influences: triples in, gradients as parts out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from slurmgpu.influence.models import Gradients, Side
from slurmgpu.influence.parts import Part
from slurmgpu.workloads.tracin.kge.losses import Loss
from slurmgpu.workloads.tracin.kge.outputs import Output
from slurmgpu.workloads.tracin.kge.queries import Queries


class Model(Protocol):
    """The interface of this folder's models beside `torch.nn.Module`.

    Their parameters have the canonical names: `entity` (N, d), `relation` (R, d) and others.
    """

    groups: Mapping[str, str]

    def scores(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The scores of all entities as tails of u queries (u, N), differentiable."""

    def factors(self, queries: Queries, loss: Loss, wanted: Collection[str]) -> tuple[dict[str, Part], Output]:
        """The parts of the wanted parameters, for n examples."""

    def is_factored(self, loss: Loss) -> bool:
        """Whether gradients of this loss have factors; if not, the generic path computes them."""

    def bytes_of_work(self, loss: Loss) -> int:
        """The most bytes that `factors` needs for one example, with its result."""

    def bytes_of_result(self, loss: Loss) -> int:
        """The most bytes that the parts need for one example."""


class TriplesModel:
    """A model with the losses of training and test triples.

    An example is a triple (head, relation, tail) of the dictionaries' ids. `rows` (R,) are the relations' rows in the
    model's table; with `inverse_rows` a triple's loss is that of its two queries, (h, r, ?) and (t, r⁻¹, ?).
    """

    def __init__(
        self, model: Model, losses: Mapping[Side, Loss], rows: Tensor, inverse_rows: Tensor | None = None
    ) -> None:
        self.model, self._losses = model, losses
        self._rows, self._inverse_rows = rows, inverse_rows
        self.groups = model.groups

    @property
    def module(self) -> nn.Module:
        """The model as a module."""
        return cast(nn.Module, self.model)

    def parameters_by_name(self) -> Mapping[str, Tensor]:
        """See Differentiable."""
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    def gradients(self, examples: Tensor, side: Side, wanted: Collection[str]) -> Gradients:
        """See Differentiable; `scores` are those of the tails."""
        with torch.no_grad():
            found = [self.model.factors(queries, self._losses[side], wanted) for queries in self._queries(examples)]
        losses = torch.stack([output.losses for _, output in found]).sum(0)
        return Gradients(tuple(parts for parts, _ in found), losses, found[0][1].scores)

    def losses(self, examples: Tensor, side: Side) -> Tensor:
        """See Differentiable."""
        total = 0
        for queries in self._queries(examples):
            rows = self.model.scores(queries.heads[queries.of], queries.relations[queries.of])
            loss = self._losses[side]
            total = total + loss.plain(rows, *loss.targets(queries, rows.shape[1]))
        return cast(Tensor, total)

    def order(self, examples: Tensor) -> Tensor:
        """See Differentiable: by head, then relation, so that the triples of a query lie together."""
        return torch.argsort(examples[:, 0] * len(self._rows) + examples[:, 1], stable=True)

    def bytes_of_work(self, side: Side) -> int:
        """See Differentiable."""
        return self._n_terms * self.model.bytes_of_work(self._losses[side])

    def bytes_of_result(self, side: Side) -> int:
        """See Differentiable."""
        return self._n_terms * self.model.bytes_of_result(self._losses[side])

    @property
    def _n_terms(self) -> int:
        return 1 if self._inverse_rows is None else 2

    def _queries(self, examples: Tensor) -> Iterator[Queries]:
        heads, relations, tails = examples.T.contiguous()
        n_rows = int(self.module.get_parameter("relation").shape[0])
        yield Queries.of_examples(heads, self._rows[relations], tails, n_rows)
        if self._inverse_rows is not None:
            yield Queries.of_examples(tails, self._inverse_rows[relations], heads, n_rows)
