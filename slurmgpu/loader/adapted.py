"""A user's workload with typed optional members; the core uses nothing else of it."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import IO, TYPE_CHECKING, Any

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.loader.members import is_collection_of, is_mapping_to, is_positive, read_member, takes
from slurmgpu.loader.names import title_of
from slurmgpu.workload import Item, Placement, Row, Share, TaskContext

if TYPE_CHECKING:
    from slurmgpu.results import Merged
    from slurmgpu.shards.columns import Column


@dataclass(frozen=True)
class Adapted:
    """A user's workload with typed optional members.

    No other code reads attributes of the user's object. Each member is read once, on first use, because a property may
    read files that only planning needs. None counts as absent. A member of a wrong type raises SlurmGPUError. `name` is
    the full name of the class. `call` computes the rows of items; if the workload has `prepare`, its second argument
    is what that returned for them.
    """

    user: Any
    name: str
    call: Callable[..., Sequence[Row | ItemError]]

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns that a row has."""
        found = getattr(self.user, "columns", None)
        if not isinstance(found, Mapping):
            raise SlurmGPUError(
                f"{title_of(self.name)} has no 'columns'; expected a mapping of name to Array, Text, Json or Ragged."
            )
        return found

    def load(self, task: TaskContext) -> None:
        """Let the workload load its model, if it has a `load`; called once for each worker."""
        if (load := self._read_method("load", "task")) is not None:
            load(task)

    def check(self) -> None:
        """Raise SlurmGPUError for an invalid member that only jobs use, not planning."""
        _ = (
            self._read_method("load", "task"),
            self.sort_key,
            self.prepare,
            self.resumes,
            self.most_parts,
            self.summarize,
            self.exports,
            self.files_of_item,
            self.fetch,
            self.default_items,
            self.awaits,
        )

    @cached_property
    def batch_size(self) -> int | None:
        """The largest number of items in a call; None if the class does not set it."""
        expected = "a whole number of at least 1. Set it in the class or in [workload]"
        found: int | None = self._read("batch_size", expected, is_positive)
        return found

    @cached_property
    def takes_one(self) -> bool:
        """Whether each call gets a single item, whatever the run file says."""
        return self._read_flag("takes_one")

    @cached_property
    def resumes(self) -> bool:
        """Whether it saves the progress of an item and raises Interrupted, so that a later task continues it."""
        return self._read_flag("resumes")

    @cached_property
    def most_parts(self) -> int:
        """The most parts into which `task.divide` can cut an item if there are fewer items than tasks."""
        expected = "a whole number of at least 1"
        return self._read("most_parts", expected, is_positive) or 1

    @cached_property
    def processes(self) -> str:
        """The processes of a task without `place`: `one` or `per-gpu`."""
        return self._read("processes", "'one' or 'per-gpu'", ("one", "per-gpu").__contains__) or "one"

    @cached_property
    def fields(self) -> Collection[str]:
        """Names of the item fields that it reads; planning looks for them in the input."""
        return self._read("fields", "a list of names", is_collection_of(str)) or ()

    @cached_property
    def not_fields(self) -> Collection[str]:
        """Names that mean something else in its settings; planning refuses items with a field of that name."""
        return self._read("not_fields", "a list of names", is_collection_of(str)) or ()

    @cached_property
    def kept_fields(self) -> Collection[str]:
        """Names of item fields that its rows keep, as if `keep` in the run file named them."""
        return self._read("kept_fields", "a list of names", is_collection_of(str)) or ()

    @cached_property
    def advice(self) -> Mapping[str, str]:
        """A sentence for each field, to add to the error if the input lacks the field."""
        return self._read("advice", "a mapping of fields to sentences", is_mapping_to(str)) or {}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Absolute paths that a task reads besides the input, to be bound into an image."""
        found = self._read("paths", "a list of paths", is_collection_of(str, os.PathLike)) or ()
        return tuple(str(path.absolute()) for path in map(Path, found))

    @cached_property
    def awaits(self) -> tuple[str, ...]:
        """Directories of incomplete runs whose merged files its tasks read; planning refuses them without --after."""
        return tuple(map(str, self._read("awaits", "a list of paths", is_collection_of(str, os.PathLike)) or ()))

    @cached_property
    def scripts(self) -> tuple[str, ...]:
        """Absolute paths of the user's programs that it starts: a submission keeps them with the code."""
        found = self._read("scripts", "a list of paths", is_collection_of(str, os.PathLike)) or ()
        return tuple(str(path.resolve()) for path in map(Path, found))

    @cached_property
    def environ(self) -> dict[str, str]:
        """Environment variables for workers."""
        is_good = is_mapping_to(str, int, float, os.PathLike)
        found = self._read("environ", "a mapping of names to texts", is_good) or {}
        return {name: str(value) for name, value in found.items()}

    @cached_property
    def frozen_settings(self) -> Mapping[str, Any]:
        """Values for the plan, instead of settings that refer to something that may change."""
        return self._read("frozen_settings", "a mapping of settings to values", is_mapping_to(object)) or {}

    @cached_property
    def default_items(self) -> Sequence[Mapping[str, Any]]:
        """The items for a run file that has neither input nor [sweep]."""
        return self._read("default_items", "a list of mappings", is_collection_of(Mapping)) or ()

    @cached_property
    def exports(self) -> Mapping[str, Callable[[Merged, IO[bytes]], object]]:
        """Functions that write the workload's own formats; each may return a text that says what it wrote."""
        expected = "a mapping of formats to functions of the merged file and an open one"
        return self._read("exports", expected, is_mapping_to(Callable)) or {}

    @cached_property
    def place(self) -> Callable[[Share], Placement] | None:
        """Chooses how a task uses its resources."""
        return self._read_method("place", "share")

    @cached_property
    def check_input(self) -> Callable[[Sequence[Path], int], Sequence[str] | None] | None:
        """Raises SlurmGPUError for an unusable input, or returns lines about it for `submit --dry-run`."""
        return self._read_method("check_input", "files", "n_items")

    @cached_property
    def check_here(self) -> Callable[[], object] | None:
        """Refuses, at planning, a machine that lacks what tasks need; not called if tasks run in an image."""
        return self._read_method("check_here")

    @cached_property
    def sort_key(self) -> Callable[[Item], Any] | None:
        """Sorts a shard's items before they are cut into batches."""
        return self._read_method("sort_key", "item")

    @cached_property
    def prepare(self) -> Callable[[Sequence[Item]], Any] | None:
        """Prepares the next call's second argument from its items, while the current call computes."""
        found: Callable[[Sequence[Item]], Any] | None = self._read_method("prepare", "items")
        if found is not None and not takes(self.user, 2):
            raise SlurmGPUError(
                f"{title_of(self.name)} has a method prepare(self, items), but its __call__ does not take its result;"
                " expected __call__(self, items, prepared). Rename `prepare` if it is for something else."
            )
        return found

    @cached_property
    def summarize(self) -> Callable[[Merged], Mapping[str, Any]] | None:
        """Computes JSON for the report from the merged file."""
        return self._read_method("summarize", "merged")

    @cached_property
    def explain_misfit(self) -> Callable[[Any], str] | None:
        """A sentence to add to the error of an item whose row does not fit the columns."""
        return self._read_method("explain_misfit", "row")

    @cached_property
    def files_of_item(self) -> Callable[[int], Collection[str]] | None:
        """The files that belong to an item's row, by the item's index, as paths relative to the run directory."""
        return self._read_method("files_of_item", "index")

    @cached_property
    def fetch(self) -> Callable[[], object] | None:
        """Downloads what tasks need and says what it downloaded; `check --fetch` calls it."""
        return self._read_method("fetch")

    def _read(self, attribute: str, expected: str, is_good: Callable[[Any], bool]) -> Any:
        return read_member(self.user, self.name, attribute, expected, is_good)

    def _read_flag(self, attribute: str) -> bool:
        return bool(self._read(attribute, "True or False", lambda value: isinstance(value, bool)))

    def _read_method(self, attribute: str, *arguments: str) -> Callable[..., Any] | None:
        expected = f"a method, {attribute}({', '.join(('self', *arguments))})"
        found: Callable[..., Any] | None = self._read(attribute, expected, lambda value: takes(value, len(arguments)))
        return found


def adapt(user: Any, name: str) -> Adapted:
    """Wrap a user's workload; `name` is the full name of its class."""
    return Adapted(user, name, user)


def near_misses(workload: Adapted) -> list[str]:
    """Warnings about public members of the user's class with a name close to one that slurmgpu looks for.

    Settings, and names that the code of the class or its module uses, are left out: they have another purpose.
    """
    cls = type(workload.user)
    classes = [each for each in cls.__mro__ if each.__module__ == cls.__module__]
    known = {name for name, value in vars(Adapted).items() if isinstance(value, cached_property)}
    known |= {"texts", "template", "from_args", "columns", "load"}
    found = {name for each in classes for name in vars(each) if not name.startswith("_")}
    found -= {*known, *inspect.signature(cls).parameters}
    close = {name: difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7) for name in sorted(found)}
    if not any(close.values()):
        return []
    values = [*vars(sys.modules[cls.__module__]).values(), *(each for base in classes for each in vars(base).values())]
    used = {name for value in values for name in _names_used(value)}
    return [
        f"{title_of(workload.name)}: nothing uses {name!r}; slurmgpu looks for {meant!r}. Rename it, or begin its name "
        f"with _ if it is for something else."
        for name, [meant] in ((name, match) for name, match in close.items() if match)
        if name not in used
    ]


def _names_used(value: Any) -> Iterator[str]:
    """The names that the code of a function, method or property reads."""
    for function in (value, *(getattr(value, name, None) for name in ("fget", "func", "__func__"))):
        todo = [code] if isinstance(code := getattr(function, "__code__", None), CodeType) else []
        while todo:
            code = todo.pop()
            yield from code.co_names
            todo += [each for each in code.co_consts if isinstance(each, CodeType)]
