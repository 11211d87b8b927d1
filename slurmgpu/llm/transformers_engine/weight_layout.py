"""The memory layout of a model's weights, which determines the speed of products with few rows."""

from __future__ import annotations

from typing import Any


def store_by_columns(model: Any) -> None:
    """Store the fp32 weights of a model's linear layers by columns if MKL multiplies them; shapes and values stay.

    MKL reads a weight (output, input) stored by rows against its order: with 8 rows of activations that takes up to
    twice as long, with 500 a few percent longer. oneDNN multiplies other types, and gains nothing.
    """
    import torch

    if not torch.backends.mkl.is_available():
        return
    stored = set()
    for module in model.modules():
        # Skips layers of bitsandbytes and torchao, and weights with their own class.
        if type(module) is torch.nn.Linear and type(module.weight) is torch.nn.Parameter:
            weight = module.weight
            if weight.dtype == torch.float32 and weight.is_contiguous():
                weight.data = weight.data.t().contiguous().t()
                stored.add(weight)
    # The other weights keep the whole checkpoint mapped, and its pages count as the task's memory.
    for each in model.parameters() if stored else ():
        if each not in stored and type(each) is torch.nn.Parameter:
            each.data = each.data.clone()
