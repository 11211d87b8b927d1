"""Losses of triples: what they are, and their derivatives by the scores."""

import pytest
import torch

from slurmgpu.influence.table_parts import Rows, Spread
from slurmgpu.workloads.tracin.kge.losses import find_loss
from slurmgpu.workloads.tracin.kge.queries import Known, Queries

N_ENTITIES, N_RELATIONS = 11, 3
LOSSES = ["bce-pos", "score", "ns:4", "bce-1n", "kvsall", "ce"]


def some_triples(n, seed=0):
    draw = torch.Generator().manual_seed(seed)
    heads, tails = (torch.randint(N_ENTITIES, (n,), generator=draw) for _ in range(2))
    return heads, torch.randint(N_RELATIONS, (n,), generator=draw), tails


def loss_of(name, train):
    return find_loss(
        name,
        n_entities=N_ENTITIES,
        known=lambda: Known(torch.stack([*train], 1), N_RELATIONS),
        label_smoothing=0.1,
        seed=5,
    )


@pytest.fixture
def train():
    return some_triples(40)


@pytest.fixture
def queries():
    """Of training triples, and of others."""
    triples = [torch.cat(both) for both in zip(some_triples(15), some_triples(15, seed=1), strict=True)]
    return Queries.of_examples(*triples, N_RELATIONS)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1, 60])
def test_values_and_derivatives_are_those_of_autograd(name, size, train, queries):
    loss = loss_of(name, train)
    scores = size * torch.randn(len(queries.heads), N_ENTITIES, dtype=torch.float64)
    rows = scores[queries.of].requires_grad_()
    expected = loss.plain(rows, *loss.targets(queries, N_ENTITIES))
    [by_scores] = torch.autograd.grad(expected.sum(), rows)

    given = scores if loss.reaches_all else rows.detach().gather(1, loss.candidates(queries))
    losses, deltas = loss.of_scores(given, queries)
    found = torch.zeros_like(by_scores).scatter_add_(1, deltas.index.clamp(min=0), deltas.values)
    if deltas.dense is not None:
        scale = torch.ones(len(queries)) if deltas.scale is None else deltas.scale
        found += scale[:, None] * deltas.dense[queries.of]
    # At a threshold of 20 torch's softplus drops e^-20.
    assert torch.allclose(losses, expected.detach(), rtol=1e-8, atol=1e-8)
    assert torch.allclose(found, by_scores, rtol=1e-12, atol=1e-14)


def test_shares_of_a_query_add_up_to_its_one_to_many_loss(train):
    loss = loss_of("kvsall", train)
    pairs = torch.unique(torch.stack(train), dim=1)
    queries = Queries.of_examples(*pairs, N_RELATIONS)
    scores = torch.randn(len(queries.heads), N_ENTITIES, dtype=torch.float64)
    losses, _ = loss.of_scores(scores, queries)
    labels = torch.zeros_like(scores)
    labels[queries.of, queries.tails] = 1
    whole = torch.nn.functional.binary_cross_entropy_with_logits(scores, 0.1 / N_ENTITIES + 0.9 * labels)
    assert torch.allclose(losses.sum() / len(queries.heads), whole)


def test_negatives_belong_to_the_triple_and_are_never_its_tail(train):
    loss = loss_of("ns:4", train)
    queries = Queries.of_examples(*train, N_RELATIONS)
    drawn = loss.candidates(queries)
    assert (drawn[:, 1:] != drawn[:, :1]).all()
    assert drawn.min() >= 0
    assert drawn.max() < N_ENTITIES
    alone = Queries.of_examples(*(column[7:8] for column in train), N_RELATIONS)
    assert loss.candidates(alone).tolist() == drawn[7:8].tolist()
    assert len(torch.unique(drawn)) == N_ENTITIES


def test_known_tails_are_those_of_the_query_each_once(train):
    heads, relations, tails = (torch.cat([column, column]) for column in train)
    known = Known(torch.stack([heads, relations, tails], 1), N_RELATIONS)
    queries = Queries.of_examples(*some_triples(60, seed=2), N_RELATIONS)
    query, found = known.tails(queries)
    for q, (head, relation) in enumerate(zip(queries.heads.tolist(), queries.relations.tolist(), strict=True)):
        expected = {t for h, r, t in zip(*(c.tolist() for c in train), strict=True) if (h, r) == (head, relation)}
        assert sorted(found[query == q].tolist()) == sorted(expected)


@pytest.mark.parametrize("name", ["bce-1n", "ce", "kvsall"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("margin", [3, 9, 15])
def test_a_gradient_that_nearly_vanishes_is_right_in_single_precision(name, smoothing, margin, train):
    """A model that is sure: of one tail, or of all true ones."""
    loss = find_loss(
        name,
        n_entities=N_ENTITIES,
        known=lambda: Known(torch.stack([*train], 1), N_RELATIONS),
        label_smoothing=smoothing,
        seed=0,
    )
    queries = Queries.of_examples(*train, N_RELATIONS)
    scores = torch.randn(len(queries.heads), N_ENTITIES, dtype=torch.float64) / 8 - margin
    scores[queries.of[::2], queries.tails[::2]] += 2 * margin
    scores = scores.float()
    grams = []
    for rows in (scores, scores.double()):
        losses, deltas = loss.of_scores(rows, queries)
        spread = Spread(deltas.dense, rows.new_ones(len(rows), 1), queries.of, deltas.scale)
        found = Rows(deltas.index, deltas.values[:, :, None], spread)
        out = rows.new_zeros(len(queries), len(queries))
        found.add_products(found, out)
        assert torch.allclose(out.diagonal(), found.dots(found).to(out.dtype), rtol=1e-4, atol=0)
        grams.append((losses.double(), out.double()))
    (losses, out), (exact_losses, exact) = grams
    lengths = exact.diagonal().sqrt()
    assert torch.allclose(losses, exact_losses, rtol=1e-4, atol=0)
    assert ((out - exact).abs() <= 1e-4 * lengths[:, None] * lengths).all()
