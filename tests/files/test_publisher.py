"""What a worker computed reaches the shards' folder once, and its task hears of it once."""

import errno
import threading

import numpy as np
import pytest

from slurmgpu.shards.columns import Array, Json
from slurmgpu.shards.shard_file import read_rows
from slurmgpu.worker import publisher as publishing
from slurmgpu.worker.assignment import Assignment, WorkerFailedError
from slurmgpu.worker.call_failures import Failure
from slurmgpu.worker.computed_shard import Computed, ComputedShard
from slurmgpu.worker.publisher import SYNC_S, Publisher
from tests.support.runs import planned_run

COLUMNS = {"x": Array("int64"), "given": Json()}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return planned_run(tmp_path / "run", n_items=12, shard_items=4)


def publisher_of(run, told, on_published=lambda: None, reports_in_threads=False):
    return Publisher(run, Assignment("1_0", "1_0.0"), COLUMNS, told.append, on_published, reports_in_threads)


def computed(shard, x=1, seconds=1.0, **more):
    rows = {index: {"x": np.array(x, "<i8"), "given": b"{}"} for index in range(4 * shard, 4 * shard + 4)}
    return ComputedShard(shard, Computed({**rows, **more.pop("rows", {})}, **more), 2.0, seconds, None)


def rows_of(run, shard):
    start, stop = run.plan.bounds(shard)
    fingerprint = (run.plan.fingerprint,)
    return read_rows(run.revision_path(shard, 0), COLUMNS, fingerprint=fingerprint, start=start, stop=stop)[0]


@pytest.mark.parametrize("reports_in_threads", [False, True])
def test_a_shard_that_is_written_beside_the_next_one_is_published_and_told_of_once(
    run, monkeypatch, reports_in_threads
):
    real, go_on, told, noted = publishing.write_shard, threading.Event(), [], []
    monkeypatch.setattr(publishing, "write_shard", lambda *given, **more: go_on.wait(60) and real(*given, **more))
    publisher = publisher_of(run, told, lambda: noted.append(threading.current_thread()), reports_in_threads)
    publisher.is_beside = True
    publisher.begin(computed(0))
    publisher.end(waits=False)
    assert (run.published(), noted, publisher.slowest_s) == (set(), [], 0.0)
    threading.Timer(0.05, go_on.set).start()
    publisher.begin(computed(1))
    assert (0 in run.published(), len(noted)) == (True, 1)
    publisher.end()
    publisher.end()
    publisher.close()
    assert run.published() == {0, 1}
    assert [event["shard"] for event in told] == [0, 1]
    assert noted == [threading.main_thread()] * 2


def test_the_thread_that_writes_ends_with_its_publisher(run):
    before = threading.enumerate()
    publisher = publisher_of(run, [])
    publisher.is_beside = True
    publisher.begin(computed(0))
    publisher.end()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "publish" and thread not in before]
    publisher.close()
    thread.join(60)
    assert not thread.is_alive()


def failing_writes(monkeypatch, number, n_times):
    real, left = publishing.write_shard, [None] * n_times

    def write(*given, **more):
        if left:
            left.pop()
            raise OSError(number, "as it happens")
        return real(*given, **more)

    monkeypatch.setattr(publishing, "write_shard", write)


@pytest.mark.parametrize(("number", "n_times"), [(errno.EIO, 3), (errno.ENOSPC, 1)])
def test_a_shard_is_written_again_after_an_error_that_may_pass(run, monkeypatch, number, n_times):
    failing_writes(monkeypatch, number, n_times)
    publisher_of(run, told := []).begin(computed(1))
    assert (run.published(), told[0]["won"]) == ({1}, True)


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_shard_that_cannot_be_written_says_what_is_full(run, monkeypatch, is_beside):
    failing_writes(monkeypatch, errno.ENOSPC, 9)
    publisher = publisher_of(run, told := [])
    publisher.is_beside = is_beside
    with pytest.raises(WorkerFailedError, match=f"shard 1 cannot be written in {run.shards}: ") as raised:
        [do() for do in (lambda: publisher.begin(computed(1)), publisher.end)]
    publisher.close()
    assert (raised.value.kind, told, publisher.slowest_s) == ("disk_full", [], 0.0)


def test_a_shard_that_another_task_published_first_stays_and_is_told_as_lost(run):
    publisher_of(run, []).begin(computed(0, x=7))
    publisher_of(run, told := []).begin(computed(0, x=8))
    assert [int(row["x"]) for row in rows_of(run, 0)] == [7] * 4
    assert told[0]["won"] is False


def test_a_failed_item_is_published_with_its_kept_fields_and_told_of(run):
    failed = {"rows": {5: Failure("item_error", "blurred")}, "kept": {5: {"given": b"[3]"}}}
    publisher_of(run, told := []).begin(computed(1, **failed))
    [error] = [row for row in rows_of(run, 1) if isinstance(row, Exception)]
    assert str(error) == "item_error: blurred"
    assert b"[3]" in run.shard_path(1).read_bytes()
    assert (told[0]["items"], told[0]["errors"]) == (4, {"item_error": 1})


def test_names_of_shards_are_synced_once_in_a_while_and_at_the_end(run, monkeypatch):
    now, synced = [1000.0], []
    monkeypatch.setattr(publishing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(publishing, "sync_names", lambda folder: synced.append(run.published()))
    publisher = publisher_of(run, [])
    for shard, seconds in ((0, 3.0), (1, 2.0)):
        publisher.begin(computed(shard, seconds=seconds))
    assert (synced, publisher.slowest_s) == ([{0}], 3.0)
    now[0] += SYNC_S
    publisher.begin(computed(2))
    publisher.close()
    assert synced == [{0}, {0, 1, 2}]
    publisher_of(run, []).close()
    assert len(synced) == 2
    again = publisher_of(run, [])
    for _ in range(2):
        again.begin(computed(2))
    again.close()
    assert len(synced) == 4
