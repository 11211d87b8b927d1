import ctypes
import logging
import math
import os
import subprocess

import numpy as np
import pytest
import torch
from torch.cuda.jiterator import _create_jit_fn

from slurmgpu.llm.interface import noise
from slurmgpu.llm.interface.engine import Sampling
from slurmgpu.llm.interface.noise import GOLDEN, add_noise, splitmix
from slurmgpu.llm.interface.sampling import Rules, choose

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


# The kernel for CUDA, compiled for this CPU

CPU = torch.device("cpu")
CALLER = """
#include <cmath>
#include <cstring>
static unsigned __float_as_uint(float number) { unsigned bits; std::memcpy(&bits, &number, 4); return bits; }
%s
typedef long long T;
extern "C" void compute(long n_rows, long n_pairs, const T* keys, const T* positions, const T* pairs, T* found) {
  for (long row = 0; row < n_rows; ++row)
    for (long at = 0; at < n_pairs; ++at)
      found[row * n_pairs + at] = gumbel_of_two<T>(keys[row], positions[row], pairs[at]);
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The kernel as PyTorch calls it: int64 (row, 1), (row, 1) and (1, pair) give int64 (row, pair)."""
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(CALLER % noise.KERNEL)
    command = [
        os.environ.get("CXX", "g++"),
        "-O1",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-o",
        "kernel.so",
        "kernel.cpp",
    ]
    subprocess.run(command, cwd=folder, check=True)
    compiled = ctypes.CDLL(str(folder / "kernel.so")).compute

    def compute(keys, positions, pairs):
        found = np.empty((len(keys), pairs.shape[1]), np.int64)
        given = keys.expand(len(keys), 1), positions.expand(len(keys), 1), pairs.expand(1, -1)
        assert {each.dtype for each in given} == {torch.int64}
        arrays = [*(np.ascontiguousarray(each.numpy()) for each in given), found]
        compiled(*map(ctypes.c_long, found.shape), *(ctypes.c_void_p(each.ctypes.data) for each in arrays))
        return torch.from_numpy(found)

    return compute


@pytest.mark.parametrize("n_tokens", [1, 2, N_TOKENS, 20_000])
def test_the_kernel_gives_the_numbers_and_the_tokens_of_pytorchs_operations(monkeypatch, kernel, n_tokens):
    logits = 3 * torch.randn(N_ROWS, n_tokens, generator=torch.Generator().manual_seed(0))
    rules = Rules.of([Sampling(temperature=1.0, top_p=0.9)] * N_ROWS, KEYS.tolist())
    expected = add_noise(logits, KEYS, POSITIONS), choose(logits, rules, POSITIONS)
    monkeypatch.setitem(noise._kernels, CPU, kernel)
    found = add_noise(logits, KEYS, POSITIONS), choose(logits, rules, POSITIONS)
    assert found[0].shape == logits.shape
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    assert found[1].tolist() == expected[1].tolist()


def test_the_kernel_is_one_for_pytorchs_jiterator():
    assert _create_jit_fn(noise.KERNEL).kernel_name == "gumbel_of_two"


def test_a_kernel_is_used_if_its_numbers_are_right(caplog, kernel):
    caplog.set_level(logging.INFO)
    assert noise._checked(lambda: kernel, CPU) is kernel
    assert "random numbers by one kernel" in caplog.text
    right = lambda keys, positions, pairs: by_pytorch(keys, positions, 2 * pairs.shape[1])  # noqa: E731
    assert noise._checked(lambda: right, CPU) is right
    assert "random numbers by one kernel, with the same bits" in caplog.text


def by_pytorch(keys, positions, n_tokens):
    return noise._add_in_tiles(torch.zeros(len(keys), n_tokens), keys[:, 0], positions[:, 0]).view(torch.int64)


def no_compiler():
    raise RuntimeError("Error in dlopen: libnvrtc.so.13: cannot open shared object file")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (no_compiler, "RuntimeError: Error in dlopen: libnvrtc.so.13: cannot open"),
        (lambda: lambda keys, positions, pairs: keys + pairs, "those of one are off by"),
        (lambda: lambda keys, positions, pairs: (keys + pairs).double().fill_(torch.nan), "those of one are off by"),
    ],
    ids=["no NVRTC", "other numbers", "no numbers"],
)
def test_without_a_right_kernel_pytorchs_operations_compute_the_noise(caplog, make, reason):
    assert noise._checked(make, CPU) is None
    [record] = caplog.records
    assert record.message.startswith("random numbers take many kernels: ")
    assert reason in record.message


def test_no_kernel_is_compiled_while_a_cuda_graph_is_captured(monkeypatch):
    prepared, card = [], torch.device("cuda", 0)
    monkeypatch.setattr(noise, "_kernels", {})
    monkeypatch.setattr(noise, "_checked", lambda make, device: prepared.append(device))
    for captures, n_prepared in ((True, 0), (False, 1), (True, 1), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        assert noise._kernel_of(card) is None
        assert prepared == [card] * n_prepared
    noise.prepare(CPU)
    assert prepared == [card]
