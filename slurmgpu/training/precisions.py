"""Switch TensorFloat-32 by either of PyTorch's two interfaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def tensor_float_32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for fp32 multiplications and convolutions; restore the settings afterwards.

    torch 2.9 added `fp32_precision`; once a program uses it, the older getters raise RuntimeError. The older setters
    set both. torch.compile needs that, since it calls the older getters.
    """
    newer = [(module, module.fp32_precision) for module in _modules()]
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


def _modules() -> list[Any]:
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
