"""The identity of an image, and whether the image on this node is the same. Nothing is started for it."""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import platform
from pathlib import Path

from slurmgpu.containers.settings import ContainerError, Identity, other_image
from slurmgpu.containers.sif import Sif, read_sif
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.atomic_files import write_json

LABELS = Path(".singularity.d", "labels.json")
BUILD_ARCH, BUILD_DATE = "org.label-schema.build-arch", "org.label-schema.build-date"
GO_MACHINES = {"amd64": "x86_64", "arm64": "aarch64", "386": "i686", "loong64": "loongarch64"}
"""Go's names of architectures that differ from those of `platform.machine()`."""
CHUNK = 1 << 20
MAX_REMEMBERED = 256


def identify(path: Path) -> Identity:
    """The identity of this image for run.json; SlurmGPUError if it is no image or cannot run here.

    Signing an image changes `sha256`, of the file, but not `partition_sha256`, of the root file system.
    A sandbox is identified by the digest of its labels, which hold the time of its build.
    """
    try:
        found = _sandbox(path) if path.is_dir() else _sif(path, read_sif(path))
        status = path.stat()
    except OSError as error:
        text = _unreadable(path, error)
        raise SlurmGPUError(f"{text[:1].upper()}{text[1:]}.") from error
    here = platform.machine()
    if found["arch"] not in (None, here):
        raise SlurmGPUError(
            f"{path} is built for {found['arch']}, but this machine is {here}. Build it on a machine like this."
        )
    return {**found, "size_bytes": status.st_size if found["kind"] == "sif" else None, "mtime_ns": status.st_mtime_ns}


def same_image(path: Path, identity: Identity) -> None:
    """Raise ContainerError unless the image on this node is the one of the plan.

    It is hashed only if its time of change differs.
    """
    try:
        if path.is_dir() != (identity["kind"] == "sandbox"):
            raise other_image(path, f"it is not a {identity['kind']}")
        if identity["kind"] == "sandbox":
            found = _sandbox(path)
            if found["sha256"] != identity["sha256"]:
                raise other_image(path, f"built {found['created']}, not {identity['created']}")
            return
        status = path.stat()
        if status.st_size != identity["size_bytes"]:
            sizes = f"{status.st_size:,} bytes, not {identity['size_bytes']:,}"
            raise other_image(path, sizes)
        sif = read_sif(path)
        if sif.uuid != identity["uuid"]:
            raise other_image(path, f"UUID {sif.uuid}, not {identity['uuid']}")
        if status.st_mtime_ns != identity["mtime_ns"]:
            digest = digests(path, (sif.root_offset, sif.root_size))["sha256"]
            if digest != identity["sha256"]:
                raise other_image(path, f"digest {digest[:12]}…, not {identity['sha256'][:12]}…")
    except SlurmGPUError as error:
        raise ContainerError(str(error)) from error
    except OSError as error:
        text = f"{_unreadable(path, error, ' on this node')}; put it back, or plan a new run with another"
        # An NFS that is not mounted, or stale, is the node's fault; permissions are not.
        is_gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, errno.ENOTCONN)
        raise ContainerError(text, node_at_fault=is_gone) from error


def _sif(path: Path, sif: Sif) -> Identity:
    digest = digests(path, (sif.root_offset, sif.root_size))
    created = None
    with contextlib.suppress(ValueError, OverflowError, OSError):  # no checksum is over the header
        created = datetime.datetime.fromtimestamp(sif.created, datetime.timezone.utc).isoformat()
    return {
        "kind": "sif",
        "sha256": digest["sha256"],
        "partition_sha256": digest["partition_sha256"],
        "uuid": sif.uuid,
        "arch": sif.arch,
        "labels": sif.labels,
        "created": created,
    }


def _sandbox(path: Path) -> Identity:
    if not (path / ".singularity.d").is_dir():
        raise SlurmGPUError(
            f"{path} is a directory, but not a container image: it lacks .singularity.d. "
            f"`apptainer build --sandbox DIR IMAGE.sif` makes one."
        )
    try:
        content = (path / LABELS).read_bytes()
    except FileNotFoundError:
        content = b"{}"  # a sandbox may have no labels
    try:
        labels = {str(key): str(text) for key, text in json.loads(content).items()}
    except (ValueError, AttributeError):
        labels = {}
    arch = labels.get(BUILD_ARCH)
    return {
        "kind": "sandbox",
        "sha256": hashlib.sha256(content).hexdigest(),
        "partition_sha256": None,
        "uuid": None,
        "arch": GO_MACHINES.get(arch, arch) if arch else None,
        "labels": labels,
        "created": labels.get(BUILD_DATE),
    }


def _unreadable(path: Path, error: OSError, where: str = "") -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"the image {path} is not {where.strip() or 'there'}"
    return f"the image {path} cannot be read{where}: {error.strerror or os.strerror(error.errno or 0)}"


def digests(path: Path, part: tuple[int, int]) -> dict[str, str]:
    """The sha256 of the file, and of the bytes `part` (offset, size) in it: `sha256` and `partition_sha256`.

    They are cached in ~/.cache/slurmgpu/digests.json.
    """
    status = path.stat()
    key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"
    # `~` is no folder if the user has none.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    cache = Path(home, "slurmgpu", "digests.json")
    known = _read_cache(cache)
    if key not in known:
        found = _compute(path, part)
        # Read again: another process may have added to it during the minute that a large image takes.
        known = {**_read_cache(cache), key: found}
        recent = dict(list(known.items())[-MAX_REMEMBERED:])
        with contextlib.suppress(OSError):  # a home that cannot be written: computed again each time
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, recent, durable=False)
    return known[key]


def _read_cache(cache: Path) -> dict[str, dict[str, str]]:
    try:
        value = json.loads(cache.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    names = ("sha256", "partition_sha256")
    return {
        key: found
        for key, found in value.items()
        if isinstance(found, dict) and all(isinstance(found.get(name), str) for name in names)
    }


def _compute(path: Path, part: tuple[int, int]) -> dict[str, str]:
    whole, inner = hashlib.sha256(), hashlib.sha256()
    start, end = part[0], part[0] + part[1]
    position = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            whole.update(chunk)
            inner.update(chunk[max(0, start - position) : max(0, end - position)])
            position += len(chunk)
    return {"sha256": whole.hexdigest(), "partition_sha256": inner.hexdigest()}
