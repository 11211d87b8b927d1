"""Batches by tokens: how much fits in one, in which order, and what becomes of it when memory runs out."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, TypeVar

from slurmgpu.llm.engine import Place
from slurmgpu.util.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

CPU_TOKENS = 8192
"""A batch on CPUs, unless `batch_tokens` says another."""
MOST_TOKENS = 65536
"""Of an engine's own choice; `batch_tokens` may say more."""
MOST_ROWS = 256
CPU_PADDING, GPU_PADDING = 128, 2048
"""Tokens of padding that one reading of prompts may have: more of them cost more than another reading."""
SHARE_OF_FREE = 0.8
PATIENCE = 20
"""So many batches must have gone well before a larger one is tried again."""
LEAST_PREFIX, LEAST_SHARE = 32, 0.25
"""A prefix is worth computing once from so many tokens on, if it is so much of the prompts."""

T = TypeVar("T")


class Budget:
    """How many tokens a batch may come to: rows times the longest of prompt and answer."""

    def __init__(self, tokens: int, place: Place) -> None:
        self.tokens = tokens
        self._whole = tokens
        self._place = place
        self._n_clean = 0
        self._grown = False

    def reduce(self, used: int) -> None:
        """A batch of `used` tokens was too much."""
        self.tokens = max(1, min(self.tokens, used) // 2)
        self._n_clean, self._grown = 0, False
        log.warning("out of memory with a batch of %d tokens; going on with %d", used, self.tokens)

    def succeed(self) -> None:
        """A batch went well: after many of them a little more is tried, once."""
        if self.tokens >= self._whole:
            return
        self._place.note("batch_tokens", self.tokens)
        self._n_clean += 1
        if self._n_clean >= PATIENCE and not self._grown:
            self.tokens, self._grown = min(self._whole, self.tokens * 5 // 4), True


def attempt(work: Callable[[], T], place: Place) -> T | None:
    """What `work` returns; None when memory was not enough: then nothing holds any more what it made.

    The processes of a group must all do the same: there the exception goes on to who calls the workload in step.
    """
    try:
        return work()
    except Exception as error:
        if place.world_size > 1 or not is_out_of_memory(error):
            raise
    # Only here, behind the exception, whose traceback held the tensors, does it make sense to free them.
    return None


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def default_tokens(loaded: Any, place: Place) -> int:
    """A budget that fits in the memory which is free once the model is loaded; the same on all ranks of a group."""
    if place.device == "cpu":
        return CPU_TOKENS
    import torch

    free_memory()
    devices = range(place.gpus) if place.world_size == 1 else [loaded.device]
    free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
    if place.world_size > 1:
        shared = torch.tensor(free, device=loaded.device)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN)
        free = int(shared)
    config = loaded.model.config.get_text_config()
    # What a token needs while the prompt is read, beside its keys and values; the cache's growth copies a layer.
    widths = 6 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    token_bytes = 1.25 * loaded.kv_bytes + widths * loaded.model.dtype.itemsize
    return int(min(MOST_TOKENS, max(256, SHARE_OF_FREE * free / token_bytes)))


@dataclass(frozen=True)
class Load:
    """What a batch will hold: `n_rows`, so many `columns` now, and at most so many more."""

    n_rows: int = 0
    columns: int = 0
    more: int = 0

    @property
    def tokens(self) -> int:
        """What the batch comes to, by the time it ends."""
        return self.n_rows * (self.columns + self.more)

    def add(self, prompt: int, answer: int) -> Load:
        """The load with one more row."""
        return Load(self.n_rows + 1, max(self.columns, prompt), max(self.more, answer))


def n_that_fit(load: Load, lengths: Sequence[tuple[int, int]], budget: int) -> tuple[int, Load]:
    """How many of the next rows (tokens of prompt and of answer) fit beside a load, and the load with them.

    An empty batch takes at least one.
    """
    taken = 0
    for prompt, answer in lengths:
        grown = load.add(prompt, answer)
        if grown.n_rows > 1 and (grown.tokens > budget or grown.n_rows > MOST_ROWS):
            break
        load, taken = grown, taken + 1
    return taken, load


def of_like_length(prompts: Sequence[tuple[int, ...]], padding: int) -> int:
    """How many prompts, sorted by length, are best read together: with at most so many tokens of padding."""
    longest, n_padding = len(prompts[0]), 0
    for place, (before, prompt) in enumerate(pairwise(prompts), 1):
        if prompt != before:  # equal prompts are read once
            n_padding += longest - len(prompt)
        if n_padding > padding:
            return place
    return len(prompts)


def common_prefix(rows: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all rows begin with; one less than the shortest has, if that is all of it."""
    if len(rows) < 2:
        return 0
    # What lies between the least and the greatest begins as both do.
    first, last = min(rows), max(rows)
    n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return min(n_same, min(map(len, rows)) - 1)


def is_worthwhile(n_prefix: int, rows: Sequence[Sequence[int]]) -> bool:
    """Whether a prefix is long enough to be computed once, for all of the rows."""
    return n_prefix >= LEAST_PREFIX and n_prefix * len(rows) >= LEAST_SHARE * sum(map(len, rows))
