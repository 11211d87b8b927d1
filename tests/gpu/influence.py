"""Influences on a GPU: equal to the CPU's in fp64, near the speed of matrix products, within their memory limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.gpu.findings import Machine, NotMeasured, bandwidth, best_of, finding, hold

if TYPE_CHECKING:
    from torch import Tensor

    from slurmgpu.influence.influences import Influences

LIMITS = {"tf32": 5e-3, "bf16": 2e-2, "fp16": 2e-3}
"""The largest relative error allowed for a test's influences, by precision."""
LEAST = {"tf32": 2e-5, "bf16": 2e-4, "fp16": 2e-5}
"""The least median of these errors: a smaller one is that of fp32, so the precision was not used."""
TF32_CAPABILITY = 8
"""The compute capability of the first cards with TF32."""
TOP_10 = 0.9
"""The least share of the ten strongest influences that must remain among the ten strongest."""
CLOSE, FAR = 1e-5, 2e-2
"""In fp32, 99 % of the columns must be within the first, all within the second: rounding may flip a ReLU."""
SHARE = 0.4
"""The least share of the speed that matrix products and the memory allow."""
MOVED_BYTES = 437e3, 478
"""What is read and written besides matrix products, for an example's gradient and for a pair: by call, on a CPU.

On cards such as an L4, whose memory is slow against their products, this is most of the time.
"""
SECONDS = {100: 2.0, 1_000: 20.0}
SMALL = (150, 12, 900, 40)
TOY = (40, 3, 60, 4)


def prepare(_: Machine) -> None:
    """Import what takes seconds."""
    import torch  # noqa: F401

    import slurmgpu.influence.influences
    import slurmgpu.workloads.tracin.kge.conve  # noqa: F401


def _graph(sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Training and test triples (n, 3) of a random graph as skewed as FB15k-237's."""
    import numpy as np
    import torch

    from tests.benchmarks.tracin_graphs import zipf

    n_entities, n_relations, n_train, n_tests = sizes
    rng = np.random.default_rng(0)
    n_queries = int(0.5 * n_train)
    of = zipf(rng, n_queries, n_train + n_tests, 0.3)
    columns = [zipf(rng, n_entities, n_queries, 0.6)[of], zipf(rng, n_relations, n_queries, 0.9)[of]]
    triples = torch.from_numpy(np.stack([*columns, zipf(rng, n_entities, len(of), 0.8)], 1))
    return triples[:n_train], triples[n_train:]


def _influences(
    sizes: tuple[int, int, int, int], train: Tensor, device: str, precision: str, **options: Any
) -> Influences:
    """The influences by a random ConvE of PyKEEN's size."""
    import torch

    from slurmgpu.influence.influences import Checkpoint, Influences, Options
    from slurmgpu.workloads.tracin.kge.conve import ConvE
    from slurmgpu.workloads.tracin.kge.differentiable import differentiable
    from slurmgpu.workloads.tracin.kge.losses import find_loss
    from slurmgpu.workloads.tracin.kge.queries import Known

    torch.manual_seed(0)
    module = ConvE(sizes[0], sizes[1]).to(torch.float64 if precision == "fp64" else torch.float32).to(device).eval()
    rows, there = torch.arange(sizes[1], device=device), train.to(device)
    loss = find_loss("bce-pos", n_entities=sizes[0], known=lambda: Known(there, sizes[1]), label_smoothing=0.0, seed=0)
    model = differentiable(module, {"train": loss, "test": loss}, rows, None, there[0])
    wanted = tuple(model.parameters_by_name())
    chosen = Options(wanted, precision=precision, **options)  # type: ignore[arg-type]
    return Influences([Checkpoint(model, 1.0)], there, chosen)


def _equal(machine: Machine, precision: str, **options: Any) -> tuple[Tensor, Tensor]:
    """The CPU's influences in fp64, and the machine's in this precision, both (n_tests, n_train) in fp64.

    NotHeld if the machine's are not the same bits again, from gradients that it keeps.
    """
    import numpy as np
    import torch

    sizes = machine.pick(SMALL, TOY)
    train, tests = _graph(sizes)
    how: dict[str, Any] = {"top_k": 0, "full": "float64", **options}
    exact = _influences(sizes, train, "cpu", "fp64", **how).of(tests).full
    found = _influences(sizes, train, machine.device, precision, **how).of(tests).full
    keeping = _influences(sizes, train, machine.device, precision, **how, keep_bytes=10**9)
    again = [np.asarray(keeping.of(tests).full) for _ in range(2)]
    assert exact is not None
    assert found is not None
    n_off = max(int(np.not_equal(each, found).sum()) for each in again)
    hold(n_off == 0, f"{n_off} of {found.size} influences have other bits when they are computed again")
    return torch.from_numpy(exact), torch.from_numpy(found).double()


@finding(limit_s=20)
def fp32_is_the_cpus_fp64(machine: Machine) -> str:
    """In fp32, 99 % of the triples have the CPU's fp64 influences to 1e-5, all to 2e-2; again, the same bits."""
    return _close(*_equal(machine, "fp32"))


@finding(limit_s=20)
def normalised_ones_in_fp32_are_the_cpus_fp64(machine: Machine) -> str:
    """In fp32, as cosines, 99 % of the training triples have the CPU's values to 1e-5, all to 2e-2; none exceeds 1."""
    exact, found = _equal(machine, "fp32", normalize="cosine")
    largest = float(found.abs().max())
    return hold(largest <= 1 + CLOSE, f"{_close(exact, found)}; at most {largest:.6f}")


def _close(exact: Tensor, found: Tensor) -> str:
    error = (found - exact).norm(dim=0) / exact.norm(dim=0).clamp(min=1e-30)
    share = float((error < CLOSE).double().mean())
    figures = f"{share:.1%} closer than {CLOSE:g}, median {float(error.median()):.1e}, largest {float(error.max()):.1e}"
    return hold(share >= 0.99 and float(error.max()) < FAR, figures)


def _reduced(machine: Machine, precision: str) -> str:
    from slurmgpu.influence.precision import errors

    exact, found = _equal(machine, precision)
    error, same = errors(exact, found)
    figures = f"relative error of a test {float(error.median()):.1e}, at most {float(error.max()):.1e}; "
    figures += f"{float(same.mean()):.3f} of the ten strongest stay among the ten"
    hold(float(error.max()) < LIMITS[precision] and float(same.mean()) >= TOP_10, figures)
    if precision == "tf32" and machine.on_gpu:
        import torch

        capability = torch.cuda.get_device_capability(machine.device)
        if capability[0] < TF32_CAPABILITY:
            raise NotMeasured(f"{figures}; a card of compute capability {capability[0]}.{capability[1]} has no TF32")
    return hold(float(error.median()) >= LEAST[precision], f"{figures}; fp32 has less")


@finding(limit_s=20)
def tf32_is_within_its_bound(machine: Machine) -> str:
    """In tf32, a test's influences equal the CPU's in fp64 to 5e-3."""
    return _reduced(machine, "tf32")


@finding(limit_s=20)
def bf16_is_within_its_bound(machine: Machine) -> str:
    """In bf16, a test's influences equal the CPU's in fp64 to 2e-2."""
    return _reduced(machine, "bf16")


@finding(limit_s=20)
def fp16_is_within_its_bound(machine: Machine) -> str:
    """In fp16, a test's influences equal the CPU's in fp64 to 2e-3."""
    return _reduced(machine, "fp16")


def _large(machine: Machine, n_tests: int, n_train: int, precision: str = "fp32", **options: Any) -> str:
    """The time, the speed and the memory of a graph of FB15k-237's size."""
    import torch

    from slurmgpu.workloads.tracin.settings import CPU_MEMORY_MB, GPU_MEMORY_MB
    from tests.benchmarks.bench_tracin import Graph, flops
    from tests.benchmarks.tracin_graphs import FB15K_237

    entities, relations, _ = FB15K_237
    sizes = machine.pick((entities, relations, n_train, n_tests), TOY)
    train, tests = _graph(sizes)
    bound = machine.pick(GPU_MEMORY_MB, CPU_MEMORY_MB) * 10**6
    chosen = {"top_k": min(100, len(train)), "memory_bytes": bound, **options}
    influences = _influences(sizes, train, machine.device, precision, **chosen)
    influences.of(tests[:1])  # handles and kernels
    before = 0
    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats(machine.device)
        before = torch.cuda.memory_allocated(machine.device)
    seconds = best_of(3, lambda: influences.of(tests), machine.device)
    used = torch.cuda.max_memory_allocated(machine.device) - before if machine.on_gpu else 0
    graph = Graph("", machine.folder, len(train), sizes[0], len(train[:, :2].unique(dim=0)))
    n_flops, peak = flops(graph, len(tests)), _matrix_peak(machine, precision)
    of_example, of_pair = MOVED_BYTES
    n_bytes = of_example * (len(train) + len(tests)) + of_pair * len(train) * len(tests)
    share = (n_flops / peak + n_bytes / bandwidth(machine)) / seconds
    figures = f"{len(tests):,} x {len(train):,}: {seconds:.2f} s, {n_flops / seconds / 1e12:.2f} TFLOP/s, "
    figures += f"{n_flops / seconds / peak:.0%} of the measured {peak / 1e12:.2f}"
    figures += f"; {share:.0%} of what products and memory allow"
    if not machine.on_gpu:
        return figures
    allowed = bound + 3 * 4 * 10_368 * 200
    figures += f"; {used / 1e6:,.0f} MB besides the model, allowed {allowed / 1e6:,.0f}"
    fast = precision != "fp32" or n_tests < 1_000 or bool(options) or share >= SHARE
    return hold(seconds <= SECONDS[n_tests] and used <= allowed and fast, figures)


def _matrix_peak(machine: Machine, precision: str) -> float:
    """FLOP/s of a large matrix product in fp32, or in tf32."""
    import torch

    from slurmgpu.influence.precision import matmul_precision

    size = machine.pick(8192, 128)
    factor = torch.randn(size, size, device=machine.device)
    with matmul_precision("tf32" if precision == "tf32" else "ieee"):
        return 2 * size**3 / best_of(3, lambda: factor @ factor, machine.device)


@finding(limit_s=20)
def a_hundred_tests_on_a_part_of_fb15k237(machine: Machine) -> str:
    """100 tests on 32,000 triples take at most 2 s in fp32, and no more memory than the setting allows."""
    return _large(machine, 100, 32_000)


@finding(limit_s=45)
def a_thousand_tests_on_fb15k237(machine: Machine) -> str:
    """1,000 tests on 272,115 triples in fp32 take at most 20 s, at 40 % of what products and memory allow.

    They use no more memory than the setting allows.
    """
    return _large(machine, 1_000, 272_115)


@finding(limit_s=45)
def a_thousand_tests_on_fb15k237_in_tf32(machine: Machine) -> str:
    """1,000 tests on 272,115 triples in tf32 take at most 20 s."""
    return _large(machine, 1_000, 272_115, "tf32")


@finding(limit_s=45)
def a_thousand_normalised_tests_on_fb15k237(machine: Machine) -> str:
    """1,000 tests on 272,115 triples in fp32, as cosines, take at most 20 s, in the memory allowed."""
    return _large(machine, 1_000, 272_115, normalize="cosine")


@finding(limit_s=30)
def a_graph_is_trained_and_traced_as_by_the_cpu(machine: Machine) -> str:
    """A run traces two checkpoints that this machine trains; its influences are those of a run on the CPU, to 2e-2."""
    import numpy as np

    import slurmgpu
    from slurmgpu.report.report_file import last_report
    from slurmgpu.results import Merged
    from slurmgpu.workloads.tracin.kge import train

    folder = machine.folder / "graph"
    folder.mkdir()
    for name, triples in zip(("train", "test"), _graph(machine.pick(SMALL, TOY)), strict=True):
        lines = "".join(f"e{head}\tr{relation}\te{tail}\n" for head, relation, tail in triples.tolist())
        (folder / f"{name}.txt").write_text(lines, encoding="utf-8")
    model, files = folder / "model", [str(folder / f"{name}.txt") for name in ("train", "test")]
    arguments = [files[0], "--test", files[1], "--dim", "32", "--epochs", "4", "--every", "2", "-o", str(model)]
    hold(train.main(arguments) == 0, "the training failed; the log has the reason")
    checkpoints = [str(path) for path in sorted(model.glob("checkpoint-*.pt"))]
    names = {"train": files[0], "entities": str(model / "node_dict.txt"), "relations": str(model / "rel_dict.txt")}
    found = list[Any]()
    for n_gpus in (machine.n_gpus and 1, 0):
        keys = {
            "input": files[1],
            "run_dir": str(folder / f"run-{len(found)}"),
            "html": False,
            "workload": {"use": "tracin"},
            "settings": {**names, "model": checkpoints, "precondition": "adam", "top_k": 5, "full": "float32"},
            "resources": {"executor": "debug", "gpus": n_gpus},
        }
        report = last_report(slurmgpu.submit(keys).run)
        hold(report["complete"] and not report["errors"], f"{report['n_rows']} rows; {report['errors'][:1]}")
        with Merged(folder / f"run-{len(found)}" / "merged.h5") as merged:
            found.append(merged["influence"][:].astype("float64"))
    errors = np.linalg.norm(found[0] - found[1], axis=1) / np.linalg.norm(found[1], axis=1)
    figures = f"{len(checkpoints)} checkpoints, {found[0].shape[0]} x {found[0].shape[1]}: relative error of a test "
    figures += f"{np.median(errors):.1e}, at most {errors.max():.1e}"
    return hold(len(checkpoints) == 2 and bool(errors.max() < FAR), figures)
