"""States of sharded models (FSDP2), in memory and on disk, by torch.distributed.checkpoint.

They load on any number of ranks. Importing this takes 0.6 s, so only trainings that need it do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.checkpoint.api import CheckpointException

from slurmgpu.training.checkpoint_files import Checksum, checksum_of, mismatch_error, probe
from slurmgpu.util.atomic_files import fsync_dir


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

    File names are relative to the parent of `folder`.
    """
    folder.mkdir(exist_ok=True)
    try:
        with _alone_or_not():
            dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))
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
    reader = dcp.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    missing = [name for name in into["model"] if not any(key.startswith(f"model.{name}") for key in known)]
    if missing:
        raise mismatch_error(KeyError(f"it has no {', '.join(missing)}."))
    try:
        with _alone_or_not():
            dcp.load(into, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
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
