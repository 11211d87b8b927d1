"""Tell errors after which a process cannot compute any more, so that another process has to."""

from __future__ import annotations

import errno
import gc
import os
import threading
from concurrent.futures import BrokenExecutor

from slurmgpu.util.exceptions import message_of
from slurmgpu.util.forks import NO_THREADS

NO_HANDLE = "_STATUS_NOT_INITIALIZED"
"""In messages of cuBLAS, cuDNN and cuSOLVER if they could not start, e.g. for lack of memory; a new process can."""
NO_FILES = "Too many open files"
"""The text of EMFILE, also in errors of PyTorch and HDF5, which have no number."""
NEEDED_FILES = 16
"""How many more files a process must be able to open to be usable."""
LOST_CONTEXT = (
    *("an illegal memory access was encountered", "device-side assert triggered", "unspecified launch failure"),
    *("an illegal instruction was encountered", "the launch timed out and was terminated"),
    *("uncorrectable ECC error encountered", "cudaErrorMisalignedAddress", "CUDA_ERROR_MISALIGNED_ADDRESS"),
    *("cudaErrorHardwareStackError", "CUDA_ERROR_HARDWARE_STACK_ERROR"),
)
"""CUDA's texts of errors after which "the process must be terminated and relaunched" (cudaError_t in its manual).

Messages of Triton, CuPy and JAX contain them. Two texts are too common in English: their names are used instead.
"""


def is_broken(error: BaseException) -> bool:
    """Whether all later calls in this process may fail, because its CUDA context or a pool of processes is lost."""
    return is_broken_cuda(error) or isinstance(error, BrokenExecutor)


def is_broken_cuda(error: BaseException) -> bool:
    """Whether the CUDA context is lost, e.g. by a device-side assert: all later calls in this process fail."""
    if type(error).__name__ == "AcceleratorError":
        return True
    said = message_of(error) if isinstance(error, RuntimeError) else ""
    return said.startswith("CUDA error:") or any(text in said for text in (*LOST_CONTEXT, NO_HANDLE))


def says_used_up(error: BaseException) -> bool:
    """Whether the error says that the process could open no more files or start no more threads."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return True
    said = message_of(error)
    return isinstance(error, OSError | RuntimeError) and (NO_FILES in said or said == NO_THREADS)


def is_used_up() -> bool:
    """Whether the process still cannot open files or start threads after the failed call has returned."""
    gc.collect()
    files: list[int] = []
    try:
        files += (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(NEEDED_FILES))
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    except (OSError, RuntimeError):
        return True
    finally:
        for file in files:
            os.close(file)
    return False
