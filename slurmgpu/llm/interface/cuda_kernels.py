"""CUDA C++ kernels, compiled with NVRTC, which is part of PyTorch with CUDA, so no compiler is needed.

Uses functions of NVRTC and of the CUDA driver API: https://docs.nvidia.com/cuda/nvrtc/ and
https://docs.nvidia.com/cuda/cuda-driver-api/.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Kernel = Callable[..., None]
"""A kernel, called with its blocks (x, y), the threads of a block, and its arguments: tensors and 32-bit ints."""


def compile_kernels(source: str, names: Sequence[str], options: Sequence[str], device: Any) -> list[Kernel]:
    """The kernels with these names in the source, for a device; RuntimeError, or OSError without NVRTC."""
    import torch

    # PyTorch itself finds NVRTC through this library, wherever NVRTC is installed.
    nvrtc = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # creates a context
        major, minor = torch.cuda.get_device_capability()
        image = _compile(nvrtc, source, [f"--gpu-architecture=sm_{major}{minor}", *options])
        module = ctypes.c_void_p()
        _check_driver(driver, driver.cuModuleLoadData(ctypes.byref(module), image))
        return [_kernel(driver, module, name, device) for name in names]


def _compile(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> ctypes.Array[ctypes.c_char]:
    """The machine code of a source."""
    program = ctypes.c_void_p()
    arguments = source.encode(), b"kernels.cu", 0, None, None
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), *arguments))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            said = _bytes_of(nvrtc, program, "ProgramLog").value.decode(errors="replace")
            raise RuntimeError(f"NVRTC cannot compile the kernels: {said.strip()}")
        return _bytes_of(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes_of(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> ctypes.Array[ctypes.c_char]:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    found = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, found))
    return found


def _kernel(driver: ctypes.CDLL, module: ctypes.c_void_p, name: str, device: Any) -> Kernel:
    import torch

    function = ctypes.c_void_p()
    _check_driver(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))

    def launch(blocks: tuple[int, int], n_threads: int, *arguments: Tensor | int) -> None:
        values = [
            ctypes.c_int(each) if isinstance(each, int) else ctypes.c_void_p(each.data_ptr()) for each in arguments
        ]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            code = driver.cuLaunchKernel(function, *blocks, 1, n_threads, 1, 1, 0, stream, places, None)
        _check_driver(driver, code)

    return launch


def _check(nvrtc: ctypes.CDLL, code: int) -> None:
    if code:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")


def _check_driver(driver: ctypes.CDLL, code: int) -> None:
    if code:
        said = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(said))
        # Worded like PyTorch's errors, so that a lost context is recognised.
        raise RuntimeError(f"CUDA error: {(said.value or str(code).encode()).decode()}")
