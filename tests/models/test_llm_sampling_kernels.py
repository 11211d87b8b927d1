"""The kernels for CUDA, compiled for this CPU: each block is a few threads, which wait for each other where it does."""

import ctypes
import logging
import os
import shutil
import subprocess

import pytest
import torch

from slurmgpu.llm.interface import sampling
from slurmgpu.llm.interface.engine import Sampling
from slurmgpu.llm.interface.sampling import choose, leave_next
from slurmgpu.llm.interface.sampling_kernels import NAMES, SOURCE, Kernels, options
from slurmgpu.llm.interface.sampling_rules import Rules

COMPILER = os.environ.get("CXX", "g++")
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
N_THREADS = 2, 4
"""Of the blocks of a part, and of a row."""
CALLER = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
#define __device__ static
#define __global__
#define __shared__ static
#define __launch_bounds__(n_threads)
#define __syncthreads() everyone->arrive_and_wait()
struct Places { int x, y; };
static thread_local Places threadIdx, blockIdx;
static Places blockDim, gridDim;
static std::barrier<>* everyone;
static int atomicAdd(int* place, int n) { return __atomic_fetch_add(place, n, __ATOMIC_RELAXED); }
static unsigned __float_as_uint(float number) { unsigned bits; std::memcpy(&bits, &number, 4); return bits; }
static float __uint_as_float(unsigned bits) { float number; std::memcpy(&number, &bits, 4); return number; }
#include "SOURCE"
template <typename Work> void launch(int x, int y, int n_threads, Work work) {
  gridDim = {x, y}, blockDim = {n_threads, 1};
  for (int row = 0; row < y; ++row)
    for (int part = 0; part < x; ++part) {
      std::barrier<> barrier(n_threads);
      everyone = &barrier;
      std::vector<std::thread> threads;
      for (int i = 0; i < n_threads; ++i)
        threads.emplace_back([=] { threadIdx = {i, 0}, blockIdx = {part, row}; work(); });
      for (auto& each : threads) each.join();
    }
}
typedef const void* P;
typedef const long long* L;
typedef const float* F;
extern "C" void launch_scan(int x, int y, int n, P a, int b, F c, L d, L e, L f, F g, U64* h, U64* i, double* j) {
  launch(x, y, n, [=] { scan((const Logit*)a, b, c, d, e, f, g, h, i, j); });
}
extern "C" void launch_settle(int x, int y, int n, P a, int b, int c, F d, L e, L f, L g, F h, F i, const U64* j,
                              const U64* k, const double* l, long long* m) {
  launch(x, y, n, [=] { settle((const Logit*)a, b, c, d, e, f, g, h, i, j, k, l, m); });
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if not shutil.which(COMPILER):
        pytest.skip(f"{COMPILER} (Debian: g++) is not installed")
    return Kernels(*(compiled(tmp_path_factory.mktemp("kernels"), bits) for bits in (32, 16)), *N_THREADS)


def compiled(folder, bits):
    (folder / "kernels.cpp").write_text(CALLER.replace("SOURCE", str(SOURCE)))
    given = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", *options(bits, *N_THREADS)]
    subprocess.run([COMPILER, *given, "-o", "kernels.so", "kernels.cpp"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "kernels.so"))
    return {name: launcher(getattr(library, f"launch_{name}")) for name in NAMES}


def launcher(function):
    def launch(blocks, n_threads, *arguments):
        assert all(isinstance(each, int) or each.is_contiguous() for each in arguments)
        given = [each if isinstance(each, int) else ctypes.c_void_p(each.data_ptr()) for each in arguments]
        function(*blocks, n_threads, *given)

    return launch


SETTINGS = {
    "free": {},
    "scaled": {"temperature": 0.7},
    "nucleus": {"top_p": 0.9},
    "small nucleus": {"temperature": 2.5, "top_p": 0.05},
    "few": {"top_k": 5},
    "one": {"top_k": 1},
    "all": {"top_k": 10**6},
    "few, of which a nucleus": {"temperature": 1.5, "top_k": 20, "top_p": 0.6},
    "likely": {"min_p": 0.1},
    "likely nucleus": {"min_p": 0.02, "top_p": 0.7},
    "likely few": {"min_p": 0.2, "top_k": 7},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("n_tokens", [1, 2, 101, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_draw_the_tokens_of_pytorchs_operations(kernels, monkeypatch, dtype, n_tokens):
    settings = [{"temperature": 1.0, **each} for each in SETTINGS.values()] * 4
    logits = (4 * torch.randn(len(settings), n_tokens, generator=torch.Generator().manual_seed(n_tokens))).to(dtype)
    rules = Rules.of([Sampling(**each) for each in settings], [101 * row for row in range(len(settings))])
    positions = torch.arange(len(settings)) % 5
    expected = choose(logits, rules, positions)
    monkeypatch.setitem(sampling._kernels, CPU, kernels)
    assert choose(logits, rules, positions).tolist() == expected.tolist()
    # A row alone, and rows in another order, get the same.
    assert choose(logits[7:8], rules.select(torch.tensor([7])), positions[7:8]).tolist() == expected[7:8].tolist()
    back = torch.arange(len(settings)).flip(0)
    assert choose(logits[back], rules.select(back), positions[back]).tolist() == expected[back].tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_kernels_draw_only_what_a_structure_allows(kernels, monkeypatch, name):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    allowed = torch.zeros(3, 50, dtype=torch.bool)
    allowed[0, 7], allowed[1, 20:23], allowed[2, ::2] = True, True, True
    rules = Rules.of([Sampling(**{"temperature": 1.0, **SETTINGS[name]})] * 3, [1, 2, 3])
    expected = choose(logits, rules, torch.zeros(3, dtype=torch.int64), allowed)
    monkeypatch.setitem(sampling._kernels, CPU, kernels)
    found = choose(logits, rules, torch.zeros(3, dtype=torch.int64), allowed)
    assert found.tolist() == expected.tolist()
    assert allowed.gather(1, found[:, None]).all()


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 2}, {"temperature": 0.0}], ids=str)
def test_kernels_keep_ties_as_pytorchs_operations_do(kernels, monkeypatch, settings):
    logits = torch.tensor([[1.0, 1, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0], [-2, -1, -1, -2, -1, -3]]).repeat(40, 1)
    rules = Rules.of([Sampling(**{"temperature": 1.0, **settings})] * 120, range(120))
    positions = torch.zeros(120, dtype=torch.int64)
    expected = choose(logits, rules, positions)
    monkeypatch.setitem(sampling._kernels, CPU, kernels)
    assert choose(logits, rules, positions).tolist() == expected.tolist()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_order_zeros_and_nan_as_pytorchs_operations_do(kernels, monkeypatch, dtype, settings):
    zeros = torch.where(torch.arange(200).view(4, 50) % 2 == 0, -0.0, 0.0)
    zeros[:, 7], zeros[:, 8:20] = 3.0, -1.0
    nan = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    nan[:2, 9], nan[2:, 30] = torch.nan, -torch.tensor(torch.nan)
    logits = torch.cat([zeros, torch.tensor([[-0.0, 0.0] * 25] * 4), nan]).to(dtype)
    rows = [Sampling(**{"temperature": 1.0, **settings})] * 11 + [Sampling(temperature=1.0)]
    rules, positions = Rules.of(rows, range(12)), torch.zeros(12, dtype=torch.int64)
    expected = choose(logits, rules, positions)
    monkeypatch.setitem(sampling._kernels, CPU, kernels)
    assert choose(logits, rules, positions).tolist() == expected.tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_scores_of_a_step_leave_the_token_that_kernels_draw(kernels, monkeypatch, name):
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    rows = [{"temperature": 1.0, **SETTINGS[name]}] * 8 + [{"temperature": 0.0}]
    rules, positions = Rules.of([Sampling(**each) for each in rows], range(9)), torch.arange(9)
    expected = choose(logits, rules, positions)
    for each in ({}, {CPU: kernels}):
        monkeypatch.setattr(sampling, "_kernels", each)
        scores = leave_next(logits, rules, positions)
        assert scores.dtype is torch.float32
        assert scores.argmax(-1).tolist() == expected.tolist()
        assert torch.equal(scores[8], logits[8])  # whose probabilities may be asked for


def test_kernels_are_used_if_their_tokens_are_right(kernels, caplog):
    caplog.set_level(logging.INFO)
    assert sampling._checked(lambda device: kernels, CPU) is kernels
    assert "sampling uses two kernels" in caplog.text


class Other:
    """Kernels that draw the next token but one."""

    def __init__(self, kernels):
        self.kernels = kernels

    def draw(self, *given):
        return self.kernels.draw(*given) + 1


def no_library(device):
    raise OSError("libcaffe2_nvrtc.so: cannot open shared object file: No such file or directory")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda kernels: no_library, "OSError: libcaffe2_nvrtc.so: cannot open"),
        (lambda kernels: lambda device: Other(kernels), "64 of 64 tokens differ"),
    ],
    ids=["no NVRTC", "other tokens"],
)
def test_without_right_kernels_pytorchs_operations_draw(kernels, caplog, make, reason):
    assert sampling._checked(make(kernels), CPU) is None
    [record] = caplog.records
    assert record.message.startswith("sampling uses PyTorch's many kernels: ")
    assert reason in record.message


def test_no_kernel_is_compiled_while_a_cuda_graph_is_captured(monkeypatch):
    prepared = []
    monkeypatch.setattr(sampling, "_kernels", {})
    monkeypatch.setattr(sampling, "_checked", lambda make, device: prepared.append(device))
    for captures, n_prepared in ((True, 0), (False, 1), (True, 1), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        assert sampling._kernels_of(CARD) is None
        assert prepared == [CARD] * n_prepared
    sampling.prepare_kernels(CPU)
    assert prepared == [CARD]
