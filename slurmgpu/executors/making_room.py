"""Make room for a probe or a look, which takes the place of an earlier one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.liveness import refuse_alive
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import run_lock
from slurmgpu.run.owners import name_of
from slurmgpu.util.shared_files import exists, retried


def make_room(folder: Path, kind: str = "probe") -> None:
    """Remove an earlier probe or look at `folder`; SlurmGPUError for anything else, and if tasks of it are alive."""
    if not exists(folder):
        return
    if (owner := retried(folder.stat).st_uid) != os.geteuid() != 0:
        raise SlurmGPUError(f"{folder}, where the {kind} would go, is {name_of(owner)}'s. Name another --run-dir.")
    run = Run.open(folder) if exists(folder / "run.json") else None
    if run is None or not (run.plan.is_probe if kind == "probe" else run.plan.look == kind):
        raise SlurmGPUError(
            f"{folder}, where the {kind} would go, exists and is no {kind}. Move it away, or name another --run-dir."
        )
    with run_lock(folder, "removing") as lock:
        refuse_alive(run, f"{kind} again")
        lock.check()
        shutil.rmtree(folder)
