"""The gradients of any module, one by one: for layers without factors, and as a reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence.gradients import Gradients, Side
from slurmgpu.influence.parts import Dense

Losses = Callable[[Mapping[str, Tensor], Tensor, Side], Tensor]
"""Maps parameters by name, examples (n, c) and the side to losses (n,); none may depend on another example.

It runs under `torch.vmap`: it cannot read values (`.item()`, `if` on a tensor); use `gather` to index by a tensor.
"""


class PerExample:
    """A Differentiable of a function of parameters; each example has a full gradient.

    `example` (c,) is any valid one, for measuring memory. `scores` has the arguments of `losses`; without it, scores
    are NaN. `module` is for the probe.
    """

    def __init__(
        self,
        losses: Losses,
        parameters: Mapping[str, Tensor],
        groups: Mapping[str, str],
        example: Tensor,
        *,
        scores: Losses | None,
        module: torch.nn.Module | None,
    ) -> None:
        self._losses, self._parameters, self._scores = losses, dict(parameters), scores
        self._example, self._n_bytes = example, dict[Side, int]()
        self.groups, self.module = groups, module

    def parameters_by_name(self) -> Mapping[str, Tensor]:
        """See Differentiable."""
        return self._parameters

    def gradients(self, examples: Tensor, side: Side, wanted: Collection[str]) -> Gradients:
        """See Differentiable. Other parameters are fixed."""
        fixed = {name: value.detach() for name, value in self._parameters.items() if name not in wanted}
        free = {name: self._parameters[name].detach() for name in wanted}

        def loss(free: Mapping[str, Tensor], example: Tensor) -> Tensor:
            return self._losses({**fixed, **free}, example[None], side)[0]

        found, losses = _explained(vmap(grad_and_value(loss), in_dims=(None, 0)))(free, examples)
        parts = {name: Dense(found[name].flatten(1)) for name in free}
        return Gradients((parts,), losses, self.scores(examples, side))

    def scores(self, examples: Tensor, side: Side) -> Tensor:
        """The model's scores of the examples (n,); NaN if it has none."""
        if self._scores is None:
            return self._like.new_full((len(examples),), torch.nan)
        with torch.no_grad():
            return self._scores(self._parameters, examples, side)

    def losses(self, examples: Tensor, side: Side) -> Tensor:
        """See Differentiable."""
        return self._losses(self._parameters, examples, side)

    def losses_alone(self, examples: Tensor, side: Side) -> Tensor:
        """The losses (n,) of examples (n, c), each computed alone; SlurmGPUError if that is impossible."""

        def loss(example: Tensor) -> Tensor:
            return self._losses(self._parameters, example[None], side)[0]

        return cast(Tensor, _explained(vmap(loss))(examples))

    def order(self, examples: Tensor) -> Tensor:
        """See Differentiable."""
        return torch.arange(len(examples), device=examples.device)

    def bytes_of_work(self, side: Side) -> int:
        """See Differentiable; an upper bound: nothing is counted as freed."""
        if side not in self._n_bytes:
            with CountedBytes() as counted:
                self.gradients(self._example[None].to(self._like.device), side, self._parameters)
            self._n_bytes[side] = counted.n_bytes
        return self._n_bytes[side]

    def bytes_of_result(self, side: Side) -> int:
        """See Differentiable."""
        return sum(value.nbytes for value in self._parameters.values())

    @property
    def _like(self) -> Tensor:
        return next(iter(self._parameters.values()))


def of_module(module: torch.nn.Module, example: Tensor) -> PerExample:
    """A PerExample of a module with a method `losses(examples (n, c)) -> (n,)`, and possibly a similar `scores`.

    Its groups are its attribute `groups` (parameter → group), or the names of its top-level modules.
    """

    def call(method: str) -> Losses:
        chosen = _Chosen(module, method)

        def losses(parameters: Mapping[str, Tensor], examples: Tensor, side: Side) -> Tensor:
            by_name = {f"module.{name}": value for name, value in parameters.items()}
            return cast(Tensor, functional_call(chosen, by_name, (examples,)))

        return losses

    if not callable(getattr(module, "losses", None)):
        raise SlurmGPUError(
            f"{type(module).__name__} has no method `losses`. Influences need the loss of each example: add "
            "`def losses(self, examples)`, which takes integers (n, c) and returns (n,)."
        )
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    groups = getattr(module, "groups", None) or {name: name.split(".")[0] for name in parameters}
    scores = call("scores") if callable(getattr(module, "scores", None)) else None
    return PerExample(call("losses"), parameters, groups, example, scores=scores, module=module)


class _Chosen(torch.nn.Module):
    """Calls a module's method other than `forward` with replaced parameters."""

    def __init__(self, module: torch.nn.Module, method: str) -> None:
        super().__init__()
        self.module, self._method = module, method

    def forward(self, examples: Tensor) -> Any:
        return getattr(self.module, self._method)(examples)


class CountedBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {
            value.untyped_storage().data_ptr() for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)
        }
        for value in tree_leaves(found):
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in known:
                self.n_bytes += value.nbytes
        return found


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with advice added to errors of torch.vmap."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("vmap", "Batching rule")):
                raise
            raise SlurmGPUError(
                f"The gradients of this model's losses cannot be computed for many examples at once: {error} Write "
                "its losses without `.item()`, without `if` on a tensor's values, and without in-place operations on "
                "tensors that do not depend on the examples; use `gather` instead of indexing a tensor by a tensor."
            ) from error

    return call
