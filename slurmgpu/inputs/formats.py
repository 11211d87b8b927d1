"""Input formats: the interface of a format class, and the registry of formats."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.compression import suffix_of, without_suffix
from slurmgpu.inputs.index import IndexWriter
from slurmgpu.util.plugins import Plugins

FORMATS = Plugins(
    "slurmgpu.inputs",
    "input format",
    "slurmgpu.inputs.formats.Format",
    {
        "jsonl": "slurmgpu.inputs.lines:Jsonl",
        "json": "slurmgpu.inputs.json_lists:Json",
        "csv": "slurmgpu.inputs.lines:Csv",
        "txt": "slurmgpu.inputs.lines:Txt",
        "files": "slurmgpu.inputs.file_items:Files",
        "tar": "slurmgpu.inputs.tar:Tar",
        "npy": "slurmgpu.inputs.arrays:Npy",
        "npz": "slurmgpu.inputs.arrays:Npz",
        "arrow": "slurmgpu.inputs.arrow:Arrow",
        "parquet": "slurmgpu.inputs.tables:Parquet",
        "h5": "slurmgpu.inputs.tables:Merged",
    },
)
"""Input formats by the name that plans give them."""

_OF_TABS = (
    " Its columns are separated by tabs. Write it with commas, in Python: "
    "pandas.read_csv(path, sep='\\t').to_csv('items.csv', index=False)."
)
_OF_EXCEL = " Write it as CSV, in Python: pandas.read_excel(path).to_csv('items.csv', index=False)."
_OF_HDF5 = (
    " Write its arrays as .npz: np.savez('items.npz', **{name: file[name][:] for name in file}), with file = "
    "h5py.File(path). If it is the merged file of a run, name it .h5."
)
_OF_FASTA = (
    ' Its records span lines: write it as CSV, awk \'{sub(/\\r$/, "")} /^>/ {printf "%s%s,", n++ ? "\\n" : '
    '"id,sequence\\n", substr($1, 2); next} {printf "%s", $1} END {print ""}\' FILE > items.csv.'
)
_CONVERTED = {
    **dict.fromkeys((".tsv", ".tab"), _OF_TABS),
    **dict.fromkeys((".xlsx", ".xls"), _OF_EXCEL),
    **dict.fromkeys((".hdf5", ".hdf"), _OF_HDF5),
    **dict.fromkeys((".fasta", ".fa", ".faa", ".fna"), _OF_FASTA),
}
"""Advice for suffixes of formats that resemble a supported one, but cannot be read under another name."""

CHUNK_BYTES = 1 << 20
"""The bytes of a file that are read at once for indexing."""

ADVICE = "Restore the file, or plan a new run."
"""What to do about a file that has changed since planning."""

Find = Callable[[int, int], tuple[int, int, int]]
"""Maps items start..stop-1 of a file to an indexed item at or before `start`, its offset, and the end of reading."""


def changed_error(found: str) -> SlurmGPUError:
    """The error for an input that is not the one that was planned; `found` begins with the file."""
    return SlurmGPUError(f"The input has changed since the run was planned: {found}. {ADVICE}")


class Rows(Protocol):
    """The items of an open file."""

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Items start..stop-1 of the file; an ItemError in place of a malformed item."""

    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True)
class Preview:
    """What a file's first bytes and its size show.

    `columns` are the names that every item has; without columns, `keys` are those of the first items. The records of
    an indexed file are in bytes `begin` to `end`, the first one in line `line`; for other files `end` is the number of
    items.
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


def refuse_changed(found: Preview, status: os.stat_result) -> None:
    """Raise SlurmGPUError if a file's size or time has changed since its preview."""
    if (status.st_size, status.st_mtime_ns) != (found.size_bytes, found.mtime_ns):
        raise SlurmGPUError(
            f"Input {found.path} changed while it was read. Wait until nothing writes to it, then plan again."
        )


class Format(ABC):
    """A format of input files: how they are recognised, checked, indexed at planning, and read later.

    `class Tsv(Lines, format="tsv")` registers a format when it is imported; plans give its `name`.
    """

    name: ClassVar[str]
    is_indexed: ClassVar[bool] = False
    """Whether `index` records the offsets of items for `open`."""
    may_be_compressed: ClassVar[bool] = False
    """Whether compressed files, with a further suffix such as `.gz`, are repacked at planning."""
    is_repacked: ClassVar[bool] = False
    """Whether files are repacked at planning that are not compressed, too."""
    grows: ClassVar[bool] = False
    """Whether appending to a file leaves its earlier items unchanged."""

    def __init_subclass__(cls, format: str | None = None) -> None:
        if format is not None:
            cls.name = format
            FORMATS.register(format, cls)

    def recognises(self, path: Path) -> bool:
        """Whether a file name is one of this format."""
        return path.suffix.lower() == f".{self.name}"

    @abstractmethod
    def preview(self, file: BinaryIO, found: Preview) -> Preview:
        """Add to `found` what the file's first bytes show; SlurmGPUError if it has another format."""

    def index(self, found: Preview, file: BinaryIO, chunks: Iterable[bytes], writer: IndexWriter) -> int:
        """The number of items; all chunks of the file must be consumed, in order."""
        for _ in chunks:
            pass
        return found.end

    @abstractmethod
    def open(self, path: str, columns: Sequence[str] | None, find: Find) -> Rows:
        """The items of a file, for reading in any order; SlurmGPUError if it has another format."""

    @abstractmethod
    def items(self, path: Path) -> Iterator[Mapping[str, Any] | ItemError]:
        """All items of a file, without an index."""


def named(name: str) -> Format:
    """The format with this name; SlurmGPUError if there is none."""
    made: Format = FORMATS.make(name)
    return made


def recognised(path: Path) -> Format | None:
    """The format that a file name stands for; formats of installed packages are searched last."""
    return _recognised(path) or (_recognised(without_suffix(path)) if suffix_of(path) else None)


def _recognised(path: Path) -> Format | None:
    for names in (FORMATS.known, _names):
        for name in names():
            if (found := named(name)).recognises(path):
                return found
    return None


@functools.cache
def _names() -> list[str]:
    return FORMATS.names()  # takes 15 ms, and is called for each folder that a glob matches


def is_compressed(path: Path, its_format: Format) -> bool:
    """Whether a file is compressed in a way that its format does not read itself, by its name."""
    return suffix_of(path) is not None and not its_format.recognises(path)


def is_repacked(path: Path, its_format: Format) -> bool:
    """Whether a file has no random access."""
    return its_format.is_repacked or is_compressed(path, its_format)


def _query_of(path: Path, suffix: str) -> str:
    """A sentence on how to name a query as the input, if the suffix is a database's."""
    kind = {".db": "sqlite", ".sqlite": "sqlite", ".sqlite3": "sqlite", ".duckdb": "duckdb"}.get(suffix.lower())
    return f" For a database write a query: '{kind}:{path}?SELECT … ORDER BY …'." if kind else ""


def format_of(paths: Sequence[Path]) -> Format:
    """The one format that all file names stand for."""
    formats: dict[str, tuple[Path, Format]] = {}
    for path in paths:
        if (found := recognised(path)) is None:
            names = [name for name in _names() if named(name).recognises(Path(f"x.{name}"))]
            *others, last = (f".{name}" for name in names)
            suffix = without_suffix(path).suffix
            advice = _CONVERTED.get(suffix.lower(), " Write its items as .jsonl, one object per line.")
            raise SlurmGPUError(
                f"Input {path} has the suffix {suffix!r}; expected {', '.join(others)} or {last}.{advice} If each file "
                f"is an item, write 'files:' before the path or the pattern.{_query_of(path, suffix)}"
            )
        if is_compressed(path, found) and not found.may_be_compressed:
            raise SlurmGPUError(
                f"Input {path} is a .{found.name} file that was compressed as a whole ({suffix_of(path)}); only files "
                f"of lines can be read so. Decompress it."
            )
        formats.setdefault(found.name, (path, found))
    if len(formats) > 1:
        mixed = " and ".join(f"{name} ({path})" for name, (path, _) in formats.items())
        raise SlurmGPUError(f"The input mixes formats, {mixed}; expected one format. Convert one, or plan two runs.")
    [(_, found)] = formats.values()
    return found


def refuse_doubled(columns: Sequence[str], where: str) -> None:
    """Raise SlurmGPUError if two columns have one name."""
    if (doubled := first_doubled(columns)) is not None:
        raise SlurmGPUError(f"{where}: two columns are named {doubled!r}. Rename one of them.")


def first_doubled(columns: Sequence[str]) -> str | None:
    """The name, first in order, of several of the columns; None if each has a name of its own."""
    return min((name for name, times in Counter(columns).items() if times > 1), default=None)
