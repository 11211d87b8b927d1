"""The plan of an earlier run whose merged file is an input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.shared_files import read_bytes


def plan_beside(path: Path) -> Mapping[str, Any]:
    """The plan of the run that wrote a merged file; empty if the file is not in a run directory.

    SlurmGPUError if the plan is damaged.
    """
    if path.name != "merged.h5":
        return {}
    plan = path.parent / "run.json"
    try:
        found = json.loads(read_bytes(plan))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise SlurmGPUError(f"{plan} is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise SlurmGPUError(f"{plan} is damaged: it is not a JSON object.")
    return found
