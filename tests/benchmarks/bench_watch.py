"""What a look of `status --watch` costs, and what it finds: 1,000 tasks unchanged, all changed, and read anew.

    python -m tests.benchmarks.bench_watch [--quick]

The run directory is a pretended one, of 1,000 tasks at work on 20,000 shards, in the page cache: a network file system
adds what its stats take. Beside it, how far the time left is off after a third of runs of several shapes.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from slurmgpu.cli.views.screens import Screen
from slurmgpu.cli.views.status_poller import Look
from slurmgpu.report.pace import pace_of
from slurmgpu.report.state_words import tasks_of
from slurmgpu.report.status import StatusReader
from tests.support.pretend_runs import BEGIN, Pretended, pretend_run, update
from tests.unit.test_pace import SHAPES, end_of, queue_at


def main() -> int:
    """Print the times."""
    parser = argparse.ArgumentParser(description="What a look of `status --watch` costs.")
    parser.add_argument("--quick", action="store_true", help="fewer tasks")
    n_tasks = 100 if parser.parse_args().quick else 1000
    what: dict[str, Any] = {"n_tasks": n_tasks, "n_shards": 20 * n_tasks, "sample_s": 60.0, "faulty": True}
    with tempfile.TemporaryDirectory() as folder:
        run, pretended = pretend_run(Path(folder, "judge"), 600, **what), Pretended(**what)
        look = Look(run)
        status, words = look.read(None, (), BEGIN + 600)
        visible = [task["attempt"] for task in tasks_of(status)[:40]]
        anew = fastest(lambda: StatusReader(run).read(now=BEGIN + 600, gpus_of=visible))
        unchanged = fastest(lambda: look.read(None, visible, BEGIN + 600))
        changed = []
        for now_s in (603, 606, 609):
            update(run, pretended, now_s)
            changed.append(fastest(lambda: look.read(None, visible, BEGIN + now_s), 1))  # noqa: B023
        console = Console(file=io.StringIO(), width=200, height=50, force_terminal=True)
        drawing = fastest(lambda: console.print(Screen(status, tasks_of(status), 0, words)))
        print(f"{n_tasks:,} tasks, {20 * n_tasks:,} shards")
        print(f"read anew, as `status` does   {1000 * anew:7.1f} ms")
        print(f"a look, every record changed  {1000 * min(changed):7.1f} ms")
        print(f"a look, nothing changed       {1000 * unchanged:7.1f} ms   {anew / unchanged:.0f} times less than anew")
        print(f"drawing 200x50                {1000 * drawing:7.1f} ms")
    print("\ntime left as told after a third, by what it was")
    shapes: Any = SHAPES
    for name, shape in shapes.items():
        print(f"{name:36} {told(Pretended(**shape)):.3f}")
    return 0


def told(pretended: Pretended) -> float:
    """The time left after a third of a run, as part of the true one."""
    end = end_of(pretended)
    records, published = pretended.records(end / 3)
    pace = pace_of(pretended.plan(), records, published, queue_at(pretended, records), BEGIN + end / 3)
    assert pace.left_s is not None
    return pace.left_s / (end * 2 / 3)


def fastest(work: Callable[[], object], n: int = 5) -> float:
    """Seconds of the processor in the fastest of several."""
    times = []
    for _ in range(n):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
