"""A knowledge-graph embedding at one checkpoint, for influences: triples in, gradients as parts out."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from slurmgpu.influence.gradients import Gradients, Side
from slurmgpu.influence.parts import Part
from slurmgpu.influence.per_example import PerExample
from slurmgpu.workloads.tracin.kge.losses import Loss
from slurmgpu.workloads.tracin.kge.outputs import Output
from slurmgpu.workloads.tracin.kge.queries import Queries

log = logging.getLogger(__name__)


class Model(Protocol):
    """The interface of this folder's models, in addition to `torch.nn.Module`.

    Their parameters have the canonical names: `entity` (N, d), `relation` (R, d) and others.
    """

    groups: Mapping[str, str]

    def scores(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The scores of all entities as tails of u queries (u, N), differentiable."""

    def factors(self, queries: Queries, loss: Loss, wanted: Collection[str]) -> tuple[dict[str, Part], Output]:
        """The parts of the wanted parameters, for n examples."""

    def is_factored(self, loss: Loss) -> bool:
        """Whether gradients of this loss have factors; otherwise the generic path computes them."""

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
        """See Differentiable: by head, then relation, so that the triples of a query are adjacent."""
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


def differentiable(
    model: Model, losses: Mapping[Side, Loss], rows: Tensor, inverse_rows: Tensor | None, example: Tensor
) -> TriplesModel:
    """A model of triples, with factored gradients if both losses have them, otherwise with the generic path.

    `example` (3,) is any triple; the generic path measures its memory with it.
    """
    if all(model.is_factored(loss) for loss in losses.values()):
        return TriplesModel(model, losses, rows, inverse_rows)
    found = Unfactored(model, losses, rows, inverse_rows, example)
    n_numbers = sum(value.numel() for value in found.parameters_by_name().values())
    log.warning(
        "%s has no factors for the gradients of this loss: computing full gradients, up to %s numbers for a triple",
        type(model).__name__,
        f"{n_numbers:,}",
    )
    return found


class Unfactored(TriplesModel):
    """Triples whose gradients are computed in full.

    The generic path cannot look up values during a loss, so lookups are stored with each triple beforehand: for each
    query its head, relation row, tail and targets, as one row of integers.
    """

    def __init__(
        self, model: Model, losses: Mapping[Side, Loss], rows: Tensor, inverse_rows: Tensor | None, example: Tensor
    ) -> None:
        super().__init__(model, losses, rows, inverse_rows)
        self._forward = _Scores(model)
        self._n_entities = len(self.parameters_by_name()["entity"])
        of_example: dict[Side, list[Tensor]] = {side: self._looked_up(example[None], side)[0] for side in losses}
        # Shapes of the columns of one query: () for a number, (w,) for several.
        self._shapes = {side: [columns.shape[1:] for columns in found] for side, found in of_example.items()}
        self._n_columns = max(sum(columns.numel() for columns in found) for found in of_example.values())
        laid = self._laid(example[None], "train")
        self._per_example = PerExample(
            self._losses_of, self.parameters_by_name(), self.groups, laid[0], scores=self._scores_of, module=self.module
        )

    def gradients(self, examples: Tensor, side: Side, wanted: Collection[str]) -> Gradients:
        """See Differentiable."""
        return self._per_example.gradients(self._laid(examples, side), side, wanted)

    def bytes_of_work(self, side: Side) -> int:
        """See Differentiable."""
        return self._per_example.bytes_of_work(side)

    def bytes_of_result(self, side: Side) -> int:
        """See Differentiable."""
        return self._per_example.bytes_of_result(side)

    def _looked_up(self, examples: Tensor, side: Side) -> list[list[Tensor]]:
        """For each query of n triples the head, row of the relation, tail and targets: (n,) or (n, w) each."""
        loss, found = self._losses[side], []
        for queries in self._queries(examples):
            ids = [queries.heads[queries.of], queries.relations[queries.of], queries.tails]
            found.append([*ids, *loss.targets(queries, self._n_entities)])
        return found

    def _laid(self, examples: Tensor, side: Side) -> Tensor:
        """The same as rows of integers (n, c), padded with zeros."""
        laid = []
        for columns in self._looked_up(examples, side):
            row = torch.cat([values.reshape(len(examples), -1).long() for values in columns], dim=1)
            laid.append(nn.functional.pad(row, (0, self._n_columns - row.shape[1])))
        return torch.cat(laid, dim=1)

    def _losses_of(self, parameters: Mapping[str, Tensor], laid: Tensor, side: Side) -> Tensor:
        return torch.stack([self._loss_of(parameters, row, side) for row in laid.split(self._n_columns, 1)]).sum(0)

    def _loss_of(self, parameters: Mapping[str, Tensor], row: Tensor, side: Side) -> Tensor:
        widths = [math.prod(shape) for shape in self._shapes[side]]
        columns = row[:, : sum(widths)].split(widths, 1)
        ids = [values.reshape(len(row), *shape) for values, shape in zip(columns, self._shapes[side], strict=True)]
        heads, relations, _, *targets = ids
        return self._losses[side].plain(self._rows_of(parameters, heads, relations), *targets)

    def _scores_of(self, parameters: Mapping[str, Tensor], laid: Tensor, side: Side) -> Tensor:
        heads, relations, tails = laid[:, 0], laid[:, 1], laid[:, 2:3]
        return self._rows_of(parameters, heads, relations).gather(1, tails)[:, 0]

    def _rows_of(self, parameters: Mapping[str, Tensor], heads: Tensor, relations: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in parameters.items()}
        return cast(Tensor, functional_call(self._forward, named, (heads, relations)))


class _Scores(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The scores of all entities as tails of u queries (u, N)."""
        return self.model.scores(heads, relations)
