"""The interface of workloads: what users implement, and the types that slurmgpu passes to it and expects from it.

The worker imports this: standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slurmgpu.errors import ItemError, Retry

if TYPE_CHECKING:
    from slurmgpu.shards.columns import Column

FETCH = "slurmgpu check --fetch {run_file}"
"""The `first` of a `Template` whose model must be downloaded."""

Row = Mapping[str, Any]
"""The values of an item, by column."""


@dataclass(frozen=True)
class Item:
    """One record of the input: its 0-based `index`, its `data`, and its own `seed`.

    `item[name]`, `item.get(name)` and `name in item` are those of `data`.
    """

    # Each item is made twice, and __slots__ takes two thirds of the time. With dataclass(slots=True), setting a name
    # that is no field would raise a TypeError about `super`.
    __slots__ = ("data", "index", "run_seed")
    index: int
    data: Mapping[str, Any]
    run_seed: int

    def __init__(self, index: int, data: Mapping[str, Any], run_seed: int = 0) -> None:
        _set_index(self, index)
        _set_data(self, data)
        _set_run_seed(self, run_seed)

    def __setstate__(self, state: Sequence[Mapping[str, Any] | None]) -> None:
        # A copy or a pickle has two parts: the __dict__ of a user's subclass, and the slots.
        for values in state:
            for name, value in (values or {}).items():
                object.__setattr__(self, name, value)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        return name in self.data

    # Without it, Python would iterate by __getitem__ from 0.
    __iter__ = None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the field `name`, or `default` if the item has no such field."""
        return self.data.get(name, default)

    @property
    def seed(self) -> int:
        """A 63-bit number derived from the run's seed and the index: the same on every GPU and in every attempt."""
        digest = hashlib.blake2b(f"{self.run_seed}:{self.index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


_set_index, _set_data, _set_run_seed = (vars(Item)[name].__set__ for name in ("index", "data", "run_seed"))


@dataclass(frozen=True)
class TaskContext:
    """The process that a workload runs in: the argument of `load`.

    `device` is PyTorch's name of the process's device, `cuda:0` or `cpu`; `gpus` is the number of GPUs that it sees.
    `rank`, `world_size` and `local_rank` are as in torchrun; 0, 1 and 0 for a worker of one process.

    `note(name, value)` writes a number into the notes of the current shard, such as a reduced batch size.
    `log(step, loss=0.3)` logs numbers, which `slurmgpu track` sends to a tracker; rank 0's are kept. `progress(text)`
    reports saved progress of the current item, which `status` shows; `tell(text)` reports progress that is not saved
    yet. `stopping()` is true on rank 0 once the task has to end: a workload that `resumes` then saves its progress and
    raises Interrupted.

    `divide(things, compute)` returns `compute(things)`, a list with a JSON value for each thing; if the plan has
    several `parts`, other tasks compute some of them (`Adapted.most_parts`). `code` is the digest of the snapshot of
    the user's code; None if there is no snapshot. `is_again()`, on rank 0, says whether the current items already have
    rows or errors, which `resubmit --failed` or `--other-code` replaces.
    """

    device: str
    gpus: int
    run_dir: Path
    attempt: str = "debug"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    note: Callable[[str, int], None] = lambda name, value: None
    stopping: Callable[[], bool] = lambda: False
    progress: Callable[[str], None] = lambda text: None
    tell: Callable[[str], None] = lambda text: None
    log: Callable[..., None] = lambda step, **values: None
    code: str | None = None
    is_again: Callable[[], bool] = lambda: False
    parts: int = 1
    divide: Callable[[Sequence[Any], Callable[[Sequence[Any]], Sequence[Any]]], Sequence[Any]] = (
        lambda things, compute: json.loads(part_as_json(things, compute)) if len(things) else []
    )


@dataclass(frozen=True)
class Share:
    """The resources of each task, as far as planning knows them.

    `gpus` is 0 for tasks that compute on CPUs. `gpu_memory` is in bytes, None if unknown. `processes` is the value in
    the run file, `one` or `per-gpu`; None leaves the choice to the workload. `slots` is the number of processes for
    `per-gpu`, also on CPUs.
    """

    gpus: int
    nodes: int = 1
    gpu_memory: int | None = None
    gpu_type: str | None = None
    processes: str | None = None
    slots: int = 1


@dataclass(frozen=True)
class Placement:
    """How a workload uses its share: `processes` is `one` or `per-gpu`, and `lines` explain the choice to the user."""

    processes: str = "one"
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Template:
    """What `init` writes for a workload: the lines under [settings], or a file with them, the input and the GPUs.

    `input` is None for a workload that needs none. `items` are examples, which are written to it; `files` maps names to
    files that are copied beside the run file. `first` is a command that prepares what else the run needs, with
    `{run_file}` in it.
    """

    settings: str | Path
    input: str | None = "items.jsonl"
    gpus: int = 4
    array: bool = True
    items: Sequence[Mapping[str, Any]] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    first: str | None = None


@dataclass
class Translated:
    """A run file translated from another script's flags; `lines` say for each flag what it became.

    `items` are written to a file beside it. `resources` are `gpus` and `array`, as in a `Template`.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    input: str | None = "items.jsonl"
    items: list[dict[str, Any]] | None = None
    resources: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)


class Workload(Protocol):
    """What users implement: see docs/how-to/write-a-workload.md. `loader.adapted.Adapted` has the optional members."""

    # Properties, and a parameter of any name, so that a class with `columns = {...}` conforms to a type checker. At run
    # time there are none: the `__init__` of a derived class sets both.
    if TYPE_CHECKING:

        @property
        def columns(self) -> Mapping[str, Column]:
            """The columns of a row."""

        @property
        def batch_size(self) -> int:
            """The largest number of items in a call."""

    def __call__(self, items: Sequence[Item], /) -> Sequence[Row | ItemError | Retry]:
        """One row, ItemError or Retry for each item, in order."""


def part_as_json(things: Sequence[Any], compute: Callable[[Sequence[Any]], Sequence[Any]]) -> bytes:
    """The values of some things, as JSON. Values always go through JSON, whether one task computes them or several."""
    values = list(compute(things))
    if len(values) != len(things):
        raise ValueError(f"a part of {len(things)} has {len(values)} values; expected one for each")
    try:
        return json.dumps(values).encode()
    except TypeError as error:
        raise TypeError(
            f"{error}: `divide` takes values that JSON can hold; convert NumPy's with `.tolist()`"
        ) from error
