"""Planning over one JSONL file, beside `cat` of it and a plain loop over its lines; then reading it in batches.

Then the same for the file in gzip, beside what the module gzip reads; a tar file, read in order, beside a loop with
`tarfile` alone; and a folder, listed and read, beside `os.walk`.

    python -m tests.benchmarks.bench_inputs [--size-mb 1000] [--folder DIR]

Every figure is the best of three in this run, with the file in the page cache unless it is larger than the memory.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slurmgpu.inputs import InputSpec, Reader, list_files, scan
from slurmgpu.inputs.file_items import FILE, Files
from tests.benchmarks import judge_least

BATCH = 16
N_BATCHES = 2000

MB_S = 300
"""The least speed of planning a file of lines."""
OF_LIBRARY = 0.8
"""The least share of the speed at which the library alone reads a compressed file or a tar file."""


def main() -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mb", type=int, default=1000, help="size of the JSONL file (default: 1000)")
    parser.add_argument("--folder", type=Path, help="where to write it (default: the temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path, index = Path(folder) / "input.jsonl", Path(folder) / "index"
        size_mb = write_jsonl(path, arguments.size_mb)
        cat_s = best(lambda: subprocess.run(f"cat {path} > /dev/null", shell=True, check=True))
        loop_s = best(lambda: count_lines(path))
        plan_s = best(lambda: scan([path], index, stride=BATCH))
        spec = scan([path], index, stride=BATCH)
        read_s = best(lambda: read_batches(spec, index))
        print(f"{size_mb:.0f} MB, {spec.n_items} items, index {index.stat().st_size / 1e6:.1f} MB")
        for name, seconds in (("cat", cat_s), ("for line in file", loop_s), ("scan", plan_s)):
            speed = f"{size_mb / seconds:6.0f} MB/s"
            print(f"{name:18} {speed}   {seconds / cat_s:5.2f} x cat   {seconds / loop_s:5.2f} x loop")
        lines_mb_s = size_mb / plan_s
        n_read = min(N_BATCHES, spec.n_items // BATCH) * BATCH
        print(f"{'Reader.read':18} {read_s / n_read * 1e6:6.2f} us/item   random batches of {BATCH}")
        packed = Path(folder) / "input.jsonl.gz"
        subprocess.run(f"gzip -c {path} > {packed}", shell=True, check=True)
        gzip_s = best(lambda: read_gzip(packed))
        gzip_loop_s = best(lambda: parse_gzip(packed))
        plan_s = best(lambda: scan([packed], index, stride=BATCH))
        spec = scan([packed], index, stride=BATCH)
        read_s = best(lambda: read_all(spec, index))
        print(f"{packed.stat().st_size / 1e6:.0f} MB in gzip, {spec.files[0].size_bytes / 1e6:.0f} MB repacked")
        figures = (("gzip", gzip_s), ("gzip and json", gzip_loop_s), ("scan", plan_s), ("Reader.read of all", read_s))
        for name, seconds in figures:
            speed = f"{size_mb / seconds:6.0f} MB/s"
            print(
                f"{name:18} {speed}   {gzip_s / seconds:5.2f} of gzip   {gzip_loop_s / seconds:5.2f} of gzip and json"
            )
        path.unlink()
        of_tar = compare_tar(Path(folder), arguments.size_mb / 5)
        compare_folder(Path(folder))
    results = [judge_least("planning lines", lines_mb_s, MB_S, " MB/s")]
    for what, found in {"planning gzip": gzip_s / plan_s, "reading gzip": gzip_s / read_s, **of_tar}.items():
        results.append(judge_least(what, found, OF_LIBRARY, " x"))
    return 0 if all(results) else 1


def compare_tar(folder: Path, size_mb: float) -> dict[str, float]:
    """Print how fast a tar file is read, in MB/s and beside `tarfile`; its planning and reading by the latter."""
    path, index = folder / "input.tar", folder / "index"
    n_items = round(size_mb * 1e6 / 21_000)
    write_tar(path, n_items)
    size_mb = path.stat().st_size / 1e6
    spec = scan([path], index, stride=BATCH)
    assert spec.n_items == n_items
    loop_s, plan_s, read_s = best_of(
        lambda: read_tar(path), lambda: scan([path], index, stride=BATCH), lambda: read_all(spec, index)
    )
    print(f"tar: {size_mb:.0f} MB, {n_items} items of a picture and its JSON")
    for name, seconds in (("tarfile", loop_s), ("scan", plan_s), ("Reader.read", read_s)):
        print(f"{name:18} {size_mb / seconds:6.0f} MB/s   {loop_s / seconds:5.2f} x the speed of tarfile")
    return {"planning tar": loop_s / plan_s, "reading tar": loop_s / read_s}


def compare_folder(folder: Path, n_files: int = 20_000) -> None:
    """Print how long a folder's files take to be listed, planned and read as items, for each."""
    for number in range(n_files):
        path = folder / "images" / f"{number % 100:02}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    index, listing = folder / "index", folder / FILE

    def plan() -> InputSpec:
        found = list_files("images", folder)
        assert found is not None
        found.write(listing)
        return scan([listing], index, stride=BATCH, of_format=Files())

    walk_s = best(lambda: sum(len(files) for _, _, files in os.walk(folder / "images")))
    plan_s = best(plan)
    spec = plan()
    read_s = best(lambda: read_all(spec, index))
    print(f"folder: {n_files} files")
    for name, seconds in (("os.walk", walk_s), ("list and scan", plan_s), ("Reader.read", read_s)):
        print(f"{name:18} {seconds / n_files * 1e6:6.2f} us/file")


def write_jsonl(path: Path, size_mb: int) -> float:
    """Write objects with texts of 20 to 2000 characters; returns the size in MB."""
    rng = random.Random(7)
    texts = ["".join(rng.choices("etaoin shrdlu", k=rng.randint(20, 2000))) for _ in range(1000)]
    block = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    with open(path, "wb") as file:
        for _ in range(-(-size_mb * 1_000_000 // len(block))):
            file.write(block)
    return path.stat().st_size / 1e6


def write_tar(path: Path, n_items: int) -> None:
    """Write items of 20 kB and a little JSON."""
    content = random.Random(7).randbytes(20_000)
    with tarfile.open(path, "w") as archive:
        for number in range(n_items):
            for suffix, part in (("jpg", content), ("json", b'{"label": 3}')):
                member = tarfile.TarInfo(f"{number:08}.{suffix}")
                member.size = len(part)
                archive.addfile(member, io.BytesIO(part))


def read_tar(path: Path) -> int:
    n_bytes = 0
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            n_bytes += len(file.read())
    return n_bytes


def read_all(spec: InputSpec, index: Path) -> None:
    with Reader(spec, index) as reader:
        for start in range(0, spec.n_items, BATCH):
            reader.read(start, min(start + BATCH, spec.n_items))


def count_lines(path: Path) -> int:
    n_lines = 0
    with open(path) as file:
        for _ in file:
            n_lines += 1
    return n_lines


def read_batches(spec: InputSpec, index: Path) -> None:
    batches = range(spec.n_items // BATCH)
    chosen = random.Random(7).sample(batches, min(N_BATCHES, len(batches)))
    with Reader(spec, index) as reader:
        for batch in chosen:
            reader.read(batch * BATCH, (batch + 1) * BATCH)


def read_gzip(path: Path) -> None:
    with gzip.open(path) as file:
        while file.read(1 << 20):
            pass


def parse_gzip(path: Path) -> None:
    with gzip.open(path) as file:
        for line in file:
            json.loads(line)


def best(action: Callable[[], object]) -> float:
    """Seconds of the fastest of three calls."""
    [seconds] = best_of(action)
    return seconds


def best_of(*actions: Callable[[], object]) -> list[float]:
    """Seconds of the fastest of three calls of each, in turns, so that other work on the machine meets all alike."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(3):
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


if __name__ == "__main__":
    sys.exit(main())
