"""A look at a few gradients before the work begins: is every parameter there, and is each gradient autograd's?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.influence.models import Differentiable, Gradients, Side
from slurmgpu.influence.precision import matmul_precision

N_DRAWS = 4
"""Sets of examples; one that agrees throughout is enough.

A ReLU whose input is zero but for rounding is open in one computation and shut in another; 1 to 2 % of examples have
one, in float32. A wrong rule shows in all sets, as each is chosen to share rows.
"""

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Of |⟨g, g'⟩ - ⟨g, g'⟩ by autograd| / |g| |g'|: of gradients nearly at right angles, products are mostly rounding."""

SMALL = 0.1
"""Gradients shorter than this share of the longest count as that long."""

ROUNDING = 10
"""Of shares that are no longer than so many last bits of the whole gradient nothing can be told: they are rounding."""


def probe(
    model: Differentiable, train: Tensor, wanted: Collection[str], weights: Mapping[str, Tensor] | None = None
) -> None:
    """Nothing, if all is well; else SlurmGPUError names what is wrong. `train` (n, c): examples to choose from.

    Parameters and modes are looked at, and the dot products of a few examples compared with autograd's, parameter by
    parameter. This takes a few gradients as large as the wanted parameters, in float64.
    """
    _check_names(model, wanted)
    _check_mode(model)
    with matmul_precision("ieee"):
        _check_reach(model, train[:1])
        wrong: dict[str, float] = {}
        for tests, others in _draws(train):
            wrong = _disagreements(model, tests, others, wanted, weights)
            if not wrong:
                return
    name, error = max(wrong.items(), key=lambda item: item[1])
    raise SlurmGPUError(
        f"The gradients with regard to {name!r} are not those of autograd: their dot products differ by {error:.1g} of "
        f"the gradients' lengths, in each of {N_DRAWS} samples of training examples. The rule for this parameter is "
        "wrong or does not fit the model; its influences would be, too. Leave the parameter out, or compute the "
        "gradients one by one."
    )


def _check_names(model: Differentiable, wanted: Collection[str]) -> None:
    known = model.parameters_by_name()
    for name in wanted:
        if name not in known:
            raise SlurmGPUError(f"The model has no trainable parameter {name!r}.{did_you_mean(name, known)}")
    if not wanted:
        raise SlurmGPUError("No parameter is left of which influences could be computed.")
    for name in known:
        if name not in model.groups:
            raise SlurmGPUError(
                f"The parameter {name!r} is in no parameter group, so the influence by way of it would be lost without "
                "a word. Name it in the model's `groups`, or freeze it by requires_grad_(False)."
            )


def _check_mode(model: Differentiable) -> None:
    module = getattr(model, "module", None)
    if not isinstance(module, torch.nn.Module):
        return
    for name, part in module.named_modules():
        if part.training:
            raise SlurmGPUError(
                f"The model's {name or 'top'} ({type(part).__name__}) is in training mode: dropout would be random, "
                "and batch norm would mix the examples of a batch. Call eval() on the model."
            )


def _check_reach(model: Differentiable, examples: Tensor) -> None:
    """Losses depend on nothing that can be trained and is no parameter."""
    sides: tuple[Side, ...] = "train", "test"
    known = {id(value) for value in model.parameters_by_name().values()}
    for side in sides:
        with torch.enable_grad():
            losses = model.losses(examples, side)
        for found in _leaves(losses):
            if id(found) not in known:
                raise SlurmGPUError(
                    f"The loss depends on a tensor {tuple(found.shape)} {_name_of(model, found)}that requires a "
                    "gradient and is none of the model's parameters, so the influence by way of it would be lost "
                    "without a word. Make it a torch.nn.Parameter, or freeze it by requires_grad_(False)."
                )


def _leaves(values: Tensor) -> Iterator[Tensor]:
    """The tensors whose gradients a backward pass from here would give."""
    seen, todo = set(), [values.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        todo += [before for before, _ in node.next_functions]


def _name_of(model: Differentiable, tensor: Tensor) -> str:
    module = getattr(model, "module", None)
    if isinstance(module, torch.nn.Module):
        for prefix, part in module.named_modules():
            for name, value in [*vars(part).items(), *part.named_buffers(recurse=False)]:
                if value is tensor:
                    return f"({prefix}.{name}) ".replace("(.", "(")
    return ""


def _draws(train: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tests, and five training examples that share with them what can be shared, as often as there are draws.

    Among them the first test itself, and one that names a row twice.
    """
    for draw in range(N_DRAWS):
        at = draw * len(train) // N_DRAWS
        tests = train[[at, (at + len(train) // 2) % len(train)]]
        first, last = tests[0, 0], tests[0, -1]
        others = [
            at,
            _next(train[:, 0] == first, at),
            _next(train[:, -1] == last, at),
            _next((train[:, 0] == last) | (train[:, -1] == first), at),
            _next(train[:, 0] == train[:, -1], at),
        ]
        yield tests, train[others]


def _next(matching: Tensor, after: int) -> int:
    """The next place that matches, round the end; any other if there is none."""
    places = matching.nonzero()[:, 0]
    if not len(places):
        return (after + 1) % len(matching)
    later = places[places > after]
    return int(later[0] if len(later) else places[0])


def _disagreements(
    model: Differentiable,
    tests: Tensor,
    others: Tensor,
    wanted: Collection[str],
    weights: Mapping[str, Tensor] | None,
) -> dict[str, float]:
    """Each parameter whose products are wrong in this sample, and by how much."""
    with torch.no_grad():
        mine, theirs = model.gradients(tests, "test", wanted), model.gradients(others, "train", wanted)
        for term in (*mine.terms, *theirs.terms):
            if missing := sorted(set(wanted) - set(term)):
                raise SlurmGPUError(
                    f"The model gives no gradients with regard to {missing[0]!r}, so the influence by way of it would "
                    "be lost without a word. Leave the parameter out, or give the model a rule for it."
                )
        found = {name: mine.losses.new_zeros(len(tests), len(others)) for name in wanted}
        mine.add_products(theirs, found, weights=weights)
        squares = {name: _only(theirs, name).squares(weights) for name in wanted}
    expected = _by_autograd(model, tests, others, wanted, weights)
    information = torch.finfo(mine.losses.dtype)
    floor = information.tiny / information.eps  # products below are zero in this dtype
    tolerance = TOLERANCES.get(mine.losses.dtype, 1e-4)
    # Such shares' product, all of it wrong, is then just within the tolerance.
    least, their_least = (ROUNDING * information.eps * tolerance**-0.5 * whole for whole in _whole_lengths(expected))
    wrong = {}
    for name in wanted:
        products, lengths, their_lengths = expected[name]
        # A gradient that is small beside others may be what is left of a sum that cancels, and so is its rounding.
        mine_scale = lengths.clamp(min=SMALL * lengths.max()).maximum(least)
        their_scale = their_lengths.clamp(min=SMALL * their_lengths.max()).maximum(their_least)
        errors = (found[name] - products).abs() / (mine_scale[:, None] * their_scale).clamp(min=floor)
        own = (squares[name] - their_lengths.square()).abs() / their_scale.square().clamp(min=floor)
        largest = float(torch.maximum(errors.max(), own.max()))
        if not largest <= tolerance:
            wrong[name] = largest
    return wrong


def _whole_lengths(expected: Mapping[str, tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The lengths (n,) and (m,) of the gradients with regard to all parameters together."""
    _, mine, theirs = zip(*expected.values(), strict=True)
    return torch.stack(mine).norm(dim=0), torch.stack(theirs).norm(dim=0)


def _only(gradients: Gradients, name: str) -> Gradients:
    return Gradients(tuple({name: term[name]} for term in gradients.terms), gradients.losses, gradients.scores)


def _by_autograd(
    model: Differentiable,
    tests: Tensor,
    others: Tensor,
    wanted: Collection[str],
    weights: Mapping[str, Tensor] | None,
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """For each parameter the products (n, m), and the lengths (n,) and (m,), in float64."""

    def gradient(example: Tensor, side: Side) -> dict[str, Tensor]:
        parameters = {name: model.parameters_by_name()[name] for name in wanted}
        with torch.enable_grad():
            loss = model.losses(example[None], side).sum()
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return {
            name: (torch.zeros_like(parameter) if one is None else one).double()
            for (name, parameter), one in zip(parameters.items(), found, strict=True)
        }

    def product(name: str, a: Tensor, b: Tensor) -> Tensor:
        return (a * b if weights is None else a * b * weights[name]).sum()

    mine = [gradient(example, "test") for example in tests]
    rows, theirs = [], []
    for example in others:
        one = gradient(example, "train")
        rows.append({name: torch.stack([product(name, g[name], one[name]) for g in mine]) for name in wanted})
        theirs.append({name: product(name, one[name], one[name]).sqrt() for name in wanted})
    return {
        name: (
            torch.stack([row[name] for row in rows], 1),
            torch.stack([product(name, g[name], g[name]).sqrt() for g in mine]),
            torch.stack([lengths[name] for lengths in theirs]),
        )
        for name in wanted
    }
