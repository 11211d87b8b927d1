"""What an error says of memory: whether more of it, or a smaller batch, would help."""

from __future__ import annotations

MEMORY_TEXTS = ("CUDA out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cannot allocate memory")
"""What PyTorch says when memory is not enough; OutOfMemoryError is the allocator's own error on GPUs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may help; told by name, since importing torch is the workload's affair."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and (any(words in text for words in MEMORY_TEXTS)))
    )
