"""The join of shards, beside `cat` of the same bytes and beside reading, concatenating and writing with h5py.

    python -m tests.benchmarks.bench_merge [--quick] [--folder DIR]

Large: 16 shards of float16 blocks, 2 GB. Small: 10,000 shards of 100 rows, numbers and text. At last the writing of one
such shard. Every contender works in a process of its own, of which wall time, CPU time and peak memory are taken; each
figure is the best of three rounds in which the contenders take turns. All contenders fsync what they write.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from slurmgpu.merge.join import join, verify_joined
from slurmgpu.merge.sources import Source
from slurmgpu.shards.columns import Array, Column, Text, convert_row
from slurmgpu.shards.made_by import MadeBy
from slurmgpu.shards.names import shard_name
from slurmgpu.shards.shard_file import write_shard
from tests.benchmarks import judge, print_table
from tests.support.shard_files import peak_memory_bytes

FINGERPRINT = "5f" * 32
N_ROUNDS = 3
N_LARGE, ROWS_LARGE = 16, 64
ROWS_SMALL = 100
SMALL = {"score": Array("float32"), "n_words": Array("int32"), "shout": Text()}

Part = tuple[int, Path, int, int]
Columns = Mapping[str, Column]


class Cost(NamedTuple):
    """What one call took, in a process of its own."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the bytes and of the shards")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary directory)")
    arguments = parser.parse_args(argv)
    part = 10 if arguments.quick else 1
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        met = [
            bench_large(Path(folder), 2048 // part),
            bench_small(Path(folder), 10_000 // part),
            bench_writing(Path(folder)),
        ]
    return 0 if all(met) else 1


def bench_large(folder: Path, size_mb: int) -> bool:
    columns = {"block": Array("float16", ((size_mb << 20) // (N_LARGE * ROWS_LARGE * 2),))}
    rng = np.random.default_rng(7)
    rows = [{"block": rng.random(columns["block"].shape, "f4").astype("f2")} for _ in range(ROWS_LARGE)]
    costs = compete(folder / "large", columns, rows, N_LARGE)
    print(f"\n{N_LARGE} shards, {size_mb} MB of float16")
    print_table(
        ("", "seconds", "ratio to cat", "peak MB"),
        [
            (name, f"{c.wall_s:.2f}", f"{c.wall_s / costs['cat'].wall_s:.2f}", f"{c.peak_mb:.0f}")
            for name, c in costs.items()
        ],
    )
    ratio = costs["join"].wall_s / costs["cat"].wall_s
    met = [judge("join over cat", ratio, 1.5), judge("peak memory", costs["join"].peak_mb, 128, " MB")]
    return all(met)


def bench_small(folder: Path, n_shards: int) -> bool:
    costs = compete(folder / "small", SMALL, small_rows(), n_shards)
    cpu_ms = {name: cost.cpu_s / n_shards * 1e3 for name, cost in costs.items()}
    print(f"\n{n_shards:,} shards of {ROWS_SMALL} small rows")
    print_table(
        ("", "CPU ms a shard", "ratio to h5py", "seconds", "peak MB"),
        [
            (name, f"{ms:.3f}", f"{ms / cpu_ms['naive h5py']:.2f}", f"{c.wall_s:.2f}", f"{c.peak_mb:.0f}")
            for (name, c), ms in zip(costs.items(), cpu_ms.values(), strict=True)
        ],
    )
    return judge("CPU of join over plain h5py", cpu_ms["join"] / cpu_ms["naive h5py"], 0.15)


def bench_writing(folder: Path) -> bool:
    """One shard, over and over; an fsync waits, and takes no CPU time to speak of."""
    rows, n_times = small_rows(), 300
    writers: dict[str, Callable[[], object]] = {
        "write_shard": lambda: write_part(folder, SMALL, 0, rows),
        "h5py": lambda: write_with_h5py(folder / "naive.h5", columns_of(rows)),
    }
    best = dict.fromkeys(writers, float("inf"))
    for name, writer in [*writers.items()] * N_ROUNDS:
        start = time.process_time()
        for _ in range(n_times):
            writer()
        best[name] = min(best[name], (time.process_time() - start) / n_times * 1e3)
    print(f"\nwriting {ROWS_SMALL} small rows")
    print_table(("", "CPU ms a shard"), [(name, f"{cpu_ms:.2f}") for name, cpu_ms in best.items()])
    return judge("CPU of write_shard", best["write_shard"], 1.5, " ms a shard")


def compete(folder: Path, columns: Columns, rows: Sequence[Mapping[str, Any]], n_shards: int) -> dict[str, Cost]:
    """The best of each contender, over shards that all have these rows."""
    folder.mkdir()
    parts = [write_part(folder, columns, shard, rows) for shard in range(n_shards)]
    contenders = {"cat": cat, "join": join_parts, "naive h5py": naive}
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name, contender in [*contenders.items()] * N_ROUNDS:
            target = folder / "target"
            costs[name].append(pool.apply(measure, (contender, parts, columns, target)))
            if name == "join" and (problems := verify_joined(target)):
                raise SystemExit(f"the joined file is not whole: {problems}")
            target.unlink()
    shutil.rmtree(folder)
    return {name: Cost(*map(min, zip(*found, strict=True))) for name, found in costs.items()}


def measure(contender: Callable[..., None], *arguments: Any) -> Cost:
    before, start = os.times(), time.perf_counter()
    contender(*arguments)
    wall_s, after = time.perf_counter() - start, os.times()
    return Cost(wall_s, sum(after[:4]) - sum(before[:4]), peak_memory_bytes() / 2**20)


def cat(parts: Sequence[Part], _: Columns, target: Path) -> None:
    with open(target, "wb") as file:
        subprocess.run(["cat", *(path for _, path, *_ in parts)], stdout=file, check=True)
        os.fsync(file.fileno())


def join_parts(parts: Sequence[Part], columns: Columns, target: Path) -> None:
    sources, n_items = [Source(*part) for part in parts], parts[-1][-1]
    join(sources, columns, fingerprints=[FINGERPRINT], n_items=n_items, target=target, attributes={})


def naive(parts: Sequence[Part], columns: Columns, target: Path) -> None:
    """What one would write in ten minutes: read everything, concatenate, write."""
    read: dict[str, list[Any]] = {}
    for _, path, *_ in parts:
        with h5py.File(path, "r", locking=False) as file:
            for name, node in file.items():
                if isinstance(node, h5py.Dataset):
                    read.setdefault(name, []).append(node[:])
                else:
                    offsets = read.setdefault(f"{name}/offsets", [np.zeros(1, "i8")])
                    offsets.append(node["offsets"][1:] + offsets[-1][-1])
                    read.setdefault(f"{name}/values", []).append(node["values"][:])
    whole = {name: np.concatenate(values) for name, values in read.items()}
    write_with_h5py(target, whole)


def write_with_h5py(path: Path, datasets: Mapping[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file.create_dataset(name, data=values)
    with open(path, "rb") as written:
        os.fsync(written.fileno())


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same rows as h5py's users store them: texts as its strings of variable length."""
    texts = [row["shout"].decode() for row in rows]
    numbers = {name: np.array([row[name] for row in rows]) for name in ("score", "n_words")}
    return {"index": np.arange(len(rows)), **numbers, "shout": texts, "error": [""] * len(rows)}


def small_rows() -> list[dict[str, Any]]:
    plain = [{"score": n / 7, "n_words": n, "shout": "Größe " * (n % 9)} for n in range(ROWS_SMALL)]
    return [convert_row(SMALL, row) for row in plain]


def write_part(folder: Path, columns: Columns, shard: int, rows: Sequence[Mapping[str, Any]]) -> Part:
    path, start, stop = folder / shard_name(shard), shard * len(rows), (shard + 1) * len(rows)
    made_by: MadeBy = {"attempt": "1234_5.0", "started": 1.8e9, "seconds": 60.0, "code": None}
    write_shard(path, columns, start=start, rows=rows, fingerprint=FINGERPRINT, notes={}, made_by=made_by)
    return shard, path, start, stop


if __name__ == "__main__":
    raise SystemExit(main())
