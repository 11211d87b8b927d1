"""Optional packages that may be missing, and the path of slurmgpu itself for child processes."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
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
    check_imports(what_needs, {"torch": "PyTorch"}, "pip install 'slurmgpu[torch]'")


def check_transformers(what_needs: str) -> None:
    """As `check_torch`, for PyTorch and transformers."""
    check_imports(what_needs, {"torch": "PyTorch", "transformers": "transformers"}, "pip install 'slurmgpu[llm]'")


def check_imports(what_needs: str, modules: Mapping[str, str], to_do: str) -> None:
    """Raise SlurmGPUError if one of these modules is missing where tasks run without an image.

    `what_needs` begins the sentence, `modules` have their names for people, and `to_do` says how they are installed.
    """
    lacks = [said for name, said in modules.items() if name not in sys.modules and find_spec(name) is None]
    if lacks:
        raise SlurmGPUError(
            f"{what_needs} {' and '.join(lacks)}, which {sys.executable} cannot import: {to_do}, or set image in "
            f"[container] to one that has {'it' if len(lacks) == 1 else 'them'}."
        )


def own_python_path() -> dict[str, str]:
    """The PYTHONPATH with which a child process imports the same slurmgpu as this process; {} if it does so anyway.

    Where slurmgpu is installed, its folder has all other packages, too. Before the user's PYTHONPATH it would hide the
    versions that are there.
    """
    given = os.environ.get("PYTHONPATH", "")
    homes = [part for part in given.split(os.pathsep) if part and Path(part, "slurmgpu", "__init__.py").exists()]
    found = homes[:1] or [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    if HOME in (os.path.realpath(part) for part in found if os.path.isabs(part)):  # a child may be in another folder
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (HOME, given) if part)}
