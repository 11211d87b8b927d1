"""Handwritten digits, 8 × 8 pixels each, out of scikit-learn, and a small convolutional network that reads them."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

PARTS = {"train": (0, 0.7), "val": (0.7, 0.8), "test": (0.8, 1.0)}


class Digits:
    """The training class: a model, the data, the loss. Settings of the run file come by name."""

    def __init__(self, width: int = 32, dropout: float = 0.2):
        self.width, self.dropout = width, dropout

    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(self.dropout),
            nn.Flatten(),
            nn.Linear(2 * self.width * 16, 10),
        )

    def data(self, split):
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        start, stop = (int(share * len(order)) for share in PARTS[split])
        mine = order[start:stop]
        return TensorDataset(images[mine], torch.tensor(labels)[mine])

    def loss(self, model, batch):
        images, labels = batch
        return cross_entropy(model(images), labels)

    def metrics(self, model, batch):
        images, labels = batch
        return {"accuracy": (model(images).argmax(1) == labels).float()}
