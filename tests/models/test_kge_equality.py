"""Influences are the dot products of autograd's gradients: every model, loss, set of parameters and direction."""

import functools
import logging

import pytest
import torch
from torch import nn

from slurmgpu.influence.influences import Checkpoint, Influences, Options
from slurmgpu.influence.per_example import of_module
from slurmgpu.workloads.tracin.kge.conve import ConvE
from slurmgpu.workloads.tracin.kge.shallow import ComplEx, DistMult, TransE
from tests.support.nightly import by_night
from tests.support.tiny_graphs import (
    LOSSES,
    N_ENTITIES,
    N_RELATIONS,
    TESTS,
    TRAIN,
    gradients_by_autograd,
    randomised,
    triples_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Own(nn.Module):
    """A user's model: two embeddings, a layer and a norm, and the loss that its user wrote."""

    def __init__(self, n_entities, n_relations):
        super().__init__()
        self.entities, self.relations = nn.Embedding(n_entities, 5), nn.Embedding(n_relations, 3)
        self.layer, self.norm = nn.Linear(8, 5), nn.LayerNorm(5)

    def losses(self, triples):
        heads, relations, tails = triples.unbind(1)
        given = torch.cat([self.entities(heads), self.relations(relations)], dim=1)
        return nn.functional.softplus(-(self.norm(torch.tanh(self.layer(given))) * self.entities(tails)).sum(1))


def conve(n_entities, n_relations, **options):
    return ConvE(n_entities, n_relations, 6, image=(2, 3), channels=2, kernel=(2, 2), **options)


MODELS = {
    "conve": functools.partial(conve, stack="height"),
    "conve-width": functools.partial(conve, stack="width", has_bias=False),
    "distmult": lambda *sizes: DistMult(*sizes, 4),
    "complex": lambda *sizes: ComplEx(*sizes, 3),
    "transe-1": lambda *sizes: TransE(*sizes, 4, norm=1),
    "transe-2": lambda *sizes: TransE(*sizes, 4, norm=2),
    "own": Own,
}
LAST = {"conve": ["fc.weight", "fc.bias"], "own": ["norm.weight", "norm.bias"]}
LAYER = {"conve": ["conv.weight", "conv.bias", "bn1.weight"], "own": ["entities.weight"]}


@functools.cache
def a_module(name, seed=0):
    """Its parameters are float32's, so that both precisions have the same."""
    return randomised(MODELS[name](N_ENTITIES, 2 * N_RELATIONS), seed).float().double()


def a_model(name, train="bce-pos", test=None, directions="tail", seed=0, dtype=torch.float64):
    module = a_module(name, seed)
    if dtype != torch.float64:
        module = MODELS[name](N_ENTITIES, 2 * N_RELATIONS).to(dtype).eval()
        module.load_state_dict(a_module(name, seed).state_dict())
    return of_module(module, TRAIN[0]) if name == "own" else triples_model(module, train, test, directions)


def subsets(name, model):
    """Sets of parameters: all, the last, and one layer."""
    kind = name.split("-")[0]
    return list(model.parameters_by_name()), LAST.get(kind, ["entity"]), LAYER.get(kind, ["relation"])


def influences(model, wanted=None, tests=TESTS, train=TRAIN, top_k=5, **options):
    models = model if isinstance(model, list) else [Checkpoint(model, 1.0)]
    precision = "fp64" if next(iter(models[0].model.parameters_by_name().values())).dtype == torch.float64 else "fp32"
    wanted = tuple(wanted or models[0].model.parameters_by_name())
    asked = Options(wanted, top_k=top_k, full="float64", precision=precision, **options)
    return Influences(models, train, asked).of(tests)


def by_autograd(model, wanted=None, weights=None, tests=TESTS, train=TRAIN):
    """The matrix of influences (n_tests, n_train): one backward pass for each triple."""
    mine, theirs = gradients_by_autograd(model, tests, "test"), gradients_by_autograd(model, train, "train")
    found = 0
    for name in wanted or mine:
        weighted = mine[name] if weights is None else mine[name] * weights[name]
        found = found + weighted.flatten(1) @ theirs[name].flatten(1).T
    return found


def assert_equal_rows(found, expected, tolerance):
    """The relative error of each row; of one in which gradients nearly cancel, relative to a tenth of the largest."""
    found = torch.as_tensor(found).double()
    errors, sizes = (found - expected).norm(dim=1), expected.norm(dim=1)
    sizes = sizes.clamp(min=sizes.max() / 10)
    assert (errors <= tolerance * sizes).all(), (errors / sizes).tolist()


CASES = [
    (name, loss, directions)
    for name in MODELS
    for loss in (LOSSES if name != "own" else ["bce-pos"])
    for directions in (("tail", "both") if name not in ("own", "conve-width") else ["tail"])
]
# Each model by day with each loss; both directions, which are two queries with the same loss, with one.
CASES = [case if case[2] == "tail" or case[1] == "bce-1n" else by_night(*case) for case in CASES]


@pytest.mark.parametrize(("name", "loss", "directions"), CASES)
def test_the_full_row_is_that_of_autograd(name, loss, directions):
    exact = a_model(name, loss, directions=directions)
    single = a_model(name, loss, directions=directions, dtype=torch.float32)
    mine = gradients_by_autograd(exact, TESTS, "test")
    theirs = gradients_by_autograd(exact, TRAIN, "train")
    for wanted in subsets(name, exact):
        expected = sum(mine[one].flatten(1) @ theirs[one].flatten(1).T for one in wanted)
        assert_equal_rows(influences(exact, wanted).full, expected, 1e-9)
        assert_equal_rows(influences(single, wanted).full, expected, 1e-5)


@pytest.mark.parametrize(("train", "test"), [("bce-1n", "score"), ("ns:3", "ce"), ("bce-pos", "kvsall")])
@pytest.mark.parametrize("name", ["conve", "distmult", "complex", "transe-1", "transe-2"])
def test_tests_may_have_a_loss_of_their_own(name, train, test):
    model = a_model(name, train, test, directions="both")
    found = influences(model)
    assert_equal_rows(found.full, by_autograd(model), 1e-9)
    assert torch.allclose(torch.as_tensor(found.loss), model.losses(TESTS, "test").detach())


@pytest.mark.parametrize(("name", "loss"), [("conve", "kvsall"), ("distmult", "bce-pos"), ("transe-2", "ce")])
def test_checkpoints_are_summed_by_their_learning_rates(name, loss):
    models = [a_model(name, loss, seed=seed) for seed in (1, 2, 3)]
    rates = [0.5, 0.01, 2.0]
    found = influences([Checkpoint(model, rate) for model, rate in zip(models, rates, strict=True)])
    expected = sum(rate * by_autograd(model) for model, rate in zip(models, rates, strict=True))
    assert_equal_rows(found.full, expected, 1e-9)


@pytest.mark.parametrize("loss", ["ns:3", "bce-1n", "kvsall"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_in_every_product(name, loss):
    """As those of Adam: one for each number of a parameter; ones change nothing."""
    model = a_model(name, loss)
    draw = torch.Generator().manual_seed(1)
    shapes = {parameter: value.shape for parameter, value in model.parameters_by_name().items()}
    weights = {one: torch.rand(shape, generator=draw, dtype=torch.float64) + 0.1 for one, shape in shapes.items()}
    found = influences([Checkpoint(model, 1.0, weights)])
    assert_equal_rows(found.full, by_autograd(model, weights=weights), 1e-9)
    ones = {one: torch.ones_like(weight) for one, weight in weights.items()}
    plain = influences(model)
    again = influences([Checkpoint(model, 1.0, ones)])
    assert_equal_rows(again.full, torch.as_tensor(plain.full), 1e-12)
    assert torch.allclose(torch.as_tensor(again.self_influence), torch.as_tensor(plain.self_influence))


@pytest.mark.parametrize("loss", ["ns:3", "kvsall"])
@pytest.mark.parametrize("name", MODELS)
def test_of_training_triples_on_each_other_it_is_symmetric_and_self_influence_its_diagonal(name, loss):
    found = influences(a_model(name, loss), tests=TRAIN)
    full = torch.as_tensor(found.full)
    assert_equal_rows(full, full.T, 1e-12)
    assert torch.allclose(torch.as_tensor(found.self_influence), full.diagonal(), rtol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_shares_of_the_groups_add_up_to_the_influence(name):
    model = a_model(name, "bce-1n")
    found = influences(model, top_k=len(TRAIN))
    assert set(found.groups) == set(model.groups.values())
    for listed in (found.proponents, found.opponents):
        values, shares = torch.as_tensor(listed.values), torch.as_tensor(listed.shares)
        assert torch.allclose(shares.sum(2), values, rtol=1e-10, atol=1e-14)
    for g, group in enumerate(found.groups):
        wanted = [parameter for parameter, its in model.groups.items() if its == group]
        expected = by_autograd(model, wanted)
        lines, shares = torch.as_tensor(found.proponents.lines), torch.as_tensor(found.proponents.shares[:, :, g])
        there = lines >= 0
        assert torch.allclose(shares[there], expected.gather(1, lines.clamp(min=0))[there], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", MODELS)
def test_lists_are_the_sorted_row_and_equals_come_by_line(name):
    """Lines 3 and 7 are the same triple."""
    found = influences(a_model(name), top_k=len(TRAIN))
    for row, values in enumerate(found.full):
        for listed, sign in ((found.proponents, 1), (found.opponents, -1)):
            expected = sorted((-sign * value, line) for line, value in enumerate(values) if sign * value > 0)
            n = len(expected)
            assert listed.lines[row].tolist() == [line for _, line in expected] + [-1] * (len(TRAIN) - n)
            assert listed.values[row].tolist() == [-sign * value for value, _ in expected] + [0] * (len(TRAIN) - n)


@pytest.mark.parametrize("name", ["distmult", "complex", "transe-1", "transe-2"])
def test_a_triple_that_shares_nothing_has_no_influence_in_a_model_without_layers(name):
    lonely = len(TRAIN) - 1
    assert TRAIN[lonely].tolist() == [8, 2, 9]
    found = influences(a_model(name), top_k=len(TRAIN))
    assert (found.full[:-1, lonely] == 0).all()
    for listed in (found.proponents, found.opponents):
        assert lonely not in listed.lines[:-1]
    assert found.full[-1, lonely] != 0  # which asks for the same entities


@pytest.mark.parametrize("loss", ["bce-pos", "bce-1n"])
@pytest.mark.parametrize("name", MODELS)
def test_a_small_step_on_a_training_triple_changes_losses_by_its_influence(name, loss):
    """The loss of a test triple falls by rate · influence, to first order: the rest shrinks with the rate."""
    expected = torch.as_tensor(influences(a_model(name, loss)).full)

    def error(rate):
        """Of what the losses change by (n_tests, n_train), for each unit of the rate."""
        changes = []
        for line in range(len(TRAIN)):
            a_module.cache_clear()
            model = a_model(name, loss)
            gradient = gradients_by_autograd(model, TRAIN[line : line + 1], "train")
            with torch.no_grad():
                before = model.losses(TESTS, "test")
                for parameter, value in model.parameters_by_name().items():
                    value -= rate * gradient[parameter][0]
                changes.append((before - model.losses(TESTS, "test")) / rate)
        a_module.cache_clear()
        return float((torch.stack(changes, 1) - expected).norm() / expected.norm())

    large, small = error(1e-4), error(1e-5)
    assert small < 1e-3
    assert small < 0.2 * large


class Scored(nn.Module):
    """A model as captum wants it: what it is called with gives a prediction."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, heads, relations, tails):
        return self.model.scores(heads, relations).gather(1, tails[:, None])[:, 0]


@pytest.mark.parametrize("layer", [None, "model.fc", "model.conv", "model.bn1"])
def test_influences_are_those_of_captum(layer):
    """With two checkpoints of different learning rates; captum is told the layer, or takes all parameters."""
    influence = pytest.importorskip("captum.influence")
    rates = {1: 0.5, 2: 0.125}
    scored = Scored(a_model("conve", seed=1).module)

    def load(module, checkpoint):
        module.model.load_state_dict(a_module("conve", seed=checkpoint).state_dict())
        return rates[checkpoint]

    captum = influence.TracInCP(
        Scored(MODELS["conve"](N_ENTITIES, 2 * N_RELATIONS).double().eval()),
        torch.utils.data.TensorDataset(*TRAIN.T, torch.ones(len(TRAIN), dtype=torch.float64)),
        checkpoints=[1, 2],
        checkpoints_load_func=load,
        layers=layer and [layer],
        loss_fn=nn.BCEWithLogitsLoss(reduction="none"),
        batch_size=4,
    )
    expected = captum.influence((*TESTS.T, torch.ones(len(TESTS), dtype=torch.float64)))
    models = {seed: a_model("conve", seed=seed) for seed in rates}
    prefix = layer and layer.removeprefix("model.") + "."
    wanted = [name for name, _ in scored.model.named_parameters() if prefix is None or name.startswith(prefix)]
    found = influences([Checkpoint(model, rates[seed]) for seed, model in models.items()], wanted)
    assert_equal_rows(found.full, expected, 1e-9)


@pytest.mark.parametrize(("loss", "whole"), [("bce-pos", False), ("ns:3", False), ("bce-1n", True)])
def test_the_generic_path_is_taken_by_itself_and_said(loss, whole, caplog):
    with caplog.at_level(logging.WARNING):
        model = a_model("transe-1", loss)
    assert ("TransE has no factors" in caplog.text) == whole
    assert (type(model).__name__ == "Unfactored") == whole
