"""Read the header of a SIF file: what kind of image it is, and whether it is complete.

The layout is that of github.com/apptainer/sif, pkg/sif/sif.go and descriptor.go, version 01: little-endian, packed.
"""

from __future__ import annotations

import json
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.regular_files import open_given

HEADER = struct.Struct("<32s10s3s3s16s8q")
DESCRIPTOR = struct.Struct("<i?3I7q128s384s")
PARTITION = struct.Struct("<ii3s")
MAGIC = b"SIF_MAGIC\0"
SQUASHFS_MAGIC = b"hsqs"

DATA_LABELS, DATA_PARTITION, DATA_JSON = 0x4003, 0x4004, 0x4006
SQUASHFS, ENCRYPTED_SQUASHFS, GOCRYPTFS_SQUASHFS = 1, 5, 6
PRIMARY_SYSTEM = 2
INSPECT_METADATA = b"inspect-metadata.json"
MAX_DESCRIPTORS = 4096

MACHINES = {
    b"01": "i686",
    b"02": "x86_64",
    b"03": "armv7l",
    b"04": "aarch64",
    b"05": "ppc64",
    b"06": "ppc64le",
    b"11": "s390x",
    b"12": "riscv64",
    b"13": "loongarch64",
}
"""SIF's codes of architectures, and their names in `platform.machine()`."""


@dataclass(frozen=True)
class Sif:
    """The header's content: `arch` as in `platform.machine()`, the place of the root file system, the labels."""

    uuid: str
    arch: str
    created: int
    root_offset: int
    root_size: int
    labels: dict[str, str]


def read_sif(path: Path) -> Sif:
    """The header of the image at `path`; SlurmGPUError if it is no SIF, cut short, damaged or encrypted."""
    with open_given(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or HEADER.unpack(head)[1] != MAGIC:
            raise SlurmGPUError(
                f"{path} is not a container image: it lacks SIF_MAGIC at byte 32, which every SIF file has. "
                f"Make images with `apptainer build` or `apptainer pull`."
            )
        _, _, version, arch, ident, created, _, _, total, offset, _, data_offset, data_size = HEADER.unpack(head)
        if version != b"01\0":
            raise SlurmGPUError(f"{path} has SIF version {version[:2].decode('ascii', 'replace')}; expected 01.")
        _check_whole(path, size, max(data_offset + data_size, offset + total * DESCRIPTOR.size))
        if not 0 < total <= MAX_DESCRIPTORS or offset < HEADER.size:
            raise SlurmGPUError(f"{path} is damaged: its header lists {total} objects. Copy or build it again.")
        file.seek(offset)
        table = file.read(total * DESCRIPTOR.size)
        objects = [fields for fields in DESCRIPTOR.iter_unpack(table) if fields[1]]
        for fields in objects:
            _check_whole(path, size, fields[5] + fields[6])
            if min(fields[5], fields[6]) < 0:
                raise SlurmGPUError(f"{path} is damaged: an object lies before its beginning. Copy or build it again.")
        root = _root(path, objects)
        kind, _, root_arch = PARTITION.unpack_from(root[13])
        if kind in (ENCRYPTED_SQUASHFS, GOCRYPTFS_SQUASHFS):
            raise SlurmGPUError(f"{path} is encrypted, and slurmgpu passes no key to tasks. Use an unencrypted image.")
        file.seek(root[5])
        if kind == SQUASHFS and file.read(4) != SQUASHFS_MAGIC:
            raise SlurmGPUError(f"{path} is damaged: its root file system is not squashfs. Copy or build it again.")
        code = root_arch[:2] if root_arch[:2] in MACHINES else arch[:2]
        machine = MACHINES.get(code, f"unknown ({code.decode('ascii', 'replace')})")
        return Sif(str(uuid.UUID(bytes=ident)), machine, created, root[5], root[6], _labels(file, objects))


def _check_whole(path: Path, size: int, needed: int) -> None:
    if needed > size:
        raise SlurmGPUError(f"{path} is truncated: it has {size:,} bytes; its header says {needed:,}. Copy it again.")


def _root(path: Path, objects: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    for fields in objects:
        if fields[0] == DATA_PARTITION and PARTITION.unpack_from(fields[13])[1] == PRIMARY_SYSTEM:
            return fields
    raise SlurmGPUError(f"{path} has no root file system (an OCI-SIF has none). Build it with `apptainer build`.")


def _labels(file: BinaryIO, objects: list[tuple[Any, ...]]) -> dict[str, str]:
    """The labels of `apptainer build`; {} if there are none, or they are damaged."""
    for fields in objects:
        name = fields[12].rstrip(b"\0")
        if fields[0] == DATA_LABELS or (fields[0] == DATA_JSON and name == INSPECT_METADATA):
            file.seek(fields[5])
            try:
                value = json.loads(file.read(fields[6]))
                labels = value if fields[0] == DATA_LABELS else value["data"]["attributes"]["labels"]
                return {str(key): str(text) for key, text in labels.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
    return {}
