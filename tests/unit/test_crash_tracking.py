"""Workers that die: which items are suspected and quarantined, and when a task gives up."""

import functools
import itertools
import math
import signal

import pytest

from slurmgpu.errors import WorkerBrokenError
from slurmgpu.loader.adapted import adapt
from slurmgpu.run.claims import Claim
from slurmgpu.run.crash_history import History, read_history
from slurmgpu.run.records import Attempt
from slurmgpu.shards.columns import Array
from slurmgpu.task import crash_tracking
from slurmgpu.task.crash_tracking import MAX_DEATHS, MAX_DEATHS_LOADING, MAX_PARKED, Deaths
from slurmgpu.task.supervisor import Task
from slurmgpu.util import cgroups
from slurmgpu.worker.call_failures import Failure
from slurmgpu.worker.computer import Computer
from slurmgpu.workload import Item
from tests.support.runs import planned_run

COLUMNS = {"x": Array("int64")}
ME = Claim("1_0", "1_0.0", "here", 1)


@pytest.fixture
def run(tmp_path):
    """A run of one shard of 40 items."""
    return planned_run(tmp_path / "run")


def test_a_task_gives_up_when_too_many_workers_die_while_loading(run):
    deaths = Deaths(run, 1)
    found = [deaths.add_death(-signal.SIGSEGV, was_oom=False, held={}) for _ in range(MAX_DEATHS_LOADING)]
    assert [why for _, why in found[:-1]] == [None] * (MAX_DEATHS_LOADING - 1)
    assert found[-1][1] == "the worker died by SIGSEGV; 3 workers died one after another"
    assert all(death == {"class": "crash", "message": "the worker died by SIGSEGV"} for death, _ in found)


def test_a_task_gives_up_when_workers_die_of_ever_other_items_and_no_shard_is_published(run):
    deaths = Deaths(run, 1)
    for n in range(MAX_DEATHS):
        deaths.begin_call(0, [2 * n, 2 * n + 1], False)
        death, why = deaths.add_death(-signal.SIGKILL, was_oom=False, held={})
        assert (death["shard"], death["items"]) == (0, [2 * n, 2 * n + 1])
        assert (why is not None) is (n == MAX_DEATHS - 1)


def test_a_published_shard_makes_the_deaths_before_it_forgotten(run):
    deaths = Deaths(run, 1)
    for n in range(3 * MAX_DEATHS):
        if n % (MAX_DEATHS - 1) == 0:
            deaths.forget()
        deaths.begin_call(0, [n], False)
        assert deaths.add_death(-signal.SIGTERM, was_oom=False, held={})[1] is None


def test_a_quarantined_item_makes_the_deaths_before_it_forgotten(run):
    deaths = Deaths(run, 1)
    for item in range(MAX_DEATHS):
        for is_isolated in (False, True):
            deaths.begin_call(0, [item], is_isolated)
            assert deaths.add_death(-signal.SIGSEGV, was_oom=False, held={})[1] is None
    assert len(read_history(run.claims.folder, 0).quarantined) == MAX_DEATHS


def test_a_kill_by_the_kernel_counts_if_it_came_since_the_worker_began_its_items(run, monkeypatch):
    """The counter of the kernel does not say which process it killed: an own child, of long ago, or the worker."""
    clock, kills = [1000.0], [7]
    monkeypatch.setattr("slurmgpu.util.cgroups.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(cgroups, "oom_kills", lambda: kills[0])
    watch = cgroups.KillWatch()
    assert watch.age_s == math.inf
    clock[0], kills[0] = 1060.0, 8
    watch.look()
    clock[0] = 1100.0
    assert watch.age_s == 40.0
    kills[0] = 9
    assert watch.age_s == 0.0


@pytest.mark.parametrize("code", [1, -signal.SIGKILL], ids=["by itself", "by its task"])
def test_an_item_that_breaks_its_worker_is_quarantined_with_what_was_said_of_it(run, code):
    deaths = Deaths(run, 1)
    for items, is_isolated in (([4, 5, 6], False), ([5], True)):
        assert read_history(run.claims.folder, 0).quarantined == {}
        deaths.begin_call(0, items, is_isolated)
        deaths.note_broken("a device-side assert")
        deaths.note_broken("what came of it")
        deaths.add_death(code, was_oom=False, held={})
    assert read_history(run.claims.folder, 0).quarantined == {5: "crash: a device-side assert"}


def test_items_whose_call_has_ended_are_not_suspected(run):
    deaths = Deaths(run, 1)
    deaths.begin_call(0, [4], True)
    deaths.end_call()
    death, _ = deaths.add_death(-signal.SIGSEGV, was_oom=False, held={})
    assert "items" not in death
    assert read_history(run.claims.folder, 0) == History()


def test_items_of_the_next_shard_are_still_suspected_when_the_last_one_is_published(run):
    deaths = Deaths(run, 1)
    deaths.begin_call(1, [44, 45], False, ahead=[1, 46])
    deaths.end_call(0)
    death, _ = deaths.add_death(-signal.SIGSEGV, was_oom=False, held={})
    assert (death["shard"], death["items"]) == (1, [44, 45])
    history = read_history(run.claims.folder, 1)
    assert history.isolates([44, 45])
    assert history.isolates([46, 47])
    deaths.begin_call(1, [44], True)
    deaths.end_call(1)
    assert "items" not in deaths.add_death(-signal.SIGSEGV, was_oom=False, held={})[0]


def test_an_item_that_needs_more_host_memory_leaves_its_shard_to_a_submission_that_has_it_once(run):
    claims = run.claims
    assert claims.take(0, ME)
    deaths, held = Deaths(run, 1), {0: claims.read(0)}
    for n in range(2):
        for items, is_isolated in (([4, 5], False), ([4, 5], False), ([5], True), ([5], True)):
            deaths.begin_call(0, items, is_isolated)
            deaths.add_death(-signal.SIGKILL, was_oom=True, held=held)
        if n == 0:
            assert held == {}
            assert claims.read(0).parked
            assert deaths.parked == ["item 5 needs more host memory; its shard 0 was left"]
            assert read_history(claims.folder, 0).quarantined == {}
            deaths = Deaths(run, 2)
    assert list(read_history(claims.folder, 0).quarantined) == [5]
    assert deaths.parked == []


@pytest.mark.parametrize("publishes", [False, True])
def test_a_task_ends_when_all_shards_need_more_host_memory(run, publishes):
    """Each of them costs three or four loadings of a model, and a run may have thousands."""
    deaths, whys = Deaths(run, 1), []
    for shard in range(MAX_PARKED):
        assert run.claims.take(shard, ME)
        if publishes and shard == MAX_PARKED - 1:
            deaths.forget()
        for is_isolated in (False, False, True):
            deaths.begin_call(shard, [shard], is_isolated)
            whys.append(deaths.add_death(-signal.SIGKILL, was_oom=True, held={shard: run.claims.read(shard)})[1])
    assert len(deaths.parked) == MAX_PARKED
    assert whys[:-1] == [None] * (len(whys) - 1)
    assert (whys[-1] or "").endswith("" if publishes else f"; {MAX_PARKED} shards in a row were left for more memory")
    assert (whys[-1] is None) is publishes


@pytest.mark.parametrize("is_isolated", [False, True])
def test_an_item_whose_own_process_was_killed_for_memory_is_called_once_in_a_submission(run, is_isolated):
    assert run.claims.take(0, ME)
    deaths, held = Deaths(run, 1), {0: run.claims.read(0)}
    for n in range(2):
        deaths.begin_call(0, [5], is_isolated)
        deaths.note_broken("the kernel killed a process of this job", is_sure=True)
        deaths.add_death(1, was_oom=True, held=held)
        assert [*read_history(run.claims.folder, 0).quarantined] == [5] * n
        assert deaths.parked == ["item 5 needs more host memory; its shard 0 was left"] * (1 - n)
        deaths = Deaths(run, 2)


def test_no_item_waits_for_memory_at_once_if_something_else_may_have_used_it(run):
    deaths = Deaths(run, 1)
    for items, ahead, is_sure in (([4, 5], None, True), ([4], (0, 5), True), ([4], None, False)):
        deaths.begin_call(0, items, False, ahead)
        deaths.note_broken("a process of the pool died", is_sure=is_sure)
        deaths.add_death(1, was_oom=True, held={})
    assert not deaths.parked


def test_items_that_were_prepared_when_a_worker_died_are_suspected_as_those_that_were_computed(run):
    deaths = Deaths(run, 1)
    deaths.begin_call(0, [4, 5, 6, 7], False, ahead=[0, 8])
    deaths.add_death(-signal.SIGSEGV, was_oom=False, held={})
    history = read_history(run.claims.folder, 0)
    assert history.isolates([4, 5, 6, 7])
    assert history.isolates([8, 9, 10, 11])
    assert not history.isolates([12, 13])
    deaths.begin_call(0, [9], True)
    deaths.add_death(-signal.SIGSEGV, was_oom=False, held={})
    assert [*read_history(run.claims.folder, 0).quarantined] == [9]


def test_an_item_is_not_blamed_for_the_death_of_what_was_prepared_while_it_was_computed_alone(run):
    deaths = Deaths(run, 1)
    deaths.begin_call(0, [2], False, ahead=[0, 3])
    deaths.add_death(3, was_oom=False, held={})  # of item 3
    deaths.begin_call(0, [2], True)
    deaths.add_death(-signal.SIGKILL, was_oom=False, held={})  # by chance
    deaths.begin_call(0, [3], True)
    deaths.add_death(3, was_oom=False, held={})
    assert [*read_history(run.claims.folder, 0).quarantined] == [3]


class Killing:
    """A workload whose batches raise for one item, or are too large, and die of another."""

    columns = COLUMNS

    def __init__(self, error, fails):
        self.error, self.fails = error, fails

    def __call__(self, items):
        indices = [item.index for item in items]
        if self.fails(indices):
            raise self.error
        if 6 in indices:
            raise WorkerBrokenError("the worker died")
        return [{"x": index} for index in indices]


@pytest.mark.parametrize(
    ("error", "fails", "n_failed"),
    [
        (ValueError("bad"), lambda indices: 1 in indices, 2),
        (MemoryError("too large"), lambda indices: len(indices) > 4, 1),
    ],
)
def test_an_item_that_kills_in_a_part_of_a_batch_is_quarantined_as_in_a_whole_one(run, error, fails, n_failed):
    deaths = Deaths(run, 1)
    on_batch = functools.partial(deaths.begin_call, 0)
    computer = Computer(
        adapt(Killing(error, fails), "Killing"), "Killing", COLUMNS, 8, on_batch=lambda *call: on_batch(*call[:2])
    )
    items = [Item(index, {}) for index in range(16)]
    for _ in range(2):
        with pytest.raises(WorkerBrokenError):
            computer.compute(computer.take_in(items), read_history(run.claims.folder, 0))
        assert deaths.add_death(70, was_oom=False, held={})[1] is None
    rows = computer.compute(computer.take_in(items), read_history(run.claims.folder, 0)).rows
    failed = {index: row.kind for index, row in rows.items() if isinstance(row, Failure)}
    assert failed[6] == "crash"
    assert len(failed) == n_failed


def claims(shard):
    return {"event": "claim", "shard": shard, "idle_s": 0.0}


def breaks(*, blames_items):
    return {"event": "broken", "message": "no files are left", "blames_items": blames_items, "is_sure": False}


BATCH = {"event": "batch", "items": [4, 5], "isolated": False, "ahead": None}
PUBLISHED = {"event": "published", "items": 8, "errors": {}, "started": 0.0, "seconds": 1.0, "won": True, "revision": 0}


@pytest.mark.parametrize(
    ("events", "items"),
    [
        ([BATCH], [4, 5]),
        ([BATCH, {"event": "waiting", "seconds": 9.0, "items": 2}], None),
        ([BATCH, {"event": "left", "shard": 0}], None),
        ([BATCH, {"event": "skipped", "shard": 0}], None),
        ([BATCH, {"event": "skipped", "shard": 1}], [4, 5]),  # one that was claimed ahead
        ([BATCH, breaks(blames_items=True)], [4, 5]),
        ([BATCH, breaks(blames_items=False)], None),
        ([BATCH, {**PUBLISHED, "shard": 0}], None),
        ([BATCH, {**PUBLISHED, "shard": 1}], [4, 5]),  # the one before, by another thread
    ],
    ids=[
        "in a call",
        "between tries",
        "left",
        "given back",
        "another given back",
        "broken by it",
        "broken before",
        "published",
        "another published",
    ],
)
def test_the_items_in_flight_are_those_of_the_call_that_a_worker_is_in(run, events, items):
    task = Task(run, Attempt("7", 0, device="cpu"))
    for event in (claims(0), *events):
        task.handle(event)
    death, _ = task._deaths.add_death(-signal.SIGKILL, was_oom=False, held={})
    assert death.get("items") == items


def test_a_death_is_recorded_at_a_time_before_its_lines_in_the_log(run, monkeypatch):
    """However long a file system takes to write them: they are looked for from that time on."""
    task, ticks, logged = Task(run, Attempt("7", 0, device="cpu")), itertools.count(1.0), []
    monkeypatch.setattr(task.writer, "_clocks", lambda: (now := next(ticks), now))
    monkeypatch.setattr(crash_tracking.log, "error", lambda *_: logged.append(next(ticks)))
    task._add_death(-signal.SIGKILL, was_oom=False)
    assert [death["at"] <= logged[0] for death in task.record["deaths"]] == [True]
