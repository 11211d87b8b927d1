"""The plan of a run, as run.json has it.

Standard library only, because the worker, `status` and the merge all read it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, TypedDict

from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.run.submissions import Git
from slurmgpu.util.item_ranges import n_to_ends, spans_within
from slurmgpu.util.typed_json import check_kinds, check_objects

NO_RUN_FILE, GIVEN_RUN_FILE = "slurmgpu run", "slurmgpu.submit"
"""The names used instead of a run file's if there is none: all values came from the command line or from Python."""
RUN_FORMAT = "slurmgpu run"
RUN_VERSION = 1
SPARE_SHARE = 0.1
"""A worker takes a shard if its slowest one would fit into the time left, with this share of its time to spare."""
_BOUNDS = 2
"""A range has a start and a stop."""


class SourceRecord(TypedDict):
    """A source of items, as in `inputs.Source`."""

    path: str
    size_bytes: int
    mtime_ns: int
    sha256: str


PROMISED = -1
"""The size and time of a file that does not exist yet; its `sha256` is the fingerprint of its plan."""


class FileRecord(SourceRecord):
    """A file of an input, as in `inputs.InputFile`."""

    n_items: int
    source: SourceRecord | None


class InputRecord(TypedDict):
    """An input as run.json has it; inputs.InputSpec says what it means."""

    format: str
    files: list[FileRecord]
    n_items: int
    stride: int
    columns: list[str] | None
    ranges: list[list[int]] | None
    folders: list[str]
    repacked: bool


class Provenance(TypedDict):
    """The origin of a run. `container` are values that override [container] of the run file.

    `written` has a digest of each value in the run file that rows depend on, by its key.
    """

    run_file: str
    written: dict[str, str]
    versions: dict[str, str]
    git: Git | None
    container: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The frozen plan of a run: everything that its rows depend on, and the resources that were asked for first.

    `shard_items` consecutive items make a shard; the last may have fewer. `fingerprint` covers what the rows depend on.
    `keep` are fields of the items that rows keep, by column; `key` is the field that names an item.
    `look` is "look" or "probe" for a run of only some items of its input. Its items keep their indices in the input;
    here and in claims and names of shards, items count from 0 without gaps: `indices`, `place` and `shard_of` convert.
    `extends` are the fingerprints of runs of fewer items whose shards this run has taken.
    `scripts` are paths of the user's programs, which belong to the code. Tasks divide an item into `parts`.
    """

    name: str
    input: InputRecord
    input_digest: str
    n_items: int
    workload: str
    search_path: str
    settings: Mapping[str, Any]
    columns: Mapping[str, Any]
    batch_size: int
    shard_items: int
    seed: int
    lease_s: float
    margin_s: float
    auto_resubmit: int
    resources: Mapping[str, Any]
    slurm: Mapping[str, Any]
    merge: Mapping[str, Any]
    provenance: Provenance
    container: ContainerRecord | None = None
    processes: str = "one"
    placement: Sequence[str] = ()
    paths: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    sample_s: float = 5.0
    summarizes: bool = False
    exports: Sequence[str] = ()
    on_end: str | None = None
    html: bool = True
    retries: int = 0
    keep: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    track: Sequence[str] = ()
    look: str = ""
    extends: Sequence[str] = ()
    scripts: Sequence[str] = ()
    parts: int = 1

    @property
    def n_shards(self) -> int:
        """How many shards there are."""
        return -(-self.n_items // self.shard_items)

    def most_tasks(self, n_shards: int) -> int:
        """The most tasks that have work if `n_shards` shards are left."""
        return n_shards * self.parts

    def bounds(self, shard: int) -> tuple[int, int]:
        """First item of a shard, and the one after its last."""
        start = shard * self.shard_items
        return start, min(start + self.shard_items, self.n_items)

    @property
    def named_files(self) -> Sequence[SourceRecord]:
        """The files of the input as the run file names them: a repacked one, which is the run's own, by its source."""
        return [file["source"] or file for file in self.input["files"]]

    @property
    def has_promised_input(self) -> bool:
        """Whether another run, which this one waits for, writes a file of the input, and may write it again."""
        return any(file["size_bytes"] == PROMISED for file in self.input["files"])

    @property
    def is_probe(self) -> bool:
        """Whether this is a probe."""
        return self.look == "probe"

    @cached_property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """The indices of the run's items in the input, as (start, stop)."""
        return [(start, stop) for start, stop in self.input["ranges"] or ()] if self.look else [(0, self.n_items)]

    @cached_property
    def _ends(self) -> list[int]:
        """How many of the run's items there are up to the end of each range."""
        return n_to_ends(self.ranges)

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The indices in the input of the run's items `start` to `stop` - 1, as (start, stop)."""
        return spans_within(self.ranges, self._ends, start, stop)

    def indices(self, start: int, stop: int) -> Sequence[int]:
        """The indices of the run's items `start` to `stop` - 1 in the input."""
        if not self.look:
            return range(start, stop)
        return [index for span in self.spans(start, stop) for index in range(*span)]

    def n_before(self, index: int) -> int:
        """How many of the run's items have a smaller index in the input."""
        number = bisect_right(self.ranges, index, key=itemgetter(0))
        return self._ends[number - 1] - max(self.ranges[number - 1][1] - index, 0) if number else 0

    def place(self, index: int) -> int | None:
        """The place of an item among the run's, by its index in the input; None if the run does not have it."""
        place = self.n_before(index)
        return place if self.n_before(index + 1) > place else None

    def shard_of(self, index: int) -> int:
        """The shard of an item that the run has, by its index in the input."""
        place = self.place(index)
        return -1 if place is None else place // self.shard_items

    @cached_property
    def basis(self) -> Mapping[str, Any]:
        """Everything that the rows depend on, by the name of each part, as read back from run.json."""
        names = ("input_digest", "n_items", "workload", "settings", "columns", "batch_size", "shard_items", "seed")
        parts = {name: getattr(self, name) for name in (*names, "keep", "parts")}
        parts["ranges"] = self.input["ranges"] if self.look else None
        found: dict[str, Any] = json.loads(json.dumps(parts))  # JSON makes all keys text, which sort differently
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what the rows depend on; every shard carries it."""
        return hashlib.sha256(json.dumps(self.basis, sort_keys=True).encode()).hexdigest()[:32]

    def computes_same(self, other: Plan) -> bool:
        """Whether another plan has the same rows: all that they depend on, and how the input is read, is equal.

        The fingerprint does not say whether a file is read by lines or by records: `x.txt` may be `x.jsonl`.
        """
        mine, others = ([plan.input[key] for key in ("format", "columns", "folders")] for plan in (self, other))
        # Do not compare `basis`: a setting that is NaN differs from itself.
        return self.fingerprint == other.fingerprint and json.dumps(mine) == json.dumps(others)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints that its shards may carry."""
        return (self.fingerprint, *self.extends)

    def texts(self) -> Iterator[str]:
        """The texts among the settings, also those within tables and lists: they may name files, or modules."""
        todo: list[Any] = [self.settings]
        while todo:
            value = todo.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, Mapping):
                todo += [*value.values()][::-1]
            elif isinstance(value, list):
                todo += value[::-1]

    def to_json(self) -> dict[str, Any]:
        """The content of run.json."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"format": RUN_FORMAT, "version": RUN_VERSION, "fingerprint": self.fingerprint, **fields}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """The plan in a run.json. ValueError if a value is missing or of a wrong type."""
        check_kinds(value, cls, cls.__dataclass_fields__)
        check_objects("its input: ", [value["input"]], InputRecord)
        if not all(len(each) == _BOUNDS for each in value["input"]["ranges"] or ()):
            raise ValueError(f"its input: ranges is {value['input']['ranges']!r:.80}")
        if not isinstance(value["provenance"].get("run_file"), str):
            raise ValueError("its provenance lacks run_file")
        for name in ("n_items", "shard_items", "batch_size", "parts"):
            if value[name] < 1:
                raise ValueError(f"its {name} is {value[name]}")
        return cls(**{name: value[name] for name in cls.__dataclass_fields__})
