"""Choose tokens by random numbers that depend only on a sample's key and the token's place in its answer.

A sample is therefore the same in every batch, on every path and at every attempt. The choice is the Gumbel-max trick
(Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv:1411.0030): the greatest of logit + noise is distributed as
softmax(logits), see `noise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from slurmgpu.llm.interface.engine import Sampling
from slurmgpu.llm.interface.noise import GOLDEN, add_noise, splitmix

if TYPE_CHECKING:
    from torch import Tensor


def mix(key: int, sample: int) -> int:
    """The key (63 bits) of one of an item's samples, from the item's seed."""
    return splitmix(splitmix(key) + (sample + 1) * GOLDEN) >> 1


@dataclass(frozen=True)
class Rules:
    """The sampling of a batch's rows: tensors with one value for each row."""

    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, samplings: Sequence[Sampling], keys: Sequence[int], device: object = None) -> Rules:
        """The rules of rows with these settings and keys."""
        import torch

        return cls(
            torch.tensor(keys, dtype=torch.int64, device=device),
            torch.tensor([each.temperature for each in samplings], dtype=torch.float32, device=device),
            torch.tensor([each.top_k for each in samplings], dtype=torch.int64, device=device),
            torch.tensor([each.top_p for each in samplings], dtype=torch.float32, device=device),
            torch.tensor([each.min_p for each in samplings], dtype=torch.float32, device=device),
        )

    def select(self, rows: Tensor) -> Rules:
        """The rules of the rows with these indices."""
        return Rules(*(getattr(self, field.name)[rows] for field in fields(self)))

    def join(self, other: Rules) -> Rules:
        """The rules of these rows and then of others."""
        import torch

        return Rules(*(torch.cat([getattr(each, field.name) for each in (self, other)]) for field in fields(self)))


def choose(logits: Tensor, rules: Rules, positions: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The next token of each row: (row,), from `logits`: (row, token).

    `positions` counts the tokens in the row's answer so far: 0 for the first. `allowed`, of the shape of `logits`,
    marks the tokens that a structure allows; None allows all.
    """
    return perturb(restrict(logits, allowed), rules, positions).argmax(-1)


def restrict(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """The logits, -inf where a token is not allowed."""
    return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))


def perturb(logits: Tensor, rules: Rules, positions: Tensor) -> Tensor:
    """Scores whose greatest is the row's next token; float32: (row, token). Greedy rows keep their logits."""
    logits = logits.float()
    sampled = (rules.temperature > 0).nonzero()[:, 0]
    if not len(sampled):
        return logits
    if len(sampled) < len(logits):
        found = logits.clone()
        found[sampled] = perturb(logits[sampled], rules.select(sampled), positions[sampled])
        return found
    return add_noise(_warp(logits, rules), rules.keys, positions)


def perturb_all(logits: Tensor, rules: Rules, positions: Tensor, *, narrows: bool) -> Tensor:
    """The scores of `perturb`, computed without reading any value, for CUDA graphs.

    `narrows` says whether top_k, top_p or min_p of any row excludes tokens.
    """
    import torch

    logits = logits.float()
    greedy = (rules.temperature == 0)[:, None]
    warped = logits / torch.where(greedy, 1.0, rules.temperature[:, None])
    if narrows:
        least = _least_of_top(warped, rules.top_k, rules.top_p)
        least = torch.maximum(least, warped.amax(-1, keepdim=True) + rules.min_p.log()[:, None])
        warped = warped.masked_fill(warped < least, -torch.inf)
    return torch.where(greedy, logits, add_noise(warped, rules.keys, positions))


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """The model's own log-probability of each row's token, before temperature and filters; float32: (row,)."""
    logits = logits.float()
    found: Tensor = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return found


def _warp(logits: Tensor, rules: Rules) -> Tensor:
    """Logits after temperature, top_k, top_p and min_p, in this order; -inf for excluded tokens."""
    import torch

    warped = logits / rules.temperature[:, None]
    least = torch.full_like(warped[:, :1], -torch.inf)
    narrow = ((rules.top_k > 0) | (rules.top_p < 1)).nonzero()[:, 0]
    if len(narrow):
        least[narrow] = _least_of_top(warped[narrow], rules.top_k[narrow], rules.top_p[narrow])
    # p / max(p) is the exponential of a difference of logits; log(0) excludes nothing.
    least = torch.maximum(least, warped.amax(-1, keepdim=True) + rules.min_p.log()[:, None])
    return warped.masked_fill(warped < least, -torch.inf)


def _least_of_top(warped: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least logit that each row keeps: (row, 1). Ties with it are kept, too."""
    import torch

    n_tokens = warped.shape[-1]
    ordered = warped.sort(-1, descending=True).values
    ranks = torch.arange(n_tokens, device=warped.device)
    top_k = torch.where(top_k > 0, top_k, n_tokens)[:, None]
    probabilities = ordered.masked_fill(ranks >= top_k, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    stays = (ranks < top_k) & ((before < top_p[:, None]) | (top_p >= 1)[:, None])
    n_stay = stays.sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, n_stay - 1)
