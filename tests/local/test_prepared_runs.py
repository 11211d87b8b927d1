"""Runs of a workload that prepares its next batch in a thread."""

from __future__ import annotations

from pathlib import Path

from slurmgpu import Merged
from tests.support.runs import records, report

WORKLOAD = """
import os

from slurmgpu import Array


class Prepared:
    columns = {"x": Array("int64")}
    batch_size = 4

    def __init__(self, *, deadly: int = -1):
        self.deadly = deadly

    def prepare(self, items):
        if any(item.index == self.deadly for item in items):
            os._exit(3)
        return [2 * item.data["x"] for item in items]

    def __call__(self, items, prepared):
        return [{"x": x} for x in prepared]
"""


def run(project, slurmgpu, expect: int, **settings: int) -> Path:
    folder = project(40, workload="Prepared", shard_items=16, settings=settings)
    (folder / "workloads.py").write_text(WORKLOAD)
    slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=expect)
    return Path(folder)


def test_an_item_that_kills_its_worker_while_it_is_prepared_is_quarantined_and_no_other(project, slurmgpu):
    folder = run(project, slurmgpu, 0, deadly=25)
    with Merged(folder / "run/merged.h5") as merged:
        assert merged.failed.nonzero()[0].tolist() == [25]
        assert [int(x) for i, x in enumerate(merged["x"][:]) if i != 25] == [2 * i for i in range(40) if i != 25]
    [error] = report(folder)["errors"]
    assert error["class"] == "crash"
    # The first of the two batches that were in flight, then the item alone.
    assert [death["items"] for death in records(folder)[0]["deaths"]] == [[20, 23], [25]]
