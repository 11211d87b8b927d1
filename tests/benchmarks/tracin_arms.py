"""The ways to influences that bench_tracin compares, each in a process of its own: times and memory stay apart.

    python -m tests.benchmarks.tracin_arms ARM FOLDER [--tests N] [--rows M] [--threads T] [--set KEY=VALUE …]

FOLDER holds a graph's files and a PyKEEN ConvE (`tracin_graphs`). What an arm does before its model is loaded does not
count. The last line that it prints is JSON; the matrix that it computed, if any, is written beside the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from slurmgpu.workload import Item, TaskContext
from tests.benchmarks import tracin_graphs

LEARNING_RATE = 1e-3  # the replaced system's, and ours for a checkpoint that tells none
LOOP_PAIRS = 256
# The quickest of several sizes, each.
VMAP_CHUNK = 32
CAPTUM_BATCH = 4  # captum sends each example's backward pass through the whole batch
FAST_BATCH = 512


@dataclass(frozen=True)
class Case:
    """What an arm is to compute: influences of the first `n_rows` training triples on the first tests."""

    folder: Path
    train: Tensor
    tests: Tensor
    settings: dict[str, Any]


@dataclass
class Computed:
    """The influences of some pairs (test, training triple), and what else there is to tell."""

    n_pairs: int
    values: np.ndarray | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tests", type=int, default=20)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    train, tests = tracin_graphs.read(arguments.folder)
    settings = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in arguments.set)}
    case = Case(arguments.folder, train[: arguments.rows], tests[: arguments.tests], settings)
    compute = ARMS[arguments.arm](case)
    before, wall, cpu = resident_mb(), time.perf_counter(), time.process_time()
    forget_peak()
    found = compute()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    told = {"cpu_s": cpu, "wall_s": wall, "n_pairs": found.n_pairs, "memory_mb": peak_mb() - before} | found.extra
    told["memory_mb"] += told.pop("left_mb", 0)
    if found.values is not None:
        np.save(arguments.folder / f"{arguments.arm}.npy", found.values)
    print(json.dumps(told))


# The replaced system's way


def loop(case: Case) -> Callable[[], Computed]:
    """One autograd call for each pair, on PyKEEN's model: of the first test, for as many rows as are timed.

    A test's own gradient is computed once, and not counted: 1 of n_train.
    """
    model = tracin_graphs.load(case.folder)

    def gradient(triple: Sequence[int]) -> dict[str, Tensor]:
        model.zero_grad()
        score = model.score_t(torch.tensor([triple[:2]]))[0, triple[2]]
        functional.binary_cross_entropy_with_logits(score[None], torch.ones(1)).backward()
        return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}

    def compute() -> Computed:
        rows = case.train[:LOOP_PAIRS].tolist()
        values = np.empty((1, len(rows)))
        for j, row in enumerate(rows):
            pairs = gradient(row)
            values[0, j] = LEARNING_RATE * sum(
                torch.dot(value.flatten(), of_test[name]).item() for name, value in pairs.items()
            )
        return Computed(len(rows), values)

    of_test = {name: value.flatten() for name, value in gradient(case.tests[0].tolist()).items()}
    return compute


# torch.func


class Losses(nn.Module):
    """The loss of triples (n, 3), by PyKEEN's model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, triples: Tensor) -> Tensor:
        """(n,)."""
        return -functional.logsigmoid(self.model.score_hrt(triples)[:, 0])


def vmapped(case: Case) -> Callable[[], Computed]:
    """`torch.func.vmap(grad)` over chunks of training triples, then a matrix product for each parameter."""
    module = Losses(tracin_graphs.load(case.folder))
    state = dict(module.named_parameters()), dict(module.named_buffers())

    def loss(parameters: dict[str, Tensor], triple: Tensor) -> Tensor:
        return functional_call(module, (parameters, state[1]), (triple[None],))[0]

    gradients = vmap(grad(loss), in_dims=(None, 0))

    def compute() -> Computed:
        with torch.no_grad():
            of_tests = gradients(state[0], case.tests[:1])
            of_tests = {name: value.new_empty(len(case.tests), value[0].numel()) for name, value in of_tests.items()}
            for start in range(0, len(case.tests), VMAP_CHUNK):
                for name, value in gradients(state[0], case.tests[start : start + VMAP_CHUNK]).items():
                    of_tests[name][start : start + VMAP_CHUNK] = value.flatten(1)
            values = torch.zeros(len(case.tests), len(case.train))
            for start in range(0, len(case.train), VMAP_CHUNK):
                for name, value in gradients(state[0], case.train[start : start + VMAP_CHUNK]).items():
                    values[:, start : start + VMAP_CHUNK] += of_tests[name] @ value.flatten(1).T
        return Computed(values.numel(), (LEARNING_RATE * values).numpy())

    return compute


# captum


class Triples(torch.utils.data.Dataset):
    """Triples as captum takes them: inputs and a target."""

    def __init__(self, triples: Tensor) -> None:
        self.triples = triples

    def __len__(self) -> int:
        return len(self.triples)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.triples[i], self.triples[i, 2]


def captum(case: Case) -> Callable[[], Computed]:
    """captum's TracInCP over all parameters. That it loads the checkpoint anew for each batch is left out."""
    from captum.influence import TracInCP

    module = Losses(tracin_graphs.load(case.folder))
    tracing = TracInCP(
        module,
        Triples(case.train),
        ["loaded already"],
        checkpoints_load_func=lambda *_: LEARNING_RATE,
        loss_fn=lambda losses, _: losses,
        batch_size=CAPTUM_BATCH,
    )

    def compute() -> Computed:
        values = tracing.influence(torch.utils.data.DataLoader(Triples(case.tests), CAPTUM_BATCH)).detach()
        return Computed(values.numel(), values.numpy())

    return compute


class Tails(nn.Module):
    """The scores of all tails, by PyKEEN's model with its table of entities as a last linear layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.interaction = model.interaction
        entities, biases = (found._embeddings.weight for found in model.entity_representations)
        self.relations = model.relation_representations[0]._embeddings.weight
        self.last = nn.Linear(entities.shape[1], entities.shape[0])
        self.last.weight, self.last.bias = entities, nn.Parameter(biases.detach().flatten())

    def forward(self, triples: Tensor) -> Tensor:
        """(n, N)."""
        shape = self.interaction.shape_info
        size = (-1, shape.input_channels, shape.image_height, shape.image_width)
        image = torch.cat(
            [self.last.weight[triples[:, 0]].view(size), self.relations[triples[:, 1]].view(size)], dim=-2
        )
        maps = self.interaction.hr2d(image)
        return self.last(self.interaction.hr1d(maps.flatten(1)))


def captum_fast(case: Case) -> Callable[[], Computed]:
    """captum's TracInCPFast: the output layer alone, with each triple's forward pass."""
    from captum.influence import TracInCPFast

    module = Tails(tracin_graphs.load(case.folder)).eval()

    def loss(scores: Tensor, tails: Tensor) -> Tensor:
        return -functional.logsigmoid(scores.gather(1, tails[:, None])).sum()

    tracing = TracInCPFast(
        module,
        module.last,
        Triples(case.train),
        ["loaded already"],
        checkpoints_load_func=lambda *_: LEARNING_RATE,
        loss_fn=loss,
        batch_size=FAST_BATCH,
    )

    def compute() -> Computed:
        values = tracing.influence((case.tests, case.tests[:, 2])).detach()
        return Computed(values.numel(), values.numpy())

    return compute


# Ours


def ours(case: Case) -> Callable[[], Computed]:
    """The workload, as a worker calls it; loading and its probe do not count, as the others' loading does not."""
    from slurmgpu.workloads.tracin import models  # noqa: F401  (what it imports is not its memory)
    from slurmgpu.workloads.tracin.workload import Tracin

    train = "train.txt"
    if (n_rows := len(case.train)) < tracin_graphs.n_lines(case.folder / train):
        train = f"train-{n_rows}.txt"
        with (case.folder / "train.txt").open() as whole:
            (case.folder / train).write_text("".join(line for line, _ in zip(whole, range(n_rows), strict=False)))
    settings = {"learning_rate": LEARNING_RATE, "top_k": 100, **case.settings}
    workload = Tracin(
        train=str(case.folder / train),
        entities=str(case.folder / "node_dict.txt"),
        relations=str(case.folder / "rel_dict.txt"),
        model=str(case.folder / "model.pt"),
        **settings,
    )
    before = resident_mb()
    workload.load(TaskContext("cpu", 0, Path()))
    # What loading leaves behind, and the probe, is memory above the model, too.
    left_mb = resident_mb() - before - (case.folder / "model.pt").stat().st_size / 2**20
    with (case.folder / "test.txt").open() as lines:
        items = [Item(i, {"text": line.rstrip("\n")}) for i, line in zip(range(len(case.tests)), lines, strict=False)]

    def compute() -> Computed:
        rows: Any = workload(items)  # none of them fails
        extra: dict[str, Any] = {"left_mb": left_mb}
        for column in ("precision_error", "top10_overlap"):
            if column in rows[0]:
                extra[column] = [float(row[column]) for row in rows]
        values = np.stack([row["influence"] for row in rows]) if "influence" in rows[0] else None
        return Computed(len(items) * len(case.train), values, extra)

    return compute


def sgemm(case: Case) -> Callable[[], Computed]:
    """The machine's peak: a large product in single precision, in floating-point operations a second."""
    a, b = torch.ones(2048, 2048), torch.ones(2048, 2048)
    n_rounds = 8
    out = a @ b

    def compute() -> Computed:
        for _ in range(n_rounds):
            torch.mm(a, b, out=out)
        return Computed(n_rounds * 2 * 2048**3)

    return compute


ARMS: dict[str, Callable[[Case], Callable[[], Computed]]] = {
    "loop": loop,
    "vmap": vmapped,
    "captum": captum,
    "captum_fast": captum_fast,
    "ours": ours,
    "sgemm": sgemm,
}


def resident_mb() -> float:
    """What this process has in memory."""
    return _status("VmRSS")


def peak_mb() -> float:
    """The most that it has had since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Let the peak be what is in memory now: proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
