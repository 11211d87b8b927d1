"""What an attempt writes of itself: its phases, its shard in hand, and where its seconds went."""

import errno

import pytest

from slurmgpu.containers.settings import ContainerError
from slurmgpu.report.ledger import counting, spent
from slurmgpu.run.records import Attempt, read_record
from slurmgpu.task.attempt_writer import AttemptWriter, until_next
from slurmgpu.task.launcher import Launcher
from slurmgpu.task.supervisor import Task
from tests.support.failing import Failing
from tests.support.pretend_runs import pretend_run


@pytest.fixture
def failing(monkeypatch):
    return Failing(monkeypatch)


@pytest.fixture
def attempt(tmp_path):
    """`attempt((1.5, "loading"), (2, "claim", {"shard": 3}), …)`: what an attempt that begins at 0 writes of itself.

    In place of an event's name may be that of what else becomes of an attempt: add_death, leave, end.
    """
    run = pretend_run(tmp_path / "run", 0, n_tasks=1)

    def live(*story):
        now = [0.0]
        writer = AttemptWriter(run, Attempt("7", 0, end_time=99.0), clocks=lambda: (now[0], now[0]))
        for at, what, *more in story:
            now[0] = float(at)
            if what == "add_death":
                writer.add_death(*more, writer.now())
            elif what in ("leave", "end"):
                getattr(writer, what)(*more)
            else:
                writer.add_event({"event": what, **(more[0] if more else {})})
        writer.write()
        return read_record((run.tasks / "7_0.0.json").read_bytes())

    return live


def claim(at, shard=3):
    return at, "claim", {"shard": shard, "idle_s": 0.0}


def calls(at, *batches):
    return [(at, "batch", {"items": items, "isolated": False}) for items in batches]


def gives_back(at, shard=3):
    return at, "skipped", {"shard": shard}


def publishes(at, started, shard=3, won=True):
    told = {
        "shard": shard,
        "items": 8,
        "errors": {"item_error": 1},
        "last_failed": "item 3: item_error: no text",
        "won": won,
        "revision": 0,
    }
    return at, "published", {**told, "started": started, "seconds": at - started}


DIES = {"class": "crash", "message": "the worker died by SIGKILL"}
READY = {"load_s": 2.0, "resumes": False}


def test_who_waits_for_its_image_is_seen_to_live(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 0, n_tasks=1)
    task = Task(run, Attempt("7", 0, device="cpu"))
    written = []

    def prepare(self, pause):
        task.writer._due = 0.0
        (run.tasks / "7_0.0.json").unlink()
        pause(0)
        written.extend(run.tasks.glob("7_0.0.json"))
        raise ContainerError("there is no room")

    monkeypatch.setattr(Launcher, "prepare", prepare)
    assert task.run_worker() == 1
    assert len(written) == 1


def test_every_change_of_the_state_is_written_with_its_time(attempt):
    loads = [(1, "loading"), (2, "loading"), (3, "ready", READY)]
    record = attempt(
        *loads, claim(4), (6, "add_death", DIES), (7, "loading"), (9, "ready", READY), claim(9), (11, "end")
    )
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
    record = attempt(claim(1), (2, "progress", TELLS), publishes(3, 1), claim(4, 5))
    assert (record["shard"], record["shard_kept"]) == (5, None)
    record = attempt(claim(1), *two, (3, "add_death", DIES))
    assert (record["shard"], record["shard_started"], record["shard_done"]) == (None, None, 0)
    record = attempt(claim(1), *two, (3, "add_death", DIES), claim(5), *calls(6, [0, 1]))
    assert (record["shard"], record["shard_started"], record["shard_done"]) == (3, 5.0, 0)


def test_no_shard_is_in_hand_once_those_that_waited_are_given_back_or_published(attempt):
    record = attempt(claim(1), claim(4, 5), gives_back(9), publishes(9, 4, 5))
    assert (record["shard"], record["shard_started"]) == (None, None)


TELLS = {"text": "half"}
KEEPS = (9, "progress", TELLS)
WAITING = (claim(1), claim(4, 5))  # the first shard waits for the second


@pytest.mark.parametrize(
    ("story", "lost_s", "kept_s"),
    [
        ([claim(1), publishes(5, 1), (6, "end")], 0, 0),
        ([claim(1), (4, "add_death", DIES), claim(6), publishes(9, 6), (9, "end")], 3, 0),
        ([claim(1), publishes(5, 1), (8, "add_death", DIES)], 0, 0),  # it waited for others
        ([claim(1), publishes(5, 1), claim(5, 4), (7, "end")], 2, 0),
        ([claim(1), (5, "leave", True), (6, "end")], 0, 4),
        ([claim(1), (3, "progress", TELLS), (8, "leave", False), (9, "end")], 5, 2),  # taken over
        ([claim(1), (3, "progress", TELLS), (7, "add_death", DIES), claim(9), publishes(12, 9)], 4, 2),
        ([claim(1), (3, "progress", TELLS), (4, "tell", TELLS), publishes(7, 1), (9, "end")], 0, 0),
        ([claim(1), (3, "progress", TELLS), (6, "progress", TELLS), (8, "end")], 2, 5),
        ([*WAITING, (9, "add_death", DIES)], 8, 0),
        ([*WAITING, publishes(9, 1), publishes(9, 4, 5), (12, "end")], 0, 0),
        ([*WAITING, publishes(9, 1), (10, "end")], 1, 0),  # the disk is full
        ([*WAITING, gives_back(9), publishes(9, 4, 5), (12, "end")], 3, 0),  # a sample, and another task computes it
        ([*WAITING, gives_back(9), publishes(9, 4, 5), claim(9), publishes(12, 9), (12, "end")], 3, 0),
        ([*WAITING, gives_back(9), gives_back(9, 5), (12, "end")], 8, 0),
        ([*WAITING, gives_back(9, 5), publishes(9, 1), (12, "end")], 5, 0),  # the first one is still being written
        ([claim(1), gives_back(4, 5), publishes(5, 1), (6, "end")], 0, 0),  # it was only claimed ahead
        (
            [claim(1), (5, "leave", True), claim(6), claim(8, 5), KEEPS, publishes(10, 6), publishes(11, 8, 5)],
            0,
            4,
        ),
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
    assert (record["failed"], record["last_failed"]) == ([[3, {"item_error": 1}]], "item 3: item_error: no text")


def test_what_a_workload_told_last_stands_until_there_is_more_of_it_or_its_worker_is_gone(attempt):
    told = [claim(1), (2, "tell", {"text": "4 answers judged"}), publishes(3, 1), claim(4, 4)]
    assert attempt(*told)["progress"] == "4 answers judged"
    assert attempt(*told, (5, "add_death", DIES), claim(6, 4))["progress"] is None
    assert attempt(*told, (5, "end"))["progress"] is None


def test_what_is_told_of_loading_or_of_waiting_ends_with_it(attempt):
    loads = [(1, "loading"), (2, "tell", {"text": "1 of 3 files"})]
    assert attempt(*loads)["progress"] == "1 of 3 files"
    assert attempt(*loads, (3, "ready", READY))["progress"] is None
    waits = [claim(1), (2, "waiting", {"items": 3, "seconds": 2.0})]
    record = attempt(*waits)
    assert (record["progress"], record["n_retried"]) == ("waiting 2 s before retrying 3 items", 3)
    assert attempt(*waits, *calls(4, [0, 1]))["progress"] is None
    assert attempt(claim(1), (2, "tell", TELLS), *calls(4, [0, 1]))["progress"] == "half"


def test_seconds_of_waiting_for_others_and_of_helping_them_are_counted(attempt):
    begun = [(1, "claim", {"shard": 3, "idle_s": 0.5}), publishes(5, 1)]
    joins = (9, "joined", {"seconds": 2.0, "idle_s": 1.0})
    record = attempt(*begun, (6, "tell", TELLS), joins, (12, "done", {"idle_s": 3.0, "reason": "complete"}))
    assert (record["idle_s"], record["kept_s"], record["lost_s"], record["progress"]) == (4.5, 2.0, 0.0, None)


def test_a_shard_that_was_taken_over_says_from_whom(attempt):
    record = attempt((1, "takeover", {"shard": 3, "from": "7_1.0", "host": "gpu02"}))
    assert record["takeovers"] == [{"shard": 3, "from": "7_1.0", "host": "gpu02"}]


def test_each_failed_item_of_a_class_is_counted(attempt):
    at, what, told = publishes(3, 1)
    record = attempt(claim(1), (at, what, {**told, "errors": {"item_error": 3, "cuda_oom": 2}}))
    assert record["n_errors"] == 5


def test_a_record_is_written_once_more_at_the_end_and_not_after(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 0, n_tasks=1)
    writer = AttemptWriter(run, Attempt("7", 0), usage=lambda: {"n_samples": 3})
    path, synced = run.tasks / "7_0.0.json", []
    monkeypatch.setattr("slurmgpu.util.atomic_files.os.fsync", synced.append)
    writer.write_if_due()
    assert not path.exists()
    writer.write()
    assert synced == []  # progress may be lost if the machine fails
    writer.end()
    assert synced
    record = read_record(path.read_bytes())
    assert (record["state"], record["usage"]) == ("ended", {"n_samples": 3})
    path.unlink()
    monkeypatch.setattr("slurmgpu.task.attempt_writer.time.monotonic", lambda: float("inf"))
    writer.write_if_due()
    assert not path.exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_record_that_cannot_be_written_ends_no_task_and_its_end_is_written_all_the_same(tmp_path, failing, number):
    run = pretend_run(tmp_path / "run", 0, n_tasks=1)
    writer = AttemptWriter(run, Attempt("7", 0))
    writer.write()
    path, n_times = run.tasks / "7_0.0.json", 1 if number == errno.EIO else 1000
    failing("replace", number, of=".partial", times=n_times)
    writer.enter("running")
    writer.write()  # not tried again: leases must be renewed meanwhile
    assert read_record(path.read_bytes())["state"] == "starting"
    failing("replace", number, of=".partial", times=n_times)
    writer.end()
    assert read_record(path.read_bytes())["state"] == "ended"


def test_what_a_workload_tells_stands_in_the_record_as_one_line_without_what_a_terminal_would_obey(attempt):
    told = "\x1b[31mepoch 3\x1b[0m\n\tloss\x07 0.2"
    assert attempt(claim(1), (2, "tell", {"text": told}))["progress"] == "epoch 3 loss 0.2"


def test_a_record_of_many_shards_is_written_with_a_line_for_each_field(attempt, tmp_path):
    record = attempt(*(event for n in range(500) for event in (claim(2 * n, n), publishes(2 * n + 1, 2 * n, n))))
    assert len(record["published"]) == 500
    text = (tmp_path / "run" / "tasks" / "7_0.0.json").read_text()
    assert text.count("\n") == len(record) + 2


@pytest.mark.parametrize(("cost_s", "interval_s"), [(0.0, 3.0), (0.05, 3.0), (0.15, 7.5), (60.0, 10.0)])
def test_what_takes_long_to_write_is_written_more_rarely(cost_s, interval_s):
    assert until_next(cost_s) == pytest.approx(interval_s)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
@pytest.mark.parametrize(("left", "lost_s"), [([], 4.0), ([gives_back(7, 2)], 7.0)])
def test_a_clock_that_is_set_changes_no_seconds_that_are_lost_or_kept(tmp_path, step_s, left, lost_s):
    run = pretend_run(tmp_path / "run", 0, n_tasks=1)

    def live(step_s):
        steady, ahead = [0.0], [1e9]
        writer = AttemptWriter(run, Attempt("7", 0), clocks=lambda: (ahead[0] + steady[0], steady[0]))
        for at, what, told in (claim(2, 2), claim(4, 3), (5, "progress", TELLS)):
            steady[0] = float(at)
            writer.add_event({"event": what, **told})
        ahead[0] += step_s
        steady[0] = 6.0
        writer.add_event({"event": "tell", **TELLS})
        begun = writer.record["started"]
        since = [writer.record[name] - begun for name in ("shard_started", "shard_kept")]
        for at, what, told in left:
            steady[0] = float(at)
            writer.add_event({"event": what, **told})
        steady[0] = 9.0
        writer.end()
        return since, writer.record["lost_s"], writer.record["kept_s"]

    assert live(step_s) == live(0.0) == ([4.0, 5.0], lost_s, 3.0)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_moves_earlier_times_and_changes_no_duration(tmp_path, step_s):
    run = pretend_run(tmp_path / "run", 0, n_tasks=1)
    steady, ahead = [0.0], [1e9]
    clocks = lambda: (ahead[0] + steady[0], steady[0])  # noqa: E731
    writer = AttemptWriter(run, Attempt("7", 0, end_time=1e9 + 99.0), clocks=clocks)
    writer.record["end_time"] = 1e9 + 99.0

    def live(at, what, **more):
        steady[0] = float(at)
        writer.add_event({"event": what, **more})

    def publish(shard, at, took):
        told = {"shard": shard, "items": 8, "errors": {}, "won": True, "revision": 0}
        live(at, "published", **told, started=ahead[0] + at - took, seconds=took)

    live(1, "loading")
    live(2, "ready", **READY)
    live(2, "claim", shard=2, idle_s=0.0)
    publish(2, 5, took=3)
    writer.add_death(DIES, writer.now())
    live(6, "claim", shard=3, idle_s=0.0)
    ahead[0] += step_s  # and the shard's events are by the new clock
    publish(3, 16, took=10)
    writer.end()
    record = read_record((run.tasks / "7_0.0.json").read_bytes())
    begun = 1e9 + step_s
    assert (record["started"], record["ended"], record["end_time"]) == (begun, begun + 16, begun + 99)
    assert [at for at, _ in record["phases"]] == [begun, begun + 1, begun + 2, begun + 16]
    assert [entry[1:3] for entry in record["published"]] == [[begun + 2, 3.0], [begun + 6, 10.0]]
    assert record["deaths"][0]["at"] == begun + 5
    assert record["lost_s"] == 0.0
    found = spent(record, 16.0, None, counting([record], {2, 3}))
    assert (found["useful"], found["loading"], found["lost"]) == (13.0, 1.0, 0.0)
