"""Find and remove the shared memory of a process tree, which stays on the node if the processes are killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from slurmgpu.util.process_tree import living

FOLDER = Path("/dev/shm")
PREFIXES = ("psm_", "vllm_", "sem.mp-")
"""Names of shared memory: Python's `multiprocessing.shared_memory`, vLLM's own, and `multiprocessing`'s semaphores."""


def used_by(root: int) -> set[str]:
    """The names of the shared memory that a process and its descendants use."""
    inodes: set[int] = set()
    for pid in living(root):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue  # it has just ended
        # By inode: a semaphore is mapped by another name than it gets (sem_open of glibc).
        inodes.update(int(line.split()[4]) for line in lines if f" {FOLDER}/" in line)
    try:
        with os.scandir(FOLDER) as entries:
            return {each.name for each in entries if each.name.startswith(PREFIXES) and each.inode() in inodes}
    except OSError:
        return set()  # a node without it


def remove(names: Iterable[str]) -> None:
    """Remove shared memory by name; names that are gone are ignored."""
    for name in names:
        if name.startswith(PREFIXES) and "/" not in name:
            with contextlib.suppress(OSError):  # the process has removed it itself, or it is another user's by now
                (FOLDER / name).unlink()
