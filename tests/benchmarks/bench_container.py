"""What a container image adds to the start of a task, and to an array of 40 tasks.

    python -m tests.benchmarks.bench_container [--quick]

The image is the tests' own: empty folders, in which this very Python runs through binds, so that both sides import the
same files. Baseline of the start: `apptainer exec IMAGE true` with the same binds. What the image adds to a task is its
time in the image less its time without, run in turns; the look at the node, its binds and the image, the runtime's
version and the worker's account of what it finds inside are all in it. Baseline of the array: the same array without.
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
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from slurmgpu.plan.planner import draft_run
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from tests.benchmarks import judge, print_table, private_slurm, write_project
from tests.benchmarks.bench_overhead import SMALL_ROWS, check, wall
from tests.support.images import Apptainer, make_images

HOME = Path(__file__).parents[2]
LIMIT = 1.3
N_TASKS = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a smaller array")
    arguments = parser.parse_args(argv)
    if shutil.which("apptainer") is None:
        sys.exit("apptainer is not on PATH")
    # Root in a container may lack a capability that the runtime asks for.
    env = {"APPTAINER_DROP_CAPS": "CAP_SYS_RESOURCE"} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="slurmgpu-bench-") as folder, mock.patch.dict(os.environ, env):
        images = make_images(Path(folder))
        met = judge_start(Path(folder), images, n_rounds=5 if arguments.quick else 25)
        measure_array(Path(folder), images, n_tasks=8 if arguments.quick else N_TASKS)
    return 0 if met else 1


def judge_start(folder: Path, images: Apptainer, n_rounds: int) -> bool:
    """Print what starting in the image costs; whether it is within the target."""
    binds = (f"--bind={bind}" for bind in images.binds)
    bare_command = ["apptainer", "--quiet", "exec", *binds, str(images.sif), "true"]
    bare, plain, inside = [], [], []
    for number in range(n_rounds):
        bare.append(wall(bare_command))
        plain.append(task(folder / f"plain{number}", {}))
        inside.append(task(folder / f"inside{number}", {"container": images.table()}))
    added = statistics.median(b - a for a, b in zip(plain, inside, strict=True))
    bare_s, plain_s, inside_s = map(statistics.median, (bare, plain, inside))
    print(f"a task of one shard, seconds, median of {n_rounds} in turns")
    rows = [
        ("apptainer exec IMAGE true", bare_s),
        ("task without the image", plain_s),
        ("task in the image", inside_s),
        ("added by the image", added),
    ]
    print_table(("what", "seconds", "over exec true"), [(name, f"{s:.3f}", f"{s / bare_s:.2f}") for name, s in rows])
    return judge("added by the image over apptainer exec IMAGE true", added / bare_s, LIMIT)


def task(project: Path, tables: dict[str, object]) -> float:
    """Seconds of a task that computes a run of one shard."""
    run = planned(project, 32, {"sample_s": 0.0, "shard_items": 32, **tables})
    code = (
        "from pathlib import Path; from slurmgpu.run.records import Attempt; from slurmgpu.run.directory import Run; "
        "from slurmgpu.task.supervisor import Task; import sys; "
        "sys.exit(Task(Run.open(Path(sys.argv[1])), Attempt('bench', 0, device='cpu')).run_worker())"
    )
    seconds = wall([sys.executable, "-c", code, str(run.folder)])
    check(run)
    return seconds


def planned(project: Path, n_items: int, tables: dict[str, object]) -> Run:
    """A run directory that nobody has worked on."""
    run_file = write_project(project, n_items, f"{SMALL_ROWS}:SmallRows", **tables)
    with draft_run(run_file) as draft:
        return create_run(draft.run_dir, draft.plan, draft.items.files)


def measure_array(folder: Path, images: Apptainer, n_tasks: int) -> None:
    """Print the time of an array in the image beside the same array without."""
    with private_slurm() as cluster:
        if cluster is None:
            return
        seconds = [array(folder / name, n_tasks, tables) for name, tables in arrays(images)]
    plain, inside = seconds
    print(f"an array of {n_tasks} tasks, from submit to its report: {inside / plain:.2f} times that without the image")


def arrays(images: Apptainer) -> list[tuple[str, dict[str, object]]]:
    """The two arrays: without the image, and in it."""
    return [("array-plain", {}), ("array-inside", {"container": images.table()})]


def array(project: Path, n_tasks: int, tables: dict[str, object]) -> float:
    """Seconds from submission to the report of an array of tasks that have four shards each."""
    write_project(project, 4 * 32 * n_tasks, f"{SMALL_ROWS}:SmallRows", shard_items=32, **tables)
    command = [sys.executable, "-m", "slurmgpu", "submit", "--gpus", "0", "--tasks", str(n_tasks), "--wait"]
    start = time.perf_counter()
    subprocess.run(command, cwd=project, env={**os.environ, "PYTHONPATH": str(HOME)}, check=True, capture_output=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
