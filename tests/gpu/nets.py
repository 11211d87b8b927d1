"""The models that the part `training` trains, also in other processes.

Samples are the same in every process: each data set has its own generator.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import Dataset, TensorDataset

from slurmgpu.training.loop import Training
from slurmgpu.training.ranks import Place
from slurmgpu.training.settings import StrategyName, TrainingSettings
from slurmgpu.workload import Row, TaskContext
from slurmgpu.workloads.train import process
from tests.benchmarks import train_arms

N_STEPS, KILLED_AT = 16, 9
STRATEGIES: tuple[StrategyName, ...] = ("ddp", "fsdp")


class Sentences(train_arms.Net):
    """A transformer of 3 layers and 86 million parameters, on 1,024 words: large enough to fill a GPU.

    Three layers of width 1,536 have as many parameters as 12 of 768, a quarter of the kernels, and half of the work
    besides matrix products. Models that are trained on such a GPU are usually larger.
    """

    batch_size = 16

    def model(self) -> nn.Module:
        """An embedding, the layers, a mean over the words, and a head."""
        layer = nn.TransformerEncoderLayer(1536, 12, 6144, dropout=0.0, activation="gelu", batch_first=True)
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(1000, 1536), encoder, train_arms.Mean(), nn.Linear(1536, 100))

    def samples(self) -> Dataset[Any]:
        """1,024 sentences, with targets."""
        generator = torch.Generator().manual_seed(1)
        words = torch.randint(1000, (1024, 1024), generator=generator)
        return TensorDataset(words, torch.randint(100, (1024,), generator=generator))


class FewSentences(Sentences):
    """Its steps are short, so that the loop's own cost shows."""

    batch_size = 4


class ProfiledSentences(Sentences):
    """The kernels of its last steps are recorded."""

    n_first, n_warm, n_profiled = 6, 2, 24
    """Steps before the recorded ones; in the last `n_warm` of them the profiler warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.kernels: list[tuple[str, float]] = []
        """The name of each kernel, and its seconds, in `seconds` of steps."""

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Cross entropy."""
        if len(self.marks) == self.n_first - self.n_warm:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA],
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
            )
            self._profiler.start()
        elif len(self.marks) == self.n_first:
            torch.cuda.synchronize()
            self._profiler.step()
            self.seconds = -time.perf_counter()
        elif len(self.marks) == self.n_first + self.n_profiled:
            torch.cuda.synchronize()
            self.seconds += time.perf_counter()
            self._profiler.stop()
            self.kernels = [
                (event.name, event.time_range.elapsed_us() / 1e6)
                for event in self._profiler.events()
                if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
            ]
        return super().loss(model, batch)


class Toy(train_arms.Net):
    """A model that a CPU trains at once."""

    batch_size = 8

    def model(self) -> nn.Module:
        """1,300 parameters."""
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def samples(self) -> Dataset[Any]:
        """64 samples."""
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(64, 32, generator=generator), torch.randint(10, (64,), generator=generator))


class Normed(Toy):
    """A model whose loss depends on all samples of a step."""

    def model(self) -> nn.Module:
        """1,400 parameters, and running statistics."""
        return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


class Spectral(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Has complex parameters, an embedding with sparse gradients, and a sparse and an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 32, sparse=True)
        self.filter = nn.Parameter(torch.ones(32, dtype=torch.complex64))
        self.head = nn.Linear(32, 10)
        self.register_buffer("mixing", torch.eye(32).to_sparse_csr())
        self.register_buffer("scale", torch.ones(1).expand(32))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of the 10 classes."""
        mixed = (self.mixing @ inputs.T).T * self.scale + self.table(inputs[:, 0].abs().long().clamp(max=7))
        filtered: torch.Tensor = self.head((torch.fft.fft(mixed) * self.filter).real)
        return filtered


class Unusual(Toy):
    """Trains parameters that fused optimizers do not support, and returns a metric on the CPU."""

    def model(self) -> nn.Module:
        """1,000 parameters of several kinds."""
        return Spectral()

    def data(self, split: str) -> Dataset[Any] | None:
        """The same samples for training and validation."""
        return None if split == "test" else self.samples()

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whether each sample is right, on the CPU."""
        return {"right": (model(batch[0]).argmax(1) == batch[1]).float().cpu()}


class Weighed(Normed, Unusual):
    """Batches that count for more or less."""

    def weight(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """From 1 to 10."""
        return 1.0 + float(batch[1][0])


class Words(train_arms.Net):
    """A small transformer with dropout and an embedding, whose gradient is summed in no fixed order."""

    batch_size = 16

    def __init__(self, *, width: int = 256, kill_at: int | None = None) -> None:
        super().__init__()
        self.width, self.kill_at = width, kill_at

    def model(self) -> nn.Module:
        """1.9 million parameters at the default width."""
        layer = nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, dropout=0.1, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(1000, self.width), encoder, train_arms.Mean(), nn.Linear(self.width, 10))

    def samples(self) -> Dataset[Any]:
        """256 texts of 32 words."""
        generator = torch.Generator().manual_seed(1)
        words, targets = (torch.randint(n, size, generator=generator) for n, size in ((1000, (256, 32)), (10, (256,))))
        return TensorDataset(words, targets)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Cross entropy; the process is killed in the step `kill_at`."""
        if len(self.marks) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def train_words(folder: Path, device: str, net: Words, *, deterministic: bool) -> Row:
    """The workload's row: trained to the end, from the last checkpoint if there is one; the weights are in last.pt."""
    settings = TrainingSettings(
        steps=N_STEPS,
        batch_size=net.batch_size,
        seed=0,
        precision="bf16",
        deterministic=deterministic,
        checkpoint_s=0.0,
    )
    return process.row(lambda: net, settings, TaskContext(device, int(device != "cpu"), folder), folder, {})


def train_until_killed(folder: Path, device: str, width: int, deterministic: bool) -> None:
    """Like `train_words`, but the process is killed in a step."""
    train_words(folder, device, Words(width=width, kill_at=KILLED_AT), deterministic=deterministic)


def join_group(kind: str, rank: int, world_size: int, folder: Path) -> None:
    """One rank of a group: a sum over all ranks, its speed, and a training whose loss rank 0 writes to `folder`."""
    device = f"cuda:{rank}" if kind == "nccl" else "cpu"
    bound: dict[str, Any] = {}
    if kind == "nccl":
        torch.cuda.set_device(rank)
        bound["device_id"] = torch.device(device)
    distributed.init_process_group(kind, rank=rank, world_size=world_size, **bound)
    numbers = torch.full((64 << 20 if kind == "nccl" else 1000,), rank + 1.0, device=device)
    distributed.all_reduce(numbers)
    is_right = bool((numbers == world_size * (world_size + 1) / 2).all())
    start = time.perf_counter()
    distributed.all_reduce(numbers)
    float(numbers[0])  # waits for it
    seconds = time.perf_counter() - start
    settings = TrainingSettings(steps=4, global_batch_size=16, batch_size=16 // world_size, seed=0)
    place = Place(device, rank, world_size, rank)
    ways: list[tuple[train_arms.Net, TrainingSettings]] = [
        (Toy(), replace(settings, strategy=strategy))
        for strategy in STRATEGIES[: 1 if world_size == 1 else None]  # one process has neither
    ]
    if world_size > 1 and kind == "nccl":  # PyTorch's works on GPUs only
        ways.append((Normed(), replace(settings, sync_batchnorm=True)))
    losses = []
    for number, (net, chosen) in enumerate(ways):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        outcome = Training(net, chosen, place, own).run()
        losses.append((type(net).__name__, outcome.final["train_loss"]))
    if rank == 0:
        found = {"is_right": is_right, "bytes_s": numbers.nbytes / seconds, "losses": losses}
        (folder / "group.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
