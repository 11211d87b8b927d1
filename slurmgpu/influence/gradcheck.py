"""Check a few gradients before the work begins: all parameters present, and gradients equal to autograd's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.influence.gradients import Differentiable, Gradients, Side
from slurmgpu.influence.precision import matmul_precision

N_DRAWS = 4
"""Sets of examples; one that agrees throughout suffices.

A ReLU whose input is zero up to rounding may differ between computations; in float32, 1 to 2 % of examples have one.
A wrong rule shows in all sets, since they are chosen to share rows.
"""

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
"""The error of ⟨g, g'⟩ relative to |g| |g'|: products of nearly orthogonal gradients are mostly rounding."""

SMALL = 0.1
"""Gradients shorter than this share of the longest count as having this length."""

ROUNDING = 10
"""Shares up to this many last bits of the whole gradient are rounding errors and not compared."""


def check_gradients(
    model: Differentiable, train: Tensor, wanted: Collection[str], weights: Mapping[str, Tensor] | None = None
) -> None:
    """Raise SlurmGPUError if something is wrong with the gradients. `train` (n, c) are examples to choose from.

    Checks parameters and modes, and compares the dot products of a few examples with autograd's, for each parameter.
    This needs memory for a few full gradients of the wanted parameters in float64.
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
        f"The gradients with respect to {name!r} differ from autograd's: in each of {N_DRAWS} samples of training "
        f"examples their dot products are off by {error:.1g} of the gradients' lengths. The rule for this parameter is "
        "wrong or does not fit the model, so its influences would be wrong, too. Leave the parameter out, or compute "
        "the gradients one by one."
    )


def _check_names(model: Differentiable, wanted: Collection[str]) -> None:
    known = model.parameters_by_name()
    for name in wanted:
        if name not in known:
            raise SlurmGPUError(f"The model has no trainable parameter {name!r}.{did_you_mean(name, known)}")
    if not wanted:
        raise SlurmGPUError("No parameter is left whose influences could be computed. Name at least one.")
    for name in known:
        if name not in model.groups:
            raise SlurmGPUError(
                f"The parameter {name!r} is in no parameter group, so its influence would silently be lost. Name it in "
                "the model's `groups`, or freeze it with requires_grad_(False)."
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
    """SlurmGPUError if losses depend on trainable tensors that are not parameters."""
    sides: tuple[Side, ...] = "train", "test"
    known = {id(value) for value in model.parameters_by_name().values()}
    for side in sides:
        with torch.enable_grad():
            losses = model.losses(examples, side)
        for found in _leaves(losses):
            if id(found) not in known:
                raise SlurmGPUError(
                    f"The loss depends on a tensor {tuple(found.shape)} {_name_of(model, found)}that requires a "
                    "gradient but is not a parameter of the model, so its influence would silently be lost. Make it a "
                    "torch.nn.Parameter, or freeze it with requires_grad_(False)."
                )


def _leaves(values: Tensor) -> Iterator[Tensor]:
    """The tensors for which a backward pass from here would compute gradients."""
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
    """For each draw two tests, and five training examples that share rows with them if possible.

    These include the first test itself, and an example that names a row twice.
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
    """The next matching place after `after`, cyclically; any other place if none matches."""
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
    """The errors of the parameters whose products are wrong in this sample."""
    with torch.no_grad():
        mine, theirs = model.gradients(tests, "test", wanted), model.gradients(others, "train", wanted)
        for term in (*mine.terms, *theirs.terms):
            if missing := sorted(set(wanted) - set(term)):
                raise SlurmGPUError(
                    f"The model gives no gradients with respect to {missing[0]!r}, so its influence would silently be "
                    "lost. Leave the parameter out, or give the model a rule for it."
                )
        found = {name: mine.losses.new_zeros(len(tests), len(others)) for name in wanted}
        mine.add_products(theirs, found, weights=weights)
        squares = {name: _only(theirs, name).squares(weights) for name in wanted}
    expected = _by_autograd(model, tests, others, wanted, weights)
    information = torch.finfo(mine.losses.dtype)
    floor = information.tiny / information.eps  # smaller products are zero in this dtype
    tolerance = TOLERANCES.get(mine.losses.dtype, 1e-4)
    # The product of such shares stays within the tolerance even if it is all wrong.
    _, *all_lengths = zip(*expected.values(), strict=True)
    least, their_least = (
        ROUNDING * information.eps * tolerance**-0.5 * torch.stack(lengths).norm(dim=0) for lengths in all_lengths
    )
    wrong = {}
    for name in wanted:
        products, lengths, their_lengths = expected[name]
        # A gradient much smaller than others may be what remains of a cancelling sum, with its rounding errors.
        mine_scale = lengths.clamp(min=SMALL * lengths.max()).maximum(least)
        their_scale = their_lengths.clamp(min=SMALL * their_lengths.max()).maximum(their_least)
        errors = (found[name] - products).abs() / (mine_scale[:, None] * their_scale).clamp(min=floor)
        own = (squares[name] - their_lengths.square()).abs() / their_scale.square().clamp(min=floor)
        largest = float(torch.maximum(errors.max(), own.max()))
        if not largest <= tolerance:
            wrong[name] = largest
    return wrong


def _only(gradients: Gradients, name: str) -> Gradients:
    return Gradients(tuple({name: term[name]} for term in gradients.terms), gradients.losses, gradients.scores)


def _by_autograd(
    model: Differentiable,
    tests: Tensor,
    others: Tensor,
    wanted: Collection[str],
    weights: Mapping[str, Tensor] | None,
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """The products (n, m) and lengths (n,) and (m,) of each parameter, in float64."""

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
