"""Checkpoints of knowledge-graph models: what they hold, and its tensors by our names. Only the latter needs torch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.workloads.tracin.kge.contents import state_of
from slurmgpu.workloads.tracin.kge.layouts import Architecture, Layout, check, recognise
from slurmgpu.workloads.tracin.kge.naming import NO_PARAMETERS, Inverse, Stack, unwrapped
from slurmgpu.workloads.tracin.kge.peeking import DTYPES, FUNCTIONS, STAND_INS, damaged, peek, refusal, unreadable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Architecture",
    "Inverse",
    "Layout",
    "Stack",
    "adam_weights",
    "check",
    "expect_finite",
    "load_checkpoint",
    "peek_content",
    "read_content",
    "read_layout",
    "recognise",
    "state_of",
]

BUFFERS = (".running_mean", ".running_var", *NO_PARAMETERS)
"""Endings of names in a state dict that no optimizer has."""


def read_layout(
    path: str | Path,
    *,
    architecture: str = "auto",
    image: Sequence[int] | None = None,
    stack: str | None = None,
    norm: float | None = None,
) -> Layout:
    """Which model a checkpoint is, read by PyTorch where it must be."""
    content = peek_content(path)
    return recognise(content, path, architecture=architecture, image=image, stack=stack, norm=norm)


def peek_content(path: str | Path) -> Mapping[str, Any]:
    """What a checkpoint holds, with tensors or their stand-ins; read by PyTorch where it must be."""
    content = peek(path)
    if content is not None:
        return content
    try:
        return read_content(path)
    except ImportError as error:
        raise SlurmGPUError(
            f"{path} is in a format that only PyTorch can read, and it is not installed here. Install it, or save the "
            f"checkpoint again with a newer PyTorch."
        ) from error


def load_checkpoint(path: str | Path, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their canonical names, on the CPU; they may still lie in the file.

    A number in them that is none (NaN) is refused: it would be in every influence.
    """
    state = state_of(read_content(path), path)
    found = {}
    for name, key in layout.names.items():
        expect_finite(state[key], key, path)
        found[name] = _canonical(state[key].detach(), name, layout)
    return found


def expect_finite(values: Tensor, key: str, path: str | Path) -> None:
    """SlurmGPUError if a checkpoint's tensor has NaN or infinity: it would be in every influence."""
    if not values.isfinite().all():
        raise SlurmGPUError(f"{path}: {key} has values that are not finite. Take an earlier checkpoint.")


def adam_weights(path: str | Path, layout: Layout) -> dict[str, Tensor]:
    """Adam's diagonal 1 / (√v̂ + ε) for each trainable parameter, by its canonical name, in float64.

    v̂ is the second moment without its bias, as in torch.optim.Adam and AdamW, at the checkpoint's step.
    """
    content = read_content(path)
    optimizer = content.get("optimizer_state_dict")
    if not isinstance(optimizer, Mapping) or not optimizer.get("state"):
        raise SlurmGPUError(
            f"{path} has no optimizer_state_dict with a state, which Adam's weights are in. Set precondition to "
            f'"none", or take a checkpoint that was saved with it.'
        )
    state = state_of(content, path)
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


def _by_key(
    optimizer: Mapping[str, Any], state: Mapping[str, Any], path: str | Path
) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """The moments and the settings of each parameter, by its key in the state dict.

    An optimizer numbers parameters as it was given them. For one group that is the state dict's order; of several
    nothing but their names tells, which it keeps if it was given named parameters.
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
            f"{path}: the optimizer has {len(groups)} groups of parameters, and nothing tells which is which. Save it "
            f'made with model.named_parameters(), or set precondition to "none".'
        )
    if len(keys) != len(numbers) or not set(keys) <= state.keys():
        raise SlurmGPUError(
            f"{path}: expected the optimizer's {len(numbers)} parameters to be the model's, found {len(keys)} there. "
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
    """What a checkpoint holds, by PyTorch, of which nothing but tensors and plain values is read."""
    import torch

    try:
        if peek(path) is None:
            content = torch.load(path, map_location="cpu", weights_only=True)
        else:
            # What `weights_only` allows, and less; but in every protocol of pickle, as PyKEEN's save_state has another.
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
    """Knows the few names that `peek` knows; those of storages torch.load itself understands."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the file is."""
        if f"{module}.{name}" in STAND_INS:
            return STAND_INS[f"{module}.{name}"]
        if f"{module}.{name}" in FUNCTIONS or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")
