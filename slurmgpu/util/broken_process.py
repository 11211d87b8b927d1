"""Whether an error leaves its process unable to compute what comes next, so that another process has to."""

from __future__ import annotations

import errno
from concurrent.futures import BrokenExecutor

from slurmgpu.util.exceptions import message_of

NO_FILES = "Too many open files"
"""What EMFILE is called, also by PyTorch and HDF5, whose errors have no number."""


def is_broken(error: BaseException) -> bool:
    """Whether all later calls in this process may fail: as its CUDA context, a pool of processes or its files do."""
    return is_broken_cuda(error) or isinstance(error, BrokenExecutor) or is_out_of_files(error)


def is_broken_cuda(error: BaseException) -> bool:
    """Whether the CUDA context is lost, e.g. by a device-side assert: all later calls in this process fail."""
    return type(error).__name__ == "AcceleratorError" or (
        isinstance(error, RuntimeError) and message_of(error).startswith("CUDA error:")
    )


def is_out_of_files(error: BaseException) -> bool:
    """Whether this process can open no more files, as it has not closed those that it has opened."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return True
    return isinstance(error, OSError | RuntimeError) and NO_FILES in message_of(error)
