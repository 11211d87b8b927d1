"""The blocks of a model, for FSDP and gradient checkpointing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import compiler, is_grad_enabled, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.user_methods import optional_method


def find_blocks(user: Any, model: nn.Module) -> list[nn.Module]:
    """`user.blocks(model)`, else the members of the outermost ModuleLists, else of the outermost Sequentials."""
    if blocks := optional_method(user, "blocks"):
        given = blocks(model)
        named = list(given) if isinstance(given, Iterable) else [None]
        if not all(isinstance(each, nn.Module) for each in named):
            raise SlurmGPUError(
                f"{type(user).__name__}.blocks(model) gave {given!r:.80}; expected a list of modules of the model. The "
                f"training loop calls a method of this name: rename it if it is for something else."
            )
        return named
    found = list(_members(model, nn.ModuleList)) or list(_members(model, nn.Sequential))
    return [block for block in found if any(True for _ in block.parameters())]


def checkpoint_blocks(user: Any, model: nn.Module) -> None:
    """Recompute the blocks' activations in the backward pass instead of keeping them."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and optional_method(user, "blocks") is None:  # transformers' own
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    blocks = find_blocks(user, model)
    if not blocks:
        raise SlurmGPUError(
            f"gradient_checkpointing: {type(model).__name__} has no ModuleList and no Sequential. "
            f"Give {type(user).__name__} a method blocks(model) that returns the modules to recompute."
        )
    for block in blocks:
        block.forward = functools.partial(_forward, block, block.forward)


def _forward(block: nn.Module, forward: Any, *arguments: Any, **named: Any) -> Any:
    if not (block.training and is_grad_enabled()):
        return forward(*arguments, **named)
    norms = [each for each in block.modules() if isinstance(each, _NormBase) and each.track_running_stats]
    if norms and not compiler.is_compiling():  # the compiler supports no such contexts
        named["context_fn"] = lambda: (contextlib.nullcontext(), _statistics_kept(norms))
    return checkpoint(forward, *arguments, use_reentrant=False, **named)


@contextlib.contextmanager
def _statistics_kept(norms: list[Any]) -> Iterator[None]:
    """Keep running statistics unchanged: the first computation of a block has updated them."""
    momenta = [each.momentum for each in norms]
    counts = [each.num_batches_tracked.clone() for each in norms]
    try:
        for each in norms:
            each.momentum = 0.0
        yield
    finally:
        for each, momentum, count in zip(norms, momenta, counts, strict=True):
            each.momentum = momentum
            each.num_batches_tracked.copy_(count)


def _members(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    if isinstance(module, kind):
        yield from module.children()
        return
    for child in module.children():
        yield from _members(child, kind)
