"""Copies of images on a node's disk: the first task makes one, and it appears whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from slurmgpu.containers.folders import remove
from slurmgpu.containers.settings import ContainerError, Identity
from slurmgpu.containers.sif import read_sif
from slurmgpu.containers.unpacking import Pause, describe, is_whole, record_of, remember, unpack
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.shared_files import FULL

CHUNK = 1 << 22
SYNC_BYTES = 1 << 28
"""Bytes between two fsyncs: a task that has to end must not wait for a large image to be written."""
UNPACKED_RATIO = 3.5
"""Bytes of an unpacked image for each of a SIF: 3.3 for a small one of Python, 3.6 for one of torch."""
INSTEAD = 'Name another folder with [container] scratch, or use stage = "none", which needs no copy'


def stage(image: Path, identity: Identity, folder: Path, how: str, pause: Pause = time.sleep) -> Path:
    """A copy on the node's disk, in `folder`, made now if there is no whole one, or `image` itself.

    "node" copies a SIF to `<sha256>.sif` unless it is on the same file system; "unpack" makes a sandbox `<sha256>` of
    it. A sandbox is used where it is. ContainerError if there is no room, or the copy differs. `pause` is called again
    and again, and may raise to end this; then nothing is left.
    """
    if how == "none" or identity["kind"] == "sandbox":
        return image
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if how == "node" and image.stat().st_dev == folder.stat().st_dev:
            return image
        target = folder / (identity["sha256"] if how == "unpack" else f"{identity['sha256']}.sif")
        if _is_usable(target, identity, how, pause):
            return target
        with _locked(folder / f"{identity['sha256']}.lock", pause):
            if not _is_usable(target, identity, how, pause):
                _make(image, identity, target, how, pause)
        return target
    except SlurmGPUError as error:
        raise ContainerError(str(error)) from error
    except OSError as error:
        is_full = error.errno in FULL
        text = f"the image {image} cannot be staged to {folder}: {os.strerror(error.errno or 0)}"
        if is_full:
            text += f". {INSTEAD}"
        raise ContainerError(text, kind="disk_full" if is_full else "container", node_at_fault=True) from error


def discard(copy: Path) -> None:
    """Remove a copy that is damaged, so that the next task makes a new one; no error if that fails."""
    remove(record_of(copy))
    remove(copy)


def _is_usable(target: Path, identity: Identity, how: str, pause: Pause) -> bool:
    # A full disk, a crash of the node, or cleaning by age may have cut short what is in /tmp.
    if how == "unpack":
        return is_whole(target, pause)
    try:
        if target.stat().st_size != identity["size_bytes"] or read_sif(target).uuid != identity["uuid"]:
            return False
        os.utime(target)  # cleaning by age spares what is used
    except (OSError, SlurmGPUError):
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path, pause: Pause) -> Iterator[None]:
    # A lock on the node's disk, which the kernel releases when its holder dies; the file stays for the next task.
    with open(path, "ab") as file:
        os.utime(path)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pause(0.2)
        yield


def _make(image: Path, identity: Identity, target: Path, how: str, pause: Pause) -> None:
    part = target.with_name(f"{target.name}.part")
    remove(record_of(target))
    for left in (target, part):  # a damaged copy, and that of a task that died
        remove(left)
    try:
        _check_room(target.parent, (identity["size_bytes"] or 0) * (UNPACKED_RATIO if how == "unpack" else 1))
        if how == "unpack":
            unpack(image, part, pause)
            description = describe(part, pause)
            part.rename(target)
            remember(target, description)
        else:
            _copy(image, identity, part, pause)
            part.rename(target)
    except BaseException:
        remove(part)
        raise


def _check_room(folder: Path, needed: float) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ContainerError(
            f"there is no room for the image on this node: {folder} has {free / 1e9:.2f} GB left, but "
            f"{needed / 1e9:.2f} GB are needed. {INSTEAD}",
            kind="disk_full",
            node_at_fault=True,
        )


def _copy(image: Path, identity: Identity, part: Path, pause: Pause) -> None:
    digest, size, synced = hashlib.sha256(), 0, 0
    with open(image, "rb", buffering=0) as source, open(part, "wb") as copy:
        while chunk := source.read(CHUNK):
            pause(0)
            digest.update(chunk)
            size += len(chunk)
            copy.write(chunk)
            if size - synced >= SYNC_BYTES:
                os.fsync(copy.fileno())
                synced = size
        copy.flush()
        os.fsync(copy.fileno())
    if size != identity["size_bytes"] or digest.hexdigest() != identity["sha256"]:
        raise ContainerError(
            f"the copy of {image} on this node is not the image that this run was planned with: {size:,} bytes with "
            f"digest {digest.hexdigest()[:12]}…, not {identity['size_bytes']:,} with {identity['sha256'][:12]}…"
        )
