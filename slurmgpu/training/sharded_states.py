"""States of sharded models (FSDP2), in memory and on disk, by torch.distributed.checkpoint.

They load on any number of ranks. Importing this takes 0.6 s, so only trainings that need it do.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import os
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta

from slurmgpu.training.checkpoint_files import Checksum, checksum_of, mismatch_error, plain_state, probe
from slurmgpu.util.atomic_files import fsync_dir

PLAIN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # written by Python 3.13; others have no such module
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
"""What metadata names besides its own records, and PyTorch's sizes and types."""


class _Plain(pickle.Unpickler):
    """Reads the metadata of a checkpoint, and calls nothing else: colleagues may be able to write its folder."""

    def find_class(self, module: str, name: str) -> Any:
        found = None if "." in name else getattr(sys.modules.get(module), name, None)
        is_record = isinstance(found, type) and (is_dataclass(found) or issubclass(found, enum.Enum))
        if (is_record and module.startswith("torch.distributed.checkpoint.")) or (
            module == "torch" and (found is torch.Size or isinstance(found, torch.dtype | torch.layout))
        ):
            return found
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.0 to 3.11.3 pickle a member of an Enum
            return _member
        if (plain := PLAIN.get((module, name))) is None:
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}")
        return plain


def _member(kind: Any, name: str) -> enum.Enum:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"its metadata asks for {name} of what is no Enum")
    return kind[name]


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            metadata = _Plain(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        plain = io.BytesIO()  # PyTorch's own unpickles anything
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters, buffers and optimizer state as DTensors under the user's names; called by all ranks."""
    parameters, moments = distributed.get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore a `state` that `read` has filled."""
    distributed.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def weights(model: nn.Module) -> dict[str, Any]:
    """Unsharded parameters and buffers on the CPU of rank 0; {} on others."""
    options = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(distributed.get_model_state_dict(model, options=options))


def write(folder: Path, state: Mapping[str, Any], rank: int) -> dict[str, Checksum]:
    """Write this rank's part of a state, called by all ranks; the sums of the files that this rank wrote.

    File names are relative to the parent of `folder`. SlurmGPUError for a state that could not be read.
    """
    plain = plain_state(state)
    folder.mkdir(exist_ok=True)
    try:
        with _alone_or_not():
            dcp.save(plain, storage_writer=dcp.FileSystemWriter(folder, sync_files=True))
    except CheckpointException as error:
        # It is a BaseException, and has lost the OSError that caused it.
        probe(folder)
        raise OSError(errno.EIO, f"the sharded state cannot be written: {error}") from error
    fsync_dir(folder)
    names = sorted(os.listdir(folder))
    mine = [name for name in names if name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__"))]
    return {f"{folder.name}/{name}": checksum_of(folder / name) for name in mine}


def read(folder: Path, into: dict[str, Any]) -> None:
    """Fill a `state` in place, called by all ranks; SlurmGPUError if it does not fit. Moments not on disk stay."""
    reader = _Reader(folder)
    try:
        known = reader.read_metadata().state_dict_metadata
    except pickle.UnpicklingError as error:
        raise mismatch_error(error) from error
    missing = [name for name in into["model"] if not any(key.startswith(f"model.{name}") for key in known)]
    if missing:
        raise mismatch_error(KeyError(f"it has no {', '.join(missing)}."))
    try:
        with _alone_or_not():
            dcp.load(into, storage_reader=reader, planner=_Planner(allow_partial_load=True))
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            raise (failure if isinstance(failure, OSError) else mismatch_error(failure)) from error
        raise


@contextlib.contextmanager
def _alone_or_not() -> Iterator[None]:
    """Suppress PyTorch's warning that a process without a group acts alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
