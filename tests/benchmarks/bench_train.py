"""What slurmgpu's training loop costs above one that is written by hand, and what checkpoints cost.

    python -m tests.benchmarks.bench_train [--quick]

Both loops train the same model on the same samples with AdamW, by DDP where there are two processes, each on one
thread. The bare loop has a DataLoader, a DistributedSampler and a sum of losses; neither evaluates. They run in turns
in the same processes, and a step's time runs from one call of the loss to that of a later step, so that what comes
before and after the loop does not count. CPU-seconds count where processes share cores with others; on a GPU the clock
does. Ratios are medians of rounds.

Checkpoints: what one takes is measured as one follows another. At the default interval, of 600 s or 100 times what one
takes, that is its share of a long training. Of a short one, whose epochs end every few milliseconds, it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slurmgpu.training.sync_schedule import CHECKPOINT_S, SHARE_OF_CHECKPOINTS
from tests.benchmarks import judge, print_table

HOME = Path(__file__).parents[2]
TARGET = 1.03
N_STEPS = {"digits": 600, "images": 32, "large": 32}
SHARE = 0.01
WALL, CPU = 0, 1
Rounds = list[dict[str, list[float]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    quick = parser.parse_args(argv).quick
    print(f"{platform.machine()}, torch {version('torch')}, one thread a process")
    met = [*loops(quick), *checkpoints(quick), *on_a_gpu(quick)]
    return 0 if all(met) else 1


def loops(quick: bool) -> list[bool]:
    """Steps of both loops, of one and of two processes."""
    n_rounds = 3 if quick else 7
    met, rows = [], []
    for net in ("digits", "large", "images"):
        for n_processes in (1, 2):
            n_steps = N_STEPS[net] // (3 if quick else 1)
            rounds = arm("steps", net, n_steps, n_rounds, n_processes)
            ratio, above = compare(rounds, CPU)
            bare = statistics.median(each["bare"][CPU] for each in rounds)
            walls, _ = compare(rounds, WALL)
            cells = f"{bare * 1e3:.2f} ms", f"{above * 1e6:.0f} us", f"{ratio:.3f}", f"{walls:.3f}"
            rows.append((f"{net}, {n_processes} process{'es' * (n_processes > 1)}", *cells))
            if net == "images":
                met.append((rows[-1][0], ratio))
    print_table(("net", "bare step, CPU", "above it", "ratio", "by the clock"), rows)
    return [judge(f"a step of {name} over the bare loop's", ratio, TARGET) for name, ratio in met]


def compare(rounds: Rounds, clock: int) -> tuple[float, float]:
    """Our seconds over the bare loop's, and how many more: medians of rounds."""
    pairs = [(each["ours"][clock], each["bare"][clock]) for each in rounds]
    return statistics.median(a / b for a, b in pairs), statistics.median(a - b for a, b in pairs)


def checkpoints(quick: bool) -> list[bool]:
    """What checkpoints cost at the default interval."""
    met, rows = [], []
    for net, n_steps in {"digits": 2000 if quick else 15_000, "large": 20}.items():
        found = arm("checkpoints", net, n_steps, 1, 1)
        each = found["each_s"]
        interval = max(CHECKPOINT_S, each / SHARE_OF_CHECKPOINTS)
        share = each / interval
        spent = found["spent_s"] / found["wall_s"] if net == "digits" else None
        cells = f"{each * 1e3:.0f} ms", f"{interval:.0f} s", f"{share:.3%}"
        short = "-" if spent is None else f"{found['n']} in {found['wall_s']:.0f} s: {spent:.2%}"
        rows.append((net, *cells, short))
        met.append((f"checkpoints of {net}, share of a long training", share))
        if spent is not None and not quick:
            met.append((f"checkpoints of {net}, share of a short training", spent))
    print_table(("net", "a checkpoint", "interval", "share", "of a short training"), rows)
    return [judge(name, share, SHARE) for name, share in met]


def on_a_gpu(quick: bool) -> list[bool]:
    """The loop over the bare one, and what bf16 and compilation gain, on one GPU; nothing where there is none."""
    if not python(
        "-c", "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    ).strip():
        print("no GPU here: left out what needs one")
        return []
    on_gpu = ("--device", "cuda")
    n_steps, n_rounds = (20, 2) if quick else (60, 5)
    rounds = arm("steps", "sentences", n_steps, n_rounds, 1, *on_gpu)
    ratio, above = compare(rounds, WALL)
    print(f"sentences on a GPU: {above * 1e3:.2f} ms above a bare step")
    met = judge("a step on a GPU over the bare loop's", ratio, TARGET)
    found = arm("gpu", "sentences", n_steps, n_rounds, 1, *on_gpu)
    gain = statistics.median(each["bf16 compiled"] / each["fp32 eager"] for each in found)
    speed = statistics.median(each["bf16 compiled"] for each in found)
    print(f"bf16 and compile over fp32 and eager: {gain:.1f} x the samples a second ({speed:.0f})")
    return [met]


def arm(name: str, net: str, n_steps: int, n_rounds: int, n_processes: int, *options: str) -> Any:
    """What an arm found, in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_processes)]
    words = ["-m", "tests.benchmarks.train_arms", name, net, f"--steps={n_steps}", f"--rounds={n_rounds}", *options]
    return json.loads(python(*(launcher if n_processes > 1 else []), *words).splitlines()[-1])


def python(*words: str) -> str:
    """What a Python process prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=HOME,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
