"""Skeletons: HDF5 files whose datasets have a place but no data yet.

libhdf5 writes the skeleton to memory and never to a file system. So a full disk raises an OSError here, instead of
leaving a file that libhdf5 can neither flush nor close. The shards of a run differ in the lengths of texts and ragged
arrays, and in the numbers in their attributes: a template has the rest, which takes half of the time.

A Python file object keeps the file, and not libhdf5's core driver, whose memory includes the bytes of all datasets.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5p, h5s, h5t

from slurmgpu.shards.columns import Column, columns_to_json, stored_columns
from slurmgpu.shards.numbers import OFFSET_DTYPE
from slurmgpu.shards.userblock import FORMAT_VERSION, Region, in_file_order

Attributes = Mapping[str, str | int | bool]
Kinds = tuple[tuple[str, str | int | type[int]], ...]
"""Attributes by name: texts and the version, and the types of other numbers."""

_LIBVER_HIGH = getattr(h5f, "LIBVER_V114", h5f.LIBVER_LATEST)  # older libhdf5 lacks the constant
_FILE_NAME = b"slurmgpu-skeleton"
_PAGE_BYTES = 4096
_ALIGNMENT_BYTES = 8  # lets NumPy and Arrow use the bytes in place


class Skeleton(NamedTuple):
    """The datasets with their offsets, all other bytes by offset (`metadata`), and the file size."""

    regions: tuple[Region, ...]
    metadata: list[tuple[int, bytes]]
    size: int


def unplaced_regions(columns: Mapping[str, Column], n_rows: int, n_values: Mapping[str, int]) -> list[Region]:
    """The datasets of a file, in order; `n_values` is the length of each `name/values`."""
    regions = []
    for name, column in stored_columns(columns).items():
        if column.shape is not None:
            regions.append(_region(name, column.dtype, (n_rows, *column.shape)))
        else:
            regions.append(_region(f"{name}/offsets", OFFSET_DTYPE, (n_rows + 1,)))
            regions.append(_region(f"{name}/values", column.dtype, (n_values.get(f"{name}/values", 0),)))
    return regions


def file_attributes(file_format: str, columns: Mapping[str, Column], others: Attributes) -> dict[str, str | int | bool]:
    """The attributes of a file, in order: the common ones, then the others."""
    kinds = json.dumps(columns_to_json(columns), separators=(",", ":"))
    return {"format": file_format, "version": FORMAT_VERSION, "columns": kinds, **others}


def make_skeleton(regions: Sequence[Region], attributes: Attributes, userblock_size: int) -> Skeleton:
    """The skeleton of a file. The same arguments give the same bytes."""
    numbers = {name: value for name, value in attributes.items() if not isinstance(value, str) and name != "version"}
    types = {name: type(value) for name, value in numbers.items()}
    kinds: Kinds = tuple((name, types.get(name, value)) for name, value in attributes.items())
    with _lock:
        try:
            return _skeleton(regions, kinds, userblock_size, numbers)
        except BaseException:  # the template may be cut short
            _template.cache_clear()
            raise


class _Memory:
    """A sparse file object in memory for libhdf5."""

    def __init__(self, userblock_size: int) -> None:
        self._userblock_size = userblock_size
        self.size = 0
        self._position = 0
        self._pages: defaultdict[int, bytearray] = defaultdict(lambda: bytearray(_PAGE_BYTES))

    def create(self) -> Any:
        return h5f.create(_FILE_NAME, h5f.ACC_TRUNC, _file_creation(self._userblock_size), self._access())

    def open(self) -> Any:
        return h5f.open(_FILE_NAME, h5f.ACC_RDWR, self._access())

    def _access(self) -> Any:
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_libver_bounds(h5f.LIBVER_V110, _LIBVER_HIGH)
        access.set_alignment(1, _ALIGNMENT_BYTES)
        access.set_fclose_degree(h5f.CLOSE_STRONG)  # with its attributes
        access.set_fileobj_driver(h5fd.fileobj_driver, self)
        return access

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (self.size if whence == os.SEEK_END else 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, content: memoryview) -> int:
        n_bytes = len(content)
        for part in self._parts(self._position, self._position + n_bytes):
            part[:] = content[: len(part)]
            content = content[len(part) :]
        self._position += n_bytes
        self.size = max(self.size, self._position)
        return n_bytes

    def readinto(self, buffer: memoryview) -> int:
        buffer[:] = self.read_range(self._position, self._position + len(buffer))
        self._position += len(buffer)
        return len(buffer)

    def truncate(self, size: int) -> int:
        self.size = size
        return size

    def flush(self) -> None:
        pass

    def copy(self) -> _Memory:
        copied = _Memory(self._userblock_size)
        copied.size = self.size
        copied._pages.update((number, page[:]) for number, page in self._pages.items())
        return copied

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`; zeros if none were written."""
        return b"".join(self._parts(start, stop))

    def _parts(self, start: int, stop: int) -> Iterator[memoryview]:
        while start < stop:
            page, first = divmod(start, _PAGE_BYTES)
            last = min(_PAGE_BYTES, first + stop - start)
            yield memoryview(self._pages[page])[first:last]
            start += last - first


def _region(path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Region:
    return Region(path, dtype.str, shape, 0, math.prod(shape) * dtype.itemsize, 0)


def _skeleton(
    regions: Sequence[Region], kinds: Kinds, userblock_size: int, numbers: Mapping[str, int | bool]
) -> Skeleton:
    """The skeleton with these numbers as the values of attributes."""
    before, template = _template(tuple(r for r in regions if not _varies(r)), kinds, userblock_size)
    memory = template.copy()
    with _closing(memory.open()) as file:
        placed = {r.path: r for r in (*before, *_create_datasets(file, filter(_varies, regions)))}
        for name, value in numbers.items():
            content = np.array(value)
            h5a.open(file, name.encode()).write(content, mtype=_dtype(content.dtype.str))
    found = tuple(placed[region.path] for region in regions)
    metadata, start = [], userblock_size
    for region in in_file_order(found):
        metadata.append((start, memory.read_range(start, region.offset)))
        start = region.offset + region.n_bytes
    metadata.append((start, memory.read_range(start, memory.size)))
    return Skeleton(found, metadata, memory.size)


@contextlib.contextmanager
def _closing(file: Any) -> Iterator[Any]:
    """Close the file after the block. h5py's low-level interface takes half the time of the other."""
    try:
        yield file
        h5f.flush(file)
    finally:
        with contextlib.suppress(RuntimeError):  # it cannot be closed after a failed write, but is only memory
            file.close()


_lock = threading.Lock()


def _varies(region: Region) -> bool:
    """Whether each shard has its own length of a dataset; an empty one, as errors mostly are, is in the template."""
    return region.path.endswith("/values") and region.n_bytes > 0


@functools.lru_cache(maxsize=1)
def _template(regions: tuple[Region, ...], kinds: Kinds, userblock_size: int) -> tuple[tuple[Region, ...], _Memory]:
    """A closed file with these datasets, and attributes whose numbers are 0: the part that most shards share."""
    memory = _Memory(userblock_size)
    with _closing(memory.create()) as file:
        placed = _create_datasets(file, regions)
        for name, kind in kinds:
            _create_attribute(file, name, kind(0) if isinstance(kind, type) else kind)
    return placed, memory


# Descriptions for libhdf5 are made once: they took a third of a shard's skeleton.


@functools.cache
def _file_creation(userblock_size: int) -> Any:
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_userblock(userblock_size)
    creation.set_obj_track_times(False)
    return creation


@functools.cache
def _creation() -> tuple[Any, Any, Any]:
    """The property lists for a dataset, a group, and the link to either. None stores a time."""
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    groups = h5p.create(h5p.GROUP_CREATE)
    groups.set_obj_track_times(False)
    links = h5p.create(h5p.LINK_CREATE)
    links.set_char_encoding(h5t.CSET_UTF8)
    return creation, groups, links


@functools.cache
def _dtype(name: str) -> Any:
    return h5t.py_create(np.dtype(name), logical=True)


@functools.lru_cache
def _space(shape: tuple[int, ...]) -> Any:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


@functools.lru_cache
def _text(size: int) -> Any:
    dtype = h5t.C_S1.copy()
    dtype.set_size(max(1, size))
    dtype.set_cset(h5t.CSET_UTF8)
    dtype.set_strpad(h5t.STR_NULLPAD)
    return dtype


def _create_datasets(file: Any, regions: Iterable[Region]) -> tuple[Region, ...]:
    creation, groups, links = _creation()
    placed = []
    for region in regions:
        group, _, name = region.path.rpartition("/")
        if name == "offsets":  # create the group explicitly: before 2.0 libhdf5 gives an implicit one a creation time
            h5g.create(file, group.encode(), links, groups)
        path, dtype, space = region.path.encode(), _dtype(region.dtype), _space(region.shape)
        dataset = h5d.create(file, path, dtype, space, creation, lcpl=links)
        # The offset of an empty dataset is undefined.
        placed.append(region._replace(offset=dataset.get_offset() if region.n_bytes else 0))
    return tuple(placed)


def _create_attribute(file: Any, name: str, value: str | int | bool) -> None:
    content = np.array(value.encode() if isinstance(value, str) else value)
    dtype = _text(content.itemsize) if isinstance(value, str) else _dtype(content.dtype.str)
    h5a.create(file, name.encode(), dtype, _space(())).write(content, mtype=dtype)
