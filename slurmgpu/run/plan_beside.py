"""The plan of an earlier run whose merged file is an input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmgpu.util.shared_files import read_bytes


def plan_beside(path: Path) -> Mapping[str, Any]:
    """The plan of the run that wrote a merged file; empty if the file is not in a run directory."""
    if path.name != "merged.h5":
        return {}
    try:
        found: Mapping[str, Any] = json.loads(read_bytes(path.parent / "run.json"))
    except FileNotFoundError:
        return {}
    return found
