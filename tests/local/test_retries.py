"""What may pass is tried again, and a task that has to end does not wait for it."""

import os
import signal

from tests.support.runs import check_rows, records, report, start, wait_until

LOCAL = ("submit", "--executor", "local", "--gpus", "0")
BUSY = """

from slurmgpu import Retry


class Busy(Rows):
    def __call__(self, items):
        rows = []
        for item, row in zip(items, super().__call__(items)):
            mark = Path(f"refused-{item.index}")
            if item.index in (3, 5) and not mark.exists():
                mark.touch()
                row = Retry("HTTP 429", after=AFTER)
            rows.append(row)
        return rows
"""


def busy_project(project, after):
    folder = project(16, workload="Busy")
    path = folder / "workloads.py"
    path.write_text(path.read_text() + BUSY.replace("AFTER", str(after)))
    return folder


def test_what_passes_costs_no_row_and_is_told(project, slurmgpu):
    folder = busy_project(project, 0.01)
    done = slurmgpu(*LOCAL, cwd=folder, expect=0)
    check_rows(folder, 16)
    [record] = records(folder)
    assert (record["n_retried"], record["n_errors"], record["progress"]) == (2, 0, None)
    assert record["waited_s"] > 0
    told = report(folder)["attempts"][0]
    assert (told["n_retried"], told["waited_s"]) == (2, record["waited_s"])
    assert "tried again: 2 items" in slurmgpu("report", "run", cwd=folder, expect=0).stdout
    assert "complete" in done.stdout


def test_a_task_that_is_to_end_gives_back_the_shard_that_waits(project, slurmgpu):
    folder = busy_project(project, 200)
    submitting = start(*LOCAL, cwd=folder)
    wait_until(lambda: any(r["n_retried"] for r in records(folder)), "a task that waits")
    assert records(folder)[0]["progress"].startswith("waiting ")
    os.kill(records(folder)[0]["pid"], signal.SIGUSR2)  # the notice of a preemption
    said, _ = submitting.communicate()
    assert submitting.returncode == 3, said
    [attempt] = report(folder)["attempts"]
    assert (attempt["failure"], attempt["n_shards"]) == ("preempted", 0)
    assert attempt["message"].startswith("shard 0 was given back: Slurm announced")
    slurmgpu("resubmit", "run", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    check_rows(folder, 16)
