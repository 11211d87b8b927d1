"""The arms of bench_train, in the processes of a group: `torchrun -m tests.benchmarks.train_arms ARM NET [options]`.

`steps`: slurmgpu's loop and a bare one in turns, in the same processes. `checkpoints`: what one takes, and all of a
training with the default interval. `gpu`: samples a second in bf16, compiled, and in fp32, eager. Rank 0 prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from slurmgpu.training.loop import Training
from slurmgpu.training.outcome import Outcome
from slurmgpu.training.ranks import Place
from slurmgpu.training.settings import TrainingSettings

N_FIRST = 5
"""Steps at the beginning that do not count: they allocate, and DDP makes its buckets."""


class Net:
    """A training class that notes when each of its losses is asked for, in wall time and this process's CPU time."""

    batch_size = 32

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.events: list[Any] = []
        """On a GPU, an event in its stream for each mark: the calls that start its work are several steps ahead."""

    def model(self) -> nn.Module:
        raise NotImplementedError

    def samples(self) -> Dataset[Any]:
        raise NotImplementedError

    def data(self, split: str) -> Dataset[Any] | None:
        return self.samples() if split == "train" else None

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self.marks.append((time.perf_counter(), time.process_time()))
        inputs, targets = batch
        if inputs.is_cuda:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()
        return nn.functional.cross_entropy(model(inputs), targets)

    def step_s(self) -> list[float]:
        """Seconds of a step: by the clock, on a GPU by the GPU's, and of this process's CPU."""
        first, last = self.marks[N_FIRST], self.marks[-1]
        wall_s, cpu_s = (b - a for a, b in zip(first, last, strict=True))
        if self.events:
            self.events[-1].synchronize()
            wall_s = self.events[N_FIRST].elapsed_time(self.events[-1]) / 1e3
        return [each / (len(self.marks) - N_FIRST - 1) for each in (wall_s, cpu_s)]


class Digits(Net):
    """The example's size: scikit-learn's digits and 9,000 parameters."""

    batch_size = 64

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def samples(self) -> Dataset[Any]:
        from sklearn.datasets import load_digits

        inputs, targets = load_digits(return_X_y=True)
        return TensorDataset(torch.tensor(inputs[:1792] / 16).float(), torch.tensor(targets[:1792]))


class Images(Net):
    """A small convolutional network on noise of 3 × 32 × 32."""

    def model(self) -> nn.Module:
        def stage(n_in: int, n_out: int) -> list[nn.Module]:
            return [nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(*stage(3, 32), *stage(32, 64), *stage(64, 128), nn.Flatten(), nn.Linear(2048, 10))

    def samples(self) -> Dataset[Any]:
        return TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(10, (512,)))


class Large(Net):
    """105 MB of parameters and optimizer state."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 2048), *[nn.Linear(2048, 2048) for _ in range(2)], nn.Linear(2048, 100))

    def samples(self) -> Dataset[Any]:
        return TensorDataset(torch.randn(4096, 64), torch.randint(100, (4096,)))


class Sentences(Net):
    """A transformer of 12 layers and 85 million parameters, on noise of 512 tokens: of a size that fills a GPU."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), Mean(), nn.Linear(768, 100))

    def samples(self) -> Dataset[Any]:
        return TensorDataset(torch.randn(512, 512, 768), torch.randint(100, (512,)))


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


NETS = {each.__name__.lower(): each for each in (Digits, Images, Large, Sentences)}


def bare(net: Net, n_steps: int, place: Place) -> None:
    """The loop as it is written by hand, after PyTorch's tutorial on DDP."""
    torch.manual_seed(0)
    device = torch.device(place.device)
    model = net.model().to(device)
    if place.world_size > 1:
        model = DistributedDataParallel(model)
    samples = net.samples()
    sampler = DistributedSampler(samples, place.world_size, place.rank) if place.world_size > 1 else None
    on_gpu = device.type == "cuda"
    loader = DataLoader(samples, net.batch_size, sampler=sampler, shuffle=sampler is None, pin_memory=on_gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=on_gpu or None)
    total = torch.zeros((), device=device)
    for batch in batches(loader, sampler, n_steps):
        optimizer.zero_grad()
        loss = net.loss(model, tuple(each.to(device, non_blocking=on_gpu) for each in batch))
        loss.backward()
        optimizer.step()
        total += loss.detach()


def batches(loader: DataLoader[Any], sampler: DistributedSampler[Any] | None, n_steps: int) -> Iterator[Any]:
    """Batches of as many epochs as it takes."""
    done, epoch = 0, 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            if done == n_steps:
                return
            yield batch
            done += 1
        epoch += 1


def ours(net: Net, n_steps: int, place: Place, **settings: Any) -> Outcome:
    """The same by slurmgpu's loop."""
    chosen = TrainingSettings(steps=n_steps, batch_size=net.batch_size, seed=0, **settings)
    with shared_folder(place) as folder:
        return Training(net, chosen, place, Path(folder)).run()


class shared_folder:  # noqa: N801 - used as a function
    """A temporary folder that all processes see; removed when all have left it."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __enter__(self) -> str:
        self.kept = tempfile.TemporaryDirectory() if self.place.is_rank_zero else None
        name = [self.kept.name if self.kept else ""]
        if self.place.world_size > 1:
            distributed.broadcast_object_list(name)
        return name[0]

    def __exit__(self, *_: object) -> None:
        if self.place.world_size > 1:
            distributed.barrier()
        if self.kept:
            self.kept.cleanup()


def steps(kind: type[Net], place: Place, n_steps: int, n_rounds: int) -> list[dict[str, list[float]]]:
    """Wall and CPU seconds of a step in both arms, a mean over the processes, for each round."""
    rounds = []
    for number in range(n_rounds):
        arms: dict[str, Callable[..., object]] = {"bare": bare, "ours": ours}
        found = {}
        for name in sorted(arms, reverse=bool(number % 2)):
            net = kind()
            arms[name](net, n_steps, place)
            found[name] = mean_of(net.step_s(), place)
        rounds.append(found)
    return rounds


def mean_of(values: list[float], place: Place) -> list[float]:
    """Means over the processes."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if place.world_size > 1:
        distributed.all_reduce(tensor)
    return [each / place.world_size for each in tensor.tolist()]


def checkpoints(kind: type[Net], place: Place, n_steps: int) -> dict[str, float]:
    """Seconds of a checkpoint when twelve follow each other, and of all in a training with the default interval."""
    each_s = statistics.mean(checkpoints_of(kind(), 12, place, checkpoint_s=0.0))
    net = kind()
    spent = checkpoints_of(net, n_steps, place)
    wall = net.marks[-1][0] - net.marks[0][0]
    return {"each_s": each_s, "n": len(spent), "spent_s": sum(spent), "wall_s": wall}


def checkpoints_of(net: Net, n_steps: int, place: Place, **settings: Any) -> list[float]:
    """The seconds of each checkpoint of a training."""
    kept = Training._save
    spent: list[float] = []

    def timed(self: Training) -> None:
        start = time.perf_counter()
        kept(self)
        spent.append(time.perf_counter() - start)

    Training._save = timed  # type: ignore[method-assign]
    try:
        ours(net, n_steps, place, **settings)
    finally:
        Training._save = kept  # type: ignore[method-assign]
    return spent


def saved_by_hand(net: Net, n_times: int, place: Place) -> list[float]:
    """Seconds of `torch.save` and fsync of what AdamW's checkpoints have: the weights, and two moments of each."""
    weights = net.model().to(place.device).state_dict()
    state = [{name: tensor.clone() for name, tensor in weights.items()} for _ in range(3)]
    spent = []
    with tempfile.TemporaryDirectory() as folder:
        for n in range(n_times):
            start = time.perf_counter()
            with open(Path(folder, f"{n}.pt"), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            spent.append(time.perf_counter() - start)
    return spent


def gpu(kind: type[Net], place: Place, n_steps: int, n_rounds: int) -> list[dict[str, float]]:
    """Samples a second in both precisions, for each round."""
    arms: dict[str, dict[str, Any]] = {
        "fp32 eager": {"precision": "fp32"},
        "bf16 compiled": {"precision": "bf16", "compile": True},
    }
    return [
        {name: ours(kind(), n_steps, place, **how).samples_per_s for name, how in arms.items()} for _ in range(n_rounds)
    ]


def main() -> None:
    """Compute what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", choices=("steps", "checkpoints", "gpu"))
    parser.add_argument("net", choices=NETS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        distributed.init_process_group("gloo")
    place = Place(arguments.device, rank, world_size, rank)
    kind = NETS[arguments.net]
    if arguments.arm == "checkpoints":
        found: Any = checkpoints(kind, place, arguments.steps)
    else:
        found = {"steps": steps, "gpu": gpu}[arguments.arm](kind, place, arguments.steps, arguments.rounds)
    if rank == 0:
        print(json.dumps(found))
    if world_size > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
