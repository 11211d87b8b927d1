"""Passes of a module over a batch that record calls of layers, for gradients of their parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence.layers import Call, Rule
from slurmgpu.influence.parts import Part


class Owner(NamedTuple):
    """A parameter's layer and gradient rule."""

    layer: nn.Module
    rule: Rule


class Noted(NamedTuple):
    """A layer's input (n, …) and output (n, …) in a call."""

    input: Tensor
    output: Tensor


Calls = Mapping[nn.Module, list[Noted]]


def forward(module: nn.Module, owners: Mapping[str, Owner], examples: Tensor) -> tuple[Tensor, Calls]:
    """The losses (n,) with their graph, and the calls of the owners' layers."""
    with torch.enable_grad(), _watched(_layers(owners)) as calls:
        losses = cast(Tensor, module.losses(examples))
    if losses.shape != (len(examples),):
        raise SlurmGPUError(
            f"The method `losses` of {type(module).__name__} gives a tensor {tuple(losses.shape)} for {len(examples)} "
            f"examples; expected ({len(examples)},), a loss for each."
        )
    if not losses.requires_grad:
        raise SlurmGPUError(
            f"Autograd finds no parameter on which the losses of {type(module).__name__} depend. Compute them "
            "without `torch.no_grad()` and `.detach()`."
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


def parts_of(
    owners: Mapping[str, Owner], calls: Calls, losses: Tensor, *, retain_graph: bool = False
) -> dict[str, Part]:
    """The owners' gradients, from the derivatives of all losses by all outputs of their layers."""
    layers = _layers(owners)
    noted = [(layer, call) for layer in layers for call in calls[layer]]
    outputs = [call.output for _, call in noted]
    deltas = derivatives(losses, outputs, torch.ones_like(losses), retain_graph=retain_graph)
    found: dict[nn.Module, list[Call]] = {layer: [] for layer in layers}
    for (layer, call), delta in zip(noted, deltas, strict=True):
        found[layer].append(Call(call.input.detach(), delta))
    return {name: rule(layer, found[layer]) for name, (layer, rule) in owners.items()}


def derivatives(losses: Tensor, inputs: Sequence[Tensor], weights: Tensor, *, retain_graph: bool) -> tuple[Tensor, ...]:
    """The derivatives of the weighted sum of losses; zeros for independent inputs."""
    return cast(
        tuple[Tensor, ...],
        torch.autograd.grad(
            losses, inputs, weights, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        ),
    )


def _layers(owners: Mapping[str, Owner]) -> list[nn.Module]:
    return list(dict.fromkeys(owner.layer for owner in owners.values()))
