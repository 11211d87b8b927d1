"""How long `slurmgpu --help`, `status` and `list` take, and how many files a run leaves for each task.

    python -m tests.benchmarks.bench_front [--quick]

Each time is the median of several, in turns, of whole processes; beside them an empty Python, the import of what every
command needs, and `squeue`, which `status` calls once. The run of `status` has 2,000 shards, of which 1,936 are really
published, and the records of 64 tasks at work, dealt out of the one that has published them. `list` has 1,000 runs that
have ended, beside a loop that parses their run.json, report.json and submissions.jsonl. The files are counted after a
real run of eight tasks on the private test cluster. How fast planning is: bench_inputs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from slurmgpu.plan.planner import draft_run
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt
from slurmgpu.run.submissions import Submission
from slurmgpu.task.supervisor import Task
from slurmgpu.util.atomic_files import write_json
from tests.benchmarks import judge, print_table, private_slurm, write_project
from tests.benchmarks.small_rows import BATCH
from tests.cluster import Cluster

HOME = Path(__file__).parents[2]
USE = f"{Path(__file__).with_name('small_rows.py')}:SmallRows"
N_SHARDS, N_TASKS = 2000, 64
N_LISTED = 1000
BASELINE = "import typer, rich.console"
PARSE = "parsing the files of list"
LIMIT_HELP, LIMIT_STATUS, LIMIT_LIST = 1.6, 2.2, 12
LIMIT_FILES = 12
N_COUNTED = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 15")
    arguments = parser.parse_args(argv)
    with (
        mock.patch.dict(os.environ, PYTHONPATH=str(HOME)),
        private_slurm() as cluster,
        tempfile.TemporaryDirectory() as scratch,
    ):
        run = run_at_work(Path(scratch) / "status", cluster)
        listed = ended_runs(Path(scratch) / "list")
        seconds = time_commands(run, listed, 3 if arguments.quick else 15, cluster is not None)
        unit = middle(seconds[BASELINE])
        print_table(
            ("", "median s", "slowest s", f"x {BASELINE}"),
            [
                (name, f"{middle(times):.3f}", f"{max(times):.3f}", f"{middle(times) / unit:.2f}")
                for name, times in seconds.items()
            ],
        )
        limits = {"slurmgpu --help": LIMIT_HELP, "slurmgpu status": LIMIT_STATUS}
        met = [judge(name, middle(seconds[name]) / unit, limit, f" x {BASELINE}") for name, limit in limits.items()]
        times = middle(seconds["slurmgpu list"]) / middle(seconds[PARSE])
        met.append(judge(f"slurmgpu list of {N_LISTED:,} runs", times, LIMIT_LIST, f" x {PARSE}"))
        if cluster is not None:
            met.append(judge_files(Path(scratch) / "files"))
    return 0 if all(met) else 1


middle = statistics.median


def time_commands(run: Run, listed: Path, n_rounds: int, has_slurm: bool) -> dict[str, list[float]]:
    """Seconds of each command in each round; the round before the first, which fills caches, does not count."""
    python, slurmgpu = sys.executable, str(Path(sys.executable).with_name("slurmgpu"))
    commands = {
        "python -c pass": [python, "-c", "pass"],
        BASELINE: [python, "-c", BASELINE],
        "slurmgpu --help": [slurmgpu, "--help"],
        "slurmgpu status": [slurmgpu, "status", str(run.folder)],
        PARSE: [python, "-c", PARSING, str(listed)],
        "slurmgpu list": [slurmgpu, "list", str(listed), "--json"],
    }
    if has_slurm:
        commands["squeue"] = ["squeue", "--noheader", "--format", "%i|%T|%r|%E"]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(n_rounds + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if number:
                times[name].append(time.perf_counter() - start)
            elif name == "slurmgpu status" and f"{N_SHARDS - N_TASKS:,} of {N_SHARDS:,} shards" not in done.stdout:
                raise RuntimeError(f"not the status that was meant:\n{done.stdout}")
    return times


def run_at_work(folder: Path, cluster: Cluster | None) -> Run:
    """A run as it looks while 64 tasks work on their last shard each; its jobs wait in the queue of `cluster`."""
    run_file = write_project(folder, N_SHARDS * BATCH, USE, shard_items=BATCH)
    with draft_run(run_file) as draft:
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
    one = Task(run, Attempt("1", 0, executor="debug", device="cpu"))
    if one.run_in_process(lambda: None):
        raise RuntimeError(f"the shards could not be made: {one.record}")
    [record] = run.attempts()
    (run.tasks / f"{record['attempt']}.json").unlink()
    open_shards = range(N_SHARDS - N_TASKS, N_SHARDS)
    jobs = queued_jobs(cluster) if cluster is not None else {}
    for number, shard in enumerate(open_shards):
        run.shard_path(shard).unlink()
        name = f"{jobs.get('array_job', 'local1')}_{number}.0"
        published = record["published"][number : N_SHARDS - N_TASKS : N_TASKS]
        own = {"attempt": name, "task": number, "state": "running", "ended": None, "reason": None, "shard": shard}
        own |= {"published": published, "n_items": len(published) * BATCH}
        write_json(run.tasks / f"{name}.json", {**record, **own})
    submission = Submission(1, "slurm" if jobs else "local", "cpu", N_TASKS, N_TASKS, 1)
    run.record_submission(submission.to_json())
    line: Any = {"submission": 1, "state": "queued" if jobs else "running", **jobs}
    run.record_submission(line)
    return run


PARSING = """
import json, pathlib, sys
for folder in pathlib.Path(sys.argv[1]).iterdir():
    for name in ("run.json", "report.json"):
        json.loads((folder / name).read_bytes())
    list(map(json.loads, (folder / "submissions.jsonl").read_bytes().splitlines()))
"""


def ended_runs(folder: Path) -> Path:
    """A folder of runs that have ended, all copies of one."""
    run_file = write_project(folder.with_name("listed"), 2 * BATCH, USE, shard_items=BATCH)
    command = [sys.executable, "-m", "slurmgpu", "submit", str(run_file), "--executor", "debug", "--gpus", "0"]
    subprocess.run(command, check=True, capture_output=True)
    for number in range(N_LISTED):
        shutil.copytree(run_file.with_name("run"), folder / f"{number:04d}")
    return folder


def queued_jobs(cluster: Cluster) -> Mapping[str, str]:
    """An array and a job that waits for it, in the queue to stay."""
    quiet = ("--output=/dev/null", "--wrap", "true")
    array = cluster.run("sbatch", "--parsable", "--hold", f"--array=0-{N_TASKS - 1}", *quiet).strip()
    merge = cluster.run("sbatch", "--parsable", f"--dependency=afterany:{array}", *quiet).strip()
    return {"array_job": array, "merge_job": merge}


def judge_files(folder: Path) -> bool:
    """Whether a real run of eight tasks has few enough files beside its shards and claims; all of them are counted."""
    run_file = write_project(folder, 200 * BATCH, USE, shard_items=BATCH)
    command = [sys.executable, "-m", "slurmgpu", "submit", str(run_file), "--device", "cpu", "--array", "--wait"]
    subprocess.run([*command, "--gpus", str(N_COUNTED)], check=True, capture_output=True)
    run = Run.open(folder / "run")
    paths = [path.relative_to(run.folder) for path in run.folder.rglob("*") if path.is_file()]
    counts = Counter(path.parts[0] if len(path.parts) > 1 else "beside" for path in paths)
    print(f"files after a run of {N_COUNTED} tasks: {', '.join(f'{name} {n}' for name, n in sorted(counts.items()))}")
    n_files = sum(n for name, n in counts.items() if name not in ("shards", "claims"))
    return judge("files for each task", n_files / N_COUNTED, LIMIT_FILES)


if __name__ == "__main__":
    sys.exit(main())
