"""Checkpoint files with checksums."""

from __future__ import annotations

import io
import logging
import os
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.ansi import without_escapes
from slurmgpu.util.atomic_files import beside, fsync_dir
from slurmgpu.util.exceptions import message_of

log = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class Checksum:
    """The size and the CRC-32 of a file that was written."""

    bytes: int
    crc32: int


def write_state(path: Path, state: Mapping[str, Any]) -> Checksum:
    """Write and fsync a state for `read_state`. NumPy scalars become Python numbers."""
    plain = plain_state(state)
    with open(path, "wb") as file:
        stream = _ChecksumStream(file)
        try:
            torch.save(plain, stream)
        except RuntimeError:
            # PyTorch's zip writer replaces errors of Python's write by its own.
            if stream.error is not None:
                raise stream.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return Checksum(stream.bytes, stream.crc32)


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with Python's numbers for NumPy's; SlurmGPUError if it could be written but not read."""
    plain: dict[str, Any] = _mapped(dict(state), _plain)
    _check_plain(plain)
    return plain


def read_state(path: Path) -> dict[str, Any]:
    """A state of `write_state`, its tensors on the CPU.

    Large tensors are pages of the file, shared by the processes of a machine: copy them, then drop them. The file may
    be removed before that, but not by another machine on NFS: then reading more pages ends the process with SIGBUS.
    """
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {name: _mapped(value, _off_the_file) for name, value in state.items()}


def save_weights(path: Path, weights: Mapping[str, Any]) -> Checksum:
    """Write `{name: tensor}` for `torch.load(path, weights_only=True)`, atomically; called by rank 0 alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        written = _write_whole(path, weights)
    except FileNotFoundError:
        log.warning("writing %s again: another process of the same training removed its partial file", path)
        written = _write_whole(path, weights)
    fsync_dir(path.parent)
    return written


def _write_whole(path: Path, state: Mapping[str, Any]) -> Checksum:
    with beside(path) as partial:
        written = write_state(partial, state)
        partial.replace(path)
    return written


class CheckpointMismatchError(SlurmGPUError):
    """A checkpoint does not fit what the training class makes; `advice` is for the case that its code is unchanged."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


def mismatch_error(error: BaseException) -> CheckpointMismatchError:
    """The error for a checkpoint that does not fit the model."""
    return CheckpointMismatchError(
        "the checkpoint does not fit the model or optimizer that the training class makes now: "
        f"{' '.join(message_of(error).split())}",
        "Submit the changed class as a new run.",
    )


def checksum_of(path: Path) -> Checksum:
    """The size and the CRC-32 of a file."""
    size = crc32 = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
    return Checksum(size, crc32)


def probe(folder: Path) -> None:
    """Raise OSError if nothing can be written in a folder, e.g. since the disk is full."""
    path = folder / f"probe-{os.urandom(4).hex()}"
    try:
        with open(path, "wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


class _ChecksumStream:
    """A file that computes the CRC of what is written, and keeps the first error."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes = self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.bytes, self.crc32 = self.bytes + len(data), zlib.crc32(data, self.crc32)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _check_plain(state: Mapping[str, Any]) -> None:
    """SlurmGPUError, at the first checkpoint, for a state that could be written but not read. Skips tensors."""
    file = io.BytesIO()
    try:
        torch.save(_mapped(state, _without_tensors), file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        lines = [line.strip() for line in without_escapes(message_of(error)).splitlines() if line.strip()]
        reason = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), (lines or [""])[0])
        raise SlurmGPUError(
            "the training's state cannot be saved in a checkpoint, which supports tensors, numbers, strings, lists and "
            f"dicts: {reason} Check the state_dict() of your optimizer, scheduler and model."
        ) from error


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A state with `change` applied to all keys and values that are not dicts, lists or tuples."""
    if type(value) in (dict, OrderedDict):
        return type(value)((_mapped(key, change), _mapped(each, change)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, change) for each in value)
    return change(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _off_the_file(value: Any) -> Any:
    """Copies of small tensors; kept ones would hold the file open.

    Sparse ones are copied, too: `nbytes` does not know their size in all layouts.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.layout != torch.strided or value.nbytes < SMALL_BYTES else value


def _without_tensors(value: Any) -> Any:
    return None if isinstance(value, torch.Tensor) else value
