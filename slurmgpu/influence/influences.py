"""The influences of all training examples on test examples, streamed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slurmgpu.influence.blocks import Block
from slurmgpu.influence.parts import exactly
from slurmgpu.influence.precision import Precision, errors, matmul_precision, multiply_for
from slurmgpu.influence.results import Array, Results, TopExamples, as_float16, joined
from slurmgpu.influence.top_k import ROOM
from slurmgpu.influence.train_gradients import Checkpoint, TrainGradients

__all__ = ["Allowed", "Checkpoint", "Influences", "Options", "Results", "TopExamples"]

Allowed = Callable[[Tensor], Tensor]
"""Maps lines (b,) of training examples to (n, b) bool for n tests: which may be listed and counted."""

N_SAMPLE = 1024
"""Training examples for measuring the error of a reduced precision."""


@dataclass(frozen=True)
class Options:
    """The wanted parameters and results, and the memory for them.

    With a `top_k` of 0 there are no lists; then, without `full`, nothing is streamed.
    """

    wanted: tuple[str, ...]
    top_k: int = 100
    normalize: Literal["none", "train", "cosine"] = "none"
    precision: Precision = "fp32"
    memory_bytes: int = 200_000_000
    keep_bytes: int = 0
    full: Literal[False, "float16", "float32", "float64"] = False


class Influences:
    """The influences of the training examples `train` (n_train, c), queried in batches of test examples.

    The influence of z on a test z' is Σ over checkpoints η ⟨∇ℓ(z'), ∇ℓ(z)⟩. `normalize`: "train" divides that sum by
    √K(z, z), "cosine" by √K(z', z') as well, with K(z, z) = Σ η |∇ℓ(z)|².

    Besides the models, `train` and the results, it uses `memory_bytes`, or what one training and one test example need
    if that is more. One half is for a chunk of b training examples, b · bytes_of_work. Chunks lie on a fixed grid, so
    their gradients can be kept for later calls, in `keep_bytes` more. The other half is for m tests at a time,
    m · `bytes_of_test`; for further tests the training examples are streamed again. Weights need three times the
    largest matrix in addition.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], train: Tensor, options: Options) -> None:
        self._checkpoints, self._options = checkpoints, options
        model = checkpoints[-1].model
        self._like = next(iter(model.parameters_by_name().values())).detach()
        self.groups: tuple[str, ...] = tuple(dict.fromkeys(model.groups[name] for name in options.wanted))
        self._group_of = {name: self.groups.index(model.groups[name]) for name in options.wanted}
        self._multiply = multiply_for(options.precision)
        self._stream = TrainGradients(
            checkpoints,
            train.to(self._like.device),
            options.wanted,
            work_bytes=options.memory_bytes // 2,
            keep_bytes=options.keep_bytes,
            with_squares=options.normalize != "none",
        )
        self._n_train, self._buffer = len(train), self._like.new_empty(0)

    @property
    def n_chunks(self) -> int:
        """The number of chunks of training examples."""
        return len(self._stream)

    @property
    def chunk_size(self) -> int:
        """The largest number of training examples in a chunk."""
        return self._stream.chunk_size

    @property
    def bytes_of_test(self) -> int:
        """The memory of a test: its gradients, products with a chunk, and lists.

        Σ over checkpoints bytes_of_result + chunk · (s · (groups + 6) + 16) + 8 · top_k · (s · (groups + 1) + 8), for
        numbers of s bytes; a reduced precision needs 2 · 1,024 · s more to measure its error, and a normalisation a
        checkpoint's bytes_of_result more to scale gradients.
        """
        n_groups, size = len(self.groups), int(self._like.element_size())
        results = [checkpoint.model.bytes_of_result("test") for checkpoint in self._checkpoints]
        gradients: int = sum(results) + (max(results) if self._options.normalize != "none" else 0)
        products = self.chunk_size * (size * (n_groups + 6) + 16)
        lists = (2 * ROOM + 2) * self._options.top_k * (size * (n_groups + 1) + 8)
        sample = 0 if self._multiply is exactly else 2 * size * N_SAMPLE
        return gradients + products + lists + sample

    @property
    def tests_at_once(self) -> int:
        """The largest number of tests that are processed at a time."""
        most, before = self.bytes_of_test, 0
        for checkpoint in self._checkpoints:  # earlier gradients stay while the next ones are computed
            most = max(most, before + checkpoint.model.bytes_of_work("test"))
            before += checkpoint.model.bytes_of_result("test")
        return max(1, self._options.memory_bytes // 2 // most)

    def of(self, tests: Tensor, allowed: Allowed | None = None) -> Results:
        """The results for the tests (n, c), n > 0; only allowed training examples are listed and counted."""
        tests, wanted = tests.to(self._like.device), self._options.full
        # A row's scale is only known when the row is complete.
        dtype = "float32" if wanted == "float16" else wanted
        full = np.zeros((len(tests), self._n_train), dtype) if dtype else None
        blocks = [slice(first, first + self.tests_at_once) for first in range(0, len(tests), self.tests_at_once)]
        with torch.no_grad(), matmul_precision("ieee"):
            found = joined(
                [self._of_block(tests[rows], rows, allowed, None if full is None else full[rows]) for rows in blocks]
            )
        full, scale = as_float16(full) if full is not None and wanted == "float16" else (full, None)
        return replace(found, full=full, full_scale=scale)

    def _of_block(self, tests: Tensor, rows: slice, allowed: Allowed | None, full: Array | None) -> Results:
        options = self._options
        block = Block(
            self._checkpoints,
            [checkpoint.model.gradients(tests, "test", options.wanted) for checkpoint in self._checkpoints],
            self._group_of,
            n_train=self._n_train,
            normalize=options.normalize,
            top_k=options.top_k,
            multiply=self._multiply,
            full=full,
        )
        if not options.top_k and not options.full:
            return block.found(self.groups)
        n_products = len(self.groups) * len(tests) * self.chunk_size
        if len(self._buffer) < n_products:  # reused, since touching new memory is slower than multiplying
            self._buffer = self._like.new_empty(n_products)
        for chunk in range(self.n_chunks):
            lines = self._stream.lines(chunk)
            block.add(
                lines,
                self._stream.chunk(chunk),
                self._buffer,
                None if allowed is None else allowed(lines)[rows].to(lines.device),
            )
        return block.found(self.groups, self._errors(block))

    def _errors(self, block: Block) -> tuple[Tensor, Tensor] | None:
        if self._multiply is exactly:
            return None
        pairs = [block.both(self._stream.at(lines), len(lines), exactly) for lines in self._stream.sample(N_SAMPLE)]
        exact, reduced = (torch.cat(found, 1) for found in zip(*pairs, strict=True))
        return errors(exact, reduced)
