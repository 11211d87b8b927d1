"""The interface of workloads, and how a name in a run file becomes one.

The worker imports this: standard library only.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import reprlib
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, TYPE_CHECKING, Any, Protocol

from slurmgpu.code import importer
from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.util.exceptions import described, message_of
from slurmgpu.util.home import expanded

if TYPE_CHECKING:
    from slurmgpu.results import Merged
    from slurmgpu.shards.columns import Column

BUILT_IN = {
    "embed": "slurmgpu.workloads.embed:Embed",
    "generate": "slurmgpu.workloads.generate:Generate",
    "classify": "slurmgpu.workloads.classify:Classify",
    "score": "slurmgpu.workloads.score:Score",
    "perplexity": "slurmgpu.workloads.perplexity:Perplexity",
    "judge": "slurmgpu.workloads.judge:Judge",
    "collect": "slurmgpu.workloads.collect:Collect",
    "tracin": "slurmgpu.workloads.tracin:Tracin",
    "train": "slurmgpu.workloads.train:Train",
    "command": "slurmgpu.workloads.command:Command",
}
"""Short names of the built-in workloads, which are known without any metadata of an installation."""

FETCH = "slurmgpu check --fetch {run_file}"
"""The `first` of a `Template` whose model is downloaded."""

ENTRY_POINTS = "slurmgpu.workloads"
"""The group of entry points by which a package gives its workloads short names."""

FILE = "file:"
TEXTS = "a list of names of settings, as an attribute of the class"

Row = Mapping[str, Any]


_SHORT_NAMES = {name: short for short, name in BUILT_IN.items()} | {"slurmgpu.workloads.function:Function": "function"}


def title_of(full_name: str, noun: str = "Workload") -> str:
    """A workload in messages: a built-in one by its short name, such as "command", another by `noun` and its name."""
    return _SHORT_NAMES.get(full_name) or f"{noun} {full_name}"


@dataclass(frozen=True)
class Item:
    """One record of the input: its 0-based `index`, its `data`, and its own `seed`."""

    index: int
    data: Mapping[str, Any]
    run_seed: int = 0

    @property
    def seed(self) -> int:
        """A 63-bit number derived from the run's seed and the index: the same on every GPU and in every attempt."""
        digest = hashlib.blake2b(f"{self.run_seed}:{self.index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def copy(self) -> Item:
        """The same item with data of its own: what is changed in them, also in a list in them, is not in the item's."""
        try:
            data = {name: _copied(value) for name, value in self.data.items()}
        except RecursionError:  # JSON may be nested more deeply than Python's calls
            data = {**self.data}
        return Item(self.index, data, self.run_seed)


_UNCHANGEABLE = frozenset({str, int, float, bool, bytes, type(None)})


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is list:
        return [each if type(each) in _UNCHANGEABLE else _copied(each) for each in value]
    if kind is dict:
        return {key: each if type(each) in _UNCHANGEABLE else _copied(each) for key, each in value.items()}
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise
    except Exception:  # an input format of another package may give what cannot be copied, as an open file
        return value


def part_as_json(things: Sequence[Any], compute: Callable[[Sequence[Any]], Sequence[Any]]) -> bytes:
    """The values of some things that are divided, as JSON, from which every task takes them, also one that is alone."""
    values = list(compute(things))
    if len(values) != len(things):
        raise ValueError(f"a part of {len(things)} has {len(values)} values; expected one for each")
    try:
        return json.dumps(values).encode()
    except TypeError as error:
        raise TypeError(
            f"{error}: `divide` takes values of what JSON holds; `.tolist()` makes them of NumPy's"
        ) from error


@dataclass(frozen=True)
class TaskContext:
    """The process that a workload runs in: the argument of `load`.

    `device` is PyTorch's name of the process's device, `cuda:0` or `cpu`; `gpus` is how many GPUs it sees.
    `rank`, `world_size` and `local_rank` are those of torchrun; 0, 1 and 0 for a worker of one process.
    `note(name, value)` writes a number into the notes of the current shard, such as a reduced batch size.
    `stopping()` is true on rank 0 once the task has to end: a workload that `resumes` then saves its progress and
    raises Interrupted. `progress(text)` reports saved progress of the current item, which `status` shows;
    `tell(text)` reports progress that is not saved yet. `log(step, loss=0.3)` logs numbers, which `slurmgpu track`
    shows to a tracker; rank 0's are kept. `divide(things, compute)` gives what `compute(things)` gives, a list with a
    JSON value for each; where the plan has several `parts`, other tasks compute some of them, see `Adapted.most_parts`.
    `code` is the digest of the snapshot of the user's code, which the rows are by; None if there is no snapshot.
    `is_again()`, on rank 0, says whether the items in hand have rows or errors, which `resubmit --failed` or
    `--other-code` replaces.
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
    """The proposal of `init` for a workload: the lines under [settings], or a file with them, input and GPUs.

    `input` is None for a workload that needs none. `items` are examples, which are written to it; `files` maps names to
    files that are copied beside the run file. `first` is a command that makes what else the run needs, of `{run_file}`.
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
    """The run file that stands for another script's flags; `lines` say for each flag what it became.

    `items` are written to a file beside it. `resources` are `gpus` and `array`, as in a `Template`.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    input: str | None = "items.jsonl"
    items: list[dict[str, Any]] | None = None
    resources: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)


class Workload(Protocol):
    """What users write: see docs/how-to/write-a-workload.md. `Adapted` lists the optional members."""

    columns: Mapping[str, Column]
    batch_size: int

    def __call__(self, items: Sequence[Item]) -> Sequence[Row | ItemError]:
        """One row, or ItemError, for each item, in order."""


@dataclass(frozen=True)
class Adapted:
    """A user's workload with typed optional members.

    No other code reads attributes of the user's object. Each member is read once, on first use: a property may read
    files, which planning needs and a worker does not. None counts as absent. A member of a wrong type raises
    SlurmGPUError. `name` is the full name of the class; `call` computes rows, of items and, if the workload has
    `prepare`, of what that returned for them.
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
                f"{title_of(self.name)} has no 'columns': a mapping of name to Array, Text, Json or Ragged."
            )
        return found

    def load(self, task: TaskContext) -> None:
        """Let the workload load its model, if it has a `load`; called once for each worker."""
        if (load := self._read_method("load", "task")) is not None:
            load(task)

    def check(self) -> None:
        """Raise SlurmGPUError for a bad member that planning does not use but jobs do."""
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
        )

    @cached_property
    def batch_size(self) -> int | None:
        """The largest number of items in a call."""
        expected = "a whole number of at least 1. Set it in the class or in [workload]"
        found: int | None = self._read("batch_size", expected, lambda size: _is_a(int, size) and size > 0)
        return found

    @cached_property
    def takes_one(self) -> bool:
        """Whether each call gets a single item, whatever the run file says."""
        return self._read_flag("takes_one")

    @cached_property
    def resumes(self) -> bool:
        """Whether it saves the progress of an item and raises Interrupted to leave it for a later task."""
        return self._read_flag("resumes")

    @cached_property
    def most_parts(self) -> int:
        """Into how many parts `task.divide` can cut one item, at most, where there are fewer items than tasks."""
        expected = "a whole number of at least 1"
        return self._read("most_parts", expected, lambda parts: _is_a(int, parts) and parts > 0) or 1

    @cached_property
    def processes(self) -> str:
        """How many processes a task has without `place`: `one` or `per-gpu`."""
        return self._read("processes", "'one' or 'per-gpu'", ("one", "per-gpu").__contains__) or "one"

    @cached_property
    def fields(self) -> Collection[str]:
        """Names of the item fields that it reads; planning looks for them in the input."""
        return self._read("fields", "a list of names", _is_collection_of(str)) or ()

    @cached_property
    def not_fields(self) -> Collection[str]:
        """Names that mean something else to it; planning refuses items with such a field."""
        return self._read("not_fields", "a list of names", _is_collection_of(str)) or ()

    @cached_property
    def kept_fields(self) -> Collection[str]:
        """Names of item fields that its rows keep, as if `keep` in the run file named them."""
        return self._read("kept_fields", "a list of names", _is_collection_of(str)) or ()

    @cached_property
    def advice(self) -> Mapping[str, str]:
        """By field, a sentence to add to the error if the input lacks the field."""
        return self._read("advice", "a mapping of fields to sentences", _is_mapping_to(str)) or {}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Absolute paths that a task reads besides the input, to be bound into an image."""
        found = self._read("paths", "a list of paths", _is_collection_of(str, os.PathLike)) or ()
        return tuple(str(path.absolute()) for path in map(Path, found))

    @cached_property
    def scripts(self) -> tuple[str, ...]:
        """Absolute paths of the user's programs that it starts: they belong to the code that a submission keeps."""
        found = self._read("scripts", "a list of paths", _is_collection_of(str, os.PathLike)) or ()
        return tuple(str(path.resolve()) for path in map(Path, found))

    @cached_property
    def environ(self) -> dict[str, str]:
        """Environment variables for workers."""
        is_good = _is_mapping_to(str, int, float, os.PathLike)
        found = self._read("environ", "a mapping of names to texts", is_good) or {}
        return {name: str(value) for name, value in found.items()}

    @cached_property
    def frozen_settings(self) -> Mapping[str, Any]:
        """Values that the plan keeps in place of settings that refer to something that may change."""
        return self._read("frozen_settings", "a mapping of settings to values", _is_mapping_to(object)) or {}

    @cached_property
    def default_items(self) -> Sequence[Mapping[str, Any]]:
        """The items of a run file with neither input nor [sweep]."""
        return self._read("default_items", "a list of mappings", _is_collection_of(Mapping)) or ()

    @cached_property
    def exports(self) -> Mapping[str, Callable[[Merged, IO[bytes]], object]]:
        """Functions that write the workload's own formats; one may return a text that says what it wrote."""
        expected = "a mapping of formats to functions of the merged file and an open one"
        return self._read("exports", expected, _is_mapping_to(Callable)) or {}

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
        """Refuses, at planning, a machine that lacks what tasks need; not called where they run in an image."""
        return self._read_method("check_here")

    @cached_property
    def sort_key(self) -> Callable[[Item], Any] | None:
        """Sorts a shard's items before they are cut into batches."""
        return self._read_method("sort_key", "item")

    @cached_property
    def prepare(self) -> Callable[[Sequence[Item]], Any] | None:
        """Makes of the next call's items what that call gets as its second argument, while the present one computes."""
        found: Callable[[Sequence[Item]], Any] | None = self._read_method("prepare", "items")
        if found is not None and not _takes(self.user, 2):
            raise SlurmGPUError(
                f"{title_of(self.name)} has a method prepare(self, items), but its __call__ does not take what that"
                " returns; expected __call__(self, items, prepared). Rename `prepare` if it is for something else."
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
        """The files that an item's row stands for, by the item's index, as paths relative to the run directory."""
        return self._read_method("files_of_item", "index")

    @cached_property
    def fetch(self) -> Callable[[], object] | None:
        """Downloads what tasks need and says what it downloaded; `check --fetch` calls it."""
        return self._read_method("fetch")

    def _read(self, attribute: str, expected: str, is_good: Callable[[Any], bool]) -> Any:
        return _read(self.user, self.name, attribute, expected, is_good)

    def _read_flag(self, attribute: str) -> bool:
        return bool(self._read(attribute, "True or False", lambda value: isinstance(value, bool)))

    def _read_method(self, attribute: str, *arguments: str) -> Callable[..., Any] | None:
        expected = f"a method, {attribute}({', '.join(('self', *arguments))})"
        found: Callable[..., Any] | None = self._read(attribute, expected, lambda value: _takes(value, len(arguments)))
        return found


def adapt(user: Any, name: str) -> Adapted:
    """Wrap a user's workload; `name` is the full name of its class."""
    return Adapted(user, name, user)


def near_misses(workload: Adapted) -> list[str]:
    """Sentences on public members of the user's class whose name is close to one that slurmgpu looks for.

    Settings and names that the code of the class or its module uses are left out: those have another purpose.
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


def _read(user: Any, name: str, attribute: str, expected: str, is_good: Callable[[Any], bool]) -> Any:
    value = getattr(user, attribute, None)
    if isinstance(value, Iterator):
        value = tuple(value)
    if value is not None and not is_good(value):
        raise SlurmGPUError(f"{title_of(name)} has {attribute} = {_shown(value)}; expected {expected}.")
    return value


def _shown(value: Any) -> str:
    if inspect.ismethod(value):
        return f"a method, {value.__name__}{inspect.signature(value.__func__)}"
    if isinstance(value, (property, cached_property)):
        return "a property"
    return reprlib.repr(value)


def _is_a(kind: type, value: Any) -> bool:
    """Like isinstance, but True and False are not numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_many(value: Any, kinds: tuple[type, ...]) -> bool:
    is_many = isinstance(value, Iterable) and isinstance(value, Sized) and not isinstance(value, (str, bytes))
    return is_many and all(isinstance(each, kinds) for each in value)


def _is_collection_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: _is_many(value, kinds)


def _is_mapping_to(*kinds: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and _is_many(value, (str,)) and _is_many(value.values(), kinds)


def _takes(value: Any, n_arguments: int) -> bool:
    """Whether a value can be called with that many arguments; True if Python cannot tell, as for some built-ins."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*[None] * n_arguments)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


class UnknownSettingError(SlurmGPUError):
    """A workload has no setting `name`."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


def installed_workloads() -> dict[str, dict[str, str]]:
    """Workloads of other packages: by short name, full names and the distribution of each."""
    import importlib.metadata  # takes long

    found: dict[str, dict[str, str]] = {}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS)):
        full_name = point.value.partition("[")[0].replace(" ", "")
        if BUILT_IN.get(point.name) != full_name:
            found.setdefault(point.name, {})[full_name] = point.dist.name if point.dist else "a package"
    return found


def hidden_by_built_in(use: str) -> list[str]:
    """A sentence for each installed package that has a workload of the same name as the built-in `use`."""
    others = installed_workloads().get(use, {}) if use in BUILT_IN else {}
    return [
        f'use = "{use}" is the built-in workload; {package} has one of the same name: use = "{full_name}".'
        for full_name, package in others.items()
    ]


def _of_a_package(use: str) -> str:
    """The full name of an installed package's workload of this short name."""
    installed = installed_workloads()
    others = installed.get(use)
    if others is None:
        known = {*BUILT_IN, *installed}
        raise SlurmGPUError(
            f"Workload {use!r} is neither built in, nor of an installed package, nor of the form "
            f"'package.module:Class' or 'file.py:Class'.{did_you_mean(use, known)}"
        )
    [(full_name, package), *more] = others.items()
    if more:
        offered = " and ".join(f"{name} of {package}" for name, package in others.items())
        raise SlurmGPUError(f"Workload {use!r} may be {offered}. Write the full name of one.")
    if not re.fullmatch(r"[\w.]+:\w+", full_name):
        raise SlurmGPUError(
            f"Workload {use!r}: the entry point of {package} is {full_name!r}; expected 'package.module:Class'."
        )
    return full_name


def resolve_use(use: str, base: Path) -> str:
    """The full name of a workload that a run file in `base` names: `package.module:Class` or `/path/to/file.py:Class`.

    A short name is looked up among the built-in workloads, then among installed packages' entry points.
    """
    full = BUILT_IN.get(use) or (use if ":" in use else _of_a_package(use))
    module, colon, name = full.rpartition(":")
    if not colon or not module or not name.isidentifier():
        raise SlurmGPUError(
            f"Workload {use!r} is not of the form 'package.module:Class' or 'file.py:Class'."
            + did_you_mean(use, BUILT_IN)
        )
    if module.endswith(".py"):
        path = (base / expanded(module)).resolve()
        if not path.is_file():
            raise SlurmGPUError(f"Workload {use!r}: there is no file {path}.")
        return f"{path}:{name}"
    return full


def load_class(full_name: str, search_path: Path) -> type:
    """Import a class by its full name, with `search_path` on `sys.path` as Python does for a script's folder."""
    module_name, _, class_name = full_name.rpartition(":")
    if str(search_path) not in sys.path:
        sys.path.insert(0, str(search_path))
    module = import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    found = getattr(module, class_name, None)
    if inspect.isroutine(found):
        raise SlurmGPUError(
            f"{module_name}: {class_name} is a function, and a run file names a class. A function is mapped from "
            f"Python, without a run file: slurmgpu.map({class_name}, items), where items may be the path of the input."
        )
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise SlurmGPUError(f"{module_name} has no class {class_name!r}." + did_you_mean(class_name, classes))
    if "__call__" not in _members(found):
        raise SlurmGPUError(f"{title_of(full_name)}: the class has no method '__call__', which every workload needs.")
    return found


def build(full_name: str, settings: Mapping[str, Any], search_path: Path) -> Adapted:
    """Make a workload with checked settings. SlurmGPUError names the workload and the wrong setting."""
    cls = load_class(full_name, search_path)
    _check_names(full_name, cls, settings)
    try:
        workload = adapt(cls(**settings), full_name)
    except (ValueError, TypeError, ItemError) as error:
        raise SlurmGPUError(f"{title_of(full_name)} refuses its settings: {message_of(error)}") from error
    _ = workload.columns  # raises if missing
    return workload


def template_of(use: str, base: Path) -> Template:
    """The class's `template`, which `init` proposes."""
    expected = "a text, the lines under [settings], a Path to them, or a Template, as an attribute of the class"
    found = _read_class(use, base, "template", expected, lambda value: isinstance(value, (str, Path, Template)))
    return found if isinstance(found, Template) else Template(found or "")


def translator_of(use: str, base: Path) -> Callable[[str, Path, str], Translated] | None:
    """The class's `from_args`, which `init --from-args` calls; None if it replaces no script."""
    expected = "a static method, from_args(text, folder, stem)"
    found: Callable[..., Any] | None = _read_class(use, base, "from_args", expected, lambda value: _takes(value, 3))
    return found


def _read_class(use: str, base: Path, attribute: str, expected: str, is_good: Callable[[Any], bool]) -> Any:
    full_name = resolve_use(use, base)
    with at_planning(full_name):
        cls = load_class(full_name, base)
    return _read(cls, full_name, attribute, expected, is_good)


def texts_of_files(full_name: str, cls: type, settings: Mapping[str, Any]) -> dict[str, str]:
    """For each setting in the class's `texts` with a value like `file:PATH`, the content of that file.

    The plan keeps the text: a later change of the file changes no row.
    """
    found = {}
    texts: Collection[str] = _read(cls, full_name, "texts", TEXTS, _is_collection_of(str)) or ()
    for name in texts:
        value = settings.get(name)
        if isinstance(value, str) and value.startswith(FILE):
            path = expanded(value.removeprefix(FILE))
            try:
                found[name] = path.read_text(encoding="utf-8").removesuffix("\n")
            except (OSError, ValueError) as error:
                raise SlurmGPUError(
                    f"{name} is {value!r}, and {path.absolute()} cannot be read: {error}. "
                    f"Expected a text, or {FILE!r} and the path of one, relative to the run file."
                ) from error
    return found


@contextlib.contextmanager
def at_planning(full_name: str) -> Iterator[None]:
    """Turn a failed import into a SlurmGPUError: only the image may have what is missing here."""
    try:
        yield
    except SyntaxError as error:
        raise SlurmGPUError(
            f"{title_of(full_name)}: {error.filename}, line {error.lineno}, is not Python: {error.msg}. "
            f"Correct it there, and submit again."
        ) from error
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name is None:
            raise SlurmGPUError(
                f"{title_of(full_name)}: {_users_line(error)}, has {described(error)}. "
                f"Correct it there, and submit again."
            ) from error
        raise SlurmGPUError(
            f"{title_of(full_name)} needs the module {error.name!r}, which is not installed here. Planning imports the "
            f"workload on this machine, outside of any image: import it in `load`, or install it here as well. "
            f"It is imported at {_users_line(error)}."
        ) from error


def _users_line(error: BaseException) -> str:
    """The last file and line of a failed import outside of Python's own and installed packages."""
    others = tuple(str(Path(module.__file__ or "").parent) for module in (contextlib, sys.modules["slurmgpu"]))
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if not frame.filename.startswith(("<", *others))]
    last = (mine or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise SlurmGPUError(
                f"There is no module {error.name!r} on the path for workload module {name!r}."
            ) from error
        raise


def import_file(path: Path) -> ModuleType:
    """The module in a Python file."""
    name = importer.name_of_file(path)
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path, loader=importer.loader_of(name, path))
    if spec is None or spec.loader is None:
        raise SlurmGPUError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _members(cls: type) -> set[str]:
    # `callable(getattr(cls, "__call__"))` is true for every class, through its metaclass.
    return {name for base in cls.__mro__ if base is not object for name in vars(base)}


def settings_hints(cls: type) -> dict[str, Any]:
    """The annotations of a class's settings by name, including those of a `**settings: Unpack[TypedDict]`.

    Raises NameError or TypeError for annotations that exist for type checkers only.
    """
    takes = inspect.getattr_static(cls, "__init__")  # its own, or one that it inherits
    hints = typing.get_type_hints(cls if takes is object.__init__ else takes)
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            [table] = typing.get_args(hints.pop(parameter.name, None)) or (None,)
            # Not typing.is_typeddict, which does not know the tables of typing_extensions.
            hints |= typing.get_type_hints(table) if isinstance(table, type) and issubclass(table, dict) else {}
    return hints


def names_of_settings(cls: type) -> dict[str, inspect.Parameter] | None:
    """The settings of a class as parameters, by name; None if it takes any."""
    parameters = {parameter.name: parameter for parameter in inspect.signature(cls).parameters.values()}
    known = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    if len(known) < len(parameters):
        unpacked = settings_hints(cls).keys() - known.keys() - {"return"}
        if not unpacked:
            return None
        known |= {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in unpacked}
    return known


def _check_names(full_name: str, cls: type, settings: Mapping[str, Any]) -> None:
    if (known := names_of_settings(cls)) is None:
        return
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or " It takes none."
            raise UnknownSettingError(f"{title_of(full_name)} has no setting {name!r}.{hint}", name)
    missing = [
        name
        for name, p in known.items()
        if p.default is p.empty and name not in settings and p.kind is not p.VAR_POSITIONAL
    ]
    if missing:
        raise SlurmGPUError(
            f"{title_of(full_name)} needs the setting {missing[0]!r}: put it under [settings], or --set."
        )
