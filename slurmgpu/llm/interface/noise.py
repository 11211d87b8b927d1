"""Random numbers that depend only on a sample's key, a token's position and its id.

The number for token t is a SplitMix64 hash (Steele, Lea and Flood 2014) of (key, position, t) as standard Gumbel noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = 2**64 - 1
NOISE_BITS = 40
GREATEST = 1 - 2.0**-24
"""The largest float32 below 1; at 1 the noise would be infinite."""
TILE = 1 << 15
"""The count of numbers that a CPU core computes at a time, 20 bytes each: more would not stay in its cache."""
GPU_TILE = 1 << 22


def splitmix(number: int) -> int:
    """The output of SplitMix64 for this state."""
    z = (number + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def add_noise(logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """The logits, (row, token), plus independent standard Gumbel noise; float32.

    `keys` and `positions` (row,) determine the noise. It is computed in place, in blocks that fit the cache.
    """
    import torch

    n_rows, n_tokens = logits.shape
    device = logits.device
    streams = _splitmix(_splitmix(keys) + positions * _signed(GOLDEN))
    # Token t's state is its stream's plus (t + 1) * GOLDEN, to which SplitMix64 adds another GOLDEN.
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
            # float32 is dense near 0 and not near 1, so a small u wins. The value is negative from here on.
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
    """The numbers shifted to the right as unsigned integers, in `out`."""
    import torch

    # PyTorch's >> keeps the sign.
    torch.bitwise_right_shift(numbers, n_bits, out=out)
    return out.bitwise_and_((1 << (64 - n_bits)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
