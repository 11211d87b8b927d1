"""Sample tokens with random numbers that depend only on a sample's key and the token's position in its answer.

A sample is therefore the same in every batch, code path and attempt. It uses the Gumbel-max trick (Gumbel 1954;
Maddison, Tarlow and Minka 2014, arXiv:1411.0030): the argmax of logit + noise is distributed as softmax(logits), see
`noise`. On a GPU the kernels of sampling.cu do the same if they can be compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.interface.engine import Sampling
from slurmgpu.llm.interface.noise import GOLDEN, add_noise, splitmix
from slurmgpu.llm.interface.sampling_kernels import Kernels, make_kernels
from slurmgpu.llm.interface.sampling_rules import Rules
from slurmgpu.util.exceptions import message_of

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

N_CHECKED, CHECKED_TOKENS = 64, 4097
"""The rows and tokens of the logits for checking kernels; in one row rounding may change the token."""
_kernels: dict[Any, Kernels | None] = {}


def mix(key: int, sample: int) -> int:
    """The key (63 bits) of an item's sample, from the item's seed and the sample's number."""
    return splitmix(splitmix(key) + (sample + 1) * GOLDEN) >> 1


def choose(logits: Tensor, rules: Rules, positions: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The next token of each row: (row,), from `logits`: (row, token).

    `positions` counts the tokens in the row's answer so far: 0 for the first. `allowed`, with the shape of `logits`,
    marks the tokens that a structure allows; None allows all. The result is the argmax of `perturb`, found without its
    sort.
    """
    logits = restrict(logits, allowed)
    if not rules.kinds.sampled:
        return logits.argmax(-1)
    kernels = _kernels_of(logits.device)
    return _choose(logits, rules, positions) if kernels is None else kernels.draw(logits, rules, positions)


def prepare_kernels(device: Any, agree: Callable[[bool], bool] = bool) -> None:
    """Compile and check the kernels of a device; this must not happen during the capture of a CUDA graph.

    `agree(are_right)` returns whether the kernels are right in all processes that share a model, which must choose the
    same tokens.
    """
    if device.type == "cuda" and device not in _kernels:
        kernels = _checked(make_kernels, device)
        _kernels[device] = kernels if agree(kernels is not None) else None


def restrict(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """The logits (row, token), with -inf for tokens that are not `allowed`: bool, of the same shape."""
    import torch

    return logits if allowed is None else torch.where(allowed, logits, float("-inf"))


def leave_next(logits: Tensor, rules: Rules, positions: Tensor) -> Tensor:
    """Scores whose greatest is the row's next token; float32: (row, token). Greedy rows keep their logits.

    Computed without reading any value on the host, for CUDA graphs.
    """
    import torch

    kernels = _kernels_of(logits.device) if rules.kinds.sampled else None
    if kernels is None:
        return perturb(logits, rules, positions)
    tokens = kernels.draw(logits, rules, positions)
    scores = torch.full(logits.shape, -torch.inf, device=logits.device).scatter_(1, tokens[:, None], 0.0)
    return torch.where((rules.temperature == 0)[:, None], logits, scores) if rules.kinds.greedy else scores


def perturb(logits: Tensor, rules: Rules, positions: Tensor) -> Tensor:
    """Scores whose greatest is the row's next token; float32: (row, token). Greedy rows keep their logits.

    Computed without reading any value on the host, so the steps do not depend on values: a row with only top_p needs a
    sort. Halving the range of its least kept logit 32 times would read as much as the sort.
    """
    import torch

    if not rules.kinds.sampled:
        return logits.float()
    kinds, warped = rules.kinds, _warp(logits, rules)
    scores = add_noise(warped, rules.keys, positions)
    if kinds.top_k > 0 or kinds.nucleus:
        n_greatest = warped.shape[-1] if kinds.nucleus else kinds.top_k
        least = _least_of_top(logits, rules, n_greatest)
        is_free = (rules.top_k == 0) & (rules.top_p >= 1)
        scores.masked_fill_(warped < least.masked_fill(is_free[:, None], -torch.inf), -torch.inf)
    if kinds.min_p:
        scores.masked_fill_(warped < _least_of_min_p(warped, rules.min_p), -torch.inf)
    return torch.where((rules.temperature == 0)[:, None], logits, scores) if kinds.greedy else scores


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """The model's own log-probability of each token, before temperature and filters; float32: (row, …).

    `logits` are (row, …, token), `tokens` (row, …).
    """
    logits = logits.float()
    found: Tensor = logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)
    return found


def _kernels_of(device: Any) -> Kernels | None:
    """The kernels of this device; None if there are none."""
    import torch

    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        prepare_kernels(device)
    return _kernels.get(device)


def _checked(make: Callable[[Any], Kernels], device: Any) -> Kernels | None:
    """Kernels with the same results as PyTorch's operations; None, and a line in the log, if there are none."""
    import torch

    kinds = [
        Sampling(temperature=0.8),
        Sampling(temperature=0.8, top_p=0.9),
        Sampling(temperature=0.8, top_k=50),
        Sampling(temperature=0.8, top_k=50, top_p=0.8),
        Sampling(temperature=0.8, min_p=0.05),
        Sampling(temperature=0.0),
    ]
    rows = [kinds[row % len(kinds)] for row in range(N_CHECKED)]
    shape = N_CHECKED, CHECKED_TOKENS
    logits = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(device)
    rules, positions = Rules.of(rows, range(N_CHECKED), device), 7 * torch.arange(N_CHECKED, device=device)
    try:
        kernels = make(device)
        n_off = 0
        for each in (logits, logits.bfloat16()):
            tokens = kernels.draw(each, rules, positions), _choose(each, rules, positions)
            n_off = max(n_off, int((tokens[0] != tokens[1]).sum()))
    except Exception as error:  # from NVRTC, the driver, or a PyTorch with another library
        said = f"{type(error).__name__}: {message_of(error)[-200:].strip()}"
        log.warning("sampling uses PyTorch's many kernels: %s", said)
        return None
    if n_off > 1:
        log.warning(
            "sampling uses PyTorch's many kernels: with our two %d of %d tokens differ",
            n_off,
            N_CHECKED,
        )
        return None
    log.info("sampling uses two kernels: %d of %d tokens differ from PyTorch's", n_off, N_CHECKED)
    return kernels


def _choose(logits: Tensor, rules: Rules, positions: Tensor) -> Tensor:
    """The next token of each row, (row,), if some rows are sampled."""
    if not rules.kinds.greedy:
        return _draw(logits, rules, positions)
    tokens = logits.argmax(-1)
    sampled = (rules.temperature > 0).nonzero()[:, 0]
    tokens[sampled] = _draw(logits[sampled], rules.select(sampled), positions[sampled])
    return tokens


def _draw(logits: Tensor, rules: Rules, positions: Tensor) -> Tensor:
    """The next token of each row, (row,), if no row is greedy."""
    import torch

    kinds, warped = rules.kinds, _warp(logits, rules)
    scores = add_noise(warped, rules.keys, positions)
    if kinds.min_p:
        scores.masked_fill_(warped < _least_of_min_p(warped, rules.min_p), -torch.inf)
    if kinds.top_k > 0:
        if kinds.free or kinds.nucleus:
            rows = (rules.top_k > 0).nonzero()[:, 0]
            least = torch.full_like(warped[:, :1], -torch.inf)
            least[rows] = _least_of_top(logits[rows], rules.select(rows), kinds.top_k)
        else:
            least = _least_of_top(logits, rules, kinds.top_k)
        scores.masked_fill_(warped < least, -torch.inf)
    if not kinds.nucleus:
        return scores.argmax(-1)
    if not kinds.free and kinds.top_k == 0:
        return _draw_of_nucleus(scores, warped, rules.top_p)
    tokens = scores.argmax(-1)
    rows = ((rules.top_k == 0) & (rules.top_p < 1)).nonzero()[:, 0]
    tokens[rows] = _draw_of_nucleus(scores[rows], warped[rows], rules.top_p[rows])
    return tokens


def _draw_of_nucleus(scores: Tensor, warped: Tensor, top_p: Tensor) -> Tensor:
    """The token with the greatest score among the tokens that top_p keeps, for each row: (row,).

    A token is kept if the tokens with greater logits have less than top_p of the mass. If the token with the greatest
    score is not kept, no token with a smaller or equal logit is kept, and the greatest score of the others is the next
    candidate. If the kept tokens have the share m of the mass, at most -ln(m) candidates are rejected on average: a
    token that is not kept, with the share q, is a candidate with probability q / (m + all shares between).
    """
    import torch

    weights = (warped - warped.amax(-1, keepdim=True)).exp_()
    limits = top_p * weights.sum(-1, dtype=torch.float64)
    tokens = scores.argmax(-1)
    found, rows = tokens, torch.arange(len(tokens), device=tokens.device)
    while True:
        logits = warped.gather(-1, tokens[:, None])
        before = torch.where(warped <= logits, 0, weights).sum(-1, dtype=torch.float64)
        refused = ((before >= limits) & (before > 0)).nonzero()[:, 0]
        if not len(refused):
            return found
        rows, weights, limits, warped = rows[refused], weights[refused], limits[refused], warped[refused]
        scores = scores[refused].masked_fill_(warped <= logits[refused], -torch.inf)
        tokens = scores.argmax(-1)
        found[rows] = tokens


def _warp(logits: Tensor, rules: Rules) -> Tensor:
    """The logits divided by their row's temperature, or by 1 in greedy rows; float32."""
    import torch

    if not rules.kinds.scaled:
        return logits.float()
    return logits / torch.where(rules.temperature > 0, rules.temperature, 1)[:, None]


def _least_of_min_p(warped: Tensor, min_p: Tensor) -> Tensor:
    """The least logit that min_p keeps in each row: (row, 1)."""
    # p / max(p) is the exponential of a difference of logits; log(0) excludes nothing.
    return warped.amax(-1, keepdim=True) + min_p.log()[:, None]


def _least_of_top(logits: Tensor, rules: Rules, n_greatest: int) -> Tensor:
    """The least logit, divided by the temperature, that top_k and top_p keep in each row: (row, 1).

    It is one of the `n_greatest` greatest. Ties with it are kept, too. Sorts the undivided logits, which have 16 bits
    if the model has: division keeps their order.
    """
    import torch

    n_tokens = logits.shape[-1]
    if n_greatest < n_tokens:
        greatest = logits.topk(n_greatest, -1).values
    else:
        n_greatest, greatest = n_tokens, logits.sort(-1, descending=True).values
    ordered = _warp(greatest, rules)
    in_top_k = (
        torch.arange(n_greatest, device=logits.device) < torch.where(rules.top_k > 0, rules.top_k, n_tokens)[:, None]
    )
    # In float64 the order of additions on a device does not change the token.
    weights = (ordered - ordered[:, :1]).exp_().masked_fill_(~in_top_k, 0)
    before = weights.cumsum(-1, dtype=torch.float64)
    limits = torch.where(rules.top_p < 1, rules.top_p * before[:, -1], torch.inf)[:, None]
    n_stay = (in_top_k & (before.sub_(weights) < limits)).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, n_stay - 1)
