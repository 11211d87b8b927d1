"""DistMult, ComplEx and TransE: their scores, and the rows that their gradients are."""

import pytest
import torch

from slurmgpu.workloads.tracin.kge.layouts import Layout
from slurmgpu.workloads.tracin.kge.losses import find_loss
from slurmgpu.workloads.tracin.kge.shallow import ComplEx, DistMult, TransE
from tests.support.tiny_graphs import (
    LOSSES,
    N_ENTITIES,
    N_RELATIONS,
    TESTS,
    TRAIN,
    dense_gradients,
    gradients_by_autograd,
    most_allocated,
    randomised,
    triples_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DIM = 4
MODELS = {
    "distmult": DistMult,
    "complex": ComplEx,
    "transe-1": lambda *size: TransE(*size, norm=1),
    "transe-2": lambda *size: TransE(*size, norm=2),
}


def a_model(name):
    return randomised(MODELS[name](N_ENTITIES, 2 * N_RELATIONS, DIM))


def is_factored(name, loss):
    loss = find_loss(loss, n_entities=N_ENTITIES, known=lambda: None, label_smoothing=0.1, seed=0)
    return a_model(name).is_factored(loss)


@pytest.mark.parametrize("directions", ["tail", "both"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_factors_are_the_gradients(name, loss, directions):
    if not is_factored(name, loss):
        assert name.startswith("transe")
        return
    model = triples_model(a_model(name), loss, directions=directions)
    examples = torch.cat([TRAIN, TESTS])
    found = model.gradients(examples, "train", ["entity", "relation"])
    expected = gradients_by_autograd(model, examples, "train")
    for parameter, by_parts in dense_gradients(model, found).items():
        assert torch.allclose(by_parts, expected[parameter], rtol=1e-10, atol=1e-13), parameter
    assert torch.allclose(found.losses, model.losses(examples, "train").detach(), rtol=1e-10)
    heads, relations, tails = examples.T
    scores = model.module.scores(heads, relations)
    assert torch.allclose(found.scores, scores[range(len(examples)), tails], rtol=1e-10)
    assert torch.allclose(scores.gather(1, tails[:, None])[:, 0], found.scores, rtol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_only_wanted_parameters_are_computed(name):
    model = triples_model(a_model(name))
    [term] = model.gradients(TESTS, "test", ["relation"]).terms
    assert set(term) == {"relation"}


@pytest.mark.parametrize("name", ["distmult", "complex", "transe-1", "transe-2"])
@pytest.mark.parametrize("loss", ["bce-pos", "ns:5", "bce-1n", "kvsall", "ce"])
def test_factors_take_no_more_than_is_said(name, loss):
    """Where no two examples share a query."""
    n_entities = 200
    module = randomised(MODELS[name](n_entities, 1, 20))
    if not is_factored(name, loss):
        return
    examples = torch.stack([torch.arange(n_entities), torch.zeros(n_entities).long(), torch.arange(n_entities)], dim=1)
    known = triples_model(module, loss)._losses["train"]
    if loss.startswith("ns"):
        known = find_loss(loss, n_entities=n_entities, known=lambda: None, label_smoothing=0, seed=0)
    model = type(triples_model(module))(module, {"train": known, "test": known}, torch.zeros(1).long())
    with torch.profiler.profile(profile_memory=True) as profile:
        found = model.gradients(examples, "train", ["entity", "relation"])
    assert found.n_bytes <= n_entities * model.bytes_of_result("train")
    assert most_allocated(profile) <= n_entities * model.bytes_of_work("train") + 20_000


def pykeen_model(name):
    """A model of PyKEEN, and the same of ours."""
    pykeen = pytest.importorskip("pykeen.models")
    from pykeen.datasets import Nations

    triples = Nations().training
    torch.manual_seed(0)
    options = {"triples_factory": triples, "embedding_dim": DIM}
    theirs = {
        "distmult": lambda: pykeen.DistMult(**options),
        "complex": lambda: pykeen.ComplEx(**options),
        "transe-1": lambda: pykeen.TransE(**options),
        "transe-2": lambda: pykeen.TransE(**options, scoring_fct_norm=2),
    }[name]()
    ours = MODELS[name](triples.num_entities, triples.num_relations, DIM)
    with torch.no_grad():
        for table, representations in (
            (ours.entity, theirs.entity_representations),
            (ours.relation, theirs.relation_representations),
        ):
            values = representations[0]()
            table.copy_(torch.cat([values.real, values.imag], dim=1) if values.is_complex() else values)
    return theirs.eval(), ours.eval()


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_pykeen(name):
    theirs, ours = pykeen_model(name)
    queries = torch.tensor([(0, 0), (3, 7), (5, 2)])
    with torch.no_grad():
        expected = theirs.score_t(queries)
        assert torch.allclose(ours.scores(*queries.T), expected, rtol=1e-5, atol=1e-6)


def test_transe_has_the_norm_of_its_layout_and_none_of_its_own():
    def layout(norm):
        return Layout("transe", N_ENTITIES, N_RELATIONS, DIM, {}, norm=norm)

    assert TransE.from_layout(layout(2)).norm == 2
    with pytest.raises(ValueError, match="no norm"):
        TransE.from_layout(layout(None))


@pytest.mark.parametrize("norm", [1, 2])
def test_a_distance_of_nothing_has_no_gradient(norm):
    """As with PyTorch's own norm: h + r = t, and a coordinate in which they agree."""
    module = TransE(3, 1, 2, norm=norm).double()
    with torch.no_grad():
        module.entity.copy_(torch.tensor([(1.0, 1.0), (1.0, 1.0), (1.0, 2.0)]))
        module.relation.zero_()
    examples = torch.tensor([(0, 0, 1), (0, 0, 2)])
    loss = find_loss("score", n_entities=3, known=lambda: None, label_smoothing=0, seed=0)
    model = type(triples_model(module))(module, {"train": loss, "test": loss}, torch.zeros(1).long())
    found = dense_gradients(model, model.gradients(examples, "train", ["entity", "relation"]))
    expected = gradients_by_autograd(model, examples, "train")
    assert all(torch.equal(found[parameter], expected[parameter]) for parameter in expected)
