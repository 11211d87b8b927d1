"""ConvE: the model that others train, and its gradients as factors."""

import dataclasses

import pykeen.models  # before any test imports bitsandbytes and torchao: PyKEEN refuses their two AdamW8bit
import pytest
import torch
from torch.nn import functional

from slurmgpu.workloads.tracin.kge import conve
from slurmgpu.workloads.tracin.kge.checkpoints import load_checkpoint, read_layout
from slurmgpu.workloads.tracin.kge.conve import ConvE
from slurmgpu.workloads.tracin.kge.differentiable import TriplesModel
from slurmgpu.workloads.tracin.kge.losses import Loss, Positive, find_loss
from slurmgpu.workloads.tracin.kge.queries import Known
from tests.support.tiny_graphs import most_allocated

N_ENTITIES, N_RELATIONS, DIM = 30, 4, 12
LOSSES = ["bce-pos", "score", "ns:3", "bce-1n", "kvsall", "ce"]
SHAPES = {
    "height": {"stack": "height", "kernel": (3, 3)},
    "width": {"stack": "width", "kernel": (2, 3)},
    "no bias": {"stack": "height", "kernel": (2, 3), "has_bias": False},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def a_model(n_relations=N_RELATIONS, *, seed=0, **shape):
    """With numbers in all parameters and statistics that are neither 0 nor 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ConvE(N_ENTITIES, n_relations, DIM, image=(3, 4), channels=3, **shape).double()
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                parameter.normal_(0.5 if name.endswith("weight") and "bn" in name else 0, 0.6)
        for norm in (model.bn0, model.bn1, model.bn2):
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 2)
    return model.eval()


def some_triples():
    """Some share a head, a tail or both; a tail is another's head; self-loops and duplicates."""
    triples = torch.randint(N_ENTITIES, (6, 3), generator=torch.Generator().manual_seed(1))
    triples[:, 1] %= N_RELATIONS
    (h, r, t), (other, _, _) = triples[0].tolist(), triples[1].tolist()
    return torch.cat([triples, torch.tensor([[h, r, t], [h, r, other], [other, r, t], [t, r, other], [h, r, h]])])


def triples_model(model, loss="bce-pos", inverse_rows=None):
    known = Known(some_triples(), N_RELATIONS)
    if isinstance(loss, str):
        loss = find_loss(loss, n_entities=N_ENTITIES, known=lambda: known, label_smoothing=0.1, seed=3)
    rows = torch.arange(N_RELATIONS) if inverse_rows is None else inverse_rows - 1
    return TriplesModel(model, {"train": loss, "test": loss}, rows, inverse_rows)


def by_autograd(model, triples):
    """The gradients of each parameter (n, *shape), and the losses (n,)."""
    parameters = model.parameters_by_name()
    losses = model.losses(triples, "train")
    found = [
        torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, materialize_grads=True)
        for loss in losses
    ]
    return {name: torch.stack(rows) for name, *rows in zip(parameters, *found, strict=True)}, losses.detach()


def dense(model, gradients):
    """The same from factors."""
    shapes = {name: parameter.shape for name, parameter in model.parameters_by_name().items()}
    return {name: sum(term[name].dense(shape) for term in gradients.terms) for name, shape in shapes.items()}


def check(model, triples, tolerance=1e-12):
    gradients = model.gradients(triples, "train", list(model.groups))
    expected, losses = by_autograd(model, triples)
    assert torch.allclose(gradients.losses, losses, rtol=max(tolerance, 1e-8))
    found = dense(model, gradients)
    assert found.keys() == expected.keys() == model.groups.keys()
    scale = max(values.norm() for values in expected.values())
    for name, values in expected.items():
        assert (found[name] - values).norm() <= tolerance * scale, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_factors_are_the_gradients_of_autograd(shape, loss):
    check(triples_model(a_model(**SHAPES[shape]), loss), some_triples())


@pytest.mark.parametrize("loss", ["bce-pos", "bce-1n"])
def test_both_directions_add_up(loss):
    """With the inverse of relation r in row 2r + 1."""
    model = triples_model(a_model(2 * N_RELATIONS), loss, inverse_rows=2 * torch.arange(N_RELATIONS) + 1)
    assert len(model.gradients(some_triples(), "train", ["relation"]).terms) == 2
    check(model, some_triples())


@pytest.mark.parametrize("n_blocks", [1, 2, 5])
def test_blocks_of_the_feature_maps_change_nothing(n_blocks, monkeypatch):
    model = a_model(kernel=(2, 3))
    monkeypatch.setattr(conve, "_rows_of_block", lambda model: -(-model.positions[0] // n_blocks))
    check(triples_model(model), some_triples())


@pytest.mark.parametrize("loss", LOSSES)
def test_scores_far_from_zero_lose_no_gradient(loss):
    """Positive ones of 40 and negative ones of -40: a sigmoid that is 1 before a logarithm would lose them."""
    for sign in (1, -1):
        model = a_model()
        with torch.no_grad():
            model.bias.normal_(sign * 40, 3)
        check(triples_model(model, loss), some_triples())


def test_only_wanted_parameters_are_computed(monkeypatch):
    model = triples_model(a_model())
    everything = model.gradients(some_triples(), "train", list(model.groups)).terms[0]
    for name in model.groups:
        [term] = model.gradients(some_triples(), "train", [name]).terms
        assert set(term) == {name}
        shape = model.parameters_by_name()[name].shape
        assert torch.equal(term[name].dense(shape), everything[name].dense(shape))
    # The last layers need no way back through the convolution.
    monkeypatch.setattr(conve, "_channels_last", None)
    model.gradients(some_triples(), "train", ["fc.weight", "fc.bias", "bn2.weight", "bn2.bias", "bias"])
    with pytest.raises(TypeError):
        model.gradients(some_triples(), "train", ["relation"])


def test_gradients_are_those_of_the_weights_as_they_are_now():
    model = a_model()
    check(triples_model(model), some_triples())
    with torch.no_grad():
        model.fc.weight.mul_(-1.5)
    check(triples_model(model), some_triples())
    model.load_state_dict(a_model(seed=1).state_dict())
    check(triples_model(model), some_triples())


def test_gradients_are_those_of_evaluation_and_leave_the_statistics_alone():
    model = a_model(dropouts=(0.9, 0.9, 0.9))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(triples_model(model), some_triples())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    without = a_model(dropouts=(0, 0, 0))
    queries = some_triples().T[:2]
    assert torch.equal(model.scores(*queries), without.scores(*queries))
    assert not torch.equal(model.train().scores(*queries), without.scores(*queries))


def test_a_step_down_one_triples_gradient_changes_anothers_loss_by_their_product():
    model = triples_model(a_model(), "bce-1n")
    triples = some_triples()
    expected, losses = by_autograd(model, triples)
    gradients = model.gradients(triples, "train", list(model.groups))
    products = torch.zeros(len(triples), len(triples), dtype=torch.float64)
    gradients.add_products(gradients, dict.fromkeys(model.groups, products))
    assert torch.allclose(products.diagonal(), gradients.squares(), rtol=1e-12)
    stepped, errors = 2, []
    for rate in (1e-3, 1e-4, 1e-5):
        with torch.no_grad():
            for name, parameter in model.parameters_by_name().items():
                parameter -= rate * expected[name][stepped]
            lowered = losses - model.losses(triples, "train")
            for name, parameter in model.parameters_by_name().items():
                parameter += rate * expected[name][stepped]
        errors.append((lowered / rate - products[stepped]).norm() / products[stepped].norm())
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 1e-3


def test_single_precision_is_near_double():
    """At the size that is common, where sums are long."""
    torch.manual_seed(0)
    single, double = ConvE(N_ENTITIES, N_RELATIONS).eval(), ConvE(N_ENTITIES, N_RELATIONS).double().eval()
    double.load_state_dict(single.state_dict())
    wanted = list(single.groups)
    products = []
    for model in (triples_model(single), triples_model(double)):
        gradients = model.gradients(some_triples(), "train", wanted)
        products.append(torch.zeros(len(gradients), len(gradients), dtype=gradients.losses.dtype))
        gradients.add_products(gradients, dict.fromkeys(wanted, products[-1]))
    assert (products[0] - products[1]).norm() < 1e-5 * products[1].norm()


@pytest.mark.parametrize("loss", ["bce-pos", "ns:9", "bce-1n", "kvsall", "ce"])
def test_memory_is_what_is_said_at_most(loss):
    """Where each triple has a query of its own."""
    n = 60
    triples = torch.stack([torch.arange(n), torch.arange(n) % 4, torch.arange(n)], dim=1)
    module = ConvE(n, 4, 32, image=(4, 8), channels=8).eval()
    known = Known(triples, 4)
    made: Loss = find_loss(loss, n_entities=n, known=lambda: known, label_smoothing=0.1, seed=3)
    model = TriplesModel(module, {"train": made, "test": Positive()}, torch.arange(4))
    conve._channels_last(module)  # kept with the model
    conve._OF_THREAD.__dict__.clear()
    with torch.profiler.profile(profile_memory=True) as profile:
        found = model.gradients(triples, "train", list(model.groups))
    result = n * model.bytes_of_result("train")
    assert 0.9 * result < found.n_bytes <= result
    assert result < most_allocated(profile) <= n * model.bytes_of_work("train")


@pytest.mark.parametrize("stack", ["height", "width"])
@pytest.mark.parametrize("wanted", [None, ["relation"], ["entity"], ["bn0.weight"], ["bn2.bias"], ["bias"]])
def test_gradients_hold_no_more_memory_than_they_count(wanted, stack):
    model = triples_model(a_model(stack=stack))
    found = model.gradients(some_triples(), "train", wanted or list(model.groups))
    storages = {}

    def look(value):
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                look(getattr(value, field.name))

    for part in (*found.terms[0].values(), found.losses, found.scores):
        look(part)
    # The examples' heads and relations lie beside their tails.
    assert sum(storages.values()) <= found.n_bytes + 16 * len(some_triples())


@pytest.mark.parametrize("inverse", [False, True])
def test_scores_are_those_of_pykeen(inverse, tmp_path):
    from pykeen.datasets import Nations

    torch.manual_seed(0)
    triples = Nations(create_inverse_triples=inverse).training
    theirs = pykeen.models.ConvE(
        triples_factory=triples, embedding_dim=DIM, embedding_height=3, embedding_width=4, output_channels=5
    ).eval()
    with torch.no_grad():
        for norm in (theirs.interaction.hr2d[0], theirs.interaction.hr2d[3], theirs.interaction.hr1d[2]):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
        theirs.entity_representations[1]._embeddings.weight.normal_()
    torch.save(theirs.state_dict(), tmp_path / "model.pt")

    layout = read_layout(tmp_path / "model.pt", image=(3, 4))
    ours = ConvE.from_layout(layout)
    ours.load_state_dict(load_checkpoint(tmp_path / "model.pt", layout), strict=False)
    some = triples.mapped_triples[::40]
    rows = some[:, 1] * 2 if inverse else some[:, 1]
    with torch.no_grad():
        found = ours.eval().scores(some[:, 0], rows)
        assert torch.allclose(found, theirs.predict_t(some[:, :2]), atol=1e-6)
        of_tails = ours.scores(some[:, 0], rows).gather(1, some[:, 2:])
        assert torch.allclose(of_tails, theirs.predict_hrt(some), atol=1e-6)


@pytest.mark.parametrize("stack", ["height", "width"])
def test_scores_are_those_of_the_papers_layers(stack):
    """As the authors' code has them, where images lie one above the other, and in the replaced system side by side."""
    model = a_model(stack=stack)
    heads, relations, _ = some_triples().T

    def normed(values, norm):
        return functional.batch_norm(values, norm.running_mean, norm.running_var, norm.weight, norm.bias)

    images = [table.view(-1, 1, 3, 4) for table in (model.entity[heads], model.relation[relations])]
    maps = functional.conv2d(
        normed(torch.cat(images, 2 if stack == "height" else 3), model.bn0), *model.conv.parameters()
    )
    hidden = functional.linear(normed(maps, model.bn1).relu().flatten(1), *model.fc.parameters())
    expected = normed(hidden, model.bn2).relu() @ model.entity.T + model.bias
    assert torch.allclose(model.scores(heads, relations), expected)


def test_an_image_must_hold_the_embedding():
    with pytest.raises(ValueError, match="3 x 5"):
        ConvE(N_ENTITIES, N_RELATIONS, DIM, image=(3, 5))
