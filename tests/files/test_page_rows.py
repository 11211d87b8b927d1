"""What the page says of rows: how each column is distributed, and examples, in bounded time and space."""

import html
import math
import re
import statistics

import numpy as np
import pytest

from slurmgpu import page as pages
from slurmgpu import results
from slurmgpu.merge.merge import merge
from slurmgpu.page import rows
from slurmgpu.page.rows import rows_of
from slurmgpu.results import distributions
from slurmgpu.results.distributions import distribution_of, sampled_rows
from slurmgpu.shards.columns import Array, Json, Ragged, Text
from tests.support.published_runs import published_run

COLUMNS = {
    "score": Array("float32"),
    "label": Text(),
    "vector": Array("float32", (2, 8)),
    "parts": Ragged("int16"),
    "told": Json(),
    "count": Json(),
    "ok": Array("bool"),
    "api_key": Text(),
}
TOKEN = "hf_" + "a" * 34


def row(index):
    if index % 10 == 4:
        return f"item {index}: <b>too dark</b> \x1b[31m{TOKEN}"
    score = math.inf if index == 7 else math.nan if index % 10 == 5 else index / 4
    told = {"n": index, "why": f"<script>{TOKEN}"}
    plain = {"score": score, "label": "ü" * (index % 7), "vector": [[index] * 8] * 2, "parts": range(index % 5)}
    return {**plain, "told": told, "count": None if index == 2 else index, "ok": index % 2 == 0, "api_key": "visible"}


@pytest.fixture
def run(tmp_path):
    made = published_run(tmp_path / "run", COLUMNS, [row(index) for index in range(40)])
    return made, merge(made)


def described(run, report):
    return {one.name: one for one in rows_of(run, report).columns}


def test_each_column_has_its_range_its_lengths_and_what_is_not_finite(run):
    found = described(*run)
    assert list(found) == list(COLUMNS)
    assert found["score"].numbers == "0 to 9.75, median 5"
    assert found["score"].not_finite == "4 NaN, 1 infinite"
    assert (found["score"].type_name, found["score"].lengths) == ("array float32", "")
    assert (found["label"].numbers, found["label"].lengths) == ("", "0 to 6, median 3")
    assert (found["vector"].type_name, found["vector"].numbers) == ("array float32 2×8", "0 to 39, median 19.5")
    assert (found["parts"].numbers, found["parts"].lengths) == ("0 to 3, median 1", "0 to 4, median 2")
    assert (found["told"].numbers, found["told"].lengths) == ("", "always 2")
    assert (found["count"].numbers, found["count"].missing, found["ok"].missing) == ("0 to 39, median 20", "5", "4")
    assert found["ok"].numbers == "0 to 1, median 0"
    assert (found["told"].type_name, found["count"].type_name) == ("json object", "json number")
    assert all(one.picture.count("<title") == 1 for one in found.values())


def test_a_complete_run_of_failed_items_is_no_good_one(tmp_path):
    made = published_run(tmp_path / "run", COLUMNS, ["too dark"] * 3)
    pages.write_page(made, merge(made), tmp_path / "page.html")
    badges = re.findall(r'<span class="badge (\w+)">([^<]*)', (tmp_path / "page.html").read_text())
    assert badges == [("bad", "complete, every item failed")]


def test_the_page_shows_rows_of_items_and_hides_secrets_and_signs(run, tmp_path):
    made, report = run
    pages.write_page(made, report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert TOKEN not in text
    assert "visible" not in text.partition("<h2>Rows</h2>")[2].partition("</section>")[0].replace("visibleSpan", "")
    assert "\x1b" not in text
    assert "<script>hf" not in text
    section = html.unescape(text.partition("<h2>Rows</h2>")[2].partition("</section>")[0])
    assert [int(index) for index in re.findall(r"Row of item (\d+)", section)] == [3, 10, 16, 23, 30, 36]
    assert "<dt>score</dt><dd>0.75</dd>" in section
    assert '<dd>{"n": 3, "why": "<script>•••"}</dd>' in section
    assert "From all 40 rows; failed items have no value." in section


def test_a_large_file_is_sampled_evenly_and_the_same_each_time(run, monkeypatch):
    monkeypatch.setattr(distributions, "N_SAMPLED", 8)
    monkeypatch.setattr(distributions, "_N_STRETCHES", 4)
    made, report = run
    with results.open(made.merged) as merged:
        assert sampled_rows(merged).tolist() == [0, 1, 12, 13, 25, 26, 38, 39]
    rows = rows_of(made, report)
    assert rows.sentence == "From 8 of 40 rows, evenly spaced; failed items have no value."
    assert rows == rows_of(made, report)


def test_of_rows_that_are_larger_than_a_sample_eight_are_read(run, monkeypatch):
    monkeypatch.setattr(distributions, "SAMPLE_BYTES", 1)
    with results.open(run[0].merged) as merged:
        assert sampled_rows(merged).tolist() == [0, 5, 11, 16, 22, 27, 33, 39]


def test_twenty_columns_of_wide_rows_take_less_than_a_quarter_of_a_megabyte(tmp_path):
    columns = {f"column {number}": Json() for number in range(40)}
    rows = [{name: ["<&" * 4000, index] for name in columns} for index in range(20)]
    made = published_run(tmp_path / "run", columns, rows)
    report = merge(made)
    assert pages.write_page(made, report, tmp_path / "page.html") < 250_000
    assert "20 further columns" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "values",
    [
        [],
        [math.nan, math.inf],
        [5.0],
        [1e308, -1e308],
        [0.0, 5e-324],
        [-(2**63), 2**63 - 1],
        [True, False],
        [1j, 3 + 4j],
    ],
    ids=str,
)
def test_odd_numbers_have_a_distribution_or_none(tmp_path, values):
    dtype = "int64" if values and type(values[0]) is int else "complex128" if values == [1j, 3 + 4j] else "float64"
    made = published_run(tmp_path / "run", {"x": Array(dtype)}, [*({"x": value} for value in values), "failed"])
    merge(made)
    with results.open(made.merged) as merged:
        found = distribution_of(merged, "x", sampled_rows(merged)).numbers
    finite = [abs(value) if dtype == "complex128" else float(value) for value in values if np.isfinite(value)]
    if not finite:
        assert found is None
    else:
        assert (found.least, found.largest, sum(found.counts)) == (min(finite), max(finite), len(finite))
        assert found.median == pytest.approx(statistics.median(finite))
    assert rows_of(made, {"not_finite": None}).columns[0].picture is None or finite


def test_numbers_of_a_range_have_no_exponent_unless_they_are_huge():
    words = rows._in_words(distributions.Spread(-0.00123456, 21_000.6, 123_456.0, (), ()))
    assert words == "-0.001235 to 123,456, median 21,001"
    assert rows._in_words(distributions.Spread(2.0, 2.5, 1e300, (), ())) == "2 to 1e+300, median 2.5"


def test_a_bin_counts_the_values_between_its_edges():
    found = distributions._spread(np.arange(25.0))
    assert (found.counts, found.edges) == ([1] * 23 + [2], list(range(25)))
    alone = distributions._spread(np.array([5.0, 5.0]))
    assert (alone.counts, alone.edges[0], alone.edges[-1]) == ([2] + [0] * 23, 5.0, 6.0)


def test_bytes_and_values_of_several_types_have_the_lengths_that_they_have(tmp_path):
    columns = {"code": Array("S4"), "mixed": Json(), "nothing": Json()}
    rows = [{"code": b"ab", "mixed": each, "nothing": None} for each in (1, "four", [1, 2])]
    made = published_run(tmp_path / "run", columns, rows)
    code, mixed, nothing = rows_of(made, merge(made)).columns
    assert (code.type_name, code.numbers, code.lengths) == ("array bytes32", "", "always 2")
    assert (mixed.type_name, mixed.numbers, mixed.lengths) == ("json", "", "2 to 4, median 3")
    assert (nothing.type_name, nothing.numbers, nothing.lengths, nothing.missing) == ("json", "", "", "3")


def test_integers_of_json_beyond_a_float_are_left_out_of_the_distribution(tmp_path):
    made = published_run(tmp_path / "run", {"x": Json()}, [{"x": value} for value in (10**400, 1, 2.5)])
    report = merge(made)
    [found] = rows_of(made, report).columns
    assert (found.type_name, found.numbers, found.missing) == ("json number", "1 to 2.5, median 1.75", "")


def test_a_merged_file_that_cannot_be_read_costs_the_section_and_not_the_page(run, tmp_path, caplog):
    made, report = run
    made.merged.write_bytes(made.merged.read_bytes()[:-7])
    pages.write_page(made, report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<h2>Rows</h2>" not in text
    assert "<h2>Provenance</h2>" in text
    assert "the page has no rows" in caplog.text


def test_of_a_long_text_the_page_looks_at_the_beginning_alone(monkeypatch):
    sizes = []
    monkeypatch.setattr("slurmgpu.page.rows.hidden", lambda value, name: sizes.append(len(value)) or value)
    assert rows._shown("answer", "x" * 1_000_000) == "x" * (rows.VALUE_CHARACTERS - 1) + "…"
    assert sizes == [4 * rows.VALUE_CHARACTERS]
