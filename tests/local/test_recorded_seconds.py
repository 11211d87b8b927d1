"""Where the seconds of real runs went, whose workers and tasks are killed and stopped."""

import os
import signal
from itertools import pairwise

import pytest

from tests.support.runs import check_ledger, check_rows, let_go, records, report, start, wait_until, workers

LOCAL = ("submit", "--executor", "local", "--gpus", "0")
NEARLY = 0.9
"""Of the time that a workload slept: records have milliseconds, and a sleep is not by the clock that they are by."""


def test_the_ledger_of_a_run_whose_workers_and_task_were_killed_is_what_happened(project, slurmgpu):
    folder = project(48, settings={"item_s": 0.05, "load_s": 0.2}, held_from=28)
    process = start(*LOCAL, "--tasks", "2", cwd=folder)
    in_hand = {(3, 4), (4, 0)}  # of one a batch has come back
    wait_until(lambda: {(r["shard"], r["shard_done"]) for r in records(folder)} == in_hand, "both shards in records")
    other = records(folder)[1]
    [victim] = workers_of(records(folder)[0], folder)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: records(folder)[0]["deaths"], "the death in the record")
    os.kill(other["pid"], signal.SIGKILL)
    wait_until(lambda: not workers_of(other, folder), "the end of the worker that it takes along")
    let_go(folder)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    check_rows(folder, 48)
    outcome = report(folder)
    survivor, dead = sorted(outcome["attempts"], key=lambda attempt: attempt["attempt"])
    assert check_ledger(outcome)["unit"] == "task-hours"

    record = records(folder)[0]
    [death] = record["deaths"]
    assert [state for _, state in survivor["phases"]] == [
        *("starting", "loading", "running"),
        *("starting", "loading", "running", "ended"),
    ]
    assert survivor["spent"]["lost"] == record["lost_s"] > 0
    assert record["lost_s"] <= death["at"] - record["started"]
    assert survivor["spent"]["loading"] == pytest.approx(loading_s(survivor), abs=0.002)
    assert record["load_s"] >= NEARLY * 0.2
    assert survivor["spent"]["useful"] >= NEARLY * 0.05 * survivor["n_items"] > 0
    assert survivor["spent"]["repeated"] == 0

    assert dead["failure"] == "lost"
    last = records(folder)[1]
    in_hand_s = last["updated"] - last["shard_started"]
    assert dead["spent"]["lost"] == pytest.approx(in_hand_s, abs=0.002)
    assert dead["spent"]["loading"] == pytest.approx(loading_s(dead), abs=0.002)
    assert report(folder)["ledger"]["lost"] == pytest.approx((record["lost_s"] + in_hand_s) / 3600, abs=1e-6)


def loading_s(attempt):
    """The seconds that its workers loaded, by when the task heard of it."""
    return sum(end - at for (at, state), (end, _) in pairwise(attempt["phases"]) if state == "loading")


def workers_of(record, folder):
    return [pid for pid, line in workers(folder) if record["attempt"] in line]


def seconds_in_hand(record):
    """How long a task has had the shard in hand, as of its record."""
    return record["updated"] - record["shard_started"] if record["shard_started"] else 0.0


WAITS = '''

class Waits(Long):
    """Counts to 10, and on from there in a later submission."""

    def of_rank_0(self, stops):
        path = self.folder / "0"
        while not stops and self.task.attempt == "local1_0.0" and path.exists() and path.read_text().count("\\n") == 10:
            time.sleep(0.01)
            stops = self.task.stopping()
        return super().of_rank_0(stops)
'''


def test_an_item_left_for_later_is_time_well_spent(project, slurmgpu):
    folder = project(1, settings={"n": 20, "step_s": 0.05}, workload="Waits", batch_size=1, shard_items=1)
    with open(folder / "workloads.py", "a") as file:
        file.write(WAITS)
    process = start(*LOCAL, cwd=folder)
    path = folder / "run" / "counts" / "0"
    wait_until(lambda: path.exists() and path.read_text().count("\n") == 10, "progress")
    # By the clock of the task, which may have heard of the item later than its worker began it.
    wait_until(lambda: seconds_in_hand(records(folder)[0]) >= NEARLY * 9 * 0.05, "as much time in the record")
    os.kill(records(folder)[0]["pid"], signal.SIGTERM)
    process.communicate()
    [record] = records(folder)
    assert record["kept_s"] >= NEARLY * 9 * 0.05
    assert record["lost_s"] == 0
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_rows(folder, 1)
    check_ledger(report(folder))
    [first, second] = report(folder)["attempts"]
    assert first["spent"]["useful"] == record["kept_s"]
    assert second["spent"]["useful"] >= NEARLY * (20 - 10) * 0.05
    assert first["spent"]["lost"] == second["spent"]["lost"] == 0
