"""Reading an input once, at planning: is it what its suffix says, where are its items, what is its sum."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.finding import LINE_FORMATS, format_of
from slurmgpu.inputs.index import IndexWriter
from slurmgpu.inputs.lines import Layout
from slurmgpu.inputs.previewing import Preview, preview, refuse_mixed
from slurmgpu.inputs.records import RecordFinder, split
from slurmgpu.inputs.spec import InputFile, InputSpec

_CHUNK_BYTES = 1 << 20
_N_SAMPLED_CHUNKS = 64  # of each file, evenly spread,
_N_SAMPLED_RECORDS = 8  # and of each of these


def scan(
    paths: Sequence[Path], index: Path, *, stride: int, progress: Callable[[int, int], None] | None = None
) -> InputSpec:
    """The spec of an input; the offsets of every `stride`-th item are left at `index`.

    What is not the format is a SlurmGPUError that names the file and the line. Every beginning is looked
    at before any is read whole, then a sample of the lines that pass by, and the last.
    The files are read once, in bounded memory; `progress` is called with the bytes read so far and in all.
    """
    format_name = format_of(paths)
    previews = [preview(path, format_name) for path in paths]
    refuse_mixed(previews)
    advance = _count_up(sum(found.size_bytes for found in previews), progress)
    n_indexed = len(paths) if format_name in LINE_FORMATS else 0
    with IndexWriter(index, stride=stride, n_files=n_indexed) as writer, ThreadPoolExecutor(1) as beside:
        files = tuple(_scan_file(found, writer, beside, advance) for found in previews)
        n_items = sum(file.n_items for file in files)
        spec = InputSpec(format_name, files, n_items, stride, previews[0].layout.columns)
        writer.publish(spec.digest)
    return spec


def _scan_file(
    found: Preview, writer: IndexWriter, beside: ThreadPoolExecutor, advance: Callable[[int], None]
) -> InputFile:
    path = found.layout.path
    checksum = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        chunks = _hashed(_chunks(file, found.size_bytes, advance), checksum, beside)
        if found.layout.format in LINE_FORMATS:
            n_items = _index_lines(found, file, chunks, writer)
        else:
            n_items = found.n_items
            for _ in chunks:
                pass
        status = os.fstat(file.fileno())
    if (status.st_size, status.st_mtime_ns) != (found.size_bytes, found.mtime_ns):
        raise SlurmGPUError(f"Input {path} changed while it was read. Let what writes it finish, then plan again.")
    return InputFile(path, found.size_bytes, found.mtime_ns, checksum.hexdigest(), n_items)


def _index_lines(found: Preview, file: BinaryIO, chunks: Iterable[bytes], writer: IndexWriter) -> int:
    """Add the offsets of a file's records to the index as its chunks pass by; returns how many there are."""
    layout = found.layout
    finder = RecordFinder(layout.path, found.begin, found.end, line=found.line, quoting=layout.quoting)
    n_before = writer.n_items
    writer.begin_file(found.begin)
    sampled = 1 + found.size_bytes // (_CHUNK_BYTES * _N_SAMPLED_CHUNKS)
    position = 0
    for n_chunks, chunk in enumerate(chunks):
        low, high = max(found.begin - position, 0), found.end - position
        block = np.frombuffer(chunk, np.uint8)[low : max(high, 0)]
        if len(block):
            starts = finder.starts(block)
            if n_chunks % sampled == 0:
                _check_sample(layout, writer.n_items - n_before, chunk, starts - position)
            writer.add(starts)
        position += len(chunk)
    finder.finish()
    n_items = writer.n_items - n_before
    file.seek(finder.last_start)
    last = file.read(found.end - finder.last_start)
    layout.check(n_items - 1, split(last, quoting=layout.quoting)[0])  # where an interrupted copy ends
    return n_items


def _check_sample(layout: Layout, item: int, chunk: bytes, starts: NDArray[np.intp]) -> None:
    """Refuse a malformed record among a few of those that lie whole in the chunk; the first is `item`."""
    bounds = starts.tolist()
    for i in range(0, len(bounds) - 1, 1 + len(bounds) // _N_SAMPLED_RECORDS):
        layout.check(item + i, chunk[bounds[i] : bounds[i + 1] - 1])


def _chunks(file: BinaryIO, n_bytes: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The file's first `n_bytes`: one that grows all the time is not followed for ever."""
    while chunk := file.read(min(_CHUNK_BYTES, n_bytes)):
        yield chunk
        n_bytes -= len(chunk)
        advance(len(chunk))


def _hashed(chunks: Iterable[bytes], checksum: Any, beside: ThreadPoolExecutor) -> Iterator[bytes]:
    """The chunks, each hashed in another thread while the caller works on it; at most two are in memory."""
    hashing: Future[None] | None = None
    for chunk in chunks:
        if hashing:
            hashing.result()
        hashing = beside.submit(checksum.update, chunk)
        yield chunk
    if hashing:
        hashing.result()


def _count_up(total: int, progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    """A function that adds to the bytes done and tells `progress`."""
    done = 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress:
            progress(done, total)

    return advance
