"""A small graph whose triples share entities in every way, models of it, and their gradients by autograd."""

from itertools import accumulate

import torch

from slurmgpu.workloads.tracin.kge.differentiable import differentiable
from slurmgpu.workloads.tracin.kge.losses import find_loss
from slurmgpu.workloads.tracin.kge.queries import Known

N_ENTITIES, N_RELATIONS = 11, 3
LOSSES = ["bce-pos", "score", "ns:3", "bce-1n", "kvsall", "ce"]

# Shared heads, tails and relations; a head that is another's tail; loops; a duplicate; a query of three tails; and,
# at last, a triple whose entities no other has.
TRAIN = torch.tensor(
    [
        *[(0, 0, 1), (0, 0, 2), (0, 0, 3), (4, 1, 1), (1, 1, 0), (2, 0, 2)],
        *[(5, 1, 5), (4, 1, 1), (6, 0, 4), (3, 1, 6), (8, 2, 9)],
    ]
)
# Training triples among them, others of known and of unknown queries, and one that asks for those last entities.
TESTS = torch.tensor([(0, 0, 1), (0, 0, 5), (6, 1, 6), (1, 0, 4), (2, 1, 0), (8, 0, 9)])


def randomised(module, seed=0):
    """The module in float64 and evaluation mode, with random parameters and statistics."""
    draw = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            drawn = torch.randn(value.shape, generator=draw, dtype=torch.float64)
            value.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn / 2)
    return module.double().eval()


def triples_model(module, train="bce-pos", test=None, directions="tail", label_smoothing=0.1):
    """A model for influences; with both directions, the inverse of relation r is row r + 3."""
    relations = torch.arange(N_RELATIONS)
    heads, own, tails = TRAIN.T
    triples = [heads, own, tails]
    if directions == "both":
        triples = [torch.cat(both) for both in zip(triples, (tails, own + N_RELATIONS, heads), strict=True)]
    losses = {
        side: find_loss(
            name,
            n_entities=N_ENTITIES,
            known=lambda: Known(torch.stack([*triples], 1), 2 * N_RELATIONS),
            label_smoothing=label_smoothing,
            seed=5,
        )
        for side, name in (("train", train), ("test", test or train))
    }
    inverses = relations + N_RELATIONS if directions == "both" else None
    return differentiable(module, losses, relations, inverses, TRAIN[0])


def gradients_by_autograd(model, examples, side, names=None):
    """The gradient of each example's loss for each parameter (n, …), by one backward pass per example."""
    parameters = {name: value for name, value in model.parameters_by_name().items() if names is None or name in names}
    rows = []
    for i in range(len(examples)):
        [loss] = model.losses(examples[i : i + 1], side)
        rows.append(torch.autograd.grad(loss, list(parameters.values()), allow_unused=True))
    return {
        name: torch.stack([torch.zeros_like(value) if row[i] is None else row[i] for row in rows])
        for i, (name, value) in enumerate(parameters.items())
    }


def dense_gradients(model, gradients):
    """The same from the parts that a model gives."""
    found = {}
    for term in gradients.terms:
        for name, part in term.items():
            found[name] = found.get(name, 0) + part.dense(model.parameters_by_name()[name].shape)
    return found


def most_allocated(profile):
    """The most bytes that were allocated at a time, by PyTorch's profiler."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
