"""Work whose duration is known beforehand: the workload of bench_elasticity, and the same sleeps as one task's share.

Both write into `marks` when they are ready and who they are, so that the benchmark knows when a task's speed counts.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from slurmgpu import Array

BATCH = 5


class Sleeping:
    """Sleeps `item_s` for an item; `slow` maps a task's index in the array to how many times slower it is."""

    columns = {"double": Array("float64")}
    batch_size = BATCH

    def __init__(self, *, marks: str, item_s: float, slow: dict = {}) -> None:
        self.marks, self.item_s, self.slow = Path(marks), item_s, slow

    def load(self, task):
        number = task.attempt.partition("_")[2].partition(".")[0]  # of "1234_7.0"
        self.item_s *= self.slow.get(number, 1.0)
        mark(self.marks / f"ready-{number}", os.getppid())  # the array task is this worker's parent

    def __call__(self, items):
        time.sleep(self.item_s * len(items))
        return [{"double": 2.0 * item.index} for item in items]


def sleep_share(number: int, n_items: int, item_s: float, marks: str) -> None:
    """What an array task of a static split does: the sleeps of its share."""
    mark(Path(marks) / f"ready-{number}", os.getpid())
    for _ in range(n_items // BATCH):
        time.sleep(item_s * BATCH)
    mark(Path(marks) / f"done-{number}", os.getpid())


def mark(path: Path, pid: int) -> None:
    """Write down that it is now."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"at": time.time(), "pid": pid}))
    partial.rename(path)
