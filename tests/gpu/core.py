"""The core on a GPU: NVML, the probe, runs with real faults of CUDA, and telemetry."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.findings import Machine, NotMeasured, finding, hold, logs_of, shared

if TYPE_CHECKING:
    from slurmgpu.faults.verdicts import Verdict

HOME = Path(__file__).parents[2]
QUERY = ("uuid", "memory.total", "memory.used", "temperature.gpu", "power.draw", "driver_version")
MIB = 1 << 20
LOAD_S = 8.0
SUBMIT = "import json, sys, slurmgpu; slurmgpu.submit(json.load(sys.stdin))"
PROBE = """
import sys
from slurmgpu.errors import GPUFaultError
from slurmgpu.util import gpus
gpus.FREE_PATIENCE_S = 1.0
try:
    print(len(gpus.probe(int(sys.argv[1]))), "GPUs")
except GPUFaultError as error:
    print(error)
"""
TOO_FEW, TOO_FULL = "CUDA finds", "another process uses the rest"
"""What the probe says of GPUs that are missing, and of one without free memory."""
TRIAL = ("computes", "oom", "assert", "illegal", "kill", "bytes", "memory")
"""The verdicts of `try_gpus`, in order."""


@finding()
def nvml_says_what_nvidia_smi_says(machine: Machine) -> str:
    """NVML's memory, temperature, power and driver are nvidia-smi's."""
    from slurmgpu.util.nvml import open_cards

    machine.needs_gpu()
    cards = open_cards(None)
    if cards is None:
        raise NotMeasured("nvidia-ml-py cannot be imported, or NVML finds no GPU")
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        before = {card.uuid: card.read() for card in cards.cards}
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        after = {card.uuid: card.read() for card in cards.cards}
    except FileNotFoundError as error:
        raise NotMeasured("there is no nvidia-smi") from error
    finally:
        driver = cards.driver
        cards.close()
    rows = [dict(zip(QUERY, line.split(", "), strict=True)) for line in said.splitlines()]
    good, figures = bool(rows), []
    for row in rows:
        ours = before[row["uuid"]], after[row["uuid"]]
        total = float(row["memory.total"]) * MIB
        # Older drivers count what they reserve as used, nvidia-smi does not.
        good &= driver == row["driver_version"]
        good &= _agree(row["memory.total"], [(each.memory_total_bytes or 0) / MIB for each in ours], 0.01 * total / MIB)
        good &= _agree(row["memory.used"], [(each.memory_used_bytes or 0) / MIB for each in ours], 0.02 * total / MIB)
        good &= _agree(row["temperature.gpu"], [each.temperature_c or 0 for each in ours], 5)
        powers = [each.power_w or 0.0 for each in ours]
        good &= _agree(row["power.draw"], powers, 0.5 * max(powers))
        last = ours[1]
        figures.append(
            f"memory {(last.memory_total_bytes or 0) / MIB:,.0f} and {row['memory.total']} MiB, "
            f"used {(last.memory_used_bytes or 0) / MIB:,.0f} and {row['memory.used']} MiB, "
            f"{last.temperature_c} and {row['temperature.gpu']} °C, {last.power_w} and {row['power.draw']} W, "
            f"driver {driver} and {row['driver_version']}"
        )
    return hold(good, "; ".join(figures))


def _agree(said: str, ours: Sequence[float], off: float) -> bool:
    """Whether a number of nvidia-smi is between our readings before and after it, or nearly so.

    A virtual GPU or a MIG instance has "[N/A]" for some.
    """
    with contextlib.suppress(ValueError):
        return min(ours) - off <= float(said) <= max(ours) + off
    return True


@finding()
def the_probe_finds_the_gpus(machine: Machine) -> str:
    """The probe finds the GPUs with names, memory and driver; it fails if asked for too many, or if none is visible."""
    from slurmgpu.util import gpus
    from slurmgpu.worker import surroundings

    found = gpus.probe(machine.n_gpus) if machine.on_gpu else []
    seen = surroundings.probe(machine.n_gpus)  # as `check --here` does
    too_many, none = _probe(machine.n_gpus + 1), _probe(1, CUDA_VISIBLE_DEVICES="")
    named = "; ".join(
        f"{gpu.name}, {gpu.memory_bytes / 1e9:.1f} GB, {(gpu.free_bytes or 0) / 1e9:.1f} free" for gpu in found
    )
    refuses = (f"{TOO_FEW} {machine.n_gpus}" in too_many or not machine.on_gpu) and "GPUs" not in none[:8]
    knows = all(gpu.uuid and gpu.cuda and gpu.memory_bytes for gpu in found)
    if _has_nvml():
        knows &= all(gpu.driver and gpu.free_bytes for gpu in found)
    knows &= [each["uuid"] for each in seen["gpus"]] == [gpu.uuid for gpu in found] and not seen["problems"]
    figures = f"{named or 'none'}; one more: {too_many}; none visible: {none}"
    return hold(refuses and knows, "; ".join([figures, *(said for _, said in seen["problems"])]))


def _has_nvml() -> bool:
    """Whether the driver's NVML is here: images may be given only what computes."""
    from slurmgpu.util import gpus

    with gpus._nvml() as nvml:
        return nvml is not None


@finding(limit_s=45)  # it is the first to import torch, perhaps from a slow disk
def the_probe_refuses_a_gpu_that_others_fill(machine: Machine) -> str:
    """A GPU whose memory another process holds is refused with a reason, and accepted once the memory is free."""
    machine.needs_gpu()
    if not _has_nvml():
        raise NotMeasured("there is no libnvidia-ml.so.1, by which the probe learns what is free")
    import torch

    free, total = torch.cuda.mem_get_info(machine.device)
    held = torch.empty(int(free - 0.05 * total), dtype=torch.uint8, device=machine.device)
    full = _probe(1)
    del held
    torch.cuda.empty_cache()
    empty = _probe(1)
    return hold(TOO_FULL in full and empty.endswith("GPUs"), f"full: {full}; then: {empty}")


def _probe(n_gpus: int, **environ: str) -> str:
    """What the probe prints in its own process."""
    command = [sys.executable, "-c", PROBE, str(n_gpus)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=HOME, env={**os.environ, **environ}, check=True
    )
    return done.stdout.strip()


@shared
def _trial(machine: Machine) -> dict[str, Verdict]:
    import slurmgpu
    from slurmgpu.faults.gpu_trial import try_gpus

    folder = machine.folder / "trial"
    folder.mkdir()
    verdicts = try_gpus(folder, machine.n_gpus, lambda keys: slurmgpu.submit(keys).run)
    return dict(zip(TRIAL, verdicts, strict=False))


def _verdict(machine: Machine, name: str) -> str:
    found = _trial(machine)
    if name not in found:
        raise NotMeasured("there is no GPU" if name == "memory" and not machine.on_gpu else "the trial ended before it")
    is_first = name == next((each for each, verdict in found.items() if not verdict.kept), None)
    logs = logs_of(*(machine.folder / "trial").iterdir()) if is_first else ""
    return hold(found[name].kept, found[name].text, logs)


@finding(limit_s=80)  # of eight GPUs, each process asks all
def a_run_computes_what_the_cpu_does(machine: Machine) -> str:
    """A run without faults is complete, and its matrix products equal the CPU's (the time is that of both runs)."""
    return _verdict(machine, "computes")


@finding()
def a_batch_that_is_out_of_memory_is_halved(machine: Machine) -> str:
    """A batch that runs out of GPU memory is halved until it fits, and the shard records that."""
    return _verdict(machine, "oom")


@finding()
def a_device_side_assert_costs_its_item(machine: Machine) -> str:
    """A device-side assert costs two workers and its item, which is isolated and quarantined."""
    return _verdict(machine, "assert")


@finding()
def an_illegal_address_costs_its_item(machine: Machine) -> str:
    """An illegal address costs two workers and its item, which is isolated and quarantined."""
    return _verdict(machine, "illegal")


@finding()
def a_worker_that_is_killed_is_started_again(machine: Machine) -> str:
    """A worker that is killed (SIGKILL) while a kernel runs is restarted, and nothing is lost."""
    return _verdict(machine, "kill")


@finding()
def faults_change_no_byte(machine: Machine) -> str:
    """After all these faults, all rows of the merged file but the quarantined equal those of the run without faults."""
    return _verdict(machine, "bytes")


@finding()
def the_memory_is_free_after_each_fault(machine: Machine) -> str:
    """The GPU's memory is free again after each fault, and after the run."""
    return _verdict(machine, "memory")


@finding()
def telemetry_has_the_xid_of_a_fault(machine: Machine) -> str:
    """Telemetry has the Xid error that the driver reports of the illegal address."""
    from slurmgpu.run.directory import Run

    machine.needs_gpu()
    _verdict(machine, "illegal")
    if not _tells_xids():
        raise NotMeasured("nvidia-ml-py is not installed, or NVML tells no Xid errors here")
    used = [record["usage"] for record in Run.open(machine.folder / "trial" / "with-faults").attempts()]
    xids = sorted({xid for usage in used if usage for xid in usage["xids"]})
    return hold(bool(xids), f"Xid errors {xids}: https://docs.nvidia.com/deploy/xid-errors/")


def _tells_xids() -> bool:
    """Whether NVML says that it reports Xid errors of the GPUs."""
    from slurmgpu.util.gpus import visible_ids
    from slurmgpu.util.nvml import open_cards

    if (cards := open_cards(visible_ids())) is None:
        return False
    import pynvml

    try:
        for card in cards.cards:
            pynvml.nvmlDeviceRegisterEvents(card.card_handle, pynvml.nvmlEventTypeXidCriticalError, cards._events)
    except Exception:  # NVML's, or ctypes' if there are no events at all
        return False
    finally:
        cards.close()
    return True


@finding(limit_s=40)
def two_runs_share_a_gpu(machine: Machine) -> str:
    """Two runs at the same time on one GPU are both complete, with the same bytes."""
    from slurmgpu.faults.gpu_trial import run_file
    from slurmgpu.results import Merged

    folders = [machine.folder / name for name in ("one", "other")]
    environ = dict(os.environ)
    if machine.on_gpu:
        environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    runs, processes = [], []
    for folder in folders:
        folder.mkdir()
        keys = run_file(folder, min(1, machine.n_gpus), faults=False)
        runs.append(Path(keys["run_dir"]))
        started = subprocess.Popen(
            [sys.executable, "-c", SUBMIT],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HOME,
            env=environ,
        )
        assert started.stdin is not None  # it is a pipe
        started.stdin.write(json.dumps(keys))
        started.stdin.close()
        processes.append(started)
    codes = [process.wait() for process in processes]
    said = [process.stderr.read() for process in processes if process.stderr is not None]
    hold(codes == [0, 0], f"exit codes {codes}", "\n".join([*said, logs_of(*runs)]))
    found = []
    for run in runs:
        with Merged(run / "merged.h5") as merged:
            found.append((merged.complete and not merged.errors, merged["product"][:].tobytes()))
    same = found[0] == found[1]
    n_whole = sum(whole for whole, _ in found)
    return hold(same and n_whole == 2, f"{n_whole} of 2 are complete, with {'the same' if same else 'different'} bytes")


@finding()
def telemetry_sees_a_known_load(machine: Machine) -> str:
    """Telemetry of a constant load shows its utilisation (≥ 80 %), memory, power, and energy (± 25 %)."""
    from slurmgpu.task.telemetry import Sampler
    from slurmgpu.util import gpus

    gpu = gpus.probe(1)[0] if machine.on_gpu else None
    work = _matrices(machine) if machine.on_gpu else lambda: sum(range(100_000))
    work()  # loads cuBLAS
    began = time.monotonic()
    with Sampler(machine.folder / "telemetry", [gpu.uuid] if gpu else [], 0.25, os.getpid) as sampler:
        sampler.mark_ready()
        while time.monotonic() < began + machine.pick(LOAD_S, 1.0):
            work()
        used, seconds = sampler.usage(), time.monotonic() - began
    if gpu is None:
        host = used["host_memory_peak_bytes"] or 0
        return hold(host > 0, f"{used['n_samples_ready']} samples, {host / 1e6:,.0f} MB of host memory, and no GPU")
    power, energy, peak = used["power_mean_w"], used["energy_j"], used["gpu_memory_peak_bytes"]
    if peak is None:
        raise NotMeasured("telemetry has no reading of the GPU: nvidia-ml-py is missing, or NVML does not know the GPU")
    figures = (
        f"{used['gpu_utilisation']} % in {used['n_samples_ready']} samples, {seconds:.1f} s, peak {peak / 1e9:.2f} GB, "
        f"{power} W, {energy} J, at most {used['temperature_max_c']} °C, throttled {used['throttled']}, "
        f"Xid errors {used['xids']}"
    )
    holds = peak >= HELD_BYTES and not used["xids"]
    if used["gpu_utilisation"] is not None:  # for a MIG instance NVML has neither this nor the power
        holds &= used["gpu_utilisation"] >= 80
    if power is not None and energy is not None:
        # Energy counts from the first sample to the last, which is less than the load by up to two periods.
        holds &= 0.75 * power * (seconds - 0.5) <= energy <= 1.25 * power * seconds
    return hold(holds, figures)


HELD_BYTES = 2 << 30


def _matrices(machine: Machine) -> functools.partial[None]:
    """Work that keeps a GPU busy and holds HELD_BYTES."""
    import torch

    held = torch.ones(HELD_BYTES, dtype=torch.uint8, device=machine.device)
    factor = torch.randn(4096, 4096, device=machine.device, dtype=torch.bfloat16)

    def work(_: object) -> None:
        for _ in range(20):
            factor @ factor
        torch.cuda.synchronize()

    return functools.partial(work, held)
