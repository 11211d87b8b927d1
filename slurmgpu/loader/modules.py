"""Import a module or a class of the user's by its full name; a failed import becomes a SlurmGPUError."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from slurmgpu.code import importer
from slurmgpu.code.imported_modules import note_named
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.loader.names import title_of
from slurmgpu.util.exceptions import described
from slurmgpu.workload import Workload


def load_class(full_name: str, search_path: Path) -> type:
    """Import a class by its full name. SlurmGPUError if it does not exist or has no `__call__`.

    `search_path` is put on `sys.path`, as Python does with a script's folder.
    """
    module_name, _, class_name = full_name.rpartition(":")
    if str(search_path) not in sys.path:
        sys.path.insert(0, str(search_path))
    module = _import_of_workload(module_name)
    found = getattr(module, class_name, None)
    if inspect.isroutine(found):
        raise SlurmGPUError(
            f"{module_name}: {class_name} is a function; a run file names a class. Map a function from Python, without "
            f"a run file: slurmgpu.map({class_name}, items), where items may be the path of the input."
        )
    if not isinstance(found, type):
        classes = classes_in(module)
        callable_ones = [name for name, value in classes.items() if "__call__" in _members(value)]
        raise SlurmGPUError(
            f"{module_name} has no class {class_name!r}." + did_you_mean(class_name, callable_ones or classes)
        )
    if "__call__" not in _members(found):
        raise SlurmGPUError(f"{title_of(full_name)}: the class has no method '__call__', which every workload needs.")
    return found


def classes_in(module: ModuleType) -> dict[str, type]:
    """The classes of a module by name: its own, without imported ones such as Text; all if it has none of its own."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return {name: value for name, value in found.items() if value.__module__ == module.__name__} or found


def import_named(module: str) -> ModuleType:
    """Import a module by its name, or by the path of its file, which ends in `.py`."""
    if module.endswith(".py"):
        return import_file(Path(module))
    note_named(module)
    return importlib.import_module(module)


def import_file(path: Path) -> ModuleType:
    """Import a Python file, once for each path."""
    name = importer.name_of_file(path)
    note_named(name)
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


@contextlib.contextmanager
def at_planning(full_name: str) -> Iterator[None]:
    """Turn a failed import within the block into a SlurmGPUError: a package may be installed only in the image."""
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
            f"workload on this machine, outside of any image: import the module in `load`, or install it here, too. "
            f"It is imported at {_users_line(error)}."
        ) from error


def _users_line(error: BaseException) -> str:
    """The last file and line of a failed import outside of Python's own and installed packages."""
    others = tuple(str(Path(module.__file__ or "").parent) for module in (contextlib, sys.modules["slurmgpu"]))
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if not frame.filename.startswith(("<", *others))]
    last = (mine or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def _import_of_workload(name: str) -> ModuleType:
    try:
        return import_named(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise SlurmGPUError(
                f"There is no module {error.name!r} on the path for workload module {name!r}."
            ) from error
        raise


def _members(cls: type) -> set[str]:
    # `callable(getattr(cls, "__call__"))` is true for every class, through its metaclass. The protocol's method
    # computes nothing.
    return {name for base in cls.__mro__ if base not in (object, Workload) for name in vars(base)}
