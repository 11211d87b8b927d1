"""What an array task costs outside the workload: fitted to runs of few and many shards, of few and many items.

    python -m tests.benchmarks.bench_overhead [--quick] [--folder DIR]

A task is timed whole, from the start of its process to its end: Submitit's `_submit`, which is what srun starts on a
node, the task, its worker, every claim and every fsync. The workload makes a number and a short text for each item; the
fraction of a microsecond that it takes for an item is counted in. Baseline: a bare loop over the same items in one
process, which writes one file with h5py at its end. Beside it stands what the operations on files of a shard take
alone: a claim, a file of as many bytes with its fsync, its link, and the removal of its first name.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from submitit.core.utils import DelayedSubmission

from slurmgpu.executors import job_entry
from slurmgpu.plan.planner import draft_run
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from tests.benchmarks import judge, print_table, private_slurm, write_project

HOME = str(Path(__file__).parents[2])
SMALL_ROWS = Path(__file__).with_name("small_rows.py")
SIZES = [(1, 32), (1000, 32_000), (10, 200_000), (300, 96_000)]  # shards, items
QUICK_SIZES = [(1, 32), (200, 6_400), (10, 64_000), (60, 19_200)]
N_ROUNDS = 3
# What Submitit's local executor, its controller, tells the process of a job.
NAMES = ("NTASKS=1", "JOB_NUM_NODES=1", "NODEID=0", "GLOBALID=0", "LOCALID=0", "JOB_ID=1")
JOB = {"SUBMITIT_EXECUTOR": "local", **{f"SUBMITIT_LOCAL_{k}": v for k, v in (name.split("=") for name in NAMES)}}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shards, items and rounds")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary directory)")
    arguments = parser.parse_args(argv)
    sizes, n_rounds = (QUICK_SIZES, 1) if arguments.quick else (SIZES, N_ROUNDS)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        alone: list[float] = []
        measured = [measure(Path(folder), *size, n_rounds, alone) for size in sizes]
    print(f"seconds, median of {n_rounds}")
    rows = [
        (f"{n_shards:,} shards, {n_items:,} items", f"{task:.2f}", f"{bare:.2f}", f"{task / bare:.1f}")
        for (n_shards, n_items), (task, bare) in zip(sizes, measured, strict=True)
    ]
    print_table(("run", "array task", "bare loop", "ratio"), rows)
    met = judge_fit(sizes, [task for task, _ in measured])
    print(f"the operations on files of a shard alone: {statistics.median(alone) * 1e3:.2f} ms, {_span(alone)} by round")
    return 0 if met else 1


def measure(folder: Path, n_shards: int, n_items: int, n_rounds: int, alone: list[float]) -> tuple[float, float]:
    """Seconds of the array task and of the bare loop: medians of runs in turns.

    Adds to `alone` the seconds that the operations on files of a shard take in each round.
    """
    rounds = []
    for number in range(n_rounds):
        project = folder / f"{n_shards}-{n_items}-{number}"
        run_file = write_project(project, n_items, f"{SMALL_ROWS}:SmallRows", shard_items=n_items // n_shards)
        rounds.append((array_task(run_file), bare_loop(project)))
        alone.append(
            operations_on_files(project / "alone", next((project / "run" / "shards").iterdir()).stat().st_size)
        )
    tasks, loops = zip(*rounds, strict=True)
    return statistics.median(tasks), statistics.median(loops)


def array_task(run_file: Path) -> float:
    """Seconds of a task that computes the whole run."""
    with draft_run(run_file) as draft:
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
    slot = {"job": "bench", "slot": 0, "submission": 1, "gpu_ids": [], "device": "cpu", "n_threads": 1}
    DelayedSubmission(job_entry.run_local_task, run.folder, **slot).dump(run.logs / "1_submitted.pkl")
    seconds = wall([sys.executable, "-u", "-m", "submitit.core._submit", str(run.logs)], **JOB)
    check(run)
    return seconds


def check(run: Run) -> None:
    """Raise unless every shard was computed, by a worker that never died."""
    [record] = run.attempts()
    if len(run.published()) != run.plan.n_shards or record["deaths"] or record["n_errors"]:
        raise RuntimeError(f"the run was not computed as it should: {record}")


def operations_on_files(folder: Path, n_bytes: int, n_shards: int = 200) -> float:
    """Seconds of a shard's operations on files without anything that computes: mean of so many shards."""
    content = os.urandom(n_bytes)
    for name in ("claims", "shards"):
        (folder / name).mkdir(parents=True)
    start = time.perf_counter()
    for shard in range(n_shards):
        claim = os.open(folder / "claims" / str(shard), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(claim, b" " * 1024)
        os.close(claim)
        partial = folder / "shards" / f"{shard}.partial"
        with open(partial, "wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        partial.with_suffix(".h5").hardlink_to(partial)
        partial.unlink()
    return (time.perf_counter() - start) / n_shards


def _span(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f} ms"


def bare_loop(project: Path) -> float:
    """Seconds of the loop without slurmgpu."""
    return wall([sys.executable, str(SMALL_ROWS), str(project / "items.jsonl"), str(project / "bare.h5")])


def wall(command: Sequence[str], **env: str) -> float:
    """Seconds that a command takes."""
    start = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": HOME, **env}, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr}")
    return seconds


def judge_fit(sizes: Sequence[tuple[int, int]], seconds: Sequence[float]) -> bool:
    """Fit seconds = task + shard × shards + item × items; whether each of the three is within its target."""
    terms = np.array([(1, *size) for size in sizes], float)
    (task_s, shard_s, item_s), *_ = np.linalg.lstsq(terms, np.array(seconds), rcond=None)
    off = np.abs(terms @ (task_s, shard_s, item_s) - seconds).max()
    fit = f"{task_s:.2f} s + {shard_s * 1e3:.2f} ms x shards + {item_s * 1e6:.1f} us x items"
    print(f"array task = {fit}, within {off:.2f} s")
    slurm_s = slurm_commands()
    if slurm_s is not None:
        print(f"squeue and scancel, which a task calls on Slurm (private test cluster): {slurm_s:.2f} s more a task")
    results = (
        judge("a task", float(task_s) + (slurm_s or 0.0), 1.0, " s"),
        judge("a shard", float(shard_s) * 1e3, 2.0, " ms"),
        judge("an item", float(item_s) * 1e6, 20.0, " us"),
    )
    return all(results)


def slurm_commands() -> float | None:
    """Seconds of the two commands of Slurm's that an array task calls; None where no Slurm can be started."""
    with private_slurm() as cluster:
        if cluster is None:
            return None
        job = cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 60").strip()
        cluster.wait_until(lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING\n", "the job ran")
        times = []
        for _ in range(5):
            start = time.perf_counter()
            cluster.run("squeue", "--noheader", "--jobs", job, "--format", "%L")
            cluster.run("scancel", "--quiet", "--state=PENDING", job)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
