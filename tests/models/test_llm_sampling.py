"""Sampling: tokens are distributed as the rules say, and rows do not affect each other."""

import dataclasses
import functools
import math
import random

import numpy as np
import pytest
import torch

from slurmgpu.llm.interface.engine import Sampling
from slurmgpu.llm.interface.noise import add_noise
from slurmgpu.llm.interface.sampling import choose, log_probabilities, mix, perturb, restrict
from slurmgpu.llm.interface.sampling_rules import Kinds, Rules

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
        ({"temperature": 2.0, "top_k": 5}, lambda logits: top_k(logits / 2, 5)),
        ({"top_p": 0.8}, lambda logits: only(logits, top_p(logits, 0.8))),
        ({"top_p": 0.5}, lambda logits: only(logits, top_p(logits, 0.5))),
        ({"top_k": 6, "top_p": 0.8}, lambda logits: only(logits, top_p(top_k(logits, 6), 0.8))),
        ({"top_p": 0.9, "min_p": 0.05}, lambda logits: only(only(logits, top_p(logits, 0.9)), is_likely(logits, 0.05))),
        ({"min_p": 0.1}, lambda logits: only(logits, is_likely(logits, 0.1))),
    ],
    ids=["temperature 1", "temperature", "top_k", "top_p", "small top_p", "top_k, top_p", "top_p, min_p", "min_p"],
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


def top_k(logits, k):
    return only(logits, logits >= logits.sort().values[-k])


def is_likely(logits, share):
    return logits.softmax(-1) >= share * logits.softmax(-1).max()


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


def least_kept(logits, sampling):
    """The least logit of one row that top_k, top_p and min_p keep, by a sort."""
    ordered = np.sort(logits.numpy())[::-1]
    kept = ordered[: sampling.top_k or None]
    weights = np.exp((kept - kept[0]).astype(np.float64))
    before = weights.cumsum() - weights
    share = float(np.float32(sampling.top_p))
    n_kept = len(kept) if share == 1 else max(1, int((before < share * weights.sum()).sum()))
    least_likely = ordered[0] + np.log(np.float32(sampling.min_p)) if sampling.min_p else -np.inf
    return max(kept[n_kept - 1], least_likely)


def random_sampling(rng):
    return Sampling(
        temperature=rng.choice([0.0, 0.6, 1.0, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 0, 1, 3, 50, 3000]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.1, 1e-50]),  # the last is 0 in float32
        min_p=rng.choice([0.0, 0.0, 0.05]),
    )


def random_logits(rng, n_rows, n_tokens):
    """Logits flat or steep, some with ties, and some with tokens that do not exist."""
    numbers = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(n_rows, n_tokens, generator=numbers) * rng.choice([0.0, 0.5, 3.0, 10.0])
    if rng.random() < 0.3:
        logits = logits.round()
    if rng.random() < 0.3:
        logits[:, 1:].masked_fill_(torch.rand(n_rows, n_tokens - 1, generator=numbers) < 0.3, -torch.inf)
    return logits.to(rng.choice([torch.float32, torch.float32, torch.bfloat16]))


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_a_sort_in_each_way_to_choose_them(seed):
    rng = random.Random(seed)
    for n_tokens in (1, 2, 40, 1000, 5000):
        for n_different in (1, 2, 12):
            logits, n_rows = random_logits(rng, 12, n_tokens), 12
            samplings = [random_sampling(rng) for _ in range(n_different)] * (n_rows // n_different)
            keys, positions = [rng.getrandbits(63) for _ in range(n_rows)], torch.arange(n_rows)
            allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
            allowed[:, 0] = True
            free, held = logits, logits.masked_fill(~allowed, -torch.inf)
            for given, mask in ((free, None), (held, allowed)):
                expected = [expected_token(*each) for each in zip(given, samplings, keys, positions, strict=True)]
                rules = Rules.of(samplings, keys)
                assert choose(logits, rules, positions, mask).tolist() == expected
                assert perturb(restrict(logits, mask), rules, positions).argmax(-1).tolist() == expected


def expected_token(logits, sampling, key, position):
    if sampling.temperature == 0:
        return int(logits.argmax())
    warped = logits.float() / sampling.temperature
    scores = add_noise(warped[None], torch.tensor([key]), position[None])[0]
    return int(only(scores, warped >= least_kept(warped, sampling)).argmax())


SETTINGS = [{"top_p": 0.9}, {"top_p": 1e-50}, {"top_k": 3}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1}, {}]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_what_is_no_number_and_what_ties_is_kept_on_both_ways(sampling):
    logits = torch.randn(6, N_TOKENS, generator=torch.Generator().manual_seed(2))
    logits[0], logits[1] = 0.0, -torch.inf  # all tokens tie; none is possible
    logits[2, 7] = torch.nan
    logits[3, 8] = torch.inf
    logits[4, 10:] = logits[4, :10].max()  # most tokens tie for the first place
    logits[5, 9] = -torch.inf
    n_draws = 50
    rules = Rules.of([Sampling(temperature=1.0, **sampling)] * 6 * n_draws, range(6 * n_draws))
    rows, positions = logits.repeat(n_draws, 1), torch.arange(6 * n_draws)
    tokens = choose(rows, rules, positions)
    assert torch.equal(tokens, perturb(rows, rules, positions).argmax(-1))
    of_row = tokens.view(n_draws, 6).T
    assert len(of_row[0].unique()) > 20
    assert [of_row[row].unique().tolist() for row in (1, 2, 3)] == [[0], [7], [8]]
    assert len(of_row[4][of_row[4] >= 10].unique()) > 15
    assert 9 not in of_row[5]


def test_tokens_are_chosen_without_a_sort_and_scores_without_reading_a_value(monkeypatch):
    samplings = [Sampling(temperature=temperature, **each) for temperature in (0.0, 0.7) for each in SETTINGS]
    rules, positions = Rules.of(samplings, range(12)), torch.arange(12)
    for device in ("cpu", "meta"):  # the latter has no values
        there = rules.select(torch.arange(12)) if device == "cpu" else Rules.of(samplings, range(12), device)
        scores = perturb(torch.randn(12, N_TOKENS, device=device), there, positions.to(device))
        assert (scores.shape, scores.dtype) == ((12, N_TOKENS), torch.float32)
    with pytest.raises(NotImplementedError):
        choose(torch.randn(12, N_TOKENS, device="meta"), Rules.of(samplings, range(12), "meta"), positions.to("meta"))
    for name in ("sort", "argsort", "cumsum"):
        monkeypatch.setattr(torch.Tensor, name, None)
    without_top_k = [each for each in samplings if not each.top_k]
    assert len(choose(torch.randn(8, N_TOKENS), Rules.of(without_top_k, range(8)), positions[:8])) == 8


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
def test_logits_of_16_bits_are_ordered_as_they_are_and_give_the_tokens_of_32(sampling, monkeypatch):
    """A GPU reads half as much, and sorts in half as many passes."""
    logits = 3 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(3)).bfloat16()
    rules, positions = Rules.of([Sampling(temperature=0.7, **sampling)] * 64, range(64)), torch.arange(64)
    expected = [way(logits.float(), rules, positions) for way in (choose, perturb)]
    ordered = []
    for name in ("topk", "sort"):
        kept = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda of, *a, k=kept, **b: ordered.append(of.dtype) or k(of, *a, **b))
    found = [way(logits, rules, positions) for way in (choose, perturb)]
    assert all(map(torch.equal, found, expected))
    assert {*ordered} == {torch.bfloat16}


def test_rules_know_what_their_rows_ask_for():
    greedy, free, narrow = Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.9, min_p=0.1)
    top_k = Sampling(temperature=1.0, top_k=5, top_p=0.9)
    assert Kinds.of([greedy, Sampling(top_k=3, top_p=0.5, min_p=0.1)]) == Kinds(greedy=True)
    assert not Kinds.of([greedy]).sampled
    assert Kinds.of([free]) == Kinds(free=True)
    assert Kinds.of([narrow]) == Kinds(nucleus=True, min_p=True, scaled=True)
    assert Kinds.of([top_k, dataclasses.replace(top_k, top_k=9)]) == Kinds(top_k=9)
    everything = [greedy, free, narrow, top_k]
    joined = functools.reduce(Rules.join, [Rules.of([each], [key]) for key, each in enumerate(everything)])
    assert joined.kinds == Kinds.of(everything) == Kinds(True, True, 5, True, True, True)
    # Rows of which the others are left: their kinds may be more than they are.
    logits = torch.randn(4, N_TOKENS, generator=torch.Generator().manual_seed(3))
    for rows in ([0], [1], [2], [3], [0, 0], [3, 1]):
        some = torch.tensor(rows)
        exact = Rules.of([everything[row] for row in rows], rows)
        for found in (
            choose(logits[some], joined.select(some), some),
            perturb(logits[some], joined.select(some), some).argmax(-1),
        ):
            assert found.tolist() == choose(logits[some], exact, some).tolist()


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
