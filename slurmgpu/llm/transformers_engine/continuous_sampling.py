"""Sampling in continuous batching, with the same tokens as in static batches, and separate rules for each request.

transformers keeps a request's arguments for logits processors in int32 rows with the batch, at a fixed address for CUDA
graphs. Code here must not read a tensor's value on the host: a graph could not replay that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.interface.sampling import leave_next, restrict
from slurmgpu.llm.interface.sampling_rules import Kinds, Rules
from slurmgpu.llm.prompts.encoded import Encoded
from slurmgpu.llm.transformers_engine.grammars import Grammars, Matcher, unpack

if TYPE_CHECKING:
    from torch import Tensor

ARGUMENT, GRAMMAR = "slurmgpu", "slurmgpu_grammar"
"""The request's arguments: key, number of prompt tokens, temperature, top_k, top_p, min_p; and its grammar."""
N_LANES = 7


def arguments(encoded: Encoded, grammars: Grammars) -> dict[str, Any]:
    """The arguments of `add_request` for a sampled or structured request; {} for any other."""
    sampling, grammar = encoded.request.sampling, grammars.grammar_of(encoded)
    if sampling.temperature == 0 and grammar is None:
        return {}
    rules = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    found: dict[str, Any] = {ARGUMENT: (encoded.request.key, len(encoded.tokens), *rules)}
    return found if grammar is None else {**found, GRAMMAR: grammar}


class Masks:
    """The allowed next tokens of each row of a batch, in a tensor of bits at a fixed address."""

    def __init__(self, grammars: Grammars, n_rows: int) -> None:
        self._grammars = grammars
        self._n_rows = n_rows
        self._matchers: dict[str, tuple[Matcher, int]] = {}
        self._bits: Any = None

    def fill(self, states: Sequence[Any], device: Any) -> None:
        """Follow the answers of these requests to their last token, and set the rows' bits."""
        import torch

        if self._bits is None:
            size = (self._n_rows, self._grammars.n_bytes)
            self._bits = torch.full(size, 255, dtype=torch.uint8, device=device)
        before, self._matchers = self._matchers, {}
        matchers = [self._follow(state, before) for state in states]
        packed = self._grammars.packed(matchers)
        if packed is None:
            self._bits.fill_(255)
        else:
            self._bits[: len(states)] = torch.from_numpy(packed).to(device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the manager uses another stream

    def _follow(self, state: Any, known: Mapping[str, tuple[Matcher, int]]) -> Matcher | None:
        arguments = state.logit_processor_kwargs
        if GRAMMAR not in arguments:
            return None
        if state.request_id in known:
            matcher, n_taken = known[state.request_id]
        else:
            matcher, n_taken = self._grammars.follow(arguments[GRAMMAR]), 0
        # After an eviction the first tokens of the answer are at the end of the prompt.
        tokens = [*state.initial_tokens[arguments[ARGUMENT][1] :], *state.generated_tokens]
        for token in tokens[n_taken:]:
            matcher.take(token)
        self._matchers[state.request_id] = matcher, len(tokens)
        return matcher

    def apply(self, scores: Tensor) -> Tensor:
        """The scores (row, token), with -inf for tokens that may not come next; reads no value on the host."""
        return scores if self._bits is None else restrict(scores, unpack(self._bits[: len(scores)], scores.shape[-1]))


def sampler(grammars: Grammars | None, n_rows: int, kinds: Kinds) -> Any:
    """The manager's `logit_processor`, after which the argmax of scores is the request's next token.

    With `grammars`, requests may have structures, in batches of at most `n_rows`. `kinds` are the kinds of sampling.
    """
    from transformers import LogitsProcessorList
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

    masks = None if grammars is None else Masks(grammars, n_rows)

    class Sampler(ContinuousBatchingLogitsProcessorList):
        def __init__(self) -> None:
            super().__init__(LogitsProcessorList())
            self.tensors_required = N_LANES
            self.do_processing = True

        def check_kwargs(self, kwargs: dict[str, Any]) -> None:
            if set(kwargs) - {ARGUMENT, GRAMMAR}:
                raise ValueError(f"unknown request arguments: {sorted(kwargs)}")

        def fill_defaults(self, int32_tensor: Tensor) -> None:
            int32_tensor.zero_()  # temperature 0: greedy

        def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
            states = [each.state for each in requests_in_batch if each.has_new_token]
            if states:
                arg_storage[:, : len(states)] = _pack(states).to(arg_storage.device)
            if masks is not None:
                masks.fill(states, arg_storage.device)
            return arg_storage

        def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
            rules, positions = _unpack(logits_processor_args[:, : scores.shape[0]], kinds)
            allowed = scores if masks is None else masks.apply(scores)
            return leave_next(allowed, rules, positions)

    return Sampler()


def _pack(states: Sequence[Any]) -> Tensor:
    """The arguments of the states' requests as lanes: (lane, request), int32."""
    import torch

    rows = [(state, state.logit_processor_kwargs.get(ARGUMENT, (0, 0, 0.0, 0, 1.0, 0.0))) for state in states]
    keys = torch.tensor([row[0] for _, row in rows], dtype=torch.int64)
    # position_offset is the number of known tokens, even after the request was evicted and restarted.
    counts = torch.tensor([[state.position_offset - row[1], row[3]] for state, row in rows], dtype=torch.int32)
    shares = torch.tensor([[row[2], row[4], row[5]] for _, row in rows], dtype=torch.float32)
    return torch.cat([keys.view(torch.int32).view(-1, 2), counts, shares.view(torch.int32)], dim=1).T


def _unpack(lanes: Tensor, kinds: Kinds) -> tuple[Rules, Tensor]:
    """The rules of the requests, and the positions of their next tokens: (request,)."""
    import torch

    keys = lanes[:2].T.contiguous().view(torch.int64)[:, 0]
    temperature, top_p, min_p = (lanes[place].contiguous().view(torch.float32) for place in (4, 5, 6))
    return Rules(kinds, keys, temperature, lanes[3].long(), top_p, min_p), lanes[2].long()
