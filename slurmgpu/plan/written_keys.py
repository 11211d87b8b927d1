"""Digests of a run file's values at planning, to notice later edits; the run keeps what was planned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.run_file import read_toml
from slurmgpu.run.frozen_plan import Plan


def written_in(run_file: Path) -> dict[str, str]:
    """A digest of each value in a run file that rows depend on, by its key; empty if it cannot be read."""
    try:
        tables = read_toml(run_file)
    except (OSError, SlurmGPUError):
        return {}
    texts = ((key, json.dumps(value, sort_keys=True, default=str)) for key, value in _of_rows(tables))
    return {key: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for key, text in texts}


def edited_notes(plan: Plan) -> list[str]:
    """A note on the keys whose values in the run file have changed since the run was planned, if there are any."""
    then, run_file = plan.provenance.get("written", {}), Path(plan.provenance["run_file"])
    now = written_in(run_file) if then else {}
    if not now:
        return []
    changed = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    if not changed:
        return []
    return [
        f"{run_file.name} has changed since the run was planned: {', '.join(changed)}. The run keeps the values that "
        f"were planned; to compute with the new ones, submit again with another --run-dir."
    ]


def _of_rows(tables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys that rows depend on, with their values; [sweep] only without an input, where it makes the items."""
    yield from ((key, tables[key]) for key in ("input", "keep", "key", "seed") if key in tables)
    for name in ("workload", "settings", *(() if "input" in tables else ("sweep",))):
        if isinstance(table := tables.get(name), dict):
            yield from ((f"{name}.{key}", value) for key, value in table.items())
