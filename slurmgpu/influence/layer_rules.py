"""Rules for the gradients of a layer's parameters, from its inputs and the derivatives with respect to its outputs.

A layer is a PyTorch module that processes n examples independently. Dimensions: n examples; t positions per example,
over which a gradient is a sum; a inputs and b outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from slurmgpu.influence.parts import Dense, Multiply, Outer, Part, exactly
from slurmgpu.influence.table_parts import MATCH_COST, Rows


class Call(NamedTuple):
    """One call of a layer: its input (n, …), and the derivatives of the losses with respect to its output (n, …)."""

    input: Tensor
    delta: Tensor


@dataclass(frozen=True)
class Sum(Part):
    """Gradients that are sums of `parts` of one kind, e.g. of a layer called at several positions."""

    parts: tuple[Part, ...]

    def add_products(
        self, other: Part, out: Tensor, scale: float = 1.0, weights: Tensor | None = None, multiply: Multiply = exactly
    ) -> None:
        """See Part."""
        assert isinstance(other, Sum)
        for mine in self.parts:
            for theirs in other.parts:
                mine.add_products(theirs, out, scale=scale, weights=weights, multiply=multiply)

    def dots(self, other: Part, weights: Tensor | None = None) -> Tensor:
        """See Part."""
        assert isinstance(other, Sum)
        found = [mine.dots(theirs, weights) for mine in self.parts for theirs in other.parts]
        return torch.stack(found).sum(0)

    def scaled(self, exponents: Tensor) -> Sum:
        """See Part."""
        return Sum(tuple(part.scaled(exponents) for part in self.parts))

    def dense(self, shape: torch.Size) -> Tensor:
        """See Part."""
        return torch.stack([part.dense(shape) for part in self.parts]).sum(0)

    @property
    def n_bytes(self) -> int:
        """See Part."""
        return sum(part.n_bytes for part in self.parts)


Rule = Callable[[Any, Sequence[Call]], Part]
"""Maps a layer and its calls to the gradients of one of its parameters."""


def rule_for(layer: nn.Module, name: str) -> Rule | None:
    """The rule for a layer's parameter; None if there is none, or for a subclass, which may compute anything."""
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return None  # max_norm changes the table, scale_grad_by_freq depends on other examples
    if isinstance(layer, nn.Conv1d | nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
        return None
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and layer.running_mean is None:
        return None
    return RULES.get(type(layer), {}).get(name)


def takes(layer: nn.Module, values: Tensor) -> bool:
    """Whether an input may have a first dimension of examples."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        n_own = len(layer.kernel_size) + 1
    elif isinstance(layer, nn.LayerNorm):
        n_own = len(layer.normalized_shape)
    else:
        n_own = 0 if isinstance(layer, nn.Embedding) else 1
    return bool(values.ndim > n_own)


def _matrix(layer: nn.Linear, calls: Sequence[Call]) -> Part:
    """The weights (b, a) of a linear layer: outer products, while these are cheaper."""
    inputs, deltas = (_joined([_positions(values) for values in side]) for side in zip(*calls, strict=True))
    n, n_positions, a = inputs.shape
    b = deltas.shape[2]
    # Multiplications per pair of examples.
    if n_positions**2 * (a + b) >= a * b:
        return Dense((deltas.mT @ inputs).flatten(1))
    of = torch.arange(n, device=inputs.device)
    found = [Outer(_own(deltas[:, t]), _own(inputs[:, t]), of) for t in range(n_positions)]
    return found[0] if n_positions == 1 else Sum(tuple(found))


def _table(layer: nn.Embedding, calls: Sequence[Call]) -> Part:
    """A table of embeddings: the looked-up rows, while these are few."""
    index = _joined([call.input.reshape(len(call.input), -1) for call in calls]).long()
    values = _joined([call.delta.reshape(len(call.delta), -1, layer.embedding_dim) for call in calls])
    if layer.padding_idx is not None:
        padding = index == layer.padding_idx
        index, values = index.masked_fill(padding, -1), values.masked_fill(padding[:, :, None], 0)
    n_slots, n_rows = index.shape[1], layer.num_embeddings
    if n_slots**2 * min(1.0, MATCH_COST / n_rows) < n_rows:
        return Rows(_own(index), _own(values))
    table = values.new_zeros(len(index), n_rows, layer.embedding_dim)
    at = torch.arange(len(index), device=index.device)
    for s in range(n_slots):  # sequentially, for a fixed order of sums
        table[at, index[:, s].clamp(min=0)] += values[:, s]
    return Dense(table.flatten(1))


def _kernels(layer: nn.Conv1d | nn.Conv2d, calls: Sequence[Call]) -> Part:
    """A convolution: the sum over places of δ ⊗ the patch under the kernel."""
    found = []
    for values, delta in calls:
        patches = _patches(layer, values).unflatten(1, (layer.groups, -1))  # (n, groups, kernel, places)
        deltas = delta.flatten(2).unflatten(1, (layer.groups, -1))  # (n, groups, channels, places)
        found.append((deltas @ patches.mT).flatten(1))
    return Dense(_added(found))


def _patches(layer: nn.Conv1d | nn.Conv2d, values: Tensor) -> Tensor:
    sizes = layer.kernel_size, layer.dilation, layer.padding, layer.stride
    if isinstance(layer, nn.Conv2d):
        return functional.unfold(values, *sizes)
    kernel_size, dilation, padding, stride = ((fill, *size) for fill, size in zip((1, 1, 0, 1), sizes, strict=True))
    return functional.unfold(values[:, :, None], kernel_size, dilation, padding, stride)


def _of_last(layer: nn.Module, calls: Sequence[Call]) -> Part:
    """A parameter that is added to the last dimensions of an output."""
    return Dense(_added([_over_positions(layer, call.delta) for call in calls]))


def _of_channels(layer: nn.Module, calls: Sequence[Call]) -> Part:
    """A parameter that is added to the channels of an output (n, channels, …)."""
    return Dense(_added([_over_places(call.delta) for call in calls]))


def _times_last(layer: nn.LayerNorm, calls: Sequence[Call]) -> Part:
    normal = [functional.layer_norm(call.input, layer.normalized_shape, eps=layer.eps) for call in calls]
    products = [call.delta * values for call, values in zip(calls, normal, strict=True)]
    return Dense(_added([_over_positions(layer, values) for values in products]))


def _times_channels(layer: nn.BatchNorm1d | nn.BatchNorm2d, calls: Sequence[Call]) -> Part:
    normal = [functional.batch_norm(call.input, layer.running_mean, layer.running_var, eps=layer.eps) for call in calls]
    return Dense(_added([_over_places(call.delta * values) for call, values in zip(calls, normal, strict=True)]))


RULES: Mapping[type[nn.Module], Mapping[str, Rule]] = {
    nn.Linear: {"weight": _matrix, "bias": _of_last},
    nn.Embedding: {"weight": _table},
    nn.Conv1d: {"weight": _kernels, "bias": _of_channels},
    nn.Conv2d: {"weight": _kernels, "bias": _of_channels},
    nn.BatchNorm1d: {"weight": _times_channels, "bias": _of_channels},
    nn.BatchNorm2d: {"weight": _times_channels, "bias": _of_channels},
    nn.LayerNorm: {"weight": _times_last, "bias": _of_last},
}


def _positions(values: Tensor) -> Tensor:
    """(n, …, a) → (n, t, a)."""
    return values.reshape(len(values), -1, values.shape[-1])


def _over_positions(layer: nn.Module, values: Tensor) -> Tensor:
    size = math.prod(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else values.shape[-1]
    return values.reshape(len(values), -1, size).sum(1)


def _over_places(values: Tensor) -> Tensor:
    return values.reshape(*values.shape[:2], -1).sum(2)


def _joined(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values), 1)


def _added(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)


def _own(values: Tensor) -> Tensor:
    """A copy, so that a kept part holds no larger or changing tensor."""
    return values.clone(memory_format=torch.contiguous_format)
