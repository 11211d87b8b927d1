"""Column kinds: what a class says of its columns, and which classes there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import SlurmGPUError
from slurmgpu.shards.numbers import as_lists

GROUP = "slurmgpu.columns"
"""The entry points by which installed packages bring kinds, each of a kind's name."""


class Column(ABC):
    """A kind of column: how its values are checked, stored, read back and exported.

    Each row is stored as an array of `dtype`. Where all are of one `shape` they are the dataset NAME; where `shape` is
    None they are of one dimension and any length, NAME/values has them one after the other, and NAME/offsets says
    where each begins. How these are joined follows from that. `stored` below is what `convert` returns of each row; for
    rows of one shape it is a single array of them.

    `class Date(Array, kind="date")` is known to slurmgpu once it is imported; files have its `kind`. Where it is not
    known, as an entry point `slurmgpu.columns` either, its values are read as they are stored.
    """

    kind: ClassVar[str]
    is_tensor: ClassVar[bool] = True
    """Whether PyTorch gets what is stored, rather than what is read."""
    arrow: ClassVar[str | None] = None
    """Arrow's name for the type of a row, such as "timestamp[us]"; None where numbers are all that it is."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None = None

    def __init_subclass__(cls, kind: str | None = None) -> None:
        if kind is None:
            return
        if kind in KINDS and KINDS[kind].__module__.startswith("slurmgpu."):  # a user's file may be imported again
            raise SlurmGPUError(f"{KINDS[kind].__qualname__} is the column kind {kind!r}; choose another name.")
        cls.kind = kind
        KINDS[kind] = cls

    @abstractmethod
    def convert(self, value: Any) -> npt.NDArray[Any] | bytes:
        """A copy of `value` as it is stored; ValueError when that would lose anything but precision."""

    @abstractmethod
    def blank(self) -> npt.NDArray[Any] | bytes:
        """What is stored of an item without a row."""

    def arguments(self) -> dict[str, Any]:
        """What the class makes this column of, in JSON's types."""
        return {}

    def split(self, values: npt.NDArray[Any], bounds: Sequence[int]) -> Sequence[Any]:
        """The stored rows, where these are of any length: each begins where `bounds` say, and the last one ends."""
        return [values[first:last] for first, last in pairwise(bounds)]

    def read(self, stored: Any) -> Any:
        """What is read of the rows: a list of them; an array, copied from nothing, if they are of one shape."""
        return stored

    def plain(self, stored: Any) -> list[Any]:
        """The rows as JSON has them."""
        return as_lists(stored) if self.shape is not None else list(map(as_lists, stored))

    def cells(self, stored: Any) -> list[Any]:
        """The rows as CSV has them: as in `plain`, but that a list or a boolean is written as JSON."""
        return self.plain(stored)

    @property
    def pandas(self) -> str | None:
        """The dtype of the rows in pandas; None where that may find it."""
        return "object"


KINDS: dict[str, type[Column]] = {}
"""The kinds of columns, by their names in files."""


def class_of(kind: str) -> type[Column] | None:
    """The class of a kind: one that is imported, else of an installed package."""
    if kind not in KINDS:
        from importlib.metadata import entry_points  # 15 ms, and most kinds are known

        for point in entry_points(group=GROUP, name=kind):
            point.load()
    return KINDS.get(kind)
