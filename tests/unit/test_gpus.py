"""GPUs as CUDA and NVML show them, with a driver that is faked: what is found, and what is a fault."""
# ruff: noqa: N802 - the names are CUDA's and NVML's

import ctypes
import uuid

import pytest

from slurmgpu.errors import GPUFaultError, SlurmGPUError
from slurmgpu.executors.here import gpu_ids
from slurmgpu.executors.resubmission import first_submission
from slurmgpu.plan.run_file import parse_resources
from slurmgpu.util import gpus
from slurmgpu.util.gpus import probe
from tests.gpu.core import TOO_FEW, TOO_FULL

GB = 10**9
IDS = [uuid.UUID(int=n) for n in range(4)]


class FakeDriver:
    """libcuda and libnvidia-ml of a machine with some GPUs, as ctypes shows them."""

    def __init__(self, n_gpus=2, free=(100 * GB,), prefix="GPU", nvml=True, code=0):
        self.n_gpus, self.prefix, self.code, self.has_nvml = n_gpus, prefix, code, nvml
        self.free = list(free)  # at each look; the last stays
        self.asked = []
        self.is_open = False

    def load(self, name):
        if name == "libcuda.so.1" or self.has_nvml:
            return self
        raise OSError(f"{name}: cannot open shared object file")

    def cuInit(self, flags):
        return self.code

    def cuGetErrorString(self, code, text):
        text._obj.value = b"system not yet initialized"
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 12080
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = self.n_gpus
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = 140 * GB
        return 0

    def cuDeviceGetUuid_v2(self, identity, device):
        identity[:] = IDS[device.value].bytes
        return 0

    def nvmlInit_v2(self):
        self.is_open = True
        return 0

    def nvmlShutdown(self):
        self.is_open = False
        return 0

    def nvmlSystemGetDriverVersion(self, version, size):
        version.value = b"570.12"
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        known = [f"{self.prefix}-{one}" for one in IDS[: self.n_gpus]]
        if name.decode() not in known:
            return 6
        handle._obj.value = known.index(name.decode()) + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        self.asked.append(handle.value - 1)
        memory._obj.free = self.free.pop(0) if len(self.free) > 1 else self.free[0]
        return 0


@pytest.fixture
def driver(monkeypatch):
    def install(**changes):
        fake = FakeDriver(**changes)
        monkeypatch.setattr(ctypes, "CDLL", fake.load)
        monkeypatch.setattr(gpus, "FREE_PATIENCE_S", 0.0)
        monkeypatch.setattr(gpus.time, "sleep", lambda seconds: None)
        return fake

    return install


def test_a_gpu_is_described_by_cuda_and_its_free_memory_by_nvml(driver):
    fake = driver()
    first, second = probe(2)
    assert (first.name, first.memory_bytes, first.free_bytes) == ("NVIDIA H200", 140 * GB, 100 * GB)
    assert (first.cuda, first.driver) == ("12.8", "570.12")
    assert [first.uuid, second.uuid] == [f"GPU-{one}" for one in IDS[:2]]
    assert not fake.is_open


def test_a_mig_instance_is_found_under_its_own_name(driver):
    driver(prefix="MIG", n_gpus=1)
    assert (probe(1)[0].uuid, probe(1)[0].free_bytes) == (f"MIG-{IDS[0]}", 100 * GB)


def test_without_nvml_the_free_memory_is_unknown_and_no_fault(driver):
    driver(nvml=False)
    assert [(gpu.uuid, gpu.free_bytes, gpu.driver) for gpu in probe(1)] == [(f"GPU-{n}", None, None) for n in IDS[:2]]


def test_a_gpu_whose_memory_another_process_holds_is_a_fault(driver):
    fake = driver(free=[13 * GB])
    with pytest.raises(GPUFaultError, match=r"GPU 0 \(NVIDIA H200, GPU-0000.* has 13.0 of 140.0 GB free.*" + TOO_FULL):
        probe(1)
    assert not fake.is_open


def test_memory_that_a_dying_process_gives_back_is_waited_for(driver, monkeypatch):
    driver(free=[0, 0, 0, 120 * GB], n_gpus=1)
    monkeypatch.setattr(gpus, "FREE_PATIENCE_S", 60.0)
    assert probe(1)[0].free_bytes == 120 * GB


def test_a_process_of_several_looks_at_the_memory_of_its_own_gpu_alone(driver):
    fake = driver(free=[0, 100 * GB])  # a sibling has filled GPU 0 already
    assert [gpu.free_bytes for gpu in probe(2, mine=1)] == [0, 100 * GB]
    assert fake.asked == [0, 1]


def test_fewer_gpus_than_were_asked_for_are_a_fault(driver):
    driver(n_gpus=1)
    with pytest.raises(GPUFaultError, match=f"asked for 2 GPUs, {TOO_FEW} 1"):
        probe(2)


def test_what_cuda_complains_of_is_a_fault_in_its_own_words(driver):
    driver(code=3)
    with pytest.raises(GPUFaultError, match="cuInit failed with code 3: system not yet initialized"):
        probe(1)


def test_a_node_without_a_driver_is_a_fault(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(GPUFaultError, match=r"libcuda\.so\.1 cannot be loaded here"):
        probe(1)


def test_all_gpus_are_those_that_the_machine_shows(driver, monkeypatch):
    driver()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = {"executor": "local", "gpus": "all"}
    assert parse_resources(here).gpus == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert parse_resources(here).gpus == 1
    for hidden, n_shown in (("-1", 0), ("", 0), ("NoDevFiles", 0), ("1,-1,0", 1), ("0, 1", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert parse_resources(here).gpus == n_shown
    with pytest.raises(
        SlurmGPUError, match=r"the executor slurm computes elsewhere. Give a number, such as --gpus 4, or .*local"
    ):
        parse_resources({"gpus": "all"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver(code=100)
    assert parse_resources(here).gpus == 0
    driver(code=3)
    with pytest.raises(SlurmGPUError, match=r"not yet initialized\. To compute on CPUs: --gpus 0"):
        parse_resources(here)


def test_a_gpu_that_is_named_twice_is_that_of_two_tasks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0,1,1")
    asked = {"gpus": 4, "array": True, "executor": "local"}
    assert gpu_ids(first_submission(asked, most_tasks=4)) == [["0"], ["0"], ["1"], ["1"]]
