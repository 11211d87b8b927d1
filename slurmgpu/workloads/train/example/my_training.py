"""Trains a small classifier; replace its model, data and loss with yours."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class MyTraining:
    """Learns which of two numbers is larger; arguments come from [settings.arguments] or [sweep]."""

    def __init__(self, width: int = 32) -> None:
        self.width = width

    def model(self):
        """The model on the CPU; slurmgpu moves it to the GPU."""
        return nn.Sequential(nn.Linear(2, self.width), nn.ReLU(), nn.Linear(self.width, 2))

    def data(self, split):
        """The samples of "train", "val" or "test"; None for a split that does not exist."""
        sizes = {"train": 2000, "val": 500}
        if split not in sizes:
            return None
        numbers = torch.rand(sizes[split], 2, generator=torch.Generator().manual_seed(sizes[split]))
        return TensorDataset(numbers, (numbers[:, 0] < numbers[:, 1]).long())

    def loss(self, model, batch):
        """The mean loss of a batch."""
        numbers, labels = batch
        return nn.functional.cross_entropy(model(numbers), labels)

    def metrics(self, model, batch):
        """Metrics by name, a value for each sample; slurmgpu averages them over a split."""
        numbers, labels = batch
        return {"accuracy": (model(numbers).argmax(1) == labels).float()}
