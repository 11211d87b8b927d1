"""Random numbers that depend only on a sample's key and on a token's place and number.

The number of token t is a hash of (key, place, t) by SplitMix64 (Steele, Lea and Flood 2014), as standard Gumbel noise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slurmgpu.util.exceptions import message_of

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Kernel = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = 2**64 - 1
NOISE_BITS = 40
GREATEST = 1 - 2.0**-24
"""The largest float32 below 1, where the noise would be infinite."""
TILE = 1 << 15
"""Numbers that a CPU's core computes at a time, 20 bytes each: more would not stay in its cache."""
GPU_TILE = 1 << 22
KERNEL = """
template <typename T> T splitmix(T number) {
  T z = number + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
template <typename T> T gumbel_of_two(T key, T position, T pair) {
  typedef unsigned long long U;
  const U golden = 0x9E3779B97F4A7C15ull;
  const U stream = splitmix(splitmix((U)key) + (U)position * golden);
  U found = 0;
  for (int i = 0; i < 2; ++i) {
    U number = splitmix(stream + (2 * (U)pair + i + 1) * golden) >> 24;
    float u = fminf(((float)number + 0.5f) * 0x1p-40f, 0x1.fffffep-1f);
    found |= (U)__float_as_uint(-logf(-log1pf(-u))) << (32 * i);
  }
  return (T)found;
}
"""
"""The numbers of two tokens, in C++ for CUDA. T is int64: all that PyTorch passes is of one type."""
OFF = 1e-5
"""How far they may be from those of PyTorch's own operations: logarithms round."""
_kernels: dict[Any, Kernel | None] = {}


def splitmix(number: int) -> int:
    """The number that SplitMix64 gives from this state."""
    z = (number + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def add_noise(logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """The logits, (row, token), and an independent standard Gumbel number for each; float32.

    `keys` and `positions` (row,) say which numbers.
    """
    import torch

    kernel = _kernel_of(logits.device)
    if kernel is None:
        return _add_in_tiles(logits, keys, positions)
    found = _by_kernel(kernel, keys, positions, logits.shape[-1])
    return torch.add(logits, found, out=found)


def prepare(device: Any) -> None:
    """Compile and check the kernel of a device, which no capture of a CUDA graph may do."""
    if device.type == "cuda" and device not in _kernels:
        _kernels[device] = _checked(_make_kernel, device)


def _kernel_of(device: Any) -> Kernel | None:
    """The kernel that computes the noise in one pass on this device; None if there is none."""
    import torch

    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        prepare(device)
    return _kernels.get(device)


def _make_kernel() -> Kernel:
    """KERNEL, compiled by NVRTC, which is part of PyTorch with CUDA, and needs no compiler and no Triton."""
    from torch.cuda.jiterator import _create_jit_fn

    made: Kernel = _create_jit_fn(KERNEL)
    return made


def _checked(make: Callable[[], Kernel], device: Any) -> Kernel | None:
    """A kernel whose numbers are those of PyTorch's own operations; None, and a line in the log, if there is none."""
    import torch

    keys, n_tokens = torch.arange(8, device=device), 4097
    try:
        kernel = make()
        found = _by_kernel(kernel, keys, 7 * keys, n_tokens)
        off = float((found - _add_in_tiles(torch.zeros_like(found), keys, 7 * keys)).abs().max())
    except Exception as error:  # NVRTC's, or that of a PyTorch with another interface
        log.warning(
            "random numbers take many kernels: %s", f"{type(error).__name__}: {message_of(error)[-200:].strip()}"
        )
        return None
    if not off <= OFF:
        log.warning("random numbers take many kernels: those of one are off by %.2g", off)
        return None
    log.info("random numbers by one kernel, %s", f"off by {off:.2g}" if off else "with the same bits")
    return kernel


def _by_kernel(kernel: Kernel, keys: Tensor, positions: Tensor, n_tokens: int) -> Tensor:
    import torch

    pairs = torch.arange((n_tokens + 1) // 2, device=keys.device)
    return kernel(keys[:, None], positions[:, None], pairs[None]).view(torch.float32)[:, :n_tokens]


def _add_in_tiles(logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """The sum by PyTorch's own operations, in place, on so many numbers at a time as a cache holds."""
    import torch

    n_rows, n_tokens = logits.shape
    device = logits.device
    streams = _splitmix(_splitmix(keys) + positions * _signed(GOLDEN))
    # Token t is hashed from the state (t + 1) * GOLDEN behind its stream's, to which SplitMix64 adds another one.
    steps = torch.arange(2, n_tokens + 2, device=device) * _signed(GOLDEN)
    found = torch.empty(n_rows, n_tokens, device=device)
    size = TILE * torch.get_num_threads() if device.type == "cpu" else GPU_TILE
    width = max(1, min(n_tokens, size))
    height = max(1, min(n_rows, size // width))
    memory = torch.empty(2, height * width, dtype=torch.int64, device=device)
    floats = torch.empty(height * width, device=device)
    for first in range(0, n_rows, height):
        rows = slice(first, first + height)
        for start in range(0, n_tokens, width):
            tokens = slice(start, start + width)
            shape = found[rows, tokens].shape
            z, spare, u = (each[: shape.numel()].view(shape) for each in (*memory, floats))
            torch.add(streams[rows, None], steps[tokens], out=z)
            z.bitwise_xor_(_shift(z, 30, spare)).mul_(_signed(MIX_1))
            z.bitwise_xor_(_shift(z, 27, spare)).mul_(_signed(MIX_2))
            # The highest bits of z ^ (z >> 31).
            high = _shift(z, 64 - NOISE_BITS, spare)
            high.bitwise_xor_(torch.bitwise_right_shift(high, 31, out=z))
            # Small numbers are dense in float32, and numbers near 1 are not: small u wins. It is negative from here on.
            u.copy_(high).add_(0.5).mul_(-(2.0**-NOISE_BITS)).clamp_(min=-GREATEST)
            torch.sub(logits[rows, tokens], u.log1p_().neg_().log_(), out=found[rows, tokens])
    return found


def _splitmix(numbers: Tensor) -> Tensor:
    import torch

    z = numbers + _signed(GOLDEN)
    spare = torch.empty_like(z)
    z.bitwise_xor_(_shift(z, 30, spare)).mul_(_signed(MIX_1))
    z.bitwise_xor_(_shift(z, 27, spare)).mul_(_signed(MIX_2))
    return z.bitwise_xor_(_shift(z, 31, spare))


def _shift(numbers: Tensor, n_bits: int, out: Tensor) -> Tensor:
    """The numbers shifted to the right as unsigned ones, in `out`."""
    import torch

    # PyTorch's >> keeps the sign.
    torch.bitwise_right_shift(numbers, n_bits, out=out)
    return out.bitwise_and_((1 << (64 - n_bits)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
