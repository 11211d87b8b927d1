"""What tests/slurm/test_train_slurm.py trains; copied beside run files.

Each process writes down in `marks/` which samples of which step it computes. While there is a file `slow`, a
batch takes the seconds that it names, which is long enough to be hit.
"""

import contextlib
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

SIZES = {"train": 96, "val": 24}


class Samples:
    """Numbers to classify, read with random noise; the last of a sample is its index."""

    def __init__(self, n, noise):
        self.inputs = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
        self.targets = (self.inputs[:, 0] > self.inputs[:, 1]).long()
        self.noise = noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        drawn = torch.randn(6) + np.random.randn() + random.random()
        return self.inputs[index] + self.noise * drawn, self.targets[index], index


class Counted(nn.Module):
    """A small net that counts the samples it was trained on: its saved state shows where a training continues."""

    def __init__(self, width, dropout, world_size):
        super().__init__()
        self.world_size = world_size
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2))
        self.register_buffer("n_samples", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        if self.training:
            self.n_samples += len(inputs) * self.world_size
        return self.layers(inputs)


class Marked:
    """A training class; `name` is the configuration's. `dull` is without random numbers, but for the initial ones."""

    def __init__(self, width: int = 8, lr: float = 0.01, dull: bool = False):
        self.name, self.width, self.dull = f"{width}-{lr}", width, dull
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        Path("marks").mkdir(exist_ok=True)
        self.path = Path("marks") / f"{self.name}.{time.time_ns()}.{self.rank}.jsonl"

    def model(self):
        return Counted(self.width, 0.0 if self.dull else 0.2, self.world_size)

    def data(self, split):
        return Samples(SIZES[split], 0.0 if self.dull else 0.3) if split in SIZES else None

    def loss(self, model, batch):
        inputs, targets, indices = batch
        if model.training:
            mark = {"after": int(model.n_samples), "indices": indices.tolist()}
            with open(self.path, "a") as file:
                file.write(json.dumps(mark) + "\n")
            with contextlib.suppress(FileNotFoundError):
                time.sleep(float(Path("slow").read_text()))
        return nn.functional.cross_entropy(model(inputs), targets)

    def metrics(self, model, batch):
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float()}
