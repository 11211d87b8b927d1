"""Real shards and merged files for the tests of the HDF5 rooms, and the damage that is done to them."""

import subprocess
import zlib
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest

from slurmgpu.errors import ItemError
from slurmgpu.merge.join import join
from slurmgpu.merge.sources import Source
from slurmgpu.shards.columns import Array, Json, Ragged, Text, convert_row
from slurmgpu.shards.names import shard_name
from slurmgpu.shards.piece_table import pieces_of
from slurmgpu.shards.shard_file import write_shard
from slurmgpu.shards.userblock import Reader, pack_userblock, read_userblock

FINGERPRINT = "5f" * 32
MADE_BY = {"host": "node17", "task": "1234_5"}

COLUMNS = {
    "score": Array("float32"),
    "logits": Array("float16", (2, 3)),
    "ok": Array("bool"),
    "phase": Array("complex64"),
    "tag": Array("S4"),
    "nothing": Array("int8", (0,)),
    "shout": Text(),
    "silence": Text(),
    "lengths": Ragged("int16"),
    "phases": Ragged("complex128"),
    "told": Json(),
}


def plain_row(index):
    """A row as a workload returns it, different for each item."""
    return {
        "score": index / 4,
        "logits": np.arange(6).reshape(2, 3) + index,
        "ok": index % 2 == 0,
        "phase": complex(index, -1),
        "tag": b"ab" if index % 2 else b"abcd",
        "nothing": [],
        "shout": "Größe ⚠ " * (index % 4),
        "silence": "",
        "lengths": range(index % 5),
        "phases": [1j * index] * (index % 3),
        "told": {"größe ⚠": [index, None, {"half": index / 2}]},
    }


def rows_of(start, stop, failed=()):
    return [
        ItemError(f"item {index} is schlecht ⚠") if index in failed else convert_row(COLUMNS, plain_row(index))
        for index in range(start, stop)
    ]


def write(path, start=0, stop=10, *, columns=COLUMNS, rows=None, failed=(), fingerprint=FINGERPRINT, notes=None):
    rows = rows_of(start, stop, failed) if rows is None else rows
    write_shard(path, columns, start=start, rows=rows, fingerprint=fingerprint, notes=notes or {}, made_by=MADE_BY)
    return path


def write_parts(folder, bounds, failed=()):
    """Shards with these bounds ([0, 4, 10] are two), as `join` takes them."""
    return [
        (shard, write(folder / shard_name(shard), start, stop, failed=failed), start, stop)
        for shard, (start, stop) in enumerate(pairwise(bounds))
    ]


def join_parts(parts, target, *, columns=COLUMNS, n_items=None, fingerprint=FINGERPRINT, attributes=None, **others):
    return join(
        [Source(*part) for part in parts],
        columns,
        fingerprints=[fingerprint],
        n_items=sum(stop - start for *_, start, stop in parts) if n_items is None else n_items,
        target=target,
        attributes=attributes or {},
        **others,
    )


def datasets(path):
    """Every dataset of a file, by its path, as plain h5py reads it."""
    found = {}
    with h5py.File(path, "r", locking=False) as file:
        file.visititems(lambda name, node: found.update({name: node[()]}) if isinstance(node, h5py.Dataset) else None)
    return found


def assert_same_datasets(found, expected):
    assert list(found) == list(expected)
    for name in found:
        assert found[name].dtype == expected[name].dtype, name
        assert found[name].shape == expected[name].shape, name
        assert found[name].tobytes() == expected[name].tobytes(), name


@contextmanager
def changed(path, offset, content):
    """The file with other bytes at `offset`, for as long as the context lasts."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        before = file.read(len(content))
        file.seek(offset)
        file.write(content)
        yield
        file.seek(offset)
        file.write(before)


def craft(path, change):
    """Change a shard's directory or bytes, which `change` gets, and give it checksums that are right for them."""
    with Reader(path) as reader:
        directory, _, size = read_userblock(reader)
    content = bytearray(path.read_bytes())
    change(directory, content)
    rest, position = 0, size
    for region in sorted((each for each in directory["datasets"] if each[4]), key=lambda each: each[3]):
        _, _, _, offset, n_bytes, _ = region
        rest = zlib.crc32(content[position:offset], rest)
        position = offset + n_bytes
        region[5] = zlib.crc32(content[offset:position])
    directory["rest_crc32"] = zlib.crc32(content[position:], rest)
    path.write_bytes(pack_userblock(directory, size) + content[size:])


def flips(path, offsets):
    """The file with one bit flipped, for each of `offsets` in turn."""
    content = path.read_bytes()
    for offset in offsets:
        with changed(path, offset, bytes([content[offset] ^ 1 << offset % 8])):
            yield offset


def one_bit_everywhere(path):
    """The file with one bit flipped: in each part of the user block, of each dataset, and of HDF5's own metadata."""
    with Reader(path) as reader:
        directory, table, size = read_userblock(reader)
    pieces = [(piece.name, piece.offset, piece.n_bytes) for piece in pieces_of(directory, table) if piece.n_bytes]
    block = [("magic", 0, 8), ("sizes", 16, 24), ("directory", 40, 400), ("end of the user block", size - 1, 1)]
    taken = {at for _, first, n_bytes in pieces for at in range(first, first + n_bytes)}
    rest = [at for at in range(size, directory["file_size"]) if at not in taken]
    others = [("metadata", at, 1) for at in (*rest[:3], *rest[len(rest) // 2 :: 97], rest[-1])]
    for name, first, n_bytes in [*block, *pieces, *others]:
        for at in sorted({first, first + n_bytes // 2, first + n_bytes - 1}):
            for _ in flips(path, [at]):
                yield name, at, at < size


def peak_memory_bytes():
    """The peak memory of this process since its exec; getrusage would count what its parent held at the fork."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a disk of so many bytes; needs root."""
    mounted = []

    def mount(n_bytes):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", folder], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)
