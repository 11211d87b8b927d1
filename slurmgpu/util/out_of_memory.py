"""Tell errors of too little memory, of a GPU or of the host, after which more memory or a smaller batch may help."""

from __future__ import annotations

import gc
import sys

from slurmgpu.util.exceptions import message_of

GPU_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "_STATUS_ALLOC_FAILED",
    "_DEVICE_ALLOCATION_FAILED",
    "CUFFT_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED: Out of memory",
)
"""Messages of PyTorch's allocator, CUDA, CUDA's libraries and JAX if the memory of a GPU is not enough.

CUDA itself needs memory that the allocator may hold, for example to load a kernel on its first use
(cudaErrorMemoryAllocation). Its context is not lost.
"""
HOST_TEXTS = ("can't allocate memory", "Cannot allocate memory")
"""PyTorch's messages if the memory of the host is not enough."""
MEMORY_TEXTS = (*GPU_TEXTS, *HOST_TEXTS)


class OutOfMemoryError(MemoryError):
    """The memory of a GPU is not enough; named like PyTorch's error, as only workloads import PyTorch."""


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Whether the memory of a GPU is not enough, by the error's name: PyTorch's, CuPy's or slurmgpu's."""
    return type(error).__name__ == "OutOfMemoryError" or _is_runtime_error_with(GPU_TEXTS, error)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether the memory of the host is not enough: MemoryError, or an error of PyTorch's allocator for CPUs."""
    is_host = isinstance(error, MemoryError) or _is_runtime_error_with(HOST_TEXTS, error)
    return is_host and not is_out_of_gpu_memory(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may help."""
    return is_out_of_gpu_memory(error) or is_out_of_host_memory(error)


def _is_runtime_error_with(texts: tuple[str, ...], error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in message_of(error) for words in texts)


def free_memory() -> None:
    """Free unreferenced memory, also what PyTorch's allocator caches, if PyTorch is imported."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
