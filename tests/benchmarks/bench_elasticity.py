"""Makespan of an elastic array of eight tasks over the ideal one, beside the same work split statically by Submitit.

    python -m tests.benchmarks.bench_elasticity [--quick] [--rounds N]

On the private test cluster, with a workload that sleeps, so that eight tasks share two cores without harm. The makespan
runs from the moment the first task is ready to the publication of the last shard; the ideal is total work over total
speed: every task counts from the first one's readiness on, except those that the case holds back, which count from
their own, and the one that is killed, which counts until then. Claims, publication, leases that have to run out, shards
begun in vain and tasks that Slurm starts one after another are all above the ideal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import submitit

from slurmgpu.report.report_file import read_report
from slurmgpu.run.directory import Run
from tests.benchmarks import judge, print_table, private_slurm, write_project
from tests.benchmarks.sleeping import BATCH, sleep_share
from tests.cluster import Cluster

HOME = Path(__file__).parents[2]
N_TASKS = 8
LIMIT = 1.10
QUICK_LIMIT = 1.25  # the start of eight processes and the wait for a lease weigh four times as much
VICTIM = 5


@dataclass(frozen=True)
class Size:
    """How much there is to do: `share_s` seconds for each of eight equal tasks, in shards of `shard_s`."""

    share_s: float
    shard_s: float
    lease_s: float

    @property
    def item_s(self) -> float:
        return self.shard_s / BATCH

    @property
    def share_items(self) -> int:
        return round(self.share_s / self.item_s)


FULL, QUICK = Size(40.0, 0.5, 2.0), Size(10.0, 0.25, 1.0)


@dataclass(frozen=True)
class Case:
    """What happens: how many times slower some tasks are, how many start late, and whether one is killed."""

    name: str
    slow: Mapping[int, float] = field(default_factory=dict)
    n_late: int = 0
    kills: bool = False


CASES = (
    Case("equal tasks"),
    Case("one task 4x slower", slow={VICTIM: 4.0}),
    Case("four tasks start late", n_late=4),
    Case("one task killed half-way", kills=True),
)


@dataclass(frozen=True)
class Measured:
    """Seconds: from the first task's readiness to the end of the last shard or share, the ideal, and from sbatch on."""

    makespan_s: float
    ideal_s: float
    full_s: float

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.ideal_s


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 s for each task instead of 40 s")
    parser.add_argument("--rounds", type=int, default=1, help="how often each case is measured (the median counts)")
    arguments = parser.parse_args(argv)
    size = QUICK if arguments.quick else FULL
    with (
        mock.patch.dict(os.environ, PYTHONPATH=str(HOME)),
        private_slurm() as cluster,
        tempfile.TemporaryDirectory() as scratch,
    ):
        if cluster is None:
            return 1
        print(
            f"{N_TASKS} tasks, {size.share_s:g} s of work for each; {N_TASKS * size.share_items // BATCH} shards of "
            f"{size.shard_s:g} s; leases of {size.lease_s:g} s; median of {arguments.rounds}"
        )
        results = [measure(cluster, Path(scratch), case, size, arguments.rounds) for case in CASES]
    contender = ("from sbatch", "over ideal")
    header = ("seconds", "ideal", "elastic", *contender, "| static:", "makespan", *contender)
    print_table(header, [row(case, *result) for case, result in zip(CASES, results, strict=True)])
    limit = QUICK_LIMIT if arguments.quick else LIMIT
    verdicts = [judge(case.name, elastic.ratio, limit) for case, (elastic, _) in zip(CASES, results, strict=True)]
    return 0 if all(verdicts) else 1


def row(case: Case, elastic: Measured, static: Measured) -> tuple[str, ...]:
    times = (elastic.ideal_s, elastic.makespan_s, elastic.full_s)
    cells = [f"{seconds:.1f}" for seconds in times] + [f"{elastic.ratio:.3f}", "|"]
    cells += [f"{static.makespan_s:.1f}", f"{static.full_s:.1f}"]
    cells.append(f"1/{N_TASKS} lost" if case.kills else f"{static.ratio:.3f}")
    return case.name, *cells


def measure(cluster: Cluster, scratch: Path, case: Case, size: Size, n_rounds: int) -> tuple[Measured, Measured]:
    """A case with slurmgpu and with a static split; of several rounds the ones with the median ratio."""
    slug = case.name.replace(" ", "-")
    rounds: tuple[list[Measured], list[Measured]] = ([], [])
    for number in range(n_rounds):
        for results, run_once in zip(rounds, (elastic, static), strict=True):
            folder = scratch / f"{slug}-{run_once.__name__}-{number}"
            results.append(run_once(cluster, folder, case, size))
            print(f"  {case.name}, {run_once.__name__}: {results[-1].ratio:.3f}", file=sys.stderr, flush=True)
    first, second = (sorted(results, key=lambda result: result.ratio)[n_rounds // 2] for results in rounds)
    return first, second


def elastic(cluster: Cluster, folder: Path, case: Case, size: Size) -> Measured:
    """The case with slurmgpu; raises unless every item has its row."""
    settings = {"marks": str(folder), "item_s": size.item_s, "slow": {str(k): v for k, v in case.slow.items()}}
    use = f"{Path(__file__).with_name('sleeping.py')}:Sleeping"
    tables = {"shard_items": BATCH, "lease_s": size.lease_s, "settings": settings}
    run_file = write_project(folder, N_TASKS * size.share_items, use, **tables)
    with Happening(cluster, folder, case, size) as happening:
        command = [sys.executable, "-m", "slurmgpu", "submit", str(run_file), "--device", "cpu", "--array"]
        subprocess.run([*command, "--gpus", str(N_TASKS)], check=True, stdout=subprocess.DEVNULL)
        run = Run.open(folder / "run")
        happening.follow(lambda: len(run.published()) == run.plan.n_shards)
        # The link that publishes a shard is the last change of its inode.
        end = max(path.stat().st_ctime for path in run.shards.glob("*.h5"))
        cluster.wait_until(lambda: not cluster.run("squeue", "-h"), "the merge had ended")
    report = read_report(run)
    if not report or not report["complete"] or report["n_errors"]:
        raise RuntimeError(f"the run is incomplete: {report}")
    return happening.measured(end)


def static(cluster: Cluster, folder: Path, case: Case, size: Size) -> Measured:
    """The same with one share for each task of a plain `submitit.map_array`."""
    folder.mkdir()
    seconds = [size.item_s * case.slow.get(number, 1.0) for number in range(N_TASKS)]
    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(time=30, gpus_per_node=1, array_parallelism=N_TASKS)
    n_shares = N_TASKS - case.kills  # the share of a task that was killed is never done
    with Happening(cluster, folder, case, size) as happening:
        shares = [range(N_TASKS), [size.share_items] * N_TASKS, seconds, [str(folder)] * N_TASKS]
        executor.map_array(sleep_share, *shares)
        happening.follow(lambda: len(read_marks(folder, "done")) == n_shares)
        end = max(mark["at"] for mark in read_marks(folder, "done").values())
        cluster.wait_until(lambda: not cluster.run("squeue", "-h"), "the array had ended")
    return happening.measured(end)


class Happening:
    """What befalls a run from outside, at its time: GPUs that another job holds for a while, a task that is killed."""

    def __init__(self, cluster: Cluster, folder: Path, case: Case, size: Size) -> None:
        self.cluster, self.folder, self.case, self.size = cluster, folder, case, size
        self.released: float | None = None
        self.killed: float | None = None

    def __enter__(self) -> Happening:
        if self.case.n_late:
            gpus = f"--gres=gpu:{self.case.n_late}"
            wrap = ("--output=/dev/null", "--nodelist=gpu2", "--wrap", "sleep 3600")
            self.holder = self.cluster.run("sbatch", "--parsable", gpus, *wrap).strip()
            asked = ("squeue", "-h", "-j", self.holder, "-o", "%T")
            self.cluster.wait_until(lambda: self.cluster.run(*asked).strip() == "RUNNING", "the GPUs were held")
        self.submitted = time.time()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is not None:
            self.cluster.run("scancel", "--user=root", check=False)

    def follow(self, finished: Callable[[], bool]) -> None:
        """Return when `finished()`, having done to the run what the case asks for."""
        self.cluster.wait_until(lambda: bool(read_marks(self.folder, "ready")), "the first task was ready")
        deadline = time.time() + 20 * self.size.share_s
        while not finished():
            if time.time() > deadline:
                raise RuntimeError(f"{self.case.name}: not finished after {20 * self.size.share_s:.0f} s")
            passed = time.time() - self.first_ready
            if self.case.n_late and self.released is None and passed > self.size.share_s / 2:
                self.cluster.run("scancel", self.holder)
                self.released = time.time()
            if self.case.kills and self.killed is None and passed > self.size.share_s / 2:
                os.kill(int(read_marks(self.folder, "ready")[VICTIM]["pid"]), signal.SIGKILL)
                self.killed = time.time()
            time.sleep(0.1)

    @property
    def first_ready(self) -> float:
        return min(mark["at"] for mark in read_marks(self.folder, "ready").values())

    def measured(self, end: float) -> Measured:
        """Makespan, ideal and full time of a run that ended at `end`."""
        first = self.first_ready
        tasks = []
        for number, mark in read_marks(self.folder, "ready").items():
            start = mark["at"] - first if self.released is not None and mark["at"] > self.released else 0.0
            until = self.killed - first if self.killed is not None and number == VICTIM else float("inf")
            tasks.append((1 / self.case.slow.get(number, 1.0), start, until))
        late = sum(start > 0 for _, start, _ in tasks)
        if len(tasks) != N_TASKS or late != self.case.n_late:
            raise RuntimeError(f"{self.case.name}: {len(tasks)} tasks started, {late} of them late")
        work_s = N_TASKS * self.size.share_s
        return Measured(end - first, ideal_s(work_s, tasks), end - self.submitted)


def ideal_s(work_s: float, tasks: Sequence[tuple[float, float, float]]) -> float:
    """When tasks of (speed, start, end) that are never idle have done `work_s` seconds of work at speed 1."""
    times = sorted({time for _, start, end in tasks for time in (start, end)})
    for begin, end in zip(times, [*times[1:], float("inf")], strict=True):
        speed = sum(speed for speed, start, until in tasks if start <= begin < until)
        if speed and work_s <= speed * (end - begin):
            return begin + work_s / speed
        work_s -= speed * (end - begin)
    raise ValueError("all tasks end before the work is done")


def read_marks(folder: Path, kind: str) -> dict[int, dict[str, float]]:
    """What tasks have written down, by task."""
    paths = [path for path in folder.glob(f"{kind}-*") if path.suffix != ".partial"]
    return {int(path.name.partition("-")[2]): json.loads(path.read_text()) for path in paths}


if __name__ == "__main__":
    sys.exit(main())
