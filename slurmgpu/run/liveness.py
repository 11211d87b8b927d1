"""Signs of life: when an attempt last wrote of itself, by whose clock, and which processes work on this machine."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from slurmgpu.run.records import BriefRecord
from slurmgpu.run.submissions import SubmissionLine
from slurmgpu.util.pids import DEAD, are_numbered_here, is_there, look

SILENT_S = 30.0
"""So long an attempt may write nothing, even where leases are shorter: it writes every three seconds."""
FRESH_S = 15.0
"""Where nobody seems to work on a run, an attempt lives only if it wrote so lately."""


def patience(lease_s: float, works: bool | None = None) -> float:
    """How many seconds an attempt may write nothing before it is taken for dead.

    `works` is whether somebody seems to work on the run at all, None where that cannot be known.
    """
    return FRESH_S if works is False else max(lease_s, SILENT_S)


def is_alive(record: BriefRecord, patience_s: float, now: float) -> bool:
    """Whether an attempt has not ended and has written of itself lately."""
    return bool(record["state"] != "ended" and now - last_heard(record) <= patience_s)


def last_heard(record: BriefRecord) -> float:
    """When an attempt last wrote of itself, by the clock of who asks, if they have seen it change: see `StatusReader`.

    By its own node's clock, if they have not.
    """
    return float(record.get("heard", record["updated"]))


def own_time(record: BriefRecord, now: float) -> float:
    """What an attempt's own clock shows at the moment `now` of ours."""
    return float(record["updated"] + now - last_heard(record))


def heard_at(updated: float, now: float, changed_since: float | None) -> float:
    """When a record was written, by this machine's clock, if by the node's clock it was `updated`.

    That is what the node says, unless it cannot be: `changed_since` is the look before the one at `now`, and the record
    was written between them; None at the first look at it.
    """
    if changed_since is None:
        return min(updated, now)
    return updated if changed_since <= updated <= now else now


def processes_here(submission: SubmissionLine) -> list[int] | None:
    """The processes of a submission to this machine that live; None of one to another machine, or to Slurm.

    None also where none is seen to live, and of one it cannot be known here: see `pids`.
    """
    if "pids" not in submission or not are_seen_here(submission):
        return None
    lives = {pid: _lives(pid, submission["time"]) for pid in submission["pids"]}
    living = [pid for pid, is_there in lives.items() if is_there]
    return None if not living and None in lives.values() else living


def are_seen_here(submission: SubmissionLine) -> bool:
    """Whether the processes of a submission are of this machine, and not of another one of the same name."""
    if "boot" not in submission:  # of an older slurmgpu
        return bool(submission["host"] == platform.node())
    return are_numbered_here(submission)


def _lives(pid: int, submitted: float) -> bool | None:
    """Whether a process of a submission lives, not one that was given its number long after; None if it is hidden."""
    seen = look(pid)
    if seen is None:
        return None if is_there(pid) else False
    state, ticks = seen
    uptime = float(Path("/proc/uptime").read_bytes().split()[0])
    started = time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    return state not in DEAD and started < submitted + 60
