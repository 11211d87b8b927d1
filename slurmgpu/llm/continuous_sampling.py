"""Sampling in continuous batching, with the same tokens as in static batches, and rules for each request.

Transformers keeps a request's arguments for logits processors in rows of int32 beside the batch, at a fixed address for
CUDA graphs. Code here must not read a tensor's value, which a graph could not replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurmgpu.llm.answers import Encoded
from slurmgpu.llm.sampling import Rules, perturb_all

if TYPE_CHECKING:
    from torch import Tensor

ARGUMENT = "slurmgpu"
"""The request's argument: key, tokens of the prompt, temperature, top_k, top_p, min_p."""
N_LANES = 7


def arguments(encoded: Encoded) -> dict[str, Any]:
    """The arguments of `add_request` for a sampled request; none for a greedy one."""
    sampling = encoded.request.sampling
    if sampling.temperature == 0:
        return {}
    rules = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return {ARGUMENT: (encoded.request.key, len(encoded.tokens), *rules)}


def sampler(*, narrows: bool) -> Any:
    """The manager's `logit_processor`: the greatest score is the request's next token.

    `narrows` says whether any request has top_k, top_p or min_p; if not, nothing is sorted.
    """
    import torch
    from transformers import LogitsProcessorList
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

    class Sampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(LogitsProcessorList())
            self.tensors_required = N_LANES
            self.do_processing = True

        def check_kwargs(self, kwargs: dict[str, Any]) -> None:
            if set(kwargs) - {ARGUMENT}:
                raise ValueError(f"unknown arguments of a request: {sorted(kwargs)}")

        def fill_defaults(self, int32_tensor: Tensor) -> None:
            int32_tensor.zero_()  # temperature 0: greedy

        def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
            states = [each.state for each in requests_in_batch if each.has_new_token]
            if states:
                arg_storage[:, : len(states)] = _pack(states).to(arg_storage.device)
            return arg_storage

        def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
            rules, positions = _unpack(logits_processor_args[:, : scores.shape[0]])
            return perturb_all(scores, rules, positions, narrows=narrows)

    def _pack(states: list[Any]) -> Tensor:
        rows = [(state, state.logit_processor_kwargs.get(ARGUMENT, (0, 0, 0.0, 0, 1.0, 0.0))) for state in states]
        keys = torch.tensor([row[0] for _, row in rows], dtype=torch.int64)
        # position_offset is the number of known tokens, also after the request was evicted and restarted.
        counts = torch.tensor([[state.position_offset - row[1], row[3]] for state, row in rows], dtype=torch.int32)
        shares = torch.tensor([[row[2], row[4], row[5]] for _, row in rows], dtype=torch.float32)
        return torch.cat([keys.view(torch.int32).view(-1, 2), counts, shares.view(torch.int32)], dim=1).T

    def _unpack(lanes: Tensor) -> tuple[Rules, Tensor]:
        keys = lanes[:2].T.contiguous().view(torch.int64)[:, 0]
        temperature, top_p, min_p = (lanes[place].contiguous().view(torch.float32) for place in (4, 5, 6))
        return Rules(keys, temperature, lanes[3].long(), top_p, min_p), lanes[2].long()

    return Sampler()
