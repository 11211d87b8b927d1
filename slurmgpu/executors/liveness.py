"""What of a run is alive, by what its executors see and by heartbeats, and how to stop it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.interface import Sight
from slurmgpu.executors.registry import executors_of
from slurmgpu.run.claims import Watch
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import Observer
from slurmgpu.run.liveness import patience
from slurmgpu.slurm import commands

log = logging.getLogger(__name__)

MERGE_PAUSE_S = 5.0


def alive(run: Run, waiting_merge: str | None = None) -> str | None:
    """What of this run is alive or queued, in words; None when nothing is. Raises when Slurm does not tell.

    `waiting_merge` is the job of who asks, to merge when the others have ended; others that wait like it do not count.
    Of tasks of which Slurm here knows nothing, another user's or another cluster's, the heartbeats are watched: that
    may take as long as a lease, and half a minute at least.
    """
    sights = []
    for executor, lines in executors_of(run):
        sights.append(executor.look(run, lines, waiting_merge))
        if sights[-1].at_work:
            return sights[-1].at_work
    return _heard(run, sights, waiting_merge)


def _heard(run: Run, sights: Sequence[Sight], waiting_merge: str | None) -> str | None:
    """Which task shows that it lives; None once all others have been silent for long enough.

    Of the queue of another cluster nothing is heard: who has jobs there is told so, but not a merge that waits, as one
    there waits for it.
    """
    patience_s = patience(run.plan.lease_s)
    observer = _OBSERVERS.setdefault(run.folder, Observer(run.folder, patience_s))
    elsewhere = [name for sight in sights for name in sight.elsewhere]
    is_old = any(sight.is_old for sight in sights)
    is_hidden, written = is_old or any(s.hides for s in sights), _written_by_living(run) if is_old else {}
    leases, begun, is_told = Watch(run.plan.lease_s), time.monotonic(), False
    while True:
        signs = [sign for sign in observer.look() if not any(s.has_ended(sign) for s in sights)]
        if living := [sign for sign in signs if sign.lives]:
            return f"{living[0].in_words} is alive"
        doubts = [sign.in_words for sign in signs if sign.lives is None]
        if elsewhere and waiting_merge is None and not doubts:
            return f"jobs of it may wait in the queue of the cluster {elsewhere[0]}, which is not seen here"
        if time.monotonic() - begun <= patience_s:
            doubts += [f"a task of a job on the cluster {name}" for name in elsewhere[:1]]
            doubts += ["a task of a submission by an older slurmgpu"] * is_old
        changed = _written_by_living(run).items() - written.items() if is_old else ()
        if changed:
            return f"task {min(changed)[0]} writes of itself"
        if is_hidden:
            states = [leases.look(shard, claim) for shard, claim in run.claims.held() if not claim.parked]
            if "alive" in states:
                return "tasks renew their leases"
            doubts += ["a task that holds a claim"] * ("unknown" in states)
        if not doubts:
            return None
        if not is_told:
            log.warning("waiting up to %.0f s to see whether %s lives", patience_s, doubts[0])
            is_told = True
        time.sleep(min(1.0, patience_s / 20))


_OBSERVERS: dict[Path, Observer] = {}
"""What this process has seen of heartbeats: a second look does not watch again who was silent for long."""


def _written_by_living(run: Run) -> dict[str, float]:
    """When each attempt that has not ended wrote of itself, by its own clock: older ones have no heartbeats."""
    return {record["attempt"]: record["updated"] for record in run.attempts() if record["state"] != "ended"}


def wait_for_others(run: Run, own_array: str | None) -> None:
    """Wait until no task lives but those of an array whose merge job this is, and which is over."""
    while what := others_alive(run, own_array):
        log.info("waiting: %s", what)
        time.sleep(MERGE_PAUSE_S)


def others_alive(run: Run, own_array: str | None) -> str | None:
    """Which task lives that is of another array than this one of this cluster; None once all are silent."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    observer = _OBSERVERS.setdefault(run.folder, Observer(run.folder, patience(run.plan.lease_s)))
    while True:
        signs = observer.look()
        others = [s for s in signs if s.told.get("cluster") != cluster or s.told.get("job") != own_array]
        if living := [sign for sign in others if sign.lives]:
            return f"{living[0].in_words} is alive"
        if not any(sign.lives is None for sign in others):
            return None
        time.sleep(1.0)


def forget_the_dead(run: Run) -> None:
    """Remove the heartbeats of tasks that were killed, after a merge: who asks next need not watch them again."""
    observer = _OBSERVERS.get(run.folder) or Observer(run.folder, patience(run.plan.lease_s))
    observer.forget([sign for sign in observer.look() if sign.lives is False])


def refuse_alive(run: Run, to_do: str, *, force: bool = False) -> None:
    """Raise a sentence when something of the run is alive, or may be; with `force` only say so."""
    try:
        what = alive(run)
    except commands.SlurmUnavailableError as error:
        if not force:
            raise SlurmGPUError(f"{error} Where you know that nothing of {run.folder} is at work: --force.") from error
        what = str(error)
    if what and not force:
        raise SlurmGPUError(
            f"{run.folder} is still at work: {what}. `slurmgpu status {run.typed}` shows it; wait for its end, "
            f"or `slurmgpu cancel {run.typed}`, before you {to_do}. Where you know better: --force."
        )
    if what:
        log.warning("--force: %s", what)


def cancel(run: Run) -> str:
    """Stop what is alive of the run; what was done, in words."""
    return "; ".join(done for executor, lines in executors_of(run) for done in executor.cancel(run, lines))
