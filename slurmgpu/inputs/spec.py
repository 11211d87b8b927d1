"""The description of an input in a run's plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.frozen_plan import PROMISED, FileRecord, InputRecord
from slurmgpu.util.item_ranges import n_to_ends, spans_within


@dataclass(frozen=True)
class Source:
    """The source of items, as planning found it: a file, a query of a database file, or a file of the hub."""

    path: str
    size_bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class InputFile:
    """One file of an input at planning; `path` is absolute, or relative to the run directory for a file in it.

    `source` is the file or query that was repacked into it, or its name on the hub; None for others. `sha256`
    identifies the items.
    """

    path: str
    size_bytes: int
    mtime_ns: int
    sha256: str
    n_items: int
    source: Source | None = None


@dataclass(frozen=True)
class InputSpec:
    """An input: its files in order, all of one format, and its number of items.

    `stride` is the distance of indexed items. `columns` are the names in every item of a csv, parquet or h5 input; None
    for jsonl, json and txt. `ranges` are the items of the files that the input uses, as (start, stop); None for all.
    `folders` are the folders of items that are files themselves. `repacked` files are Parquet files in the run
    directory, whatever the format of their source.
    """

    format: str
    files: tuple[InputFile, ...]
    n_items: int
    stride: int
    columns: tuple[str, ...] | None
    ranges: tuple[tuple[int, int], ...] | None = None
    folders: tuple[str, ...] = ()
    repacked: bool = False

    @property
    def digest(self) -> str:
        """The output of `sha256sum FILES | cut -c-64 | sha256sum`; it identifies every byte of the input."""
        return hashlib.sha256("".join(f"{file.sha256}\n" for file in self.files).encode()).hexdigest()

    @property
    def promised(self) -> list[InputFile]:
        """The files that other runs, which this one waits for, write, and may write again."""
        return [file for file in self.files if file.size_bytes == PROMISED]

    @property
    def are_rows(self) -> bool:
        """Whether the items are rows of the merged files of earlier runs."""
        return self.format == "h5"

    @property
    def readable(self) -> list[Path]:
        """The files to read without an index, by their suffixes: for repacked text, its sources."""
        has_lines = self.repacked and self.format != "parquet"
        return [Path(file.source.path if has_lines and file.source else file.path) for file in self.files]

    def taking(self, ranges: Sequence[tuple[int, int]]) -> InputSpec:
        """An input of only these ranges of its items, numbered from 0 in their order."""
        n_items = sum(stop - start for start, stop in ranges)
        return replace(self, n_items=n_items, ranges=tuple(span for each in ranges for span in self.spans(*each)))

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges (start, stop) of items start..stop-1 among the items of all files."""
        ranges = [(0, self.n_items)] if self.ranges is None else self.ranges
        return spans_within(ranges, n_to_ends(ranges), start, stop)

    def to_json(self) -> InputRecord:
        """The spec as JSON values, for run.json."""
        value: InputRecord = json.loads(json.dumps(asdict(self)))
        return value

    @classmethod
    def from_json(cls, value: InputRecord) -> InputSpec:
        """The spec from `to_json`; SlurmGPUError if its numbers of items do not agree, for example after an edit."""
        spec = cls(
            value["format"],
            tuple(map(_input_file, value["files"])),
            value["n_items"],
            value["stride"],
            None if value["columns"] is None else tuple(value["columns"]),
            None if value["ranges"] is None else tuple((start, stop) for start, stop in value["ranges"]),
            tuple(value["folders"]),
            value["repacked"],
        )
        spec._check_counts()
        return spec

    def _check_counts(self) -> None:
        counts = [file.n_items for file in self.files]
        ranges = [(0, sum(counts))] if self.ranges is None else self.ranges
        ends = [0, *(end for each in ranges for end in each), sum(counts)]
        n_items = sum(stop - start for start, stop in ranges)
        if n_items != self.n_items:
            found = f"its files and ranges have {n_items}"
        elif min(counts, default=0) < 0 or ends != sorted(ends):
            found = f"its ranges are not in order within the {sum(counts)} items of its files"
        else:
            return
        raise SlurmGPUError(
            f"run.json says that the input has {self.n_items} items, but {found}. It was edited or is damaged: undo "
            f"the edit, or plan the run again."
        )


def _input_file(value: FileRecord) -> InputFile:
    source = None if value["source"] is None else Source(**value["source"])
    return InputFile(value["path"], value["size_bytes"], value["mtime_ns"], value["sha256"], value["n_items"], source)
