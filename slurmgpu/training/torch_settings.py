"""PyTorch's settings that hold for the whole process: threads, deterministic algorithms, TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from slurmgpu.training.settings import TrainingSettings


@contextlib.contextmanager
def torch_settings(settings: TrainingSettings) -> Iterator[None]:
    """Configure PyTorch by the settings; restore its configuration for the next one afterwards."""
    threads = torch.get_num_threads()
    deterministic, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = torch.backends.cudnn.benchmark
    try:
        with _tensor_float_32(settings.precision != "fp32"):
            if settings.threads is not None:
                torch.set_num_threads(settings.threads)
            if settings.deterministic:
                torch.backends.cudnn.benchmark = False
                torch.use_deterministic_algorithms(True)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def _tensor_float_32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for fp32 multiplications and convolutions; restore the settings afterwards.

    torch 2.9 added `fp32_precision`; once a program uses it, the older getters raise RuntimeError. The older setters
    set both. torch.compile needs that, since it calls the older getters.
    """
    newer = [(module, module.fp32_precision) for module in _tf32_modules()]
    matmul, cudnn = _asked(torch.get_float32_matmul_precision), _asked(lambda: torch.backends.cudnn.allow_tf32)
    try:
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed
        for module, _ in newer:
            module.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            torch.backends.cudnn.allow_tf32 = cudnn
        for module, before in newer:
            module.fp32_precision = before


def _tf32_modules() -> list[Any]:
    """The modules with `fp32_precision` that the older setters affect."""
    backends = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return []
    return [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]


def _asked(getter: Any) -> Any:
    """The result of an older getter; None if it refuses because the newer interface is in use."""
    try:
        return getter()
    except RuntimeError:
        return None
