"""Whether an error is about memory, so that more of it, or a smaller batch, may help."""

from __future__ import annotations

from slurmgpu.util.exceptions import message_of

MEMORY_TEXTS = ("CUDA out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cannot allocate memory")
"""PyTorch's messages if memory is not enough; OutOfMemoryError is its allocator's error on GPUs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may help; by the error's name, as only the workload imports torch."""
    text = message_of(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and (any(words in text for words in MEMORY_TEXTS)))
    )
