"""`slurmgpu.map` beside multiprocessing, `datasets.map` and submitit's `map_array`: items of a millisecond.

    python -m tests.benchmarks.bench_map [--quick] [--folder DIR]

Each gets the same items and as many processes, and is timed from the call to the last result in input order.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import slurmgpu
from tests.benchmarks import judge, print_table

ITEM_S = 1e-3
merging: list[slurmgpu.RunHandle] = []
"""Runs whose rows are read, and whose merges would slow down what is timed next."""


def work(n: int) -> int:
    """A millisecond of the processor's time, and the square of a number."""
    end = time.process_time() + ITEM_S
    while time.process_time() < end:
        pass
    return n * n


def by_pool(items: Sequence[int], n_processes: int, folder: Path) -> Iterable[int]:
    """The results of multiprocessing, which come in any order."""
    with multiprocessing.Pool(n_processes) as pool:
        return sorted(pool.imap_unordered(work, items))


def by_map(items: Sequence[int], n_processes: int, folder: Path) -> Iterable[int]:
    """The rows of a run on this machine, as they are published."""
    run = slurmgpu.map(
        work, items, executor="local", gpus=0, tasks=n_processes, run_dir=folder / f"map-{time.monotonic_ns()}"
    )
    merging.append(run)
    return [row["result"] for row in run.rows()]


def by_datasets(items: Sequence[int], n_processes: int, folder: Path) -> Iterable[int]:
    """A column of `datasets.map`."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"n": items})
    os.environ["HF_DATASETS_CACHE"] = str(folder)
    done = rows.map(lambda row: {"result": work(row["n"])}, num_proc=n_processes, load_from_cache_file=False)
    return list(done["result"])


def by_submitit(items: Sequence[int], n_processes: int, folder: Path) -> Iterable[int]:
    """Jobs of submitit's local executor, one for each process: one for each item would start as many processes."""
    import submitit

    executor = submitit.LocalExecutor(folder / "submitit")
    slices = [items[number::n_processes] for number in range(n_processes)]
    parts = [job.result() for job in executor.map_array(_all, slices)]
    return sorted(value for part in parts for value in part)


def _all(items: Sequence[int]) -> list[int]:
    return [work(n) for n in items]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer items and rounds")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary directory)")
    arguments = parser.parse_args(argv)
    n_items, n_rounds = (2_000, 1) if arguments.quick else (10_000, 3)
    logging.getLogger("slurmgpu").setLevel(logging.ERROR)
    n_processes = len(os.sched_getaffinity(0))
    ways: list[tuple[str, Callable[[Sequence[int], int, Path], Iterable[int]]]] = [
        ("Pool.imap_unordered", by_pool),
        ("slurmgpu.map", by_map),
        ("submitit map_array, a job for each process", by_submitit),
        ("datasets.map", by_datasets),
    ]
    items, expected = range(n_items), [n * n for n in range(n_items)]
    seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for _ in range(n_rounds):
            for name, way in ways:
                try:
                    start = time.perf_counter()
                    found = way(items, n_processes, Path(folder))
                    seconds[name].append(time.perf_counter() - start)
                except ImportError as error:
                    print(f"left out {name}: {error}", file=sys.stderr)
                    continue
                while merging:
                    merging.pop().wait()
                if list(found) != expected:
                    raise RuntimeError(f"{name} returned other results")
    medians = {name: statistics.median(times) for name, times in seconds.items() if times}
    pool = medians["Pool.imap_unordered"]
    print(f"{n_items:,} items of {ITEM_S * 1e3:g} ms, {n_processes} processes; medians of {n_rounds}")
    print_table(("", "seconds", "ratio"), [(name, f"{s:.2f}", f"{s / pool:.2f}") for name, s in medians.items()])
    return 0 if judge("slurmgpu.map to Pool.imap_unordered", medians["slurmgpu.map"] / pool, 1.1) else 1


if __name__ == "__main__":
    sys.exit(main())
