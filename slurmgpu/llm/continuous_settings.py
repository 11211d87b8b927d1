"""What the manager of continuous batches is made for, and the settings that it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.answers import Encoded

if TYPE_CHECKING:
    from slurmgpu.llm.loading import Loaded

MOST_REQUESTS = 256
"""Requests in one batch: scores are a row of the vocabulary for each, several times over where tokens are sampled."""
CPU_PAGE, CPU_TOKENS, CPU_BATCH_TOKENS = 32, 8192, 1024
"""The cache's pages and size on a CPU, where the manager's own choice is 60 % of the memory, and how many tokens are
computed at once: without flash attention there is a mask of these times those."""
PAGE, MOST_PAGED = 256, 131072
"""The cache's pages on a GPU, and the most tokens of a request for which the quick way to one more token has room."""
SAMPLING_SHARE = 0.8
"""Of the free memory, for the cache, where tokens are sampled: the manager's own choice, had it our sampler by then."""


@dataclass(frozen=True)
class Needs:
    """What a manager must be made for."""

    sampled: bool = False
    narrows: bool = False
    stops: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, requests: Sequence[Encoded]) -> Needs:
        """What these requests need."""
        all_sampling = [each.request.sampling for each in requests]
        return cls(
            sampled=any(each.temperature > 0 for each in all_sampling),
            narrows=any(
                each.temperature > 0 and (each.top_k > 0 or each.top_p < 1 or each.min_p > 0) for each in all_sampling
            ),
            stops=any(each.stop for each in all_sampling),
            logprobs=any(each.logprobs for each in all_sampling),
        )

    def __or__(self, other: Needs) -> Needs:
        """What either needs."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Needs(*(mine or theirs for mine, theirs in pairs))


def is_8bit(model: Any) -> bool:
    """Whether bitsandbytes computes in 8 bits, for which it waits for the GPU in each layer."""
    return bool(getattr(model, "is_loaded_in_8bit", False))


def settings(needs: Needs, longest: int, loaded: Loaded, *, flash: bool) -> dict[str, Any]:
    """The manager's settings, by the names that they have in any version, for requests of `longest` tokens at most."""
    wanted: dict[str, Any] = {
        "max_requests_per_batch": MOST_REQUESTS,
        "return_logprobs": needs.logprobs,
        "auto_switch_to_flash": False,  # it has been chosen
        "seed": 0,
    }
    if needs.stops:
        # A request that is cancelled while a second batch is in flight breaks the cache's books in 5.23.
        wanted["use_async_batching"] = False
    if loaded.model.device.type == "cpu":
        wanted["page_size"] = wanted["block_size"] = CPU_PAGE
        wanted["num_blocks"] = -(-max(CPU_TOKENS, 4 * longest) // CPU_PAGE)
        wanted["max_batch_tokens"] = CPU_BATCH_TOKENS
        return wanted
    if needs.sampled:
        wanted["max_memory_percent"] = SAMPLING_SHARE
    if flash:
        wanted["max_blocks_per_request"] = -(-min(loaded.context, MOST_PAGED) // PAGE) + 1
    if is_8bit(loaded.model):
        wanted["use_cuda_graph"] = False
    return wanted
