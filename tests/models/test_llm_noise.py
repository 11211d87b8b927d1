"""The noise of samples: a function of key, place and token."""

import math

import pytest
import torch

from slurmgpu.llm.interface import noise
from slurmgpu.llm.interface.noise import GOLDEN, add_noise, splitmix

N_ROWS, N_TOKENS = 7, 101
KEYS = torch.tensor([0, 1, 2**63 - 1, 7919, 2**62, 5, 5])
POSITIONS = torch.tensor([0, 0, 1, 2, 100_000, 3, 4])


def gumbel(keys, positions, n_tokens):
    """The noise, one operation after another, each with a result of its own."""
    streams = hashed(hashed(keys) + positions * signed(GOLDEN))
    numbers = hashed(streams[:, None] + torch.arange(1, n_tokens + 1) * signed(GOLDEN))
    u = ((shift(numbers, 24).float() + 0.5) * 2.0**-40).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def hashed(numbers):
    z = numbers + signed(GOLDEN)
    z = (z ^ shift(z, 30)) * signed(noise.MIX_1)
    z = (z ^ shift(z, 27)) * signed(noise.MIX_2)
    return z ^ shift(z, 31)


def shift(numbers, n_bits):
    return (numbers >> n_bits) & ((1 << (64 - n_bits)) - 1)


def signed(number):
    return number - 2**64 if number >= 2**63 else number


def test_tensors_hash_as_python_does():
    # The first numbers that the authors' splitmix64.c gives from the state 0 and from the one after it.
    assert [splitmix(0), splitmix(GOLDEN)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    numbers = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    expected = [splitmix(number % 2**64) for number in numbers]
    assert [number % 2**64 for number in noise._splitmix(torch.tensor(numbers)).tolist()] == expected


def test_the_noise_is_a_function_of_key_place_and_token_alone():
    found = add_noise(torch.zeros(N_ROWS, N_TOKENS), KEYS, POSITIONS)
    for row, token in ((0, 0), (2, 57), (4, N_TOKENS - 1)):
        key, position = int(KEYS[row]), int(POSITIONS[row])
        stream = splitmix((splitmix(key) + position * GOLDEN) % 2**64)
        u = ((splitmix((stream + (token + 1) * GOLDEN) % 2**64) >> 24) + 0.5) * 2.0**-40
        assert float(found[row, token]) == pytest.approx(-math.log(-math.log1p(-u)), abs=1e-5)


@pytest.mark.parametrize("tile", [1, 10, N_TOKENS, 3 * N_TOKENS + 1, 10**6])
def test_tiles_of_any_size_give_the_same_bits(monkeypatch, tile):
    monkeypatch.setattr(noise, "TILE", tile)
    logits = 3 * torch.randn(N_ROWS, N_TOKENS, generator=torch.Generator().manual_seed(0))
    logits[1, 5], logits[2, 6] = -torch.inf, torch.nan
    before = logits.clone()
    expected = logits + gumbel(KEYS, POSITIONS, N_TOKENS)
    assert torch.equal(add_noise(logits, KEYS, POSITIONS).nan_to_num(99.0), expected.nan_to_num(99.0))
    assert torch.equal(logits.nan_to_num(99.0), before.nan_to_num(99.0))


def test_the_largest_and_the_smallest_hash_give_finite_noise(monkeypatch):
    """2**40 - 1 rounds to 2**40 in float32, whose u would be 1."""
    monkeypatch.setattr(noise, "_shift", lambda numbers, n_bits, out: out.fill_(0))
    smallest = add_noise(torch.zeros(1, 2), KEYS[:1], POSITIONS[:1])
    monkeypatch.setattr(noise, "_shift", lambda numbers, n_bits, out: out.fill_((1 << (64 - n_bits)) - 1))
    largest = add_noise(torch.zeros(1, 2), KEYS[:1], POSITIONS[:1])
    assert smallest[0].tolist() == pytest.approx([-math.log(2.0**-41)] * 2, rel=1e-6)
    assert largest[0].tolist() == pytest.approx([-math.log(24 * math.log(2))] * 2, rel=1e-6)
