"""`status --watch`: what is to be seen on terminals of several sizes while a run goes on, and that it harms nothing."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import termios
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from rich.console import Console

from slurmgpu.cli.views import status_poller
from slurmgpu.cli.views import watch as watching
from slurmgpu.cli.views.keyboard import Keyboard
from slurmgpu.cli.views.screens import Screen
from slurmgpu.cli.views.status import show_status
from slurmgpu.cli.views.status_poller import Look, StatusPoller, last_line
from slurmgpu.report.state_words import News, last_message, line_of, state_of, tasks_of
from slurmgpu.report.status import StatusReader
from slurmgpu.slurm import queue
from slurmgpu.util.ansi import plain
from slurmgpu.util.atomic_files import write_json
from tests.support import pretend_runs
from tests.support.command_line import ROOT
from tests.support.pretend_runs import BEGIN, Pretended, pretend_run, update
from tests.support.runs import holders, let_go, start, wait_until
from tests.support.terminals import Terminal


@pytest.fixture
def run_of_now(tmp_path, monkeypatch):
    """`run_of_now(n_tasks=8)`: a run of this machine after five minutes, whose tasks seem alive for ten more."""

    def pretend(**what):
        monkeypatch.setattr(pretend_runs, "BEGIN", time.time() - 300)
        return pretend_run(tmp_path / "judge", 300, executor="local", lease_s=600.0, **what)

    return pretend


def drawn(screen, size=(80, 24)):
    """The lines that a screen has on a terminal of that size; none is wider."""
    console = Console(file=io.StringIO(), width=size[0], height=size[1], force_terminal=True, color_system=None)
    options = console.options.update(width=size[0], height=size[1])
    lines = ["".join(part.text for part in line) for line in console.render_lines(screen, options)]
    assert len(lines) == size[1]
    assert all(len(line) == size[0] for line in lines)
    return lines


def screen_of(run, now_s, queue=None, first=0):
    status, words = Look(run).read(queue, None, BEGIN + now_s)
    return Screen(status, tasks_of(status), first, words)


# Screens


@pytest.mark.parametrize("n_tasks", [0, 8, 1000])
def test_a_screen_fits_whatever_the_size_and_the_number_of_tasks(tmp_path, n_tasks):
    what = {"n_tasks": n_tasks, "n_concurrent": n_tasks, "n_shards": 3000, "sample_s": 120.0, "faulty": True}
    run = pretend_run(tmp_path / "judge", 200, **what)
    pending = {"job_id": "4711_[2001-2007]", "state": "PENDING", "reason": "Priority", "n_tasks": 7}
    queue = [{**pending, "start": BEGIN + 3600}]
    screen = screen_of(run, 200, queue)
    for size in ((80, 24), (200, 50)):
        lines = drawn(screen, size)
        assert lines[0].startswith("judge")
        assert any("7 pending (Priority), start about" in line for line in lines)
        assert any(f"of {n_tasks:,}: " in line for line in lines) or not n_tasks
    for size in ((40, 10), (20, 4)):
        drawn(screen, size)


def test_the_header_has_progress_rate_time_left_failures_and_the_queue(tmp_path):
    run = pretend_run(tmp_path / "judge", 900, n_tasks=64, n_shards=2000, faulty=True)
    pending = {"job_id": "4711_[64-99]", "state": "PENDING", "reason": "Resources", "start": None, "n_tasks": 36}
    text = "\n".join(drawn(screen_of(run, 900, [pending])))
    assert "judge  running  0:15:00" in text
    assert "of 31,992 " in text
    assert "of 2,000 " in text
    assert " items/s, 0:" in text
    assert " left, until about " in text
    assert "tasks: 3 preempted; workers: 3 crash" in text
    assert "36 pending (Resources)" in text
    assert " left if started now" in text


def test_a_row_has_state_node_gpu_memory_shard_rate_and_the_last_message(tmp_path):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=2)
    at = "2026-11-22T03:00:00.123+00:00"
    own = f"{at} INFO slurmgpu.worker: shard 7: items 56..63\n"
    (run.logs / "4711_1.0.log").write_text(f"first\n{own}{at} WARNING judge: too long\n{own * 100}\n")
    lines = drawn(screen_of(run, 300))
    [row] = [line.split() for line in lines if line.startswith("4711_1.0")]
    assert row[:3] == ["4711_1.0", "running", "gpu000"]
    assert 70 <= int(row[3]) <= 99
    assert row[4] == "61.0"
    assert row[6].endswith("%")
    assert float(row[7]) == pytest.approx(0.27, rel=0.2)
    assert row[8:] == ["too", "long"]


def test_those_that_want_a_look_come_first_then_the_living_then_those_that_ended(tmp_path):
    run = pretend_run(tmp_path / "judge", 600, n_tasks=60, n_concurrent=30, n_shards=280, faulty=True)
    for path in sorted(run.tasks.iterdir())[:2]:
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "state": "ended", "failure": "host_oom", "ended": record["updated"]}))
    status, _ = Look(run).read(None, (), BEGIN + 600)
    order = ["silent", "failed", "running", "ended"]
    states = [state_of(task).replace("loading", "running").replace("starting", "running") for task in tasks_of(status)]
    assert set(states) == set(order)
    assert states == sorted(states, key=order.index)
    assert states.count("failed") == 2
    # Once the run was submitted again, what became of the first submission's tasks is the past.
    later = {**status["attempts"][0], "attempt": "9_0.0", "submission": 2, "silent": False, "failure": None}
    names = [task["attempt"] for task in tasks_of({"attempts": [*status["attempts"], {**later, "state": "loading"}]})]
    failed = [task["attempt"] for task in tasks_of(status)][: states.index("running")]
    assert names.index("9_0.0") < min(map(names.index, failed))


def test_of_a_task_that_was_requeued_the_latest_attempt_is_shown(tmp_path):
    run = pretend_run(tmp_path / "judge", 900, n_tasks=64, n_shards=2000, faulty=True)
    names = [task["attempt"] for task in tasks_of(Look(run).read(None, (), BEGIN + 900)[0])]
    assert len(names) == 64
    assert sum(name.endswith(".1") for name in names) == 3


def test_of_a_requeued_task_the_latest_attempt_is_shown_whatever_its_nodes_clock_says(tmp_path):
    run = pretend_run(tmp_path / "judge", 600, n_tasks=2, n_shards=50)
    record = json.loads((run.tasks / "4711_0.0.json").read_text())
    late = {**record, "attempt": "4711_0.1", "restart": 1, "started": record["started"] - 90}
    (run.tasks / "4711_0.1.json").write_text(json.dumps(late))
    (run.tasks / "4711_0.0.json").write_text(json.dumps({**record, "state": "ended", "failure": "preempted"}))
    assert [t["attempt"] for t in tasks_of(StatusReader(run).read(now=BEGIN + 600))] == ["4711_0.1", "4711_1.0"]


def test_what_a_run_says_of_itself_does_nothing_to_the_terminal(tmp_path):
    name = "[red]judge[/] \x1b[2J\x07"
    assert plain(f"a{name}\r\n b\x9b2J") == "a[red]judge[/] b 2J"
    run = pretend_run(tmp_path / "judge", 300, n_tasks=2)
    for path in run.tasks.iterdir():
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "node": name, "progress": f"{name} \u202e ✓"}))
    lines = drawn(screen_of(run, 300), (200, 50))
    assert sum("[red]judge[/]" in line for line in lines) == 2
    assert not any(letter in "".join(lines) for letter in "\x1b\x07\u202e")


AT = "2026-11-22T03:00:00.123+00:00"
WORKER = f"{AT} INFO slurmgpu.worker:"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("one\ntwo\n\n", "two"),
        (f"{AT} WARNING slurmgpu.worker.computer: item 4: no\n{WORKER} shard 7: published after 1.2 s\n", "item 4: no"),
        (f"10%\r20%\r{WORKER} shard 8: items 64..71\n", "20%"),
        (f"20% of it {WORKER} shard 8: items 64..71\n", "20% of it"),
        (f"Extension modules: numpy\n{WORKER} this worker is process 3 of attempt 1_0.0\n", ""),
        ("one\n" + f"{WORKER} shard 8: items 64..71\n" * 1000, ""),
        ("x" * 50_000, "x" * 16_384),
    ],
)
def test_the_last_line_of_a_log_is_the_workloads_or_a_warning(tmp_path, text, line):
    (tmp_path / "log").write_text(text)
    assert last_line(tmp_path / "log") == line


LOADING = "loading the model\rLoading weights: 10%\rLoading weights: 100%"
BEGUN = f"{WORKER} shard 0: items 0..7\n"
PUBLISHED = f"{WORKER} shard 0: published after 1.2 s; 0 of 8 items failed\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{LOADING}\n", ""),
        (f"{LOADING}{BEGUN}", ""),
        (f"{LOADING}\n{BEGUN}{PUBLISHED}{BEGUN}", ""),
        (f"{LOADING}\n{BEGUN}4 of 8\n", "4 of 8"),
        (f"{LOADING}\n{BEGUN}8 of 8\n{PUBLISHED}{BEGUN}", "8 of 8"),
        (f"{BEGUN}8 of 8\n{WORKER} this worker is process 3 of attempt 1_0.0\n{LOADING}\n", ""),
        (f"{LOADING * 1000}{BEGUN}", ""),
        (f"{LOADING}\n{BEGUN}" + "step 5 of 9\n" * 5000, "step 5 of 9"),
    ],
)
def test_what_was_said_before_the_first_shard_is_no_message_of_one_that_computes(tmp_path, text, line):
    (tmp_path / "log").write_text(text)
    assert last_line(tmp_path / "log", computes=True) == line


TASK = {"state": "running", "failure": None, "silent": False, "age_s": 2.0, "state_since": BEGIN, "shard": 3}
TASK |= {"attempt": "1_0.0", "progress": None, "items_per_s": 1.0, "n_deaths": 0, "last_death": None, "message": ""}
DIED = {"n_deaths": 2, "last_death": "crash"}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "the log's"),
        ({"progress": "step 3 of 9"}, "step 3 of 9"),
        ({**DIED, "state": "loading", "state_since": BEGIN + 88}, "crash ×2; loading for 12 s; the log's"),
        ({"silent": True, "age_s": 1500.0}, "silent for 25 min; its node may be dead"),
        ({"silent": True, "failure": "lost", "message": "no end was recorded"}, "lost: no end was recorded"),
        ({"shard": None}, "the log's"),
        ({"shard": None, "items_per_s": None}, "idle: other tasks have the last shards; the log's"),
        ({"shard": None, "items_per_s": None, "state_since": BEGIN + 99}, "the log's"),
        ({"state": "ended"}, ""),
    ],
)
def test_the_last_message_says_what_the_columns_do_not(task, message):
    assert last_message({**TASK, **task}, {"1_0.0": "the log's"}, BEGIN + 100) == message


def test_a_run_without_gpus_has_no_columns_for_them(tmp_path):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=2, n_gpus=0)
    assert "GPU" not in "\n".join(drawn(screen_of(run, 300), (200, 50)))


def test_a_damaged_record_and_a_damaged_sample_cost_a_row_and_a_number(tmp_path):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=4)
    (run.tasks / "4711_1.0.json").write_text('{"attempt": 3')
    (run.folder / "telemetry" / "4711_2.0.jsonl").write_bytes(b"\xff\x00nonsense\n")
    text = "\n".join(drawn(screen_of(run, 300)))
    assert "records: 1 damaged" in text
    assert "tasks 1–3 of 3: 3 running" in text


def words_of(run, now_s, queue=None):
    status = StatusReader(run).read(queue, now=BEGIN + now_s)
    return line_of(status).partition("; ")[2]


def test_a_line_says_what_the_walltimes_leave_unless_that_depends_on_the_queue(tmp_path):
    run = pretend_run(tmp_path / "judge", 600, n_tasks=4, n_shards=900, walltime_s=1200.0)
    waiting = {"job_id": "4711_[4-9]", "state": "PENDING", "reason": "Priority", "start": None, "n_tasks": 6}
    assert re.search(r"items/s, \d+ shards will be left over when the walltimes end$", words_of(run, 600))
    assert "when the walltimes end" not in words_of(run, 600, [waiting])
    throttled = {**waiting, "job_id": "4711_[4-5%4]", "n_tasks": 2}
    assert re.search(
        r"items/s, \d+ shards will be left over when the walltimes end; 2 pend", words_of(run, 600, [throttled])
    )
    for task in range(4):  # all is computed
        path = run.tasks / f"4711_{task}.0.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": "ended", "shard": None}))
    for shard in range(900):
        run.shard_path(shard).touch()
    told = words_of(run, 600, [{**waiting, "reason": "JobArrayTaskLimit"}])
    assert told.endswith("; 4 of 10 tasks ended; the merge follows the last one; 6 pending (JobArrayTaskLimit)")


def test_a_log_has_a_line_at_news_and_one_after_minutes_without(tmp_path, monkeypatch):
    run, now = pretend_run(tmp_path / "judge", 300, n_tasks=2), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    status = StatusReader(run).read(now=BEGIN + 300)
    failing = {**status, "attempts": [{**status["attempts"][0], "progress": "each call failed so far: no model"}]}
    assert "each call failed so far: no model" in line_of(failing)
    news, later = News(), News(at_once=False)
    told = []
    for at, shown in ((0, status), (5, failing), (11, failing), (30, failing), (310, failing), (312, failing)):
        now[0] = 1000.0 + at
        told += [(at, news.is_due(shown), later.is_due(shown))]
    assert told == [
        (0, True, False), (5, False, False), (11, True, True), (30, False, False), (310, False, False),
        (312, True, True),
    ]  # fmt: skip


def test_a_share_is_never_rounded_up_to_all_of_it(tmp_path):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=2)
    status = {**StatusReader(run).read(now=BEGIN + 300), "n_items": 10_000, "n_items_done": 9_999}
    assert "9,999 of 10,000 items (99.9%)" in line_of(status)
    assert "9,999 of 10,000   99.9%" in "\n".join(drawn(Screen(status, tasks_of(status))))


@pytest.mark.parametrize("n_tasks", [0, 3])
def test_a_run_of_which_nothing_is_left_says_how_long_it_is_watched(tmp_path, n_tasks):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=n_tasks)
    said = "no job is left; watching stops if the merge does not finish within 45 s"
    assert said in words_of(run, 900, [])
    lines = drawn(screen_of(run, 900, []), (100, 24))
    assert f"merge    {said}" in "\n".join(lines)
    assert any(line.startswith("no task has started  ") for line in lines) == (not n_tasks)


def test_a_run_that_was_cancelled_before_it_began_says_so_and_is_not_watched(tmp_path, capsys):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=0)
    run.record_submission({"submission": 1, "cancelled": True})
    assert "; the last submission was cancelled" in words_of(run, 900, [])
    look = Look(run)
    status, _ = look.read([], None, BEGIN + 900)
    assert look.has_ended(status)
    show_status(status)
    told = capsys.readouterr()
    assert "\nthe last submission was cancelled\n" in told.out
    assert told.err == f"next: slurmgpu resubmit {run.folder}\n"


class Seen:
    """A StatusPoller whose second look comes between any two glances at it."""

    error, words, visible = None, {}, ()
    latest = StatusPoller.latest

    def __init__(self, first, last, on_look):
        self._looks, self.has_ended, self._last = [first], False, last
        on_look()

    @property
    def status(self):
        self.has_ended = True
        return self._looks.pop() if self._looks else self._last

    def start(self):
        pass

    def stop(self):
        pass


def test_the_last_status_is_told_and_decides_the_exit_code(tmp_path, monkeypatch, capsys):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=2)
    first = StatusReader(run).read(now=BEGIN + 300)
    monkeypatch.setattr(
        watching, "StatusPoller", lambda run, on_look: Seen(first, {**first, "state": "incomplete"}, on_look)
    )
    told = []
    assert watching.watch(run, on_look=lambda status: told.append(status["state"])) == 3
    assert told == ["running", "incomplete"]
    assert capsys.readouterr().out.splitlines()[-1].split()[1:3] == ["judge", "incomplete;"]


@pytest.mark.parametrize("lines", [3, 5, 6, 7])
def test_a_screen_without_room_for_rows_still_counts_the_tasks(tmp_path, lines):
    screen = screen_of(pretend_run(tmp_path / "judge", 900, n_tasks=14, n_shards=2000, faulty=True), 900)
    shown = drawn(screen, (80, lines))
    assert shown[0].startswith("judge  running")
    assert [line for line in shown if line.strip()][-1].startswith("14 tasks: ")


# The terminal


def test_a_thousand_tasks_are_scrolled_and_a_terminal_resized(tmp_path, run_of_now):
    run = run_of_now(n_tasks=1000, n_shards=5000, sample_s=60.0)
    with Terminal("status", "judge", "--watch", cwd=tmp_path) as terminal:
        terminal.see(lambda t: "tasks 1–17 of 1,000" in t.text)
        assert len(terminal.display) == 24
        terminal.send(b"G")
        terminal.see(lambda t: "tasks 984–1,000 of 1,000" in t.text)
        assert any(line.startswith("4711_999.0") for line in terminal.display)
        terminal.send(b"k\x1b[A")
        terminal.see(lambda t: "tasks 982–998 of" in t.text)
        terminal.send(b"\x1b[5~")
        terminal.see(lambda t: "tasks 966–982 of" in t.text)
        terminal.send(b"\x1b[6~j\x1bOB")
        terminal.see(lambda t: "tasks 984–1,000 of" in t.text)
        terminal.resize(200, 50)
        terminal.see(lambda t: "tasks 958–1,000 of" in t.text and "°C" in t.text)
        assert len(terminal.display) == 50
        terminal.send(b"\x1b[H")
        terminal.see(lambda t: "tasks 1–43 of" in t.text)
        record = json.loads((run.tasks / "4711_2.0.json").read_text())
        end = {"state": "ended", "ended": time.time(), "failure": "host_oom", "message": "memory: \x1b[31mall of it"}
        write_json(run.tasks / "4711_2.0.json", {**record, **end})
        terminal.see(lambda t: "1 host_oom" in t.text and "1 failed" in t.text)
        assert [line.split()[0] for line in terminal.display if line.startswith("4711_")][:2] == [
            "4711_2.0",
            "4711_0.0",
        ]
        assert "host_oom: memory: all of it" in terminal.text
        terminal.send(b"q")
        assert terminal.end() == 3
        assert termios.tcgetattr(terminal._its) == terminal.modes
        assert "Traceback" not in terminal.text


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "an error"])
def test_whatever_ends_it_the_terminal_is_as_before(tmp_path, run_of_now, how):
    run = run_of_now(n_tasks=8)
    with Terminal("status", "judge", "-w", cwd=tmp_path) as terminal:
        terminal.see(lambda t: "tasks 1–8 of 8" in t.text)
        assert b"\x1b[?1049h" in terminal.written
        if how == "Ctrl-C":
            terminal.send(b"\x03")
            assert terminal.end() == 130
            assert "the run continues" in terminal.text
        elif how == "SIGTERM":
            terminal.process.terminate()
            assert terminal.end() == 143
        else:
            run.folder.rename(tmp_path / "elsewhere")
            assert terminal.end() == 2
            assert "shards: No such file or directory" in terminal.text.replace("\n", "")
        assert termios.tcgetattr(terminal._its) == terminal.modes
        assert terminal.written.rindex(b"\x1b[?1049l") > terminal.written.rindex(b"\x1b[?1049h")
        assert b"\x1b[?25h" in terminal.written  # the cursor
        assert "Traceback" not in terminal.text


def test_ctrl_z_gives_the_terminal_back_to_the_shell_until_the_job_goes_on(tmp_path, run_of_now):
    run_of_now(n_tasks=8)
    wrapper = """sh -c '"$@"; exit $?' sh "$@" """
    shell = ("bash", "-mc", f"{wrapper}; echo put aside; read line; fg", "bash")
    with Terminal("status", "judge", "-w", cwd=tmp_path, under=shell) as terminal:
        terminal.see(lambda t: "tasks 1–8 of 8" in t.text)
        terminal.send(b"\x1a")
        terminal.see(lambda t: b"put aside" in t.written)
        assert terminal.written.rindex(b"\x1b[?1049l") > terminal.written.rindex(b"\x1b[?1049h")
        assert termios.tcgetattr(terminal._its) == terminal.modes
        terminal.send(b"\n")
        terminal.see(lambda t: t.written.count(b"\x1b[?1049h") == 2 and "tasks 1–8 of 8" in t.text)
        terminal.send(b"q")
        assert terminal.end() == 3


def test_a_terminal_without_our_characters_gets_a_screen_of_the_same_width(tmp_path, run_of_now):
    run_of_now(n_tasks=30, faulty=True)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with Terminal("status", "judge", "--watch", cwd=tmp_path, **ascii_only) as terminal:
        terminal.see(lambda t: "tasks 1-" in t.text)
        terminal.send(b"q")
        assert terminal.end() == 3
    assert b"\\u" not in terminal.written
    assert terminal.written.isascii()
    (tmp_path / "a.txt").write_text("x\n")
    run = "run", "--dry-run", "--executor", "local", "--gpus", "0", "--each", "a.txt", "--col", "n:text"
    command = sys.executable, "-m", "slurmgpu", *run, "--", "echo", "a → {text}"
    environ = {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "ascii"}
    listed = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert "\\u2192" in listed.stdout, listed.stderr  # in a file of TOML no character is another one


def test_a_dumb_terminal_gets_lines_and_no_bar(project):
    with Terminal("submit", "--executor", "local", "--gpus", "0", cwd=project(20), TERM="dumb") as terminal:
        assert terminal.end() == 0
    lines = terminal.written.decode().splitlines()
    assert any("run running; 0 of 20 items (0.0%)" in line for line in lines)
    assert lines[0]


def test_ctrl_z_stops_nothing_where_nobody_could_continue_it(tmp_path, run_of_now):
    run_of_now(n_tasks=8)
    with Terminal("status", "judge", "-w", cwd=tmp_path) as terminal:  # the only process of its session
        terminal.see(lambda t: "tasks 1–8 of 8" in t.text)
        terminal.send(b"\x1a")
        terminal.see(lambda t: t.written.count(b"\x1b[?1049h") == 2 and "tasks 1–8 of 8" in t.text)
        terminal.send(b"q")
        assert terminal.end() == 3


def test_a_real_run_is_watched_to_its_end_and_left_alone_by_who_looks_away(project):
    folder = project(60, settings={"faults": {"17": "segfault"}}, held_from=40, lease_s=60.0)
    run = start("submit", "--executor", "local", "--gpus", "0", "--tasks", "2", cwd=folder)
    wait_until(lambda: len(holders(folder)) == 2, "both tasks with a shard in hand")
    command = [sys.executable, "-m", "slurmgpu", "status", "run", "--watch"]
    with (
        Terminal("status", "run", "--watch", cwd=folder) as short,
        Terminal("status", "run", "-w", cwd=folder) as long,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as piped,
    ):
        short.see(lambda t: "running" in t.text)
        short.send(b"\x03")
        assert short.end() == 130
        long.see(lambda t: "workers: 2 crash" in t.text and " left" in t.text)
        assert " run running; " in piped.stdout.readline()
        let_go(folder)
        assert long.end() == 0
        assert "run  complete  60 of 60 items" in long.text
        assert "crash ×2" in long.text  # item 17 has killed two workers
        assert " run complete; 60 of 60 items (100.0%)" in piped.communicate()[0].splitlines()[-1]
    output, _ = run.communicate()
    assert run.returncode == 0, output


def test_json_lines_are_whole_statuses_and_an_incomplete_end_is_code_3(project, slurmgpu):
    folder = project(40)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder)
    (folder / "run" / "shards" / "00001.h5").unlink()
    [status] = map(json.loads, slurmgpu("status", "run", "--watch", "--json", cwd=folder, expect=0).stdout.splitlines())
    assert (status["state"], status["n_items_done"]) == ("complete", 40)  # merged.h5 has the rows
    (folder / "run" / "merged.h5").unlink()
    done = slurmgpu("status", "run", "--watch", "--json", cwd=folder, expect=3)
    [status] = map(json.loads, done.stdout.splitlines())
    assert (status["format"], status["state"]) == ("slurmgpu status", "incomplete")
    said = slurmgpu("status", "run", "--watch", cwd=folder, expect=3)
    assert said.stderr == f"next: slurmgpu resubmit {folder / 'run'}\n"


# What it costs


def test_squeue_is_asked_once_in_half_a_minute_and_not_for_what_it_has_not(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\necho called >> {calls}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    assert status_poller.QUEUE_S == 30
    for name, seconds in {"LOOK_S": 0.01, "QUEUE_S": 600.0, "PATIENCE_S": 60.0}.items():  # also if all of it is slow
        monkeypatch.setattr(status_poller, name, seconds)
    for executor, n_calls in (("slurm", 1), ("local", 0)):
        calls.write_text("")
        run = pretend_run(tmp_path / executor, 300, n_tasks=4, executor=executor)
        looks = []
        poller = StatusPoller(run, lambda looks=looks: looks.append(1))
        poller.start()
        wait_until(lambda looks=looks, poller=poller: len(looks) > 20 or poller.has_ended, "twenty looks")
        poller.stop()
        assert calls.read_text().count("called") == n_calls


def test_what_squeue_said_last_holds_while_it_does_not_answer(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=3)
    answers = [[queue.QueuedJob("4711_[3-9]", "PENDING", "Priority", f"slurmgpu:{run.plan.name}", "/", "x")]]

    def own_jobs():
        calls.append(1)
        if answers:
            return answers.pop()
        raise queue.commands.SlurmUnavailableError("squeue failed: error: Unable to contact slurm controller")

    calls, looks = [], []
    monkeypatch.setattr(queue, "own_jobs", own_jobs)
    monkeypatch.setattr("slurmgpu.cli.views.status_poller.LOOK_S", 0.01)
    monkeypatch.setattr("slurmgpu.cli.views.status_poller.QUEUE_S", 0.01)
    poller = StatusPoller(run, lambda: looks.append(len(calls)))
    poller.start()
    wait_until(lambda: looks and looks[-1] > 3, "a look after some failures")
    poller.stop()
    assert (poller.status["state"], poller.status["pace"]["n_waiting"]) == ("queued", 7)
    assert not poller.has_ended


@pytest.mark.parametrize(("here", "told"), [("main", []), ("other", None)])
def test_of_a_run_on_another_cluster_the_queue_here_says_nothing(tmp_path, monkeypatch, here, told):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=3)
    assert queue.queued_jobs(run, []) == []  # where it was submitted is not known
    run.record_submission({"submission": 1, "cluster": "main"})
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho 'ClusterName             = {here}'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    assert queue.queued_jobs(run, []) == told


def test_a_look_that_takes_long_wakes_nobody_who_has_gone(tmp_path):
    looked = []
    poller = StatusPoller(pretend_run(tmp_path / "judge", 300, n_tasks=1, executor="local"), lambda: looked.append(1))
    begun, may_end = threading.Event(), threading.Event()
    poller._look.read = lambda *_: begun.set() or (may_end.wait() and ({"state": "running"}, {}))
    poller.start()
    begun.wait()
    poller.stop()
    may_end.set()
    poller._threads[-1].join()
    assert looked == []
    keyboard = Keyboard()
    keyboard.close()
    reader, writer = os.pipe()  # under the numbers of the one that was closed
    keyboard.wake()
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_only_records_that_changed_are_read_again_and_ended_ones_never(tmp_path, monkeypatch):
    pretended = Pretended(n_tasks=40, n_concurrent=20, n_shards=300)
    run = pretend_run(tmp_path / "judge", 600, n_tasks=40, n_concurrent=20, n_shards=300)
    reader = StatusReader(run)
    read = []
    attempt = type(run).attempt
    monkeypatch.setattr(type(run), "attempt", lambda self, name: read.append(name) or attempt(self, name))
    first = reader.read(now=BEGIN + 600)
    assert len(read) == len(first["attempts"])
    read.clear()
    assert reader.read(now=BEGIN + 600)["attempts"] == first["attempts"]
    assert read == []
    update(run, pretended, 700)
    reader.read(now=BEGIN + 700)
    assert sorted(read) == sorted(a["attempt"] for a in StatusReader(run).read(now=BEGIN + 700)["attempts"])
    update(run, pretended, 5000)
    ended = [a["attempt"] for a in reader.read(now=BEGIN + 5000)["attempts"] if a["state"] == "ended"]
    assert ended
    read.clear()
    for name in ended:
        os.utime(run.tasks / f"{name}.json")
    reader.read(now=BEGIN + 5001)
    assert not set(read) & set(ended)


def test_eight_hours_of_watching_need_no_more_memory_than_one(tmp_path):
    # In a process of its own: what threads of other tests allocate would be counted as well.
    program = f"from tests.local.test_watch import sizes_of_looks; print(sizes_of_looks({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    # One status that is kept at each look makes it 825,000; it is 370,000. What does grow, to a limit, are the numbers
    # of published shards, and the widths of texts that Rich keeps in mind.
    assert sizes[-1] - sizes[2] < 600_000, sizes


def sizes_of_looks(folder):
    """The bytes that Python has allocated after each half hour of looks."""
    what = {"n_tasks": 6, "n_shards": 4000, "seconds": 90, "walltime_s": None, "sample_s": 300.0, "faulty": True}
    pretended, hour = Pretended(**what), 3600
    run = pretend_run(Path(folder) / "judge", 60, **what)
    look, sizes = Look(run), []
    tracemalloc.start()
    for began in range(600, 8 * hour, 1800):
        update(run, pretended, began)
        for now_s in range(began, began + 1800, 360):
            status, words = look.read(None, None, BEGIN + now_s)
            drawn(Screen(status, tasks_of(status), 0, words))
        del status, words
        sizes.append(tracemalloc.get_traced_memory()[0])
    return sizes


# The queue


@pytest.mark.parametrize(
    ("job_id", "n_tasks"),
    [
        ("1234_7", 1),
        ("1234", 1),
        ("1234_[5]", 1),
        ("1234_[5-9,12%4]", 6),
        ("1234_[0-198:3]", 67),
        ("1234_[0-999]", 1000),
        ("1234_[5,7...]", 1),
    ],
)
def test_the_tasks_of_an_array_that_has_not_started_are_counted(job_id, n_tasks):
    assert queue.QueuedJob(job_id, "PENDING", "Priority", "slurmgpu", "/", "x").to_json(False)["n_tasks"] == n_tasks


@pytest.mark.slurm
def test_the_queue_of_a_real_slurm_tells_tasks_and_start_times(project, slurmgpu, cluster):
    folder = project(400)
    slurmgpu("submit", "--array", "--device", "cpu", "--gpus", "2", "--tasks", "40", "--slurm", "begin=now+3600",
             cwd=folder, expect=0)  # fmt: skip
    try:
        wait_until(lambda: "BeginTime" in cluster.run("squeue", "-h", "-o", "%r"), "Slurm's reason")
        now = time.time()
        status = json.loads(slurmgpu("status", "run", "--json", cwd=folder, expect=0, SLURM_TIME_FORMAT="%H").stdout)
        [tasks] = [job for job in status["queue"] if job["n_tasks"]]
        assert (status["state"], tasks["n_tasks"], tasks["state"]) == ("queued", 40, "PENDING")
        assert tasks["start"] == pytest.approx(now + 3600, abs=300)
        assert [job["start"] for job in status["queue"] if not job["n_tasks"]] == [None]  # the merge
        with Terminal("status", "run", "--watch", cwd=folder) as terminal:
            terminal.see(lambda t: "40 pending (BeginTime), start about" in t.text)
            assert "no task has started yet" in terminal.text
            terminal.send(b"q")
            assert terminal.end() == 3
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            slurmgpu("cancel", "run", cwd=folder)
