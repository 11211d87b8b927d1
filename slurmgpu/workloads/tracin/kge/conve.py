"""ConvE (Dettmers et al. 2018): a convolution over head and relation gives a vector that scores the tails.

Its gradients are factors: one forward pass for each query, one backward pass for each triple. In evaluation mode the
norms are affine maps, so the second norm is folded into the convolution's filters and bias. The filters' gradients need
the image patches under the kernel, not the convolution's output.

Dimensions: n examples, u queries, embeddings of d, kernels of k, C channels, T = (rows, columns) positions of a feature
map. A feature map is flattened as C·T, in the order of the linear layer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slurmgpu.influence.parts import Dense, Outer, Part
from slurmgpu.influence.table_parts import Rows
from slurmgpu.workloads.tracin.kge.layouts import Layout
from slurmgpu.workloads.tracin.kge.losses import Loss
from slurmgpu.workloads.tracin.kge.outputs import Output, bias_part, n_candidates, output, relation_part, table_part
from slurmgpu.workloads.tracin.kge.parameter_names import Stack, group_of
from slurmgpu.workloads.tracin.kge.queries import Queries

TABLES = frozenset({"entity", "relation"})
FILTERS = frozenset({"conv.weight", "conv.bias", "bn1.weight", "bn1.bias"})
IMAGE = TABLES | {"bn0.weight", "bn0.bias"}
"""Parameters whose gradients need the derivative by the image."""


class ConvE(nn.Module):
    """Head and relation as two images (height, width), which `stack` puts one above the other or side by side.

    Then, as in the paper: norm, convolution, norm, ReLU, linear, norm, ReLU, and the dot product with each tail's
    embedding, plus a bias for each tail if `has_bias`. The dropouts, used in training only, apply to the input, to
    whole feature maps, and to the linear layer's output.
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
            raise ValueError(f"an image of {height} x {width} does not hold {embedding_dim} embedding dimensions")
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
        """A cache of `_channels_last`: `fc.weight` with its columns reordered, and the state that it was made from."""

    @classmethod
    def from_layout(cls, layout: Layout) -> ConvE:
        """The model for a checkpoint's layout, with uninitialised weights."""
        image, stack, channels, kernel = layout.image, layout.stack, layout.channels, layout.kernel
        if image is None or stack is None or channels is None or kernel is None:
            raise ValueError(f"the layout is for {layout.architecture}, not for ConvE")
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
        """The query vectors for the dot product with tails: (u, d)."""
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

    def factors(self, queries: Queries, loss: Loss, wanted: Collection[str]) -> tuple[dict[str, Part], Output]:
        """See Model."""
        wanted, of = frozenset(wanted), queries.of
        forward = _forward(self, queries)
        found = output(forward.vectors, self.entity, self.bias, queries, loss)
        by_normed = found.by_vector * (forward.vectors > 0)[of]
        by_linear = by_normed * (self.bn2.weight * _inverse_deviation(self.bn2))
        parts: dict[str, Part] = {
            "bn2.weight": Dense(by_normed * forward.hidden[of]),
            "bn2.bias": Dense(by_normed),
            "fc.weight": Outer(by_linear, forward.maps, of),
            "fc.bias": Dense(by_linear),
        }
        if self.bias is not None:
            parts["bias"] = bias_part(found, queries)
        by_filters, by_image = _back(self, forward, of, by_linear, bool(wanted & FILTERS), bool(wanted & IMAGE))
        if by_filters is not None:
            parts |= _filter_parts(self, by_filters)
        if by_image is not None:
            normed = forward.normed[of]
            parts["bn0.weight"] = Dense((by_image * normed).sum((1, 2))[:, None])
            parts["bn0.bias"] = Dense(by_image.sum((1, 2))[:, None])
            parts |= _table_parts(self, forward, queries, found, by_image)
        return {name: part for name, part in parts.items() if name in wanted}, found

    def bytes_of_work(self, loss: Loss) -> int:
        """See Model: the result, the query, the block and copies."""
        n_slots, (channels, width), n_window = n_candidates(loss), _sizes(self), math.prod(self.kernel)
        in_block = _rows_of_block(self) * self.positions[1]
        n_numbers = sum(
            (
                (n_window + 1) * math.prod(self.positions),  # patches
                in_block * (3 * channels + 2 * n_window + 1),
                channels * 3 * (n_window + 1),  # by_filters, and temporaries of the parts
                (2 * n_slots + 20) * width,
                3 * len(self.entity) if loss.reaches_all else 0,
            )
        )
        return self.bytes_of_result(loss) + n_numbers * int(self.entity.element_size()) + 64 * n_slots

    def bytes_of_result(self, loss: Loss) -> int:
        """See Model: for an example with its own query, and all parameters."""
        n_slots, (channels, width) = n_candidates(loss), _sizes(self)
        n_numbers = sum(
            (
                self.fc.in_features + width,  # fc.weight
                (n_slots + 2) * width + n_slots,  # entity, relation, bias
                3 * width,  # fc.bias, bn2
                channels * (math.prod(self.kernel) + 3),  # conv, bn1
                2 + 2,  # bn0; the loss and the score
                2 * len(self.entity) + width + 3 if loss.reaches_all else 0,  # Spread
            )
        )
        return n_numbers * int(self.entity.element_size()) + 8 * (2 * n_slots + 5)


@dataclass(frozen=True)
class _Forward:
    """Results of u queries for the backward pass; `normed` and `hidden` are before a norm's scale and shift."""

    normed: Tensor  # (u, height, width)
    patches: Tensor  # (u, k + 1, T): the last row is 1, for the bias
    maps: Tensor  # (u, C·T), after the ReLU
    hidden: Tensor  # (u, d)
    vectors: Tensor  # (u, d)


def _forward(model: ConvE, queries: Queries) -> _Forward:
    images = model.images(queries.heads, queries.relations)[:, 0]
    bn0, bn2 = model.bn0, model.bn2
    normed = (images - _mean(bn0)) * _inverse_deviation(bn0)
    patches = _patches(model, normed * bn0.weight + bn0.bias)
    filters, shift = _folded(model)
    maps = (torch.cat([filters, shift[:, None]], 1) @ patches).relu_().flatten(1)
    hidden = (torch.addmm(model.fc.bias, maps, model.fc.weight.T) - _mean(bn2)) * _inverse_deviation(bn2)
    return _Forward(normed, patches, maps, hidden, (hidden * bn2.weight + bn2.bias).relu_())


def _folded(model: ConvE) -> tuple[Tensor, Tensor]:
    """The filters (C, k) and the bias (C,) of the convolution with the norm after it."""
    scale = model.bn1.weight * _inverse_deviation(model.bn1)
    assert model.conv.bias is not None
    return model.conv.weight.flatten(1) * scale[:, None], (model.conv.bias - _mean(model.bn1)) * scale + model.bn1.bias


def _patches(model: ConvE, images: Tensor) -> Tensor:
    """The image under the kernel at each position, and a row of 1s: (u, k + 1, T)."""
    (rows, columns), (high, wide) = model.positions, model.kernel
    found = images.new_empty(len(images), high * wide + 1, rows * columns)
    seen = images.unfold(1, high, 1).unfold(2, wide, 1)  # (u, rows, columns, high, wide)
    found[:, :-1].view(len(images), high, wide, rows, columns).copy_(seen.permute(0, 3, 4, 1, 2))
    found[:, -1] = 1
    return found


def _back(
    model: ConvE, forward: _Forward, of: Tensor, by_linear: Tensor, filters: bool, image: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The derivatives by the folded filters and bias (n, k + 1, C), and by the normed image (n, height, width).

    Computed in blocks of feature map rows that fit the CPU's caches. Within a block channels come last, so that all
    products are of large matrices.
    """
    if not filters and not image:
        return None, None
    n, n_queries, channels = len(of), len(forward.maps), len(model.conv.weight)
    (rows, columns), (high, wide) = model.positions, model.kernel
    folded = _folded(model)[0].T.contiguous()  # (k, C)
    weight = _channels_last(model)  # (d, T·C)
    maps = forward.maps.view(n_queries, channels, rows, columns)
    by_filters = by_linear.new_zeros(n, high * wide + 1, channels) if filters else None
    by_image = by_linear.new_zeros(n, *model.stacked) if image else None
    work, step = _work(by_linear), _rows_of_block(model)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        size, block = (stop - start) * columns, slice(start * columns, stop * columns)
        by_map = work.take("by_map", n, size * channels)
        torch.mm(by_linear, weight[:, block.start * channels : block.stop * channels], out=by_map)
        active = work.take("active", n_queries, stop - start, columns, channels)
        torch.sign(maps[:, :, start:stop].permute(0, 2, 3, 1), out=active)
        by_map *= _rows_of(active.flatten(1), of, work.take("active_of", n, size * channels))
        if by_filters is not None:
            seen = work.take("seen", n, high * wide + 1, size)
            by_filters.baddbmm_(_rows_of(forward.patches[:, :, block], of, seen), by_map.view(n, size, channels))
        if by_image is not None:
            by_patch = work.take("by_patch", high * wide, n * size)
            torch.mm(folded, by_map.view(n * size, channels).T, out=by_patch)
            for at, values in enumerate(by_patch.view(high * wide, n, stop - start, columns)):
                i, j = divmod(at, wide)
                by_image[:, start + i : stop + i, j : j + columns].add_(values)  # += would copy the slice onto itself
    return by_filters, by_image


def _rows_of(values: Tensor, of: Tensor, out: Tensor) -> Tensor:
    return torch.index_select(values, 0, of, out=out)


class _Work:
    """Reused memory by name, uninitialised; the next call with a name overwrites what it returned."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._taken = like.new_empty(0), dict[str, Tensor]()

    def take(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self._taken or len(self._taken[name]) < size:
            self._taken[name] = self._like.new_empty(size)
        return self._taken[name][:size].view(shape)


_OF_THREAD = threading.local()


def _work(like: Tensor) -> _Work:
    """Work memory, shared by all calls on a CPU, where new pages take up to 20 % more time; not needed on a GPU."""
    if like.is_cuda:
        return _Work(like)
    kept: dict[torch.dtype, _Work] = _OF_THREAD.__dict__.setdefault("kept", {})
    return kept.setdefault(like.dtype, _Work(like))


def _channels_last(model: ConvE) -> Tensor:
    """The linear layer's weight with its columns in the order of positions, then channels: (d, T·C); cached."""
    weight = model.fc.weight
    state = (weight.data_ptr(), weight._version, weight.dtype)
    if model.arranged is None or model.arranged[0] != state:
        by_channel = weight.detach().view(len(weight), len(model.conv.weight), -1)
        model.arranged = state, by_channel.mT.reshape(len(weight), -1)
    return model.arranged[1]


def _rows_of_block(model: ConvE) -> int:
    """Rows for about 1,000 columns of the linear layer's weight on a CPU; all rows on a GPU."""
    rows, columns = model.positions
    return rows if model.fc.weight.is_cuda else min(rows, -(-1024 // (columns * len(model.conv.weight))))


def _filter_parts(model: ConvE, by_filters: Tensor) -> dict[str, Part]:
    """The derivatives by the convolution and the norm after it, from those by the folded filters and bias."""
    filters, (by_filter, by_shift) = model.conv.weight.flatten(1), (by_filters[:, :-1], by_filters[:, -1])
    deviation = _inverse_deviation(model.bn1)
    scale = model.bn1.weight * deviation
    assert model.conv.bias is not None
    of_outputs = (by_filter * filters.T).sum(1) + by_shift * (model.conv.bias - _mean(model.bn1))
    return {
        "conv.weight": Dense((by_filter * scale).mT.flatten(1)),
        "conv.bias": Dense(by_shift * scale),
        "bn1.weight": Dense(of_outputs * deviation),
        "bn1.bias": Dense(by_shift.contiguous()),
    }


def _table_parts(model: ConvE, forward: _Forward, queries: Queries, found: Output, by_image: Tensor) -> dict[str, Part]:
    halves = (by_image * (model.bn0.weight * _inverse_deviation(model.bn0))).chunk(
        2, 1 if model.stack == "height" else 2
    )
    by_head, by_relation = (half.flatten(1) for half in halves)
    tails = table_part(found, forward.vectors, queries)
    index = torch.cat([queries.heads[queries.of][:, None], tails.index], 1)
    return {
        "entity": Rows(index, torch.cat([by_head[:, None], tails.values], 1), tails.spread),
        "relation": relation_part(queries, by_relation.contiguous()),  # frees the other half
    }


def _sizes(model: ConvE) -> tuple[int, int]:
    return len(model.conv.weight), int(model.entity.shape[1])


def _mean(norm: nn.modules.batchnorm._BatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _inverse_deviation(norm: nn.modules.batchnorm._BatchNorm) -> Tensor:
    assert norm.running_var is not None
    return (norm.running_var + norm.eps).rsqrt()
