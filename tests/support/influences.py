"""Small models for the tests of influences, and the dense matrix that the engine must equal."""

import torch
from torch import nn
from torch.nn import functional

from slurmgpu.influence.influences import Checkpoint, Influences, Options
from slurmgpu.influence.per_example import of_module

N_ENTITIES = 9


class Little(nn.Module):
    """Embedding, batch norm, a layer and a tied table: an example is (head, anything, tail)."""

    def __init__(self, seed=0, dtype=torch.float64):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.entity = nn.Embedding(N_ENTITIES, 5)
            self.norm = nn.BatchNorm1d(5)
            self.norm.running_mean.normal_()
            self.drop = nn.Dropout(0.5)
            self.fc = nn.Linear(5, 5)
        self.to(dtype).eval()

    def scores(self, examples):
        hidden = self.fc(self.drop(self.norm(self.entity(examples[:, 0])))).sigmoid()
        return (hidden * self.entity(examples[:, 2])).sum(1)

    def losses(self, examples):
        return functional.softplus(-self.scores(examples))


def examples(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, N_ENTITIES, (n, 3), generator=generator)


def checkpoint(module=None, learning_rate=1.0, weights=None):
    return Checkpoint(of_module(module or Little(), torch.tensor([0, 1, 2])), learning_rate, weights)


def all_of(module):
    return tuple(name for name, _ in module.named_parameters())


def influences(train, checkpoints=None, **options):
    checkpoints = checkpoints or [checkpoint()]
    wanted = tuple(checkpoints[0].model.parameters_by_name())
    return Influences(checkpoints, train, Options(**{"wanted": wanted, "full": "float64", **options}))


def gradient_rows(module, rows, wanted=None):
    """Every gradient as a row, by one call of autograd each (n, P)."""
    parameters = [value for name, value in module.named_parameters() if wanted is None or name in wanted]
    found = []
    for row in rows:
        of_row = torch.autograd.grad(module.losses(row[None]).sum(), parameters)
        found.append(torch.cat([one.flatten() for one in of_row]))
    return torch.stack(found)


def dense(module, tests, train, wanted=None):
    """The dot products of all pairs (n, m)."""
    return gradient_rows(module, tests, wanted) @ gradient_rows(module, train, wanted).T
