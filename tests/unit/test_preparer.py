"""`prepare` of a workload: the next call's items are prepared in a thread while the present call computes."""

from __future__ import annotations

import threading

import pytest

from slurmgpu.errors import Interrupted, ItemError, Retry, SlurmGPUError
from slurmgpu.loader.adapted import adapt
from slurmgpu.run.crash_history import History
from slurmgpu.shards.columns import Array
from slurmgpu.worker import preparer
from slurmgpu.worker.call_failures import Failure
from slurmgpu.worker.computer import Computer
from slurmgpu.worker.preparer import only_for_calls
from slurmgpu.workload import Item

LONG_S = 60.0
"""How long to wait for what happens at once."""


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch names its own."""


class Doubling:
    """Rows of twice the number; `prepare` computes them. Remembers batches, and which were prepared in a thread."""

    columns = {"x": Array("float64")}

    def __init__(self, at_prepare=lambda items: None, at_call=lambda items: None):
        self.at_prepare, self.at_call = at_prepare, at_call
        self.prepared, self.called, self.ahead = [], [], []
        self.one_at_a_time = threading.Lock()

    def prepare(self, items):
        assert self.one_at_a_time.acquire(blocking=False), "prepare is called twice at the same time"
        with_thread = threading.current_thread() is not threading.main_thread()
        try:
            indices = [item.index for item in items]
            self.prepared.append(indices)
            if with_thread:
                self.ahead.append(indices)
            self.at_prepare(items)
            return [(item, 2 * item.data["x"]) for item in items]
        finally:
            self.one_at_a_time.release()

    def __call__(self, items, prepared):
        self.called.append([item.index for item in items])
        assert all(item is own for item, (own, _) in zip(items, prepared, strict=True))
        self.at_call(items)
        return [{"x": twice} for _, twice in prepared]


def compute(workload, n=8, batch_size=2, history=None, **given):
    items = [Item(i, {"x": float(i)}) for i in range(n)]
    computer = Computer(adapt(workload, "Doubling"), "Doubling", Doubling.columns, batch_size, **given)
    try:
        return computer.compute(computer.take_in(items), history or History())
    finally:
        computer.close()


def values(computed):
    return [None if isinstance(row, Failure) else float(row["x"]) for row in computed.rows.values()]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    for thread in threading.enumerate():
        if thread.name == "prepare":
            thread.join(LONG_S)
            assert not thread.is_alive()


def raise_at(*bad, error=ValueError):
    def at(items):
        for item in items:
            if item.index in bad:
                raise error(f"cannot do {item.index}")

    return at


def test_the_next_batch_is_prepared_while_the_present_one_is_computed():
    has_begun = {first: threading.Event() for first in range(0, 10, 2)}

    def waits_for_the_next(items):
        assert has_begun[items[0].index + 2].wait(LONG_S) or items[0].index == 6

    has_begun[8].set()
    workload = Doubling(at_prepare=lambda items: has_begun[items[0].index].set(), at_call=waits_for_the_next)
    assert values(compute(workload)) == [2.0 * i for i in range(8)]
    assert workload.called == workload.prepared == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert workload.ahead == [[2, 3], [4, 5], [6, 7]]


def test_items_that_are_tried_again_are_not_prepared_while_those_of_the_next_shard_are(monkeypatch):
    began, waits, fails, real = threading.Event(), threading.Event(), [True], preparer._wait
    in_flight, blamed = [], []
    monkeypatch.setattr(preparer, "_wait", lambda future: (began.is_set() and waits.set(), real(future)))

    def at_prepare(items):
        if items[0].index == 8:
            began.set()
            assert waits.wait(LONG_S)
            blamed.append(in_flight[-1])

    def at_call(items):
        assert items[0].index < 6 or began.wait(LONG_S)
        if items[0].index == 0 and fails:
            fails.pop()
            raise ConnectionError("refused")

    following = [Item(8, {"x": 8.0}), Item(9, {"x": 9.0})]
    workload = Doubling(at_prepare, at_call)
    computed = compute(
        workload,
        retries=1,
        following=lambda: following,
        on_batch=lambda indices, isolated, ahead: in_flight.append((indices, ahead)),
    )
    waits.set()
    assert values(computed) == [2.0 * i for i in range(8)]
    assert workload.prepared == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1]]  # no batch twice but the first
    assert blamed == [([6, 7], 8)]  # items that a death in the preparation of 8 would be blamed on


def test_a_workload_without_prepare_has_no_thread():
    seen = []

    def call(items):
        seen.extend(thread.name for thread in threading.enumerate())
        return [{"x": item.data["x"]} for item in items]

    compute(call)
    assert "prepare" not in seen


@pytest.mark.parametrize("bad", [0, 5, 7])
def test_an_exception_of_prepare_is_that_of_the_call_of_the_same_items(bad):
    workload = Doubling(at_prepare=raise_at(bad))
    computed = compute(workload, batch_size=4)
    assert values(computed) == [None if i == bad else 2.0 * i for i in range(8)]
    message = computed.rows[bad].message
    assert message.startswith(f"ValueError: cannot do {bad} (test_preparer.py, line ")
    assert not any(bad in indices for indices in workload.called)


@pytest.mark.parametrize("error", [SystemExit, ItemError])
def test_what_prepare_raises_besides_is_taken_as_if_the_call_raised_it(error):
    assert values(compute(Doubling(at_prepare=raise_at(3, error=error)))) == [0, 2, 4, None, 8, 10, 12, 14]


def test_prepare_may_ask_for_another_try():
    failed = []

    def once(items):
        if items[0].index == 2 and not failed:
            failed.append(2)
            raise Retry("HTTP 429")

    workload = Doubling(at_prepare=once)
    assert values(compute(workload, retries=1)) == [2.0 * i for i in range(8)]
    assert workload.prepared == [[0, 1], [2, 3], [4, 5], [6, 7], [2, 3]]
    assert [2, 3] not in workload.ahead[1:]


def test_halves_of_a_batch_that_was_too_large_are_prepared_again_in_the_calls_thread():
    def too_large(items):
        if len(items) > 2:
            raise OutOfMemoryError("CUDA out of memory")

    workload = Doubling(at_prepare=too_large)
    computed = compute(workload, n=12, batch_size=4)
    assert values(computed) == [2.0 * i for i in range(12)]
    assert workload.called == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert workload.prepared == [[0, 1, 2, 3], *workload.called]
    assert workload.ahead == [[6, 7], [8, 9], [10, 11]]  # from the first whole batch on, in pieces that fit
    assert computed.notes() == {"oom_batch": 2}


def test_what_was_prepared_ahead_of_a_call_that_fails_is_prepared_again():
    workload = Doubling(at_call=raise_at(2))
    assert values(compute(workload, batch_size=2)) == [0, 2, None, 6, 8, 10, 12, 14]
    assert workload.prepared == [[0, 1], [2, 3], [4, 5], [2], [3], [4, 5], [6, 7]]
    assert workload.ahead == [[2, 3], [4, 5], [6, 7]]


def test_items_have_mappings_of_their_own_in_each_try():
    def changes(items):
        for item in items:
            item.data["x"] += 100.0

    workload = Doubling(at_prepare=changes, at_call=raise_at(1))
    assert values(compute(workload, n=4)) == [200.0, None, 204.0, 206.0]


def test_nothing_is_prepared_ahead_while_items_are_isolated():
    calls = []
    workload, history = Doubling(), History(batch_weights={2: 1.0})
    computed = compute(workload, history=history, on_batch=lambda *call: calls.append(call))
    assert values(computed) == [2.0 * i for i in range(8)]
    assert workload.ahead == [[6, 7]]
    assert calls == [
        ([0, 1], False, None),
        ([2], True, None),
        ([3], True, None),
        ([4, 5], False, 6),
        ([6, 7], False, None),
    ]


def test_a_call_that_leaves_its_item_waits_for_what_is_being_prepared():
    begun, ended = threading.Event(), []

    def slow(items):
        if items[0].index == 2:
            begun.set()
            is_left.wait(LONG_S)
            ended.append(2)

    def leaves(items):
        assert begun.wait(LONG_S)
        is_left.set()
        raise Interrupted

    is_left = threading.Event()
    with pytest.raises(Interrupted):
        compute(Doubling(at_prepare=slow, at_call=leaves), agree=lambda failure: failure)
    assert ended == [2]


def test_an_interrupt_waits_for_nothing():
    begun, may_end = threading.Event(), threading.Event()

    def slow(items):
        if items[0].index == 2:
            begun.set()
            assert may_end.wait(LONG_S)

    def interrupted(items):
        assert begun.wait(LONG_S)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute(Doubling(at_prepare=slow, at_call=interrupted))
    [thread] = [thread for thread in threading.enumerate() if thread.name == "prepare"]
    assert thread.is_alive()
    assert thread.daemon
    may_end.set()


def test_a_call_that_takes_nothing_prepared_is_refused():
    class Own(Doubling):
        def __call__(self, items):
            return []

    with pytest.raises(SlurmGPUError, match=r"expected __call__\(self, items, prepared\)\. Rename `prepare`"):
        adapt(Own(), "Own").check()


@pytest.mark.parametrize("batch_size", [2, 8], ids=["in its thread", "in the call's"])
def test_prepare_may_not_call_what_is_of_the_call_that_computes(batch_size):
    noted = {}
    note = only_for_calls("task.note", noted.__setitem__)
    workload = Doubling(
        at_prepare=lambda items: note("prepared", 1) if 5 in [item.index for item in items] else None,
        at_call=lambda items: note("called", len(items)),
    )
    done = compute(workload, batch_size=batch_size)
    [(index, row)] = [(i, row) for i, row in done.rows.items() if isinstance(row, Failure)]
    assert (index, set(noted)) == (5, {"called"})
    assert "`prepare` must not call task.note, which belongs to the current call; use it in __call__" in row.message
