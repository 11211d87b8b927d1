"""`slurmgpu logs`: the line behind any failure, in real runs; and how lines are read from files of any size."""

import json
import os
import re
import signal
import time
import tracemalloc
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from slurmgpu.cli.commands import logs as log_commands
from slurmgpu.cli.commands.logs import refuse_unstarted, show_logs
from slurmgpu.cli.views.log_follower import LogFollower
from slurmgpu.cli.views.log_lines import Printer, print_files
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import registry
from slurmgpu.logs.files import LogFile
from slurmgpu.logs.lines import merged, read_lines, without_colours
from slurmgpu.logs.places import LINE_BYTES, last_end, line_number, search_until, tail_start, time_start
from slurmgpu.plan.planner import draft_run
from slurmgpu.report.report_file import read_report, report_path
from slurmgpu.run.claims import Claim
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from slurmgpu.search import cached_run
from slurmgpu.search.classes import events_of_class
from slurmgpu.search.excerpts import BEFORE, N_LINES, excerpt_around, excerpt_of_attempt
from slurmgpu.search.index import read_index
from slurmgpu.search.items import story_of_item
from slurmgpu.util.amounts import size_of
from slurmgpu.util.atomic_files import write_json
from tests.docs.test_docs import listed
from tests.support.pretend_runs import BEGIN, pretend_run
from tests.support.runs import (
    copy_run,
    holders,
    kill_workers,
    let_go,
    make_project,
    records,
    report,
    start,
    submissions,
    wait_until,
)

TALKING = '''
import logging.config


class Talks(Rows):
    """Prints between what is logged, with a time zone and logging of its own, and has memory for two items at once."""

    def load(self, task):
        super().load(task)
        os.environ["TZ"] = "Asia/Tokyo"
        time.tzset()
        logging.config.dictConfig({"version": 1, "root": {"level": "ERROR"}})  # disables the loggers that exist

    def __call__(self, items):
        for item in items:
            print(f"\\x1b[31mthinking\\x1b[0m\\x1b[2J of {item.index}", flush=True)
        if len(items) > 2 and items[0].index == 32:
            raise MemoryError("simulated")
        return super().__call__(items)


class Waits(Talks):
    """Says so while its items are held."""

    def __call__(self, items):
        while items[-1].index >= self.held_from and Path(self.held).exists():
            print("waiting", flush=True)
            time.sleep(0.2)
        return super().__call__(items)
'''
LOCAL = ("submit", "--executor", "local", "--gpus", "0")
FAULTS = {3: "exception", 5: "exception", 9: "segfault", 14: "item_error", 33: "exception"}
N_ITEMS = 40
STAMP = "2025-06-15T15:06:50.000+00:00"


def talking(folder, workload="Talks", held_from=0, **settings):
    make_project(folder, N_ITEMS, workload=workload, settings=settings, held_from=held_from, lease_s=60.0)
    with open(folder / "workloads.py", "a") as file:
        file.write(TALKING)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two tasks that met faults of several kinds, and is over; each has computed something."""
    folder = talking(tmp_path_factory.mktemp("logs") / "project", faults=FAULTS)
    submitted = start(*LOCAL, "--tasks", "2", cwd=folder)
    wait_until(lambda: len(holders(folder)) == 2, "a shard in hand of each task")
    let_go(folder)
    output, _ = submitted.communicate()
    assert submitted.returncode == 0, output
    return folder


@pytest.fixture
def run(folder):
    return Run.open(folder / "run")


@pytest.mark.parametrize("index", sorted(FAULTS))
def test_the_line_behind_a_failed_item_is_found_by_its_index(run, index):
    [known] = [error for error in report(run.folder.parent)["errors"] if error["index"] == index]
    story = story_of_item(run, index)
    assert (story.ended, story.failure, story.message) == ("failed", known["class"], known["message"])
    path, _, number = story.excerpt.where.rpartition(":")
    line = Path(path).read_text().splitlines()[int(number) - 1]
    text = "\n".join(story.excerpt.texts())
    if known["class"] == "crash":
        assert line.startswith("Fatal Python error: Segmentation fault")
        assert 'workloads.py", line' in text
        assert "in segfault" in text
        assert f"crash: {known['message']}; item {index} of shard 1 was in flight" in text
    else:
        assert f"item {index}: item_error: " in line
    if FAULTS[index] == "exception":
        assert "Traceback (most recent call last)" in text
        assert "in exception" in text


def test_an_item_that_raised_where_another_did_leads_to_the_traceback_of_that_one(run):
    texts = story_of_item(run, 5).excerpt.texts()
    assert any("item 5: item_error" in text and text.endswith("[traceback: item 3]") for text in texts)
    assert "ValueError: cannot do item 3" in texts


def test_a_row_that_is_fine_is_said_to_be_and_the_place_is_where_its_shard_began(run):
    story = story_of_item(run, 17)
    assert story.ended == "ok"
    assert story.sentence.startswith("Item 17 has its row: attempt local1_")
    assert "shard 2: items 16..23" in story.excerpt.lines[story.excerpt.mark].text


def test_after_the_logs_are_gone_the_report_still_says_what_became_of_an_item(run, tmp_path):
    copy_run(run.folder, tmp_path / "run")
    for path in (tmp_path / "run" / "logs").iterdir():
        path.unlink()
    story = story_of_item(Run.open(tmp_path / "run"), 3)
    assert (story.ended, story.excerpt) == ("failed", None)
    assert "cannot do item 3" in story.sentence


def test_of_an_item_that_the_report_does_not_list_the_logs_say_whether_it_failed(run, tmp_path, slurmgpu):
    copy_run(run.folder, tmp_path / "run")
    path = tmp_path / "run" / "report.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, "errors": report["errors"][:1]}))
    stories = [story_of_item(Run.open(tmp_path / "run"), index) for index in (3, 5, 9, 17)]
    assert [story.failure for story in stories] == ["item_error", "item_error", "crash", None]
    assert stories[-1].ended == "ok"
    for log in (tmp_path / "run" / "logs").iterdir():
        log.unlink()
    stories = [story_of_item(Run.open(tmp_path / "run"), index) for index in (3, 5, 9, 17)]
    assert [story.failure for story in stories] == ["item_error", "item_error", "crash", None]
    done = slurmgpu("logs", tmp_path / "run", "--failed", expect=0)
    assert re.findall(r"^item (\d+)", done.stdout, re.MULTILINE) == ["3"]
    assert f"{len(FAULTS)} items failed; the first 1 are listed" in done.stderr


def test_before_the_report_the_logs_alone_say_what_became_of_an_item(run, tmp_path):
    copy_run(run.folder, tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()
    copy = Run.open(tmp_path / "run")
    told = {index: story_of_item(copy, index) for index in (3, 5, 9, 14, 17)}
    assert [told[index].ended for index in told] == ["failed"] * 4 + ["ok"]
    assert told[5].message.endswith(")")
    assert told[9].failure == "crash"


def test_every_failure_of_a_class_has_its_place(run, slurmgpu):
    crashes = list(events_of_class(run, "crash"))
    assert [event.what for event in crashes] == ["a worker", "a worker", "item 9, quarantined"]
    for event in crashes:
        line = event.file.path.read_text().splitlines()[event.number - 1]
        assert "crash" in line or line.startswith("Fatal Python error")
    failed = {event.what for event in events_of_class(run, "item_error")}
    assert failed == {f"item {index}" for index, fault in FAULTS.items() if fault != "segfault"}
    [back_off] = events_of_class(run, "host_oom")
    assert back_off.message == "out of host memory with a batch of 4, items 32..35; continuing with 2"
    done = slurmgpu("logs", run.folder, "--failed", expect=0)
    assert sorted(re.findall(r"^item (\d+)", done.stdout, re.MULTILINE)) == sorted(map(str, FAULTS))
    assert f"{len(FAULTS)} items failed. next: " in done.stderr
    said = slurmgpu("logs", run.folder, "--class", "crash", expect=0).stdout
    assert said.count("Fatal Python error") == 2
    assert f"{crashes[-1].file.path}:{crashes[-1].number}" in said


def test_the_failures_of_named_items_have_their_places(tmp_path, slurmgpu):
    folder = tmp_path / "project"
    make_project(folder, 8, key="text", settings={"faults": {2: "item_error", 5: "segfault"}})
    slurmgpu(*LOCAL, "--tasks", "1", cwd=folder, expect=0)
    run = Run.open(folder / "run")
    *_, failed = events_of_class(run, "item_error")  # once in each of the workers
    assert (failed.what, failed.attempt) == ("item 2", "local1_0.0")
    assert "item 2 (item 2 of many): item_error: " in failed.file.path.read_text().splitlines()[failed.number - 1]
    [worker] = [event.file.path for event in events_of_class(run, "crash") if event.item == 5]
    assert worker == run.logs / "local1_0.0.log"  # the line of its row, as in a run without a key
    assert f"{failed.file.path}:{failed.number}" in slurmgpu("logs", run.folder, "--failed", expect=0).stdout


def test_a_line_is_shown_once_where_the_failures_of_a_class_lie_near_each_other(run, slurmgpu):
    said = slurmgpu("logs", run.folder, "--class", "item_error", expect=0).stdout
    lines = re.findall(r"^.*\d{4}-\d\d-\d\dT.*$", said, re.MULTILINE)
    around = [line for line in lines if ": item_error: " not in line]
    assert around
    assert sorted(set(around)) == sorted(around)
    for index, fault in FAULTS.items():
        assert (f"item {index} in attempt " in said) is (fault != "segfault")


def test_a_tasks_log_has_what_all_its_processes_wrote_in_the_order_of_time(run, slurmgpu):
    name = next(record for record in run.attempts() if record["deaths"])["attempt"]
    # A reader in a third time zone: Submitit's lines do not say which theirs is.
    said = slurmgpu("logs", run.folder, name.partition(".")[0], expect=0, TZ="America/New_York").stdout
    lines = [tuple(part.strip(" ") for part in line.split(" | ", 1)) for line in said.splitlines()]
    assert {source for source, _ in lines} == {"task", "task.out", "worker"}

    def place(text):
        return next(number for number, (_, line) in enumerate(lines) if text in line)

    order = ["Loading pickle", "this worker is process", "shard 1: items", "Fatal Python error"]
    order += ["ERROR slurmgpu.task.crash_tracking", "item 9 is quarantined"]
    # The last words of the worker and of its task may have the same millisecond.
    for last in ("shard 1: published", "slurmgpu.task.supervisor: this task takes no more shards"):
        assert [place(text) for text in (*order, last)] == sorted(place(text) for text in (*order, last))
    assert any("+09:00 INFO slurmgpu.worker: shard 1: published" in line for _, line in lines)
    assert "thinking of 9" in said
    assert "\x1b" not in said
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", said)


def test_the_last_word_of_a_task_is_why_it_takes_no_more_shards_and_nothing_is_logged_twice(run):
    why = {"complete": "every shard is published", "others": "living tasks compute the rest"}
    told = [path.read_text() for path in run.logs.glob("*.err")]
    for record in run.attempts():
        [words] = [text for text in told if f" attempt {record['attempt']} of " in text]
        assert words.splitlines()[-1].endswith(
            f" INFO slurmgpu.task.supervisor: this task takes no more shards: {why[record['reason']]}"
        )
        assert "submitit" not in words


def test_the_last_lines_of_a_log_are_printed_alone(run, slurmgpu):
    whole = slurmgpu("logs", run.folder, "0", expect=0).stdout.splitlines()
    part = slurmgpu("logs", run.folder, "0", "--tail", "4", expect=0).stdout.splitlines()
    assert part == whole[-4:]


def test_the_index_names_every_log_with_its_attempt(run, slurmgpu):
    index = json.loads(slurmgpu("logs", run.folder, "--json", expect=0).stdout)
    assert (index["format"], index["version"], index["merge"]) == ("slurmgpu logs", 1, [])
    named = {file["path"] for attempt in index["attempts"] for file in attempt["files"]}
    assert named == {str(path) for path in run.logs.iterdir() if path.suffix in (".log", ".err", ".out")}
    said = slurmgpu("logs", run.folder, expect=0).stdout
    assert all(f"{attempt['attempt']}  ok" in said for attempt in index["attempts"])
    assert set(index) == listed("report.md", "slurmgpu logs --json")
    assert set(index["attempts"][0]) == listed("report.md", "attempts of the logs")
    assert set(index["attempts"][0]["files"][0]) == listed("report.md", "files of the logs")


@pytest.mark.parametrize("index", sorted(FAULTS))
def test_the_place_is_the_same_however_few_lines_are_shown_and_they_end_with_the_error(run, index):
    whole = story_of_item(run, index)
    for n_lines in (1, 2, 3, 9, 400):
        excerpt = story_of_item(run, index, n_lines).excerpt
        assert excerpt.where == whole.excerpt.where
        assert excerpt.lines[excerpt.mark] == whole.excerpt.lines[whole.excerpt.mark]
        assert 1 <= len(excerpt.lines) <= n_lines
        if n_lines > 1 and FAULTS[index] == "exception":
            assert any(text.startswith("ValueError: cannot do") for text in "\n".join(excerpt.texts()).splitlines())
        if n_lines > 1 and FAULTS[index] == "segfault":
            assert "item 9 of shard 1 was in flight" in excerpt.texts()[-1]
        if n_lines > 3 and FAULTS[index] == "segfault":
            assert any("in segfault" in text for text in excerpt.texts())


@pytest.mark.parametrize("name", ["crash", "item_error", "host_oom"])
def test_the_places_of_a_class_do_not_depend_on_how_many_lines_are_shown(run, name):
    for event in events_of_class(run, name):
        assert {event.excerpt(n_lines).where for n_lines in (1, 3, 40)} == {f"{event.file.path}:{event.number}"}


def test_the_place_of_an_attempts_end_is_its_verdict_however_few_lines_are_shown(run, tmp_path):
    [record] = [record for record in run.attempts() if record["deaths"]]
    copy_run(run.folder, tmp_path / "run")
    copy = Run.open(tmp_path / "run")
    change_record(copy, record["attempt"], failure="crash")
    excerpts = [excerpt_of_attempt(copy, record["attempt"], n_lines) for n_lines in (1, 2, 5, 40)]
    assert len({excerpt.where for excerpt in excerpts}) == 1
    assert "slurmgpu.task.crash_tracking: crash: the worker died by SIGSEGV; item 9" in excerpts[0].texts()[0]


@pytest.mark.parametrize("index", [2, 10, 17, 34])
def test_of_a_row_that_is_fine_only_the_lines_of_its_shard_are_shown(run, index):
    shard = index // 8
    texts = story_of_item(run, index).excerpt.texts()
    # With a "…" before the second.
    assert [text.partition(" slurmgpu.worker: ")[2].split()[:3] for text in texts] == [
        ["shard", f"{shard}:", "items"],
        ["shard", f"{shard}:", "published"],
    ]


def without_row(run, folder, **claim):
    """A copy of the run in which shard 1, whose item 9 killed workers, has not been published."""
    copy_run(run.folder, folder)
    copy = Run.open(folder)
    copy.shard_path(1).unlink()
    copy.merged.unlink()
    for record in run.attempts():
        change_record(copy, record["attempt"], published=[each for each in record["published"] if each[0] != 1])
    if claim:
        name = next(record["attempt"] for record in run.attempts() if record["deaths"])
        change_record(copy, name, state="running", updated=time.time())
        write_claim(copy, name)
    return copy


def change_record(run, name, **fields):
    path = run.tasks / f"{name}.json"
    write_json(path, json.loads(path.read_text()) | fields, durable=False)


def write_claim(run, name):
    run.claims.take(1, Claim(name.rpartition(".")[0], name, "here", 1))


def test_what_has_no_row_in_a_run_that_is_over_leads_to_the_command_that_computes_it(run, tmp_path, capsys):
    show(without_row(run, tmp_path / "run"), item=10)
    said = capsys.readouterr()
    assert "a worker of attempt local1_" in said.out
    assert said.err == f"next: slurmgpu resubmit {tmp_path}/run\n"
    copy = without_row(run, tmp_path / "alive", works=True)
    copy.record_submission({"submission": 1, "state": "running", "pids": [os.getpid()], "ticks": [None]})
    show(copy, item=10)
    said = capsys.readouterr()
    assert "is computing it on " in said.out
    assert "; 2 workers have died with it." in said.out
    assert said.err == ""
    for path in copy.tasks.glob("[!.]*.json"):
        change_record(copy, path.stem, takeovers=[{"shard": 1, "from": "local1_7.0", "host": "there"}])
    assert ", taken over from attempt local1_7.0, which stopped responding; 2" in story_of_item(copy, 10).sentence
    for path in copy.tasks.glob("[!.]*.json"):
        change_record(copy, path.stem, updated=time.time() - 100)
    assert "; 2 workers have died with it; it has been silent for " in story_of_item(copy, 10).sentence


def test_what_has_its_row_in_merged_h5_alone_is_not_missing(run, tmp_path):
    copy_run(run.folder, tmp_path / "run")
    copy = Run.open(tmp_path / "run")
    copy.shard_path(1).unlink()  # as a user may, who needs the space
    assert story_of_item(copy, 10).sentence == story_of_item(run, 10).sentence
    assert story_of_item(copy, 9).failure == "crash"
    copy.merged.unlink()
    assert "is not published, because its file is gone; attempt local1_" in story_of_item(copy, 10).sentence


def judged(run, folder, **failures):
    """A copy of the run that is over, in whose report attempts have other failures."""
    copy_run(run.folder, folder)
    copy = Run.open(folder)
    told = json.loads((folder / "report.json").read_text())
    for row in told["attempts"]:
        row["failure"] = failures.get(row["attempt"].partition(".")[0], row["failure"])
    (folder / "report.json").write_text(json.dumps(told))
    return copy


def test_what_accounting_says_of_an_attempt_is_said_of_its_logs_too(run, tmp_path):
    copy = judged(run, tmp_path / "run", local1_0="cancelled", local1_1="node_fail")
    assert [event.attempt for event in events_of_class(copy, "cancelled")] == ["local1_0.0"]
    assert [event.attempt for event in events_of_class(copy, "node_fail")] == ["local1_1.0"]
    told = {about["attempt"]: about["failure"] for about in read_index(copy)["attempts"]}
    assert told == {"local1_0.0": "cancelled", "local1_1.0": "node_fail"}
    copy.shard_path(1).unlink()
    for record in copy.attempts():
        change_record(copy, record["attempt"], deaths=[])
    assert story_of_item(copy, 10).failure in (None, "cancelled", "node_fail")


def test_the_records_of_a_run_are_read_once_for_all_its_failures(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 600, n_tasks=9, n_shards=40, sample_s=0)
    for record in run.attempts():
        name = record["attempt"]
        change_record(run, name, state="ended", ended=record["updated"], failure="node_fail", message="it is gone")
        write_lines(run.logs / f"{name}.log", [f"{STAMP} INFO x: hello", f"{STAMP} ERROR x: node_fail: it is gone"])
    read, reading = [], Run.read_attempts
    monkeypatch.setattr(Run, "read_attempts", lambda run: read.append(run) or reading(run))
    events = list(events_of_class(run, "node_fail"))
    assert len(events) == 9
    assert {event.number for event in events} == {2}
    assert len(read) == 1


def test_what_submitit_says_of_itself_is_never_why_an_attempt_ended(tmp_path):
    run = pretend_run(tmp_path / "run", 600, n_tasks=2, n_shards=40, sample_s=0)
    for task, verdict in enumerate((["ERROR slurmgpu.task.supervisor: timeout: it took no more shards"], [])):
        change_record(run, f"4711_{task}.0", state="ended", ended=BEGIN + 600, failure="timeout", message="m")
        write_lines(run.logs / f"4711_{task}.0.log", [f"{STAMP} INFO slurmgpu.worker: shard 3: published after 9 s"])
        lines = [*verdict, "WARNING submitit: Bypassing signal SIGCONT", "INFO submitit: Job completed successfully"]
        lines = [f"{STAMP} {line}" for line in [*lines, "INFO submitit: Exiting after successful completion"]]
        lines += ["submitit INFO (2025-06-15 15:10:00,000) - Exiting after successful completion"]
        write_lines(run.logs / f"4711_{task}_0_log.err", lines)
    told, silent = events_of_class(run, "timeout")
    assert told.excerpt(1).texts() == [f"{STAMP} ERROR slurmgpu.task.supervisor: timeout: it took no more shards"]
    assert silent.excerpt(3).texts() == [f"{STAMP} INFO slurmgpu.worker: shard 3: published after 9 s"]


def test_who_computed_an_item_is_told_by_its_shard_and_not_by_clocks(run, tmp_path):
    copy_run(run.folder, tmp_path / "run")
    copy = Run.open(tmp_path / "run")
    before = story_of_item(copy, 17)
    [maker] = [record["attempt"] for record in copy.attempts() if any(e[0] == 2 for e in record["published"])]
    [other] = [record for record in copy.attempts() if record["attempt"] != maker]
    # It computed the shard as well, by its clock later, and for a submission before.
    change_record(copy, other["attempt"], published=[*other["published"], [2, other["updated"] + 900, 1.0, True]])
    assert story_of_item(copy, 17).sentence == before.sentence
    assert f"attempt {maker} computed" in before.sentence


@pytest.mark.parametrize("damage", ["killed", "damaged"])
def test_what_a_record_does_not_tell_of_an_item_the_logs_do(run, tmp_path, damage):
    copy = without_row(run, tmp_path / "run")
    for record in copy.attempts():
        others = [entry for entry in record["published"] if entry[0] != 2]
        change_record(copy, record["attempt"], published=others, deaths=[])
    [began] = [path for path in copy.logs.glob("*.[0-9].log") if "shard 1: items 8..15" in path.read_text()]
    text = began.read_text()
    began.write_text(text[: text.index("\n", text.index("shard 1: items 8..15")) + 1])
    if damage == "killed":  # after it published shard 2, and began with shard 1, it did not live to write so
        change_record(copy, began.stem, state="running", ended=None, shard=2, failure=None)
    else:
        (copy.tasks / f"{began.stem}.json").write_bytes(b"\0" * 80)
    (copy.folder / "report.json").unlink()
    assert story_of_item(copy, 17).sentence.startswith("Item 17 has its row: attempt local1_")
    story = story_of_item(copy, 10)
    assert f": attempt {began.stem} was computing it" in story.sentence
    assert story.attempts == (began.stem,)
    assert story.excerpt is not None
    assert story.ended == "missing"


def show(run, task=None, *, item=None, failure=None, failed=False, merge=False, follow=False, n_lines=None):
    """What the command prints, in this process."""
    asked = None if item is None else str(item)
    ways = {"failed": failed, "merge": merge, "follow": follow, "as_json": False}
    show_logs(run, task, asked, failure, n_lines=n_lines, **ways)


@pytest.mark.parametrize(
    "asked", [{}, {"task": "0"}, {"follow": True}, {"task": "0", "follow": True}, {"merge": True}, {"failure": "crash"}]
)
def test_of_a_run_that_is_planned_only_the_next_step_is_named(tmp_path, asked):
    make_project(tmp_path, 8)
    with draft_run(tmp_path / "slurmgpu.toml") as draft:
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
    with pytest.raises(SlurmGPUError, match=r"is planned but not submitted. Submit it by `slurmgpu resubmit .*/run`"):
        show(run, **asked)


@pytest.mark.parametrize("task", ["local1_0.1", "0.1", "local1_5", "5"])
@pytest.mark.parametrize("follow", [False, True])
def test_only_while_the_run_lives_an_attempt_that_there_is_not_may_come_yet(run, tmp_path, task, follow):
    copy_run(run.folder, tmp_path / "run")
    copy, path = Run.open(tmp_path / "run"), tmp_path / "run" / "submissions.jsonl"
    path.write_text(path.read_text().replace('"n_tasks": 2', '"n_tasks": 6'))
    said = r"has no attempt .*\.1: there is local1_0\.0\.$" if task.endswith(".1") else "never started, and its subm"
    with pytest.raises(SlurmGPUError, match=said):
        show(copy, task, follow=follow)
    path.write_text(path.read_text().replace('"ended"', '"running"'))
    if follow:
        refuse_unstarted(copy, task, waits=True)
    else:
        with pytest.raises(SlurmGPUError, match="--follow waits for it"):
            show(copy, task)


def test_the_last_lines_of_all_attempts_are_printed_where_no_task_is_named(run, capsys):
    show(run, n_lines=1000)
    whole = capsys.readouterr().out.splitlines()
    assert len(whole) == sum(len(path.read_text().splitlines()) for path in run.logs.glob("*[tgr]"))
    show(run, n_lines=3)
    assert [line.partition(" | ")[2] for line in capsys.readouterr().out.splitlines()] == [
        line.partition(" | ")[2] for line in whole[-3:]
    ]
    assert {line.split()[0].partition(".")[0] for line in whole} == {"local1_0", "local1_1"}
    show(run, n_lines=3, follow=True)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_run_is_followed_on_when_the_tasks_that_have_started_so_far_are_over(run, tmp_path):
    copy_run(run.folder, tmp_path / "run")
    path = tmp_path / "run" / "submissions.jsonl"
    path.write_text(path.read_text().replace('"ended"', '"running"'))
    copy = Run.open(tmp_path / "run")
    ends = [
        LogFollower(copy, Printer({}), {}, copy.attempts, named=named)._look()
        for named in (False, True)  # of a task, of the whole run
    ]
    assert ends == [True, False]


def test_the_index_says_which_attempts_have_fallen_silent(run, tmp_path, capsys):
    copy_run(run.folder, tmp_path / "run")
    copy = Run.open(tmp_path / "run")
    (copy.folder / "report.json").unlink()
    copy.record_submission({"submission": 1, "state": "running", "pids": [os.getpid()], "ticks": [None]})
    names = sorted(record["attempt"] for record in run.attempts())
    now = time.time()
    for name, updated in zip(names, (now, now - 70), strict=True):
        change_record(copy, name, state="running", ended=None, failure=None, updated=updated)
    show(copy)
    ends = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert [ends[name] for name in names] == ["running", "silent"]


def test_the_index_is_in_the_order_of_tasks_with_a_line_for_each_attempt(run, capsys, monkeypatch):
    index = read_index(run)
    [one, *_] = index["attempts"]
    names = ["local1_10.0", "local2_0.0", "local1_2.1", "local1_2.0"]
    index["attempts"] = [one | {"attempt": name, "submission": int(name[5])} for name in names]
    index["merge"] = one["files"][:1]
    monkeypatch.setattr(log_commands, "read_index", lambda run: index)
    show(run)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["local1_2.0", "local1_2.1", "local1_10.0", "local2_0.0", "merge"]
    assert str(run.folder) not in lines[0]
    files = [file for file in one["files"] if file["size_bytes"]]
    assert files
    assert all(f"{Path(file['path']).name} ({size_of(file['size_bytes'])})" in lines[0] for file in files)


def test_failed_items_are_shown_by_another_command_before_a_report_lists_them(run, tmp_path, capsys):
    copy_run(run.folder, tmp_path / "run")
    copy = Run.open(tmp_path / "run")
    report_path(copy).unlink()
    show(copy, failed=True)
    assert f"`slurmgpu show {copy.typed} --failed`" in capsys.readouterr().err
    report_path(copy).write_text("{")
    with pytest.raises(SlurmGPUError, match="is damaged"):
        show(copy, failed=True)


def test_where_no_task_has_started_and_none_is_queued_the_logs_name_resubmit(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 0.0)
    for path in run.tasks.iterdir():
        path.unlink()
    monkeypatch.setattr(registry, "queued_jobs", lambda _: [])  # they were cancelled while they waited there
    with pytest.raises(SlurmGPUError, match="none is queued"):
        show(run)


def test_where_the_log_of_a_merge_by_hand_is_is_said(run, tmp_path):
    copy_run(run.folder, tmp_path / "run")
    with open(tmp_path / "run" / "submissions.jsonl", "a") as file:
        file.write('{"submission": 1, "by_hand": true, "merge_job": "9"}\n')
    copy = Run.open(tmp_path / "run")
    with pytest.raises(SlurmGPUError, match=r"is in slurmgpu-merge-9\.out, in the folder where you ran sbatch"):
        show(copy, merge=True)
    (copy.logs / "9_0_log.err").write_text("merged\n")
    show(copy, merge=True)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--json", "-n", "2"], "--lines and --json exclude each other"),
        (["--item", "40"], "There is no item 40: "),
        (["--item", "-1"], "give a number from 0 to 39"),
        (["--class", "cras"], "Did you mean 'crash'?"),
        (["local1_7"], "has no task 'local1_7'. Did you mean"),
        (["--merge"], "has no log of a merge"),
        (["0", "--item", "3"], "TASK and --item exclude each other"),
        (["--item", "3", "--follow"], "--follow does not work with --item"),
    ],
)
def test_what_is_not_there_is_answered_by_a_sentence(run, slurmgpu, argv, sentence):
    assert sentence in " ".join(slurmgpu("logs", run.folder, *argv, expect=2).stderr.split())


def test_a_run_is_followed_over_attempts_that_start_later_until_it_ends(tmp_path):
    folder = talking(tmp_path / "project", "Waits", faults={9: "kill_once"}, marks=str(tmp_path))
    submitted = start(*LOCAL, "--tasks", "2", cwd=folder)
    wait_until(lambda: submitted_as(folder), "the submission")
    from_now = start("logs", "run", "--follow", cwd=folder)
    from_the_first = start("logs", "run", "--follow", "-n", "10000", cwd=folder)
    task = start("logs", "run", "1", "--follow", cwd=folder)
    first = from_now.stdout.readline()  # it is at work, as the workers go on to say that they wait
    wait_until(lambda: len(holders(folder)) == 2, "a shard in hand of each task")
    assert story_of_item(Run.open(folder / "run"), N_ITEMS - 1).ended == "missing"
    let_go(folder)
    late, whole, own = first + from_now.communicate()[0], from_the_first.communicate()[0], task.communicate()[0]
    assert submitted.wait() == 0
    for record in records(folder):
        file = LogFile(folder / "run" / "logs" / f"{record['attempt']}.log", "worker")
        lines = [without_colours(line.text) for line in read_lines(file)]
        assert said_by(record, whole) == lines
        assert said_by(record, late) == lines[-len(said_by(record, late)) :] != []
    assert "crash: the worker died by SIGKILL; items 8 to 11 of shard 1 were in flight" in late
    assert {line.partition(" | ")[0].strip() for line in own.splitlines()} == {"task", "task.out", "worker"}
    assert own.count("slurmgpu.worker: this worker is process") >= 1


def submitted_as(folder):
    """The state of the submission; None before there is one."""
    path = folder / "run" / "submissions.jsonl"
    return submissions(folder)[0]["state"] if path.exists() and path.read_text() else None


def said_by(record, output):
    """What the workers of an attempt said, out of what was printed of all."""
    return re.findall(rf"^{re.escape(record['attempt'])} worker *\| (.*)$", output, re.M)


def test_a_shard_that_was_left_by_a_killed_task_is_missing_and_its_log_is_found(tmp_path):
    folder = talking(tmp_path / "project")
    submitted = start(*LOCAL, "--tasks", "1", cwd=folder)
    wait_until(lambda: (folder / "run" / "claims" / "00000").exists(), "a claim")
    wait_until(lambda: "items 0..7" in (folder / "run/logs/local1_0.0.log").read_text(), "its line")
    wait_until(lambda: submitted_as(folder) == "running", "somebody who heeds Ctrl-C")
    alive = story_of_item(Run.open(folder / "run"), 2)
    assert "attempt local1_0.0 is computing it" in alive.sentence
    [record] = records(folder)
    os.kill(record["pid"], signal.SIGCONT)  # Slurm sends it before each other signal
    submitted.send_signal(signal.SIGINT)
    submitted.wait()
    story = story_of_item(Run.open(folder / "run"), 2)
    assert (story.ended, story.failure) == ("missing", "cancelled")
    assert "attempt local1_0.0 was computing it when it ended" in story.sentence
    assert "slurmgpu.task.supervisor" in story.excerpt.lines[story.excerpt.mark].text
    assert not any("SIGCONT" in path.read_text() for path in (folder / "run" / "logs").glob("*.[eo][ru][rt]"))
    never = story_of_item(Run.open(folder / "run"), N_ITEMS - 1)
    assert never.sentence.endswith("no attempt is known to have computed it.")
    assert not kill_workers(folder)


def stamp(seconds, zone=0):
    return datetime.fromtimestamp(seconds, timezone(timedelta(hours=zone))).isoformat(timespec="milliseconds")


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return LogFile(path, "worker")


def test_the_traceback_of_another_item_is_not_shown_above_the_line_of_one(tmp_path):
    trace = ["Traceback (most recent call last):", '  File "w.py", line 3, in f', "    x()", "KeyError: 'missing'"]
    own = f"{STAMP} WARNING x: item 333: item_error: this is a goat"
    lines = [f"{STAMP} INFO x: shard 19: items 0..9", f"{STAMP} WARNING x: item 3: item_error: no", *trace]
    texts = {}
    for printed in (0, 1, BEFORE, 9):
        file = write_lines(tmp_path / f"log{printed}", [*lines, *["thinking"] * printed, own])
        excerpt = excerpt_around(file, file.path.read_text().index(own), N_LINES)
        texts[printed] = [line.text for line in excerpt.lines][: excerpt.mark]
        assert excerpt.lines[excerpt.mark].text == own
    assert texts == {0: [lines[1], *trace], 1: ["thinking"], BEFORE: ["thinking"] * BEFORE, 9: ["thinking"] * 9}


CHILD = """
import subprocess
import sys

from slurmgpu import Array

ENGINE = (
    "import sys; print('the engine of', sys.argv[1], 'begins', flush=True)\\n"
    "def start(n):\\n    if n:\\n        start(n - 1)\\n    raise KeyError('no such kernel')\\n"
    "start(5)"
)

class Parent:
    columns = {"x": Array("float64")}
    batch_size = 4

    def load(self, task):
        pass

    def __call__(self, items):
        for item in items:
            if item.index in (2, 5):
                subprocess.run([sys.executable, "-c", ENGINE, f"child-{item.index}"])
                raise RuntimeError("the engine did not start; the root cause is above")
        return [{"x": 1.0} for _ in items]
"""


def test_what_a_child_process_wrote_before_an_item_failed_is_shown(project, slurmgpu):
    folder = project(8, workload="Parent")
    (folder / "workloads.py").write_text(CHILD)
    slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=0)
    for index, other in ((2, 5), (5, 2)):
        shown = slurmgpu("logs", "run", "--item", index, cwd=folder, expect=0).stdout
        before = shown.partition(f": item {index}: item_error: RuntimeError")[0]
        assert f"the engine of child-{index} begins\nTraceback (most recent call last):\n" in before
        assert "KeyError: 'no such kernel'\n" in before
        assert f"child-{other}" not in before


def test_of_a_failed_item_nothing_is_shown_of_the_shard_before_its_own(run, tmp_path):
    copy_run(run.folder, tmp_path / "run")
    copy = Run.open(tmp_path / "run")
    [path] = [path for path in copy.logs.glob("*.log") if "item 33: item_error" in path.read_text()]
    lines = path.read_text().splitlines()
    begun = next(number for number, line in enumerate(lines) if "shard 4: items" in line)
    failed = next(number for number, line in enumerate(lines) if "item 33: item_error" in line)
    write_lines(path, [*lines[: begun + 1], *lines[failed:]])
    # It may lead to the traceback of item 3, which the same process had before.
    shards = re.findall(r" shard (\d+): (\w+)", "\n".join(story_of_item(copy, 33).excerpt.texts()))
    assert shards[0] == ("4", "items")


def test_lines_without_a_time_stay_behind_the_line_before_them(tmp_path):
    begin = time.time() - 100
    first = write_lines(tmp_path / "a", ["early", f"{stamp(begin)} one", "its traceback", f"{stamp(begin + 4)} four"])
    second = write_lines(tmp_path / "b", [f"{stamp(begin + 2, 9)} two", "1999-01-01 00:00:00 in a data set", "more"])
    lines = [line.text.split()[-1] for line in merged([first, second], since=begin)]
    assert lines == ["early", "one", "traceback", "two", "set", "more", "four"]


def test_the_offset_of_a_time_that_is_none_says_nothing_of_other_lines(tmp_path):
    begin = 1_760_000_000
    local = datetime.fromtimestamp(begin + 1, timezone(timedelta(hours=-7))).strftime("%Y-%m-%d %H:%M:%S,000")
    path = tmp_path / "x.log"
    for odd in (stamp(begin)[:19] + "+99:00", "1999-01-01T00:00:00+09:00"):  # none at all, and one of a text
        path.write_text(f"{stamp(begin, -7)} one\n{odd} text\n{local} two\n")
        lines = list(read_lines(LogFile(path, "worker"), since=begin))
        assert [line.time for line in lines] == [begin, begin, begin + 1]


def test_times_without_an_offset_are_those_of_the_zone_that_the_file_says(tmp_path):
    begin = float(int(time.time()))
    local = datetime.fromtimestamp(begin, timezone(timedelta(hours=-7))).strftime("%Y-%m-%d %H:%M:%S,250")
    lines = [f"{stamp(begin, -7)} INFO x", f"submitit INFO ({local}) - y", f"[{local}][hydra] z", f"{local} INFO w"]
    told = [line.time - begin for line in read_lines(write_lines(tmp_path / "a", lines))]
    assert told == pytest.approx([0, 0.25, 0.25, 0.25])


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b" 10%\r 50%\r100%|done\n", "100%|done"),
        (b"\x1b[31mred\x1b[0m \x1b[2Jgone\x1b]0;title\x07 \x1b[1A\x07\n", "\x1b[31mred\x1b[0m gone "),
        (b"\xff\xfe\x00torn", "��torn"),
        ("tab\tand ü\n".encode(), "tab\tand ü"),
    ],
)
def test_a_line_is_what_a_terminal_would_show_in_the_end_and_moves_no_cursor(tmp_path, raw, shown):
    (tmp_path / "log").write_bytes(raw)
    assert [line.text for line in read_lines(LogFile(tmp_path / "log", "worker"))] == [shown]


@pytest.mark.parametrize("are_written", [True, False])
def test_lines_after_zeros_are_read_once(tmp_path, are_written):
    path, lines = tmp_path / "log", [f"line {number}" for number in range(4000)]
    with open(path, "wb") as file:
        file.write(b"first\n" + (b"\0" * (LINE_BYTES + 100) if are_written else b""))
        file.seek(0 if are_written else 5 * LINE_BYTES, os.SEEK_END)
        file.write(b"\n" + "".join(f"{line}\n" for line in lines).encode())
    found = [line.text for line in read_lines(LogFile(path, "worker"))]
    assert (found[0], found[-len(lines) :]) == ("first", lines)
    assert found.count("line 0") == 1


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\nb", b"a\nb\n", b"\n\n\n", b"x" * 200_000 + b"\nlast\n"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_tail_of_a_file_begins_where_its_last_lines_do(tmp_path, content, n):
    path = tmp_path / "log"
    path.write_bytes(content)
    lines = content.splitlines(keepends=True)
    assert tail_start(path, n) == len(content) - sum(map(len, lines[-n:]))
    whole = sum(len(line) for line in lines if line.endswith(b"\n"))
    assert last_end(path) == whole


def test_a_large_log_is_neither_read_whole_nor_kept_in_memory(tmp_path):
    begin, n_lines = int(time.time()) - 50_000, 50_000
    path = tmp_path / "local1_0.0.log"
    with open(path, "w") as file:
        for number in range(n_lines):
            file.write(f"{stamp(begin + number)} INFO x: line {number} {'of the log ' * 95}\n")
    assert path.stat().st_size > 50e6
    file, size = LogFile(path, "worker"), path.stat().st_size
    tracemalloc.start()
    try:
        found = time_start(path, begin + 30_000)
        [line] = [next(iter(read_lines(file, found)))]
        tail = list(read_lines(file, tail_start(path, 3)))
        n_read = sum(1 for _ in merged([file], since=begin, starts={path: int(size * 0.8)}))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "line 30000 " in line.text
    assert line_number(path, line.offset) == 30_001
    assert [line.text.split()[4] for line in tail] == [str(n_lines - 3 + number) for number in range(3)]
    assert n_read > 9_000
    assert peak < 4e6


@pytest.mark.parametrize(
    "filling", [b"x" * 4096, b"\r 10%|# | 1/9 [00:01]" * 200, (b"printed by the workload " * 20 + b"\n") * 8]
)
@pytest.mark.parametrize("n_holes", [1, 3])
def test_a_time_is_found_around_what_is_long_and_has_no_times(tmp_path, filling, n_holes):
    begin, path = float(int(time.time())) - 9000, tmp_path / "log"
    stretches = [b"".join(b"%s INFO x: y\n" % stamp(begin + 100 * n + k).encode() for k in range(50)) for n in range(4)]
    hole = filling * (3000 // n_holes) + b"\n"
    path.write_bytes(hole.join(stretches[: n_holes + 1]))
    dated = [line for line in read_lines(LogFile(path, "worker"), since=begin) if line.is_dated]
    assert len(dated) == 50 * (n_holes + 1)
    for line in dated[::7]:
        assert time_start(path, line.time, since=begin) == line.offset
    assert time_start(path, dated[50].time, since=begin, start=dated[49].offset) == dated[50].offset
    assert time_start(path, dated[-1].time + 1) == path.stat().st_size


def test_a_line_of_any_length_is_never_in_memory_as_a_whole(tmp_path):
    begin, path = time.time() - 100, tmp_path / "log"
    with open(path, "w") as file:
        file.write(f"{stamp(begin)} one\n")
        for _ in range(80):
            file.write("x" * 1_000_000)
        file.write(f"\n{stamp(begin + 50)} two\n")
    file = LogFile(path, "worker")
    tracemalloc.start()
    try:
        found = time_start(path, begin + 20, since=begin)
        [line] = read_lines(file, tail_start(path, 1))
        around = excerpt_around(file, found, 10)
        number = around.number
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (line.offset, number) == (found, 3)
    assert line.text.endswith(" two")
    assert len(around.lines) == BEFORE + 1
    assert peak < 4e7


def test_a_search_ends_when_its_time_is_over_and_what_was_found_by_then_is_told(run):
    with search_until(time.monotonic() - 1):
        story = story_of_item(run, 3)
        assert (story.ended, story.failure) == ("failed", "item_error")
        excerpt = excerpt_of_attempt(run, run.attempts()[0]["attempt"])
        assert excerpt.where == str(excerpt.path)
    assert story_of_item(run, 3).excerpt is not None
    assert re.search(r":\d+$", excerpt.where)


def test_the_report_is_read_once_for_many_items_and_not_before_the_run_has_ended(run, tmp_path, monkeypatch):
    copy_run(run.folder, tmp_path / "run")
    copy, read = Run.open(tmp_path / "run"), []
    monkeypatch.setattr(cached_run, "read_report", lambda run: read.append(run) or read_report(run))
    once = cached_run.cached(copy)
    assert [story_of_item(once, index).failure for index in (3, 5, 9)] == ["item_error", "item_error", "crash"]
    assert len(read) == 1
    copy.record_submission({"submission": 1, "state": "merging"})
    (copy.folder / "report.json").write_text("{}")
    assert story_of_item(copy, 3).failure == "item_error"
    assert len(read) == 1


def test_a_report_says_nothing_of_items_that_were_submitted_again_since(run, tmp_path):
    copy_run(run.folder, tmp_path / "run")
    copy = Run.open(tmp_path / "run")
    for path in copy.logs.iterdir():  # as if who computed the row had met no failure
        path.unlink()
    assert story_of_item(copy, 3).ended == "failed"
    copy.record_submission({"submission": 2, "state": "refused", "executor": "local"})
    assert story_of_item(copy, 3).ended == "failed"
    copy.record_submission({"submission": 3, "state": "ended", "executor": "local", "cancelled": True})
    assert story_of_item(copy, 3).ended == "ok"


@pytest.mark.parametrize("index", [3, 9])
def test_of_a_shard_that_was_set_aside_the_logs_still_say_who_had_computed_it(run, tmp_path, index):
    before = story_of_item(run, index)
    copy_run(run.folder, tmp_path / "run")
    copy = Run.open(tmp_path / "run")
    name = before.sentence.partition("attempt ")[2].partition(",")[0]
    copy.merged.unlink()
    copy.shard_path(index // 8).rename(copy.shard_path(index // 8).with_suffix(".damaged"))
    copy.shard_path(index // 8).with_suffix(".damaged.txt").write_text("it has 9 bytes\n")
    story = story_of_item(copy, index)
    assert (story.ended, story.failure) == ("missing", before.failure)
    assert f"set it aside: it has 9 bytes; attempt {name} had computed it" in story.sentence
    assert any(f"item {index}" in line.text for line in story.excerpt.lines)


def test_the_log_of_an_attempt_is_searched_once_for_all_that_is_missing(tmp_path, monkeypatch):
    pretended = pretend_run(tmp_path / "run", 600, n_tasks=9, n_shards=200, sample_s=0)
    for record in pretended.attempts():
        name = record["attempt"]
        change_record(pretended, name, state="ended", ended=record["updated"], failure="crash", message="it is gone")
        begins = f"{STAMP} INFO slurmgpu.worker: shard {190 + record['task']}: items 1..2 begin"
        write_lines(pretended.logs / f"{name}.log", [begins])
    searched, places_of = [], cached_run.places_of
    monkeypatch.setattr(
        cached_run, "places_of", lambda path, *a, **k: searched.append(path) or places_of(path, *a, **k)
    )
    once = cached_run.cached(pretended)
    told = [story_of_item(once, pretended.plan.bounds(shard)[0]) for shard in range(185, 200)]
    assert [story.attempts for story in told] == [()] * 5 + [(f"4711_{task}.0",) for task in range(9)] + [()]
    assert len(searched) == len(set(searched)) == 9


def test_a_followed_log_may_grow_while_it_is_printed_be_truncated_and_be_removed(run, tmp_path, capsys):
    file = write_lines(tmp_path / "log", ["one", "two"])
    printer = Printer({file.path: "x"})
    show, lines = printer.show, ["three", "four"]

    def show_and_grow(line, mark=False):
        show(line, mark)
        if lines:
            with open(file.path, "a") as stream:
                stream.write(f"{lines.pop(0)}\n")

    printer.show = show_and_grow
    stops = print_files([file], printer, None, 0.0, whole=True)
    following = LogFollower(run, printer, stops, None)
    following._files, following._zones = [file], {file.path: None}
    following.print_new()
    assert capsys.readouterr().out.split() == ["one", "two", "three", "four"]
    write_lines(file.path, ["five"])
    following.print_new()
    file.path.unlink()
    assert not following.print_new()
    write_lines(file.path, ["six", "seven", "eight"])
    following.print_new()
    assert capsys.readouterr().out.split() == ["five", "six", "seven", "eight"]


def test_what_was_added_in_one_go_is_printed_in_parts(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("slurmgpu.cli.views.log_follower.PART_BYTES", 64)
    file = write_lines(tmp_path / "log", [f"line {number}" for number in range(50)])
    following = LogFollower(run, Printer({file.path: "x"}), {}, None)
    following._files, following._zones = [file], {file.path: None}
    n_parts = 0
    while following.print_new(whole=False):
        n_parts += 1
    assert n_parts > 5
    assert capsys.readouterr().out == file.path.read_text()


def test_a_log_that_cannot_be_read_costs_itself_alone(tmp_path):
    good = write_lines(tmp_path / "good", ["here"])
    (tmp_path / "folder").mkdir()
    assert [line.text for line in merged([LogFile(tmp_path / "folder", "x"), LogFile(tmp_path / "no", "y"), good])] == [
        "here"
    ]
