"""The blocks of a model: what FSDP gathers at a time, and what gradient checkpointing computes twice."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from slurmgpu.errors import SlurmGPUError


def find_blocks(user: Any, model: nn.Module) -> list[nn.Module]:
    """`user.blocks(model)`; else the members of the outermost ModuleLists, else those of the outermost Sequentials."""
    if blocks := getattr(user, "blocks", None):
        return list(blocks(model))
    found = list(_members(model, nn.ModuleList)) or list(_members(model, nn.Sequential))
    return [block for block in found if any(True for _ in block.parameters())]


def checkpoint_blocks(user: Any, model: nn.Module) -> None:
    """Have the blocks' activations computed again in the backward pass, in place of kept."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and not hasattr(user, "blocks"):  # transformers' own
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    blocks = find_blocks(user, model)
    if not blocks:
        raise SlurmGPUError(
            f"gradient_checkpointing: {type(model).__name__} has no ModuleList and no Sequential. "
            f"Give {type(user).__name__} a method blocks(model) that returns the modules to compute again."
        )
    for block in blocks:
        block.forward = functools.partial(_forward, block, block.forward)


def _forward(block: nn.Module, forward: Any, *arguments: Any, **named: Any) -> Any:
    if block.training and is_grad_enabled():
        return checkpoint(forward, *arguments, use_reentrant=False, **named)
    return forward(*arguments, **named)


def _members(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    if isinstance(module, kind):
        yield from module.children()
        return
    for child in module.children():
        yield from _members(child, kind)
