"""Checkpoints in a folder: all or nothing, the last ones kept, damaged ones detected and skipped.

A checkpoint is a folder `step-0000001200` with `shared.pt` (equal on all ranks, from rank 0), `rank-0.pt` … (each
rank's own), `sharded/` (torch.distributed.checkpoint, for sharded models) and `checkpoint.json`, which has the size and
CRC of every file. It is written as a `.partial` folder, fsynced and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slurmgpu.training.checkpoint_files import Checksum, checksum_of, read_state, write_state
from slurmgpu.training.ranks import Place, on_all_ranks, on_rank_zero
from slurmgpu.util.atomic_files import fsync_dir, partial_path, write_json

log = logging.getLogger(__name__)

FORMAT = "slurmgpu checkpoint"
VERSION = 2
NAME = re.compile(r"step-(\d{10,})")
SHARED, SHARDED, SUMS = "shared.pt", "sharded", "checkpoint.json"
REPLACED = ".replaced"


class DamagedError(Exception):
    """A checkpoint is damaged; the message names the file and the damage."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one training in `folder`. All ranks call every method but `steps` together.

    Two processes may write there at once, if one took over from another that seemed dead: each uses unique partial
    names. An existing step is kept, since both would write the same.
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
    ) -> None:
        """Write the checkpoint of a step and remove all but the last `keep`.

        An existing checkpoint of this step is kept, or replaced if `replace`, for a changed state. A failed write is an
        OSError on all ranks and leaves earlier checkpoints. A state that could not be read back is a SlurmGPUError: it
        must consist of tensors, numbers, strings, lists and dicts.
        """
        partial = on_rank_zero(self.place, lambda: self._begin(step, replace))
        if partial is None:
            return
        states = {f"rank-{self.place.rank}.pt": own} | ({SHARED: shared} if self.place.is_rank_zero else {})
        try:
            written = on_all_ranks(
                self.place, lambda: {name: write_state(partial / name, state) for name, state in states.items()}
            )
            if sharded is not None:
                from slurmgpu.training import sharded_states

                written += on_all_ranks(
                    self.place, lambda: sharded_states.write(partial / SHARDED, sharded, self.place.rank)
                )
            files = {name: asdict(sums) for each in written for name, sums in each.items()}
            on_rank_zero(self.place, lambda: self._finish(partial, step, files, replace))
        except Exception as error:
            still_there = on_rank_zero(self.place, partial.is_dir)
            if still_there and self.place.is_rank_zero:
                shutil.rmtree(partial, ignore_errors=True)
            if still_there or not isinstance(error, FileNotFoundError):
                raise
            if self.place.is_rank_zero:
                log.warning("checkpoint of step %d lost: another process of the same training removed it", step)

    def last(self) -> Checkpoint | None:
        """The newest intact checkpoint, the same on all ranks; None if there is none.

        Newer damaged ones are renamed (`step-….damaged`) with a warning. Unreadable ones are left alone, since they may
        be readable later; if there is no other, this is an OSError. Leftovers of dead writers are removed.
        """
        on_rank_zero(self.place, self._remove_leftovers)
        passed: set[int] = set()
        unreadable = ""
        while (step := on_rank_zero(self.place, lambda: max(set(self.steps()) - passed, default=None))) is not None:
            checkpoint = Checkpoint(self._path(step), step, 0, self.place)
            found = on_all_ranks(self.place, checkpoint.verify)
            # Report one problem, damage first.
            _, complaint, is_damaged = max(found, key=lambda each: (each[2], each[1] != ""))
            if not complaint:
                return Checkpoint(checkpoint.path, step, found[0][0], self.place)
            if self.place.is_rank_zero:
                log.warning("checkpoint of step %d not used: %s", step, complaint)
                if is_damaged:
                    _rename_damaged(checkpoint.path)
            passed.add(step)
            unreadable = unreadable if is_damaged else complaint
        if unreadable:
            raise OSError(errno.EIO, f"cannot read any checkpoint in {self.folder}: {unreadable}")
        if passed and self.place.is_rank_zero:
            log.warning("no checkpoint in %s is intact: training from the start", self.folder)
        return None

    def steps(self) -> list[int]:
        """The steps with a checkpoint, in order."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)

    def clear(self) -> None:
        """Remove all checkpoints, including damaged ones."""
        on_rank_zero(self.place, self._clear)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"

    def _begin(self, step: int, replace: bool) -> Path | None:
        """An empty folder to write into; None if the step exists and is not replaced."""
        if self._path(step).is_dir() and not replace:
            return None
        partial = partial_path(self._path(step))
        partial.mkdir(parents=True)
        return partial

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
            _move_aside(path)
        try:
            partial.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another process of the same training was faster.
            shutil.rmtree(partial, ignore_errors=True)
        fsync_dir(self.folder)
        if replace:
            _remove(path.with_name(path.name + REPLACED))
        for old in self.steps()[: -self.keep]:
            _remove(self._path(old))

    def _remove_leftovers(self) -> None:
        """Remove leftovers of dead writers.

        A writer on another machine may still run. But this process holds the right to write here, and a process that
        lost that right expects that its folder may vanish.
        """
        for path in self.folder.glob(f"step-*{REPLACED}"):
            _restore_or_remove(path)
        for path in [*self.folder.glob(".*.partial"), *self.folder.glob(".*.removed")]:
            _remove(path)

    def _clear(self) -> None:
        self._remove_leftovers()
        for path in self.folder.glob("step-*"):
            _remove(path)


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint, as a rank reads it."""

    path: Path
    step: int
    world_size: int
    place: Place

    def shared(self) -> dict[str, Any]:
        """The state that rank 0 saved, its tensors on the CPU."""
        return read_state(self.path / SHARED)

    def own(self) -> dict[str, Any] | None:
        """The state that this rank saved; None if the number of ranks differs."""
        if self.world_size != self.place.world_size:
            return None
        return read_state(self.path / f"rank-{self.place.rank}.pt")

    def load_sharded(self, into: dict[str, Any]) -> None:
        """Fill the sharded state `into` in place, on any number of ranks."""
        from slurmgpu.training import sharded_states

        sharded_states.read(self.path / SHARDED, into)

    def verify(self) -> tuple[int, str, bool]:
        """The number of ranks that wrote it, a problem or "", and whether that problem is damage.

        Each rank checks its share of the files, so that all ranks together check every file once.
        """
        try:
            about = self._read_sums()
            files = {name: Checksum(**sums) for name, sums in about["files"].items()}
            self._check_sizes(files)
            for name in sorted(files)[self.place.rank :: self.place.world_size]:
                if checksum_of(self.path / name) != files[name]:
                    raise DamagedError(f"the CRC of {name} differs")
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
            raise DamagedError(f"{SUMS} is damaged: {error}") from error
        if crc32 != _sum_json(about) or about["step"] != self.step:
            raise DamagedError(f"the CRC of {SUMS} differs")
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise DamagedError(f"{SUMS} has version {about['version']}; this slurmgpu reads version {VERSION}")
        return dict(about)

    def _check_sizes(self, files: Mapping[str, Checksum]) -> None:
        for name, sums in files.items():
            size = (self.path / name).stat().st_size
            if size != sums.bytes:
                raise DamagedError(f"{name} has {size} bytes, expected {sums.bytes}")


def _sum_json(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _rename_damaged(path: Path) -> None:
    """Rename a damaged checkpoint, so that it is not found again."""
    aside = path.with_name(f"{path.name}.damaged")
    _remove(aside)
    try:
        path.rename(aside)
    except OSError as error:
        log.warning("%s cannot be renamed: %s", path, error)


def _move_aside(path: Path) -> None:
    """Move a checkpoint aside before replacing it; the next process finds it if this one dies."""
    aside = path.with_name(path.name + REPLACED)
    _remove(aside)
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)


def _restore_or_remove(aside: Path) -> None:
    """Undo an unfinished replacement, or remove the replaced checkpoint."""
    path = aside.with_name(aside.name.removesuffix(REPLACED))
    if path.is_dir():
        _remove(aside)
    else:
        aside.rename(path)


def _remove(path: Path) -> None:
    """Remove a file or folder; it is renamed first, so that no partly removed folder is found."""
    gone = partial_path(path).with_suffix(".removed")
    try:
        path.rename(gone)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
        return
    if gone.is_dir():
        shutil.rmtree(gone, ignore_errors=True)
    else:
        gone.unlink(missing_ok=True)
