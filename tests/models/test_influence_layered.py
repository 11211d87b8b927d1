"""Gradients of a user's own module by the rules of its layers: each is autograd's, or is formed whole."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence import layered, per_example
from slurmgpu.influence.gradcheck import check_gradients
from slurmgpu.influence.influences import Checkpoint
from slurmgpu.influence.layer_rules import Sum
from slurmgpu.influence.parts import Dense, Outer
from slurmgpu.influence.table_parts import Rows
from tests.support.influences import N_ENTITIES, Little, all_of, checkpoint, dense, examples, influences

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN, TESTS = examples(40, 1), examples(6, 2)


class Own(nn.Module):
    """What the tests' modules share: two vectors of an example, from which `hidden` makes another, and a loss."""

    width = 8

    def __init__(self, dtype=torch.float64):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.entity = nn.Embedding(N_ENTITIES, self.width)
            self.relation = nn.Embedding(N_ENTITIES, self.width, padding_idx=0)
            self.build()
            for name, value in self.named_parameters():
                if not name.startswith(("entity", "relation")):
                    nn.init.normal_(value, 0.5 * name.endswith("weight"), 0.3)
            for name, value in self.named_buffers():
                if "running" in name:
                    nn.init.uniform_(value, 0.5, 1.5)
        self.to(dtype).eval()

    def build(self):
        """Its layers."""

    def hidden(self, head, relation):
        return head * relation

    def losses(self, rows):
        found = self.hidden(self.entity(rows[:, 0]), self.relation(rows[:, 1]))
        return functional.softplus(-(found * self.entity(rows[:, 2])).sum(1))


class Network(Own):
    """Every layer that has a rule, and dropout."""

    def build(self):
        self.bn0 = nn.BatchNorm2d(1)
        self.conv = nn.Conv2d(1, 4, 3, padding=1, stride=(1, 2))
        self.grouped = nn.Conv1d(4, 6, 2, groups=2, dilation=2, bias=False)
        self.bn1 = nn.BatchNorm1d(6)
        self.shut = nn.ReLU(inplace=True)
        self.fc = nn.Linear(36, self.width)
        self.norm = nn.LayerNorm(self.width)
        self.drop = nn.Dropout(0.5)

    def hidden(self, head, relation):
        image = torch.cat([head, relation], 1).view(-1, 1, 4, 4)
        found = self.shut(self.conv(self.bn0(image))).flatten(2)
        found = self.shut(self.bn1(self.grouped(found)))
        return self.norm(self.drop(self.fc(input=found.flatten(1))))


class Twice(Own):
    """A layer that is called twice, and one at four positions: sums of outer products, or of what is small."""

    def build(self):
        self.fc = nn.Linear(self.width, self.width)
        self.wide = nn.Linear(self.width, 200)
        self.norm = nn.LayerNorm((2, 4))
        self.small = nn.Linear(2, 3)

    def hidden(self, head, relation):
        found = self.norm(self.fc(head).view(-1, 2, 4) + self.fc(relation).view(-1, 2, 4)).flatten(1)
        wide = self.wide(torch.stack([found, relation], 1)).tanh().sum(1)
        small = self.small(found.view(-1, 4, 2)).sigmoid().sum((1, 2))
        return found * small[:, None] + wide.view(-1, self.width, 25).mean(2)


class Slots(Own):
    """Many rows of one table: more than the table has, so that the table is filled."""

    def hidden(self, head, relation):
        near = torch.arange(12).expand(len(head), -1) % N_ENTITIES
        return head * (self.relation(near) * relation[:, None]).sum(1)


class Tied(Own):
    """Parameters that no rule is right for, each for a reason of its own, and some that have one beside them."""

    def build(self):
        self.fc = nn.Linear(self.width, self.width)
        self.same = nn.Linear(self.width, self.width, bias=False)
        self.same.weight = self.fc.weight
        self.scale = nn.Parameter(torch.zeros(self.width))
        self.unused = nn.Linear(2, 2)
        self.all = nn.Linear(self.width, self.width)
        self.activation = nn.PReLU()
        self.good = nn.Linear(self.width, self.width)

    def hidden(self, head, relation):
        found = self.activation(self.fc(head) + self.same(relation)) * self.scale
        scores = (self.good(found) @ self.all(self.entity.weight).T).sigmoid()
        return found * scores.sum(1, keepdim=True)


class Compiled(Own):
    def build(self):
        self.net = torch.compile(nn.Linear(self.width, self.width), backend="eager")

    def hidden(self, head, relation):
        return self.net(head) + relation


MODULES = [Network, Twice, Slots, Tied, Little]


def model_of(module):
    return layered.of_module(module, TRAIN)


def checkpoint_of(module, learning_rate=1.0, weights=None):
    return Checkpoint(model_of(module), learning_rate, weights)


@pytest.mark.parametrize("kind", MODULES)
def test_influences_are_those_of_the_generic_path(kind):
    module = kind()
    known = set(all_of(module)) - {"unused.weight", "unused.bias"}
    found = influences(TRAIN, [checkpoint_of(module)], top_k=3).of(TESTS)
    by_generic = influences(TRAIN, [checkpoint(module)], top_k=3).of(TESTS)
    expected = dense(module, TESTS, TRAIN, known).detach()
    for full in (found.full, by_generic.full):
        torch.testing.assert_close(torch.from_numpy(full), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.self_influence, by_generic.self_influence, rtol=1e-9)
    np.testing.assert_allclose(found.proponents.shares, by_generic.proponents.shares, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.score, by_generic.score, rtol=1e-9)


@pytest.mark.parametrize("kind", [*MODULES, Compiled])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_rule_passes_the_probe(kind, dtype):
    module = kind(dtype=dtype)
    known = [name for name in all_of(module) if "unused" not in name]
    weights = {name: torch.rand_like(value.detach()) for name, value in module.named_parameters()}
    check_gradients(model_of(module), TRAIN, known)
    check_gradients(model_of(module), TRAIN, known, weights)


def by_layers(module, caplog):
    """The parameters whose gradients are computed by rules, as the log says."""
    with caplog.at_level(logging.INFO):
        model_of(module)
    return caplog.records[0].getMessage().removeprefix("gradients computed by layer rules: ").split(", ")


def test_all_layers_with_a_rule_are_used_by_it(caplog):
    module = Network()
    assert set(by_layers(module, caplog)) == set(all_of(module))


def test_gradients_are_kept_as_what_takes_least():
    def kinds(module):
        parts = model_of(module).gradients(TRAIN, "train", all_of(module)).terms[0]
        return {name: type(part) for name, part in parts.items()}

    twice = kinds(Twice())
    assert [twice[f"{name}.weight"] for name in ("entity", "wide", "fc", "small")] == [Rows, Sum, Dense, Dense]
    assert kinds(Network())["fc.weight"] is Outer
    assert kinds(Slots())["relation.weight"] is Dense


def test_the_log_says_which_gradients_are_formed_whole_and_why(caplog):
    with caplog.at_level(logging.INFO):
        model_of(Tied())
    by_layers, whole = [record.getMessage().split(": ", 1)[1] for record in caplog.records]
    assert by_layers == "relation.weight, fc.bias, good.weight, good.bias"
    for name, why in [
        ("scale", "there is no rule for it in Tied"),
        ("fc.weight", "it is the same parameter as same.weight"),
        ("activation.weight", "there is no rule for it in PReLU"),
        ("unused.weight", "its layer is never called"),
        ("all.weight", "its layer does not get one row for each example"),
        ("entity.weight", "the layer's rule would be"),
    ]:
        assert f"{name} ({why}" in whole


def test_a_compiled_layer_is_left_alone(caplog):
    assert by_layers(Compiled(), caplog) == ["entity.weight", "relation.weight"]


@pytest.mark.parametrize("wanted", [["fc.weight"], ["scale", "good.weight"], ["entity.weight"]])
def test_only_what_is_wanted_is_differentiated(wanted):
    module = Tied()
    found = influences(TRAIN, [checkpoint_of(module)], wanted=tuple(wanted)).of(TESTS).full
    expected = dense(module, TESTS, TRAIN, wanted).detach()
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-9, atol=1e-12)


def test_frozen_parameters_have_no_part():
    module = Network()
    module.fc.requires_grad_(False)
    model = model_of(module)
    assert not {"fc.weight", "fc.bias"} & set(model.parameters_by_name())
    check_gradients(model, TRAIN, list(model.parameters_by_name()))


def test_the_module_is_left_as_it_was():
    module = Network()
    model_of(module).gradients(TRAIN, "train", all_of(module))
    assert not any(layer._forward_hooks for layer in module.modules())
    assert all(value.grad is None for value in module.parameters())


def test_what_an_example_takes_is_what_a_batch_takes_for_each():
    for module in (Network(), Twice(), Tied()):
        model = model_of(module)
        with per_example.CountedBytes() as counted:
            found = model.gradients(TRAIN, "train", all_of(module))
        assert found.n_bytes == len(TRAIN) * model.bytes_of_result("train")
        assert 0.5 < counted.n_bytes / (len(TRAIN) * model.bytes_of_work("train")) <= 1


# What is refused


class InBatch(Own):
    """The tails of the others are its negatives."""

    def losses(self, rows):
        scores = self.entity(rows[:, 0]) @ self.entity(rows[:, 2]).T
        return functional.cross_entropy(scores, torch.arange(len(rows)), reduction="none")


class Mean(Own):
    def losses(self, rows):
        return super().losses(rows).mean()


class Detached(Own):
    def losses(self, rows):
        return super().losses(rows).detach()


class Looks(Own):
    def losses(self, rows):
        return super().losses(rows) * rows[0, 0].item()


class Recurrent(Own):
    def build(self):
        self.gru = nn.GRU(self.width, self.width, batch_first=True)

    def hidden(self, head, relation):
        return self.gru(torch.stack([head, relation], 1))[0][:, -1]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (InBatch, "it depends on the others, so a single example has no influence"),
        (Mean, r"gives a tensor \(\) for 2 examples"),
        (Detached, "depend on no parameter"),
        (Looks, r"without `.item\(\)`"),
        (Recurrent, "cannot be computed for many examples at once"),
    ],
)
def test_losses_that_are_not_each_rows_own_are_refused(kind, sentence):
    with pytest.raises(SlurmGPUError, match=sentence):
        model_of(kind())


class InPieces(Own):
    def build(self):
        self.fc = nn.Linear(self.width, self.width)

    def hidden(self, head, relation):
        return torch.cat([self.fc(piece) for piece in head.split(10)]) * relation


def test_a_layer_that_is_called_otherwise_for_many_examples_is_refused():
    model = model_of(InPieces())
    with pytest.raises(SlurmGPUError, match="with other shapes for 40 examples than for a few"):
        model.gradients(TRAIN, "train", ["fc.weight"])
