"""The user's functions, for tasks to call: by name where a task can import them, else pickled into the run directory.

`python -m slurmgpu.code.functions` unpickles in a fresh process, as a worker does, before anything is submitted.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import inspect
import io
import json
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from slurmgpu.code.locator import own_modules
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.packages import own_python_path
from slurmgpu.util.shared_files import UnusableFileError, read_own

PICKLE = "function.pkl"
SOURCE = "function.py"
MOST_BYTES = 10_000_000
"""The largest pickle of a function with the values that it uses: it is read by each worker."""
CHECK_S = 600.0
"""How long the fresh process may take, which imports what the function needs."""
_NAMED = 3


@dataclass(frozen=True)
class Packed:
    """A pickle of functions, the source of the first as far as it is known, and the user's modules that they need."""

    content: bytes
    source: str | None
    modules: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """The digest of the pickle."""
        return hashlib.sha256(self.content).hexdigest()


def minor_version() -> str:
    """The version of Python without its last number, such as `3.12`: a pickle of code is for that one alone."""
    return ".".join(platform.python_version_tuple()[:2])


def name_of(function: Callable[..., Any]) -> str | None:
    """The name, `package.module:function`, by which tasks can import a function; None if they cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    if not getattr(found, "__spec__", None):
        return None  # made at run time
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


def shown_name(function: Callable[..., Any]) -> str:
    """The name of a function for people, and of the run directory: letters, digits and `_`."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return name.strip("<>")


def import_named(name: str) -> Any:
    """The function with the name that `name_of` gave."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise SlurmGPUError(f"{module} has no function {path!r}. It was there when the run was planned.")
    return found


def pack(functions: Mapping[str, Callable[..., Any] | None], folder: Path) -> Packed:
    """A pickle of functions by their roles, which a fresh process has read.

    SlurmGPUError names the variable that is too large, on a GPU, or that cannot be pickled.
    """
    try:
        content = _dumps(dict(functions))
    except _CannotPackError as error:
        raise SlurmGPUError(_why_not(functions, error)) from error
    late = {name for function in functions.values() for code in _codes(function) for name in _imported_in(code)}
    modules = _read_in_fresh_process(content, folder)
    first = next(iter(functions.values()))
    try:
        source = inspect.getsource(first)  # type: ignore[arg-type]  # TypeError is caught
    except (OSError, TypeError):
        source = None
    return Packed(content, source, tuple(sorted({*modules, *late})))


def unpack(run: Path, sha256: str, python: str) -> dict[str, Callable[..., Any] | None]:
    """The functions that a run's pickle holds; SlurmGPUError unless it is the one that was planned, and this user's.

    Its bytes are compared before they are unpickled, as unpickling runs code.
    """
    path = run / PICKLE
    if python != minor_version():
        raise SlurmGPUError(
            f"{path} has a function of Python {python}, and this is Python {minor_version()}. Submit from Python "
            f"{minor_version()}, use an image with Python {python}, or put the function into a module, to be imported."
        )
    try:
        content = read_own(path, max_bytes=2 * MOST_BYTES)
    except (FileNotFoundError, PermissionError, UnusableFileError) as error:
        raise SlurmGPUError(
            f"{path}, the function of this run, is not used: {error.strerror}. Only the user who submitted it can "
            f"compute it; in a folder of your own, map the function again."
        ) from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SlurmGPUError(f"{path} is not the function that the run was planned with. Plan the run again.")
    try:
        found: dict[str, Callable[..., Any] | None] = pickle.loads(content)
    except ModuleNotFoundError as error:
        raise SlurmGPUError(
            f"{path} needs the module {error.name!r}, which is not installed here. Install it, or add it to the image."
        ) from error
    return found


class _CannotPackError(Exception):
    """A value that cannot be pickled, as a clause."""


class _TooLargeError(_CannotPackError):
    """The pickle has more than MOST_BYTES."""


class _Bounded(io.BytesIO):
    """A file in memory that refuses to grow beyond MOST_BYTES."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise _TooLargeError(f"has more than {MOST_BYTES // 10**6} MB")
        return super().write(data)


def _dumps(value: Any) -> bytes:
    import cloudpickle  # takes long

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle's is not typed
        def reducer_override(self, obj: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
                raise _CannotPackError(f"is a tensor on {obj.device}")
            return super().reducer_override(obj)

    file = _Bounded()
    try:
        Pickler(file).dump(value)
    except _CannotPackError:
        raise
    except Exception as error:  # any that the user's objects raise
        raise _CannotPackError(f"cannot be pickled ({type(error).__name__}: {error})") from error
    return file.getvalue()


def _why_not(functions: Mapping[str, Callable[..., Any] | None], error: _CannotPackError) -> str:
    """A sentence on the variables that prevent a pickle."""
    found: dict[str, str] = {}
    for function in functions.values():
        if function is not None:
            found |= _to_blame(function, set())
    what = ", and ".join(f"the variable {name!r} {why}" for name, why in list(found.items())[:_NAMED])
    whose = " and ".join(shown_name(function) for function in functions.values() if function is not None)
    return (
        f"{whose} cannot be sent to tasks: {what or f'it {error}'}. Make it in `load`, which is called on the node, "
        f"read it from a file there, or put it into a module, which is imported."
    )


def _to_blame(function: Any, met: set[int]) -> dict[str, str]:
    """The variables that a function uses and that cannot be pickled each by itself, and why."""
    found: dict[str, str] = {}
    met.add(id(function))
    for name, value in _used_by(function):
        if id(value) in met:
            continue
        met.add(id(value))
        try:
            _dumps(value)
        except _CannotPackError as error:
            inner = _to_blame(value, met) if isinstance(value, FunctionType | MethodType | functools.partial) else {}
            found |= inner or {name: str(error)}
    return found


def _used_by(function: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function keeps or reads, by the names of variables."""
    if isinstance(function, functools.partial):
        yield from [(f"argument {number}", value) for number, value in enumerate(function.args)]
        yield from function.keywords.items()
        yield from _used_by(function.func)
    elif isinstance(function, MethodType):
        yield from vars(function.__self__).items() if hasattr(function.__self__, "__dict__") else ()
        yield from _used_by(function.__func__)
    elif isinstance(function, FunctionType):
        names = {name for code in _codes(function) for name in code.co_names}
        yield from ((name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if _is_set(cell))
        defaults = inspect.signature(function).parameters.values()
        yield from ((each.name, each.default) for each in defaults if each.default is not each.empty)
    elif hasattr(function, "__dict__"):
        yield from vars(function).items()


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _codes(function: Any) -> Iterator[CodeType]:
    """The code of a function and of those within it."""
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    todo = [code] if isinstance(code := getattr(function, "__code__", None), CodeType) else []
    while todo:
        yield (code := todo.pop())
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]


def _imported_in(code: CodeType) -> Iterator[str]:
    """The modules that a function's body imports when it is called."""
    return (each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME" and each.argval)


def _read_in_fresh_process(content: bytes, folder: Path) -> list[str]:
    """The user's modules that unpickling imports; SlurmGPUError if a fresh process cannot unpickle."""
    command = [sys.executable, "-m", "slurmgpu.code.functions", json.dumps([str(folder), *sys.path])]
    environ = {**os.environ, "PYTHONPATH": own_python_path(), "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, input=content, capture_output=True, env=environ, cwd=folder, timeout=CHECK_S)
    except subprocess.TimeoutExpired as error:
        raise SlurmGPUError(
            f"A fresh process was not done with importing what the function needs in {CHECK_S:g} s. Import less at the "
            f"top of its modules."
        ) from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = {"error": f"exit code {done.returncode}: {done.stderr.decode(errors='replace')[-2000:].strip()}"}
    if "error" in answer:
        raise SlurmGPUError(
            f"The function cannot be read in a fresh process, as tasks do: {answer['error']}. What it needs must be "
            f"importable in {folder} or installed."
        )
    modules: list[str] = answer["modules"]
    return modules


def _check() -> None:
    """Unpickle standard input, and print the user's modules that came with it, or the error."""
    sys.path += [folder for folder in json.loads(sys.argv[1]) if folder not in sys.path]
    before = set(sys.modules)
    try:
        pickle.loads(sys.stdin.buffer.read())
        answer: dict[str, Any] = {"modules": own_modules(sys.modules.keys() - before)}
    except Exception as error:  # any that the user's modules raise
        answer = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(answer), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    _check()
