"""Compute the last layer of a model only for the columns whose logits are needed.

The layer's queries, and everything after its attention, are computed for each token alone; no other token reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("self_attn.q_proj", "self_attn.o_proj", "mlp")
"""These modules, as most models in transformers name them: from and to (row, column, size)."""


class LastLayer:
    """The modules of a model's last layer that serve only one token; LookupError if none has a known name."""

    def __init__(self, model: Any) -> None:
        modules = dict(model.get_decoder().named_modules())
        last = f"layers.{len(modules['layers']) - 1}" if "layers" in modules else ""
        found = (modules.get(f"{last}.{name}") for name in NAMES)
        self._modules = [module for module in found if module is not None]
        if not self._modules:
            raise LookupError(f"it has no layers with {' or '.join(NAMES)}")

    @contextlib.contextmanager
    def only(self, columns: Any, n_columns: int, others: float = 0.0) -> Iterator[None]:
        """Within the context, compute only `columns` of `n_columns`, a slice or indices; the others get a constant.

        With NaN as the constant, a model in which these columns read others shows it, however little they read.
        """
        hooks = [hook for module in self._modules for hook in _hook(module, columns, n_columns, others)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _hook(module: Any, columns: Any, n_columns: int, others: float) -> tuple[Any, Any]:
    def take(_: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        [whole] = inputs
        return (whole[:, columns].contiguous(),)  # a module may view it in another shape

    def put(_: Any, inputs: Any, some: Tensor) -> Tensor:
        n_rows, _, size = some.shape
        whole = some.new_full((n_rows, n_columns, size), others)
        whole[:, columns] = some
        return whole

    return module.register_forward_pre_hook(take), module.register_forward_hook(put)
