import math

import pytest
import torch

from slurmgpu.llm.interface.engine import Sampling
from slurmgpu.llm.interface.sampling import (
    Rules,
    choose,
    log_probabilities,
    mix,
    perturb,
)

N_TOKENS = 40


def draw(logits, keys, position=0, **sampling):
    rules = Rules.of([Sampling(**{"temperature": 1.0, **sampling})] * len(keys), keys)
    return choose(logits.expand(len(keys), -1), rules, torch.full((len(keys),), position))


@pytest.fixture
def logits():
    return 2 * torch.randn(N_TOKENS, generator=torch.Generator().manual_seed(0))


def test_keys_of_samples_are_63_bits_and_all_differ():
    keys = [mix(key, sample) for key in (0, 1, 2**63 - 1) for sample in range(1000)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    assert max(keys) > 2**62


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, lambda logits: logits),
        ({"temperature": 0.7}, lambda logits: logits / 0.7),
        ({"temperature": 2.0, "top_k": 5}, lambda logits: only(logits / 2, logits >= logits.sort().values[-5])),
        ({"top_p": 0.8}, lambda logits: only(logits, top_p(logits, 0.8))),
        ({"min_p": 0.1}, lambda logits: only(logits, logits.softmax(-1) >= 0.1 * logits.softmax(-1).max())),
    ],
    ids=["temperature 1", "temperature", "top_k", "top_p", "min_p"],
)
def test_tokens_are_distributed_as_the_softmax_of_what_is_left(logits, sampling, expected):
    n_draws = 20_000
    tokens = draw(logits, [mix(7, sample) for sample in range(n_draws)], **sampling)
    wanted = expected(logits).double().softmax(-1) * n_draws
    counts = tokens.bincount(minlength=N_TOKENS).double()
    assert counts[wanted == 0].sum() == 0
    left = wanted > 0
    n_free = int(left.sum()) - 1
    chi_square = ((counts - wanted)[left] ** 2 / wanted[left]).sum()
    # Five standard deviations of a chi-square; the draws are the same at every run.
    assert abs(chi_square - n_free) < 5 * math.sqrt(2 * n_free)


def only(logits, left):
    return logits.masked_fill(~left, -torch.inf)


def top_p(logits, share):
    """The fewest tokens that come to the share, one after another."""
    order = logits.argsort(descending=True).tolist()
    left, total = torch.zeros(len(logits), dtype=torch.bool), 0.0
    for token in order:
        if total >= share:
            break
        left[token] = True
        total += float(logits.softmax(-1)[token])
    return left


def test_samples_of_neighbouring_keys_and_positions_are_independent(logits):
    keys = [mix(1, sample) for sample in range(5000)]
    same = float(logits.softmax(-1).square().sum())  # how often two independent tokens are equal
    pairs = [(draw(logits, keys), draw(logits, keys, position=1)), (draw(logits, keys[:-1]), draw(logits, keys[1:]))]
    for first, second in pairs:
        assert abs(float((first == second).double().mean()) - same) < 0.03


def test_a_row_does_not_depend_on_its_neighbours_or_their_rules():
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    rules = [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=1.5, top_k=3),
        Sampling(temperature=1.0, top_p=0.3),
        Sampling(temperature=3.0, min_p=0.2),
        Sampling(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01),
    ]
    positions = torch.arange(6)
    together = choose(logits, Rules.of(rules, range(6)), positions)
    alone = [choose(logits[i : i + 1], Rules.of([rules[i]], [i]), positions[i : i + 1])[0] for i in range(6)]
    assert together.tolist() == [int(token) for token in alone]
    turned = choose(logits.flip(0), Rules.of(rules[::-1], [*range(6)][::-1]), positions.flip(0))
    assert turned.flip(0).tolist() == together.tolist()


def test_greedy_rows_take_the_most_likely_token(logits):
    rules = Rules.of([Sampling()] * 3, [1, 2, 3])
    assert choose(logits.expand(3, -1), rules, torch.arange(3)).tolist() == [int(logits.argmax())] * 3
    assert torch.equal(perturb(logits[None], rules.select(torch.tensor([0])), torch.zeros(1)), logits[None])


def test_one_token_that_is_left_is_always_taken():
    logits = torch.full((1000, 8), -torch.inf)
    logits[:, 5] = 0.0
    tokens = choose(logits, Rules.of([Sampling(temperature=1.0)] * 1000, range(1000)), torch.arange(1000))
    assert tokens.unique().tolist() == [5]


def test_log_probabilities_are_the_models_own(logits):
    found = log_probabilities(logits.expand(2, -1), torch.tensor([3, 7]))
    assert found.tolist() == pytest.approx(logits.log_softmax(-1)[[3, 7]].tolist(), abs=1e-6)
