"""Tar files as WebDataset writes them: adjacent members with one name and several suffixes are one item."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.file_items import as_text
from slurmgpu.inputs.formats import CHUNK_BYTES, Find, Format, Preview, Rows
from slurmgpu.inputs.index import IndexWriter

KEY = "__key__"
"""The field with the common part of the names of an item's members, as in WebDataset."""

MOST_BYTES = 1 << 31
"""The most bytes of an item's members together."""

_NAME = re.compile(r"((?:.*/)?[^./][^/.]*)\.([^/]*)", re.DOTALL)
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tar.lz4")
_AT_ONCE = 4096


class Tar(Format, format="tar"):
    """Tar archives; the index has the offset of every `stride`-th item's first header."""

    is_indexed = True

    def recognises(self, path: Path) -> bool:
        """Whether a file name is a tar archive's; `preview` refuses compressed ones."""
        return path.name.lower().endswith((".tar", *_COMPRESSED))

    def preview(self, file: BinaryIO, found: Preview) -> Preview:
        """`found` with the file's size as `end`; SlurmGPUError for a compressed file, or one without a tar header."""
        if found.path.lower().endswith(_COMPRESSED):
            raise SlurmGPUError(
                f"{found.path} is compressed as a whole, so finding an item means reading all items before it. "
                f"Decompress it to .tar; images and recordings in it stay compressed."
            )
        if found.size_bytes == 0:
            return found
        try:
            with tarfile.open(fileobj=file, mode="r:"):
                return replace(found, end=found.size_bytes)
        except tarfile.TarError as error:
            raise SlurmGPUError(f"{found.path} is not a tar archive: {error}.") from error

    def index(self, found: Preview, file: BinaryIO, chunks: Iterable[bytes], writer: IndexWriter) -> int:
        """Add the offsets of the items to the index; SlurmGPUError if the archive ends before the file does."""
        n_before, offsets, seen = writer.n_items, list[int](), set[int]()
        stream = cast(IO[bytes], _Stream(chunks))
        try:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for members in _samples(found.path, archive):
                    _check_adjacent(found.path, members[0][1], seen)
                    if writer.n_items == n_before:
                        writer.begin_file(members[0][0].offset)
                        continue
                    offsets.append(members[0][0].offset)
                    if len(offsets) == _AT_ONCE:
                        writer.add(np.array(offsets))
                        offsets.clear()
                end = archive.offset
        except tarfile.TarError as error:
            raise SlurmGPUError(f"{found.path} is truncated or damaged: {error}. Copy it or pack it again.") from error
        if offsets:
            writer.add(np.array(offsets))
        for _ in chunks:  # consumed so that they are hashed
            pass
        _check_end(found, file, end)
        if writer.n_items == n_before:
            raise SlurmGPUError(
                f"{found.path} has no items; expected members whose names have a suffix, such as 0001.jpg and "
                "0001.json."
            )
        return writer.n_items - n_before

    def open(self, path: str, columns: Sequence[str] | None, find: Find) -> Rows:
        """The items of an archive, found by the index."""
        return TarRows(path, find)

    def items(self, path: Path) -> Iterator[Mapping[str, Any] | ItemError]:
        """All items of an archive."""
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for members in _samples(str(path), archive):
                yield _data(str(path), archive, members)


class TarRows:
    """The items of one archive."""

    def __init__(self, path: str, find: Find) -> None:
        self._path, self._find = path, find
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Items start..stop-1; an ItemError for an item whose members cannot be read."""
        first, begin, end = self._find(start, stop)
        self._file.seek(begin)
        items: list[Mapping[str, Any] | ItemError] = []
        try:
            with tarfile.open(fileobj=self._file, mode="r:") as archive:
                for number, members in enumerate(_samples(self._path, archive, end), first):
                    if number >= start:
                        items.append(_data(self._path, archive, members))
                    if number == stop - 1:
                        break
                else:
                    raise tarfile.ReadError("the archive ends before")
        except tarfile.TarError as error:
            wrong = f"{self._path}, item {start + len(items) + 1}: expected a member of a tar archive, found: {error}"
            items += [ItemError(wrong)] * (stop - start - len(items))
        return items


class _Stream:
    """Chunks as a file that is read once, from its beginning on."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._chunk, self._at = b"", 0

    def read(self, size: int) -> bytes:
        """The next bytes, up to `size` of them."""
        if self._at == len(self._chunk):
            self._chunk, self._at = next(self._chunks, b""), 0
        found = self._chunk[self._at : self._at + size]
        self._at += len(found)
        return found


def _samples(
    path: str, archive: tarfile.TarFile, end: int | None = None
) -> Iterator[list[tuple[tarfile.TarInfo, str, str]]]:
    """The members of each item up to `end`, with key and suffix. Members without a suffix, and non-files, are skipped.

    SlurmGPUError for a link that has a suffix.
    """
    found: list[tuple[tarfile.TarInfo, str, str]] = []
    for member in _members(archive, end):
        match = _NAME.fullmatch(member.name)
        if match is not None and (member.islnk() or member.issym()):
            _refuse_link(path, member)
        if match is None or not member.isreg():
            continue
        if found and found[0][1] != match[1]:
            yield found
            found = []
        found.append((member, match[1], match[2].lower()))
    if found:
        yield found


def _refuse_link(path: str, member: tarfile.TarInfo) -> None:
    raise SlurmGPUError(
        f"{path}: {as_text(member.name)!r} is a link to {as_text(member.linkname)!r}; expected files with their "
        f"content. Pack them with `tar --sort=name --dereference --hard-dereference`."
    )


def _members(archive: tarfile.TarFile, end: int | None) -> Iterator[tarfile.TarInfo]:
    """The members whose headers are before `end`, and the first one in any case, which tarfile has read already."""
    member = archive.next()
    while member is not None:
        yield member
        archive.members.clear()  # type: ignore[attr-defined]  # it keeps all that it has read
        member = archive.next() if end is None or archive.offset < end else None


def _data(
    path: str, archive: tarfile.TarFile, members: Sequence[tuple[tarfile.TarInfo, str, str]]
) -> Mapping[str, Any] | ItemError:
    """The data of an item: its key, and the content of each member by its suffix."""
    key = as_text(members[0][1])
    if (size := sum(member.size for member, _, _ in members)) > MOST_BYTES:
        return ItemError(f"{path}, {key}: it has {size} bytes; at most {MOST_BYTES} are read into memory")
    data: dict[str, Any] = {KEY: key}
    for member, _, suffix in members:
        if suffix in data:
            return ItemError(f"{path}, {key}: two of its members have the suffix {suffix!r}")
        try:
            data[suffix] = _decoded(_content(archive, member), suffix.rpartition(".")[2])
        except (ValueError, RecursionError) as error:
            return ItemError(f"{path}, {key}.{suffix}: {error}")
    return data


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.issparse():
        content = cast(IO[bytes], archive.extractfile(member)).read()
    else:
        file = cast(BinaryIO, archive.fileobj)  # takes a third of the time of extractfile
        file.seek(member.offset_data)
        content = file.read(member.size)
    if len(content) != member.size:
        raise tarfile.ReadError("unexpected end of data")
    return content


def _decoded(content: bytes, suffix: str) -> Any:
    """JSON, texts and classes as values, other content as bytes; ValueError if it does not fit its suffix."""
    try:
        if suffix == "json":
            return json.loads(content)
        if suffix in ("txt", "text"):
            return content.decode()
        return int(content) if suffix == "cls" else content
    except (ValueError, RecursionError) as error:
        what = {"json": "JSON", "cls": "a number"}.get(suffix, "text in UTF-8")
        raise ValueError(f"expected {what}, found other content ({error})") from error


def _check_adjacent(path: str, key: str, seen: set[int]) -> None:
    """SlurmGPUError if an item of this key came before; `seen` has hashes of keys, to save memory."""
    if hash(key) in seen:
        raise SlurmGPUError(
            f"{path} has members of {as_text(key)!r} in two places; the members of an item must be adjacent. Pack "
            f"the files in the order of their names, with `tar --sort=name`."
        )
    seen.add(hash(key))


def _check_end(found: Preview, file: BinaryIO, end: int) -> None:
    """SlurmGPUError unless only an end mark follows the last member: tarfile stops silently at the first damage."""
    file.seek(end)
    n_zeros = 0
    while chunk := file.read(min(CHUNK_BYTES, found.size_bytes - end - n_zeros)):
        if chunk.count(0) != len(chunk):
            raise SlurmGPUError(
                f"{found.path} has data after its last member, at byte {end}: a damaged header, or a second archive. "
                f"Pack it again; to join archives use `tar --concatenate`."
            )
        n_zeros += len(chunk)
    if n_zeros < tarfile.BLOCKSIZE:
        raise SlurmGPUError(
            f"{found.path} has no end mark after its last member, at byte {end}: it was truncated. Copy it or pack "
            f"it again."
        )
