"""Influences of training triples, by ratios to what others take for the same numbers: one CPU thread, and two.

    python -m tests.benchmarks.bench_tracin [--quick]

The model is PyKEEN's ConvE with its defaults (d = 200), trained for a little while on UMLS and on Kinships, which
PyKEEN carries; the large graph has the size of FB15k-237 and random triples. Each arm computes in a process of its own,
all with the same settings of malloc, from which the slow ones gain most: memory that was freed is kept. Loading and
imports do not count. CPU-seconds of one thread, the best of several rounds. The loop of one autograd call for each pair
is timed on 256 pairs, `vmap` and captum's TracInCP on several hundred training triples; what they take for all is
computed from that, each being a loop over pairs or over training triples. Ours is timed whole: all parameters, the 100
strongest of both signs, statistics, shares of parameter groups.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import judge, print_table

HOME = Path(__file__).parents[2]
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
N_ROUNDS = 3
SCALED_ROWS = (128, 640)  # two sizes: what training triples cost is the difference
FEATURES, DIMENSION, KERNEL = 10_368, 200, 9  # of PyKEEN's ConvE: 32 channels of 18 × 18 positions
SMALL = 2 * DIMENSION + 12 * 32 + 2  # parameters of convolution and norms
TARGETS = {"loop": {20: 800, 100: 3000, 500: 10_000}, "vmap": {20: 25, 100: 25}, "captum": {20: 80, 100: 80}}
FAST_TARGET = 1.3
MEMORY_MB = {20: 150, 500: 250}
REPLACED = (100, 32_000)
"""Tests and training triples of the replaced system's own workload."""
REPLACED_S = 15

RUN_FILE = """
input = "some.txt"
shard_items = 128
[workload]
use = "tracin"
batch_size = 128
[settings]
train = "train.txt"
entities = "node_dict.txt"
relations = "rel_dict.txt"
model = "model.pt"
"""


@dataclass(frozen=True)
class Graph:
    """A folder with a graph and a model."""

    name: str
    folder: Path
    n_train: int
    n_entities: int
    n_queries: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="UMLS alone, fewer tests, one round")
    quick = parser.parse_args(argv).quick
    names = ("torch", "captum", "pykeen", "numpy")
    print(", ".join([platform.machine(), *(f"{name} {version(name)}" for name in names)]))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), n_rounds=1 if quick else N_ROUNDS)
        umls = bench.real("umls", n_epochs=5 if quick else 60)
        met = bench.compare(umls, (20, 100) if quick else (20, 100, 500))
        met += bench.memory(umls)
        bench.threads(umls)
        bench.losses(umls)
        bench.precisions(umls, ("bf16",) if quick else ("tf32", "bf16", "fp16"))
        if not quick:
            kinships = bench.real("kinships", n_epochs=60)
            met += bench.compare(kinships, (20, 100))
            bench.precisions(kinships, ("tf32", "bf16", "fp16"))
            met += bench.large()
    return 0 if all(met) else 1


class Bench:
    """Where graphs lie, and how arms are run."""

    def __init__(self, folder: Path, n_rounds: int) -> None:
        self.folder, self.n_rounds = folder, n_rounds

    def real(self, name: str, n_epochs: int) -> Graph:
        """A real graph, and its model."""
        return self._graph(name, f"write_real({name!r}, folder, {n_epochs})")

    def _graph(self, name: str, call: str) -> Graph:
        """A graph that a process of its own writes: this one imports no torch."""
        folder = self.folder / name
        code = f"""
            import json, torch
            from pathlib import Path
            from tests.benchmarks import tracin_graphs
            folder = Path({str(folder)!r})
            tracin_graphs.{call}
            train, _ = tracin_graphs.read(folder)
            found = len(train), tracin_graphs.n_lines(folder / "node_dict.txt"), len(train[:, :2].unique(dim=0))
            print(json.dumps(found))
            """
        lines = "\n".join(line.strip() for line in code.splitlines())
        found = json.loads(self._python(["-c", lines], {}))
        graph = Graph(name, folder, *found)
        print(
            f"\n{name}: {graph.n_entities:,} entities, {graph.n_train:,} training triples "
            f"of {graph.n_queries:,} different (head, relation)",
            flush=True,
        )
        return graph

    def run(
        self,
        arm: str,
        graph: Graph,
        n_tests: int = 20,
        *,
        rows: int | None = None,
        threads: int = 1,
        n_rounds: int = 1,
        malloc: Mapping[str, str] = MALLOC,
        **settings: Any,
    ) -> dict[str, Any]:
        """What an arm tells of its quickest round."""
        command = ["-m", "tests.benchmarks.tracin_arms", arm, str(graph.folder), f"--tests={n_tests}"]
        command += [f"--threads={threads}", *(f"--set={key}={json.dumps(value)}" for key, value in settings.items())]
        if rows is not None:
            command.append(f"--rows={rows}")
        rounds = [json.loads(self._python(command, malloc).splitlines()[-1]) for _ in range(n_rounds)]
        return min(rounds, key=lambda found: found["cpu_s"] if threads == 1 else found["wall_s"])

    def _python(self, arguments: Sequence[str], environ: Mapping[str, str], folder: Path = HOME) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(HOME), **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}\n{done.stderr}")
        return done.stdout.strip()

    def seconds(self, arm: str, graph: Graph, n_tests: int, **how: Any) -> float:
        """CPU-seconds for all pairs; of slow arms, computed from a part."""
        if arm == "loop":
            return self.loop_seconds(graph, n_tests, **how)
        if arm in ("vmap", "captum"):
            few, many = (self.run(arm, graph, n_tests, rows=n, **how)["cpu_s"] for n in SCALED_ROWS)
            return float(many + (graph.n_train - SCALED_ROWS[1]) * (many - few) / (SCALED_ROWS[1] - SCALED_ROWS[0]))
        return float(self.run(arm, graph, n_tests, n_rounds=self.n_rounds, **how)["cpu_s"])

    def loop_seconds(self, graph: Graph, n_tests: int, clock: str = "cpu_s", **how: Any) -> float:
        """Of one gradient and product for each pair."""
        found = self.run("loop", graph, 1, n_rounds=self.n_rounds, **how)
        return float(found[clock] / found["n_pairs"] * n_tests * graph.n_train)

    def compare(self, graph: Graph, tests: Sequence[int]) -> list[bool]:
        """All arms on one thread, and that they compute the same."""
        errors = self.errors(graph)
        peak = self.run("sgemm", graph, n_rounds=self.n_rounds)
        flops_s = peak["n_pairs"] / peak["cpu_s"]
        print(f"matrix products reach {flops_s / 1e9:.0f} GFLOP/s on one thread")
        shown = {
            "ours, all parameters": ("ours", tests),
            "loop, one autograd call a pair": ("loop", tests),
            "vmap(grad) and a product": ("vmap", [n for n in tests if n <= 100]),
            "captum TracInCP": ("captum", [n for n in tests if n <= 100]),
            "captum TracInCPFast, last layer": ("captum_fast", tests),
        }
        seconds: dict[str, dict[int, float]] = {}
        for arm, of in shown.values():
            if arm == "loop":  # timed once: it has no other dependence on the number of tests
                whole = self.seconds(arm, graph, 1)
                seconds[arm] = {n: whole * n for n in of}
            else:
                seconds[arm] = {n: self.seconds(arm, graph, n) for n in of}
        ours = seconds["ours"]
        header = ["CPU-seconds (ratio to ours)", *(f"{n} tests" for n in tests), "error"]
        rows = []
        for label, (arm, _) in shown.items():
            found = [
                f"{seconds_text(s)} ({ratio(s / ours[n])})" if (s := seconds[arm].get(n)) is not None else "-"
                for n in tests
            ]
            rows.append([label, *found, errors.get(arm, "")])
        print_table(header, rows)
        share = {n: flops(graph, n) / ours[n] / flops_s for n in tests}
        print("of the peak: " + ", ".join(f"{100 * value:.0f} % at {n} tests" for n, value in share.items()))
        few, many = tests[0], tests[-1]
        per_pair = (ours[many] - ours[few]) / ((many - few) * graph.n_train)
        per_triple = ours[few] / graph.n_train - few * per_pair
        print(f"ours: {1e6 * per_triple:.0f} us a training triple and {1e6 * per_pair:.3f} us a pair")
        met = []
        for arm, targets in TARGETS.items():
            for n, target in targets.items():
                if n in seconds[arm]:
                    met.append(
                        at_least(f"{graph.name}, {n} tests, quicker than {arm}", seconds[arm][n] / ours[n], target)
                    )
        slower = ours[few] / seconds["captum_fast"][few]
        met.append(judge(f"{graph.name}, {few} tests, time over that of captum's last layer", slower, FAST_TARGET, "x"))
        return met

    def errors(self, graph: Graph) -> dict[str, str]:
        """How far each arm's numbers are from ours: the largest difference, over the largest number of its test."""
        self.run("ours", graph, 20, full="float32", top_k=10)
        for arm, rows in {"loop": None, "vmap": SCALED_ROWS[0], "captum": SCALED_ROWS[0], "captum_fast": None}.items():
            self.run(arm, graph, 20, rows=rows)
        exact, *others = (np.load(graph.folder / f"{arm}.npy") for arm in ("ours", *TARGETS, "captum_fast"))
        found = {}
        for arm, values in zip((*TARGETS, "captum_fast"), others, strict=True):
            same = exact[: values.shape[0], : values.shape[1]]
            error = (abs(values - same).max(1) / abs(same).max(1)).max()
            found[arm] = f"{error:.0e}"
        overlap = np.mean([len(set(top(a)) & set(top(b))) / 10 for a, b in zip(exact, others[-1], strict=True)])
        found["captum_fast"] += f", {overlap:.2f} of the top 10"
        return found

    def memory(self, graph: Graph) -> list[bool]:
        """Peaks above the model."""
        print(f"\n{graph.name}: memory above the loaded model, MB")
        arms: dict[str, tuple[str, tuple[int, ...], int | None]] = {
            "ours": ("ours", (20, 500), None),
            "vmap(grad) and a product": ("vmap", (20,), SCALED_ROWS[0]),
            "captum TracInCP": ("captum", (20,), SCALED_ROWS[0]),
            "captum TracInCPFast, last layer": ("captum_fast", (20, 500), None),
        }
        found = {
            label: {n: self.run(arm, graph, n, rows=rows, malloc={})["memory_mb"] for n in tests}
            for label, (arm, tests, rows) in arms.items()
        }
        print_table(
            ("", "20 tests", "500 tests"),
            [(label, *(f"{of[n]:.0f}" if n in of else "-" for n in MEMORY_MB)) for label, of in found.items()],
        )
        return [judge(f"memory at {n} tests", found["ours"][n], limit, " MB") for n, limit in MEMORY_MB.items()]

    def threads(self, graph: Graph, n_tests: int = 100) -> None:
        """Wall seconds on one thread and on two, and what malloc as it comes changes."""
        print(f"\n{graph.name}: {n_tests} tests, wall seconds")
        rows = []
        arms: dict[str, dict[str, Any]] = {
            "1 thread": {},
            "2 threads": {"threads": 2},
            "1 thread, malloc as it comes": {"malloc": {}},
        }
        for label, how in arms.items():
            ours = self.run("ours", graph, n_tests, n_rounds=self.n_rounds, **how)["wall_s"]
            whole = self.loop_seconds(graph, n_tests, "wall_s", **how)
            rows.append((label, seconds_text(ours), seconds_text(whole), ratio(whole / ours)))
        print_table(("", "ours", "loop", "ratio"), rows)

    def losses(self, graph: Graph, n_tests: int = 100) -> None:
        """What other losses cost."""
        times = {
            name: self.run("ours", graph, n_tests, n_rounds=self.n_rounds, loss=name)["cpu_s"]
            for name in ("bce-pos", "bce-1n", "ce", "ns:16")
        }
        told = ", ".join(f"{name} {found / times['bce-pos']:.2f}x" for name, found in times.items())
        print(f"\n{graph.name}, {n_tests} tests, losses over bce-pos: {told}", flush=True)

    def precisions(self, graph: Graph, precisions: Sequence[str], n_tests: int = 100) -> None:
        """What lower precision does to the numbers, as each row tells of itself."""
        print(f"\n{graph.name}: lower precision, {n_tests} tests (on this CPU it shows errors, not speed)")
        rows = []
        for loss in ("bce-pos", "bce-1n"):
            for precision in precisions:
                found = self.run("ours", graph, n_tests, precision=precision, loss=loss)
                error, overlap = np.array(found["precision_error"]), np.array(found["top10_overlap"])
                numbers = (f"{np.median(error):.1e}", f"{error.max():.1e}", f"{overlap.mean():.3f}")
                rows.append((f"{loss}, {precision}", *numbers))
        print_table(("", "median error", "worst", "of the top 10"), rows)

    def large(self) -> list[bool]:
        """A graph of FB15k-237's size."""
        graph = self._graph("synthetic", "write_synthetic(folder)")
        n_tests, n_rows = REPLACED
        part = self.run("ours", graph, n_tests, rows=n_rows, n_rounds=self.n_rounds)
        loop = self.run("loop", graph, 1)
        whole = loop["cpu_s"] / loop["n_pairs"] * n_tests * n_rows
        print(
            f"{n_tests} x {n_rows:,}: {part['cpu_s']:.1f} CPU-s; the loop {whole:,.0f}, {ratio(whole / part['cpu_s'])}"
        )
        met = [judge(f"{n_tests} x {n_rows:,} on one core", part["cpu_s"], REPLACED_S, " CPU-s")]
        for tests in (100, 1000):
            found = self.run("ours", graph, tests)
            pairs = tests * graph.n_train
            told = f"{found['cpu_s']:.1f} CPU-s ({1e6 * found['cpu_s'] / pairs:.2f} us a pair)"
            print(f"{tests} x {graph.n_train:,}: {told}, {found['memory_mb']:.0f} MB", flush=True)
        one_to_all = self.run("ours", graph, n_tests, rows=n_rows, loss="bce-1n")["cpu_s"]
        print(f"bce-1n over bce-pos, {n_tests} x {n_rows:,}: {one_to_all / part['cpu_s']:.2f}x")
        self.tasks(graph)
        return met

    def tasks(self, graph: Graph, n_tests: int = 512) -> None:
        """Wall seconds of a whole run by one task and by two, from submission to the merged file."""
        with (graph.folder / "test.txt").open() as lines:
            (graph.folder / "some.txt").write_text(
                "".join(line for line, _ in zip(lines, range(n_tests), strict=False))
            )
        (graph.folder / "tracin.toml").write_text(RUN_FILE)
        times = []
        for n_tasks in (1, 2):
            start = time.perf_counter()
            command = ["submit", "tracin.toml", f"--run-dir={n_tasks}-tasks"]
            command += ["--executor=local", "--gpus=0", f"--tasks={n_tasks}"]
            self._python(["-m", "slurmgpu", *command], {"OMP_NUM_THREADS": "1"}, graph.folder)
            times.append(time.perf_counter() - start)
        told = f"{times[0]:.0f} s and {times[1]:.0f} s, {ratio(times[0] / times[1])}"
        print(f"{n_tests} x {graph.n_train:,} as a run of one task and of two, wall: {told}")


def flops(graph: Graph, n_tests: int) -> float:
    """Floating-point operations that the factors of a ConvE and their products need, all of them matrix products.

    What queries share counts once for each that differs, as if no chunk ended between two triples of a query.
    """
    share = graph.n_queries / graph.n_train
    backward_and_forward = 2 * DIMENSION * FEATURES * (1 + share) + 2 * KERNEL * FEATURES * (2 + share)
    pair = 2 * (share * FEATURES + 7 * DIMENSION + SMALL)
    return (graph.n_train + n_tests) * backward_and_forward + n_tests * graph.n_train * pair


def top(values: np.ndarray, n: int = 10) -> list[int]:
    """Where the largest lie."""
    return np.argsort(-values)[:n].tolist()


def at_least(what: str, found: float, limit: float) -> bool:
    """Whether a ratio reaches its target; says so."""
    met = found >= limit
    print(f"{what}: {ratio(found)}, target at least {ratio(limit)}: {'met' if met else 'NOT MET'}", flush=True)
    return met


def ratio(value: float) -> str:
    """With about three digits."""
    return f"{value:,.0f}x" if value >= 100 else f"{value:.3g}x"


def seconds_text(value: float) -> str:
    """With about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
