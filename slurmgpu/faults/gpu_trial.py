"""A short run that tests this machine's GPUs with real CUDA faults, and compares the results with what is expected.

`try_gpus` computes the run twice, without faults and with them. The workload is `slurmgpu.workloads.gpu_trial`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import GPUFaultError
from slurmgpu.faults.verdicts import Verdict
from slurmgpu.report.report_file import Report, last_report
from slurmgpu.results import Merged
from slurmgpu.run.directory import Run
from slurmgpu.shards.shard_file import read_directory
from slurmgpu.util import gpus

WORKLOAD = "slurmgpu.workloads.gpu_trial:Trial"
SHARD = 8
"""The items of a shard, and of a batch."""
KINDS = ("", "oom", "assert", "illegal", "kill")
"""The fault of each shard: "oom" is in all of its items, the others in the item at PLACE."""
PLACE = 3
QUARANTINED = ("assert", "illegal")
OOM_BATCH = 2
N = 256
"""Rows and columns of the matrices. Their elements are integers up to 8, so products are exact in float32 and tf32."""
LOST_SHARE = 0.02
"""The share of a GPU's memory that may stay allocated after a fault: the driver's own use varies."""

Compute = Callable[[Mapping[str, Any]], Run]
"""A function that computes a run file to its end, with the executor `local`."""


def run_file(folder: Path, n_gpus: int, *, faults: bool, container: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The keys of a run file with a shard for each kind of fault; writes its input to `folder`. 0 GPUs: on this CPU."""
    items = [{"fault": kind if kind == "oom" or place == PLACE else ""} for kind in KINDS for place in range(SHARD)]
    path = folder / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    slots = {"gpus": n_gpus, "array": n_gpus > 1} if n_gpus else {"gpus": 0, "tasks": 1, "device": "cpu"}
    return {
        "input": str(path),
        "run_dir": str(folder / ("with-faults" if faults else "without-faults")),
        "shard_items": SHARD,
        "html": False,
        "sample_s": 0.5,
        "workload": {"use": WORKLOAD, "batch_size": SHARD},
        "settings": {"faults": faults},
        "resources": {"executor": "local", **slots},
        "container": container or {},
    }


def try_gpus(
    folder: Path, n_gpus: int, compute: Compute, container: Mapping[str, Any] | None = None
) -> Iterator[Verdict]:
    """Yield a verdict for each check as soon as it is known; with 0 GPUs this CPU simulates the faults."""
    before = free_bytes(n_gpus)
    whole = compute(run_file(folder, n_gpus, faults=False, container=container))
    computes = _computes(whole, last_report(whole))
    yield computes
    if not computes.kept:
        return
    faulty = compute(run_file(folder, n_gpus, faults=True, container=container))
    found = _Faulty(faulty, last_report(faulty))
    yield _ran_out_of_memory(found)
    for kind in QUARANTINED:
        yield _quarantined(found, kind)
    yield _killed(found)
    yield _same_bytes(whole, faulty)
    if n_gpus:
        yield _is_free_again(found, before, n_gpus)


def free_bytes(n_gpus: int) -> list[int]:
    """The free memory of each GPU, from NVML; empty if it is unknown, or without GPUs."""
    found = [gpu.free_bytes for gpu in gpus.probe(n_gpus)] if n_gpus else []
    return [each for each in found if each is not None]


@dataclass(frozen=True)
class _Faulty:
    run: Run
    report: Report

    def notes(self, kind: str) -> Mapping[str, int]:
        return read_directory(self.run.shard_path(KINDS.index(kind))).notes

    def deaths(self, kind: str) -> list[str]:
        return [
            death["message"]
            for attempt in self.report["attempts"]
            for death in attempt["deaths"]
            if death.get("shard") == KINDS.index(kind)
        ]


def _computes(run: Run, report: Report) -> Verdict:
    """Check that every row equals the CPU's bit for bit: the products of small integers are exact."""
    if not report["complete"]:
        why = next((f"{each['failure']}: {each['message']}" for each in report["attempts"] if each["failure"]), "?")
        return Verdict(f"the run without faults is not complete: {why}", kept=False)
    if report["errors"]:
        return Verdict(f"item {report['errors'][0]['index']} failed: {report['errors'][0]['message']}", kept=False)
    n_wrong = sum((row != matrix(index)[0] @ matrix(index).T).any() for index, row in enumerate(_rows(run)))
    if n_wrong:
        return Verdict(f"{n_wrong} of {report['n_items']} products differ from the CPU's", kept=False)
    return Verdict(f"{report['n_items']} matrix products equal the CPU's, bit for bit")


def _ran_out_of_memory(found: _Faulty) -> Verdict:
    batch = found.notes("oom").get("oom_batch", 0) if found.report["complete"] else 0
    said = f"out of memory with a batch of {SHARD}: computed in batches of {batch or 'unknown size'}"
    return Verdict(f"{said} (expected {OOM_BATCH})", kept=batch == OOM_BATCH)


def _quarantined(found: _Faulty, kind: str) -> Verdict:
    item = KINDS.index(kind) * SHARD + PLACE
    deaths = found.deaths(kind)
    error = next((each["message"] for each in found.report["errors"] if each["index"] == item), None)
    said = f"{kind}: {len(deaths)} workers died and were restarted"
    if error is None:
        return Verdict(f"{said}, but item {item} was not quarantined", kept=False)
    first_line = error.partition("\n")[0]
    return Verdict(f"{said}, and item {item} alone is quarantined: {first_line}", kept=len(deaths) == 2)


def _killed(found: _Faulty) -> Verdict:
    deaths = found.deaths("kill")
    said = f"SIGKILL while a kernel runs: {'; '.join(deaths) or 'no worker died'}"
    return Verdict(said, kept=len(deaths) == 1)


def _same_bytes(whole: Run, faulty: Run) -> Verdict:
    report = last_report(faulty)
    expected = {KINDS.index(kind) * SHARD + PLACE for kind in QUARANTINED}
    failed = {each["index"] for each in report["errors"]}
    if not report["complete"] or failed != expected:
        said = f"{report['n_missing_items']} items are missing, and {sorted(failed)} failed"
        return Verdict(f"after the faults {said}; expected 0 missing, and {sorted(expected)} failed", kept=False)
    good = [index for index in range(len(KINDS) * SHARD) if index not in failed]
    same = _rows(whole)[good].tobytes() == _rows(faulty)[good].tobytes()
    said = "equal" if same else "differ from"
    return Verdict(f"{len(good)} good rows of the merged file {said} those of the run without faults", kept=same)


def _is_free_again(found: _Faulty, before: list[int], n_gpus: int) -> Verdict:
    """Compare the free memory before and after the run (NVML), and before each shard of a task (as its worker saw it).

    Tasks have different GPUs, whose free memory may differ, for example by what a display needs.
    """
    try:
        after = free_bytes(n_gpus)
        totals = [gpu.memory_bytes for gpu in gpus.probe(n_gpus)]
    except GPUFaultError as error:
        return Verdict(f"after the faults a GPU cannot be used: {error}", kept=False)
    lost = max((b - a for b, a in zip(before, after, strict=True)), default=0)
    of_tasks = [
        [found.notes(KINDS[shard])["free_mb"] for shard, _, _, is_first, *_ in record["published"] if is_first]
        for record in (found.run.attempts() if found.report["complete"] else ())
    ]
    at_load = [each for of_task in of_tasks for each in of_task]
    spread = max((max(of_task) - min(of_task) for of_task in of_tasks if of_task), default=0) << 20
    said = f"{lost / 1e6:,.0f} MB stayed in use after the run"
    said += f"; workers found {min(at_load, default=0):,} to {max(at_load, default=0):,} MB free at their start"
    return Verdict(said, kept=bool(at_load) and max(lost, spread) <= LOST_SHARE * min(totals))


def matrix(index: int) -> npt.NDArray[np.float32]:
    """The matrix of an item (N, N); its row is the first one of the product with its transpose."""
    return np.random.default_rng(index).integers(-8, 9, (N, N)).astype(np.float32)


def _rows(run: Run) -> npt.NDArray[np.float32]:
    with Merged(run.merged) as merged:
        return np.asarray(merged["product"][:])
