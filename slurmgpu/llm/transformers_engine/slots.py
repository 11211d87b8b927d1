"""Rows in a cache of fixed size; steps read and write the same memory each time, as CUDA graphs require.

A step has one of a few sizes: rows and columns of the cache, both rounded up. Unused rows are padding, which attends
only to its own token. All sizes share one allocation: the keys of a layer are the first rows x heads x columns x
dimension numbers of a flat tensor.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from slurmgpu.llm.interface.batching import MOST_ROWS, Load
from slurmgpu.llm.transformers_engine.caches import moves
from slurmgpu.llm.transformers_engine.prefill import Prefill, Prefilled
from slurmgpu.llm.transformers_engine.selfcheck import Agreement, agreement
from slurmgpu.util.exceptions import described

if TYPE_CHECKING:
    from torch import Tensor

ROWS: tuple[int, ...] = (1, 2, 4, 6, 8, 12, *range(16, 64, 8), *range(64, MOST_ROWS + 1, 16))
"""The row sizes of a step. Each size is captured when it is first needed, which takes as long as many steps.

Fewer sizes would leave more of the slots empty, so a batch with the same tokens would have fewer rows.
"""
LEAST_COLUMNS = 64
COLUMN_STEPS = ((128, 32), (512, 64), (2048, 128), (sys.maxsize, 256))
"""Up to this many columns, column sizes are multiples of this number."""
READ_SHARE = 0.25
"""The share of the slots' tokens that is read at once: prompts are in a separate cache until they are copied."""

P = ParamSpec("P")
T = TypeVar("T")
Forward = Callable[..., "Tensor"]
"""A forward pass: ids, mask, positions and cache to logits (row, column, token), as Prefill.forward."""


class SlotsError(Exception):
    """The slots or their graphs failed; the rows can be computed again without them."""


def row_size(n_rows: int) -> int:
    """The row size of a step with `n_rows` rows."""
    return next(size for size in ROWS if size >= n_rows)


def column_size(n_columns: int) -> int:
    """The column size of a step that needs `n_columns`: 64, 96, 128, 192, 256 …, less than 50 % more."""
    step = next(step for most, step in COLUMN_STEPS if n_columns <= most)
    return max(LEAST_COLUMNS, -(-n_columns // step) * step)


def tokens_of(load: Load) -> int:
    """The tokens of the cache that a load takes in slots at its end."""
    return row_size(load.n_rows) * column_size(load.columns + load.more)


@dataclass(frozen=True)
class Frame:
    """The memory for steps of one size: the first rows and columns of the slots.

    `ids`, `positions` (row, 1) and `mask` (row, column) are the model's inputs; `cursors` (row,) are the columns that
    the step writes, up to `lasts` (row,); `logits` (row, token) is the output.
    """

    size: tuple[int, int]
    ids: Tensor
    positions: Tensor
    mask: Tensor
    cursors: Tensor
    lasts: Tensor
    logits: Tensor
    cache: Any

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of a forward pass."""
        return self.ids, self.mask, self.positions, self.cache

    def compute(self, forward: Forward) -> None:
        """Set the logits with a forward pass, which may be repeated: it writes the same keys and values."""
        self.logits.copy_(forward(*self.inputs)[:, -1])


def compare_replay(frame: Frame, forward: Forward, replay: Callable[[], None], bound: float) -> Agreement:
    """How a replay's logits agree with a pass's; both start from NaN, and the frame keeps the replay's."""

    def after(work: Callable[[], None]) -> Tensor:
        frame.logits.fill_(math.nan)
        work()
        return frame.logits.clone()

    found = agreement(lambda: after(lambda: frame.compute(forward)), lambda: after(replay), bound)
    frame.logits.copy_(found.found)
    return found


class Runner(Protocol):
    """Computes steps, repeatedly in the same memory for each frame."""

    def run(self, frame: Frame, forward: Forward) -> None:
        """Set the frame's logits, as `frame.compute(forward)` does."""


class Slots:
    """The memory for at most `n_tokens` rows times columns, shaped like the cache of prompts that were read.

    `runner` is only for this memory: graphs contain its addresses.
    """

    def __init__(self, like: Prefilled, n_tokens: int, runner: Runner) -> None:
        import torch

        self.n_tokens = n_tokens
        self.runner = runner
        self._shapes = [(layer.keys.shape, layer.values.shape) for layer in like.cache.layers]
        self._flat = [
            tuple(each.new_zeros(n_tokens * each.shape[1] * each.shape[3]) for each in (layer.keys, layer.values))
            for layer in like.cache.layers
        ]
        device = like.mask.device
        self._mask = torch.zeros(n_tokens, dtype=torch.int64, device=device)
        self._ids = torch.zeros(MOST_ROWS, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(MOST_ROWS, 1, dtype=torch.int64, device=device)
        self._cursors = torch.zeros(MOST_ROWS, dtype=torch.int64, device=device)
        self._lasts = torch.zeros(MOST_ROWS, dtype=torch.int64, device=device)
        self._rows = torch.arange(MOST_ROWS, device=device)
        self._logits = like.logits.new_zeros(MOST_ROWS, like.logits.shape[1])
        self._frames: dict[tuple[int, int], Frame] = {}

    @property
    def n_bytes(self) -> int:
        """The bytes of the cache."""
        return sum(each.nbytes for pair in self._flat for each in pair)

    def frame(self, n_rows: int, n_columns: int) -> Frame:
        """The views of a size."""
        if (n_rows, n_columns) not in self._frames:
            self._frames[n_rows, n_columns] = self._make_frame(n_rows, n_columns)
        return self._frames[n_rows, n_columns]

    def _make_frame(self, n_rows: int, n_columns: int) -> Frame:
        from transformers.cache_utils import Cache

        from slurmgpu.llm.transformers_engine.cache_layers import FixedLayer

        rows, cursors = self._rows[:n_rows], self._cursors[:n_rows]
        layers = [FixedLayer(keys, values, rows, cursors) for keys, values in self.layers(n_rows, n_columns)]
        return Frame(
            (n_rows, n_columns),
            self._ids[:n_rows],
            self._positions[:n_rows],
            self.mask(n_rows, n_columns),
            cursors,
            self._lasts[:n_rows],
            self._logits[:n_rows],
            Cache(layers=layers),
        )

    def mask(self, n_rows: int, n_columns: int) -> Tensor:
        """The mask of the first rows, with `n_columns` columns: (row, column)."""
        return self._mask[: n_rows * n_columns].view(n_rows, n_columns)

    def layers(self, n_rows: int, n_columns: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the first rows in each layer: (row, head, column, dimension)."""
        return [
            tuple(
                flat[: n_rows * shape[1] * n_columns * shape[3]].view(n_rows, shape[1], n_columns, shape[3])
                for flat, shape in zip(flats, shapes, strict=True)
            )
            for flats, shapes in zip(self._flat, self._shapes, strict=True)
        ]


def _guarded(method: Callable[P, T]) -> Callable[P, T]:
    """The method, with SlotsError for anything that it raises."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise SlotsError(described(error).partition("\n")[0]) from error

    return guarded


class SlotRows:
    """Rows in slots; row and column sizes follow the rows in use."""

    goes_ahead = True

    def __init__(self, slots: Slots, prefill: Prefill, context: int) -> None:
        self._slots = slots
        self._prefill = prefill
        self._context = context
        self._ends: list[int] = []
        self._lasts: list[int] = []
        """The column of each row's next token, and its last needed column, as in the cursors and lasts of frames."""
        self._n_columns = 0

    @property
    def columns(self) -> int:
        """The cache's columns in use."""
        return max(self._ends)

    def size(self, load: Load) -> int:
        """The tokens of the cache that a load takes; more than any budget if the slots have no room for it."""
        found = tokens_of(load)
        return found if found <= self._slots.n_tokens else sys.maxsize

    @_guarded
    def step(self, latest: Tensor) -> Tensor:
        """The logits of the tokens after `latest` (row,), each row's last: (row, token)."""
        import torch

        n_rows = len(self._ends)
        self._set_columns(self.columns + 1)
        frame = self._slots.frame(row_size(n_rows), self._n_columns)
        frame.ids[:n_rows, 0] = latest
        frame.mask[:n_rows].scatter_(1, frame.cursors[:n_rows, None], 1)
        self._slots.runner.run(frame, self._prefill.forward)
        # Ended rows are computed until they are dropped: in their last column, at a position that the model supports.
        frame.positions[:n_rows].add_(1).clamp_(max=self._context - 1)
        frame.cursors[:n_rows] = torch.minimum(frame.cursors[:n_rows] + 1, frame.lasts[:n_rows])
        self._ends = [min(end + 1, last) for end, last in zip(self._ends, self._lasts, strict=True)]
        return frame.logits[:n_rows]

    @_guarded
    def keep(self, going_on: Sequence[int]) -> list[int]:
        """Keep these rows, given in ascending order; returns their new order."""
        import torch

        n_rows, moved = len(going_on), moves(going_on)
        order = [moved.get(row, row) for row in range(n_rows)]
        frame = self._slots.frame(row_size(len(self._ends)), self._n_columns)
        if moved:
            targets, sources = (torch.tensor([*each], device=frame.mask.device) for each in (moved, moved.values()))
            layers = [(layer.keys, layer.values) for layer in frame.cache.layers]
            inputs = (frame.positions, frame.cursors, frame.lasts, frame.mask)
            for each in (*inputs, *(each for pair in layers for each in pair)):
                each[targets] = each[sources]
        self._ends, self._lasts = [self._ends[row] for row in order], [self._lasts[row] for row in order]
        self._clear(n_rows, row_size(n_rows))
        wanted = column_size(self.columns + 1)
        if wanted < self._n_columns:
            self._move_to(wanted)
        return order

    @_guarded
    def join(self, read: Prefilled, most: Sequence[int]) -> None:
        """Append prompts that were read, as rows; each gets at most its number in `most` of tokens."""
        import torch

        first, n_columns = len(self._ends), read.mask.shape[1]
        if not self._ends:
            self._n_columns = column_size(n_columns + 1)
        self._set_columns(n_columns + 1)
        n_rows = first + len(read.mask)
        self._clear(first, row_size(n_rows))
        self._ends += [n_columns] * len(read.mask)
        # The last token of an answer is never read.
        lasts = [n_columns + max(0, n - 2) for n in most]
        self._lasts += lasts
        frame = self._slots.frame(row_size(n_rows), self._n_columns)
        new = slice(first, n_rows)
        frame.mask[new, :n_columns] = read.mask
        frame.cursors[new] = n_columns
        frame.lasts[new] = torch.tensor(lasts, device=frame.lasts.device)
        frame.positions[new, 0] = read.mask.sum(1).clamp(max=self._context - 1)
        for mine, other in zip(frame.cache.layers, read.cache.layers, strict=True):
            mine.keys[new, :, :n_columns] = other.keys
            mine.values[new, :, :n_columns] = other.values

    def _set_columns(self, n_needed: int) -> None:
        if n_needed > self._n_columns:
            self._move_to(column_size(n_needed))

    def _move_to(self, n_columns: int) -> None:
        """Move all rows to another column size in the same memory, by copying one layer at a time."""
        n_rows, n_used = row_size(len(self._ends)), min(self._n_columns, n_columns)
        places = [(self._slots.mask(n_rows, n) for n in (self._n_columns, n_columns))]
        old, new = (self._slots.layers(n_rows, n) for n in (self._n_columns, n_columns))
        places += [pair for olds, news in zip(old, new, strict=True) for pair in zip(olds, news, strict=True)]  # type: ignore[misc]
        for before, after in places:
            is_mask = before.ndim == 2
            held = before[:, :n_used].clone() if is_mask else before[:, :, :n_used].clone()
            # A masked column contributes 0 times its content, which must be finite.
            after.zero_()
            (after[:, :n_used] if is_mask else after[:, :, :n_used]).copy_(held)
        self._n_columns = n_columns

    def _clear(self, first: int, end: int) -> None:
        """Turn rows into padding: they use only the first column, which each step overwrites."""
        if first >= end:
            return
        frame, rows = self._slots.frame(end, self._n_columns), slice(first, end)
        for layer in frame.cache.layers:
            layer.keys[rows] = 0
            layer.values[rows] = 0
        for each in (frame.mask, frame.ids, frame.positions, frame.cursors, frame.lasts):
            each[rows] = 0
        frame.mask[rows, 0] = 1
