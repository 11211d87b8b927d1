"""Amounts in words: rounded, and never to another amount."""

import pytest

from slurmgpu.report.pace import Pace
from slurmgpu.report.state_words import pace_words, part_of
from slurmgpu.report.summaries import summary_of
from slurmgpu.util.amounts import rate_of, share_of, size_of, slurm_size, three_digits


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (12345.6, "12,346"),
        (99.96, "100"),
        (6.163, "6.16"),
        (0.5, "0.500"),
        (1 / 1800, "0.00056"),
        (1 / 36_000, "0.000028"),
    ],
)
def test_a_rate_has_digits_however_slow_it_is(rate, text):
    assert rate_of(rate) == text


@pytest.mark.parametrize(("size", "text"), [(999, "999 B"), (999_499, "999 kB"), (999_600, "1 MB"), (1e15, "1,000 TB")])
def test_a_size_is_never_written_with_an_exponent(size, text):
    assert size_of(int(size)) == text
    assert slurm_size(int(999.6 * 1024**3)) == "1000G"
    assert (three_digits(0.1234), three_digits(1235.6)) == ("0.123", "1,236")


def test_items_that_take_hours_have_a_rate():
    pace = Pace(items_per_s=1 / 36_000, left_s=36_000.0, n_living=1).to_json()
    assert pace["items_per_s"] == pytest.approx(1 / 36_000, rel=1e-3)
    status = {"pace": pace, "n_shards": 2, "n_shards_done": 1, "attempts": [], "time": 0.0, "state": "running"}
    assert pace_words(status).startswith("0.100 items/h, 10:00:00 left")


@pytest.mark.parametrize(("done", "total", "text"), [(0, 200, "0%"), (199, 200, "99%"), (200, 200, "100%")])
def test_a_shard_in_hand_is_at_100_percent_when_all_its_items_are_done(done, total, text):
    assert part_of({"shard_done": done, "shard_items": total}) == text
    assert share_of(9_999, 10_000) == "99.9%"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "100.0%"),
        (0.0, "0.0%"),
        (2999 / 3000, "99.97%"),
        (1 / 3000, "0.03%"),
        (0.9995, "99.95%"),
        (0.87654, "87.7%"),
    ],
)
def test_a_share_of_a_summary_is_0_or_100_percent_only_if_it_is_all_or_nothing(value, text):
    [shown] = summary_of({"accuracy": value}, 10, 10).values
    assert shown.text == text


def test_a_learning_rate_of_a_ranking_is_no_share():
    ranking = {str(number): {"val_accuracy": 0.5, "learning_rate": rate} for number, rate in enumerate((3e-4, 0.5))}
    [shown] = summary_of({"ranking": ranking}, 10, 10).tables
    assert shown.rows == [["0", "50.0%", "0.0003"], ["1", "50.0%", "0.500"]]
