"""The environment of a worker: Python, packages, shared memory, image, kernel. Standard library only, and quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TypedDict

import slurmgpu

PACKAGES = ("numpy", "h5py", "torch", "transformers", "accelerate", "peft", "llguidance", "vllm")
"""Distributions whose versions explain results and failures."""


class Surroundings(TypedDict, total=False):
    """The environment that a worker found; empty until then."""

    python: str
    executable: str
    packages: dict[str, str]
    used: dict[str, str]
    shm_bytes: int | None
    shm_free_bytes: int | None
    image: str | None
    kernel: str
    libc: str | None


def describe(image: str | None = None) -> Surroundings:
    """Python, versions of installed packages, /dev/shm, kernel, C library and the given `image`; nothing is imported.

    A package that is not installed is absent; `shm_*` are None without /dev/shm.
    """
    shm = _shared_memory()
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "packages": {**installed(PACKAGES), "slurmgpu": slurmgpu.__version__},
        "used": used(),
        "shm_bytes": shm[0],
        "shm_free_bytes": shm[1],
        "image": image,
        "kernel": os.uname().release,
        "libc": _libc(),
    }


def used() -> dict[str, str]:
    """The versions of the packages that this process has imported."""
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES}
    return {name: str(version) for name, version in versions.items() if isinstance(version, str)}


def installed(names: Sequence[str]) -> dict[str, str]:
    """The versions of the installed ones among these distributions, by name.

    From the names of *.dist-info, which takes 0.3 ms; importlib.metadata takes 15 ms.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue  # a zip archive, or missing
        for entry in entries:
            stem, dot, suffix = entry.rpartition(".")
            if dot and suffix in ("dist-info", "egg-info"):
                name, _, rest = stem.partition("-")
                name = name.lower().replace("_", "-")
                if name in names and rest:
                    found.setdefault(name, rest.partition("-py")[0])
    return {name: found[name] for name in names if name in found}


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _libc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        return None  # another C library than glibc
