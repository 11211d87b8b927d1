"""Floating-point operations of a step, and peak rates of GPUs."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker

from slurmgpu.errors import SlurmGPUError

_TERAFLOPS = """
    gb200 2500 1250 80, b300 2250 1120 75, b200 2250 1120 75,
    gh200 990 494 67, h200 989 494 67, h200_nvl 835 417 60, h100 989 494 67, h100_pcie 756 378 51, h100_nvl 835 417 60,
    h800 989 494 67, h800_pcie 756 378 51, h20 148 74 44,
    a100 312 156 19.5, a800 312 156 19.5, a40 149.7 74.8 37.4, a30 165 82 10.3, a10 125 62.5 31.2, a10g 70 35 35,
    a2 18 9 4.5, a6000 154.8 77.4 38.7, a5000 111.1 55.6 27.8,
    l40s 362 183 91.6, l40 181 90.5 90.5, l4 121 60 30.3,
    rtx_pro_6000 503.8 251.9 125.9, rtx_6000_ada 364.2 182.1 91.1, 5090 209.5 104.8 104.8, 4090 165.2 82.6 82.6,
    3090 71 35.6 35.6, t4 65 - 8.1, v100 125 - 15.7, v100_pcie 112 - 14, v100s 130 - 16.4, p100 - - 9.3,
    rtx_6000 130.5 - 16.3, rtx6000 130.5 - 16.3, 2080_ti 53.8 - 13.4, titan_rtx 130.5 - 16.3,
    mi300x 1307 653.7 163.4, mi325x 1307 653.7 163.4, mi250 181 45.3 45.3, mi250x 191.5 47.9 47.9
"""

PEAK_TERAFLOPS = {name: tuple(peaks) for name, *peaks in map(str.split, _TERAFLOPS.split(","))}
"""TFLOP/s by words in a GPU's name: with 16 bits, in TF32, with 32 bits; "-" if unsupported.

Dense, with 32-bit accumulation, from the data sheets of NVIDIA and AMD. A name without "pcie" or "nvl" is the SXM
board; an MI250 has two GPUs, and this is one of them.
"""

_COLUMN = {"bf16": 0, "fp16": 0, "tf32": 1, "fp32": 2}
_PARTS = ("mig", "laptop", "max")
"""Words for reduced GPUs: a slice, a mobile GPU, one with less power (Max-Q)."""


def peak_flops(gpu: str, precision: str) -> float | None:
    """Peak FLOP/s of a GPU by its name from torch.cuda.get_device_name; None if unknown.

    `precision` is "fp32", "tf32", "bf16" or "fp16", else SlurmGPUError. MIG slices and CPUs are unknown.
    """
    if precision not in _COLUMN:
        raise SlurmGPUError(f"precision is {precision!r}; expected one of {', '.join(map(repr, _COLUMN))}.")
    name = re.sub(r"[^a-z0-9]+", "_", gpu.lower())
    known = [key for key in PEAK_TERAFLOPS if all(_has(name, word) for word in key.split("_"))]
    if not known or any(_has(name, word) for word in _PARTS):
        return None
    peaks = PEAK_TERAFLOPS[max(known, key=len)]
    peak = peaks[_COLUMN[precision]]
    # NVIDIA introduced TF32 and bfloat16 together, with Ampere.
    return None if peak == "-" or (precision == "bf16" and peaks[1] == "-") else float(peak) * 1e12


def _has(name: str, word: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){word}(?![a-z0-9])", name) is not None


def count_flops(fn: Callable[[], object]) -> float:
    """The floating-point operations of products, convolutions and attention in `fn()`, including backward passes.

    Those that gradient checkpointing computes again do not count, as in MFU. Counted by torch.utils.flop_counter.
    Compiled code runs uncompiled here, since kernels cannot be inspected.
    """
    eager = getattr(torch.compiler, "set_stance", None)  # torch 2.6
    with (
        warnings.catch_warnings(),
        eager("force_eager") if eager else contextlib.nullcontext(),
        FlopCounterMode(display=False, custom_mapping=_once(flop_registry)) as counter,
    ):
        # The counter's hooks run twice then; that affects names of modules, not the sum.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        fn()
    return float(counter.get_total_flops())


def _once(formulas: dict[Any, Callable[..., int]]) -> dict[Any, Callable[..., int]]:
    """Formulas that are 0 while activations are computed again."""
    tracker = ModuleTracker()  # not entered: it says whether a backward pass runs

    def counted(formula: Callable[..., int]) -> Callable[..., int]:
        def count(*arguments: Any, out_val: Any = None, **named: Any) -> int:
            is_again = tracker.is_bw and torch.is_grad_enabled() and _is_checkpointed()
            return 0 if is_again else formula(*arguments, out_val=out_val, **named)

        count._get_raw = True  # type: ignore[attr-defined]  # it takes tensors, as the registered formulas do
        return count

    return {operation: counted(formula) for operation, formula in formulas.items()}


def _is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint has called this."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None
