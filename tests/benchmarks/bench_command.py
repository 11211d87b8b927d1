"""What a run of `use = "command"` costs over the same program without it, for items, slices and a stream.

python -m tests.benchmarks.bench_command [--quick]

Items are compared with GNU `xargs -P 1`, one process each; slices with the bare script over the same halves of the
input, each of which loads its model; a stream with the bare script over all of it. Commands and baselines take turns.
The start of a task and the merge are left out: seconds count from its first shard to the end of its last one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurmgpu.api import submit
from tests.benchmarks import judge, print_table, write_project

SCRIPT = """
import json, os, sys, time

LOAD_S, ITEM_S = {load_s}, {item_s}

def answer(text):
    time.sleep(ITEM_S)  # as a program waits for its GPU
    return {{"n": len(text)}}

mode, *paths = sys.argv[1:]
if mode == "one":
    print(json.dumps(answer(paths[0])))
    sys.exit()
time.sleep(LOAD_S)
if mode == "stream":
    print(json.dumps({{"ready": True}}), flush=True)
    for line in sys.stdin:
        item = json.loads(line)
        print(json.dumps({{"index": item["index"], **answer(item["data"]["text"])}}), flush=True)
else:
    with open(paths[0]) as items, open(paths[1], "w") as rows:
        for index, line in enumerate(items):
            item = json.loads(line)
            data = item.get("data", item)
            print(json.dumps({{"index": item.get("index", index), **answer(data["text"])}}), file=rows)
"""
PYTHON = [sys.executable, "-S", "script.py"]
RUN = {
    "one": [*PYTHON, "one", "{text}"],
    "batches": [*PYTHON, "one", "{text}"],
    "slice": [*PYTHON, "slice", "{in}", "{out}"],
    "stream": [*PYTHON, "stream"],
}
TARGETS = {"batches": 1.15, "slice": 1.03, "stream": 1.03}
TITLES = {
    "one": "an item a call, a shard an item",
    "batches": "an item a call, 16 a shard",
    "slice": "slices",
    "stream": "a stream",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer items and rounds")
    arguments = parser.parse_args(argv)
    n_rounds, scale = (1, 1) if arguments.quick else (3, 4)
    # Shards of one item are for programs that take seconds. A batch of the stream takes 0.6 s.
    sizes = {
        "one": (100 * scale, 0.0, 0.02),
        "batches": (100 * scale, 0.0, 0.02),
        "slice": (1000 * scale, 0.2, 0.002),
        "stream": (100 * scale, 0.2, 0.02),
    }
    ratios, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for mode, (n_items, load_s, item_s) in sizes.items():
            pairs = [measure(Path(folder), mode, n_items, load_s, item_s, n) for n in range(n_rounds)]
            ours, bare = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratios[mode] = statistics.median(mine / theirs for mine, theirs in pairs)
            rows.append((TITLES[mode], f"{n_items:,}", f"{ours:.2f}", f"{bare:.2f}", f"{ratios[mode]:.3f}"))
    print(f"seconds, median of {n_rounds}")
    print_table(("mode", "items", "command", "baseline", "ratio"), rows)
    results = [judge(TITLES[mode], ratios[mode], target, " x") for mode, target in TARGETS.items()]
    return 0 if all(results) else 1


def measure(folder: Path, mode: str, n_items: int, load_s: float, item_s: float, number: int) -> tuple[float, float]:
    """Seconds of the run, and of the baseline; which goes first alternates."""
    project = folder / f"{mode}-{number}"
    settings = {"run": RUN[mode], "columns": {"n": "int32"}, "stream": mode == "stream"}
    tables = {"settings": settings, "resources": {"gpus": 0, "executor": "local"}}
    run_file = write_project(project, n_items, "command", html=False, **tables)
    if size := {"slice": n_items // 2, "batches": 16}.get(mode):
        table = f"[workload]\nbatch_size = {size}"
        run_file.write_text(run_file.read_text().replace("[workload]", table))
    (project / "script.py").write_text(SCRIPT.format(load_s=load_s, item_s=item_s))
    calls: list[Callable[[], float]] = [lambda: ours(run_file), lambda: bare(project, mode)]
    times = {call: call() for call in (calls if number % 2 else calls[::-1])}
    # A stream has loaded its model before the task is ready.
    return times[calls[0]], times[calls[1]] - (load_s if mode == "stream" else 0.0)


def ours(run_file: Path) -> float:
    """Seconds in which a task computes the shards."""
    run = submit(run_file, executor="local").run
    [record] = run.attempts()
    if len(run.published()) != run.plan.n_shards or record["n_errors"]:
        raise RuntimeError(f"the run was not computed as it should: {record}")
    return max(started + seconds for _, started, seconds, *_ in record["published"]) - min(
        started for _, started, *_ in record["published"]
    )


def bare(project: Path, mode: str) -> float:
    """Seconds of the program without slurmgpu."""
    items = project / "items.jsonl"
    if mode in ("one", "batches"):
        texts = "".join(json.loads(line)["text"] + "\n" for line in items.read_text().splitlines())
        command = ["xargs", "-d", "\n", "-P", "1", "-n", "1", *PYTHON, "one"]
        return wall(command, project, texts)
    lines = items.read_text().splitlines(keepends=True)
    size = len(lines) // 2 if mode == "slice" else len(lines)
    seconds = 0.0
    for begin in range(0, len(lines), size):
        part = project / f"part{begin}.jsonl"
        part.write_text("".join(lines[begin : begin + size]))
        seconds += wall([*PYTHON, "slice", str(part), str(project / "bare.jsonl")], project)
    return seconds


def wall(command: Sequence[str], folder: Path, given: str = "") -> float:
    """Seconds that a command takes."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
