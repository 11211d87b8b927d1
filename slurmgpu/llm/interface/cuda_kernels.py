"""Kernels in CUDA C++, compiled by NVRTC: that is part of PyTorch with CUDA, so that no compiler is needed.

The functions are those of NVRTC and of the CUDA driver API: https://docs.nvidia.com/cuda/nvrtc/ and
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
"""A kernel, called with its blocks (x, y), the threads of a block, and its arguments: tensors and ints of 32 bits."""


def compile_kernels(source: str, names: Sequence[str], options: Sequence[str], device: Any) -> list[Kernel]:
    """The kernels of these names in the source, for a device; RuntimeError, or OSError without NVRTC."""
    import torch

    # PyTorch's own way to NVRTC and to the driver, which it finds wherever PyTorch is installed.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # so that there is a context
        major, minor = torch.cuda.get_device_capability()
        image = _compile(library, source, [f"--gpu-architecture=sm_{major}{minor}", *options])
        module = ctypes.c_void_p()
        _check_driver(library, library.cuModuleLoadData(ctypes.byref(module), image))
        return [_kernel(library, module, name, device) for name in names]


def _compile(library: ctypes.CDLL, source: str, options: Sequence[str]) -> ctypes.Array[ctypes.c_char]:
    """The machine code of a source."""
    program = ctypes.c_void_p()
    arguments = source.encode(), b"kernels.cu", 0, None, None
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), *arguments))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            said = _bytes_of(library, program, "ProgramLog").value.decode(errors="replace")
            raise RuntimeError(f"NVRTC compiles no kernel: {said.strip()}")
        return _bytes_of(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes_of(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> ctypes.Array[ctypes.c_char]:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    found = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, found))
    return found


def _kernel(library: ctypes.CDLL, module: ctypes.c_void_p, name: str, device: Any) -> Kernel:
    import torch

    function = ctypes.c_void_p()
    _check_driver(library, library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))

    def launch(blocks: tuple[int, int], n_threads: int, *arguments: Tensor | int) -> None:
        values = [
            ctypes.c_int(each) if isinstance(each, int) else ctypes.c_void_p(each.data_ptr()) for each in arguments
        ]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            code = library.cuLaunchKernel(function, *blocks, 1, n_threads, 1, 1, 0, stream, places, None)
        _check_driver(library, code)

    return launch


def _check(library: ctypes.CDLL, code: int) -> None:
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {library.nvrtcGetErrorString(code).decode()}")


def _check_driver(library: ctypes.CDLL, code: int) -> None:
    if code:
        said = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(said))
        # As PyTorch says it, so that a lost context is known as one.
        raise RuntimeError(f"CUDA error: {(said.value or str(code).encode()).decode()}")
