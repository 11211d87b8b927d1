"""Dot products in reduced precisions (tf32, bf16, fp16), and their errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from slurmgpu.influence.parts import Multiply, exactly

Precision = Literal["fp32", "fp64", "tf32", "bf16", "fp16"]


def multiply_for(precision: Precision) -> Multiply:
    """The multiplication in this precision. The factors' dtype distinguishes fp32 and fp64."""
    return {"fp32": exactly, "fp64": exactly, "tf32": _tf32, "bf16": _bf16, "fp16": _fp16}[precision]


@contextmanager
def matmul_precision(value: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Multiply float32 on CUDA devices exactly ("ieee") or in tf32, PyTorch's default for convolutions."""
    if not torch.cuda.is_available():
        yield
        return
    before = _set_precision(value, value)
    try:
        yield
    finally:
        _set_precision(*before)


def errors(exact: Tensor, reduced: Tensor) -> tuple[Tensor, Tensor]:
    """The relative error of each row (n, m), and the share of its ten largest values that remain among the ten."""
    scale, difference = (values.double().norm(dim=1) for values in (exact, reduced - exact))
    error = (difference / scale.where(scale > 0, 1)).to(exact.dtype)
    n_top = min(10, exact.shape[1])
    top = [values.topk(n_top, dim=1).indices for values in (exact, reduced)]
    same = (top[0][:, :, None] == top[1][:, None, :]).any(2)
    return error, same.to(exact.dtype).mean(1)


def _tf32(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        with matmul_precision("tf32"):
            return a @ b.T
    return _rounded(a) @ _rounded(b).T


def _rounded(values: Tensor) -> Tensor:
    """The values rounded to tf32's 10 bits of mantissa, as a tensor core gets them."""
    bits = values.float().contiguous().view(torch.int32)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
    return rounded.view(torch.float32).to(values.dtype)


def _bf16(a: Tensor, b: Tensor) -> Tensor:
    halves = a.bfloat16(), b.bfloat16()
    return (_summed_in_float32(*halves) if _has_float32_sums(a) else halves[0] @ halves[1].T).to(a.dtype)


def _fp16(a: Tensor, b: Tensor) -> Tensor:
    """Scale each row to at most 1 first, so that large rows do not overflow and small ones do not vanish.

    Sums are in float32: in float16, a sum of more than 65,504 products may overflow. Where PyTorch cannot sum
    float16 products in float32, the products are tf32's, which has as many bits of mantissa.
    """
    a_largest, b_largest = _largest(a), _largest(b)
    halves = (a / a_largest).half(), (b / b_largest).half()
    found = _summed_in_float32(*halves) if _has_float32_sums(a) else _tf32(*(half.float() for half in halves))
    return found.to(a.dtype).mul_(a_largest).mul_(b_largest.T)


def _has_float32_sums(values: Tensor) -> bool:
    return values.is_cuda and hasattr(torch.ops.aten.mm, "dtype")


def _summed_in_float32(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.T, out_dtype=torch.float32)


def _largest(values: Tensor) -> Tensor:
    found = values.abs().amax(1, keepdim=True)
    return found.where(found > 0, found.new_ones(()))


def _set_precision(matmul: str, convolution: str) -> tuple[str, str]:
    """Set both precisions, and return the former ones."""
    of_matmul, of_convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(of_matmul, "fp32_precision"):
        before = of_matmul.fp32_precision, of_convolution.conv.fp32_precision
        of_matmul.fp32_precision, of_convolution.conv.fp32_precision = matmul, convolution
        return before
    # PyTorch before 2.9 has two switches, which must not be mixed with the newer ones.
    before = "tf32" if of_matmul.allow_tf32 else "ieee", "tf32" if of_convolution.allow_tf32 else "ieee"
    of_matmul.allow_tf32, of_convolution.allow_tf32 = matmul == "tf32", convolution == "tf32"
    return before
