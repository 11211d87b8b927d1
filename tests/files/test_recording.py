"""What an attempt writes of itself: its phases, its shard in hand, and where its seconds went."""

import os
import signal

import pytest

from slurmgpu.containers.settings import ContainerError
from slurmgpu.run.records import Attempt, read_record
from slurmgpu.task.attempt_writer import Recording, until_next
from slurmgpu.task.launcher import Launcher
from slurmgpu.task.supervisor import Task
from tests.support.pretend_runs import pretend_run
from tests.support.runs import check_ledger, check_rows, let_go, records, report, start, wait_until, workers

LOCAL = ("submit", "--executor", "local", "--gpus", "0")
NEARLY = 0.9
"""Of the time that a workload slept: records have milliseconds, and a sleep is not by the clock that they are by."""


@pytest.fixture
def attempt(tmp_path):
    """`attempt((1.5, "loading"), (2, "claim", {"shard": 3}), …)`: what an attempt that begins at 0 writes of itself.

    In place of an event's name may be that of what else becomes of an attempt: bury, leave, end.
    """
    run = pretend_run(tmp_path / "run", 0, n_tasks=1)

    def live(*story):
        now = [0.0]
        recording = Recording(run, Attempt("7", 0, end_time=99.0), clock=lambda: now[0])
        for at, what, *more in story:
            now[0] = float(at)
            if what in ("bury", "leave", "end"):
                getattr(recording, what)(*more)
            else:
                recording.hear({"event": what, **(more[0] if more else {})})
        recording.write()
        return read_record((run.tasks / "7_0.0.json").read_bytes())

    return live


def claim(at, shard=3):
    return at, "claim", {"shard": shard}


def calls(at, *batches):
    return [(at, "batch", {"items": items, "isolated": False}) for items in batches]


def publishes(at, started, shard=3, won=True):
    told = {"shard": shard, "items": 8, "errors": {"item_error": 1}, "won": won}
    return at, "published", {**told, "started": started, "seconds": at - started}


DIES = {"class": "crash", "message": "the worker died by SIGKILL"}
READY = {"load_s": 2.0, "resumes": False}


def test_who_waits_for_its_image_is_seen_to_live(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 0, n_tasks=1)
    task = Task(run, Attempt("7", 0, device="cpu"))
    written = []

    def prepare(self, pause):
        task.recording._due = 0.0
        (run.tasks / "7_0.0.json").unlink()
        pause(0)
        written.extend(run.tasks.glob("7_0.0.json"))
        raise ContainerError("there is no room")

    monkeypatch.setattr(Launcher, "prepare", prepare)
    assert task.run_worker() == 1
    assert len(written) == 1


def test_every_change_of_the_state_is_written_with_its_time(attempt):
    loads = [(1, "loading"), (3, "ready", READY)]
    record = attempt(*loads, claim(4), (6, "bury", DIES), (7, "loading"), (9, "ready", READY), claim(9), (11, "end"))
    states = ["starting", "loading", "running", "loading", "running", "ended"]
    assert record["phases"] == [[at, state] for at, state in zip((0, 1, 3, 7, 9, 11), states, strict=True)]
    assert (record["state"], record["ended"], record["end_time"]) == ("ended", 11.0, 99.0)
    assert record["deaths"] == [{**DIES, "at": 6.0, "state": "running"}]


@pytest.mark.parametrize(
    ("batches", "n_done"),
    [
        ([], 0),
        ([[0, 1, 2, 3]], 0),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 4),
        ([[0, 1, 2, 3], [0, 1], [2, 3]], 2),  # halved: of the first call nothing came
        ([[0, 1, 2, 3], [0, 1], [0], [1], [2, 3], [4, 5]], 4),
        ([[4, 5, 6, 7], [4], [5], [6], [7], [0, 1, 2, 3]], 4),  # one by one
    ],
)
def test_items_are_done_when_their_call_has_come_back_and_is_not_repeated(attempt, batches, n_done):
    assert attempt(claim(1), *calls(2, *batches))["shard_done"] == n_done


def test_of_a_new_shard_and_after_a_death_nothing_is_done(attempt):
    two = calls(2, [0, 1], [2, 3])
    record = attempt(claim(1), *two, publishes(3, 1), claim(4, 5))
    assert (record["shard"], record["shard_started"], record["shard_done"]) == (5, 4.0, 0)
    record = attempt(claim(1), *two, (3, "bury", DIES))
    assert (record["shard"], record["shard_started"], record["shard_done"]) == (None, None, 0)
    record = attempt(claim(1), *two, (3, "bury", DIES), claim(5), *calls(6, [0, 1]))
    assert (record["shard"], record["shard_started"], record["shard_done"]) == (3, 5.0, 0)


TELLS = {"text": "half"}
WAITING = (claim(1), claim(4, 5))  # the first shard waits for the second


@pytest.mark.parametrize(
    ("story", "lost_s", "kept_s"),
    [
        ([claim(1), publishes(5, 1), (6, "end")], 0, 0),
        ([claim(1), (4, "bury", DIES), claim(6), publishes(9, 6), (9, "end")], 3, 0),
        ([claim(1), publishes(5, 1), (8, "bury", DIES)], 0, 0),  # it waited for others
        ([claim(1), publishes(5, 1), claim(5, 4), (7, "end")], 2, 0),
        ([claim(1), (5, "leave", True), (6, "end")], 0, 4),
        ([claim(1), (3, "progress", TELLS), (8, "leave", False), (9, "end")], 5, 2),  # taken over
        ([claim(1), (3, "progress", TELLS), (7, "bury", DIES), claim(9), publishes(12, 9)], 4, 2),
        ([claim(1), (3, "progress", TELLS), (4, "tell", TELLS), publishes(7, 1), (9, "end")], 0, 0),
        ([claim(1), (3, "progress", TELLS), (6, "progress", TELLS), (8, "end")], 2, 5),
        ([*WAITING, (9, "bury", DIES)], 8, 0),
        ([*WAITING, publishes(9, 1), publishes(9, 4, 5), (12, "end")], 0, 0),
        ([*WAITING, publishes(9, 1), (10, "end")], 1, 0),  # the disk is full
    ],
)
def test_seconds_are_lost_or_kept_as_what_they_went_into(attempt, story, lost_s, kept_s):
    record = attempt((0, "loading"), (1, "ready", READY), *story)
    assert (record["lost_s"], record["kept_s"]) == (lost_s, kept_s)


def test_an_attempt_that_is_killed_leaves_since_when_its_shard_is_in_hand_and_kept(attempt):
    record = attempt(claim(2), (4, "progress", TELLS), (5, "tell", TELLS))
    assert (record["shard"], record["shard_started"], record["shard_kept"], record["kept_s"]) == (3, 2.0, 4.0, 2.0)
    assert (record["updated"], record["ended"]) == (5.0, None)


def test_what_it_published_says_whether_another_was_first(attempt):
    record = attempt(claim(1), publishes(3, 1), claim(3, 4), publishes(9, 3, 4, won=False))
    assert record["published"] == [[3, 1.0, 2.0, True], [4, 3.0, 6.0, False]]
    assert (record["n_items"], record["n_errors"], record["shard"]) == (8, 1, None)
    assert record["failed"] == [[3, {"item_error": 1}]]


def test_what_a_workload_told_last_stands_until_there_is_more_of_it_or_its_worker_is_gone(attempt):
    told = [claim(1), (2, "tell", {"text": "4 answers judged"}), publishes(3, 1), claim(4, 4)]
    assert attempt(*told)["progress"] == "4 answers judged"
    assert attempt(*told, (5, "bury", DIES), claim(6, 4))["progress"] is None
    assert attempt(*told, (5, "end"))["progress"] is None


def test_a_record_of_many_shards_is_written_with_a_line_for_each_field(attempt, tmp_path):
    record = attempt(*(event for n in range(500) for event in (claim(2 * n, n), publishes(2 * n + 1, 2 * n, n))))
    assert len(record["published"]) == 500
    text = (tmp_path / "run" / "tasks" / "7_0.0.json").read_text()
    assert text.count("\n") == len(record) + 2


@pytest.mark.parametrize(("cost_s", "interval_s"), [(0.0, 3.0), (0.05, 3.0), (0.15, 7.5), (60.0, 10.0)])
def test_what_takes_long_to_write_is_written_more_rarely(cost_s, interval_s):
    assert until_next(cost_s) == pytest.approx(interval_s)


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
    assert survivor["spent"]["loading"] >= NEARLY * 2 * 0.2
    assert survivor["spent"]["useful"] >= NEARLY * 0.05 * survivor["n_items"] > 0
    assert survivor["spent"]["repeated"] == 0

    assert dead["failure"] == "lost"
    last = records(folder)[1]
    in_hand_s = last["updated"] - last["shard_started"]
    assert dead["spent"]["lost"] == pytest.approx(in_hand_s, abs=0.002)
    assert dead["spent"]["loading"] >= NEARLY * 0.2
    assert report(folder)["ledger"]["lost"] == pytest.approx((record["lost_s"] + in_hand_s) / 3600, abs=1e-6)


def workers_of(record, folder):
    return [pid for pid, line in workers(folder) if record["attempt"] in line]


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
    folder = project(2, settings={"n": 20, "step_s": 0.05}, workload="Waits", batch_size=1, shard_items=1)
    with open(folder / "workloads.py", "a") as file:
        file.write(WAITS)
    process = start(*LOCAL, cwd=folder)
    path = folder / "run" / "counts" / "0"
    wait_until(lambda: path.exists() and path.read_text().count("\n") == 10, "progress")
    os.kill(records(folder)[0]["pid"], signal.SIGTERM)
    process.communicate()
    [record] = records(folder)
    assert record["kept_s"] >= NEARLY * 9 * 0.05
    assert record["lost_s"] == 0
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_rows(folder, 2)
    check_ledger(report(folder))
    [first, second] = report(folder)["attempts"]
    assert first["spent"]["useful"] == record["kept_s"]
    assert second["spent"]["useful"] >= NEARLY * (40 - 10) * 0.05
    assert first["spent"]["lost"] == second["spent"]["lost"] == 0
