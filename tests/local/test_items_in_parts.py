"""Items in parts: where there are fewer items than tasks, several tasks compute one item together."""

import json
import os
import re
import signal
import time

import pytest

import slurmgpu as package
from slurmgpu.run.directory import Run
from tests.support.runs import check_ledger, datasets, records, report, start, wait_until, workers

DIVIDED = '''
import os
import signal
import time
from pathlib import Path

from slurmgpu import Array, ItemError, Ragged


class Divided:
    """The squares of twelve numbers, then a number more than each: two stages, whose parts tasks compute apart."""

    columns = {"total": Array("int64"), "values": Ragged("float64")}
    batch_size = 4
    most_parts = 6

    def __init__(self, *, marks: str = "marks", held: str = "held"):
        self.marks, self.held = Path(marks).absolute(), Path(held).absolute()

    def load(self, task):
        self.task = task

    def __call__(self, items):
        return [self.row(item) for item in items]

    def row(self, item):
        if item.data["x"] == 666:
            with open(self.marks / f"{self.task.attempt}-{os.getpid()}", "a"):
                os.kill(os.getpid(), signal.SIGKILL)
        squares = self.task.divide([item.data["x"] + n for n in range(12)], lambda some: self.computed("square", some))
        more = self.task.divide(squares, lambda some: self.computed("more", some))
        return {"total": int(sum(more)), "values": more}

    def computed(self, stage, some):
        with open(self.marks / f"{self.task.attempt}-{os.getpid()}", "a") as file:
            file.write("".join(f"{stage} {number}\\n" for number in some))
        while self.held.exists() or Path(f"{self.held}-{some[0]}").exists():
            time.sleep(0.05)
        if 13 in some:
            raise ItemError("not thirteen")
        return [number * number if stage == "square" else number + 0.1 for number in some]
'''
RUN_FILE = """
input = "items.jsonl"
run_dir = "run"
lease_s = 8.0
html = false
[workload]
use = "divided.py:Divided"
"""
LOCAL = ("submit", "--executor", "local", "--gpus", "0")
DEBUG = ("submit", "--executor", "debug", "--gpus", "0")


def wanted(x):
    return [(x + n) ** 2 + 0.1 for n in range(12)]


@pytest.fixture
def divided(tmp_path):
    """A project of two items; tasks wait in their parts while the file `held` is there, or `held-N` of one part."""

    def make(name, *numbers):
        folder = tmp_path / name
        (folder / "marks").mkdir(parents=True)
        (folder / "divided.py").write_text(DIVIDED)
        (folder / "slurmgpu.toml").write_text(RUN_FILE)
        (folder / "items.jsonl").write_text("".join(f'{{"x": {x}}}\n' for x in numbers or (100, 200)))
        return folder

    return make


def marked(folder):
    """What each process has begun to compute."""
    return {path.name: path.read_text().split("\n")[:-1] for path in (folder / "marks").iterdir()}


def joining(folder):
    """The items of which tasks compute parts for others, as their records say."""
    told = (re.fullmatch(r"computing parts of item (\d+)", record["progress"] or "") for record in records(folder))
    return [int(found[1]) for found in told if found]


def wait_for_holder(folder):
    """The record of the task that holds the first shard, once it says so: it may be written after the others'."""

    def found():
        return [record for record in records(folder) if record["shard"] == 0]

    wait_until(found, "the holder to say that it holds the shard")
    [record] = found()
    return record


def check_values(folder, *numbers):
    with package.open(folder / "run" / "merged.h5") as merged:
        assert [values.tolist() for values in merged["values"][:]] == [wanted(x) for x in numbers or (100, 200)]


def test_a_run_in_parts_is_extended_by_one_of_as_many(divided, slurmgpu):
    folder = divided("extended")
    slurmgpu("plan", "--gpus", "0", "--tasks", "6", cwd=folder, expect=0)
    slurmgpu("resubmit", "run", "--executor", "debug", "--tasks", "1", cwd=folder, expect=0)
    (folder / "items.jsonl").write_text('{"x": 100}\n{"x": 200}\n{"x": 300}\n')
    slurmgpu(*DEBUG, "--extend", "run", "--run-dir", "more", cwd=folder, expect=0)
    assert (Run.open(folder / "more").plan.parts, Run.open(folder / "run").plan.parts) == (3, 3)
    with package.open(folder / "more" / "merged.h5") as merged:
        assert [values.tolist() for values in merged["values"][:]] == [wanted(x) for x in (100, 200, 300)]


def test_several_tasks_compute_one_item_and_the_rows_are_those_of_one(divided, slurmgpu):
    folder, alone = divided("several"), divided("alone")
    (folder / "held").touch()
    process = start(*LOCAL, "--tasks", "6", cwd=folder)
    wait_until(lambda: len(marked(folder)) == 6, "six tasks to be at work on two items")
    wait_until(lambda: sorted(joining(folder)) == [0, 0, 1, 1], "four of them to say of which item they compute parts")
    status = json.loads(slurmgpu("status", "run", "--json", cwd=folder, expect=0).stdout)
    assert (status["n_items"], status["n_shards"], status["n_shards_claimed"]) == (2, 2, 2)
    (folder / "held").unlink()
    output, _ = process.communicate(timeout=250)
    assert "Each of 2 items is computed in 3 parts, so that 6 tasks have one each; shard_items = 1 computes" in output
    check_values(folder)
    # Nothing was computed twice, and six processes computed some of it.
    lines = [line for each in marked(folder).values() for line in each]
    assert len(lines) == len(set(lines)) == 48
    assert not (folder / "run" / "parts").exists()
    outcome = report(folder)
    assert (outcome["complete"], outcome["n_items"], outcome["n_rows"], outcome["failures"]) == (True, 2, 2, {})
    assert {attempt["reason"] for attempt in outcome["attempts"]} <= {"complete", "others"}
    check_ledger(outcome)
    assert sum(attempt["spent"]["useful"] > 0 for attempt in outcome["attempts"]) == 6

    # The plan that one task computes is the same, and so are the bytes.
    slurmgpu("plan", "--gpus", "0", "--tasks", "6", cwd=alone, expect=0)
    assert Run.open(alone / "run").plan.parts == 3
    slurmgpu("resubmit", "run", "--executor", "debug", "--tasks", "1", cwd=alone, expect=0)
    assert datasets(alone) == datasets(folder)
    whole = divided("whole")
    slurmgpu(*DEBUG, cwd=whole, expect=0)
    assert Run.open(whole / "run").plan.parts == 1
    assert datasets(whole) == datasets(folder)


def test_a_task_that_dies_with_a_part_of_an_item_loses_nothing(divided):
    folder = divided("killed", 100)
    (folder / "held").touch()
    process = start(*LOCAL, "--tasks", "3", cwd=folder)
    wait_until(lambda: len(marked(folder)) == 3, "three tasks to be at work on one item")
    wait_until(lambda: joining(folder) == [0, 0], "two of them to say so")
    holder = wait_for_holder(folder)
    joined = [record for record in records(folder) if record["shard"] is None]
    os.kill(holder["pid"], signal.SIGKILL)  # the task that holds the shard
    [worker] = [int(name.rpartition("-")[2]) for name in marked(folder) if name.startswith(joined[0]["attempt"])]
    os.kill(worker, signal.SIGKILL)  # a worker of another, which is started again
    wait_until(lambda: len(marked(folder)) == 4, "the worker's successor to take the part")
    (folder / "held").unlink()
    process.communicate(timeout=250)
    check_values(folder, 100)
    assert report(folder)["complete"]
    lines = [line for each in marked(folder).values() for line in each]
    # Only the parts that were in hand are computed twice.
    assert len(set(lines)) == 24
    assert len(lines) == 24 + 2 * 4
    assert not workers(folder)


def test_an_item_that_fails_in_parts_is_one_failed_item_and_computed_again_with_its_key(divided, slurmgpu):
    folder = divided("failing", 10, 200)
    path = folder / "slurmgpu.toml"
    path.write_text('key = "x"\n' + path.read_text())
    slurmgpu(*DEBUG, "--tasks", "4", cwd=folder, expect=0)
    assert Run.open(folder / "run").plan.parts == 2
    outcome = report(folder)
    assert [(each["index"], each["name"], each["message"]) for each in outcome["errors"]] == [(0, "10", "not thirteen")]
    assert "Item 0 (10) failed in attempt" in slurmgpu("logs", "run", "--item", "0", cwd=folder, expect=0).stdout
    source = folder / "divided.py"
    source.write_text(source.read_text().replace("13 in some", "None in some"))
    slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=0)
    assert report(folder)["n_errors"] == 0
    check_values(folder, 10, 200)


def test_a_holder_that_is_told_to_stop_finishes_its_item_with_those_who_compute_parts_of_it(divided):
    folder = divided("told", 100)
    for number in (100, 106):  # the first of each part
        (folder / f"held-{number}").touch()
    process = start(*LOCAL, "--tasks", "2", cwd=folder)
    wait_until(lambda: joining(folder) == [0], "a task to be at work on the other's item")
    wait_until(lambda: len(marked(folder)) == 2, "both to have a part")
    (folder / "held-100").unlink()
    first = folder / "run" / "parts" / "1" / "00000.0.0" / "00000.json"
    wait_until(first.exists, "the holder to wait for the joiner's part")
    for record in records(folder):
        os.kill(record["pid"], signal.SIGUSR2)
    logs = [*(folder / "run" / "logs").glob("*_log.err")]
    wait_until(lambda: all("takes no more shards" in path.read_text() for path in logs), "both to be told")
    time.sleep(2.0)  # longer than a pause between two looks
    holder = wait_for_holder(folder)["attempt"]
    (folder / "held-106").unlink()
    process.communicate(timeout=250)
    check_values(folder, 100)
    outcome = report(folder)
    assert (outcome["complete"], len(outcome["attempts"])) == (True, 2)
    # The other finished the part in hand, and took none after that.
    lines = {name: len(each) for name, each in marked(folder).items()}
    assert sorted(lines.values()) == [6, 18]
    assert max(lines, key=lines.get).startswith(holder)


def test_an_item_that_kills_workers_before_it_is_divided_kills_only_those_of_its_holder(divided):
    folder = divided("deadly", 666)
    process = start(*LOCAL, "--tasks", "4", cwd=folder)
    process.communicate(timeout=250)
    outcome = report(folder)
    assert [error["index"] for error in outcome["errors"]] == [0]
    assert len({name.rpartition("-")[0] for name in marked(folder)}) == 1
    assert [attempt["failure"] for attempt in outcome["attempts"]] == [None] * 4
