"""Check the surroundings of a worker: `python -m slurmgpu.worker.surroundings N_GPUS` prints them as JSON.

Standard library only, since it checks whether NumPy and h5py can be imported.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from slurmgpu.containers import image_name
from slurmgpu.errors import GPUFaultError
from slurmgpu.util import env_info, gpus

NEEDED = ("numpy", "h5py")


class Found(env_info.Surroundings, total=False):
    """The surroundings, the GPUs usable by CUDA, and `problems`: pairs of failure class and sentence."""

    gpus: list[dict[str, Any]]
    problems: list[list[str]]


def probe(n_gpus: int) -> Found:
    """The surroundings of a worker with this number of GPUs."""
    found: Found = {**env_info.describe(image_name()), "gpus": [], "problems": []}
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found["problems"].append(["container", f"{name} cannot be imported by {sys.executable}: {error}"])
    if n_gpus:
        torch = found["packages"].get("torch", "")
        if torch.endswith("+cpu"):
            found["problems"].append(["container", f"torch {torch} is built for CPUs only; use an image with CUDA"])
        try:
            found["gpus"] = [asdict(gpu) for gpu in gpus.probe(n_gpus)]
        except GPUFaultError as error:
            found["problems"].append(["gpu_fault", str(error)])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the surroundings; 1 if there are problems."""
    arguments = sys.argv[1:] if argv is None else argv
    found = probe(int(arguments[0]) if arguments else 0)
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
