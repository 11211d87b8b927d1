"""Column kinds: the interface of a column class, and the registry of kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from slurmgpu.shards.numbers import as_lists
from slurmgpu.util.plugins import Plugins

KINDS = Plugins(
    "slurmgpu.columns",
    "column kind",
    "slurmgpu.shards.kinds.Column",
    {kind: f"slurmgpu.shards.columns:{kind.capitalize()}" for kind in ("array", "text", "json", "ragged")},
)
"""Column kinds by the name that files give them."""


class Column(ABC):
    """A kind of column: how its values are checked, stored, read and exported.

    Each row is stored as an array of `dtype`. With a `shape`, all rows have it, and they form the dataset NAME.
    Without one (None), rows are one-dimensional and of any length: NAME/values has their values one after the other,
    NAME/offsets where each row begins. Below, `stored` holds what `convert` returned: a list of rows, or a single
    array if they have one shape.

    `class Date(Array, kind="date")` registers a kind when it is imported. Files name the kind. Where no imported
    module and no entry point `slurmgpu.columns` has it, values are read as stored.
    """

    kind: ClassVar[str]
    is_tensor: ClassVar[bool] = True
    """Whether PyTorch gets the stored values, not the read ones."""
    arrow: ClassVar[str | None] = None
    """Arrow's name for the type of a row, such as "timestamp[us]"; None for plain numbers."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None = None

    def __init_subclass__(cls, kind: str | None = None) -> None:
        if kind is not None:
            cls.kind = kind
            KINDS.register(kind, cls)

    @abstractmethod
    def convert(self, value: Any) -> npt.NDArray[Any] | bytes:
        """A copy of `value` as stored; ValueError if anything but precision would be lost."""

    @abstractmethod
    def blank(self) -> npt.NDArray[Any] | bytes:
        """The stored value of an item without a row."""

    def arguments(self) -> dict[str, Any]:
        """The arguments that make this column again, as JSON values."""
        return {}

    def split(self, values: npt.NDArray[Any], bounds: Sequence[int]) -> Sequence[Any]:
        """The stored rows between consecutive `bounds`, for rows of any length."""
        return [values[first:last] for first, last in pairwise(bounds)]

    def read(self, stored: Any) -> Any:
        """The rows as users read them: a list, or an uncopied array if they have one shape."""
        return stored

    def plain(self, stored: Any) -> list[Any]:
        """The rows as JSON values."""
        return as_lists(stored) if self.shape is not None else list(map(as_lists, stored))

    def cells(self, stored: Any) -> list[Any]:
        """The rows as CSV cells; lists and booleans are written as JSON."""
        return self.plain(stored)

    @property
    def pandas(self) -> str | None:
        """The dtype of the rows in pandas; None to let pandas infer it."""
        return "object"
