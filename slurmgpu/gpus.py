"""The GPUs that this process was given, and whether CUDA can use them. Standard library only; torch is not needed.

Function names and codes are the CUDA driver API's: https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One CUDA device: its name and its memory in bytes."""

    name: str
    memory_bytes: int


class GPUFaultError(Exception):
    """A GPU was allocated but cannot be used; the text says why."""


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
        raise GPUFaultError(f"{n_expected} GPUs were asked for, CUDA_VISIBLE_DEVICES shows {len(ids)} ({shown})")


def probe(n_expected: int) -> list[GPU]:
    """The GPUs that CUDA can use in this process, at least `n_expected`; GPUFaultError says what is wrong otherwise."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GPUFaultError(f"the NVIDIA driver's libcuda.so.1 cannot be loaded here: {error}") from error
    _call(cuda, "cuInit", 0)
    count = ctypes.c_int()
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if count.value < n_expected:
        raise GPUFaultError(f"{n_expected} GPUs were asked for, CUDA finds {count.value}")
    return [_describe(cuda, ordinal) for ordinal in range(count.value)]


def _describe(cuda: ctypes.CDLL, ordinal: int) -> GPU:
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    memory = ctypes.c_size_t()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ordinal)
    _call(cuda, "cuDeviceGetName", name, len(name), device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return GPU(name.value.decode(), memory.value)


def _call(cuda: ctypes.CDLL, function: str, *arguments: object) -> None:
    code = getattr(cuda, function)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise GPUFaultError(f"{function} failed with code {code}: {(text.value or b'unknown').decode()}")
