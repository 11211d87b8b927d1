"""Trainings that are killed, stopped and resumed, for tests/models/test_training_resume.py.

`python -m tests.support.resuming FOLDER CASE…` runs each case in FOLDER/<case>, once undisturbed and once with what
the case does to it, and writes what came of both to FOLDER/<case>/outcomes.json. Each attempt is a set of processes of
its own, forked from this one, since torch takes seconds to import.
"""

import json
import os
import random
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first step of an optimizer imports it
import torch.distributed as dist
from torch import nn

from slurmgpu.errors import Interrupted
from slurmgpu.training.loop import Training
from slurmgpu.training.ranks import Place
from slurmgpu.training.settings import TrainingSettings

N_SAMPLES = 53
INTERRUPTED = 75


class Samples:
    """Numbers to classify, each read with random noise of all three generators; the last of a sample is its index."""

    def __init__(self, n, seed, noise):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(n, 6, generator=generator)
        self.targets = (self.inputs[:, 0] + self.inputs[:, 1] > 0).long()
        self.noise = noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        drawn = torch.randn(6) + np.random.randn() + random.random()
        return self.inputs[index] + self.noise * drawn, self.targets[index], index


class Digits:
    """A training class with all the state that must be restored: running statistics, dropout, random samples."""

    def __init__(self, on_event, exact):
        self.on_event = on_event
        self.exact = exact

    def model(self):
        between = [] if self.exact else [nn.BatchNorm1d(16), nn.Dropout(0.3)]
        return nn.Sequential(nn.Linear(6, 16), *between, nn.ReLU(), nn.Linear(16, 2))

    def data(self, split):
        if split == "test":
            return None
        return Samples(N_SAMPLES if split == "train" else 11, len(split), 0.0 if self.exact else 0.3)

    def loss(self, model, batch):
        inputs, targets, indices = batch
        self.on_event("train" if model.training else "val", indices.tolist())
        return nn.functional.cross_entropy(model(inputs), targets)

    def metrics(self, model, batch):
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float()}


class WithScheduler(Digits):
    """Has its own scheduler."""

    def scheduler(self, optimizer, n_steps):
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, max(2, n_steps // 3))


@dataclass(frozen=True)
class Attempt:
    """What happens to an attempt: it dies at the n-th event on a rank, or must stop when it asks for the n-th time."""

    world_size: int
    dies_at: int = 0
    on_rank: int = 0
    stops_at: int = 0
    before: str = ""
    """What happens to the newest checkpoint before that: "lost", "damaged" or nothing."""


@dataclass(frozen=True)
class Case:
    """A training, and how it is disturbed until the attempt that ends it."""

    attempts: list
    settings: dict = field(default_factory=dict)
    user: type = Digits
    exact: bool = False


def kills(seed, world_size, n, most=40, damages=("", "", "lost")):
    """Attempts that are killed at random events, on random ranks; then one that is left alone."""
    draw = random.Random(seed)
    killed = [
        Attempt(world_size, draw.randint(1, most), draw.randrange(world_size), before=draw.choice(damages))
        for _ in range(n)
    ]
    return [*killed, Attempt(world_size)]


def stops(world_size, *questions):
    """Attempts that are stopped; then one that is left alone."""
    return [*(Attempt(world_size, stops_at=each) for each in questions), Attempt(world_size)]


GIVEN = {
    "epochs": 4,
    "batch_size": 4,
    "accumulation": 2,
    "lr": 0.02,
    "schedule": "cosine",
    "warmup_steps": 3,
    "clip": 1.0,
    "seed": 7,
    "threads": 1,
}
FIXED = {"accumulation": 1, "global_batch_size": 12, "schedule": "linear"}
CASES = {
    "killed on 1": Case(kills(1, 1, 5, most=36)),
    "killed on 2": Case(kills(2, 2, 3, most=12)),
    "killed on 4": Case(kills(3, 4, 3, most=12), {"accumulation": 1}),
    "killed, sharded": Case(kills(4, 2, 2, most=12), {"strategy": "fsdp", "epochs": 2}),
    "killed, with workers": Case(kills(5, 1, 2), {"num_workers": 2}),
    "killed, fp16 and a scheduler": Case(kills(6, 1, 2), {"precision": "fp16"}, WithScheduler),
    "stopped on 1": Case(stops(1, 2, 7, 5)),
    "stopped on 2": Case(stops(2, 4, 7)),
    "damaged": Case(kills(8, 1, 2, damages=("damaged",))),
    "on other numbers": Case([Attempt(1, stops_at=3), Attempt(4, stops_at=4), Attempt(2)], FIXED, exact=True),
}
BY_NIGHT = ("killed on 4",)
"""Cases that repeat "killed on 2" and "on other numbers" (one of them 4) in another way."""


def run_case(case, folder):
    """The outcomes of a case: undisturbed and disturbed."""
    folder.mkdir()
    settings = TrainingSettings(**GIVEN | case.settings)
    found = {}
    alone = Attempt(case.attempts[-1].world_size)
    for name, attempts, checkpoint_s in (("undisturbed", [alone], None), ("disturbed", case.attempts, 0.0)):
        chosen = TrainingSettings(**asdict(settings) | {"checkpoint_s": checkpoint_s})
        ends = [run(attempt, case, chosen, folder / name, number) for number, attempt in enumerate(attempts)]
        found[name] = {"ends": ends, "outcome": json.loads((folder / name / "outcome.json").read_text())}
    return found


def run(attempt, case, settings, folder, number):
    """Run an attempt; return how it ended: "killed", "stopped" or "finished"."""
    folder.mkdir(exist_ok=True)
    harm(folder, attempt.before)
    ranks = {}
    for rank in range(attempt.world_size):
        pid = os.fork()
        if pid == 0:
            try:
                code = train(Rank(attempt, rank, folder, number), case, settings)
            except Interrupted as interrupted:
                code = INTERRUPTED
                (folder / f"stopped-{number}-{rank}.txt").write_text(str(interrupted))
            except BaseException:
                if rank == 0 and not attempt.dies_at:
                    sys.excepthook(*sys.exc_info())
                code = 1
            finally:
                os._exit(code)
        ranks[pid] = rank
    codes = []
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            del ranks[pid]
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1] not in (0, INTERRUPTED):
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
    if -signal.SIGKILL in codes:
        return "killed"
    return {(0,): "finished", (INTERRUPTED,): "stopped"}.get(tuple(set(codes)), f"failed: {codes}")


def harm(folder, how):
    """Do something to the newest checkpoint."""
    newest = max(folder.glob("step-??????????"), default=None)
    if how == "lost" and newest is not None:
        newest.rename(newest.with_name("." + newest.name + ".partial"))
    elif how == "damaged" and newest is not None:
        path = newest / "shared.pt"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


class Rank:
    """One process of an attempt: it counts what happens, and dies or is stopped in time."""

    def __init__(self, attempt, rank, folder, number):
        self.attempt, self.rank, self.folder, self.number = attempt, rank, folder, number
        self.n_events = self.n_questions = 0
        self.seen = (folder / f"seen-{number}-{rank}.txt").open("w")

    def happen(self, kind, indices=()):
        """An event: a batch, or a file that is fsynced."""
        self.n_events += 1
        if self.rank == self.attempt.on_rank and self.n_events == self.attempt.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "train":
            self.seen.write(f"{json.dumps(indices)}\n")
            self.seen.flush()

    def stopping(self):
        """Whether it must stop."""
        self.n_questions += 1
        return self.n_questions == self.attempt.stops_at

    def place(self):
        """Its place, after creating the process group."""
        if self.attempt.world_size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self.folder}/group-{self.number}",
                rank=self.rank,
                world_size=self.attempt.world_size,
            )
        return Place("cpu", self.rank, self.attempt.world_size, self.rank, stopping=self.stopping)


def train(rank, case, settings):
    """Train as one rank; rank 0 writes the outcome."""
    fsync = os.fsync

    def counted(file):
        rank.happen("fsync")
        fsync(file)

    os.fsync = counted
    user = case.user(rank.happen, case.exact)
    outcome = Training(user, settings, rank.place(), rank.folder).run()
    if rank.rank == 0:
        (rank.folder / "outcome.json").write_text(json.dumps(asdict(outcome)))
    return 0


def main(folder, names):
    """Run the cases."""
    torch.set_num_threads(1)
    for name in names:
        found = run_case(CASES[name], folder / name)
        (folder / name / "outcomes.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
