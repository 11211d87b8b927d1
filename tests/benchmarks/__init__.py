"""Benchmarks: each prints ratios beside a baseline of the same run, and its targets, met or not met."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.cluster import Cluster


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Lines of cells, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())


def judge(what: str, found: float, limit: float, unit: str = "") -> bool:
    """Whether `found` is within its target; says so."""
    met = found <= limit
    print(f"{what}: {found:.4g}{unit}, target at most {limit:g}{unit}: {'met' if met else 'NOT MET'}", flush=True)
    return met


def judge_least(what: str, found: float, limit: float, unit: str = "") -> bool:
    """Whether `found` reaches its target; says so."""
    met = found >= limit
    print(f"{what}: {found:.3g}{unit}, target at least {limit:g}{unit}: {'met' if met else 'NOT MET'}", flush=True)
    return met


@contextlib.contextmanager
def private_slurm() -> Iterator[Cluster | None]:
    """A test cluster that Slurm's commands find through the environment; None, the reason on stderr, without one."""
    # Not with this package: workers import it with what they compute.
    from unittest import mock

    from tests.cluster import Cluster
    from tests.cluster.cluster import INHERITED, missing

    if reason := missing():
        print(f"left out what needs Slurm: {reason}", file=sys.stderr)
        yield None
        return
    clean = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
    with tempfile.TemporaryDirectory(prefix="slurmgpu-bench-") as folder:
        cluster = Cluster.start(Path(folder) / "cluster")
        try:
            with mock.patch.dict(os.environ, {**clean, **cluster.env}, clear=True):
                yield cluster
        finally:
            cluster.stop()


def write_project(folder: Path, n_items: int, workload: str, **tables: Any) -> Path:
    """A folder with an input of short texts and a run file that uses `workload`; returns the run file."""
    folder.mkdir(parents=True)
    texts = (json.dumps({"text": f"item {i} of many, and a few words more"}) for i in range(n_items))
    (folder / "items.jsonl").write_text("".join(f"{text}\n" for text in texts))
    top = {"input": "items.jsonl", "run_dir": "run"}
    top |= {key: tables.pop(key) for key in list(tables) if not isinstance(tables[key], Mapping)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]  # JSON's scalars and lists are TOML's
    for name, table in {"workload": {"use": workload}, **tables}.items():
        lines += [f"[{name}]", *(f"{key} = {_inline(value)}" for key, value in table.items())]
    path = folder / "slurmgpu.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)
