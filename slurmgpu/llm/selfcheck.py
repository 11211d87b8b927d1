"""Whether two ways to compute the same answers agree: looked at once, before a fast path is trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.answers import Encoded, Finished
from slurmgpu.llm.sampling import Rules, perturb

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""By how much of the scores' range a token may miss the greatest score. Batches round differently."""


N_PROBES, PROBE_TOKENS = 4, 16


def probes(requests: Sequence[Encoded]) -> list[Encoded]:
    """A few of the requests, greedy and sampled, of different prompts, with answers short and not cut at a text."""
    found: list[Encoded] = []
    for sampled in (False, True):
        kind = [each for each in requests if (each.request.sampling.temperature > 0) == sampled]
        different = {each.tokens: each for each in reversed(kind)}
        found += [*different.values()][::-1][:N_PROBES]
    return [_shortened(each, number) for number, each in enumerate(found)]


def _shortened(encoded: Encoded, number: int) -> Encoded:
    sampling = encoded.request.sampling
    brief = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, PROBE_TOKENS), stop=(), logprobs=False)
    return Encoded(dataclasses.replace(encoded.request, id=number, sampling=brief), encoded.tokens)


def agree(expected: Sequence[Finished], found: Sequence[Finished]) -> bool:
    """Whether both are the same answers, token by token, and none is an error."""
    known = {each.encoded.request.id: each.tokens for each in expected}
    same = {each.encoded.request.id: each.tokens for each in found} == known and len(found) == len(expected)
    return same and not any(each.error for each in [*expected, *found])


def difference(model: Any, expected: Sequence[Finished], found: Sequence[Finished], precision: str) -> str | None:
    """What differs, in words, between the answers of two paths to the same requests; None if nothing that matters does.

    Where tokens differ, those that were found are given to the model, and each must be as good as the best one, but for
    rounding: two tokens that are all but tied may change places.
    """
    wanted = {each.encoded.request.id: each for each in expected}
    if sorted(wanted) != sorted(each.encoded.request.id for each in found):
        return "not every request was answered once"
    for answer in found:
        reference = wanted[answer.encoded.request.id]
        if answer.error or reference.error:
            return f"an error: {answer.error or reference.error}"
        if answer.tokens == reference.tokens:
            continue
        missed = _worst_miss(model, answer.encoded, answer.tokens)
        if missed > TOLERANCE[precision]:
            return (
                f"tokens {list(answer.tokens)} instead of {list(reference.tokens)}, "
                f"which miss the best score by {missed:.2g} of the range of scores"
            )
    return None


def _worst_miss(model: Any, encoded: Encoded, tokens: Sequence[int]) -> float:
    """By how much of its range each row of scores is above that of the token that was taken, at most."""
    import torch

    if not tokens:
        return 0.0
    with torch.inference_mode():
        inputs = torch.tensor([[*encoded.tokens, *tokens[:-1]]], device=model.device)
        logits: Tensor = model(input_ids=inputs, use_cache=False, logits_to_keep=len(tokens)).logits[0]
        n_rows, request = len(tokens), encoded.request
        rules = Rules.of([request.sampling] * n_rows, [request.key] * n_rows, logits.device)
        scores = perturb(logits, rules, torch.arange(n_rows, device=logits.device))
        best = scores.amax(-1)
        taken = scores.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        spread = best - logits.float().mean(-1)
        return float(((best - taken) / spread.clamp(min=1e-6)).max())
