"""The workload of `slurmgpu check --gpu`: exact products, and the faults that a GPU makes.

`faults/gpu_trial` plans the run and judges it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slurmgpu.faults.gpu_trial import OOM_BATCH, N, matrix
from slurmgpu.shards.columns import Array
from slurmgpu.workload import Item, Row, TaskContext

HELD_SHARE = 0.3
"""The share of the free memory that an item holds: OOM_BATCH of them fit, twice as many do not."""
KERNEL_CYCLES = 20_000_000_000
"""About ten seconds of GPU time; the worker is killed in the first of them."""
BROKEN = "CUDA error: {} (this is a CPU, which pretends it)"

STRAY_STORE = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry stray_store()
{
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 16;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
"""
"""PTX of a kernel that writes where nothing is allocated: PyTorch's own kernels check their indices."""


class Trial:
    """The first row of each item's matrix product with itself, and the faults that the items name.

    An item's `fault` is "oom" (all items of a call together need more memory than there is), "assert" (a device-side
    assert), "illegal" (an illegal address), "kill" (once, the worker dies by SIGKILL while a kernel runs), or "".
    With `faults` off, items are computed as if they named no fault. On a CPU the first three faults are simulated.
    """

    batch_size = 8

    def __init__(self, *, faults: bool = True) -> None:
        self.columns = {"product": Array("float32", (N,))}
        self.faults = faults

    def load(self, task: TaskContext) -> None:
        """Use the task's GPU, or the CPU; the free memory before is recorded in the shard's notes."""
        self._device: _Device = _CPU() if task.device == "cpu" else _GPU(task)
        self._killed = Path(task.run_dir) / "logs" / "killed"

    def __call__(self, items: Sequence[Item]) -> list[Row]:
        """A row for each item, unless a fault prevents it."""
        named = [str(item.data["fault"]) for item in items] if self.faults else []
        held = self._device.hold(named.count("oom"))
        if "assert" in named:
            self._device.fail_assert()
        if "illegal" in named:
            self._device.write_astray()
        if "kill" in named and not self._killed.exists():
            self._killed.touch()
            self._device.be_busy()
            os.kill(os.getpid(), signal.SIGKILL)
        rows: list[Row] = [{"product": self._device.product(matrix(item.index))} for item in items]
        del held
        return rows


class _Device(Protocol):
    def product(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...

    def hold(self, n_items: int) -> Any: ...

    def fail_assert(self) -> None: ...

    def write_astray(self) -> None: ...

    def be_busy(self) -> None: ...


class _GPU:
    def __init__(self, task: TaskContext) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(task.device)
        torch.cuda.set_device(self._device)
        self._task, self._free = task, torch.cuda.mem_get_info(self._device)[0]

    def product(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        self._task.note("free_mb", self._free >> 20)
        there = self._torch.from_numpy(values).to(self._device)
        found: npt.NDArray[np.float32] = (there @ there.T)[0].cpu().numpy()
        return found

    def hold(self, n_items: int) -> Any:
        size = int(HELD_SHARE * self._free)
        return [self._torch.empty(size, dtype=self._torch.uint8, device=self._device) for _ in range(n_items)]

    def fail_assert(self) -> None:
        few = self._torch.zeros(4, device=self._device)
        few[self._torch.tensor([1_000_000], device=self._device)].sum().item()

    def write_astray(self) -> None:
        self._torch.zeros(1, device=self._device).item()  # makes the context current in this thread
        cuda, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        _check(cuda.cuModuleLoadData(ctypes.byref(module), STRAY_STORE), "cuModuleLoadData")
        _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"stray_store"), "cuModuleGetFunction")
        one, none = ctypes.c_uint(1), ctypes.c_uint(0)
        _check(cuda.cuLaunchKernel(function, one, one, one, one, one, one, none, None, None, None), "cuLaunchKernel")
        self._torch.cuda.synchronize(self._device)

    def be_busy(self) -> None:
        self._torch.cuda._sleep(KERNEL_CYCLES)
        time.sleep(0.5)  # the kernel runs


class _CPU:
    def product(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = (values @ values.T)[0]
        return found

    def hold(self, n_items: int) -> Any:
        return bytearray(1 << 62) if n_items > OOM_BATCH else None

    def fail_assert(self) -> None:
        raise RuntimeError(BROKEN.format("device-side assert triggered"))

    def write_astray(self) -> None:
        raise RuntimeError(BROKEN.format("an illegal memory access was encountered"))

    def be_busy(self) -> None:
        pass


def _check(code: int, function: str) -> None:
    if code != 0:
        raise AssertionError(f"{function} failed with code {code}")
