"""What a workload is, and how a name in a run file becomes one.

The worker imports this: standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean

if TYPE_CHECKING:
    from slurmgpu.columns import Column

BUILT_IN = {"embed": "slurmgpu.workloads.embed:Embed"}
"""Short names of the workloads that come with slurmgpu."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One record of the input: its 0-based `index`, its `data`, and a `seed` that belongs to it alone."""

    index: int
    data: Mapping[str, Any]
    run_seed: int = 0

    @property
    def seed(self) -> int:
        """A 63-bit number derived from the run's seed and the index: the same on every GPU, at every attempt."""
        digest = hashlib.blake2b(f"{self.run_seed}:{self.index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class TaskContext:
    """Where a workload finds itself: what `load` is given.

    `device` is PyTorch's name of this process's device ("cuda:0" or "cpu"); `gpus` how many GPUs it sees.
    `rank`, `world_size` and `local_rank` are those of torchrun; 0, 1 and 0 for a worker of one process.
    """

    device: str
    gpus: int
    run_dir: Path
    attempt: str = "debug"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


class Workload(Protocol):
    """What users write: see docs/how-to/write-a-workload.md.

    Optional beside these: `sort_key(item)`, by which the worker sorts a shard's items before it cuts batches.
    """

    columns: Mapping[str, Column]
    batch_size: int

    def load(self, task: TaskContext) -> None:
        """Load the model on the GPU; called once for each worker."""

    def __call__(self, items: Sequence[Item]) -> Sequence[Row | ItemError]:
        """One row, or ItemError, for each item, in order."""


def resolve_use(use: str, base: Path) -> str:
    """The full name of what a run file in `base` uses: `package.module:Class` or `/path/to/file.py:Class`."""
    full = BUILT_IN.get(use, use)
    module, colon, name = full.rpartition(":")
    if not colon or not module or not name.isidentifier():
        raise SlurmGPUError(
            f"Workload {use!r} is neither a built-in name nor of the form 'package.module:Class' or 'file.py:Class'."
            + did_you_mean(use, BUILT_IN)
        )
    if module.endswith(".py"):
        path = (base / Path(module).expanduser()).resolve()
        if not path.is_file():
            raise SlurmGPUError(f"Workload {use!r}: there is no file {path}.")
        return f"{path}:{name}"
    return full


def load_class(full_name: str, search_path: Path) -> type:
    """Import the class that `resolve_use` named; `search_path` is put on `sys.path`, as Python does for a script."""
    module_name, _, class_name = full_name.rpartition(":")
    if str(search_path) not in sys.path:
        sys.path.insert(0, str(search_path))
    module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise SlurmGPUError(f"{module_name} has no class {class_name!r}." + did_you_mean(class_name, classes))
    for needed in ("load", "__call__"):
        if not callable(getattr(found, needed, None)) or (needed == "__call__" and "__call__" not in _members(found)):
            raise SlurmGPUError(
                f"Workload {full_name}: the class has no method {needed!r}, which every workload needs."
            )
    return found


def build(full_name: str, settings: Mapping[str, Any], search_path: Path) -> Workload:
    """A workload with its settings checked: a sentence that names workload and setting where one is wrong."""
    cls = load_class(full_name, search_path)
    _check_names(full_name, cls, settings)
    try:
        workload: Workload = cls(**settings)
    except (ValueError, TypeError, ItemError) as error:
        raise SlurmGPUError(f"Workload {full_name} refuses its settings: {error}") from error
    if not isinstance(getattr(workload, "columns", None), Mapping):
        raise SlurmGPUError(f"Workload {full_name} has no 'columns': a mapping of name to Array, Text, Json or Ragged.")
    return workload


@contextlib.contextmanager
def at_planning(full_name: str) -> Iterator[None]:
    """Say of a module that the workload lacks where it is planned that it may be one that only the image has."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        raise SlurmGPUError(
            f"Workload {full_name} needs the module {error.name!r}, which is not installed here. Planning imports the "
            f"workload on this machine, outside of any image: import it in `load`, or install it here as well."
        ) from error


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise SlurmGPUError(
                f"There is no module {error.name!r} on the path for workload module {name!r}."
            ) from error
        raise


def _import_file(path: Path) -> ModuleType:
    # One name per file, so that pickles and repeated builds within a process see one class.
    name = f"slurmgpu_workload_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
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


def _check_names(full_name: str, cls: type, settings: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(cls).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {parameter.name: parameter for parameter in parameters}
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or " It takes none."
            raise SlurmGPUError(f"Workload {full_name} has no setting {name!r}.{hint}")
    missing = [
        name
        for name, p in known.items()
        if p.default is p.empty and name not in settings and p.kind is not p.VAR_POSITIONAL
    ]
    if missing:
        raise SlurmGPUError(
            f"Workload {full_name} needs the setting {missing[0]!r}: put it under [settings], or --set."
        )
