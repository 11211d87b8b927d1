"""Training on a GPU: kills, groups of NCCL, bf16 and compilation, optimizers, checkpoints, batches that fit."""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import signal
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.findings import Machine, NotMeasured, best_of, finding, hold, shared

if TYPE_CHECKING:
    import torch

    from slurmgpu.training.outcome import Outcome
    from slurmgpu.training.ranks import Place
    from tests.benchmarks.train_arms import Net

WIDTH, TOY_WIDTH = 256, 16
FASTER = 3.0
"""How many times as fast compiled bf16 must be as eager fp32."""
OF_PRODUCTS = 0.6
EVENTS = 0.7, 1.05
"""Bounds of the time of steps by the GPU's events, as a share of the clock's, where the GPU takes long for a step."""
OVER_BARE = 1.03
MFU = 0.3
"""The least model FLOPs utilisation, as a share of the measured peak."""
BUSY = 0.95
KERNELS = {
    "attention": ("flash", "fmha", "sdpa", "attention", "attn"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
}
"""Words in the names of kernels."""


def prepare(_: Machine) -> None:
    """Import what takes seconds."""
    import torch._dynamo  # noqa: F401  # as optimizers do

    import tests.gpu.nets  # noqa: F401


def _net(machine: Machine) -> type[Net]:
    from tests.gpu.nets import Sentences, Toy

    return machine.pick(Sentences, Toy)


def _few(machine: Machine) -> type[Net]:
    """The same model with fewer samples per step, so that the loop's own cost is a larger share."""
    from tests.gpu.nets import FewSentences, Toy

    return machine.pick(FewSentences, Toy)


def _place(machine: Machine) -> Place:
    from slurmgpu.training.ranks import Place

    return Place(machine.device)


def _run(machine: Machine, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[int | None]:
    """The exit codes of processes that run `work` at the same time, one for each entry of `arguments`."""
    # A forked process cannot use CUDA; on a CPU a fork saves the seconds of importing torch again.
    context: Any = multiprocessing.get_context(machine.pick("spawn", "fork"))
    processes = [context.Process(target=work, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


@functools.cache
def _trained(machine: Machine, precision: str, *, compiled: bool) -> Outcome:
    from tests.benchmarks import train_arms

    if compiled:
        machine.needs_compiler()
    steps = machine.pick(24 if compiled else 12, 8)
    net = _net(machine)()
    return train_arms.ours(net, steps, _place(machine), precision=precision, compile=compiled)


@finding(limit_s=60)
def bf16_and_compilation_are_faster(machine: Machine) -> str:
    """86 million parameters train three times as fast in bf16, compiled, as in fp32, eager; the loss agrees to 5 %.

    Some cards multiply in bf16 only twice as fast as in fp32: then OF_PRODUCTS of that is enough.
    """
    import torch

    plain = _trained(machine, "fp32", compiled=False)
    fast = _trained(machine, "bf16", compiled=machine.on_gpu)
    ratio = fast.samples_per_s / plain.samples_per_s
    losses = [each.curve[0] for each in (plain, fast)]
    figures = f"{fast.samples_per_s:,.0f} and {plain.samples_per_s:,.0f} samples/s, {ratio:.2f} times; "
    figures += f"first losses {losses[1]:.4f} and {losses[0]:.4f}"
    if machine.on_gpu:
        of_products = _products(machine, torch.bfloat16) / _products(machine, torch.float32)
        measured = plain.data_s + plain.compute_s
        share = measured * plain.samples_per_s / (plain.samples - plain.samples / plain.steps)
        figures += f"; products {of_products:.1f} times; by the GPU's events, steps take {share:.0%} of the time"
        hold(ratio >= min(FASTER, OF_PRODUCTS * of_products) and EVENTS[0] <= share <= EVENTS[1], figures)
    return hold(math.isclose(*losses, rel_tol=0.05), figures)


@functools.cache
def _products(machine: Machine, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product; fp32 is not rounded to TF32."""
    import torch

    size = machine.pick(8192, 64)
    factor = torch.randn(size, size, device=machine.device, dtype=dtype)
    return 2 * size**3 / best_of(5, lambda: factor @ factor, machine.device)


@finding()
def mfu_is_that_of_the_card(machine: Machine) -> str:
    """Matrix products reach 0.5 to 1.1 of the peak that MFU divides by; training reaches 30 % of what they reach."""
    import torch

    from slurmgpu.training.flops import peak_flops

    measured = _products(machine, torch.bfloat16)
    if not machine.on_gpu:
        return f"products at {measured / 1e9:.2f} GFLOP/s; no MFU on CPUs"
    name = torch.cuda.get_device_name(machine.device)
    told = peak_flops(name, "bf16")
    if told is None:  # as for a MIG instance
        raise NotMeasured(f"the peak of {name} is not known; its products reach {measured / 1e12:.0f} TFLOP/s")
    mfu = _trained(machine, "bf16", compiled=True).mfu
    share = mfu * told / measured
    figures = f"products reach {measured / 1e12:.0f} of the table's {told / 1e12:.0f} TFLOP/s; MFU {mfu:.1%}, "
    figures += f"{share:.1%} of the measured peak"
    return hold(0.5 <= measured / told <= 1.1 and share >= MFU, figures)


@finding()
def kernels_fill_the_time_of_steps(machine: Machine) -> str:
    """Kernels fill 95 % of the time of compiled steps in bf16; the shares of products and attention are reported."""
    machine.needs_gpu()
    machine.needs_compiler()
    from tests.benchmarks import train_arms
    from tests.gpu.nets import ProfiledSentences

    net = ProfiledSentences()
    train_arms.ours(net, net.n_first + net.n_profiled + 1, _place(machine), precision="bf16", compile=True)
    if not net.kernels:
        raise NotMeasured("the profiler records no kernels here")
    shares = dict.fromkeys(("attention", "products", "others"), 0.0)
    for name, seconds in net.kernels:
        kind = next((kind for kind, words in KERNELS.items() if any(word in name.lower() for word in words)), "others")
        shares[kind] += seconds / net.seconds
    busy = sum(shares.values())
    figures = f"a step takes {net.seconds / net.n_profiled * 1e3:.1f} ms; kernels take {busy:.1%} of it: "
    figures += ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items())
    return hold(busy >= BUSY, f"{figures}; {len(net.kernels) / net.n_profiled:.0f} kernels per step")


@finding(limit_s=40)
def the_batch_that_fits_is_found(machine: Machine) -> str:
    """`batch_size = "auto"` finds, by out-of-memory errors, a batch that fits a fifth of the card; twice it fails."""
    import torch

    from tests.benchmarks import train_arms

    def train(batch_size: Any) -> Outcome:
        net = _net(machine)()
        net.batch_size = batch_size
        return train_arms.ours(net, 2, _place(machine), precision="bf16")

    if not machine.on_gpu:
        return f"a batch of {train('auto').batch_size}"
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.2, machine.device)
    try:
        outcome = train("auto")
        found = outcome.batch_size
        try:
            train(2 * found)
        except torch.cuda.OutOfMemoryError:
            too_large = True
        else:
            too_large = False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, machine.device)
    said = "does not fit" if too_large else "fits too"
    # Parameters, gradients and two moments are in fp32.
    least, most = 16 * outcome.n_parameters, 0.2 * torch.cuda.get_device_properties(machine.device).total_memory
    good = too_large and least <= outcome.peak_memory_bytes <= most
    return hold(good, f"a batch of {found}, peak {outcome.peak_memory_bytes / 1e9:.1f} GB; one of {2 * found} {said}")


@shared
def _killed(machine: Machine) -> dict[bool, Path]:
    """The folders of two trainings that ran at the same time and were killed, by whether they were `deterministic`."""
    from tests.gpu.nets import train_until_killed

    folders = {deterministic: machine.folder / f"killed-{deterministic}" for deterministic in (False, True)}
    for folder in folders.values():
        folder.mkdir()
    width = machine.pick(WIDTH, TOY_WIDTH)
    codes = _run(machine, train_until_killed, [(folder, machine.device, width, how) for how, folder in folders.items()])
    assert codes == [-signal.SIGKILL] * 2, f"the processes that were to be killed ended with {codes}"
    return folders


def _kill_and_resume(machine: Machine, *, deterministic: bool) -> tuple[list[str], float, float]:
    """The weights that differ after a kill and a resume, the relative difference of the losses, and the joules."""
    import torch

    from slurmgpu.training.loop import LAST
    from tests.gpu.nets import Words, train_words

    whole, killed = machine.folder / f"whole-{deterministic}", _killed(machine)[deterministic]
    whole.mkdir()
    net = functools.partial(Words, width=machine.pick(WIDTH, TOY_WIDTH))
    rows = [train_words(folder, machine.device, net(), deterministic=deterministic) for folder in (whole, killed)]
    assert [row["resumed"] for row in rows] == [0, 1]
    one, other = (torch.load(folder / LAST, weights_only=True) for folder in (whole, killed))
    losses = [row["final"]["train_loss"] for row in rows]
    differ = [name for name in one if not torch.equal(one[name], other[name])]
    return differ, abs(losses[1] / losses[0] - 1), rows[0]["energy_j"]


@finding(limit_s=40)
def a_kill_changes_little_without_deterministic_kernels(machine: Machine) -> str:
    """Without `deterministic`, the loss after a kill and a resume is the same to 1 %; the energy is known."""
    differ, off, energy_j = _kill_and_resume(machine, deterministic=False)
    said = f"{len(differ)} tensors differ{': ' if differ else ''}{', '.join(differ)}; the loss differs by {off:.1e}"
    said += f"; {energy_j:.0f} J"
    return hold(off < 0.01 and (energy_j > 0) == (machine.on_gpu and _tells_energy()), said)


def _tells_energy() -> bool:
    """Whether NVML knows the energy of the first GPU: not of a MIG instance."""
    from slurmgpu.util.gpus import visible_ids
    from slurmgpu.util.nvml import open_cards

    cards = open_cards(visible_ids())
    try:
        return cards is not None and cards.cards[0].read().energy_j is not None
    finally:
        if cards is not None:
            cards.close()


# After the non-deterministic one: a process reads CUBLAS_WORKSPACE_CONFIG at its first matrix product.
@finding(limit_s=40)
def a_kill_changes_no_bit_of_deterministic_kernels(machine: Machine) -> str:
    """With `deterministic`, a training that is killed and resumed ends with the same weights, bit for bit."""
    differ, *_ = _kill_and_resume(machine, deterministic=True)
    return hold(not differ, f"{len(differ)} tensors differ{': ' if differ else ''}{', '.join(differ)}")


@finding(limit_s=60)
def a_group_of_all_gpus_sums_and_trains(machine: Machine) -> str:
    """All-reduce over all GPUs by NCCL (on CPUs, by gloo) is correct; DDP, FSDP and SyncBatchNorm have one's loss."""
    from slurmgpu.training.loop import Training
    from slurmgpu.training.settings import TrainingSettings
    from tests.gpu.nets import Normed, Toy, join_group

    # The number of ranks must divide the 16 samples of a step.
    n_ranks = max(n for n in (1, 2, 4, 8) if n <= machine.n_gpus) if machine.on_gpu else 2
    kind = machine.pick("nccl", "gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = machine.folder / "together"
    together.mkdir()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    codes = _run(machine, join_group, [(kind, rank, n_ranks, together) for rank in range(n_ranks)])
    assert not any(codes), f"the ranks ended with {codes}"
    found = json.loads((together / "group.json").read_text())
    settings = TrainingSettings(steps=4, batch_size=16, seed=0)
    figures, is_close, expected = f"{n_ranks} ranks, {kind}: all-reduce at {found['bytes_s'] / 1e9:.1f} GB/s", True, {}
    for net in (Toy(), Normed()):
        (folder := machine.folder / f"alone-{(name := type(net).__name__)}").mkdir()
        expected[name] = Training(net, settings, _place(machine), folder).run().final["train_loss"]
    for name, loss in found["losses"]:
        figures += f", {name} {loss:.6f} and alone {expected[name]:.6f}"
        is_close &= math.isclose(loss, expected[name], rel_tol=1e-4)
    return hold(found["is_right"] and is_close, figures)


@finding()
def fused_optimizers_step_as_the_others_do(machine: Machine) -> str:
    """Fused AdamW, Adam and SGD take the same steps as the unfused ones (to 1e-5), and are at most 10 % slower."""
    import torch
    from torch import nn

    from slurmgpu.training.optimizer import make_optimizer
    from slurmgpu.training.settings import Optimizer, TrainingSettings

    kinds: tuple[Optimizer, ...] = ("adamw", "adam", "sgd")
    good, figures = True, []
    for kind in kinds:
        weights, seconds = [], []
        for fused in (True, False):
            torch.manual_seed(0)
            side = machine.pick(2048, 16)
            model = nn.Sequential(*(nn.Linear(side, side) for _ in range(12))).to(machine.device)
            optimizer = make_optimizer(
                None, model, TrainingSettings(steps=1, optimizer=kind, momentum=0.9, fused=fused)
            )
            for each in model.parameters():
                each.grad = torch.randn_like(each)
            seconds.append(best_of(4, lambda made=optimizer: made.step(), machine.device))  # type: ignore[misc]
            weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
        error = float((weights[0] - weights[1]).abs().max() / weights[1].abs().max())
        good &= error < 1e-5 and (seconds[0] <= 1.1 * seconds[1] or not machine.on_gpu)
        figures.append(f"{kind} {seconds[0] * 1e3:.2f} and {seconds[1] * 1e3:.2f} ms, difference {error:.0e}")
    return hold(good, "; ".join(figures))


@finding()
def unusual_models_train_and_go_on(machine: Machine) -> str:
    """A model with complex parameters, sparse gradients, unusual buffers and metrics on the CPU trains and resumes."""
    from slurmgpu.training.loop import Training
    from slurmgpu.training.settings import TrainingSettings
    from tests.gpu.nets import Unusual

    folder = machine.folder / "unusual"
    settings = TrainingSettings(epochs=2, batch_size=8, seed=0, optimizer="sgd", lr=0.1, checkpoint_s=0.0)
    first, second = (Training(Unusual(), settings, _place(machine), folder).run() for _ in range(2))
    figures = f"losses {first.curve[0]:.3f} to {first.curve[-1]:.3f}, {first.final['val_right']:.1%} right"
    is_same = (second.resumed, second.final) == (1, first.final)
    return hold(is_same and first.curve[-1] < first.curve[0], figures)


@finding()
def fp16_trains_as_the_cpu_does_in_fp32(machine: Machine) -> str:
    """In fp16, with scaled losses, clipping, accumulation and weights, losses are the CPU's in fp32 to 5 %."""
    from slurmgpu.training.loop import Training
    from slurmgpu.training.ranks import Place
    from slurmgpu.training.settings import TrainingSettings
    from tests.gpu.nets import Weighed

    settings = TrainingSettings(
        epochs=4, batch_size=8, accumulation=2, clip=0.5, seed=0, optimizer="sgd", lr=0.3, checkpoint_s=0.0
    )
    ways = [(Place("cpu"), settings), *[(_place(machine), replace(settings, precision="fp16"))] * 2]
    found = []
    for number, (place, chosen) in enumerate(ways):
        folder = machine.folder / f"fp16-{min(number, 1)}"
        folder.mkdir(exist_ok=True)
        found.append(Training(Weighed(), chosen, place, folder).run())
    exact, ours, again = found
    off = max(abs(mine / theirs - 1) for mine, theirs in zip(ours.curve, exact.curve, strict=True))
    figures = f"losses {ours.curve[0]:.3f} to {ours.curve[-1]:.3f}, off by {off:.1e}"
    good = 1e-7 <= off <= 0.05 and ours.curve[-1] < ours.curve[0] and (again.resumed, again.final) == (1, ours.final)
    return hold(good, figures)


@finding(limit_s=40)
def the_loop_costs_little_over_a_bare_one(machine: Machine) -> str:
    """A step of the training loop takes at most 3 % longer than a step of a loop written by hand."""
    from tests.benchmarks import train_arms

    rounds = train_arms.steps(_few(machine), _place(machine), machine.pick(24, 8), machine.pick(2, 1))
    ours, bare = (min(each[name][0] for each in rounds) for name in ("ours", "bare"))
    figures = f"{ours * 1e3:.2f} and {bare * 1e3:.2f} ms, {ours / bare:.3f} times"
    return hold(ours <= OVER_BARE * bare or not machine.on_gpu, figures)


@finding(limit_s=45)
def checkpoints_cost_little(machine: Machine) -> str:
    """A checkpoint takes at most twice as long as `torch.save` and fsync of weights and AdamW's moments by hand."""
    from tests.benchmarks import train_arms

    net, place = _few(machine)(), _place(machine)
    ours = statistics.median(train_arms.checkpoints_of(net, 5, place, checkpoint_s=0.0))
    by_hand = statistics.median(train_arms.saved_by_hand(net, 5, place))
    figures = f"{ours * 1e3:.0f} and {by_hand * 1e3:.0f} ms, {ours / by_hand:.2f} times"
    return hold(ours <= 2 * by_hand or not machine.on_gpu, figures)
