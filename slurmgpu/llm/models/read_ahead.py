"""Read weights into the page cache with large sequential reads, once per node; loading makes many small reads.

Processes that load the same model on a node take a lock in the node's temporary folder, so that only the first one
reads from a slow shared file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slurmgpu.util.cgroups import memory_left
from slurmgpu.util.own_files import why_not_own
from slurmgpu.util.regular_files import UnusableFileError
from slurmgpu.util.shared_files import list_names

log = logging.getLogger(__name__)

BLOCK_BYTES = 16 * 1024 * 1024
N_READERS = 4
"""The number of files that are read at once, to use the bandwidth of a parallel file system."""

MOST_OF_MEMORY = 0.7
"""The share of free memory that files may fill; larger ones would evict each other."""

FRESH_S = 600.0
"""The time for which read files count as cached."""


def read_ahead(folder: Path) -> None:
    """Read the safetensors files of a folder unless a process on this node just did; never fails."""
    try:
        names = list_names(folder) if folder.is_dir() else []
        files = sorted((folder / name).resolve() for name in names if name.endswith(".safetensors"))
        if files and _fits(files):
            with _turn(folder) as lock:
                _read_once(files, lock)
    except OSError as error:
        log.info("not reading the weights in %s ahead: %s", folder, error)


def _fits(files: list[Path]) -> bool:
    total, left = sum(path.stat().st_size for path in files), memory_left()
    if left is not None and total > MOST_OF_MEMORY * left:
        log.info("not reading %.1f GB of weights ahead: only %.1f GB of memory are free", total / 1e9, left / 1e9)
        return False
    return True


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[int]:
    """Lock the model in `folder` on this node; yields the lock file, whose content the next process reads."""
    name = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=12).hexdigest()
    path = f"{tempfile.gettempdir()}/slurmgpu-reads-{os.getuid()}-{name}"
    # O_NOFOLLOW: another user could place a link with that name.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        status = os.fstat(lock)
        if why := why_not_own(status, Path(tempfile.gettempdir())):  # who could hold the lock for ever
            raise UnusableFileError(path, why)
        if status.st_nlink > 1:  # another user may have linked a file of this user's, which would be overwritten
            raise UnusableFileError(path, "it has another name as well")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def _read_once(files: list[Path], lock: int) -> None:
    what = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    if _was_read(lock, what):
        log.info("another process on this node has read the weights ahead")
        return
    started = time.monotonic()
    with ThreadPoolExecutor(N_READERS) as readers:
        total = sum(readers.map(_read, files))
    seconds = time.monotonic() - started
    log.info("read %.2f GB of weights in %.1f s, %.2f GB/s", total / 1e9, seconds, total / 1e9 / max(seconds, 1e-6))
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({"files": what, "at": time.monotonic()}).encode(), 0)


def _was_read(lock: int, what: list[Any]) -> bool:
    try:
        said = json.loads(os.pread(lock, 1 << 20, 0))
        # The monotonic clock restarts with the node.
        return bool(said["files"] == what and 0 <= time.monotonic() - said["at"] < FRESH_S)
    except (ValueError, KeyError, TypeError):
        return False


def _read(path: Path) -> int:
    total, block = 0, bytearray(BLOCK_BYTES)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while n_bytes := os.readv(fd, [block]):
            total += n_bytes
    finally:
        os.close(fd)
    return total
