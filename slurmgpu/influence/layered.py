"""The gradients of any module: factored for layers with a rule, one by one for other layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence import per_example
from slurmgpu.influence.gradcheck import SMALL, TOLERANCES
from slurmgpu.influence.gradients import Gradients, Side
from slurmgpu.influence.layer_rules import Call, Rule, rule_for, takes
from slurmgpu.influence.parts import Part
from slurmgpu.influence.per_example import CountedBytes, PerExample
from slurmgpu.influence.precision import matmul_precision

log = logging.getLogger(__name__)

DRAWS = 2, 3, 4
"""Batch sizes for trying the rules; several, since an input's length may equal one by chance."""


class Owner(NamedTuple):
    """A parameter's layer and gradient rule."""

    layer: nn.Module
    rule: Rule


class Noted(NamedTuple):
    """A layer's input (n, …) and output (n, …) in a call."""

    input: Tensor
    output: Tensor


Calls = Mapping[nn.Module, list[Noted]]


class Layered:
    """A Differentiable of a module with a method `losses`; `whole` computes the gradients without `owners`.

    `sample` (n, c) are examples for measuring memory. `shapes` are each layer's inputs for one example.
    """

    def __init__(
        self,
        module: nn.Module,
        whole: PerExample,
        owners: Mapping[str, Owner],
        shapes: Mapping[nn.Module, list[torch.Size]],
        sample: Tensor,
    ) -> None:
        self.module, self.groups = module, whole.groups
        self._whole, self._owners, self._shapes, self._sample = whole, owners, shapes, sample
        self._n_bytes: list[tuple[int, int]] = []
        self.parameters_by_name, self.losses, self.order = whole.parameters_by_name, whole.losses, whole.order

    def gradients(self, examples: Tensor, side: Side, wanted: Collection[str]) -> Gradients:
        """See Differentiable."""
        found: dict[str, Part] = {}
        owners = {name: owner for name, owner in self._owners.items() if name in wanted}
        if owners:
            losses, calls = _forward(self.module, owners, examples)
            self._expect_shapes(calls, len(examples))
            found = _parts_of(owners, calls, losses)
            losses = losses.detach()
        if rest := [name for name in wanted if name not in owners]:
            whole = self._whole.gradients(examples, side, rest)
            found.update(whole.terms[0])
            losses, scores = whole.losses, whole.scores
        else:
            scores = self._whole.scores(examples, side)
        return Gradients(({name: found[name] for name in wanted},), losses, scores)

    def bytes_of_work(self, side: Side) -> int:
        """See Differentiable; an upper bound: nothing is counted as freed."""
        return max(work for work, _ in self._measured(side))

    def bytes_of_result(self, side: Side) -> int:
        """See Differentiable."""
        return max(result for _, result in self._measured(side))

    def _measured(self, side: Side) -> list[tuple[int, int]]:
        """The memory per example, alone and among a few: some work is per batch, some is not needed for one alone."""
        for n in () if self._n_bytes else (1, len(self._sample)):
            with CountedBytes() as counted:
                found = self.gradients(self._sample[:n], side, self.parameters_by_name())
            self._n_bytes.append((math.ceil(counted.n_bytes / n), math.ceil(found.n_bytes / n)))
        return self._n_bytes

    def _expect_shapes(self, calls: Calls, n: int) -> None:
        for layer, noted in calls.items():
            if [call.input.shape for call in noted] != [(n, *shape) for shape in self._shapes[layer]]:
                raise SlurmGPUError(
                    f"The model calls its layer {layer} with other shapes for {n} examples than for a few, so the "
                    "gradients would be wrong. Write `losses` so that it works alike for any number of examples."
                )


def of_module(module: nn.Module, examples: Tensor) -> Layered:
    """Like `per_example.of_module`, but faster.

    Tries on some of the `examples` (n, c), n > 0, which rules give autograd's gradients. Gradients without such a rule
    are computed one by one, and their parameters are logged. This needs memory for a few full gradients.
    """
    whole = per_example.of_module(module, examples[0])
    owners, reasons = _owners(module, whole.parameters_by_name())
    trial = _Trial(whole.parameters_by_name(), owners)
    with matmul_precision("ieee"):
        for size in DRAWS:
            at = torch.arange(size, device=examples.device) * len(examples) // size
            trial.add(module, whole, examples[(at + size) % len(examples)])
    reasons.update(trial.reasons())
    owners = {name: owner for name, owner in owners.items() if name not in reasons}
    _say(owners, reasons)
    return Layered(module, whole, owners, trial.shapes, examples[: max(DRAWS)])


def _owners(module: nn.Module, parameters: Collection[str]) -> tuple[dict[str, Owner], dict[str, str]]:
    places: dict[Tensor, list[str]] = {}
    for prefix, layer in module.named_modules():
        for name, value in layer.named_parameters(recurse=False):
            places.setdefault(value, []).append(f"{prefix}.{name}".lstrip("."))
    owners: dict[str, Owner] = {}
    reasons = {}
    for names in places.values():
        name = names[0]
        if name not in parameters:
            continue
        layer = module.get_submodule(name.rpartition(".")[0])
        rule = rule_for(layer, name.rpartition(".")[2])
        if len(names) > 1:
            reasons[name] = f"it is the same parameter as {names[1]}"
        elif "_orig_mod" in name.split("."):
            reasons[name] = "its layer is compiled"
        elif rule is None:
            reasons[name] = f"there is no rule for it in {type(layer).__name__}"
        else:
            owners[name] = Owner(layer, rule)
    return owners, reasons


def _forward(module: nn.Module, owners: Mapping[str, Owner], examples: Tensor) -> tuple[Tensor, Calls]:
    """The losses (n,) with their graph, and the calls of the owners' layers."""
    with torch.enable_grad(), _watched(_layers(owners)) as calls:
        losses = cast(Tensor, module.losses(examples))
    if losses.shape != (len(examples),):
        raise SlurmGPUError(
            f"The method `losses` of {type(module).__name__} gives a tensor {tuple(losses.shape)} for {len(examples)} "
            f"examples; expected ({len(examples)},), one loss for each example."
        )
    if not losses.requires_grad:
        raise SlurmGPUError(
            f"For autograd the losses of {type(module).__name__} depend on no parameter. Compute them without "
            "`torch.no_grad()` and `.detach()`."
        )
    return losses, calls


@contextmanager
def _watched(layers: Collection[nn.Module]) -> Iterator[Calls]:
    calls: dict[nn.Module, list[Noted]] = {layer: [] for layer in layers}

    def note(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
        calls[layer].append(Noted(args[0] if args else kwargs["input"], output))
        return output.clone()  # keeps the recorded output safe from in-place operations like ReLU(inplace=True)

    # Before all other hooks, which may change the output.
    handles = [layer.register_forward_hook(note, prepend=True, with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _parts_of(
    owners: Mapping[str, Owner], calls: Calls, losses: Tensor, *, retain_graph: bool = False
) -> dict[str, Part]:
    """The owners' gradients, from the derivatives of all losses with respect to all outputs of their layers."""
    layers = _layers(owners)
    noted = [(layer, call) for layer in layers for call in calls[layer]]
    outputs = [call.output for _, call in noted]
    deltas = _derivatives(losses, outputs, torch.ones_like(losses), retain_graph=retain_graph)
    found: dict[nn.Module, list[Call]] = {layer: [] for layer in layers}
    for (layer, call), delta in zip(noted, deltas, strict=True):
        found[layer].append(Call(call.input.detach(), delta))
    return {name: rule(layer, found[layer]) for name, (layer, rule) in owners.items()}


def _derivatives(
    losses: Tensor, inputs: Sequence[Tensor], weights: Tensor, *, retain_graph: bool
) -> tuple[Tensor, ...]:
    """The derivatives of the weighted sum of losses; zeros for inputs on which it does not depend."""
    return cast(
        tuple[Tensor, ...],
        torch.autograd.grad(
            losses, inputs, weights, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        ),
    )


def _layers(owners: Mapping[str, Owner]) -> list[nn.Module]:
    return list(dict.fromkeys(owner.layer for owner in owners.values()))


class _Trial:
    """Tries the owners' rules on a few batches."""

    def __init__(self, parameters: Mapping[str, Tensor], owners: Mapping[str, Owner]) -> None:
        self._parameters, self._owners = parameters, owners
        self._misfits: dict[str, str] = {}
        self._errors: dict[str, list[tuple[float, float]]] = {name: [] for name in owners}
        self.shapes: dict[nn.Module, list[torch.Size]] = {}

    def add(self, module: nn.Module, whole: PerExample, examples: Tensor) -> None:
        """Compare every example's gradients with those of autograd, from the same forward pass."""
        losses, calls = _forward(module, self._owners, examples)
        _expect_independent(losses.detach(), whole.losses_alone(examples, "train").detach(), examples)
        for name, (layer, _) in self._owners.items():
            if misfit := self._misfit(layer, calls[layer], len(examples)):
                self._misfits.setdefault(name, misfit)
        owners = {name: owner for name, owner in self._owners.items() if name not in self._misfits}
        if not owners:
            return
        parts = _parts_of(owners, calls, losses, retain_graph=True)
        parameters = {name: self._parameters[name] for name in owners}
        for i in range(len(examples)):
            this = torch.zeros_like(losses)
            this[i] = 1
            exact = _derivatives(losses, list(parameters.values()), this, retain_graph=True)
            for (name, value), one in zip(parameters.items(), exact, strict=True):
                expected = one.to_dense() if one.is_sparse else one
                difference = parts[name].dense(value.shape)[i] - expected
                self._errors[name].append((float(difference.norm()), float(expected.norm())))

    def reasons(self) -> dict[str, str]:
        found = dict(self._misfits)
        for name, errors in self._errors.items():
            if name in found:
                continue
            longest = max(length for _, length in errors)
            if not longest:
                found[name] = "its gradients are zero for the tried examples"
                continue
            wrong = [error / max(length, SMALL * longest) for error, length in errors]
            tolerance = TOLERANCES.get(self._parameters[name].dtype, 1e-4)
            if not all(error <= tolerance for error in wrong):
                found[name] = f"the layer's rule would be {max(wrong):.1g} off, as if the layer were not its only use"
        return found

    def _misfit(self, layer: nn.Module, calls: list[Noted], n: int) -> str | None:
        if not calls:
            return "its layer is never called"
        for given, output in calls:
            if not takes(layer, given) or len(given) != n:
                return "its layer does not get one row for each example"
            if not output.requires_grad:
                return "its layer is called without autograd"
        shapes = [call.input.shape[1:] for call in calls]
        if self.shapes.setdefault(layer, shapes) != shapes:
            return "its layer is called with other shapes for more examples"
        return None


def _expect_independent(together: Tensor, alone: Tensor, examples: Tensor) -> None:
    """SlurmGPUError if a loss depends on other examples of its batch."""
    difference = (together - alone).abs()
    scale = torch.maximum(together.abs().max(), alone.abs().max())
    wrong = (difference > TOLERANCES.get(together.dtype, 1e-4) * scale).nonzero()[:, 0].tolist()
    if wrong:
        i = wrong[0]
        raise SlurmGPUError(
            f"The loss of the example {examples[i].tolist()} is {float(alone[i]):.6g} alone and "
            f"{float(together[i]):.6g} in a batch of {len(examples)}: it depends on the others, so a single example "
            "has no influence of its own. Write `losses` so that each row's loss depends on this row alone; for "
            "example, draw negatives for each row."
        )


def _say(owners: Mapping[str, Owner], reasons: Mapping[str, str]) -> None:
    if owners:
        log.info("gradients computed by layer rules: %s", ", ".join(owners))
    if reasons:
        log.info("gradients computed one by one: %s", ", ".join(f"{name} ({why})" for name, why in reasons.items()))
