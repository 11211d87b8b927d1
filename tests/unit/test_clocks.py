"""Clocks of nodes that are not this machine's: who writes lives, and who does not, does not."""

import json

import pytest

from slurmgpu.report.status import StatusReader
from tests.support.pretend_runs import BEGIN, Pretended, pretend_run, update

LEASE_S = 120.0


@pytest.fixture
def look(tmp_path):
    """`look(100.0, write=True)`: what status says 100 seconds after the beginning of an attempt on another node."""
    pretended = Pretended(n_tasks=1, sample_s=0)
    run = pretend_run(tmp_path / "run", 0, n_tasks=1, sample_s=0)
    reader = StatusReader(run)

    def look(at, skew_s, write):
        if write:
            [record] = update(run, pretended, at)
            shifted = {key: record[key] + skew_s for key in ("started", "updated", "end_time")}
            shifted["shard_started"] = record["shard_started"] and record["shard_started"] + skew_s
            shifted["phases"] = [[time + skew_s, state] for time, state in record["phases"]]
            shifted["published"] = [[shard, time + skew_s, *rest] for shard, time, *rest in record["published"]]
            path = run.tasks / f"{record['attempt']}.json"
            # In place: `update` has just put another file there, and a third could be of the number of the first.
            path.write_text(json.dumps({**json.loads(path.read_text()), **shifted}))
        status = reader.read(now=BEGIN + at)
        return status, status["attempts"][0]

    return look


@pytest.mark.parametrize("skew_s", [-3600.0, -7.0, 0.0, 7.0, 3600.0])
def test_an_attempt_that_writes_is_alive_whatever_its_clock_says(look, skew_s):
    look(300.0, skew_s, write=True)
    for at in (303.0, 306.0, 346.0):  # also where one looks but rarely
        status, attempt = look(at, skew_s, write=True)
        assert not attempt["silent"]
        assert attempt["age_s"] in (0.0, 7.0)
        assert status["pace"]["n_living"] == 1
        assert status["gpu_hours"] == pytest.approx(at / 3600, rel=0.03)
    left = status["pace"]["left_s"]
    assert left == pytest.approx(200 * 60, rel=0.2)
    _, attempt = look(346.0 + LEASE_S - 10, skew_s, write=False)
    assert not attempt["silent"]
    assert attempt["age_s"] == pytest.approx(LEASE_S - 10, abs=8)


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_an_attempt_that_was_seen_to_write_and_writes_no_more_is_dead(look, skew_s):
    look(300.0, skew_s, write=True)
    look(303.0, skew_s, write=True)
    status, attempt = look(304.0 + LEASE_S, skew_s, write=False)
    assert attempt["silent"]
    assert status["pace"]["n_living"] == 0
    _, attempt = look(310.0 + LEASE_S, skew_s, write=True)
    assert not attempt["silent"]
