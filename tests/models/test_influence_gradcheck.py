"""The generic path, the reduced precisions, the probe, and another library's result."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence.gradcheck import check_gradients
from slurmgpu.influence.parts import Dense
from slurmgpu.influence.per_example import of_module
from tests.support.influences import Little, all_of, checkpoint, dense, examples, influences

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN, TESTS = examples(60, 1), examples(7, 2)
EXAMPLE = torch.tensor([0, 1, 2])


class Wrong:
    """A generic model one of whose gradients is made wrong."""

    def __init__(self, module, spoil):
        self._right, self._spoil = of_module(module, EXAMPLE), spoil
        self.groups, self.module = dict(self._right.groups), module

    def __getattr__(self, name):
        return getattr(self._right, name)

    def gradients(self, examples, side, wanted):
        found = self._right.gradients(examples, side, wanted)
        self._spoil(found.terms[0], examples)
        return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_right_model_passes(dtype):
    module = Little(dtype=dtype)
    weights = {name: torch.rand_like(value.detach()) for name, value in module.named_parameters()}
    check_gradients(of_module(module, EXAMPLE), TRAIN, all_of(module))
    check_gradients(of_module(module, EXAMPLE), TRAIN, all_of(module), weights)
    check_gradients(of_module(module, EXAMPLE), TRAIN[:1], ["fc.bias"])


def drop(name):
    return lambda parts, examples: parts.pop(name, None)


def scale(name, factor):
    def spoil(parts, examples):
        if name in parts:
            parts[name] = Dense(parts[name].values * factor)

    return spoil


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (drop("norm.bias"), "no gradients with respect to 'norm.bias'"),
        (scale("fc.weight", 1.01), "'fc.weight' differ from autograd's"),
        (scale("norm.weight", torch.nan), "'norm.weight' differ from autograd's"),
    ],
)
def test_a_wrong_gradient_is_named(spoil, said, dtype):
    module = Little(dtype=dtype)
    with pytest.raises(SlurmGPUError, match=said):
        check_gradients(Wrong(module, spoil), TRAIN, all_of(module))


def test_one_sample_that_a_kink_spoils_is_forgiven():
    n_calls = 0

    def spoil_the_first(parts, examples):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            scale("fc.weight", 1.1)(parts, examples)

    check_gradients(Wrong(Little(dtype=torch.float32), spoil_the_first), TRAIN, ["fc.weight"])
    assert n_calls == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_parameter_whose_gradient_is_rounding_alone_passes(dtype):
    class Shifted(Little):
        """A softmax over all entities does not change with a number that is added to all their scores."""

        def __init__(self):
            super().__init__(dtype=dtype)
            self.shift = nn.Parameter(torch.full((1,), 0.3, dtype=dtype))

        def losses(self, examples):
            hidden = self.fc(self.norm(self.entity(examples[:, 0]))).sigmoid()
            scores = hidden @ self.entity.weight.T + self.shift
            return functional.cross_entropy(scores, examples[:, 2], reduction="none")

    module = Shifted()
    check_gradients(Wrong(module, scale("shift", 3)), TRAIN, all_of(module))
    with pytest.raises(SlurmGPUError, match=r"'fc.bias' differ from autograd's"):
        check_gradients(Wrong(module, scale("fc.bias", 1.01)), TRAIN, all_of(module))


def test_training_mode_is_refused():
    module = Little()
    module.drop.train()
    with pytest.raises(SlurmGPUError, match=r"drop \(Dropout\) is in training mode"):
        check_gradients(of_module(module, EXAMPLE), TRAIN, all_of(module))


def test_a_parameter_in_no_group_is_refused():
    module = Little()
    module.groups = {name: "all" for name in all_of(module) if name != "norm.bias"}
    with pytest.raises(SlurmGPUError, match=r"'norm.bias' is in no parameter group"):
        check_gradients(of_module(module, EXAMPLE), TRAIN, ["fc.weight"])


def test_a_tensor_that_is_no_parameter_and_is_trained_is_refused():
    class Hidden(Little):
        def __init__(self):
            super().__init__()
            self.temperature = torch.ones(1, dtype=torch.float64, requires_grad=True)

        def losses(self, examples):
            return super().losses(examples) * self.temperature

    with pytest.raises(SlurmGPUError, match=r"\(temperature\) that requires a gradient"):
        check_gradients(of_module(Hidden(), EXAMPLE), TRAIN, ["fc.weight"])


def test_an_unknown_parameter_is_refused_with_a_suggestion():
    with pytest.raises(SlurmGPUError, match=r"Did you mean 'fc.weight'"):
        check_gradients(of_module(Little(), EXAMPLE), TRAIN, ["fc.weigth"])


def test_frozen_parameters_have_no_part():
    module = Little()
    module.entity.requires_grad_(False)
    model = of_module(module, EXAMPLE)
    assert set(model.groups) == {"norm.weight", "norm.bias", "fc.weight", "fc.bias"}
    check_gradients(model, TRAIN, list(model.groups))


def test_a_modules_own_groups_split_the_influence():
    module = Little()
    module.groups = {name: "table" if name == "entity.weight" else "rest" for name in all_of(module)}
    assert influences(TRAIN, [checkpoint(module)]).groups == ("table", "rest")


def test_what_vmap_cannot_do_is_said_in_a_sentence():
    class Looks(Little):
        def losses(self, examples):
            return super().losses(examples) * super().losses(examples)[0].item()

    with pytest.raises(SlurmGPUError, match=r"without `.item\(\)`"):
        of_module(Looks(), EXAMPLE).gradients(TESTS, "train", ["fc.weight"])


def test_a_module_without_losses_is_refused():
    with pytest.raises(SlurmGPUError, match="has no method `losses`"):
        of_module(nn.Linear(2, 2), EXAMPLE)


def test_what_an_example_takes_is_at_least_its_gradient():
    model = of_module(Little(), EXAMPLE)
    n_bytes = 8 * sum(value.numel() for value in model.parameters_by_name().values())
    assert model.bytes_of_result("train") == n_bytes
    assert n_bytes < model.bytes_of_work("train") < 20 * n_bytes


@pytest.mark.parametrize(("precision", "error"), [("tf32", 2e-3), ("bf16", 2e-2), ("fp16", 2e-3)])
def test_a_reduced_precision_says_what_it_costs(precision, error):
    module = Little(dtype=torch.float32)
    work = checkpoint(module).model.bytes_of_work("train")
    reduced = influences(TRAIN, [checkpoint(module)], precision=precision, full="float32", memory_bytes=50 * work)
    assert reduced.n_chunks > 1
    found = reduced.of(TESTS)
    exact = influences(TRAIN, [checkpoint(module)], full="float32").of(TESTS)
    assert exact.precision_error is None
    # All 60 training examples are in the sample, so what is measured is what is found.
    really = np.linalg.norm(found.full - exact.full, axis=1) / np.linalg.norm(exact.full, axis=1)
    np.testing.assert_allclose(found.precision_error, really, rtol=1e-2)
    assert (found.precision_error > 0).all()
    assert (found.precision_error < error).all()
    assert (found.top10_overlap >= 0.8).all()
    assert (found.top10_overlap <= 1).all()


def test_the_overlap_counts_the_largest_that_stay_so():
    from slurmgpu.influence.precision import errors

    exact = torch.arange(40.0).flip(0)[None]
    reduced = exact.clone()
    reduced[0, [0, 1, 2]] = 0
    error, overlap = errors(exact, reduced)
    assert overlap.tolist() == pytest.approx([0.7])
    assert error.item() == pytest.approx(float((exact - reduced).norm() / exact.norm()))
    assert errors(torch.zeros(1, 3), torch.zeros(1, 3))[0].tolist() == [0]


class Perceptron(nn.Module):
    """Numbers of a table through two layers: what captum's TracInCP covers entirely, too."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("inputs", torch.randn(N_INPUTS, 6, dtype=torch.float64, generator=torch.manual_seed(0)))
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.eval()

    def losses(self, examples):
        return functional.cross_entropy(self.layers(self.inputs[examples[:, 0]]), examples[:, 1], reduction="none")


N_INPUTS = 30


def test_captum_finds_the_same(tmp_path):
    tracincp = pytest.importorskip("captum.influence").TracInCP
    rates = {"a.pt": 0.1, "b.pt": 0.02}
    modules = [Perceptron(seed) for seed in range(2)]
    rows = torch.stack([torch.arange(N_INPUTS), torch.arange(N_INPUTS) % 3], 1)
    train, tests = rows[:24], rows[24:]
    for name, module in zip(rates, modules, strict=True):
        torch.save(module.layers.state_dict(), tmp_path / name)

    def load(module, path):
        module.load_state_dict(torch.load(path, weights_only=True))
        return rates[path.rsplit("/", 1)[1]]

    inputs = modules[0].inputs
    theirs = tracincp(
        modules[0].layers,
        torch.utils.data.TensorDataset(inputs[train[:, 0]], train[:, 1]),
        checkpoints=[str(tmp_path / name) for name in rates],
        checkpoints_load_func=load,
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        batch_size=8,
    )
    expected = theirs.influence((inputs[tests[:, 0]], tests[:, 1]))
    indices, values = theirs.influence((inputs[tests[:, 0]], tests[:, 1]), k=5, proponents=True)
    points = [checkpoint(Perceptron(seed), rate) for seed, rate in enumerate(rates.values())]
    found = influences(train, points, top_k=5).of(tests)
    np.testing.assert_allclose(found.full, expected.detach(), rtol=1e-9)
    np.testing.assert_array_equal(found.proponents.lines, indices)
    np.testing.assert_allclose(found.proponents.values, values, rtol=1e-9)


def test_a_step_on_a_training_example_lowers_a_proponents_loss_by_its_influence():
    module, train, tests = Little(), TRAIN[:5], TESTS[:4]
    before = module.losses(tests).detach()
    influence = dense(module, tests, train)
    errors = []
    for rate in (1e-3, 1e-4):
        changed = []
        for row in train:
            moved = Little()
            gradients = torch.autograd.grad(moved.losses(row[None]).sum(), list(moved.parameters()))
            with torch.no_grad():
                for value, gradient in zip(moved.parameters(), gradients, strict=True):
                    value -= rate * gradient
            changed.append((before - moved.losses(tests).detach()) / rate)
        found = influences(train, [checkpoint(learning_rate=rate)]).of(tests)
        np.testing.assert_allclose(found.full / rate, influence, rtol=1e-9)
        errors.append(float((torch.stack(changed, 1) - influence).norm() / influence.norm()))
    assert errors[1] < errors[0] / 5
    assert errors[1] < 1e-2
