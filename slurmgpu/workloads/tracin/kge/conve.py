"""ConvE (Dettmers et al. 2018): a convolution over head and relation gives a vector that is compared with tails."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slurmgpu.workloads.tracin.kge import conve_gradients
from slurmgpu.workloads.tracin.kge.layouts import Layout
from slurmgpu.workloads.tracin.kge.losses import Loss
from slurmgpu.workloads.tracin.kge.parameter_names import Stack, group_of


class ConvE(nn.Module):
    """Head and relation as two images (height, width), which `stack` puts one above the other or side by side.

    As in the paper follow norm, convolution, norm, ReLU, linear, norm, ReLU, and the dot product with each tail's
    embedding, to which `has_bias` adds a number for each tail. The dropouts, used in training only, apply to the input,
    to whole feature maps, and to the linear layer's output.
    """

    def __init__(
        self,
        n_entities: int,
        n_relations: int,
        embedding_dim: int = 200,
        *,
        image: tuple[int, int] = (10, 20),
        stack: Stack = "height",
        channels: int = 32,
        kernel: tuple[int, int] = (3, 3),
        has_bias: bool = True,
        dropouts: tuple[float, float, float] = (0.2, 0.2, 0.3),
    ) -> None:
        super().__init__()
        height, width = image
        if height * width != embedding_dim:
            raise ValueError(f"an image of {height} x {width} does not hold an embedding of {embedding_dim}")
        self.image, self.stack, self.kernel = image, stack, kernel
        self.stacked = (2 * height, width) if stack == "height" else (height, 2 * width)
        self.positions = (self.stacked[0] - kernel[0] + 1, self.stacked[1] - kernel[1] + 1)
        """Positions of the kernel: rows and columns of a feature map."""
        self.entity = nn.Parameter(torch.empty(n_entities, embedding_dim))
        self.relation = nn.Parameter(torch.empty(n_relations, embedding_dim))
        self.bn0 = nn.BatchNorm2d(1)
        self.conv = nn.Conv2d(1, channels, kernel)
        self.bn1 = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels * self.positions[0] * self.positions[1], embedding_dim)
        self.bn2 = nn.BatchNorm1d(embedding_dim)
        self.bias = nn.Parameter(torch.zeros(n_entities)) if has_bias else None
        self.input_dropout = nn.Dropout(dropouts[0])
        self.map_dropout = nn.Dropout2d(dropouts[1])
        self.output_dropout = nn.Dropout(dropouts[2])
        for table in (self.entity, self.relation):
            nn.init.xavier_normal_(table)
        self.groups = {name: group_of(name) for name, _ in self.named_parameters()}
        self.arranged: tuple[object, Tensor] | None = None
        """A cache of conve_gradients: `fc.weight` with its columns reordered, and the state that it was made from."""

    @classmethod
    def from_layout(cls, layout: Layout) -> ConvE:
        """The model that a checkpoint's tensors fit."""
        image, stack, channels, kernel = layout.image, layout.stack, layout.channels, layout.kernel
        if image is None or stack is None or channels is None or kernel is None:
            raise ValueError(f"the layout of {layout.architecture}, not of ConvE")
        return cls(
            layout.n_entities,
            layout.n_relations,
            layout.embedding_dim,
            image=image,
            stack=stack,
            channels=channels,
            kernel=kernel,
            has_bias=layout.has_bias,
        )

    def images(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The stacked images of u queries: (u, 1, height, width)."""
        images = [table.view(-1, 1, *self.image) for table in (self.entity[heads], self.relation[relations])]
        return torch.cat(images, 2 if self.stack == "height" else 3)

    def queries(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The vectors that tails' embeddings are compared with: (u, d)."""
        images = self.input_dropout(self.bn0(self.images(heads, relations)))
        maps = self.map_dropout(torch.relu(self.bn1(self.conv(images))))
        return torch.relu(self.bn2(self.output_dropout(self.fc(maps.flatten(1)))))

    def scores(self, heads: Tensor, relations: Tensor) -> Tensor:
        """The scores of all entities as tails: (u, N)."""
        found = self.queries(heads, relations) @ self.entity.T
        return found if self.bias is None else found + self.bias

    def is_factored(self, loss: Loss) -> bool:
        """See Model."""
        return True

    factors = conve_gradients.factors
    bytes_of_work = conve_gradients.bytes_of_work
    bytes_of_result = conve_gradients.bytes_of_result
