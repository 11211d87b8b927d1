"""Read an input once, at planning: check its format, index its items, hash it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.formats import CHUNK_BYTES, Format, Preview, format_of
from slurmgpu.inputs.index import IndexWriter
from slurmgpu.inputs.spec import PROMISED, InputFile, InputSpec
from slurmgpu.inputs.tables import Merged


def scan(
    paths: Sequence[Path],
    index: Path,
    *,
    stride: int,
    progress: Callable[[int, int], None] | None = None,
    of_format: Format | None = None,
) -> InputSpec:
    """The spec of an input; writes the offsets of every `stride`-th item to `index`.

    SlurmGPUError names the file and line of other formats. All first bytes are checked before any file is read whole,
    then a sample of the lines, and the last one. Files are read once, in bounded memory; `progress` is called with the
    bytes read so far and in total. `of_format` is the format, if not that of the files' names.
    """
    its_format = of_format or format_of(paths)
    previews = [_preview(path, its_format) for path in paths]
    _refuse_mixed(previews)
    total, done = sum(found.size_bytes for found in previews), 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress:
            progress(done, total)

    n_indexed = len(paths) if its_format.is_indexed else 0
    with IndexWriter(index, stride=stride, n_files=n_indexed) as writer, ThreadPoolExecutor(1) as beside:
        files = tuple(_scan_file(its_format, found, writer, beside, advance) for found in previews)
        n_items = sum(file.n_items for file in files)
        spec = InputSpec(its_format.name, files, n_items, stride, previews[0].columns)
        writer.publish(spec.digest)
    return spec


def promise(
    path: Path, index: Path, *, n_items: int, columns: Sequence[str], fingerprint: str, stride: int
) -> InputSpec:
    """The spec of the merged file that the run of a plan will leave at `path`; a Reader refuses any other file."""
    file = InputFile(str(path), PROMISED, PROMISED, fingerprint, n_items)
    spec = InputSpec(Merged.name, (file,), n_items, stride, tuple(columns))
    with IndexWriter(index, stride=stride, n_files=0) as writer:
        writer.publish(spec.digest)
    return spec


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
    if (status.st_size, status.st_mtime_ns) != (found.size_bytes, found.mtime_ns):
        raise SlurmGPUError(f"Input {path} changed while it was read. Let what writes it finish, then plan again.")
    return InputFile(path, found.size_bytes, found.mtime_ns, checksum.hexdigest(), n_items)


def _preview(path: Path, its_format: Format) -> Preview:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            found = its_format.preview(file, Preview(str(path), status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise SlurmGPUError(f"Input {path} cannot be read: {error.strerror or error}.") from error
    if found.is_empty:
        raise SlurmGPUError(f"Input {path} is empty: expected at least one item. Leave the file out.")
    return found


def _refuse_mixed(previews: Sequence[Preview]) -> None:
    """SlurmGPUError if columns differ, or if a jsonl file shares no key with the first."""
    first, first_path = previews[0], previews[0].path
    for other in previews[1:]:
        path, columns = other.path, other.columns
        if columns != first.columns:
            raise SlurmGPUError(
                f"{path} has the columns {_names(columns)}: expected those of {first_path}, "
                f"{_names(first.columns)}, in that order. Make them the same, or plan two runs."
            )
        if first.keys and other.keys and first.keys.isdisjoint(other.keys):
            raise SlurmGPUError(
                f"{path} has the keys {_names(sorted(other.keys))}: expected one at least of those "
                f"in {first_path}, {_names(sorted(first.keys))}. Make them the same, or plan two runs."
            )


def _chunks(file: BinaryIO, n_bytes: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The file's first `n_bytes`; a growing file is not followed."""
    while chunk := file.read(min(CHUNK_BYTES, n_bytes)):
        yield chunk
        n_bytes -= len(chunk)
        advance(len(chunk))


def _hashed(chunks: Iterable[bytes], checksum: Any, beside: ThreadPoolExecutor) -> Iterator[bytes]:
    """The chunks, hashed in another thread while the caller works; at most two are in memory."""
    hashing: Future[None] | None = None
    for chunk in chunks:
        if hashing:
            hashing.result()
        hashing = beside.submit(checksum.update, chunk)
        yield chunk
    if hashing:
        hashing.result()


def _names(names: Sequence[str] | None) -> str:
    names = names or ()
    shown = ", ".join(map(repr, names[:8]))
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
