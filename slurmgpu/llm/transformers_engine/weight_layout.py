"""The order in which a model's weights lie in memory, on which the time of products of few rows depends."""

from __future__ import annotations

from typing import Any


def store_by_columns(model: Any) -> None:
    """Store the fp32 weights of a model's linear layers by columns where MKL multiplies, with their shapes and values.

    MKL reads a weight (output, input) that lies by rows against its order: with 8 rows of activations that takes up to
    twice as long, with 500 a few percent longer. Other types are multiplied by oneDNN, which gains nothing.
    """
    import torch

    if not torch.backends.mkl.is_available():
        return
    stored = set()
    for module in model.modules():
        # Layers of bitsandbytes and torchao, and weights with a class of their own, are left alone.
        if type(module) is torch.nn.Linear and type(module.weight) is torch.nn.Parameter:
            weight = module.weight
            if weight.dtype == torch.float32 and weight.is_contiguous():
                weight.data = weight.data.t().contiguous().t()
                stored.add(weight)
    # The others keep the whole checkpoint mapped, whose pages count as the task's.
    for each in model.parameters() if stored else ():
        if each not in stored and type(each) is torch.nn.Parameter:
            each.data = each.data.clone()
