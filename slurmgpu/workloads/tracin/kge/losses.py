"""Losses of a triple: their values, and their derivatives with respect to the scores.

s_k is the score of entity k as the tail of the triple's query, t the triple's own tail, N the number of entities,
σ the logistic function. Each loss is written twice: as a formula for autograd (`plain`), and as its derivative by the
scores, in which the examples of one query share a part (`of_scores`). A test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slurmgpu.workloads.tracin.kge.queries import Known, Queries


@dataclass(frozen=True)
class Deltas:
    """The derivatives of n losses with respect to the scores of their queries.

    Example i has `values[i, s]` at entity `index[i, s]` (n, s); index -1 is no entity, with value 0. If the loss
    reaches all entities, `scale[i]` · `dense[of[i]]` is added: (n,), None for 1, and (u, N).
    """

    index: Tensor
    values: Tensor
    dense: Tensor | None = None
    scale: Tensor | None = None


class Loss:
    """A loss of one triple; these defaults are for the score of its tail alone.

    `reaches_all` says whether the loss depends on the scores of all entities.
    """

    reaches_all = False

    def candidates(self, queries: Queries) -> Tensor:
        """The entities whose scores the loss depends on (n, s), the tail first; unless it reaches all."""
        return queries.tails[:, None]

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """The losses (n,) and their derivatives, from scores (u, N) if the loss reaches all, else (n, s)."""
        raise NotImplementedError

    def targets(self, queries: Queries, n_entities: int) -> tuple[Tensor, ...]:
        """The arguments of `plain` after the scores, each of length n."""
        return (queries.tails,)

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """The losses (n,) from the scores of all entities for each example (n, N), differentiable."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Best:
    """Each query's best entity (u,), which dense derivatives leave out.

    If a model is sure of a tail, the dense derivative there and the tail's own derivative almost cancel, and float32
    would lose a small gradient. Nothing cancels elsewhere: if an entity other than the tail has a high score, the
    gradient is large. `is_tail` (n,): whether the best entity is the example's tail.
    """

    entities: Tensor
    queries: Queries
    is_tail: Tensor

    @classmethod
    def of(cls, scores: Tensor, queries: Queries) -> _Best:
        """The entities with the highest of the scores (u, N)."""
        entities = scores.argmax(1)
        return cls(entities, queries, entities[queries.of] == queries.tails)

    def at(self, values: Tensor) -> Tensor:
        """The values (u, N) at the best entities: (u,)."""
        return values.gather(1, self.entities[:, None])[:, 0]

    def without(self, values: Tensor) -> Tensor:
        """The values (u, N), 0 at the best entities; in place."""
        return values.scatter_(1, self.entities[:, None], 0)

    def choose(self, if_tail: Tensor, otherwise: Tensor) -> Tensor:
        """One of two values of each query (u,) for each of n examples."""
        return torch.where(self.is_tail, if_tail[self.queries.of], otherwise[self.queries.of])

    def slots(self, if_tail: Tensor, otherwise: Tensor, at_tail: Tensor) -> tuple[Tensor, Tensor]:
        """Index and values (n, 2): the derivative at the best entity (u,), and at a tail that is not the best (n,)."""
        index = torch.stack([self.entities[self.queries.of], self.queries.tails.where(at_tail != 0, -1)], dim=1)
        return index, torch.stack([self.choose(if_tail, otherwise), at_tail], dim=1)


class Positive(Loss):
    """-log σ(s_t): the binary cross-entropy of the triple alone."""

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """See Loss."""
        return functional.softplus(-scores[:, 0]), Deltas(queries.tails[:, None], -torch.sigmoid(-scores))

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """See Loss."""
        return -functional.logsigmoid(rows.gather(1, targets[0][:, None])[:, 0])


class Score(Loss):
    """-s_t: not a training loss; gives the influence on the score itself."""

    def of_scores(self, scores: Tensor, queries: Queries) -> tuple[Tensor, Deltas]:
        """See Loss."""
        return -scores[:, 0], Deltas(queries.tails[:, None], torch.full_like(scores, -1))

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """See Loss."""
        return -rows.gather(1, targets[0][:, None])[:, 0]


@dataclass(frozen=True)
class Sampled(Loss):
    """The mean of -log σ(s_t) and of -log σ(-s_k) for K other entities.

    The entities depend only on the triple and the seed; they may include true tails.
    """

    n_negatives: int
    n_entities: int
    seed: int = 0

    def candidates(self, queries: Queries) -> Tensor:
        """See Loss."""
        device = queries.tails.device
        triple = _mixed(_mixed(queries.heads[queries.of]) + queries.relations[queries.of]) + queries.tails
        number = torch.arange(1, self.n_negatives + 1, device=device)
        draws = _mixed(_mixed(triple + self.seed)[:, None] + number)
        # Any entity except the tail.
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
class OneToAll(Loss):
    """mean_k BCE(s_k, y_k) with y_k = ε/N + (1-ε)[k = t]: 1-N scoring for one triple at a time."""

    label_smoothing: float
    reaches_all = True

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
class OneToMany(Loss):
    """The triple's share of its query's 1-N loss; true are all tails of training triples, and its own tail.

    mean_k BCE(s_k, y_k) / n with y_k = ε/N + (1-ε)[k is true] and n true tails. The shares of a query's training
    triples add up to ConvE's training loss.
    """

    label_smoothing: float
    known: Known
    reaches_all = True

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
        """A mask of the known tails of the queries: (u, N), 0 or 1."""
        query, tail = self.known.tails(queries)
        labels = torch.zeros(len(queries.heads), n_entities, dtype=torch.int8, device=tail.device)
        labels[query, tail] = 1
        return labels


class CrossEntropy(Loss):
    """-log softmax(s)_t."""

    reaches_all = True

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

    def plain(self, rows: Tensor, *targets: Tensor) -> Tensor:
        """See Loss."""
        return functional.cross_entropy(rows, targets[0], reduction="none")


def find_loss(name: str, *, n_entities: int, known: Callable[[], Known], label_smoothing: float, seed: int) -> Loss:
    """The loss that a setting names: one of settings.LOSSES, or "ns:K" with K negatives."""
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

    From scores and labels (u, N). The derivatives are an index and values (n, 2), and the part that examples share
    (u, N).
    """
    n_entities, low = scores.shape[1], label_smoothing / scores.shape[1]
    best = _Best.of(scores if labels is None else scores.masked_fill(labels, -torch.inf), queries)
    losses, deltas = functional.softplus(scores) - low * scores, torch.sigmoid(scores) - low
    # For a true entity σ(s) - 1 is computed as -σ(-s), which is more precise.
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
    """Hashed integers, for even seeded draws: the finalizer of splitmix64, on int64 that wraps."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values ^ ((values >> 31) & ((1 << 33) - 1))
