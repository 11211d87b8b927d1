"""A block of test examples; the training examples stream past it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from slurmgpu.influence.gradients import Gradients
from slurmgpu.influence.parts import Multiply
from slurmgpu.influence.results import Array, Results, TopExamples
from slurmgpu.influence.top_k import TopK
from slurmgpu.influence.train_gradients import Checkpoint, ChunkGradients

PIECE = {"cpu": 1 << 16, "cuda": 1 << 40}
"""Pairs to process together after the multiplication: as many as the caches hold."""

HEADROOM = 40
"""Normalised tests have gradients of length about 2^HEADROOM.

Their products with training gradients then fit float32's range for lengths from 10⁻³⁸ (smaller ones lose bits) up to
10²⁶.
"""


class Block:
    """The gradients of n tests at each checkpoint, and the results so far; fills `full` (n, n_train) if given.

    With a normalisation it replaces `gradients` by scaled ones.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        gradients: list[Gradients],
        group_of: Mapping[str, int],
        *,
        n_train: int,
        normalize: str,
        top_k: int,
        multiply: Multiply,
        full: Array | None,
    ) -> None:
        self._checkpoints, self._gradients, self._group_of = checkpoints, gradients, group_of
        self._multiply, self._full = multiply, full
        self._n, self._n_groups = len(gradients[0]), 1 + max(group_of.values())
        like = gradients[0].losses
        own = torch.stack([c.squares(g) for c, g in zip(checkpoints, gradients, strict=True)]).sum(0)
        self._self_influence = own.to(like.dtype)
        self._scale: Tensor | None = None
        if normalize != "none":
            length = own.sqrt().where(own.isfinite() & (own > 0), 1)
            exponents = torch.frexp(length).exponent.long()
            for at in range(len(gradients)):  # one at a time, for the memory
                gradients[at] = gradients[at].scaled(HEADROOM - exponents)
            rest = torch.ldexp(_inverse_root(own) if normalize == "cosine" else torch.ones_like(own), exponents)
            self._scale = rest.to(like.dtype)[:, None]
        self._top = [TopK(self._n, top_k, n_train, self._n_groups, sign, like) for sign in (1, -1) if top_k]
        self._statistics = Statistics(self._n, like)
        self._problems: dict[int, str] = {}

    def add(self, lines: Tensor, streamed: Iterator[ChunkGradients], buffer: Tensor, allowed: Tensor | None) -> None:
        """Add the training examples `lines` (b,); `allowed` (n, b); `buffer` holds products."""
        shape = self._n_groups, self._n, len(lines)
        shares = buffer[: shape[0] * shape[1] * shape[2]].view(shape).zero_()
        scale = self._add_products(
            streamed, [({name: shares[g] for name, g in self._group_of.items()}, self._multiply)]
        )
        columns = lines.cpu().numpy() if self._full is not None else None
        step = max(1, PIECE.get(lines.device.type, 1 << 16) // len(lines))
        for first in range(0, self._n, step):
            rows = slice(first, first + step)
            piece = shares[:, rows]
            if scale is not None and self._scale is not None:
                piece *= scale * self._scale[rows]
            values = piece.sum(0) if len(piece) > 1 else piece[0]
            self._note_problems(first, values, lines)
            if self._full is not None:
                self._full[rows][:, columns] = _array(values)
            counts: Tensor | int = len(lines)
            if allowed is not None:
                values = values.where(allowed[rows], 0)
                counts = allowed[rows].sum(1)
            self._statistics.add(first, values, counts)
            for top in self._top:
                top.offer(first, values, lines, piece)

    def both(self, streamed: Iterator[ChunkGradients], n: int, exact: Multiply) -> tuple[Tensor, Tensor]:
        """The influences of n training examples (n_tests, n), multiplied by `exact` and in the chosen precision."""
        found = self._gradients[0].losses.new_zeros(2, self._n, n)
        outs = [dict.fromkeys(self._group_of, out) for out in found]
        scale = self._add_products(streamed, list(zip(outs, (exact, self._multiply), strict=True)))
        if scale is not None and self._scale is not None:
            found *= scale * self._scale
        return found[0], found[1]

    def found(self, groups: tuple[str, ...], errors: tuple[Tensor, Tensor] | None = None) -> Results:
        """The results; `errors` are the relative error of each row and the overlap of its top 10."""
        last, statistics = self._gradients[-1], self._statistics
        for row in (~last.losses.isfinite()).nonzero()[:, 0].tolist():
            self._problems[row] = f"its loss is {float(last.losses[row])}"
        proponents, opponents = (self._listed(top) for top in self._top or (None, None))
        return Results(
            groups,
            proponents,
            opponents,
            self_influence=_array(self._self_influence),
            loss=_array(last.losses),
            score=_array(last.scores),
            n_counted=_array(statistics.count),
            sum=_array(statistics.sum),
            abs_sum=_array(statistics.abs_sum),
            std=_array(statistics.std),
            positive_share=_array(statistics.positive_share),
            precision_error=None if errors is None else _array(errors[0]),
            top10_overlap=None if errors is None else _array(errors[1]),
            problems=self._problems,
        )

    def _add_products(
        self, streamed: Iterator[ChunkGradients], outs: Sequence[tuple[Mapping[str, Tensor], Multiply]]
    ) -> Tensor | None:
        """Sum over the checkpoints; the factors of the columns (b,) beside `_scale`, if normalised."""
        squares = None
        for checkpoint, mine in zip(self._checkpoints, self._gradients, strict=True):
            theirs = next(streamed)
            for out, multiply in outs:
                mine.add_products(
                    theirs.gradients,
                    out,
                    scale=checkpoint.learning_rate,
                    weights=checkpoint.weights,
                    multiply=multiply,
                )
            if theirs.squares is not None:
                squares = theirs.squares if squares is None else squares + theirs.squares
            del theirs  # frees memory before the next are computed
        if squares is None:
            return None
        dtype = self._self_influence.dtype
        return (_inverse_root(squares) * 2.0**-HEADROOM).clamp(max=torch.finfo(dtype).max).to(dtype)

    def _note_problems(self, first: int, values: Tensor, lines: Tensor) -> None:
        for row in (~values.sum(1).isfinite()).nonzero()[:, 0].tolist():
            bad = (~values[row].isfinite()).nonzero()[:, 0].tolist()
            if bad:
                line, value = int(lines[bad[0]]), float(values[row, bad[0]])
                self._problems.setdefault(first + row, f"the influence of training example {line} (from 0) is {value}")

    def _listed(self, top: TopK | None) -> TopExamples:
        if top is None:
            none = self._gradients[0].losses.new_zeros(self._n, 0)
            return TopExamples(
                _array(none.long()), _array(none), _array(none[:, :, None].expand(-1, -1, self._n_groups))
            )
        found = TopExamples(*map(_array, top.found()))
        for row in self._problems:
            found.lines[row], found.values[row], found.shares[row] = -1, 0, 0
        return found


class Statistics:
    """Counts, sums and norms of n rows that are added in pieces, in float64."""

    def __init__(self, n: int, like: Tensor) -> None:
        self.count = like.new_zeros(n, dtype=torch.int64)
        self.n_positive = like.new_zeros(n, dtype=torch.int64)
        self.sum, self.abs_sum, self._squares = like.new_zeros(3, n, dtype=torch.float64)

    def add(self, first: int, values: Tensor, counts: Tensor | int) -> None:
        """Add columns (m, b) of the rows from `first` on; `counts` (m,) of them count, the others are 0."""
        rows = slice(first, first + len(values))
        exact = values.double()
        self.count[rows] += counts
        self.n_positive[rows] += (values > 0).sum(1)
        self.sum[rows] += exact.sum(1)
        self.abs_sum[rows] += torch.linalg.vector_norm(exact, 1, dim=1)
        self._squares[rows] += torch.linalg.vector_norm(exact, 2, dim=1).square()

    @property
    def std(self) -> Tensor:
        """The standard deviation (n,); NaN for no values."""
        return (self._squares / self.count - (self.sum / self.count).square()).clamp(min=0).sqrt()

    @property
    def positive_share(self) -> Tensor:
        """The share of positive values (n,); NaN for no values."""
        return self.n_positive.double() / self.count


def _inverse_root(squares: Tensor) -> Tensor:
    """1/√x, and 0 for 0: a zero gradient has no influence."""
    return squares.rsqrt().where(squares > 0, 0)


def _array(values: Tensor) -> Array:
    return cast(Array, values.cpu().numpy())
