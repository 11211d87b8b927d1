"""What of a run is alive, here or in Slurm's queue, and how to stop it."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmgpu.claims import Watch
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import commands
from slurmgpu.runs import Run

log = logging.getLogger(__name__)


def alive(run: Run) -> str | None:
    """What of this run is alive or queued, in words; None when nothing is. Raises when Slurm does not tell."""
    for line in reversed(run.submissions()):
        if line["state"] == "ended":
            continue
        if line["executor"] == "slurm":
            # By the run directory, too: a submission that died between sbatch and its record has left no job ids, and
            # one that was refused may have left an array that could not be cancelled.
            ids = [line[key] for key in ("array_job", "merge_job") if key in line]
            jobs = commands.queue(ids, run.logs)
            if jobs:
                return f"Slurm has {len(jobs)} of its jobs, such as {jobs[0].job_id} ({jobs[0].state})"
        elif "pids" in line and (here := _alive_here(run, line)):
            return here
    return None


def _alive_here(run: Run, line: Mapping[str, Any]) -> str | None:
    if line["host"] == platform.node():
        living = [pid for pid in line["pids"] if _lives(pid, line["time"])]
        return f"process {living[0]} works on it" if living else None
    log.warning("this run was started on %s; watching its leases for %.0f s", line["host"], run.plan.lease_s)
    return f"tasks on {line['host']} renew their leases" if _renews(run) else None


def _lives(pid: int, submitted: float) -> bool:
    """Whether a process of a submission lives; not one that was given its number long after it."""
    try:
        # proc(5): behind the name in parentheses come the state and, 19 fields later, the start in ticks since boot.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return False
    started = time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] != "Z" and started < submitted + 60


def _renews(run: Run) -> bool:
    """Whether any claim is renewed within a lease's time."""
    watch = Watch(run.plan.lease_s)
    while True:
        states = [watch.look(shard, claim) for shard, claim in run.claims.held() if not claim.parked]
        open_states = [state for state in states if state != "stale"]
        if "alive" in states or not open_states:
            return "alive" in states
        time.sleep(min(1.0, run.plan.lease_s / 20))


def refuse_alive(run: Run, to_do: str) -> None:
    """Raise a sentence when something of the run is alive."""
    if what := alive(run):
        raise SlurmGPUError(
            f"{run.folder} is still at work: {what}. `slurmgpu status {run.typed}` shows it; wait for its end, "
            f"or `slurmgpu cancel {run.typed}`, before you {to_do}."
        )


def cancel(run: Run) -> str:
    """Stop what is alive of the run; what was done, in words."""
    from slurmgpu.executors import local

    stopped = []
    for line in run.submissions():
        if line["state"] == "ended":
            continue
        if line["executor"] == "slurm":
            ids = [line[key] for key in ("array_job", "merge_job") if key in line]
            if jobs := sorted({job.array_job for job in commands.queue(ids, run.logs)}):
                run.record_submission({"submission": line["submission"], "cancelled": True})
                commands.cancel(*jobs)
                stopped.append(f"Slurm jobs {', '.join(jobs)}")
        elif line["host"] != platform.node():
            raise SlurmGPUError(f"This run works on {line['host']}; cancel it there.")
        elif pids := [pid for pid in line["pids"] if local.is_alive(pid)]:
            run.record_submission({"submission": line["submission"], "cancelled": True})
            local.stop(pids)
            stopped.append(f"processes {', '.join(map(str, pids))}")
    return "; ".join(stopped)
