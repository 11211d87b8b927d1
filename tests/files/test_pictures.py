"""The pictures of the page: what is drawn where, and in colours that everybody can tell apart."""

import re
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from slurmgpu import page as pages
from slurmgpu.page import page
from slurmgpu.page.clock import make_clock
from slurmgpu.page.pictures import LABELLED_ROWS, left_of, rates, throughput, timeline
from slurmgpu.page.spans import AttemptSpan, begin_of, items_of, spans_of
from slurmgpu.page.svg import NARROW, WIDE, style
from slurmgpu.page.usage import draw_usage, read_usage
from slurmgpu.report.ledger import KINDS
from tests.support.pretend_runs import pretend_run, reported

SEEN_WITH = {
    "all cones": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
"""Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: what linear RGB is to such eyes."""
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])
TOLD_APART = 25
"""The least difference (CIE 1976) of two colours that have to be told apart; 2 can just be seen side by side."""
LEGENDS = (KINDS, ("starting", "loading", "running", "bad"), ("running", "chosen"))


def palettes():
    """The page's colours by name, in the light and in the dark."""
    light, _, dark = (Path(pages.__file__).parent / "page.css").read_text().partition("prefers-color-scheme: dark")
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text.partition("* {")[0])) for text in (light, dark)]
    return {"light": found[0], "dark": {**found[0], **found[1]}}


def lab(colour, eyes):
    """A colour as it is seen, in CIE L*a*b*."""
    encoded = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(TO_XYZ @ np.clip(eyes @ linear, 1e-4, 1) / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN_WITH)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_one_legend_are_told_apart_by_the_colour_blind_too(scheme, eyes):
    palette = palettes()[scheme]
    for legend in LEGENDS:
        seen = {name: lab(palette[name], SEEN_WITH[eyes]) for name in legend}
        differences = {(a, b): np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(legend, 2)}
        worst = min(differences, key=differences.get)
        assert differences[worst] >= TOLD_APART, worst


def attempt(**what):
    """An attempt of a report that began at 100, and ended by its own record at 110."""
    span = {"started": 100.0, "updated": 110.0, "ended": 110.0, "seconds": 10.0, "load_s": 1.0, "node": "gpu1"}
    phases = [[100.0, "starting"], [101.0, "loading"], [102.0, "running"], [110.0, "ended"]]
    return {
        "attempt": "7_0.0",
        "submission": 1,
        "failure": None,
        "deaths": [],
        "shards": [],
        "phases": phases,
        **span,
        **what,
    }


def spans_with(*attempts):
    return spans_of({"attempts": attempts, "n_shards": 1, "missing": []})


def test_a_bar_is_as_long_as_what_was_allocated_without_gaps():
    for given in (attempt(seconds=13.0), attempt(seconds=13.0, ended=None, updated=108.0)):
        [span] = spans_with(given)
        assert [span.phases[0][1], span.phases[-1][2]] == [100.0, 113.0]
        assert all(stop == start for (_, _, stop), (_, start, _) in pairwise(span.phases))


def test_no_time_on_the_axis_is_cut_off_at_the_edge_of_a_picture():
    span = AttemptSpan("7_0.0", "7_0", "gpu1", 0.0, 5400.0, False, [("running", 0.0, 5400.0)], [], [])
    clock = make_clock(0.0, [(0.0, 5400.0)])
    for width in (WIDE, NARROW):
        with style("drawn"):
            made = timeline([span], clock, width)
            made.draw_without_rendering()
        labels = [label.get_window_extent() for label in made.axes[0].get_xticklabels()]
        assert labels
        assert max(box.x1 for box in labels) <= width
        assert all(left.x1 < right.x0 for left, right in pairwise(labels)), "they do not lie on one another"


@pytest.mark.parametrize("n_tasks", [1, LABELLED_ROWS, LABELLED_ROWS + 1])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_timeline_and_throughput_have_the_same_moment_at_the_same_place(n_tasks, width):
    spans = [
        AttemptSpan(
            f"7_{task}.0", f"7_{task}", "a-node-with-a-name", 0.0, 90.0, False, [("running", 0.0, 90.0)], [], []
        )
        for task in range(n_tasks)
    ]
    clock = make_clock(0.0, [(0.0, 90.0)])
    edges, found = rates(spans, clock, {})
    below = throughput(edges, found, clock, width, left=left_of(spans, width), unit="items per hour").axes[0]
    above = timeline(spans, clock, width).axes[0]
    assert (above.get_position().x0, above.get_position().x1) == (below.get_position().x0, below.get_position().x1)
    assert below.get_title(loc="left") == "items per hour"


def test_items_that_are_computed_again_are_drawn_once_each_and_not_as_whole_shards():
    attempts = [
        {"attempt": "1_0.0", "submission": 1, "n_items": 16, "shards": [[0, 10.0, 8.0, True], [1, 18.0, 8.0, True]]},
        {"attempt": "2_0.0", "submission": 2, "n_items": 8 + 3, "shards": [[2, 50.0, 8.0, True]]},
    ]
    attempts[1]["shards"] += [[0, 60.0, 1.0, True, 1], [1, 61.0, 2.0, True, 1]]
    common = {"failure": None, "node": "", "ended": None, "updated": 70.0, "seconds": 20.0, "deaths": []}
    common |= {"phases": [[5.0, "running"]], "started": 5.0}
    report = {"attempts": [{**each, **common} for each in attempts], "n_shards": 3, "missing": []}
    spans, n_items = spans_of(report), items_of(report, lambda shard: 8)
    assert n_items["2_0.0", 0, 60.0] == n_items["2_0.0", 1, 61.0] == 1.5
    edges, found = rates(spans, make_clock(0.0, [(0.0, 70.0)]), n_items)
    assert (found["useful"] * np.diff(edges)).sum() == pytest.approx(3 * 8 + 3)


def test_on_a_phone_the_rows_of_several_submissions_have_different_names():
    spans = [
        AttemptSpan(
            f"local{job}_{task}.0", f"local{job}_{task}", "", 0.0, 90.0, False, [("running", 0.0, 90.0)], [], []
        )
        for job in (1, 2)
        for task in range(3)
    ]
    with style("drawn"):
        made = timeline(spans, make_clock(0.0, [(0.0, 90.0)]), NARROW)
        made.draw_without_rendering()
    labels = made.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == [span.task for span in spans]
    assert min(label.get_window_extent().x0 for label in labels) >= 0


@pytest.mark.parametrize(
    ("n_items", "lost", "said"),
    [
        (1000, True, "Throughput in items per second, none of which count: 1,000 at most, 1,000 on average"),
        (13_240, False, "Throughput in items per second: 13,240 at most"),
        (4_000_000, False, "Throughput in thousand items per second: 4,000 at most"),
    ],
)
def test_throughput_is_told_in_the_unit_of_what_is_drawn_without_exponents(tmp_path, n_items, lost, said):
    run = pretend_run(tmp_path / "judge", 0, n_tasks=1, n_shards=2, shard_items=n_items)
    begin = 1_750_000_000.0
    shards = [(0, begin, begin + 1, "lost" if lost else "useful")]
    span = AttemptSpan("7_0.0", "7_0", "", begin, begin + 1, False, [("running", begin, begin + 1)], shards, [])
    report = {"attempts": [{"attempt": "7_0.0", "n_items": n_items, "shards": [[0, begin, 1.0, True]]}]}
    drawn = page._throughput(run, report, [span], make_clock(begin, [(begin, begin + 1)]))
    assert drawn.sentence.startswith(said)
    assert "e+" not in re.sub("<[^>]*>", "", drawn.wide)


def test_no_line_of_telemetry_lies_on_the_edge_and_the_gpus_memory_is_drawn_as_a_limit(tmp_path):
    run = pretend_run(tmp_path / "judge", 600, n_tasks=2)
    report = reported(run, errors=[])
    spans = spans_of(report)
    clock = make_clock(begin_of(report, spans), [(span.start, span.stop) for span in spans])
    usage = read_usage(run.folder, spans, {}, clock, 5.0)
    for quantity in usage.known([85e9]):
        axes = draw_usage(usage, quantity, ["4711_0"], clock).axes[0]
        highest = max(np.nanmax(line.get_ydata()) for line in axes.lines)
        assert highest * 1.05 < axes.get_ylim()[1]
        assert (85 in [line.get_ydata()[0] for line in axes.lines]) == (quantity.key == "memory_bytes")
    pages.write_page(run, report, tmp_path / "page.html")
    assert "GPU memory, GB; dashed: what a GPU has" in (tmp_path / "page.html").read_text()


def test_a_pause_that_is_left_out_says_how_long_it_was(tmp_path):
    assert make_clock(0.0, [(0.0, 100.0), (1000.0, 1100.0)]).pauses == pytest.approx([900.0])
    run = pretend_run(tmp_path / "judge", 600, n_tasks=2, n_shards=12)
    report = reported(run, errors=[])
    later = report["attempts"][1]
    for key in ("started", "updated", "ended"):
        later[key] += 100_000
    later["phases"] = [[at + 100_000, state] for at, state in later["phases"]]
    pages.write_page(run, report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert len(re.findall(r"a pause of 1 d 3 h, left out", text)) == 3, "in every legend with a clock"


def test_the_median_is_that_of_all_tasks_also_where_few_have_a_sample(tmp_path):
    run = pretend_run(tmp_path / "judge", 1500, n_tasks=60, n_shards=4000, sample_s=60.0, faulty=True)
    report = reported(run, errors=[])
    spans = spans_of(report)
    clock = make_clock(begin_of(report, spans), [(span.start, span.stop) for span in spans])
    usage = read_usage(run.folder, spans, {}, clock, 60.0)
    loaded = clock.time(usage.edges[:-1]) - clock.begin > 120
    median = np.nanmedian(usage.values["memory_bytes"][:, loaded], axis=0)
    assert (median == 61_000_000_000).all(), "some tasks that were restarted have little in these bins"
    gone = next(row for row, span in enumerate(spans) if span.attempt == "4711_10.0")
    assert np.isnan(usage.values["memory_bytes"][gone, -1]), "its node died long ago"


def test_what_takes_less_than_a_gigabyte_is_drawn_in_megabytes(tmp_path):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=1, n_gpus=0)
    path = next((run.folder / "telemetry").iterdir())
    path.write_text(path.read_text().replace("12000000000", "48000000"))
    report = reported(run, errors=[])
    spans = spans_of(report)
    usage = read_usage(run.folder, spans, {}, make_clock(spans[0].start, [(spans[0].start, spans[0].stop)]), 5.0)
    [memory] = usage.known()
    assert (memory.unit, np.nanmax(usage.of(memory))) == ("MB", 48.0)
