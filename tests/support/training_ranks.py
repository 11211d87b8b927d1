"""Trainings by 1, 2 and 4 processes: `python -m tests.support.training_ranks FOLDER CASE…`.

The outcome of each case is written to FOLDER/<case>-<number of processes>.pt by rank 0. Processes are forked from this
one, since torch takes seconds to import.
"""

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch._dynamo  # the first step of an optimizer imports it
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.training.loop import Training
from slurmgpu.training.ranks import Place
from slurmgpu.training.settings import TrainingSettings
from tests.support.forks import fork_ranks

N_TRAIN, N_VAL, N_TEST = 29, 7, 3
SIZES = {"train": N_TRAIN, "val": N_VAL, "test": N_TEST}


class Recording(torch.optim.SGD):
    """SGD that keeps the gradients of each step."""

    gradients: list = []

    def step(self, closure=None):
        [group] = self.param_groups
        if group["lr"]:  # torch.distributed.checkpoint makes a step of 0 to see what state there is
            self.gradients.append([whole(each.grad) for each in group["params"] if each.grad is not None])
        return super().step(closure)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


class Exact:
    """A training class in 64 bits, whose gradients are kept."""

    def __init__(self):
        Recording.gradients.clear()

    def model(self):
        layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)]
        return nn.Sequential(*layers, nn.Linear(5, 3)).double()

    def data(self, split):
        generator = torch.Generator().manual_seed(len(split))
        inputs = torch.randn(SIZES[split], 5, generator=generator, dtype=torch.float64)
        return TensorDataset(inputs, inputs[:, :3].argmax(1))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        outputs = model(batch[0])
        return {
            "accuracy": (outputs.argmax(1) == batch[1]).float(),
            "largest": outputs.max(1).values.mean(),
            "half": 0.5,
        }

    def optimizer(self, model):
        return Recording(model.parameters(), lr=0.5)


class Plain(Exact):
    """The same in 32 bits, with the optimizer of the settings."""

    optimizer = None

    def model(self):
        return super().model().float()

    def data(self, split):
        inputs, targets = super().data(split).tensors
        return TensorDataset(inputs.float(), targets)


class Unused(Exact):
    """Has a layer that only some losses use."""

    def model(self):
        model = super().model()
        model.spare = nn.Linear(5, 3).double()
        model.forward = lambda inputs: nn.Sequential.forward(nn.Sequential(*list(model)[:3]), inputs)
        return model


class Padded(Exact):
    """Lines of 1 to 9 tokens, padded to the longest of their batch; the loss is the mean over the tokens."""

    def model(self):
        return nn.Sequential(nn.Embedding(12, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 12)).double()

    def data(self, split):
        return [(torch.arange(1 + number**2 % 9) * (number + 2) + number) % 12 for number in range(SIZES[split])]

    def collate(self, lines):
        return nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=-1)

    def loss(self, model, batch):
        outputs = model(batch.clamp(min=0)).transpose(1, 2)
        return nn.functional.cross_entropy(outputs, (batch + 1) % 12 - (batch < 0) * 100, ignore_index=-100)

    def weight(self, batch):
        return (batch >= 0).sum()

    def metrics(self, model, batch):
        is_token = batch >= 0
        return {"first": batch[is_token].double().mean(), "length": is_token.sum(1).double()}


class Weightless(Padded):
    """Has a batch without tokens on one of several ranks, and reports it."""

    def weight(self, batch):
        return 0 if (batch == 11).any() and not (dist.is_initialized() and dist.get_rank() == 0) else 1.5


class Normed(Plain):
    """Has batch normalisation."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Broken(Plain):
    """Has a sample that is NaN."""

    def data(self, split):
        samples = super().data(split)
        samples.tensors[0][SIZES[split] // 2] = torch.nan
        return samples


class Drawn(Exact):
    """Draws new data at each call."""

    def data(self, split):
        inputs = torch.randn(N_TRAIN + N_VAL, 5, dtype=torch.float64)
        samples = TensorDataset(inputs, inputs[:, :3].argmax(1))
        parts = torch.utils.data.random_split(samples, [N_TRAIN, N_VAL])
        return {"train": parts[0], "val": parts[1]}.get(split)


class Different(Plain):
    """Has more samples on some ranks than on others."""

    def data(self, split):
        samples = super().data(split)
        more = dist.get_rank() if dist.is_initialized() and split == "val" else 0
        return TensorDataset(*(torch.cat([each, each[:more]]) for each in samples.tensors))


class Sometimes(Plain):
    """Has a metric in some batches only."""

    def metrics(self, model, batch):
        return {"always": 1.0} | ({"sometimes": 1.0} if (batch[1] == 2).all() else {})


BASE = {"epochs": 3, "global_batch_size": 12, "batch_size": 3, "lr": 0.02, "seed": 5, "threads": 1}
CASES = {
    "gradients": (Exact, {}),
    "a batch of more than all": (Exact, {"global_batch_size": 64, "batch_size": 4}),
    "one at a time": (Exact, {"batch_size": 1, "global_batch_size": 7}),
    "leaving out": (Exact, {"drop_last": True}),
    "static": (Exact, {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
    "computed again": (Exact, {"gradient_checkpointing": True}),
    "sharded": (Exact, {"strategy": "fsdp"}),
    "weighed": (Padded, {}),
    "weighed and sharded": (Padded, {"strategy": "fsdp"}),
    "weightless": (Weightless, {}),
    "unused": (Unused, {"find_unused_parameters": True}),
    "early": (Plain, {"epochs": 50, "lr": 1.0, "patience": 2, "metric": "val_accuracy"}),
    "sharded early": (Plain, {"epochs": 50, "lr": 1.0, "patience": 2, "metric": "val_accuracy", "strategy": "fsdp"}),
    "bf16": (Plain, {"precision": "bf16"}),
    "fp16": (Plain, {"precision": "fp16", "clip": 1.0}),
    "sharded bf16": (Plain, {"precision": "bf16", "strategy": "fsdp"}),
    "normed": (Normed, {}),
    "auto": (Plain, {"batch_size": "auto", "global_batch_size": 24}),
    "not a number": (Broken, {}),
    "sometimes": (Sometimes, {"batch_size": 1}),
    "drawn": (Drawn, {}),
    "different": (Different, {}),
    "sync_batchnorm": (Normed, {"sync_batchnorm": True}),
}

BY_FOUR = ("gradients", "weighed", "one at a time", "static", "normed", "not a number")
BY_NIGHT = ("weighed and sharded", "sharded early", "sharded bf16")
"""What "sharded" shows of the cases of the same names without it."""


def main(folder, names):
    """Run cases."""
    torch.set_num_threads(1)
    for world_size in (1, 2, 4):
        fork_ranks(world_size, run_all, folder, names, world_size)


def run_all(folder, names, world_size, rank):
    """Cases as one rank."""
    if world_size > 1:
        group = f"file://{folder}/group-{os.getppid()}-{world_size}"
        dist.init_process_group("gloo", init_method=group, rank=rank, world_size=world_size)
    place = Place("cpu", rank, world_size, rank)
    for name in names if world_size < 4 else [each for each in names if each in BY_FOUR]:
        user, settings = CASES[name]
        found = run(user, TrainingSettings(**BASE | settings), place, folder / f"{name}-{world_size}")
        if rank == 0:
            torch.save(found, folder / f"{name}-{world_size}.pt")


def run(user, settings, place, folder):
    """The outcome of a case on this rank."""
    try:
        outcome = Training(user(), settings, place, folder).run()
    except (ItemError, SlurmGPUError) as error:
        return {"error": str(error)}
    return {
        "outcome": asdict(outcome),
        "gradients": list(Recording.gradients),
        "weights": torch.load(folder / "last.pt", weights_only=True),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
