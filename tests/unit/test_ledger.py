"""Where the hours of a run went, and what damaged records cost: a row each."""

import errno
import json
import os
import random

import pytest
from rich.console import Console

from slurmgpu.cli.views.report import show_report
from slurmgpu.cli.views.status import show_status
from slurmgpu.report.attempts import attempts_of
from slurmgpu.report.ledger import KINDS, counting, in_words, kind_of, ledger, spent, spent_unrecorded
from slurmgpu.report.outcomes import Accounted
from slurmgpu.report.state_words import failure_words
from slurmgpu.report.status import StatusReader, read_status
from slurmgpu.run import directory
from slurmgpu.run.records import Attempt, new_record, read_record
from tests.support.pretend_runs import BEGIN, pretend_run, reported

LOADED = [[0.0, "starting"], [2.0, "loading"], [12.0, "running"]]


def record(published=(), **more):
    """What an attempt wrote that began at 0, loaded from 2 to 12, and ended at 100."""
    given = {"started": 0.0, "ended": 100.0, "updated": 100.0, "state": "ended", "load_s": 10.0, "phases": LOADED}
    given["idle_s"] = 100.0  # all that is left
    own = new_record(Attempt("7", 0, executor="slurm", n_gpus=1), "gpu1", 1, [], 0.0)
    return {**own, **given, "published": [list(entry) for entry in published], **more}


def of(useful=0.0, loading=10.0, idle=0.0, lost=0.0, repeated=0.0, overhead=0.0):
    return {**dict.fromkeys(KINDS, 0.0), "useful": useful, "loading": loading, "idle": idle, "lost": lost,
            "repeated": repeated, "overhead": overhead}  # fmt: skip


RUNNING = {"ended": None, "state": "running"}
AGAIN = [*LOADED, [40.0, "starting"], [42.0, "loading"], [47.5, "running"]]


@pytest.mark.parametrize(
    ("given", "seconds", "failure", "expected"),
    [
        (record([[0, 12.0, 60.0, True]]), 100, None, of(60, idle=30)),
        (record([[0, 12.0, 60.0, True]]), 103, None, of(60, idle=33)),  # before its process began, and after
        (record([[0, 12.0, 60.0, False]]), 100, None, of(idle=30, repeated=60)),
        (record([[9, 12.0, 60.0, True]]), 100, None, of(idle=30, lost=60)),  # not there any more
        (record([[0, 12.0, 30.0, True], [1, 20.0, 23.0, True]]), 100, None, of(31, idle=59)),  # the first waited
        (record([[0, 12.0, 20.0, True]], lost_s=8.0, kept_s=5.0, phases=AGAIN), 100, None, of(25, 15.5, 51.5, 8)),
        (record(ended=None, updated=90.0, shard=1, shard_started=70.0), 100, "lost", of(idle=60, lost=30)),
        (record([[0, 12.0, 20.0, True]], phases=AGAIN[:5], updated=95.0), 100, "cancelled", of(20, 68, 12)),
        (
            record([[0, 12.0, 20.0, True]], **{**RUNNING, "phases": AGAIN[:5], "updated": 95.0}),
            100,
            "lost",
            of(20, 63, 12, 5),
        ),
        (record([[0, 12.0, 83.0, True]], **RUNNING, updated=90.0), 100, "lost", of(83, idle=2, lost=5)),
        (record(**RUNNING, shard=1, shard_started=50.0, shard_kept=80.0, kept_s=30.0), 100, "lost", of(30, 10, 40, 20)),
        (record(load_s=None, phases=LOADED[:2]), 100, "workload_error", of(loading=0, lost=100)),
        (record(load_s=None, phases=LOADED[:1]), 100, None, of(loading=0, idle=100)),  # nothing was left to do
        (record([[0, 12.0, 60.0, True]], idle_s=0.0), 100, None, of(60, overhead=30)),
        (record([[0, 12.0, 60.0, True]], idle_s=25.0), 103, None, of(60, idle=28, overhead=5)),
        (
            record(ended=None, updated=90.0, shard=1, shard_started=70.0, idle_s=8.0),
            100,
            "lost",
            of(lost=30, idle=8, overhead=52),
        ),
        (record([[0, 12.0, 60.0, True]], idle_s=70.0), 100, None, of(60, idle=30)),
        (record([[0, 12.0, 600.0, True]], lost_s=50.0), 100, None, of(100, 0)),  # a clock that was set
        (record([[0, 12.0, -5.0, True]], started=30.0), 70, None, of(idle=60)),
    ],
)
def test_each_second_of_an_attempt_goes_into_one_of_six(given, seconds, failure, expected):
    counts = counting([given, record([[0, 90.0, 5.0, True]], attempt="7_1.0", submission=0)], {0, 1})
    assert spent(given, seconds, failure, counts) == expected


def test_of_a_shard_that_was_published_again_the_last_submission_counts():
    first = record([[0, 500.0, 10.0, True], [1, 510.0, 10.0, True]], attempt="7_0.0", submission=1)
    late = record([[0, 900.0, 10.0, False]], attempt="7_1.0", submission=1)
    second = record([[0, 40.0, 10.0, True]], attempt="8_0.0", submission=2)  # on a node whose clock is behind
    assert counting([first, late, second], {0, 1}) == {0: {("8_0.0", 40.0)}, 1: {("7_0.0", 510.0)}}


def test_a_revision_that_computes_some_items_again_leaves_what_computed_the_others_useful():
    first = record([[0, 500.0, 10.0, True]], attempt="7_0.0", submission=1)
    again = record([[0, 900.0, 1.0, True, 1]], attempt="8_0.0", submission=2)
    late = record([[0, 890.0, 1.0, False, 1]], attempt="8_1.0", submission=2)
    counts = counting([first, again, late], {0})
    assert counts == {0: {("7_0.0", 500.0), ("8_0.0", 900.0)}}
    kinds = [kind_of(0, name, at, counts) for name, at in [("7_0.0", 500.0), ("8_0.0", 900.0), ("8_1.0", 890.0)]]
    assert kinds == ["useful", "useful", "repeated"]


def row(seconds, n_gpus=1, n_nodes=1, energy=None, **parts):
    usage = {} if energy is None else {"energy_j": energy}
    parts = {**dict.fromkeys(KINDS, 0.0), **parts}
    return {"seconds": seconds, "n_gpus": n_gpus, "n_nodes": n_nodes, "usage": usage, "spent": parts}


def test_the_ledger_weighs_hours_with_gpus_and_sums_the_energy_that_is_known():
    rows = [row(7200, 4, 2, energy=3.6e6, useful=3600.0, lost=3600.0), row(3600, idle=3600.0)]
    told = ledger(rows)
    assert told == {
        "unit": "GPU-hours",
        "allocated": 17.0,
        "useful": 8.0,
        "loading": 0.0,
        "overhead": 0.0,
        "idle": 1.0,
        "lost": 8.0,
        "repeated": 0.0,
        "energy_kwh": 1.0,
    }
    on_cpus = ledger([row(1800, 0, useful=1800.0), row(1800, 0, idle=1800.0)])
    assert (on_cpus["unit"], on_cpus["allocated"], on_cpus["useful"]) == ("task-hours", 1.0, 0.5)
    assert on_cpus["energy_kwh"] is None
    assert ledger([])["allocated"] == 0.0


def hours(*amounts):
    amounts = dict(zip(KINDS, amounts, strict=True))
    return {"unit": "GPU-hours", "allocated": sum(amounts.values()), **amounts}


def test_the_shares_of_a_ledger_and_its_amounts_add_up_to_all_of_it():
    shares = in_words(hours(2.0, 2.0, 0.0, 2.0, 0.0, 0.0)).shares
    assert shares == dict(zip(KINDS, ("33.4%", "33.3%", "0.0%", "33.3%", "0.0%", "0.0%"), strict=True))
    rng = random.Random(1)
    for _ in range(100):
        shown = in_words(hours(*(rng.random() ** 9 for _ in KINDS)))
        assert sum(round(10 * float(share.rstrip("%"))) for share in shown.shares.values()) == 1000
        hundredths = {name: round(100 * float(text.replace(",", ""))) for name, text in shown.texts.items()}
        assert hundredths.pop("allocated") == sum(hundredths.values())
    assert set(in_words(hours(0, 0, 0, 0, 0, 0)).shares.values()) == {"–"}


@pytest.mark.parametrize(
    ("allocated", "unit", "text"),
    [(12_345.0, "GPU-hours", "12,345.00"), (0.5, "GPU-minutes", "30.00"), (0.01, "GPU-seconds", "36.00")],
)
def test_the_hours_of_a_short_run_are_shown_in_minutes_or_seconds(allocated, unit, text):
    shown = in_words(hours(allocated, 0, 0, 0, 0, 0))
    assert (shown.unit, shown.texts["allocated"], shown.texts["useful"]) == (unit, text, text)


@pytest.mark.parametrize("n_gpus", [0, 4])
def test_the_ledger_of_a_long_run_with_faults_adds_up_to_its_hours(tmp_path, n_gpus):
    run = pretend_run(tmp_path / "run", 20_000, n_tasks=64, n_shards=3000, faulty=True, sample_s=0, n_gpus=n_gpus)
    accounting = {
        f"{r['job']}_{r['task']}": [
            Accounted("COMPLETED", None, True, int(r["updated"] - r["started"]) + 90, n_gpus, "n")
        ]
        for r in run.attempts()
        if r["restart"] == 0
    }
    report = reported(run, errors=(), accounting=accounting)
    told = report["ledger"]
    assert sum(told[kind] for kind in KINDS) == pytest.approx(told["allocated"], rel=1e-12)
    task_hours = sum(a["seconds"] for a in report["attempts"]) / 3600
    assert told["allocated"] == pytest.approx(report["gpu_hours"] if n_gpus else task_hours)
    assert all(round(sum(a["spent"].values()), 3) == a["seconds"] for a in report["attempts"])
    assert min(told[kind] for kind in ("useful", "loading", "idle", "lost")) > 0
    dead = [a for a in report["attempts"] if a["ended"] is None]
    assert dead
    assert all(a["spent"]["lost"] >= 90 for a in dead)  # until Slurm noticed
    assert told["energy_kwh"] == pytest.approx(sum(a["usage"]["energy_j"] for a in report["attempts"]) / 3.6e6)


# Damaged records

WRONG = [None, True, 1, -1, 0.5, 10**30, float("nan"), float("inf"), "x", [], [3], [["x", 1, 2]], {}, {"a": []}]
WRONG += [[[2**62, 1.75e9, 1.0, True]], [[-(2**70), 0, -9e8, True]], [[1e10, "loading"], [-1e8, "nonsense"]]]


BROKEN = [b"", b"\0" * 300, b"[]", b"3", b"null", b'"x"', b"{}", b'{"attempt": "7_0.0"}', b"[" * 100_000, b"\xff\xfe"]


@pytest.mark.parametrize("content", BROKEN, ids=lambda content: repr(content[:20]))
def test_a_file_that_is_no_record_is_refused_with_a_reason(content):
    with pytest.raises(ValueError, match=r"it |its|Expecting|codec"):
        read_record(content)


DEATH = {"class": "crash", "message": "m", "at": 5.0}


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("n_nodes", 1, 0),
        ("n_nodes", 65_536, 65_537),  # log files are looked for, node by node
        ("n_gpus", 65_536, 65_537),
        ("phases", [[5.0, "running"]], [[5.0, "running", 3]]),
        ("phases", [[5.0, "running"]], [[5.0]]),
        ("phases", [[5.0, "running"]], []),
        ("published", [[0, 12.0, 60.0, True]], [[0, 12.0, 60.0]]),
        ("deaths", [DEATH], [{**DEATH, "at": "noon"}]),
        ("deaths", [DEATH], [{key: DEATH[key] for key in ("class", "message")}]),
    ],
)
def test_what_could_not_be_worked_with_is_damage(key, right, wrong):
    whole = json.loads(json.dumps(record([[0, 12.0, 60.0, True]])))
    assert read_record(json.dumps({**whole, key: right}).encode())[key] == right
    with pytest.raises(ValueError, match=f"its {key} is "):
        read_record(json.dumps({**whole, key: wrong}).encode())


@pytest.fixture
def run(tmp_path):
    run = pretend_run(tmp_path / "run", 600, n_tasks=4, n_shards=40, faulty=True, sample_s=0)
    for shard in range(run.plan.n_shards):
        run.shard_path(shard).touch()
    return run


def test_whatever_is_written_into_a_record_costs_its_row_at_most(run, caplog):
    names = [r["attempt"] for r in run.attempts()]
    path = run.tasks / f"{names[1]}.json"
    whole = json.loads(path.read_text())
    dice = random.Random(3)
    n_refused = 0
    for key in whole:
        for wrong in [*WRONG, ...]:
            changed = {name: value for name, value in whole.items() if name != key or wrong is not ...}
            if wrong is not ...:
                changed[key] = wrong
            path.write_text(json.dumps(changed))
            damaged = list(run.read_attempts()[1])
            assert damaged in ([], [names[1]])
            n_refused += bool(damaged)
            if not damaged or dice.random() < 0.05:  # what passes must be of use
                report = reported(run, errors=(), accounting={"4711_2": []})
                assert report["damaged_records"] == damaged
                assert len(report["attempts"]) == len(names) - len(damaged)
                json.dumps(report, allow_nan=False)
                json.dumps(read_status(run, [], now=BEGIN + 605), allow_nan=False)
    assert n_refused > 400
    assert sum(names[1] in line.getMessage() for line in caplog.records) == 1  # warned of once


def test_a_damaged_record_is_named_and_its_hours_are_slurms(run):
    [first, *others] = [r["attempt"] for r in run.attempts()]
    (run.tasks / f"{first}.json").write_bytes(b"\0" * 500)
    (run.tasks / "4711_99.0.json").mkdir()
    accounting = {"4711_0": [Accounted("COMPLETED", None, True, 700, 1, "gpu000")]}
    report = reported(run, errors=(), accounting=accounting)
    assert report["damaged_records"] == sorted([first, "4711_99.0"])
    assert {a["attempt"] for a in report["attempts"]} == {first, *others}
    [row] = [a for a in report["attempts"] if a["attempt"] == first]
    assert (row["failure"], row["seconds"], row["spent"]) == (None, 700.0, spent_unrecorded(700))
    assert row["message"] == "its record is damaged (COMPLETED); its log may say why"
    assert [a["attempt"] for a in attempts_of(run, None)] == others


NOT_BEGUN = "Slurm could not start it there (a prolog may have failed) and queued it again; it has no log"
REQUEUED = "it ended before it could write a record (REQUEUED); its log may say why"


@pytest.mark.parametrize(
    ("began", "expected"), [(False, ("node_fail", NOT_BEGUN, "gpu000")), (True, ("preempted", REQUEUED, None))]
)
def test_a_task_that_slurm_could_not_start_failed_by_its_node_and_has_no_log(run, began, expected):
    accounting = {"4711_99": [Accounted("REQUEUED", "preempted", True, 7, 1, "gpu000", began=began)]}
    [row] = [row for row in attempts_of(run, accounting) if row["attempt"] == "4711_99.0"]
    assert (row["failure"], row["message"], row["bad_node"]) == expected


@pytest.mark.parametrize("usage", [{"gpu_memory_peak_bytes": 1.5e9}, {"throttled": {"power": "often"}}])
def test_a_record_with_usage_of_another_type_costs_its_row_and_not_the_report(run, usage):
    path = next(run.tasks.glob("*.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "usage": usage}))
    assert reported(run, errors=())["damaged_records"] == [path.stem]


def test_a_record_that_the_file_system_fails_to_read_is_not_called_damaged(run, monkeypatch, caplog, capsys):
    [first, *others] = [r["attempt"] for r in run.attempts()]
    given = {**json.loads((run.tasks / f"{first}.json").read_text()), "state": "running", "ended": None}
    (run.tasks / f"{first}.json").write_text(json.dumps(given))
    read = directory.read_bytes

    def fail(path, **given):
        if path.stem == first:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, **given)

    reader = StatusReader(run)
    with monkeypatch.context() as failing:
        failing.setattr(directory, "read_bytes", fail)
        status = reader.read([], now=BEGIN + 605)
        report = reported(run, errors=(), accounting={"4711_0": [Accounted("COMPLETED", None, True, 700, 1, "gpu000")]})
    for found in (status, report):
        assert (found["damaged_records"], found["unreadable_records"]) == ([], [first])
    assert [row["attempt"] for row in status["attempts"]] == others
    [row] = [row for row in report["attempts"] if row["attempt"] == first]
    assert row["message"] == "its record cannot be read at present (COMPLETED); its log may say why"
    assert f"{first}.json cannot be read at present, and is left out: " in caplog.text
    show_status(status)
    show_report(report)
    shown = capsys.readouterr()
    assert f"record cannot be read at present: {first}" in shown.out
    assert f"record could not be read: tasks/{first}.json" in shown.out
    assert "1 unreadable" in failure_words(status)
    assert "damaged" not in shown.out + caplog.text
    status = reader.read([], now=BEGIN + 606)  # the file is as it was, and can be read
    assert status["unreadable_records"] == []
    assert {row["attempt"] for row in status["attempts"]} == {first, *others}


@pytest.mark.parametrize("line", ["[]", "3", '"x"', "null", "{}", '{"submission": "1"}', '{"submission": 9}', '{"subm'])
def test_a_line_of_submissions_that_is_none_is_passed_over(run, line):
    before = run.submissions()
    with open(run.folder / "submissions.jsonl", "a") as file:
        file.write(f"{line}\n")
    assert run.submissions() == before
    assert before[0]["time"] == BEGIN


def test_what_a_record_quotes_may_be_no_text_at_all(run, slurmgpu):
    path = next(run.tasks.iterdir())
    name = "caf\udce9"  # as Python gives a file's name that is not UTF-8
    path.write_text(json.dumps({**json.loads(path.read_text()), "progress": name, "executor": name}))
    shown = slurmgpu("status", run.folder, "--json", expect=0).stdout
    assert name in {attempt["progress"] for attempt in json.loads(shown)["attempts"]}
    assert "Traceback" not in slurmgpu("logs", run.folder, "--json").stderr


def test_every_command_does_without_damaged_records(project, slurmgpu):
    folder = project(24, settings={"faults": {"3": "exception"}})
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    run = folder / "run"
    [path] = run.glob("tasks/[!.]*.json")
    path.write_bytes(b'{"attempt": "debug1_0.0", "published": null, "started": "x"}')
    (run / "tasks" / "torn_0.0.json").write_bytes(b"\0" * 400)
    with open(run / "submissions.jsonl", "a") as file:
        file.write("[]\nnull\n")
    for command, code in ({"status": 0, "merge": 0, "report": 0, "logs": 2, "list": 0}).items():
        done = slurmgpu(command, "run", cwd=folder)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        if command == "report":
            assert f"record damaged: tasks/{path.stem}.json" in done.stdout
    assert json.loads((run / "report.json").read_text())["damaged_records"] == [path.stem, "torn_0.0"]
    slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=0)
    assert json.loads((run / "report.json").read_text())["complete"]


def test_a_terminal_that_is_too_narrow_for_a_table_shows_each_attempt_as_a_line(tmp_path, monkeypatch, capsys):
    run = pretend_run(tmp_path / "run", 600)
    report, cells = reported(run), [f"{name} " for name in ("attempt", "node", "GPUs", "items", "host GB", "end")]
    for width in (200, 80, 50, 20):
        for view in ("status", "report"):
            monkeypatch.setattr(f"slurmgpu.cli.views.{view}.wide_console", lambda width=width: Console(width=width))
        show_report(report)
        told = capsys.readouterr().out
        assert all(row["attempt"] in told and row["node"] in told for row in report["attempts"])
        lines = [line for line in told.splitlines() if line.startswith(f"attempt {report['attempts'][0]['attempt']}, ")]
        assert all(cell in line for line in lines for cell in cells)
        assert len(lines) == (width < 80)
