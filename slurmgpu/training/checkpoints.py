"""Checkpoints in a folder: whole or not there, the last ones kept, a damaged one noticed and passed over.

A checkpoint is a folder `step-0000001200` with `shared.pt` (rank 0's: what is equal on all ranks), `rank-0.pt` … (each
rank's own), `sharded/` (torch.distributed.checkpoint's, of a model whose parameters are spread) and `checkpoint.json`,
which has the size and the CRC of every file. It is written as a `.partial` folder, fsynced and renamed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slurmgpu.training.folders import REPLACED, make_way, remove, set_aside, take_back
from slurmgpu.training.places import Place
from slurmgpu.training.ranks import led, together
from slurmgpu.training.written import Written, read_state, save_weights, sum_file, unique_partial, write_state
from slurmgpu.util.atomic_files import fsync_dir, write_json

__all__ = ["Checkpoint", "Checkpoints", "save_weights"]

log = logging.getLogger(__name__)

FORMAT = "slurmgpu checkpoint"
VERSION = 1
NAME = re.compile(r"step-(\d{10,})")
SHARED, SHARDED, SUMS = "shared.pt", "sharded", "checkpoint.json"


class DamagedError(Exception):
    """A checkpoint is not what was written; the message says which file, and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one training, in `folder`. Every method but `steps` is called by all ranks together.

    Two processes may train the same there at once, where one has taken over from another that was thought dead: each
    writes under a name of its own, and a step that is there already is kept as it is, since it is the same.
    """

    folder: Path
    place: Place
    keep: int = 2

    def save(
        self,
        step: int,
        *,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        sharded: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> float:
        """Write the checkpoint of a step and remove all but the last `keep`; the seconds that it took (rank 0's).

        One of the same step is kept as it is, or, to `replace` it since the state has changed, makes way for this one.
        What cannot be written is an OSError on all ranks, and the checkpoints before are still there. A state that
        could not be read back is a SlurmGPUError: it is made of tensors, numbers, strings, lists and dicts.
        """
        started = time.monotonic()
        partial = led(self.place, lambda: self._begin(step, replace))
        if partial is None:
            return 0.0
        try:
            self._write(partial, step, shared, own, sharded, replace)
        except Exception as error:
            still_there = led(self.place, partial.is_dir)
            if still_there and self.place.leads:
                shutil.rmtree(partial, ignore_errors=True)
            if still_there or not isinstance(error, FileNotFoundError):
                raise
            if self.place.leads:
                log.warning("checkpoint of step %d not kept: another process that trains the same removed it", step)
        return led(self.place, lambda: time.monotonic() - started)

    def last(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, the same on all ranks; None if there is none.

        Newer ones that are damaged are set aside (`step-….damaged`), with a warning. One that cannot be read is left
        alone; an OSError if there is no other, since what may be readable tomorrow is not to be trained again.
        What writers that died have left is removed.
        """
        led(self.place, self._sweep)
        passed: set[int] = set()
        unreadable = ""
        while (step := led(self.place, lambda: self._newest(passed))) is not None:
            checkpoint = Checkpoint(self._path(step), step, 0, self.place)
            found = together(self.place, checkpoint.look)
            complaint, is_damaged = _worst([each[1:] for each in found])
            if not complaint:
                return Checkpoint(checkpoint.path, step, found[0][0], self.place)
            if self.place.leads:
                log.warning("checkpoint of step %d not used: %s", step, complaint)
                if is_damaged:
                    set_aside(checkpoint.path)
            passed.add(step)
            unreadable = unreadable if is_damaged else complaint
        if unreadable:
            raise OSError(errno.EIO, f"no checkpoint in {self.folder} can be read: {unreadable}")
        if passed and self.place.leads:
            log.warning("no checkpoint in %s is whole: the training begins again", self.folder)
        return None

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in order."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)

    def clear(self) -> None:
        """Remove all checkpoints, also damaged ones: the training has ended, its weights and its result are kept."""
        led(self.place, self._clear)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"

    def _begin(self, step: int, replace: bool) -> Path | None:
        """An empty folder to write into; None if the step is there already, and not to be replaced."""
        if self._path(step).is_dir() and not replace:
            return None
        partial = unique_partial(self._path(step))
        partial.mkdir(parents=True)
        return partial

    def _write(
        self,
        partial: Path,
        step: int,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        sharded: Mapping[str, Any] | None,
        replace: bool,
    ) -> None:
        states = {f"rank-{self.place.rank}.pt": own} | ({SHARED: shared} if self.place.leads else {})
        written = together(
            self.place, lambda: {name: write_state(partial / name, state) for name, state in states.items()}
        )
        if sharded is not None:
            from slurmgpu.training import sharding

            written += together(self.place, lambda: sharding.write(partial / SHARDED, sharded, self.place.rank))
        files = {name: asdict(sums) for each in written for name, sums in each.items()}
        led(self.place, lambda: self._finish(partial, step, files, replace))

    def _finish(self, partial: Path, step: int, files: Mapping[str, Mapping[str, int]], replace: bool) -> None:
        about = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "world_size": self.place.world_size,
            "torch": torch.__version__,
            "files": dict(sorted(files.items())),
        }
        write_json(partial / SUMS, about | {"crc32": _sum_json(about)})
        path = self._path(step)
        if replace:
            make_way(path)
        try:
            partial.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another process that trains the same was faster.
            shutil.rmtree(partial, ignore_errors=True)
        fsync_dir(self.folder)
        if replace:
            remove(path.with_name(path.name + REPLACED))
        self._prune()

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep]:
            remove(self._path(step))

    def _newest(self, passed: set[int]) -> int | None:
        return max(set(self.steps()) - passed, default=None)

    def _sweep(self) -> None:
        """Remove what writers have left that died.

        Whether one lives, on another machine, cannot be told; but this process has the right to write here now, and one
        that has lost it, and finds its folder gone, takes that for what it is.
        """
        for path in self.folder.glob(f"step-*{REPLACED}"):
            take_back(path)
        for path in self.folder.glob(".*.partial"):
            remove(path)
        for path in self.folder.glob(".*.removed"):
            shutil.rmtree(path, ignore_errors=True)

    def _clear(self) -> None:
        self._sweep()
        for path in self.folder.glob("step-*"):
            remove(path)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint that is whole, as a rank reads it."""

    path: Path
    step: int
    world_size: int
    place: Place

    def shared(self) -> dict[str, Any]:
        """What rank 0 saved, its tensors on the CPU (`torch.load` with weights_only)."""
        return read_state(self.path / SHARED)

    def own(self) -> dict[str, Any] | None:
        """What this rank saved; None if the checkpoint is of another number of ranks."""
        if self.world_size != self.place.world_size:
            return None
        return read_state(self.path / f"rank-{self.place.rank}.pt")

    def load_sharded(self, into: dict[str, Any]) -> None:
        """Fill the sharded state `into`, in place; of any number of ranks."""
        from slurmgpu.training import sharding

        sharding.read(self.path / SHARDED, into)

    def look(self) -> tuple[int, str, bool]:
        """The number of ranks that wrote it; what is wrong with it, in words, and whether that is damage.

        Each rank sums its part of the files, so that together they have summed all of them once.
        """
        try:
            about = self._read_sums()
            files = {name: Written(**sums) for name, sums in about["files"].items()}
            self._check_sizes(files)
            for name in sorted(files)[self.place.rank :: self.place.world_size]:
                if sum_file(self.path / name) != files[name]:
                    raise DamagedError(f"{name} is not what was written: its CRC differs")
            return about["world_size"], "", False
        except FileNotFoundError as error:
            return 0, f"{error.filename} is missing", True
        except DamagedError as error:
            return 0, str(error), True
        except OSError as error:
            return 0, f"{error.filename} cannot be read: {error.strerror}", False

    def _read_sums(self) -> dict[str, Any]:
        try:
            about = json.loads((self.path / SUMS).read_bytes())
            crc32 = about.pop("crc32")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{SUMS} is not what was written: {error}") from error
        if crc32 != _sum_json(about) or about["step"] != self.step:
            raise DamagedError(f"{SUMS} is not what was written: its CRC differs")
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise DamagedError(f"{SUMS} says version {about['version']}, and this slurmgpu reads version {VERSION}")
        return dict(about)

    def _check_sizes(self, files: Mapping[str, Written]) -> None:
        for name, sums in files.items():
            size = (self.path / name).stat().st_size
            if size != sums.bytes:
                raise DamagedError(f"{name} has {size} bytes, and had {sums.bytes}")


def _worst(complaints: list[tuple[str, bool]]) -> tuple[str, bool]:
    """What one of the ranks has to say, damage first."""
    return max(complaints, key=lambda each: (each[1], each[0] != ""))


def _sum_json(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
