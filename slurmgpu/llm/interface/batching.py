"""Batches by tokens: how many fit, and smaller batches when memory runs out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise, takewhile
from typing import Any, ParamSpec, TypeVar

from slurmgpu.llm.interface.engine import EngineOptions, Place
from slurmgpu.util.out_of_memory import free_memory, is_out_of_memory

log = logging.getLogger(__name__)

CPU_TOKENS, MOST_CPU_TOKENS, CPU_CACHE = 8192, 16384, 2**29
"""The default batch on CPUs is doubled while its keys and values take at most this many bytes."""
MOST_TOKENS = 65536
"""The largest default batch on GPUs."""
MOST_ROWS = 256
CPU_PADDING, GPU_PADDING = 128, 2048
"""The most padding tokens in a forward pass over prompts; beyond that, another pass is faster."""
PACK_TOKENS = 2048
"""The most tokens of texts packed one after the other, without padding: more are hardly faster."""
SHARE_OF_FREE = 0.8
PATIENCE = 20
"""The number of successful batches before a larger one is tried again."""
LEAST_PREFIX, LEAST_SHARE = 32, 0.25
"""The least tokens, and the least share of the prompts, for computing a common prefix once."""

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class Budget:
    """The most tokens of a batch: rows times the longest prompt and answer; reduced when memory runs out."""

    def __init__(self, tokens: int, place: Place) -> None:
        self.tokens = tokens
        self._whole = tokens
        self._place = place
        self._n_clean = 0
        self._grown = False

    def reduce(self, used: int) -> None:
        """Reduce the budget after a batch of `used` tokens ran out of memory."""
        self.tokens = max(1, min(self.tokens, used) // 2)
        self._n_clean, self._grown = 0, False
        log.warning("out of memory with a batch of %d tokens; continuing with %d", used, self.tokens)

    def succeed(self) -> None:
        """Count a successful batch; after many of them raise the budget once."""
        if self.tokens >= self._whole:
            return
        self._place.note("batch_tokens", self.tokens)
        self._n_clean += 1
        if self._n_clean >= PATIENCE and not self._grown:
            self.tokens, self._grown = min(self._whole, self.tokens * 5 // 4), True

    def attempt(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of `work`; None if it ran out of memory, after all references to its tensors are gone.

        In a process group, where all processes must do the same, the exception is raised.
        """
        try:
            return work(*args, **kwargs)
        except Exception as error:
            if self._place.world_size > 1 or not is_out_of_memory(error):
                raise
        # After the except block: the traceback refers to the tensors.
        return None

    def batches(
        self,
        items: Iterable[Item],
        lengths_of: Callable[[Item], tuple[int, int]],
        work: Callable[[list[Item]], T],
        n_alike: Callable[[Sequence[Item]], int] = len,
    ) -> Iterator[tuple[list[Item], T | None]]:
        """Batches within the budget, long items first, with the result of `work`; None for an item too large alone.

        `lengths_of` returns the tokens of an item's prompt and answer, and `n_alike` how many of the next items may
        share a batch. After running out of memory, a batch is retried with fewer items.
        """
        waiting = deque(sorted(items, key=lambda each: [-length for length in lengths_of(each)]))
        while waiting:
            next_ones = [*islice(waiting, MOST_ROWS)]
            lengths = [lengths_of(each) for each in next_ones[: n_alike(next_ones)]]
            n_taken, load = n_that_fit(Load(), lengths, self.tokens)
            some = [waiting.popleft() for _ in range(n_taken)]
            found = self.attempt(work, some)
            if found is not None:
                self.succeed()
            else:
                free_memory()
                if n_taken > 1:
                    self.reduce(load.tokens)
                    waiting.extendleft(reversed(some))
                    continue
            yield some, found


def cpu_tokens(kv_bytes: int) -> int:
    """The default batch on CPUs, for a cache of `kv_bytes` a token.

    A step reads all weights for any number of rows, so more rows need fewer steps.
    """
    return max(CPU_TOKENS, min(MOST_CPU_TOKENS, CPU_CACHE // max(1, kv_bytes)))


def default_tokens(loaded: Any, place: Place) -> int:
    """A budget from the free memory after loading the model; the same on all ranks of a group."""
    if place.device == "cpu":
        return cpu_tokens(loaded.kv_bytes)
    import torch

    free_memory()
    devices = range(place.gpus) if place.world_size == 1 else [loaded.device]
    free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
    if place.world_size > 1:
        shared = torch.tensor(free, device=loaded.device)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN)
        free = int(shared)
    config = loaded.model.config.get_text_config()
    # Activations of a prompt token in addition to its keys and values; the growing cache copies a layer.
    widths = 6 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    token_bytes = 1.25 * loaded.kv_bytes + widths * loaded.model.dtype.itemsize
    return int(min(MOST_TOKENS, max(256, SHARE_OF_FREE * free / token_bytes)))


def budget_of(options: EngineOptions, loaded: Any, place: Place) -> Budget:
    """The budget from the settings, or else from the free memory after loading the model."""
    return Budget(options.batch_tokens or default_tokens(loaded, place), place)


@dataclass(frozen=True)
class Load:
    """The size of a batch: `n_rows`, the current `columns`, and at most `more` further columns."""

    n_rows: int = 0
    columns: int = 0
    more: int = 0

    @property
    def tokens(self) -> int:
        """The tokens of the batch when it ends."""
        return self.n_rows * (self.columns + self.more)

    def add(self, prompt: int, answer: int) -> Load:
        """The load with one more row."""
        return Load(self.n_rows + 1, max(self.columns, prompt), max(self.more, answer))


def n_that_fit(
    load: Load, lengths: Sequence[tuple[int, int]], budget: int, size: Callable[[Load], int] = lambda load: load.tokens
) -> tuple[int, Load]:
    """How many of the next rows (tokens of prompt and of answer) can be added to a load, and the load with them.

    An empty batch takes at least one row. `size` returns the tokens of a load.
    """
    taken = 0
    for prompt, answer in lengths:
        grown = load.add(prompt, answer)
        if grown.n_rows > 1 and (grown.n_rows > MOST_ROWS or size(grown) > budget):
            break
        load, taken = grown, taken + 1
    return taken, load


def of_like_length(prompts: Sequence[tuple[int, ...]], padding: int) -> int:
    """How many prompts, sorted by length, can be read together with at most `padding` tokens of padding."""
    longest, n_padding = len(prompts[0]), 0
    for place, (before, prompt) in enumerate(pairwise(prompts), 1):
        if prompt != before:  # equal prompts are read once
            n_padding += longest - len(prompt)
        if n_padding > padding:
            return place
    return len(prompts)


def n_in_pack(lengths: Iterable[int], most: int = PACK_TOKENS) -> int:
    """How many texts with these lengths are packed one after the other, at least one; `most` bounds their tokens."""
    return max(1, sum(1 for total in accumulate(lengths) if total <= min(most, PACK_TOKENS)))


def n_common(rows: Sequence[tuple[int, ...]]) -> int:
    """The number of tokens that all rows begin with."""
    # All rows between the least and the greatest share the common prefix of both.
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(min(rows), max(rows), strict=False)))


def common_prefix(rows: Sequence[tuple[int, ...]]) -> int:
    """The number of tokens that all rows begin with, below the length of the shortest row."""
    return min(n_common(rows), min(map(len, rows)) - 1) if len(rows) > 1 else 0


def is_worthwhile(n_prefix: int, rows: Sequence[Sequence[int]]) -> bool:
    """Whether a prefix is long enough to be computed once for all rows."""
    return n_prefix >= LEAST_PREFIX and n_prefix * len(rows) >= LEAST_SHARE * sum(map(len, rows))
