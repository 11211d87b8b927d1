"""Settings of the C library's allocator for large blocks that are freed."""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers in glibc's malloc.h; see mallopt(3)."""
LARGEST_KEPT = 32 << 20
"""The largest threshold that glibc accepts: larger blocks always go back to the kernel."""
MOST_KEPT = 256 << 20


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MB of freed memory for its next blocks; with glibc only.

    Otherwise the activations of each layer of a model go back to the kernel, which has to zero their pages again for
    the next layer: a sixth of the CPU time of a small model.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
