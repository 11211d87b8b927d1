"""Checkpoints of knowledge-graph models: the layout, without torch, and the tensors by our names, with torch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.workloads.tracin.kge.layouts import Layout, recognise
from slurmgpu.workloads.tracin.kge.parameter_names import NO_PARAMETERS, unwrapped
from slurmgpu.workloads.tracin.kge.torch_archive import (
    DTYPES,
    FUNCTIONS,
    STAND_INS,
    damaged,
    peek,
    refusal,
    state_of,
    unreadable,
)

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = (".running_mean", ".running_var", *NO_PARAMETERS)
"""Endings of state dict names that no optimizer has."""


def read_layout(path: str | Path, **settings: Any) -> Layout:
    """The layout of the model in a checkpoint; `settings` are passed to `recognise`."""
    return recognise(peek_content(path), path, **settings)


def peek_content(path: str | Path) -> Mapping[str, Any]:
    """A checkpoint's content, with stand-ins for tensors; with tensors, by PyTorch, if only PyTorch can read it."""
    content = peek(path)
    if content is not None:
        return content
    try:
        return read_content(path)
    except ImportError as error:
        raise SlurmGPUError(
            f"{path} has a format that only PyTorch can read, and PyTorch is not installed here. Install it, or save "
            f"the checkpoint again with a newer PyTorch."
        ) from error


def load_checkpoint(path: str | Path, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their canonical names, on the CPU, perhaps mapped from the file.

    SlurmGPUError for a value that is not finite.
    """
    state = state_of(read_content(path), path)
    found = {}
    for name, key in layout.names.items():
        expect_finite(state[key], key, path)
        found[name] = _canonical(state[key].detach(), name, layout)
    return found


def expect_finite(values: Tensor, key: str, path: str | Path) -> None:
    """SlurmGPUError if a checkpoint's tensor has NaN or infinity, which would make every influence NaN."""
    if not values.isfinite().all():
        raise SlurmGPUError(f"{path}: {key} has values that are not finite. Use an earlier checkpoint.")


def adam_weights(path: str | Path, layout: Layout) -> dict[str, Tensor]:
    """Adam's diagonal 1 / (√v̂ + ε) for each trainable parameter, by its canonical name, in float64.

    v̂ is the bias-corrected second moment, as in torch.optim.Adam and AdamW, at the checkpoint's step.
    """
    content = read_content(path)
    optimizer, state = optimizer_of(content, path), state_of(content, path)
    found = {}
    for key, (moments, group) in _by_key(optimizer, state, path).items():
        second = moments.get("max_exp_avg_sq", moments.get("exp_avg_sq")) if isinstance(moments, Mapping) else None
        if second is None or second.shape != state[key].shape:
            was = "none" if second is None else f"one of shape {tuple(second.shape)}"
            raise SlurmGPUError(
                f"{path}: expected a second moment of Adam for {key}, of shape {tuple(state[key].shape)}, found {was} "
                f'in optimizer_state_dict. Set precondition to "none".'
            )
        corrected = second.double() / (1 - group["betas"][1] ** float(moments["step"]))
        found[key] = 1 / (corrected.sqrt() + group["eps"])
    return {
        name: _canonical(found[key], name, layout) for name, key in layout.names.items() if not key.endswith(BUFFERS)
    }


def optimizer_of(content: Mapping[str, Any], path: str | Path) -> Mapping[str, Any]:
    """The state dict of Adam in a checkpoint's content; SlurmGPUError if it is missing or has no state."""
    optimizer = content.get("optimizer_state_dict")
    if not isinstance(optimizer, Mapping) or not optimizer.get("state"):
        raise SlurmGPUError(
            f'precondition = "adam" needs the second moments of Adam, and {path} has no optimizer_state_dict with a '
            f"state. Use a checkpoint with the optimizer's state, or remove precondition."
        )
    return optimizer


def _by_key(
    optimizer: Mapping[str, Any], state: Mapping[str, Any], path: str | Path
) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """The moments and the settings of each parameter, by its key in the state dict.

    An optimizer numbers its parameters in the order in which it got them. For one group that is the state dict's
    order; for several groups the optimizer needs named parameters, whose names it keeps.
    """
    groups = optimizer["param_groups"]
    keys = [key for key in state if not key.endswith(BUFFERS)]
    numbers = [(number, group) for group in groups for number in group["params"]]
    if all("param_names" in group for group in groups):
        plain = unwrapped(keys)
        told = [unwrapped([name]).popitem()[0] for group in groups for name in group["param_names"]]
        keys = [plain.get(name, name) for name in told]
    elif len(groups) > 1:
        raise SlurmGPUError(
            f"{path}: the optimizer has {len(groups)} parameter groups without parameter names, so its state cannot be "
            f"matched to the model. Train with an optimizer made from model.named_parameters(), or set precondition "
            f'to "none".'
        )
    if len(keys) != len(numbers) or not set(keys) <= state.keys():
        raise SlurmGPUError(
            f"{path}: the optimizer has {len(numbers)} parameters, and the model {len(keys)}; expected the same ones. "
            f'Set precondition to "none".'
        )
    return {key: (optimizer["state"].get(number), group) for key, (number, group) in zip(keys, numbers, strict=True)}


def _canonical(tensor: Tensor, name: str, layout: Layout) -> Tensor:
    """A tensor in the shape that its canonical name has."""
    import torch

    if name == "bias":
        return tensor.reshape(-1)
    if layout.complex_pairs:
        return torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1)
    return tensor


def read_content(path: str | Path) -> Mapping[str, Any]:
    """A checkpoint's content, read by PyTorch; tensors and plain values only."""
    import torch

    try:
        if peek(path) is None:
            content = torch.load(path, map_location="cpu", weights_only=True)
        else:
            # As strict as `weights_only`, for every pickle protocol: PyKEEN's save_state uses another one.
            reader = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler)
            content = torch.load(path, map_location="cpu", weights_only=False, mmap=True, pickle_module=reader)
    except pickle.UnpicklingError as error:
        raise SlurmGPUError(refusal(path, "objects of other classes than tensors")) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}".splitlines()[0]) from error
    if not isinstance(content, Mapping):
        raise SlurmGPUError(refusal(path, f"a {type(content).__name__}"))
    return content


class _Unpickler(pickle.Unpickler):
    """Resolves the names that `peek` knows; torch.load resolves those of storages."""

    def find_class(self, module: str, name: str) -> Any:
        """The object of a name in the file; UnpicklingError for an unknown one."""
        if f"{module}.{name}" in STAND_INS:
            return STAND_INS[f"{module}.{name}"]
        if f"{module}.{name}" in FUNCTIONS or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")
