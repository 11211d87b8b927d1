"""Choose PyTorch's kernels for the whole process."""

from __future__ import annotations


def choose_kernels(precision: str) -> None:
    """Keep fp32 in fp32, and attention off cuDNN.

    The environment may allow TF32, which has 10 of the 23 mantissa bits. On Hopper and Blackwell PyTorch prefers cuDNN
    for attention in 16 bits, which builds a plan for each new shape: 25 to 45 ms on an H200 with PyTorch 2.11, while a
    step with 1.5 billion parameters takes 10 ms. Batches differ in length, and a growing cache has a new shape at each
    token.
    """
    import torch

    if precision == "fp32":
        torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_cudnn_sdp(False)
