"""The crash history of a shard: which items are computed alone, and which are quarantined."""

import errno
import json
import os
from dataclasses import asdict

import pytest

from slurmgpu.run.crash_history import History, history_path, read_history, write_history
from tests.support.failing import Failing

OWN_DOING, FROM_OUTSIDE = 1.0, 0.5
BATCH = [8, 9, 10, 11]


def test_an_item_that_segfaults_costs_its_batch_and_itself_one_worker_each():
    history = History()
    assert history.record(BATCH, isolated=False, weight=OWN_DOING, error="crash: x") is None
    assert history.isolates(BATCH)
    assert history.record([10], isolated=True, weight=OWN_DOING, error="crash: x") == 10
    assert history.quarantined == {10: "crash: x"}


def test_one_kill_from_outside_changes_nothing():
    history = History()
    history.record(BATCH, isolated=False, weight=FROM_OUTSIDE, error="")
    assert not history.isolates(BATCH)


def test_kills_in_different_batches_do_not_add_up():
    history = History()
    for first in (0, 8, 16):
        history.record([first, first + 1], isolated=False, weight=FROM_OUTSIDE, error="")
        assert not history.isolates([first, first + 1])


def test_deaths_in_parts_of_a_batch_are_deaths_in_that_batch():
    history = History()
    history.record(BATCH[2:], isolated=False, weight=OWN_DOING, error="")
    assert history.isolates(BATCH)
    history = History()
    for part in (BATCH, BATCH[2:]):
        assert not history.isolates(BATCH)
        history.record(part, isolated=False, weight=FROM_OUTSIDE, error="")
    assert history.isolates(BATCH)
    assert history.forget(BATCH)
    assert history == History()


def test_an_item_is_not_quarantined_for_kills_from_outside_before_the_second_one_hits_it_alone():
    history = History()
    for _ in range(2):
        history.record(BATCH, isolated=False, weight=FROM_OUTSIDE, error="")
    assert history.isolates(BATCH)
    assert history.record([9], isolated=True, weight=FROM_OUTSIDE, error="e") is None
    assert history.record([10], isolated=True, weight=FROM_OUTSIDE, error="e") is None
    assert history.record([9], isolated=True, weight=FROM_OUTSIDE, error="e") == 9


def test_in_batches_of_one_an_item_must_crash_twice():
    history = History()
    assert history.record([5], isolated=False, weight=OWN_DOING, error="e") is None
    assert history.record([5], isolated=True, weight=OWN_DOING, error="e") == 5


def test_the_batch_of_a_quarantined_item_stays_isolated():
    history = History(quarantined={10: "crash: x"})
    assert history.isolates(BATCH)
    assert not history.isolates([0, 1])


def test_a_history_is_read_as_it_was_written(tmp_path):
    assert read_history(tmp_path, 7) == History()
    history = History({8: 1.0}, {10: 0.5}, {11: "crash: ü"}, parked_by=2)
    write_history(tmp_path, 7, history)
    assert read_history(tmp_path, 7) == history


def test_progress_makes_the_deaths_of_items_in_flight_forgotten_and_no_others():
    history = History({4: 0.5, 8: 1.0}, {4: 0.5, 9: 0.5})
    assert history.forget([4])
    assert history == History({8: 1.0}, {9: 0.5})
    assert not history.forget([4])


DAMAGED = {
    "empty": b"",
    "torn": json.dumps(asdict(History({8: 1.0}))).encode()[:20],
    "of another kind": b"[]",
    "lacking a key": b'{"batch_weights": {}}',
    "with nonsense": b'{"batch_weights": {"a": 1}, "item_weights": {}, "quarantined": {}, "parked_by": null}',
    "with a text for a weight": b'{"batch_weights": {"1": "x"}, "item_weights": {}, "quarantined": {}}',
    "no UTF-8": bytes(range(128, 256)),
    "too deep": b"[" * 60_000,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_history_is_named_and_taken_for_empty_and_written_anew(tmp_path, caplog, kind):
    path = history_path(tmp_path, 7)
    path.write_bytes(DAMAGED[kind])
    assert read_history(tmp_path, 7) == History()
    assert f"{path} is damaged and treated as empty" in caplog.text
    write_history(tmp_path, 7, History({8: 1.0}))
    assert read_history(tmp_path, 7) == History({8: 1.0})


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_where_a_history_should_be_ends_nothing(tmp_path, caplog, make):
    make(history_path(tmp_path, 7))
    assert read_history(tmp_path, 7) == History()
    assert "is damaged and treated as empty" in caplog.text
    write_history(tmp_path, 7, History({8: 1.0}))  # over the folder it cannot be written: then that is said
    assert read_history(tmp_path, 7) == History({8: 1.0}) or "cannot be written" in caplog.text


def test_a_history_is_read_and_written_though_the_file_system_fails_for_a_moment(tmp_path, monkeypatch):
    failing = Failing(monkeypatch)
    failing("replace", errno.EIO, lost=True)
    write_history(tmp_path, 7, History({8: 1.0}))
    failing("open", errno.ESTALE, of="00007", times=2)
    assert read_history(tmp_path, 7) == History({8: 1.0})
    assert failing.n_failed == 3
