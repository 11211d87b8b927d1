"""The kernels of sampling.cu, which draw the tokens of `sampling` on a GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.interface.cuda_kernels import Kernel, compile_kernels
from slurmgpu.llm.interface.sampling_rules import Rules

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_name("sampling.cu")
NAMES = ("scan", "settle")
N_PARTS, PART_THREADS = 16, 256
"""The blocks for each row's tokens, and their threads."""
ROW_THREADS = 1024


@dataclass(frozen=True)
class Kernels:
    """The kernels by name, for logits in float32 and in bfloat16."""

    of_32: Mapping[str, Kernel]
    of_16: Mapping[str, Kernel]
    part_threads: int = PART_THREADS
    row_threads: int = ROW_THREADS

    def draw(self, logits: Tensor, rules: Rules, positions: Tensor) -> Tensor:
        """The next token of each row, as in `sampling.choose`: (row,), from `logits`: (row, token)."""
        import torch

        is_16 = logits.dtype is torch.bfloat16
        kernels, logits = (self.of_16, logits) if is_16 else (self.of_32, logits.float())
        logits = logits.contiguous()
        n_rows, n_tokens = logits.shape
        given = rules.temperature.contiguous(), rules.keys.contiguous(), positions.contiguous()
        limits = rules.top_k.contiguous(), rules.top_p.contiguous(), rules.min_p.contiguous()
        parts = torch.empty(3, n_rows, N_PARTS, dtype=torch.int64, device=logits.device)
        best, most, masses = parts[0], parts[1], parts[2].view(torch.float64)
        tokens = torch.empty(n_rows, dtype=torch.int64, device=logits.device)
        blocks = N_PARTS, n_rows
        kernels["scan"](blocks, self.part_threads, logits, n_tokens, *given, *limits[:2], best, most, masses)
        blocks, found = (n_rows, 1), (best, most, masses, tokens)
        kernels["settle"](blocks, self.row_threads, logits, n_tokens, N_PARTS, *given, *limits, *found)
        return tokens


def make_kernels(device: Any) -> Kernels:
    """The kernels, compiled for a device; RuntimeError or OSError if that is impossible."""
    source = SOURCE.read_text(encoding="utf-8")

    def compiled(n_bits: int) -> dict[str, Kernel]:
        return dict(zip(NAMES, compile_kernels(source, NAMES, options(n_bits), device), strict=True))

    return Kernels(compiled(32), compiled(16))


def options(n_bits: int, part_threads: int = PART_THREADS, row_threads: int = ROW_THREADS) -> list[str]:
    """The compiler's options for logits of `n_bits`, and blocks of these sizes."""
    return [f"-DLOGIT_BITS={n_bits}", f"-DPART_THREADS={part_threads}", f"-DROW_THREADS={row_threads}"]
