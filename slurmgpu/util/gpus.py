"""The GPUs that this process was given, and whether CUDA can use them. Standard library only; torch is not needed.

Function names and codes are the CUDA driver API's and NVML's: https://docs.nvidia.com/cuda/cuda-driver-api/ and
https://docs.nvidia.com/deploy/nvml-api/. No context is made, so nothing of a GPU's memory is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

MIN_FREE = 0.1
"""The share of a GPU's memory that must be free before a workload is loaded."""
FREE_PATIENCE_S = 10.0
"""A process that has just died gives its memory back within seconds."""


@dataclass(frozen=True)
class GPU:
    """One CUDA device, or MIG instance. `free_bytes` is None where NVML cannot be asked.

    `cuda` is the newest CUDA that the driver supports, as "12.4"; `driver` is the driver's own version, from NVML too.
    """

    name: str
    memory_bytes: int
    uuid: str = ""
    free_bytes: int | None = None
    cuda: str = ""
    driver: str | None = None


class GPUFaultError(Exception):
    """A GPU was allocated but cannot be used; the text says why."""


def number_of(n_gpus: int) -> str:
    """So many GPUs, in words: "1 GPU", "4 GPUs"."""
    return f"{n_gpus} GPU{'' if n_gpus == 1 else 's'}"


def visible_ids(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names; None when it is not set, and CUDA shows all there are."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return [part.strip() for part in value.split(",") if part.strip()]


def check_visible(n_expected: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise GPUFaultError when the environment shows fewer GPUs than were asked for; costs nothing."""
    ids = visible_ids(environ)
    if ids is not None and len(ids) < n_expected:
        shown = ",".join(ids) or "none"
        raise GPUFaultError(f"asked for {number_of(n_expected)}, CUDA_VISIBLE_DEVICES shows {len(ids)} ({shown})")


def probe(n_expected: int, *, mine: int | None = None) -> list[GPU]:
    """The GPUs that CUDA can use in this process, at least `n_expected`; GPUFaultError says what is wrong otherwise.

    One with nearly no free memory is a fault. Of several processes of a task each looks at its own GPU, number `mine`,
    alone: a sibling may have loaded its model already.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GPUFaultError(f"the NVIDIA driver's libcuda.so.1 cannot be loaded here: {error}") from error
    _call(cuda, "cuInit", 0)
    count = ctypes.c_int()
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if count.value < n_expected:
        raise GPUFaultError(f"asked for {number_of(n_expected)}, CUDA finds {count.value}")
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


def _describe(cuda: ctypes.CDLL, ordinal: int, supported: str) -> GPU:
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    memory = ctypes.c_size_t()
    identity = (ctypes.c_ubyte * 16)()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ordinal)
    _call(cuda, "cuDeviceGetName", name, len(name), device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    # Of a MIG instance _v2 (CUDA 11.4) gives the instance's own; the first version gives the whole card's.
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
                f"{gpu.memory_bytes / 1e9:.1f} GB free, before anything was loaded: another process holds the rest"
            )
        time.sleep(0.5)
        gpu = nvml.complete(gpu)
    return gpu


class _Memory(ctypes.Structure):
    """NVML's nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _NVML:
    """NVML's library, for what CUDA tells only to those who make a context."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        version = ctypes.create_string_buffer(96)
        known = library.nvmlSystemGetDriverVersion(version, len(version)) == 0
        self._driver = version.value.decode() if known else None

    def complete(self, gpu: GPU) -> GPU:
        """The GPU with the memory that is free now, found by its UUID; as it was where NVML does not know it."""
        # CUDA gives 16 bytes, and does not say whether they are a card's or a MIG instance's.
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
        yield None  # the driver's installation lacks it, or the image's surroundings do
        return
    if library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield _NVML(library)
    finally:
        library.nvmlShutdown()
