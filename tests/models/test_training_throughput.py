"""throughput: what a meter tells of a loop, alone, of two processes, on a GPU; and how FLOPs are counted."""

import json
import math
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slurmgpu import SlurmGPUError, throughput
from slurmgpu.training.flops import count_flops, peak_flops
from tests.support.clocks import Clock
from tests.support.speed_ranks import LATE_S, N_STEPS


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(100.0)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def steps(meter, clock, n_steps, **counts):
    """Steps of 4 s: one reading, two computing, another second reading in between."""
    for _ in range(n_steps):
        with meter.data():
            clock.go(1)
        with meter.step(**counts):
            clock.go(1)
            with meter.data():
                clock.go(1)
            clock.go(1)


def test_a_loop_is_divided_into_reading_and_computing_and_its_first_step_left_out(clock):
    meter = throughput()
    with meter.data():
        clock.go(50)
    steps(meter, clock, 1, samples=1000)
    steps(meter, clock, 10, samples=8, tokens=64, flops=1e3)
    clock.go(7)  # this is no step
    rates = meter.summary()
    assert (rates.steps, rates.samples, rates.tokens) == (10, 80, 640)
    assert (rates.wall_s, rates.data_s, rates.compute_s, rates.communication_s) == (40, 20, 20, 0)
    assert (rates.samples_per_s, rates.tokens_per_s, rates.flops_per_s) == (2, 16, 250)
    assert math.isnan(rates.mfu)


def test_what_is_not_counted_is_unknown_and_what_is_known_late_counts(clock):
    meter = throughput(warmup=0)
    assert math.isnan(meter.summary().samples_per_s)
    with meter.step(samples=2):
        clock.go(1)
        meter.count(tokens=7)
    rates = meter.summary()
    assert (rates.samples_per_s, rates.tokens_per_s) == (2, 7)
    assert math.isnan(rates.flops_per_s)


def test_evaluations_and_checkpoints_do_not_count(clock):
    meter = throughput(warmup=2)
    with meter.pause():
        clock.go(1000)
    for _ in range(3):
        steps(meter, clock, 2, samples=8)
        with meter.pause():
            clock.go(1000)
    assert meter.summary().wall_s == 16


def test_a_step_that_failed_is_no_step(clock):
    meter = throughput(warmup=1)
    for error in (ValueError, None, ValueError, None):
        try:
            with meter.step(samples=1):
                clock.go(1)
                if error:
                    raise error
        except ValueError:
            pass
    assert meter.summary().steps == 1


def test_a_training_that_was_taken_up_again_counts_all_its_attempts(clock):
    state = None
    for n_steps in (5, 1, 3):  # the second ends before it has warmed up
        meter = throughput()
        if state is not None:
            meter.load(state)
        clock.go(500)
        steps(meter, clock, n_steps, samples=8)
        state = json.loads(json.dumps(meter.state()))
    rates = meter.summary()
    assert (rates.steps, rates.samples, rates.wall_s) == (6, 48, 24)
    assert (rates.communication_s, rates.samples_per_s) == (0, 2)


class FakeGPU:
    """A stream of cuda:1 of which the host is told late: the GPU computes 3 s in a step, the host 1 s."""

    def __init__(self, monkeypatch, clock, name):
        self.clock, self.busy_until, self.n_waits = clock, 0.0, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                assert stream == "the stream of cuda:1"
                self.at = max(gpu.clock.now, gpu.busy_until)

            def query(self):
                return self.at <= gpu.clock.now

            def elapsed_time(self, later):
                return (later.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    def launch(self, seconds):
        self.busy_until = max(self.clock.now, self.busy_until) + seconds

    def synchronize(self, device):
        self.n_waits += 1
        self.clock.now = max(self.clock.now, self.busy_until)


def test_on_a_gpu_its_own_time_counts_and_nothing_waits_for_it(monkeypatch, clock):
    gpu = FakeGPU(monkeypatch, clock, "NVIDIA H100 80GB HBM3")
    meter = throughput(device="cuda:1", precision="bf16")

    def train(n_steps, reading_s):
        for _ in range(n_steps):
            with meter.data():
                clock.go(reading_s)
            with meter.step(samples=6, flops=6 * 98.9e12):
                clock.go(1)
                gpu.launch(3)

    train(1, 1)
    assert gpu.n_waits == 1  # as the first step ends
    train(10, 1)  # reading hides behind the GPU
    assert gpu.n_waits == 1
    rates = meter.summary()
    # The GPU stands still for two seconds at first, and never again.
    assert (rates.wall_s, rates.data_s, rates.compute_s) == (32, 1, 31)
    train(10, 5)  # now it ends 2 s before the next batch is there, and idles while the host launches
    rates = meter.summary()
    assert (rates.wall_s, rates.data_s, rates.compute_s) == (32 + 5 + 9 * 6 + 4, 1 + 5 + 9 * 2, 31 + 10 * 4)
    assert rates.mfu == pytest.approx(20 * 6 * 98.9e12 / (95 * 989e12))


@pytest.mark.nightly
def test_two_processes_tell_what_they_wait_for_each_other_and_fit_the_same_batch(tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.support.speed_ranks"]
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    n_steps = N_STEPS - 1

    # The first waits as long as the second is late, which itself waits for nobody; but on a busy machine for a CPU.
    half_s = n_steps * LATE_S / 2
    assert second["own"]["communication_s"] < half_s < first["own"]["communication_s"]
    assert first["own"]["compute_s"] < half_s < second["own"]["compute_s"]
    assert math.isnan(first["unknown"]["communication_s"])

    assert first["together"] == second["together"]
    assert first["state"] == second["state"]
    together = first["together"]
    assert (together["steps"], together["samples"], together["tokens"]) == (n_steps, n_steps * 7, n_steps * 20)
    for name in ("wall_s", "data_s", "communication_s"):
        assert together[name] == pytest.approx((first["own"][name] + second["own"][name]) / 2, rel=0.2, abs=0.01)
    assert together["samples_per_s"] == pytest.approx(together["samples"] / together["wall_s"])

    assert [first["fitting"][0], second["fitting"][0]] == [20, 20]
    assert first["fitting"][1].endswith("at the smallest, 30: in another process")
    assert second["fitting"][1].endswith("at the smallest, 30: MemoryError")


@pytest.mark.parametrize(
    ("gpu", "precision", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA GH200 480GB", "bf16", 990),
        ("NVIDIA B200", "fp32", 75),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp32", 14),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla T4", "tf32", None),
        ("Quadro RTX 6000", "fp16", 130.5),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bf16", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16", None),
        ("NVIDIA GeForce RTX 2080 Ti", "fp16", 53.8),
        ("AMD Instinct MI300X", "bf16", 1307),
        ("NVIDIA H1000", "bf16", None),
        ("", "fp32", None),
    ],
)
def test_what_a_gpu_could_do_is_known_by_its_name(gpu, precision, teraflops):
    found = peak_flops(gpu, precision)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_an_unknown_precision_is_refused_on_every_device():
    with pytest.raises(SlurmGPUError, match="precision is 'bfloat16'; expected one of 'bf16', 'fp16', 'tf32', 'fp32'"):
        throughput(precision="bfloat16")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_flops_that_checkpointing_computes_again_do_not_count(use_reentrant):
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)]
    x = torch.ones(8, 16, requires_grad=True)

    def passes(call):
        def run():
            found = x
            for block in blocks:
                found = call(block, found)
            found.mean().backward()

        return run

    plain = count_flops(passes(lambda block, value: block(value)))
    assert plain == 3 * 2 * 8 * (3 * 2 * 16 * 16)  # forward, and both gradients
    assert count_flops(passes(partial(checkpoint, use_reentrant=use_reentrant))) == plain


def test_flops_are_those_of_forward_and_backward_compiled_or_not(one_thread):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.ones(8, 16)
    forward = 2 * 8 * (16 * 32 + 32 * 4)
    # Backward: gradients of weights, and of what came in but for the first layer.
    expected = 2 * forward + 2 * 8 * 32 * 4
    assert count_flops(lambda: model(x).mean().backward()) == expected
    compiled = torch.compile(model, backend="aot_eager")
    assert count_flops(lambda: compiled(x).mean().backward()) == expected
    compiled(x).mean().backward()
    assert count_flops(lambda: compiled(x).mean().backward()) == expected
