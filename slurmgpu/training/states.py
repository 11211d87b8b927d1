"""The state of a training as plain values: random number generators, model, optimizer.

FSDP does not share buffers among ranks, and DDP only before a forward pass (rank 0's), so running statistics differ
between ranks. Hence each rank keeps its `buffers(model)` in its own state. Before evaluating what rank 0 saves, call
`share_buffers(model)`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmgpu.training.checkpoint_files import mismatch_error

T = TypeVar("T")
MASK = 2**64 - 1
COMPILED = "_orig_mod."


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators of Python, NumPy and PyTorch (CPU and `device`); loads with weights_only."""
    version, internal, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(each) for each in key], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state of `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, key, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seed all these generators with 64 bits."""
    seed &= MASK
    random.seed(seed)
    # NumPy takes words of 32 bits.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.manual_seed(seed)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model, without DDP and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def model_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> dict[str, Any]:
    """Parameters, buffers and optimizer state, under the names in the user's own model.

    Not sharded: plain state dicts, complete on each rank. Sharded: state dicts of DTensors, for
    `Checkpoints.save(sharded=…)` and `Checkpoint.load_sharded`. Tensors are not copied.
    """
    if sharded:
        from slurmgpu.training import sharded_states

        return sharded_states.state(model, optimizer)
    return {"model": _by_users_names(unwrapped(model).state_dict()), "optimizer": optimizer.state_dict()}


def load_model_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, sharded: bool
) -> None:
    """Restore a state of `model_state`; SlurmGPUError if it does not fit the model or optimizer."""
    if sharded:
        from slurmgpu.training import sharded_states

        sharded_states.load_state(model, optimizer, state)
        return
    inner = unwrapped(model)
    names = {name.replace(COMPILED, ""): name for name in inner.state_dict()}
    try:
        inner.load_state_dict({names.get(name, name): value for name, value in state["model"].items()})
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise mismatch_error(error) from error
    _restore_moments(optimizer, state["optimizer"])


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """All buffers of this rank, including non-persistent ones."""
    return dict(unwrapped(model).named_buffers())


def load_buffers(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Restore the state of `buffers`; a buffer whose shape differs, such as a cache, is left alone."""
    for name, buffer in unwrapped(model).named_buffers():
        if name in state and state[name].shape == buffer.shape:
            _once(buffer.detach(), buffer).copy_(_once(state[name], buffer))


def own_buffers(model: nn.Module) -> None:
    """Give each value of an expanded buffer its own memory, as moving it to a GPU does.

    PyTorch refuses to load or to broadcast into memory that several values share.
    """
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            if _repeats(buffer):
                setattr(module, name, copies.setdefault(id(buffer), buffer.contiguous()))


@contextlib.contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """A context that restores this rank's buffers at its end."""
    kept = {name: each.clone() for name, each in buffers(model).items()}
    try:
        yield
    finally:
        load_buffers(model, kept)


def share_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers to all ranks; called by all together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for buffer in unwrapped(model).buffers():
            part = _once(buffer.detach(), buffer)
            whole = part.contiguous()  # of others gloo sends the memory between the values
            torch.distributed.broadcast(whole, 0)
            if whole is not part:
                part.copy_(whole)


def weights(model: nn.Module, *, sharded: bool) -> dict[str, Any]:
    """Unsharded parameters and buffers on the CPU by the user's names; {} on other ranks than 0.

    Called by all ranks. For a model on the CPU these are its own tensors: write them before training continues.
    """
    if sharded:
        from slurmgpu.training import sharded_states

        return sharded_states.weights(model)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return {}
    copies: dict[int, Any] = {}
    found = {}
    for name, value in _by_users_names(unwrapped(model).state_dict(keep_vars=True)).items():
        if isinstance(value, torch.Tensor):
            # Tied weights are one tensor under two names, to be written once.
            value = copies.setdefault(id(value), value.detach().cpu())
        found[name] = value
    return found


def _repeats(tensor: torch.Tensor) -> list[int]:
    """The dimensions along which all values are the same memory."""
    if tensor.layout != torch.strided:
        return []
    return [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]


def _once(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that has each memory location of `like`, of the same shape, once."""
    for dim in _repeats(like):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _by_users_names(state: dict[str, T]) -> dict[str, T]:
    return {name.replace(COMPILED, ""): value for name, value in state.items()}


def _restore_moments(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Undo the changes of load_state_dict: it casts moments to the dtype of their parameter.

    It takes moments on the CPU without a copy; these are pages of the checkpoint's file, so they are copied here.
    """
    loaded = optimizer.state_dict()["state"]
    for number, moments in saved["state"].items():
        for name, value in moments.items() if isinstance(moments, dict) else ():
            now = loaded[number].get(name)
            if not (isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)):
                continue
            if value.dtype != now.dtype:
                loaded[number][name] = value.to(now.device, copy=True)
            elif value.device == now.device:
                loaded[number][name] = now.clone()
