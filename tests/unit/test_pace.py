"""The time left: what a third of a steady run says of the rest, and when it is better to say nothing."""

import pytest

from slurmgpu.report.pace import pace_of, rate_of
from slurmgpu.report.queued import requeued, startable, still_waiting
from tests.support.pretend_runs import BEGIN, Pretended

SHAPES = {
    "few large shards": {"n_tasks": 8, "n_shards": 40, "seconds": 1500, "shard_items": 100},
    "many small shards": {"n_tasks": 64, "n_shards": 4000, "seconds": 3, "shard_items": 4},
    "faults": {"n_tasks": 64, "n_shards": 1500, "faulty": True},
    "shards that differ": {"n_tasks": 10, "n_shards": 100, "seconds": 100, "spread": 0.5},
    "tasks that are slower than others": {"n_tasks": 12, "n_shards": 300, "slow": 3.0},
    "a thousand tasks": {"n_tasks": 1000, "n_shards": 5000},
    "one task": {"n_tasks": 1, "n_shards": 30},
    "tasks that start one after another": {"n_tasks": 16, "n_shards": 600, "staggered": True},
    "an array that is throttled": {"n_tasks": 40, "n_concurrent": 8, "n_shards": 500, "walltime_s": None},
}


def end_of(pretended):
    records, _ = pretended.records(1e7)
    return max(started + seconds for record in records for _, started, seconds, _ in record["published"]) - BEGIN


def pending(n_tasks, reason="Priority", start=None):
    return {"job_id": "4711_[9]", "state": "PENDING", "reason": reason, "start": start, "n_tasks": n_tasks}


def queue_at(pretended, records):
    """What squeue says of the tasks that have not started."""
    waiting = sorted(set(range(pretended.n_tasks)) - {record["task"] for record in records})
    if pretended.staggered:
        return [pending(1, start=BEGIN + 60 * task) for task in waiting]
    return [pending(len(waiting), "JobArrayTaskLimit")] if waiting else []


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_after_a_third_of_a_steady_run_the_time_left_is_right_within_a_fifth(shape):
    pretended = Pretended(**shape)
    end = end_of(pretended)
    for part in (1 / 3, 1 / 2, 0.8):
        records, published = pretended.records(part * end)
        queue = queue_at(pretended, records)
        pace = pace_of(pretended.plan(), records, published, queue, BEGIN + part * end)
        assert pace.left_s == pytest.approx((1 - part) * end, rel=0.2), part
        assert pace.n_shards_left_over == 0


def test_no_end_is_foretold_while_each_call_fails():
    pretended = Pretended(n_tasks=1, n_shards=30)
    records, _ = pretended.records(95)
    [record] = records
    assert pace_of(pretended.plan(), records, [], None, BEGIN + 95).left_s
    record["progress"] = "each call failed so far: no such model"
    failing = pace_of(pretended.plan(), records, [], None, BEGIN + 95)
    assert (failing.items_per_s, failing.left_s, failing.n_living) == (None, None, 1)
    record["progress"], record["n_items"] = None, 8
    assert pace_of(pretended.plan(), records, [], None, BEGIN + 95).left_s
    record["n_errors"] = 8  # it was slow to load, or quick to fail
    assert pace_of(pretended.plan(), records, [], None, BEGIN + 95).left_s is None


@pytest.fixture
def steady():
    """Four tasks of 0.25 items a second; 50 s after they have loaded the first shard is not done yet."""
    return Pretended(n_tasks=4, n_shards=200, seconds=64.0, spread=0.0)


def test_nothing_is_said_before_anything_is_computed(steady):
    records, published = steady.records(30)
    pace = pace_of(steady.plan(), records, published, None, BEGIN + 30)
    assert (pace.items_per_s, pace.left_s, pace.left_if_queued_start_s, pace.n_living) == (None, None, None, 4)


def test_the_first_shard_need_not_be_done_for_an_estimate(steady):
    end = end_of(steady)
    records, published = steady.records(95)
    assert not published
    pace = pace_of(steady.plan(), records, published, None, BEGIN + 95)
    assert pace.left_s == pytest.approx(end - 95, rel=0.2)


def test_an_item_that_takes_the_whole_run_is_given_no_time():
    pretended = Pretended(n_tasks=2, n_shards=2, shard_items=1, seconds=3600)
    plan = pretended.plan()
    records, published = pretended.records(1800)
    assert pace_of(plan, records, published, None, BEGIN + 1800).left_s is None


def test_who_has_written_nothing_for_a_lease_does_not_count(steady):
    records, published = steady.records(1000)
    plan, now = steady.plan(), BEGIN + 1000
    of_all = pace_of(plan, records, published, None, now)
    for record in records[:2]:
        record["updated"] = now - plan.lease_s - 1
    of_two = pace_of(plan, records, published, None, now)
    assert of_two.n_living == 2
    assert of_two.items_per_s == pytest.approx(of_all.items_per_s / 2)
    assert of_two.left_s == pytest.approx(2 * of_all.left_s, rel=0.1)


def test_queued_tasks_are_counted_apart_unless_it_is_known_when_they_start(steady):
    records, published = steady.records(1000)
    plan, now = steady.plan(), BEGIN + 1000
    alone = pace_of(plan, records, published, [], now)
    unknown = pace_of(plan, records, published, [pending(4)], now)
    known = pace_of(plan, records, published, [pending(4, start=now)], now)
    late = pace_of(plan, records, published, [pending(4, start=now + 1e6)], now)
    assert (unknown.left_s, unknown.n_waiting) == (alone.left_s, 4)
    assert unknown.left_if_queued_start_s == pytest.approx(alone.left_s / 2, rel=0.1)
    assert known.left_s == known.left_if_queued_start_s == unknown.left_if_queued_start_s
    assert late.left_s == pytest.approx(alone.left_s)


def test_with_no_task_alive_the_time_left_counts_from_slurms_start_of_the_next(steady):
    records, published = steady.records(1000)
    for record in records:
        record |= {"state": "ended", "ended": record["updated"], "shard": None, "shard_started": None}
    plan, now = steady.plan(), BEGIN + 1000
    assert pace_of(plan, records, published, [pending(4)], now).left_s is None
    at_once = pace_of(plan, records, published, [pending(4, start=now)], now)
    in_an_hour = pace_of(plan, records, published, [pending(4, start=now + 3600)], now)
    assert in_an_hour.left_s == pytest.approx(at_once.left_s + 3600)


def test_shards_for_which_walltimes_leave_no_time_are_counted(steady):
    steady.walltime_s = 1600.0
    records, published = steady.records(1000)
    pace = pace_of(steady.plan(), records, published, [], BEGIN + 1000)
    assert pace.left_s is None
    # To 60 s before the end each can compute 8 more, beside what is in hand.
    assert pace.n_shards_left_over == pytest.approx(200 - len(published) - 4 * 9, abs=4)
    throttled = pace_of(steady.plan(), records, published, [pending(96, "JobArrayTaskLimit")], BEGIN + 1000)
    assert throttled.left_s == pytest.approx((200 - len(published)) * 64 / 4, rel=0.2)


def test_shards_are_left_over_if_all_that_wait_cannot_compute_them(steady):
    steady.walltime_s = 1600.0
    records, published = steady.records(1000)
    n_over = pace_of(steady.plan(), records, published, [], BEGIN + 1000).n_shards_left_over

    def left_over(job):
        pace = pace_of(steady.plan(), records, published, [*running(4), job], BEGIN + 1000)
        return pace.n_shards_left_over

    # Each of the two that follow computes for 1,500 s.
    for job in (
        pending(2, "JobArrayTaskLimit"),
        pending(2, start=BEGIN + 2000),
        {**pending(2), "job_id": "4711_[4-5%4]"},
    ):
        assert left_over(job) == pytest.approx(n_over - 2 * 1500 / 64, abs=4)
    assert left_over(pending(2)) == left_over(pending(2, "JobHeldUser")) == 0


def running(n_tasks):
    return [{**pending(1, "None"), "job_id": f"4711_{task}", "state": "RUNNING"} for task in range(n_tasks)]


def test_a_suspended_task_has_no_rate(steady):
    records, published = steady.records(1000)
    job = {**running(4)[3], "state": "SUSPENDED"}
    four, three = (
        pace_of(steady.plan(), records, published, queue, BEGIN + 1000) for queue in (running(4), [*running(3), job])
    )
    assert (four.n_living, three.n_living) == (4, 3)
    assert three.items_per_s == pytest.approx(0.75 * four.items_per_s, rel=0.02)
    assert three.left_s > 1.2 * four.left_s


@pytest.mark.parametrize(
    ("reason", "start"),
    [("JobArrayTaskLimit", None), ("Priority", None), ("Resources", None), ("Priority", BEGIN + 1060)],
)
def test_an_arrays_own_limit_holds_whatever_reason_slurm_names(steady, reason, start):
    steady.walltime_s = 7200.0
    records, published = steady.records(1000)
    rest = {**pending(60, reason, start), "job_id": "4711_[4-63%4]"}
    for queue in ([*running(4), rest], [rest]):  # squeue may have been asked before the four had started
        pace = pace_of(steady.plan(), records, published, queue, BEGIN + 1000)
        assert pace.left_s == pace.left_if_queued_start_s == pytest.approx((200 - len(published)) * 64 / 4, rel=0.2)
        assert (pace.n_waiting, pace.n_shards_left_over) == (60, 0)


def test_where_an_array_has_room_as_many_tasks_as_it_has_room_for_may_start(steady):
    records, published = steady.records(1000)
    plan, now = steady.plan(), BEGIN + 1000
    rest = {**pending(60), "job_id": "4711_[4-63%8]"}
    requeued = {**pending(1), "job_id": "4711_2"}
    eight = pace_of(plan, records, published, [*running(4), pending(4)], now)
    others = [job for job in running(4) if job["job_id"] != requeued["job_id"]]
    for queue in ([*running(4), rest], [*others, rest, requeued], [*others, requeued, rest]):
        throttled = pace_of(plan, records, published, queue, now)
        assert throttled.left_if_queued_start_s == pytest.approx(eight.left_if_queued_start_s, rel=0.05)


def test_a_task_that_slows_down_is_noticed_within_its_shard(steady):
    records, published = steady.records(1000)
    plan, now = steady.plan(), BEGIN + 1000
    before = pace_of(plan, records, published, None, now).items_per_s
    for record in records:
        record |= {"shard_started": now - 640, "shard_done": 8, "updated": now}
    assert pace_of(plan, records, published, None, now).items_per_s < before / 1.5


@pytest.mark.parametrize(
    ("in_hand_s", "done", "rate"),
    [(63.0, 1, 0.25), (80.0, 8, 24 / 144), (80.0, 0, 0.25), (97.0, 0, 16 / 161)],
)
def test_a_shard_without_progress_may_take_half_as_long_again_as_usual(steady, in_hand_s, done, rate):
    [record, *_], _ = steady.records(1000)
    record["published"] = [[0, BEGIN, 64.0, True]]
    record |= {"shard": 1, "shard_started": BEGIN + 64, "shard_done": done, "updated": BEGIN + 64 + in_hand_s}
    assert rate_of(steady.plan(), record) == pytest.approx(rate)


def test_of_shards_of_which_some_items_are_computed_again_only_these_count(steady):
    [record, *_], _ = steady.records(1000)
    record["published"] = [[0, BEGIN, 4.0, True, 1], [1, BEGIN + 4, 4.0, True, 1]]
    record |= {"shard": 2, "shard_started": BEGIN + 8, "shard_done": 0, "updated": BEGIN + 9}
    open_ones, again = {2, 3}, dict.fromkeys(range(4), 1)
    pace = pace_of(steady.plan(), [record], set(range(200)) - open_ones, None, BEGIN + 9, again=again)
    assert (pace.items_per_s, pace.left_s) == (0.25, pytest.approx(3 + 4))
    half_whole = pace_of(
        steady.plan(), [record], set(range(200)) - open_ones, None, BEGIN + 9, again={0: 1, 1: 1, 2: 1}
    )
    assert half_whole.left_s == pytest.approx(3 + 16 * 4, rel=0.5)


def test_a_task_that_loads_again_computes_its_shard_once_it_has_loaded(steady):
    [record, *_], _ = steady.records(1000)
    plan, now = steady.plan(), BEGIN + 1000
    record["published"] = [[0, now - 100, 64.0, True]]
    record |= {"shard": 1, "shard_started": None, "shard_done": 0, "state": "loading", "load_s": 40.0, "updated": now}
    record["phases"] = [*record["phases"], [now - 10, "loading"]]
    assert pace_of(plan, [record], set(range(200)) - {1}, None, now).left_s == pytest.approx(30 + 64)


@pytest.mark.parametrize("state", ["running", "ended"])
def test_the_shard_of_a_suspended_task_is_free_once_its_lease_is_over_and_of_an_ended_one_at_once(steady, state):
    [one, other, *_], _ = steady.records(1000)
    plan, now = steady.plan(), BEGIN + 1000
    one["published"] = [[0, now - 64, 64.0, True]]
    one |= {"shard": None, "shard_started": None, "updated": now}
    other |= {"shard": 1, "shard_started": now - 60, "updated": now - 2, "state": state}
    other["ended"] = now - 2 if state == "ended" else None
    queue = [{**running(2)[1], "state": "SUSPENDED"}] if state == "running" else []
    left_s = 64 + (plan.lease_s - 2 if state == "running" else 0)
    assert pace_of(plan, [one, other], set(range(200)) - {1}, queue, now).left_s == pytest.approx(left_s, abs=0.5)


@pytest.mark.parametrize("seconds", [64.0, 1.0, 0.05])
def test_a_task_that_wrote_between_two_shards_computes(seconds):
    pretended = Pretended(n_tasks=4, n_shards=4000, seconds=seconds, spread=0.0)
    records, published = pretended.records(42 + 50 * seconds)
    plan, now = pretended.plan(), BEGIN + 42 + 50 * seconds
    before = pace_of(plan, records, published, None, now)
    assert before.items_per_s == pytest.approx(4 * 16 / seconds, rel=0.2)
    for record in records:
        _, started, took, _ = record["published"][-1]
        record |= {"shard": None, "shard_started": None, "shard_done": 0, "updated": started + took + 0.2}
    between = pace_of(plan, records, published, None, now)
    assert between.items_per_s == pytest.approx(before.items_per_s, rel=0.1)
    assert sum(between.rates.values()) == pytest.approx(between.items_per_s)
    # Who found no shard that is free, and who loads again, does not.
    records[0]["updated"] += 30
    records[1] |= {"state": "loading", "phases": [*records[1]["phases"], [records[1]["updated"], "loading"]]}
    two = pace_of(plan, records, published, None, now)
    assert two.items_per_s == pytest.approx(before.items_per_s / 2, rel=0.1)
    assert sorted(two.rates) == [record["attempt"] for record in records[2:]]


def test_what_lies_between_very_short_shards_counts_as_well(steady):
    records, published = steady.records(1000)
    plan, now = steady.plan(), BEGIN + 1000
    for record in records:
        record["published"] = [[shard, now - 10 + shard, 0.1, True] for shard in range(10)]  # one in a second
        record |= {"shard_started": now, "shard_done": 0, "updated": now, "shard": 99}
    assert pace_of(plan, records, published, None, now).items_per_s == pytest.approx(4 * 16, rel=0.1)


def test_a_rate_covers_the_last_three_shards_if_they_take_long(steady):
    [record, *_], _ = steady.records(1000)
    took = [9000.0, 400.0, 600.0, 800.0]
    record["published"] = [[n, BEGIN + sum(took[:n]), seconds, True] for n, seconds in enumerate(took)]
    record |= {"shard": None, "shard_started": None}
    assert rate_of(steady.plan(), record) == pytest.approx(3 * 16 / 1800)
    record["published"] = [[0, BEGIN, 0.0, True]]  # by a clock that was set back
    assert rate_of(steady.plan(), record) is None


@pytest.mark.parametrize(
    ("job_id", "n_tasks", "tasks", "n_left"),
    [
        ("7_[4-7%4]", 4, [4, 5, 12], 2),
        ("7_[0-9:3,12]", 5, [3, 4, 12], 3),
        ("7_4", 1, [4], 0),
        ("7", 1, [0], 0),
        ("8_[4-7]", 4, [4, 5], 4),
        ("7_[4-7]", 4, [], 4),
        ("7_[0-1,3]*4", 12, [5, 6, 9, 11], 8),  # job 1 has started, and so have all of its four tasks
        ("7_1*4", 4, [5], 0),
        ("7_1*4", 4, [8], 4),
    ],
)
def test_a_task_that_has_written_of_itself_since_the_queue_was_asked_waits_no_more(job_id, n_tasks, tasks, n_left):
    job_id, _, per_node = job_id.partition("*")
    job = {**pending(n_tasks), "job_id": job_id, "tasks_per_node": int(per_node or 1)}
    merge = {**pending(0, "Dependency"), "job_id": "9"}
    running = {**pending(1, "None"), "job_id": "7_4", "state": "RUNNING"}
    records = [{"job": "7", "task": task, "updated": BEGIN + 1} for task in tasks]
    earlier = [{"job": "7", "task": task, "updated": BEGIN - 1} for task in (6, 7)]  # they ended, and were put back
    left = still_waiting([job, merge, running], [*records, *earlier], BEGIN)
    assert left == [{**job, "n_tasks": n_left}] * (n_left > 0) + [merge, running]


def test_the_tasks_of_a_job_are_requeued_and_throttled_together():
    job = {**pending(4), "job_id": "7_1", "tasks_per_node": 4}
    rest = {**pending(8), "job_id": "7_[2-3%2]", "tasks_per_node": 4}
    assert requeued([job, rest]) == {"7_4", "7_5", "7_6", "7_7"}
    running = {**job, "job_id": "7_0", "state": "RUNNING"}
    assert [n for _, n in startable([running, rest], [])] == [4]  # two jobs of four at once, and one runs


def test_nothing_is_left_of_a_run_whose_shards_are_published(steady):
    records, published = steady.records(1e7)
    pace = pace_of(steady.plan(), records, published, [], BEGIN + 1e7)
    assert (pace.left_s, pace.items_per_s, pace.n_living) == (0.0, None, 0)
