"""Read an input once, at planning: check its format, index its items, hash it."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.formats import CHUNK_BYTES, Format, Preview, format_of, is_repacked, refuse_changed
from slurmgpu.inputs.hub import origin
from slurmgpu.inputs.index import IndexWriter
from slurmgpu.inputs.lines import Lines
from slurmgpu.inputs.repack import FOLDER, pack_lines, publish
from slurmgpu.inputs.spec import InputFile, InputSpec, Source
from slurmgpu.inputs.tables import Merged
from slurmgpu.run.frozen_plan import PROMISED
from slurmgpu.util.amounts import some_of
from slurmgpu.util.packages import check_pyarrow
from slurmgpu.util.regular_files import naming

_FEW_BYTES = 1 << 16
"""Fewer bytes are hashed in less time than another thread takes to begin."""


def scan(
    paths: Sequence[Path],
    index: Path,
    *,
    stride: int,
    progress: Callable[[int, int], None] | None = None,
    of_format: Format | None = None,
    room: Callable[[], Path] | None = None,
) -> InputSpec:
    """The spec of an input; writes the offset of every `stride`-th item to `index`.

    The first bytes of all files are checked before any file is read completely, then a sample of the lines, and the
    last line. SlurmGPUError names file and line of what does not fit the format. Files are read once, in bounded
    memory; `progress` is called with the bytes read so far and in total. `of_format` overrides the format of the files'
    names.

    If a file has no random access, all are repacked in the folder that `room` returns, by default that of the index.
    """
    its_format = of_format or format_of(paths)
    without_access = [path for path in paths if is_repacked(path, its_format)]
    if without_access:
        check_pyarrow(f"{without_access[0]} is repacked, which needs", in_tasks=True)
    previews = [_preview(path, its_format) for path in paths]
    _refuse_mixed(previews)
    total, done = sum(found.size_bytes for found in previews), 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress:
            progress(done, total)

    if without_access:
        assert isinstance(its_format, Lines)
        folder = (room() if room else index.parent) / FOLDER
        packed = tuple(
            pack_lines(its_format, found, folder / f"{number:05}.parquet", advance)
            for number, found in enumerate(previews)
        )
        n_items = sum(file.n_items for file in packed)
        return publish(InputSpec(its_format.name, packed, n_items, stride, previews[0].columns, repacked=True), index)
    n_indexed = len(paths) if its_format.is_indexed else 0
    with IndexWriter(index, stride=stride, n_files=n_indexed) as writer, ThreadPoolExecutor(1) as beside:
        files = tuple(_scan_file(its_format, found, writer, beside, advance) for found in previews)
        n_items = sum(file.n_items for file in files)
        spec = InputSpec(its_format.name, files, n_items, stride, previews[0].columns)
        writer.publish(spec.digest)
    return spec


def promise(path: Path, *, n_items: int, columns: Sequence[str], fingerprint: str, stride: int) -> InputSpec:
    """The spec of the merged file that a plan's run will write to `path`; a Reader refuses any other file."""
    file = InputFile(str(path), PROMISED, PROMISED, fingerprint, n_items)
    return InputSpec(Merged.name, (file,), n_items, stride, tuple(columns))


def concatenate(specs: Sequence[InputSpec], index: Path) -> InputSpec:
    """The spec of the files of several inputs, some of which are promised; SlurmGPUError unless all are alike."""
    paths = [path for spec in specs for path in spec.readable]
    format_of(paths)
    if twice := [path for path, n in Counter(paths).items() if n > 1]:
        raise SlurmGPUError(f"The input names {twice[0]} twice. Leave one of them out.")
    _refuse_mixed([Preview(str(spec.readable[0]), 0, 0, columns=spec.columns) for spec in specs])
    files = tuple(file for spec in specs for file in spec.files)
    return publish(replace(specs[0], files=files, n_items=sum(spec.n_items for spec in specs)), index)


def _scan_file(
    its_format: Format,
    found: Preview,
    writer: IndexWriter,
    beside: ThreadPoolExecutor,
    advance: Callable[[int], None],
) -> InputFile:
    path = found.path
    checksum = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        chunks = _hashed(_chunks(file, found.size_bytes, advance), checksum, beside)
        n_items = its_format.index(found, file, chunks, writer)
        status = os.fstat(file.fileno())
    refuse_changed(found, status)
    sha256, named = checksum.hexdigest(), origin(Path(path))
    source = Source(named, found.size_bytes, found.mtime_ns, sha256) if named else None
    return InputFile(path, found.size_bytes, found.mtime_ns, sha256, n_items, source)


def _preview(path: Path, its_format: Format) -> Preview:
    try:
        with naming(path), open(path, "rb") as file:
            status = os.fstat(file.fileno())
            found = Preview(str(path), status.st_size, status.st_mtime_ns)
            if isinstance(its_format, Lines) and is_repacked(path, its_format) and status.st_size:
                with its_format.lines_in(file, path) as stream:
                    seen = its_format.preview_stream(stream, found)
                found = replace(seen, size_bytes=found.size_bytes)
            else:
                found = its_format.preview(file, found)
    except OSError as error:
        raise SlurmGPUError(f"Input {path} cannot be read: {error.strerror or error}.") from error
    if found.is_empty:
        raise SlurmGPUError(f"Input {path} is empty; expected at least one item in each file.")
    return found


def _refuse_mixed(previews: Sequence[Preview]) -> None:
    """SlurmGPUError if columns differ, or if a jsonl file shares no key with the first."""
    first, first_path = previews[0], previews[0].path
    for other in previews[1:]:
        path, columns = other.path, other.columns
        if columns != first.columns:
            raise SlurmGPUError(
                f"{path} has the columns {_names(columns)}; expected those of {first_path}, "
                f"{_names(first.columns)}, in that order. Make them the same, or plan two runs."
            )
        if first.keys and other.keys and first.keys.isdisjoint(other.keys):
            raise SlurmGPUError(
                f"{path} has the keys {_names(sorted(other.keys))}; expected at least one of those "
                f"in {first_path}, {_names(sorted(first.keys))}. Make them the same, or plan two runs."
            )


def _chunks(file: BinaryIO, n_bytes: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The file's first `n_bytes`, also if it grows meanwhile."""
    while True:
        with naming(file.name):
            chunk = file.read(min(CHUNK_BYTES, n_bytes))
        if not chunk:
            return
        yield chunk
        n_bytes -= len(chunk)
        advance(len(chunk))


def _hashed(chunks: Iterable[bytes], checksum: Any, beside: ThreadPoolExecutor) -> Iterator[bytes]:
    """The chunks, hashed in another thread while the caller works; at most two are in memory."""
    hashing: Future[None] | None = None
    for chunk in chunks:
        if hashing:
            hashing.result()
            hashing = None
        if len(chunk) < _FEW_BYTES:
            checksum.update(chunk)
        else:
            hashing = beside.submit(checksum.update, chunk)
        yield chunk
    if hashing:
        hashing.result()


def _names(names: Sequence[str] | None) -> str:
    return some_of(map(repr, names or ()), 8)
