"""The GPUs of this process, and whether CUDA can use them. Standard library only, without torch.

Function names and codes are those of the CUDA driver API and NVML: https://docs.nvidia.com/cuda/cuda-driver-api/ and
https://docs.nvidia.com/deploy/nvml-api/. No context is made, so no GPU memory is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

from slurmgpu.errors import GPUFaultError
from slurmgpu.util.amounts import count_of

MIN_FREE = 0.1
"""The share of a GPU's memory that must be free before a workload is loaded."""
FREE_PATIENCE_S = 10.0
"""A process that has just died gives its memory back within seconds."""
AGAIN_S = 60.0
"""How long a new process may take to look at the GPUs."""
LOOK = """
import sys
from slurmgpu.errors import GPUFaultError
from slurmgpu.util import gpus
try:
    gpus.probe(int(sys.argv[1]))
except GPUFaultError as error:
    print(error)
"""


@dataclass(frozen=True)
class GPU:
    """One CUDA device, or MIG instance. `free_bytes` and `driver`, its version, are from NVML, None without it.

    `cuda` is the newest CUDA that the driver supports, as "12.4".
    """

    name: str
    memory_bytes: int
    uuid: str = ""
    free_bytes: int | None = None
    cuda: str = ""
    driver: str | None = None


NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: a driver without a GPU."""


def visible_ids() -> list[str] | None:
    """The GPUs in CUDA_VISIBLE_DEVICES; None if it is not set, and CUDA shows all.

    CUDA stops at the first entry that is no GPU, such as -1, or NoDevFiles of older versions of Slurm.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    parts = (part.strip() for part in value.split(","))
    return [*itertools.takewhile(lambda part: not part.startswith(("-", "NoDev")), filter(None, parts))]


def check_visible(n_expected: int) -> None:
    """Raise GPUFaultError if CUDA_VISIBLE_DEVICES shows fewer GPUs than were asked for."""
    ids = visible_ids()
    if ids is not None and len(ids) < n_expected:
        shown = ",".join(ids) or "none"
        raise GPUFaultError(f"asked for {count_of(n_expected, 'GPU')}, CUDA_VISIBLE_DEVICES has {len(ids)} ({shown})")


def count() -> int:
    """How many GPUs this machine shows; 0 without a driver. GPUFaultError if the driver fails."""
    if (ids := visible_ids()) is not None:
        return len(ids)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if cuda.cuInit(0) == NO_DEVICE:
        return 0
    return len(probe(0))


def probe(n_expected: int, *, mine: int | None = None) -> list[GPU]:
    """The GPUs that CUDA can use in this process; GPUFaultError if they are fewer than `n_expected`, or unusable.

    A GPU with nearly no free memory is unusable. One of several processes of a task checks only the memory of its own
    GPU, number `mine`: the others may have loaded their models already.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GPUFaultError(f"the NVIDIA driver's libcuda.so.1 cannot be loaded here: {error}") from error
    _call(cuda, "cuInit", 0)
    count = ctypes.c_int()
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if count.value < n_expected:
        raise GPUFaultError(f"asked for {count_of(n_expected, 'GPU')}, CUDA finds {count.value}")
    version = ctypes.c_int()
    _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
    supported = f"{version.value // 1000}.{version.value % 1000 // 10}"
    found = [_describe(cuda, ordinal, supported) for ordinal in range(count.value)]
    with _nvml() as nvml:
        if nvml is not None:
            found = [nvml.complete(gpu) for gpu in found]
            checked = range(len(found)) if mine is None else [mine]
            for ordinal in checked:
                found[ordinal] = _wait_for_memory(nvml, ordinal, found[ordinal])
    return found


def check_again(n_expected: int) -> None:
    """Raise GPUFaultError if a new process can use fewer GPUs; in this process CUDA remembers what it found.

    Nothing is raised if that process crashes, or takes longer than AGAIN_S.
    """
    command = [sys.executable, "-c", LOOK, str(n_expected)]
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=AGAIN_S, check=False)
        if done.returncode == 0 and done.stdout:
            raise GPUFaultError(done.stdout.strip())


def _describe(cuda: ctypes.CDLL, ordinal: int, supported: str) -> GPU:
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    memory = ctypes.c_size_t()
    identity = (ctypes.c_ubyte * 16)()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ordinal)
    _call(cuda, "cuDeviceGetName", name, len(name), device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    # For a MIG instance _v2 (CUDA 11.4) returns the instance's UUID; the first version returns the card's.
    function = "cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    _call(cuda, function, identity, device)
    return GPU(name.value.decode(), memory.value, f"GPU-{uuid.UUID(bytes=bytes(identity))}", cuda=supported)


def _call(cuda: ctypes.CDLL, function: str, *arguments: object) -> None:
    code = getattr(cuda, function)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise GPUFaultError(f"{function} failed with code {code}: {(text.value or b'unknown').decode()}")


def _wait_for_memory(nvml: _NVML, ordinal: int, gpu: GPU) -> GPU:
    end = time.monotonic() + FREE_PATIENCE_S
    while gpu.free_bytes is not None and gpu.free_bytes < MIN_FREE * gpu.memory_bytes:
        if time.monotonic() > end:
            raise GPUFaultError(
                f"GPU {ordinal} ({gpu.name}, {gpu.uuid}) has {gpu.free_bytes / 1e9:.1f} of "
                f"{gpu.memory_bytes / 1e9:.1f} GB free before anything is loaded: another process uses the rest"
            )
        time.sleep(0.5)
        gpu = nvml.complete(gpu)
    return gpu


class _Memory(ctypes.Structure):
    """NVML's nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _NVML:
    """NVML's library, for what CUDA only says with a context."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        version = ctypes.create_string_buffer(96)
        known = library.nvmlSystemGetDriverVersion(version, len(version)) == 0
        self._driver = version.value.decode() if known else None

    def complete(self, gpu: GPU) -> GPU:
        """The GPU, found by its UUID, with the memory that is free now; unchanged if NVML does not know it."""
        # CUDA's 16 bytes do not say whether they identify a card or a MIG instance.
        for name in (gpu.uuid, gpu.uuid.replace("GPU-", "MIG-", 1)):
            handle, memory = ctypes.c_void_p(), _Memory()
            if self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) == 0:
                known = self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
                return replace(gpu, uuid=name, free_bytes=memory.free if known else None, driver=self._driver)
        return gpu


@contextlib.contextmanager
def _nvml() -> Iterator[_NVML | None]:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None  # the driver's installation, or the image, lacks it
        return
    if library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield _NVML(library)
    finally:
        library.nvmlShutdown()
