"""What this process imports: optional packages that may be missing, and slurmgpu itself for child processes."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from slurmgpu.errors import SlurmGPUError

HOME = str(Path(__file__).resolve().parents[2])
"""The folder from which this process imports slurmgpu."""


def check_pyarrow(what_needs: str, *, in_tasks: bool = False) -> None:
    """Raise SlurmGPUError if pyarrow is missing; `what_needs` begins the sentence, as "Reading a.parquet needs"."""
    if find_spec("pyarrow") is None:
        where = ", here and where tasks run" if in_tasks else ""
        raise SlurmGPUError(f"{what_needs} pyarrow{where}: pip install 'slurmgpu[parquet]'.")


def check_torch(what_needs: str) -> None:
    """Raise SlurmGPUError if PyTorch is missing where tasks run without an image; `what_needs` begins the sentence."""
    if "torch" not in sys.modules and find_spec("torch") is None:
        raise SlurmGPUError(
            f"{what_needs} PyTorch, which {sys.executable} cannot import: pip install 'slurmgpu[torch]', or set image "
            f"under [container] to one that has it."
        )


def own_python_path() -> str:
    """The PYTHONPATH of a child process that is to import the same slurmgpu, wherever it was imported from."""
    return os.pathsep.join(part for part in (HOME, os.environ.get("PYTHONPATH")) if part)
