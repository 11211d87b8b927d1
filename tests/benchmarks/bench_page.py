"""What the page of a report costs: its size, and the processor's time to draw it, over that to read the same files.

    python -m tests.benchmarks.bench_page [--quick]

The run directories are pretended ones: tasks of 45 minutes with 40 shards each and a sample every five seconds. The
baseline parses what the page is made of, records and telemetry, line by line with json, and does nothing with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slurmgpu.page import page_path, write_page
from slurmgpu.run.directory import Run
from tests.support.pretend_runs import pretend_run, reported

TARGET_BYTES = 2_000_000


def main() -> int:
    """Print a line for each number of tasks; 1 if a page is larger than it should be."""
    parser = argparse.ArgumentParser(description="What the page of a report costs.")
    parser.add_argument("--quick", action="store_true", help="fewer tasks")
    sizes = []
    print("tasks    size       drawing   reading the same   drawing/reading")
    for n_tasks in (8, 64) if parser.parse_args().quick else (8, 64, 1000):
        with tempfile.TemporaryDirectory() as folder:
            run = pretend_run(Path(folder, "judge"), 2700, n_tasks=n_tasks, n_shards=40 * n_tasks, faulty=True)
            errors = [(item, f"item_error: no answer in item {item}") for item in range(0, 40 * n_tasks, 7)]
            report = reported(run, errors=errors)
            write_page(run, report, page_path(run))  # the first one loads matplotlib and its fonts
            drawing = seconds(lambda: sizes.append(write_page(run, report, page_path(run))))  # noqa: B023
            reading = seconds(lambda: parse(run))  # noqa: B023
        size = f"{sizes[-1] / 1000:,.0f} kB"
        print(f"{n_tasks:5,}  {size:>8}  {drawing:9.2f} s  {reading:14.2f} s  {drawing / reading:16.1f}")
    print(f"\nthe largest is {max(sizes) / 1e6:.2f} MB; target: {TARGET_BYTES / 1e6:.0f} MB")
    return int(max(sizes) > TARGET_BYTES)


def parse(run: Run) -> None:
    """Read every record and every sample."""
    for path in run.tasks.iterdir():
        json.loads(path.read_bytes())
    for path in (run.folder / "telemetry").iterdir():
        for line in path.read_bytes().splitlines():
            json.loads(line)


def seconds(work: Callable[[], object]) -> float:
    """Seconds of the processor."""
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
