"""`task.log` in runs that are killed, and `[track]` at the end of them."""

import json

from slurmgpu.run.directory import Run
from slurmgpu.run.metric_log import MetricReader
from slurmgpu.worker.assignment import Assignment
from slurmgpu.worker.worker import Worker
from tests.files.test_tracking import scalars

LOGS = """

class Logs(Rows):
    def __call__(self, items):
        rows = super().__call__(items)
        for item in items:
            self.task.log(item.index, square=item.index**2)
        return rows
"""


def test_no_published_row_lacks_what_was_logged_with_it_whoever_was_killed(project, slurmgpu):
    settings = {"faults": {"17": "kill_once", "30": "item_error"}, "marks": "marks"}
    resources = {"gpus": 0, "tasks": 2, "executor": "local"}
    track = {"to": ["tensorboard:tb", "wandb:none"]}
    folder = project(60, "Logs", settings=settings, resources=resources, track=track, on_end="ls > at_end")
    (folder / "marks").mkdir()
    with (folder / "workloads.py").open("a") as file:
        file.write(LOGS)
    done = slurmgpu("submit", cwd=folder, expect=0)  # a tracker that fails costs a warning
    logged = {each.step: each.values for each in MetricReader(Run.open(folder / "run").folder).news()}
    assert logged == {step: {"square": step**2} for step in range(60) if step != 30}
    assert "tb" not in (folder / "at_end").read_text().split()  # a slow tracker delays nobody who waits to be told
    [found] = scalars(folder / "tb").values()
    assert found == [(step, "square", step**2) for step in range(60) if step != 30]
    assert "not everything was sent to trackers (exit code 2)" in done.stderr
    assert "pip install 'slurmgpu[wandb]'" in done.stderr
    again = slurmgpu("track", "run", "--to", "tensorboard:tb", "--json", cwd=folder, expect=0)
    assert json.loads(again.stdout) == [{"to": "tensorboard:tb", "n_runs": 1, "n_steps": 0}]
    # A folder of [track] is relative to the run file wherever the command is typed.
    again = slurmgpu("track", "../run", "--json", cwd=folder / "marks", expect=2)
    assert [one["n_steps"] for one in json.loads(again.stdout)] == [0, 0]
    assert not (folder / "marks" / "tb").exists()


def test_a_shards_values_are_with_its_task_before_it_is_published(project, slurmgpu):
    folder = project(40, "Logs")
    with (folder / "workloads.py").open("a") as file:
        file.write(LOGS)
    slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0)
    run, is_published = Run.open(folder / "run"), {}

    def report(event):
        for _, _, step, _ in event.get("points", ()):
            is_published[step] = run.shard_path(step // 8).exists()

    Worker(run, Assignment("job_0", "job_0.0"), report).work()
    assert is_published == dict.fromkeys(range(40), False)
