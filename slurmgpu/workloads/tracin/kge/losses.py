"""Losses of a triple: their values, and their derivatives by the scores.

s_k is the score of entity k as the tail of the triple's query, t the triple's own tail, N the number of entities,
σ the logistic function. Each loss is written twice: as what it is, for autograd (`plain`), and as its derivative by
the scores, with what examples of one query share kept apart (`of_scores`); a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from slurmgpu.workloads.tracin.kge.queries import Known, Queries


@dataclass(frozen=True)
class Deltas:
    """The derivatives of n losses by the scores of their queries.

    Example i has `values[i, s]` at entity `index[i, s]` (n, s), -1 being none, with value 0; and, if the loss reaches
    all entities, `scale[i]` · `dense[of[i]]` besides: (n,), None for 1, and (u, N).
    """

    index: Tensor
    values: Tensor
    dense: Tensor | None = None
    scale: Tensor | None = None


class Loss(Protocol):
    """A loss of one triple. `reaches_all` says whether it depends on the scores of all entities."""

    reaches_all: bool

    def candidates(self, queries: Queries) -> Tensor:
        """The entities whose scores the loss is of (n, s), the tail first; not of losses that reach all."""

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """The losses (n,) and their derivatives, from scores (u, N) if the loss reaches all, else (n, s)."""

    def targets(self, queries: Queries, n_entities: int) -> tuple[Tensor, ...]:
        """What `plain` takes beside scores, each of length n."""

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """The losses (n,) from the scores of all entities for each example (n, N), differentiable."""


@dataclass(frozen=True)
class _Best:
    """Each query's best entity (u,), which dense derivatives leave out.

    Where a model is sure of a tail, the dense derivative there and the tail's own almost cancel, and in float32 nothing
    right would be left of a small gradient. Elsewhere nothing cancels: with a high score at another entity than the
    tail, the gradient is large. `is_tail` (n,): whether it is the example's tail.
    """

    entities: Tensor
    queries: Queries
    is_tail: Tensor

    @classmethod
    def of(cls, scores: Tensor, queries: Queries) -> _Best:
        """That of the highest score (u, N)."""
        entities = scores.argmax(1)
        return cls(entities, queries, entities[queries.of] == queries.tails)

    def at(self, values: Tensor) -> Tensor:
        """The values (u, N) at the best entities: (u,)."""
        return values.gather(1, self.entities[:, None])[:, 0]

    def without(self, values: Tensor) -> Tensor:
        """The values (u, N), 0 at the best entities; in place."""
        return values.scatter_(1, self.entities[:, None], 0)

    def choose(self, if_tail: Tensor, otherwise: Tensor) -> Tensor:
        """Of two values of each query (u,), those of n examples."""
        return torch.where(self.is_tail, if_tail[self.queries.of], otherwise[self.queries.of])

    def slots(self, if_tail: Tensor, otherwise: Tensor, at_tail: Tensor) -> tuple[Tensor, Tensor]:
        """Index and values (n, 2): the derivative at the best entity (u,), and at a tail that is not the best (n,)."""
        index = torch.stack([self.entities[self.queries.of], self.queries.tails.where(at_tail != 0, -1)], dim=1)
        return index, torch.stack([self.choose(if_tail, otherwise), at_tail], dim=1)


@dataclass(frozen=True)
class Positive:
    """-log σ(s_t): the binary cross-entropy of the triple alone."""

    reaches_all = False

    def candidates(self, queries: Queries) -> Tensor:
        """See Loss."""
        return queries.tails[:, None]

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """See Loss."""
        return functional.softplus(-scores[:, 0]), Deltas(queries.tails[:, None], -torch.sigmoid(-scores))

    def targets(self, queries: Queries, n_entities: int) -> tuple[Tensor, ...]:
        """See Loss."""
        return (queries.tails,)

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """See Loss."""
        return -functional.logsigmoid(rows.gather(1, targets[0][:, None])[:, 0])


@dataclass(frozen=True)
class Score:
    """-s_t: no loss that one trains with, but influence on the score itself."""

    reaches_all = False

    def candidates(self, queries: Queries) -> Tensor:
        """See Loss."""
        return queries.tails[:, None]

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """See Loss."""
        return -scores[:, 0], Deltas(queries.tails[:, None], torch.full_like(scores, -1))

    def targets(self, queries: Queries, n_entities: int) -> tuple[Tensor, ...]:
        """See Loss."""
        return (queries.tails,)

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """See Loss."""
        return -rows.gather(1, targets[0][:, None])[:, 0]


@dataclass(frozen=True)
class Sampled:
    """The mean of -log σ(s_t) and, of K other entities, -log σ(-s_k).

    Which ones belongs to the triple and the seed; that one of them may be a true tail is not looked at.
    """

    n_negatives: int
    n_entities: int
    seed: int = 0
    reaches_all = False

    def candidates(self, queries: Queries) -> Tensor:
        """See Loss."""
        device = queries.tails.device
        triple = _mixed(_mixed(queries.heads[queries.of]) + queries.relations[queries.of]) + queries.tails
        number = torch.arange(1, self.n_negatives + 1, device=device)
        draws = _mixed(_mixed(triple + self.seed)[:, None] + number)
        # Any entity but the tail.
        others = 1 + draws.remainder(self.n_entities - 1)
        return torch.cat([queries.tails[:, None], (queries.tails[:, None] + others) % self.n_entities], dim=1)

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """See Loss."""
        n = self.n_negatives + 1
        losses = (functional.softplus(-scores[:, 0]) + functional.softplus(scores[:, 1:]).sum(1)) / n
        deltas = torch.cat([-torch.sigmoid(-scores[:, :1]), torch.sigmoid(scores[:, 1:])], dim=1) / n
        return losses, Deltas(self.candidates(queries), deltas)

    def targets(self, queries: Queries, n_entities: int) -> tuple[Tensor, ...]:
        """See Loss."""
        return (self.candidates(queries),)

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """See Loss."""
        scores = rows.gather(1, targets[0])
        signs = torch.cat([torch.ones_like(scores[:, :1]), -torch.ones_like(scores[:, 1:])], dim=1)
        return -functional.logsigmoid(signs * scores).mean(1)


@dataclass(frozen=True)
class OneToAll:
    """mean_k BCE(s_k, y_k) with y_k = ε/N + (1-ε)[k = t]: 1-N scoring, of one triple at a time."""

    label_smoothing: float
    reaches_all = True

    def candidates(self, queries: Queries) -> Tensor:
        """See Loss."""
        raise NotImplementedError

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """See Loss."""
        losses, own, dense = _smoothed_deltas(scores, queries, None, self.label_smoothing)
        return losses, Deltas(*own, dense)

    def targets(self, queries: Queries, n_entities: int) -> tuple[Tensor, ...]:
        """See Loss."""
        return (functional.one_hot(queries.tails, n_entities),)

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """See Loss."""
        return _smoothed_bce(rows, targets[0], self.label_smoothing)


@dataclass(frozen=True)
class OneToMany:
    """The triple's share of its query's 1-N loss, in which all tails of training triples, and its own, are true.

    mean_k BCE(s_k, y_k) / n with y_k = ε/N + (1-ε)[k is true] and n true tails: the shares of a query's training
    triples, each taken once, add up to what ConvE is trained with.
    """

    label_smoothing: float
    known: Known
    reaches_all = True

    def candidates(self, queries: Queries) -> Tensor:
        """See Loss."""
        raise NotImplementedError

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """See Loss."""
        labels = self._labels(queries, scores.shape[1]).bool()
        is_new = ~labels[queries.of, queries.tails]
        scale = 1 / (labels.sum(1)[queries.of] + is_new).to(scores.dtype)
        losses, (index, values), dense = _smoothed_deltas(scores, queries, labels, self.label_smoothing)
        return scale * losses, Deltas(index, scale[:, None] * values, dense, scale)

    def targets(self, queries: Queries, n_entities: int) -> tuple[Tensor, ...]:
        """See Loss."""
        labels = self._labels(queries, n_entities)[queries.of]
        return (labels.scatter(1, queries.tails[:, None], 1),)

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """See Loss."""
        return _smoothed_bce(rows, targets[0], self.label_smoothing) / targets[0].sum(1)

    def _labels(self, queries: Queries, n_entities: int) -> Tensor:
        """Which entities are known tails of the queries: (u, N), 0 or 1."""
        query, tail = self.known.tails(queries)
        labels = torch.zeros(len(queries.heads), n_entities, dtype=torch.int8, device=tail.device)
        labels[query, tail] = 1
        return labels


@dataclass(frozen=True)
class CrossEntropy:
    """-log softmax(s)_t."""

    reaches_all = True

    def candidates(self, queries: Queries) -> Tensor:
        """See Loss."""
        raise NotImplementedError

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """See Loss."""
        best = _Best.of(scores, queries)
        dense = torch.softmax(scores, 1)
        highest = best.at(dense)
        others = best.without(dense).sum(1)
        # -log p of the best entity is log(1 + Σ of the others' p / its own).
        loss, other_loss = torch.log1p(others / highest), torch.logsumexp(scores, 1)
        losses = best.choose(loss, other_loss) - scores[queries.of, queries.tails].where(~best.is_tail, 0)
        at_tail = torch.full_like(losses, -1).where(~best.is_tail, 0)
        return losses, Deltas(*best.slots(-others, highest, at_tail), dense)

    def targets(self, queries: Queries, n_entities: int) -> tuple[Tensor, ...]:
        """See Loss."""
        return (queries.tails,)

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """See Loss."""
        return functional.cross_entropy(rows, targets[0], reduction="none")


def find_loss(name: str, *, n_entities: int, known: Callable[[], Known], label_smoothing: float, seed: int) -> Loss:
    """The loss that a setting names: one of losses' NAMES, or "ns:K" with K negatives."""
    if name.startswith("ns:"):
        return Sampled(int(name.removeprefix("ns:")), n_entities, seed)
    if name == "kvsall":
        return OneToMany(label_smoothing, known())
    if name == "bce-1n":
        return OneToAll(label_smoothing)
    simple: dict[str, Loss] = {"bce-pos": Positive(), "score": Score(), "ce": CrossEntropy()}
    return simple[name]


def _smoothed_deltas(
    scores: Tensor, queries: Queries, labels: Tensor | None, label_smoothing: float
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Losses (n,) and derivatives of mean_k BCE(s_k, y_k), with y_k = ε/N + (1-ε)[k is the tail, or labelled].

    Of scores and labels (u, N). The derivatives come as index and values (n, 2), and what examples share (u, N).
    """
    n_entities, low = scores.shape[1], label_smoothing / scores.shape[1]
    best = _Best.of(scores if labels is None else scores.masked_fill(labels, -torch.inf), queries)
    losses, deltas = functional.softplus(scores) - low * scores, torch.sigmoid(scores) - low
    # Of a true entity σ(s) - 1 is -σ(-s), of which more is left.
    sure = label_smoothing - low
    best_scores = best.at(scores)
    best_loss = functional.softplus(-best_scores) + sure * best_scores
    best_delta = sure - torch.sigmoid(-best_scores)
    is_new = torch.ones_like(best.is_tail)
    if labels is not None:
        losses = torch.where(labels, functional.softplus(-scores) + sure * scores, losses)
        deltas = torch.where(labels, sure - torch.sigmoid(-scores), deltas)
        is_new = ~labels[queries.of, queries.tails]
    other_loss, other_delta = best.at(losses), best.at(deltas)
    kappa = (1 - label_smoothing) * (is_new & ~best.is_tail).to(scores.dtype)
    own_losses = best.choose(best_loss, other_loss) - kappa * scores[queries.of, queries.tails]
    own = best.slots(best_delta / n_entities, other_delta / n_entities, -kappa / n_entities)
    return (best.without(losses).sum(1)[queries.of] + own_losses) / n_entities, own, best.without(deltas) / n_entities


def _smoothed_bce(rows: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    targets = label_smoothing / rows.shape[1] + (1 - label_smoothing) * labels.to(rows.dtype)
    return functional.binary_cross_entropy_with_logits(rows, targets, reduction="none").mean(1)


def _mixed(values: Tensor) -> Tensor:
    """Whole numbers mixed well (the finalizer of splitmix64, on int64 that wraps), so that seeded draws are even."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values ^ ((values >> 31) & ((1 << 33) - 1))
