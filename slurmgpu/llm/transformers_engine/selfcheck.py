"""Compare two ways to compute the same answers once, before a fast path is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.interface.engine import Sampling
from slurmgpu.llm.interface.sampling import perturb, restrict
from slurmgpu.llm.interface.sampling_rules import Rules
from slurmgpu.llm.prompts.encoded import Encoded, Finished
from slurmgpu.llm.transformers_engine.grammars import Grammars

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""How far a token may be below the best score, as a share of the range of scores: batches round differently."""

ROUNDING = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
"""How far scores of two paths may be off in any case, as a share of their range."""
EXACT, ROUNDED = 1e-3, 0.05
"""The relative difference between outputs alone and in a batch that counts as rounding: in fp32, in fewer bits."""
NOISE_FACTOR, MOST_FACTOR = 2.5, 20.0
"""Scores may be off by this many times the model's own noise, but at most by this many times the usual bound."""
N_PROBES, PROBE_TOKENS = 4, 16
N_TIMES = 6
"""How often two computations of the same scores are compared before they count as different."""
MOST_SLACK = 80.0
"""More does not change which tokens a filter surely keeps, and its exponential must be a number."""
MISS_ROWS = 32
"""The number of rows of scores compared at a time, since the intermediate results are several times larger."""


def misses(expected: Tensor, found: Tensor) -> Tensor:
    """The greatest difference of two computations of logits (row, token), as a share of the row's range: (row,)."""
    import torch

    shares = []
    for some, others in zip(expected.split(MISS_ROWS), found.split(MISS_ROWS), strict=True):
        wanted, logits = some.float(), others.float()
        off = torch.where(wanted == logits, 0.0, (wanted - logits).abs()).amax(-1)
        shares.append(off / _range(wanted))
    return torch.cat(shares).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _range(scores: Tensor) -> Tensor:
    """How far the best score of each row is above the row's mean: (row,)."""
    import torch

    # A model may give -inf to tokens that do not exist.
    mean = torch.where(scores.isfinite(), scores, torch.nan).nanmean(-1)
    return (scores.amax(-1) - mean).clamp(min=1e-6)


def miss(expected: Tensor, found: Tensor) -> float:
    """The greatest of `misses`."""
    return float(misses(expected, found).max())


def spacing(scores: Tensor) -> float:
    """The spacing of the type of scores (row, token) at the largest of a row, as a share of the row's range.

    This is noise, too: in bf16 a score of -100 is always rounded to 0.5.
    """
    import torch

    largest = scores.float().where(scores.isfinite(), 0.0).abs().amax(-1)
    return float((torch.finfo(scores.dtype).eps * largest / _range(scores.float())).max())


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far two computations of the same scores differ, as a share of their range: the best of all tries by row.

    `most` is the greatest difference that was seen, `noise` the difference of the expected scores from themselves.
    `found` are the latest scores.
    """

    steady: float
    most: float
    noise: float
    found: Tensor


def agreement(expected: Callable[[], Tensor], found: Callable[[], Tensor], bound: float) -> Agreement:
    """Compare two computations that may have a few results each, as kernels do not fix the order of sums.

    On an H200 one step in ten with four rows in bf16 differed from its own repetition by 0.01 of the range. So both are
    repeated, up to N_TIMES, until each row has agreed to `bound` once; a wrong row never does. `found` is computed
    first: it must not read what `expected` has left.
    """
    import torch

    other, first = found(), expected()
    latest = other
    off = misses(first, other)
    most, noise = float(off.max()), 0.0
    for _ in range(N_TIMES - 1):
        if float(off.max()) <= bound:
            break
        again, wanted = found(), expected()
        latest = again
        noise = max(noise, miss(first, wanted))
        for one, two in ((wanted, again), (first, again), (wanted, other)):
            each = misses(one, two)
            most = max(most, float(each.max()))
            off = torch.minimum(off, each)
    return Agreement(float(off.max()), most, noise, latest)


def bound_of(noise: float, least: float) -> float:
    """How far scores may be off if the same path, repeated or in another batch, is off by `noise`."""
    return min(MOST_FACTOR * least, max(least, NOISE_FACTOR * noise))


def probes(requests: Sequence[Encoded]) -> list[Encoded]:
    """A few of the requests, greedy and sampled, with different prompts and short answers without stop texts."""
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
    """Whether both have the same tokens and no errors."""
    known = {each.encoded.request.id: each.tokens for each in expected}
    same = {each.encoded.request.id: each.tokens for each in found} == known and len(found) == len(expected)
    return same and not any(each.error for each in [*expected, *found])


def difference(
    model: Any, grammars: Grammars, expected: Sequence[Finished], found: Sequence[Finished], precision: str
) -> str | None:
    """The difference between two paths' answers to the same requests, as text; None if it is only rounding.

    If tokens differ, the model scores the found tokens, which must be nearly as good as the best ones: rounding may
    swap tokens that nearly tie.
    """
    wanted = {each.encoded.request.id: each for each in expected}
    if sorted(wanted) != sorted(each.encoded.request.id for each in found):
        return "a request was not answered exactly once"
    for answer in found:
        reference = wanted[answer.encoded.request.id]
        if answer.error or reference.error:
            return f"a request failed: {answer.error or reference.error}"
        if answer.tokens == reference.tokens:
            continue
        missed = _worst_miss(model, grammars, answer.encoded, answer.tokens, TOLERANCE[precision])
        if missed > TOLERANCE[precision]:
            return (
                f"tokens {list(answer.tokens)} instead of {list(reference.tokens)}, "
                f"which are {missed:.2g} of the range of scores below the best score"
            )
    return None


def _worst_miss(model: Any, grammars: Grammars, encoded: Encoded, tokens: Sequence[int], tolerance: float) -> float:
    """The greatest distance of a chosen token from its row's best score, as a share of the row's range.

    Rounding may also move a token over the edge of top_k, top_p or min_p: the chosen token may be among those that
    wider filters keep, and the best score is that of the tokens that narrower filters keep, by `tolerance`.
    """
    import torch

    if not tokens:
        return 0.0
    with torch.inference_mode():
        inputs = torch.tensor([[*encoded.tokens, *tokens[:-1]]], device=model.device)
        logits: Tensor = model(input_ids=inputs, use_cache=False, logits_to_keep=len(tokens)).logits[0]
        sampling, keys = encoded.request.sampling, [encoded.request.key] * len(tokens)
        allowed = restrict(logits, grammars.along(encoded, tokens, logits.device))
        spread, positions = _range(logits.float()) / (sampling.temperature or 1), torch.arange(len(tokens))

        def scores(share: float) -> Tensor:
            slacks = zip(allowed.float(), (share * spread).tolist(), strict=True)
            rules = Rules.of([_widened(sampling, row, slack) for row, slack in slacks], keys, logits.device)
            return perturb(allowed, rules, positions.to(logits.device))

        taken = scores(tolerance).gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        return float(((scores(-tolerance).amax(-1) - taken) / spread).max())


def _widened(sampling: Sampling, logits: Tensor, slack: float) -> Sampling:
    """Filters that keep what `sampling` keeps of one row if scores are off by `slack`; if it is negative, surely keep.

    `slack` is a difference of two logits after the division by the temperature.
    """
    if sampling.temperature == 0:
        return sampling
    scores, (top_k, top_p) = logits / sampling.temperature, (sampling.top_k, sampling.top_p)
    if 0 < top_k < len(scores):
        last, following = scores.topk(top_k + 1).values[-2:]
        top_k = int((scores >= last - slack).sum() if slack > 0 else (scores > following - slack).sum().clamp(min=1))
    factor = math.exp(min(-slack, MOST_SLACK))  # by which the odds of the tokens before the edge of top_p change
    top_p /= top_p + (1 - top_p) * factor
    return dataclasses.replace(sampling, top_k=top_k, top_p=top_p, min_p=min(1.0, sampling.min_p * factor))
