"""TensorFloat-32 in multiplications and convolutions, switched by whichever of PyTorch's two interfaces there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def tensor_float_32(allowed: bool) -> Iterator[None]:
    """Where fp32 is computed in TF32, or is not; afterwards as before.

    Since torch 2.9 there is `fp32_precision`, and where a program has used it the older getters raise a RuntimeError.
    The older setters set both, which torch.compile needs: it asks the older getters.
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
    """What has `fp32_precision`, of all that the older setters set."""
    backends = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return []
    return [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]


def _asked(getter: Any) -> Any:
    """What an older getter says; None where it refuses to, since the newer interface has been used."""
    try:
        return getter()
    except RuntimeError:
        return None
