"""What is done to a run while its tasks compute, beyond the faults of its file system."""

from __future__ import annotations

import os
import signal

from .trial import LEASE_S, SHARDS_APPEAR, Disturbance, Trial

STEP = "tests.chaos.steps"
WORKER = "slurmgpu.worker.main"


def _some_node(trial: Trial) -> int | None:
    """The number of a node whose task is at work; None if none is."""
    working = [number for number, task in enumerate(trial.tasks) if task.poll() is None]
    return trial.random.choice(working) if working else None


def _to_a_node(kind: str, *, ends_the_task: bool):
    """A disturbance of one node that is at work."""

    def decorate(act):
        def disturb(trial: Trial) -> None:
            number = _some_node(trial)
            if number is None:
                return
            if ends_the_task:
                trial.unblamed.add(number)
            trial.note(kind)
            act(trial, trial.nodes[number])

        disturb.kind = kind
        return disturb

    return decorate


def _named(kind: str):
    """A disturbance of the run's folder, or of all."""

    def decorate(act):
        def disturb(trial: Trial) -> None:
            if act(trial) is not False:
                trial.note(kind)

        disturb.kind = kind
        return disturb

    return decorate


@_to_a_node("node: dies", ends_the_task=True)
def node_dies(trial, node):
    node.kill()


@_to_a_node("node: loses the file system for good", ends_the_task=True)
def node_loses_the_file_system(trial, node):
    node.order("EIO")
    trial.later(2 * LEASE_S, node.kill)


@_to_a_node("node: gets no answer for longer than a lease", ends_the_task=False)
def node_gets_no_answer(trial, node):
    node.order("silent")
    trial.later(1.5 * LEASE_S, lambda: node.order(None))


@_to_a_node("node: stopped for longer than a lease", ends_the_task=False)
def node_is_stopped(trial, node):
    node.signal(signal.SIGSTOP)
    trial.later(1.5 * LEASE_S, lambda: node.signal(signal.SIGCONT))


def node_sleeps_until_the_merge(trial: Trial) -> None:
    number = _some_node(trial)
    if number is not None and not trial.asleep and trial.nodes[number].signal(signal.SIGSTOP, WORKER):
        trial.note(node_sleeps_until_the_merge.kind)
        trial.unblamed.add(number)
        trial.nodes[number].signal(signal.SIGSTOP)
        trial.asleep[number] = trial.nodes[number]


node_sleeps_until_the_merge.kind = "node: stopped until the merge is at work"


@_to_a_node("process: a worker is killed", ends_the_task=False)
def worker_is_killed(trial, node):
    node.signal(signal.SIGKILL, WORKER)


@_to_a_node("process: a task is killed", ends_the_task=True)
def task_is_killed(trial, node):
    node.signal(signal.SIGKILL, STEP)


@_to_a_node("process: a task gets SIGTERM", ends_the_task=True)
def task_is_terminated(trial, node):
    node.signal(signal.SIGTERM, STEP)


@_to_a_node("process: a task gets SIGUSR2", ends_the_task=True)
def task_is_told_to_stop(trial, node):
    node.signal(signal.SIGUSR2, STEP)


@_to_a_node("clock: a node's is stepped by twelve hours", ends_the_task=False)
def clock_is_stepped(trial, node):
    node.set_clock(trial.random.choice((-43_200, 43_200)))


@_named("clock: a node's is wrong by hours")
def clock_is_wrong(trial):
    trial.start_node(clock_s=trial.random.choice((-10_000, 10_000)))


def _some_shard(trial):
    found = sorted((trial.kept / "shards").glob("[0-9]*.h5"))
    return trial.random.choice(found) if found else None


@_named("user: overwrites bytes of a shard")
def shard_is_damaged(trial):
    if (path := _some_shard(trial)) is None:
        return False
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xff" * 8)
    return True


@_named("user: removes a shard")
def shard_is_removed(trial):
    if (path := _some_shard(trial)) is None:
        return False
    path.unlink()
    return True


@_named("user: puts a FIFO and a link among the shards")
def strange_files(trial):
    for name in ("000003.h5", "00000.notes"):
        if not os.path.lexists(trial.kept / "shards" / name):
            os.mkfifo(trial.kept / "shards" / name)
    link = trial.kept / "shards" / "99999.h5"
    if not link.is_symlink():
        link.symlink_to("/dev/zero")


@_named("user: empties a claim")
def claim_is_emptied(trial):
    claims = sorted((trial.kept / "claims").glob("[0-9]*[0-9]"))
    if not claims:
        return False
    os.truncate(trial.random.choice(claims), 0)
    return True


@_named("user: leaves a torn history and a torn record")
def torn_files(trial):
    (trial.kept / "claims" / "00020.history").write_text('{"de')
    (trial.kept / "tasks" / "job1_99.0.json").write_text('{"att')


@_named("user: merges twice at once")
def two_merges(trial):
    trial.merges_at_once = 2


@_named("process: a merge is killed")
def merge_is_killed(trial):
    trial.kills_merge = True


@_named(SHARDS_APPEAR)
def shards_appear(trial):
    trial.n_late_shards = trial.random.randint(1, 10)
    return False  # it counts when it has happened


@_named("code: some items fail until it is mended")
def items_fail(trial):
    trial.failing.touch()
    trial.n_mends_killed = trial.random.randint(1, 3)
    trial.is_mended_merge_killed = trial.random.random() < 0.5


@_named("code: the workload's file is edited, and a task starts after it")
def code_is_edited(trial):
    path = trial.server.exported / "project" / "workloads.py"
    path.write_text(path.read_text().replace("EDITED = 0", "EDITED = 1000"))
    trial.start_node()


COSTLY: tuple[Disturbance, ...] = (
    *(node_sleeps_until_the_merge, node_dies, node_loses_the_file_system, node_gets_no_answer, node_is_stopped),
    *(worker_is_killed, task_is_killed, task_is_terminated, task_is_told_to_stop, merge_is_killed),
    *(shard_is_damaged, shard_is_removed, items_fail),
)
"""After these, some items must be computed again."""
HARMLESS: tuple[Disturbance, ...] = (
    *(clock_is_stepped, clock_is_wrong, strange_files, claim_is_emptied, torn_files, two_merges, code_is_edited),
    shards_appear,
)
"""After these, none need to be."""
