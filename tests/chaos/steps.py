"""`python -m tests.chaos.steps plan|task|type …`: what a pretended node does for a run, without a scheduler."""

from __future__ import annotations

import sys
from pathlib import Path

from slurmgpu.cli import main
from slurmgpu.code import snapshots
from slurmgpu.executors.job_entry import run_local_task
from slurmgpu.operations.submit import submission_of
from slurmgpu.plan.planner import draft_run
from slurmgpu.run import heartbeats, liveness
from slurmgpu.run.creation import create_run

ELSEWHERE = {"host": "elsewhere", "pids": [1]}
"""Where tasks work that nobody here can look up: only what they write tells whether they are alive."""


def plan(run_file: str) -> None:
    """Make the run directory, and write down a submission to nodes that cannot be asked."""
    with draft_run(Path(run_file), {}, None) as draft:
        submission = submission_of(draft)
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
        snapshots.write(run.folder, draft.code)
    run.record_submission({**submission.to_json(), **ELSEWHERE})


def task(folder: str, number: str) -> None:
    """Work as a task of the first submission."""
    heartbeats.BEAT_S = 1.0
    run_local_task(Path(folder), "job1", int(number), 1, [], "cpu", 1)


def type_command(*argv: str) -> None:
    """The command line, which waits less long for silent tasks, as all is faster here."""
    liveness.SILENT_S = liveness.FRESH_S = 6.0
    sys.argv = ["slurmgpu", *argv]
    main()


if __name__ == "__main__":
    {"plan": plan, "task": task, "type": type_command}[sys.argv[1]](*sys.argv[2:])
