"""Input formats: what a class says of the files of one, and which formats there are."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.inputs.index import IndexWriter

GROUP = "slurmgpu.inputs"
"""The entry points by which installed packages bring formats, each of a format's name."""

CHUNK_BYTES = 1 << 20
"""So much of a file is read at once when it is indexed."""

Find = Callable[[int, int], tuple[int, int, int | None]]
"""Where items start..stop-1 of a file lie: an indexed item at or before `start`, its offset, and where reading ends.

None for the end: to that of the file."""


class Rows(Protocol):
    """The items of one file, which is open."""

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Items start..stop-1 of the file; an ItemError in the place of a malformed one."""

    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True)
class Preview:
    """What one file's beginning and its size tell.

    `columns` are the names that every item has; `keys` those of the first items, where there are no columns.
    The records of an indexed file lie in bytes `begin` to `end`, the first of them in line `line`; of others the
    number of items is known.
    """

    path: str
    size_bytes: int
    mtime_ns: int
    columns: tuple[str, ...] | None = None
    keys: frozenset[str] = frozenset()
    begin: int = 0
    end: int = 0
    line: int = 1

    @property
    def is_empty(self) -> bool:
        """Whether there is no item."""
        return self.begin >= self.end


class Format(ABC):
    """A format of input files: how they are known by name, looked at, read once at planning, and read again later.

    `class Tsv(Lines, name="tsv")` is known to slurmgpu once it is imported; plans have its `name`.
    """

    name: ClassVar[str]
    is_indexed: ClassVar[bool] = False
    """Whether `index` tells where items lie, for `open` to find them by."""

    def __init_subclass__(cls, name: str | None = None) -> None:
        if name is None:
            return
        if name in FORMATS and FORMATS[name].__module__.startswith("slurmgpu."):  # a user's may be imported again
            raise SlurmGPUError(
                f"{type(FORMATS[name]).__qualname__} is the input format {name!r}; choose another name."
            )
        cls.name = name
        FORMATS[name] = cls()

    def recognises(self, path: Path) -> bool:
        """Whether a file is of the format, as far as its name tells."""
        return path.suffix.lower() == f".{self.name}"

    @abstractmethod
    def preview(self, file: BinaryIO, found: Preview) -> Preview:
        """`found` with what the file's beginning tells; SlurmGPUError if it is not the format."""

    def index(self, found: Preview, file: BinaryIO, chunks: Iterable[bytes], writer: IndexWriter) -> int:
        """The number of a file's items, once its chunks have passed by, from the first to the last."""
        for _ in chunks:
            pass
        return found.end

    @abstractmethod
    def open(self, path: str, columns: Sequence[str] | None, find: Find) -> Rows:
        """The items of a file, to be read in any order; SlurmGPUError if it is not the format."""

    @abstractmethod
    def items(self, path: Path) -> Iterator[Mapping[str, Any] | ItemError]:
        """All items of a file that was never indexed."""


FORMATS: dict[str, Format] = {}
"""The formats of input files, by their names in plans."""


def named(name: str) -> Format:
    """The format of that name in a plan; SlurmGPUError if nobody knows it here."""
    if name not in FORMATS:
        _load_installed()
    if name not in FORMATS:
        raise SlurmGPUError(f"Nothing here reads inputs of the format {name!r}. Install the package that brings it.")
    return FORMATS[name]


def recognised(path: Path) -> Format | None:
    """The format that a file's name stands for: one that is imported, else of an installed package."""
    found = _recognised(path)
    if found is None:
        _load_installed()
        found = _recognised(path)
    return found


def format_of(paths: Sequence[Path]) -> Format:
    """The one format that the names of all paths stand for."""
    formats: dict[str, Path] = {}
    for path in paths:
        if (found := recognised(path)) is None:
            *names, last = (f".{name}" for name in FORMATS)
            raise SlurmGPUError(
                f"Input {path} has the suffix {path.suffix!r}: expected {', '.join(names)} or {last}, "
                f"not compressed.{did_you_mean(path.suffix.lower().removeprefix('.'), FORMATS)}"
            )
        formats.setdefault(found.name, path)
    if len(formats) > 1:
        mixed = " and ".join(f"{name} ({path})" for name, path in formats.items())
        raise SlurmGPUError(f"The input mixes formats, {mixed}: expected one format. Convert one, or plan two runs.")
    return FORMATS[next(iter(formats))]


def _recognised(path: Path) -> Format | None:
    return next((each for each in FORMATS.values() if each.recognises(path)), None)


@functools.cache
def _load_installed() -> None:
    from importlib.metadata import entry_points  # 15 ms, and most inputs are of formats that are built in

    for point in entry_points(group=GROUP):
        point.load()
