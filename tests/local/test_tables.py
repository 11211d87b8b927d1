"""What the tables of `report` and `status` show on a terminal of 80 columns: no number is cut, no message is lost."""

import functools
import io
import json
import operator
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slurmgpu.cli.views.columns import FOLDING, WORDS, show_table, used_by
from slurmgpu.cli.views.dry_run import bound_in_words
from slurmgpu.cli.views.report import show_report
from slurmgpu.cli.views.status import show_status
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import run_merge
from slurmgpu.executors.interface import Preview
from slurmgpu.executors.resubmission import first_submission
from slurmgpu.report.next_step import none_began
from slurmgpu.report.report_file import judged_attempts, last_report, report_path
from slurmgpu.report.status import read_status
from slurmgpu.util.ansi import plain
from tests.support.nightly import by_night
from tests.support.pretend_runs import BEGIN, pretend_run, reported

LONG = "The image /images/judge.sif is not on gpu-a100-07: there is no such file. Put it there, or set stage. " * 2


NAMES = ["attempt", "node", "state", "shard", "progress", "items", "last heard"]


def draw(width, show, **options):
    """What `show(console)` prints on a console of this width."""
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False, **options)
    show(console)
    return console.file.getvalue()


def drawn_by_rich(columns, gap):
    """The table as Rich lays it out."""
    table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=name not in FOLDING)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, row))
    return table


@given(st.data())
def test_a_table_that_has_room_has_the_lines_of_richs_table(data):
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    letters = st.text(st.sampled_from("ab1 größe⚠日本[]:/bold"), max_size=9).map(plain)
    n = data.draw(st.integers(1, 4))
    columns = {name: data.draw(st.lists(letters, min_size=n, max_size=n)) for name in names}
    shown = draw(120, lambda console: show_table(console, {}, columns, {}))
    assert shown == draw(120, lambda console: console.print(drawn_by_rich(columns, 2)))
    width = max(map(cell_len, shown.splitlines())) - 1
    if len(names) > 1 and width >= 1:  # with less room between the columns, or folded
        gap_1 = draw(500, lambda console: console.print(drawn_by_rich(columns, 1)))
        if max(map(cell_len, gap_1.splitlines())) <= width:
            assert draw(width, lambda console: show_table(console, {}, columns, {})) == gap_1


def test_the_header_is_bold_on_a_terminal():
    shown = draw(80, lambda c: show_table(c, {}, {"node": ["n1"], "items": ["5"]}, {}), force_terminal=True)
    assert shown in ("\x1b[1mnode  items\x1b[0m\nn1        5\n",)


@pytest.fixture
def on_a_terminal():
    """The command line on a terminal of 80 columns: the lines that it prints."""

    def call(*argv, cwd):
        ours, its = pty.openpty()
        command = [sys.executable, "-m", "slurmgpu", *argv]
        with subprocess.Popen(command, cwd=cwd, env={**os.environ, "COLUMNS": "80"}, stdout=its) as process:
            os.close(its)
            printed = b""
            try:
                while part := os.read(ours, 65536):
                    printed += part
            except OSError:  # the other end is closed
                os.close(ours)
            assert process.wait() in (0, 3)
        return printed.decode().replace("\r\n", "\n")

    return call


@pytest.fixture
def run(project, slurmgpu):
    """A run whose twenty attempts have names and numbers as long as a cluster's; four of them failed in two ways."""
    folder = project(8)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    path = folder / "run" / "report.json"
    report = json.loads(path.read_text())
    record = json.loads((folder / "run" / "tasks" / "debug1_0.0.json").read_text())
    for key in ("gpu_utilisation", "gpu_memory_peak_bytes", "host_memory_peak_bytes"):
        report["attempts"][0]["usage"][key] = 81_000_000_000
    report["attempts"][0]["usage"]["gpu_utilisation"] = 97.0
    report["attempts"] = [
        {
            **report["attempts"][0],
            "attempt": f"12345678_{n}.0",
            "node": "gpu-a100-07",
            "seconds": 86399,
            "n_items": 1234567,
            "n_shards": 1205,
            **({"failure": "container", "message": LONG} if n < 5 else {}),
            **({"failure": "workload_error", "message": "ValueError: [/b] no"} if n == 5 else {}),
        }
        for n in range(20)
    ]
    path.write_text(json.dumps(report))
    for a in report["attempts"]:
        value = {key: a[key] for key in ("attempt", "node", "n_items", "failure", "message")}
        value["published"] = [[shard, 0.0, 1.0, True] for shard in range(1205)]
        (path.parent / "tasks" / f"{a['attempt']}.json").write_text(json.dumps({**record, **value}))
    return folder


def test_a_report_loses_nothing_on_80_columns(run, on_a_terminal):
    text = on_a_terminal("report", "run", cwd=run)
    assert "…" not in text
    table = [line for line in text.splitlines() if line.startswith("12345678_")]
    assert all(len(line) <= 80 for line in table)
    assert sum("23:59:59" in line and "1,205 1,234,567" in line for line in table) == 20
    assert sum(line.split()[1:] == ["97", "81.0", "81.0"] for line in table) == 20  # a table of their own
    assert text.count(LONG) == 1
    assert f"\n  12345678_0.0, 12345678_1.0, 12345678_2.0 and 2 more: container: {LONG}\n" in text
    assert "\n  12345678_5.0: workload_error: ValueError: [/b] no\n" in text


def test_no_line_of_a_table_ends_with_a_blank_in_a_pipe(tmp_path, capsys):
    run = pretend_run(tmp_path / "run", 300.0, n_tasks=2)
    status = read_status(run, now=BEGIN + 300.0)
    status["attempts"][0]["progress"] = "a long text"  # the last column, which the second attempt leaves empty
    show_status(status)
    show_report(reported(run, errors=[(3, "item_error: no")]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line.endswith(" ")] == []


def test_hours_of_gpus_that_tasks_share_are_said_to_count_whole(tmp_path, capsys):
    said = "each counts as if it had "
    report = reported(pretend_run(tmp_path / "run", 9000.0, n_tasks=2))
    for gres, is_said in (("gpu:a100:1", False), ("shard:2", True), ("mps:50", True)):
        lines = [{**line, "slurm": {"gres": gres}} for line in report["submissions"]]
        show_report({**report, "submissions": lines})
        assert (said in capsys.readouterr().out) is is_said
        shown = Preview(replace(first_submission({"gpus": 2, "array": True}, 9), slurm={"gres": gres}), walltime_s=60.0)
        shown.bound_gpu_hours = shown.submission.bound_gpu_hours(60.0)
        assert (said in bound_in_words(shown, 0)) is is_said


def test_missing_shards_that_lie_side_by_side_are_one_line_and_a_damaged_one_has_its_own(run, capsys):
    report = json.loads((run / "run" / "report.json").read_text())
    holes = [{"shard": n, "start": 8 * n, "stop": 8 * n + 8, "damaged": None} for n in (0, 1, 2, 3, 5, 7, 8)]
    holes[2]["damaged"] = "a byte"
    holes[4]["stop"] = 41
    show_report({**report, "missing": holes, "n_missing_items": 49})
    lines = capsys.readouterr().out.partition("49 items in 7 shards\n")[2].splitlines()
    assert lines[:5] == [
        "  shards 0..1: items 0..15",
        "  shard 2: items 16..23  damaged: a byte",
        "  shard 3: items 24..31",
        "  shard 5: item 40",
        "  shards 7..8: items 56..71",
    ]


def test_what_items_and_nodes_write_does_nothing_to_the_terminal(tmp_path, capsys):
    nasty = "\x1b[2J\x1b]0;pwned\x07[/b]\u202e\r"
    run = pretend_run(tmp_path / "run", 300.0, n_tasks=2)
    report = reported(run, errors=[(3, f"item_error: {nasty}")])
    report |= {"missing": [{**report["missing"][0], "damaged": nasty}], "summary": {nasty: nasty, "of": {nasty: 1}}}
    report["attempts"][0] |= {"failure": "crash", "message": nasty, "traceback": f"{nasty}\n  more", "node": nasty}
    report["submissions"][0]["inject"] = [nasty]
    show_report({**report, "run": nasty})
    status = read_status(run, now=BEGIN + 300.0)
    status["attempts"][0] |= {"progress": nasty, "node": nasty}
    status["attempts"][1] |= {"failure": "crash", "message": nasty}
    show_status({**status, "run": nasty, "damaged_records": [nasty]})
    printed = capsys.readouterr().out
    assert "pwned" not in printed
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(printed)
    assert "\n  more\n" in printed


def test_attempts_and_the_names_behind_a_failure_are_in_the_order_of_the_tasks(tmp_path, capsys):
    run = pretend_run(tmp_path / "run", 300.0, n_tasks=12)
    report = reported(run, errors=[])
    for attempt in report["attempts"]:
        attempt |= {"failure": "crash", "message": "gone"}
    show_report({**report, "attempts": sorted(report["attempts"], key=lambda a: a["attempt"])})
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("4711_")] == [
        f"4711_{number}.0" for number in range(12)
    ]
    assert "\n  4711_0.0, 4711_1.0, 4711_2.0 and 9 more: crash: gone\n" in printed


def test_of_a_run_that_waited_in_vain_for_another_one_report_and_status_say_so(tmp_path, capsys):
    run = pretend_run(tmp_path / "run", 300.0, n_tasks=2)
    run.record_submission({"submission": 1, "after": ["23"]})
    report = reported(run)
    waited = "\nno task has started: the array waited for job 23 (--after), and Slurm cancels it if that run ends "
    show_report(report)
    assert waited not in capsys.readouterr().out
    show_report({**report, "attempts": []})
    assert waited in capsys.readouterr().out
    assert none_began(run).startswith(waited.strip())  # as status says it


def test_a_report_ends_with_the_command_that_computes_the_rest_or_the_failed_items(tmp_path, capsys):
    run = pretend_run(tmp_path / "a run", 300.0)
    report = reported(run, errors=[(3, "item_error: no")])
    show_report(report)
    assert capsys.readouterr().out.endswith(f"\nto compute the rest: slurmgpu resubmit {run.typed}\n")
    complete = {**report, "complete": True, "missing": [], "resubmit": None}
    show_report(complete)
    assert capsys.readouterr().out.endswith(
        f"recompute failed items with: slurmgpu resubmit {run.typed} --failed\n"
        "to change settings, columns or input, which a run freezes, submit a new run with another --run-dir "
        "(--items: of some items alone)\n"
    )
    show_report({**complete, "errors": [], "n_errors": 0})
    assert "resubmit" not in capsys.readouterr().out
    for attempt in report["attempts"]:
        attempt |= {"failure": "workload_error", "message": "KeyError", "submission": 1}
    show_report(report)
    assert (
        f"\nafter fixing the cause, compute the rest with: slurmgpu resubmit {run.typed}\n" in capsys.readouterr().out
    )
    show_report({**report, "n_rows": 0})
    assert capsys.readouterr().out.endswith("submit a new run with another --run-dir\n")
    for attempt in report["attempts"]:
        attempt |= {"failure": "host_oom", "message": "killed"}
    show_report(report)
    assert capsys.readouterr().out.endswith(
        f"resubmit {run.typed}\nhost memory ran out: resubmit asks for more, or for what you say: --slurm mem=…\n"
    )


def test_where_every_item_failed_the_advice_is_to_change_something_first(tmp_path, capsys):
    run = pretend_run(tmp_path / "run", 300.0)
    report = reported(run, errors=[(3, "item_error: no"), (4, "item_error: no")])
    report = {**report, "complete": True, "missing": [], "resubmit": None, "n_rows": report["n_errors"]}
    show_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert "complete, every item failed" in lines[0]
    assert run_merge.in_words(report).startswith("merged: complete, every item failed, 2 of ")
    assert lines[-4:] == [
        f"every item failed: slurmgpu logs {run.typed} --item 3 shows where",
        "",
        f"after fixing the code, recompute them with: slurmgpu resubmit {run.typed} --failed",
        "to change settings, columns or input, which a run freezes, submit a new run with another --run-dir",
    ]


def test_gpus_of_a_tasks_other_nodes_count(tmp_path, capsys):
    run = pretend_run(tmp_path / "run", 300.0, n_tasks=1)
    record = run.tasks / "4711_0.0.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"n_gpus": 4, "n_nodes": 3}))
    show_report(reported(run, errors=[]))
    assert re.search(r"^4711_0\.0 +gpu000 \+2 +12 ", capsys.readouterr().out, re.MULTILINE)


def places_in(value, place=()):
    """Where there is a value in JSON, in a list of the first alone."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*place, key)
        yield from places_in(each, (*place, key))


@pytest.mark.parametrize("wrongs", [pytest.param(("x", ...), id="text or absent"), by_night((None, -1))])
def test_whatever_is_wrong_with_a_report_it_is_shown_or_refused_in_a_sentence(tmp_path, capsys, wrongs):
    run = pretend_run(tmp_path / "run", 300.0, n_tasks=1)
    record = run.tasks / "4711_0.0.json"
    death = {"class": "crash", "message": "m", "at": BEGIN, "state": "running", "shard": 3, "items": [48]}
    usage = {"gpu_utilisation": 3.0, "n_samples_ready": 9, "host_memory_peak_bytes": 3_000_000_000}
    record.write_text(
        json.dumps(json.loads(record.read_text()) | {"deaths": [death], "usage": usage, "failure": "crash"})
    )
    report = reported(run, errors=[(3, "item_error: no")], summary={"mean": 1.0})
    report |= {"image": {"path": "a.sif", "sha256": "0" * 64}, "provenance": {}}
    report |= {"not_finite": {"score": {"nan": 3, "infinite": 0}}, "computed_with": {"torch": {"2.11.0": 1}}}
    run.record_submission({"submission": 1, "state": "ended"})
    n_refused = 0
    for place in places_in(report):
        for wrong in wrongs:
            told = json.loads(json.dumps(report))
            *way, last = place
            holder = functools.reduce(operator.getitem, way, told)
            holder[last] = wrong
            if wrong is ...:
                del holder[last]
            report_path(run).write_text(json.dumps(told))
            try:
                show_report(last_report(run))
            except SlurmGPUError:
                n_refused += 1
            judged_attempts(run)
            read_status(run, now=BEGIN + 300.0)
    assert n_refused > 50
    assert capsys.readouterr().err == ""


def test_memory_that_would_be_nothing_with_one_decimal_is_shown_with_two():
    usage = {"host_memory_peak_bytes": 45_000_000, "gpu_memory_peak_bytes": 61_000_000_000}
    assert used_by([usage, {}]) == {"GPU GB": ["61.0", "–"], "host GB": ["0.04", "–"]}


def test_a_status_loses_nothing_on_80_columns(run, on_a_terminal):
    text = on_a_terminal("status", "run", cwd=run)
    assert "…" not in text
    table = [line for line in text.splitlines() if line.startswith("12345678_")]
    assert all(len(line) <= 80 for line in table)
    assert sum("1,205 1,234,567" in line for line in table) == 20
    assert sum(line.rstrip().endswith(" container") for line in table) == 5
    assert text.count(LONG) == 1


def test_a_table_of_short_words_is_whole_on_80_columns(project, slurmgpu, on_a_terminal):
    folder = project(8)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    [line] = [line for line in on_a_terminal("report", "run", cwd=folder).splitlines() if "debug1_0.0" in line]
    assert line.rstrip().endswith("ok (complete)")
