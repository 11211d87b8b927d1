"""Whether attempts are alive: when they last wrote their records, and which processes of this machine are alive."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slurmgpu.run.directory import Run
from slurmgpu.run.records import BriefRecord
from slurmgpu.run.submissions import SubmissionLine
from slurmgpu.util.pids import DEAD, are_numbered_here, look, runs

SILENT_S = 30.0
"""How long an attempt may write nothing, even if leases are shorter: it writes every three seconds."""
FRESH_S = 15.0
"""The same, if nothing of the run seems to be alive."""


def patience(lease_s: float, works: bool | None = None) -> float:
    """How many seconds an attempt may write nothing before it counts as dead.

    `works` says whether anything of the run seems to be alive, None if that is unknown.
    """
    return FRESH_S if works is False else max(lease_s, SILENT_S)


def is_alive(record: BriefRecord, patience_s: float, now: float) -> bool:
    """Whether an attempt has not ended and has written its record recently."""
    return bool(record["state"] != "ended" and now - last_heard(record) <= patience_s)


def last_heard(record: BriefRecord) -> float:
    """When an attempt last wrote its record: by this machine's clock if the record was seen to change, else its own."""
    return float(record.get("heard", record["updated"]))


def own_time(record: BriefRecord, now: float) -> float:
    """The time by the attempt's clock when this clock shows `now`."""
    return float(record["updated"] + now - last_heard(record))


def heard_at(updated: float, now: float, changed_since: float | None) -> float:
    """When a record was written, by this machine's clock; `updated` is the time by the node's clock.

    It was written between `changed_since` (the previous look) and `now`. If `updated` is not in between, the clocks
    differ, and the result is `now`. `changed_since` is None at the first look.
    """
    if changed_since is None:
        return min(updated, now)
    return updated if changed_since <= updated <= now else now


def processes_here(submission: SubmissionLine) -> list[int] | None:
    """The live processes of a submission to this machine; None for a submission to another machine, or to Slurm.

    Also None if none is seen but some may be hidden: see `pids`.
    """
    if "pids" not in submission or not are_numbered_here(submission):
        return None
    pids = submission["pids"]
    ticks = dict(zip(pids, submission.get("ticks", ()), strict=False))
    lives = {pid: _lives(pid, ticks.get(pid), submission["time"]) for pid in pids}
    living = [pid for pid, is_there in lives.items() if is_there]
    return None if not living and None in lives.values() else living


def is_orphaned(run: Run, number: int) -> bool:
    """Whether the process of a submission to this machine, which would have merged, is dead; False if unknown."""
    line = run.submission(number)
    if line.get("state") in (None, "ended") or line.get("cancelled"):
        return False
    living = processes_here(line)
    return living is not None and line["pids"][0] not in living


def _lives(pid: int, began: int | None, submitted: float) -> bool | None:
    """Whether a process of a submission is alive, and not a later one with the same pid; None if it is hidden.

    `began` is its start in ticks since boot. Without it, the clock tells whether the process is older than the
    submission; if the clock was set forward or the machine paused, a live process looks dead.
    """
    if began is not None or (seen := look(pid)) is None:
        return runs(pid, began)
    state, ticks = seen
    uptime = float(Path("/proc/uptime").read_bytes().split()[0])
    started = time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    return state not in DEAD and started < submitted + 60
