"""What planning learned about an input, frozen in the run's plan."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class InputFile:
    """One file of an input, as it was when the run was planned; `path` is absolute."""

    path: str
    size_bytes: int
    mtime_ns: int
    sha256: str
    n_items: int


@dataclass(frozen=True)
class InputSpec:
    """An input: its files in order, all of one format, and the number of items in all of them.

    `stride` is the distance of the items whose offsets are in the index.
    `columns` are the names that every item of a csv, parquet or h5 input has; None for jsonl and txt.
    """

    format: str
    files: tuple[InputFile, ...]
    n_items: int
    stride: int
    columns: tuple[str, ...] | None

    @property
    def digest(self) -> str:
        """What `sha256sum FILES | cut -c-64 | sha256sum` prints: it stands for every byte of the input."""
        return hashlib.sha256("".join(f"{file.sha256}\n" for file in self.files).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The spec in JSON's types, for run.json."""
        columns = None if self.columns is None else list(self.columns)
        return asdict(self) | {"files": [asdict(file) for file in self.files], "columns": columns}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> InputSpec:
        """The spec that `to_json` was called on."""
        files = tuple(InputFile(**file) for file in value["files"])
        columns = None if value["columns"] is None else tuple(value["columns"])
        return cls(**{**value, "files": files, "columns": columns})
