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
import keyword
import linecache
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from slurmgpu.code.locator import own_modules
from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import Pickled
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.exceptions import described
from slurmgpu.util.hashing import DIGITS
from slurmgpu.util.packages import own_python_path
from slurmgpu.util.shared_files import UnusableFileError, read_own

MAPPED = "slurmgpu.workloads.function:Function"
"""The workload of runs of `slurmgpu.map`."""
PICKLE = "function.pkl"
SOURCE = "function.py"
MOST_BYTES = 10_000_000
"""The largest pickle of a function with the values that it uses: it is read by each worker."""
CHECK_S = 600.0
"""How long the fresh process may take, which imports what the function needs."""
_NAMED = 3


@dataclass(frozen=True)
class Packed:
    """A pickle of functions by `roles`, the source of the first as far as it is known, and modules of the user's."""

    roles: tuple[str, ...]
    content: bytes
    source: str | None
    modules: tuple[str, ...]

    @property
    def record(self) -> Pickled:
        """The digest of the pickle, and the version of Python that can read it."""
        return {"sha256": hashlib.sha256(self.content).hexdigest(), "python": minor_version()}


def minor_version() -> str:
    """The version of Python without its last number, such as `3.12`: a pickle of code is for that one alone."""
    return ".".join(platform.python_version_tuple()[:2])


def check(function: Callable[..., Any] | None, load: Callable[..., Any] | None, *, loads: bool) -> None:
    """Raise SlurmGPUError unless a function can be called with an item, and with what `load` returns if it `loads`."""
    for each in (function, load):
        if each is not None and not callable(each):
            raise SlurmGPUError(f"{each!r} is no function; expected one that takes an item.")
    if function is None:
        return
    if inspect.iscoroutinefunction(function):
        raise SlurmGPUError(f"{shown_name(function)} is a coroutine: expected a plain function.")
    arguments = ("item", "loaded") if loads else ("item",)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise SlurmGPUError(
            f"{shown_name(function)} cannot be called as function({', '.join(arguments)}): {error}."
        ) from error
    except ValueError:
        pass  # some of C have no signature


def function_by_value(run: Run) -> str | None:
    """The name of the function of `slurmgpu.map` that the run keeps in a pickle, which no edit changes; else None."""
    by_value = run.plan.workload == MAPPED and "pickled" in run.plan.settings
    return str(run.plan.settings["function"]) if by_value else None


def with_another_function(run: Run, name: str) -> str:
    """The line of Python that computes the failed items of a run with another function."""
    named = name if name.isidentifier() and not keyword.iskeyword(name) else "corrected"
    return f"slurmgpu.open_run({str(run.folder)!r}).resubmit(failed=True, function={named})"


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
    codes: list[CodeType] = []
    try:
        content = _dumps(dict(functions), codes)
    except _CannotPackError as error:
        raise SlurmGPUError(_why_not(functions, error)) from error
    late = {name for function in functions.values() for code in _codes(function) for name in _imported_in(code)}
    modules = _read_in_fresh_process(content, folder)
    first = next(iter(functions.values()))
    try:
        source = inspect.getsource(first)  # type: ignore[arg-type]  # TypeError is caught
    except (OSError, TypeError):
        source = None
    return Packed(tuple(functions), content + pickle.dumps(_lines_of(codes)), source, tuple(sorted({*modules, *late})))


def keep(run: Path, packed: Packed) -> Pickled:
    """Write a pickle that a resubmission was given into a run directory, and its source; its record."""
    path = path_of(run, packed.record)
    write_bytes(path, packed.content, mode=0o600)
    if packed.source is not None:
        write_bytes(path.with_suffix(".py"), packed.source.encode("utf-8", "backslashreplace"))
    return packed.record


def path_of(run: Path, given: Pickled) -> Path:
    """The path of a pickle that a resubmission was given."""
    return run / f"function.{given['sha256'][:DIGITS]}.pkl"


def unpack(path: Path, planned: Pickled) -> dict[str, Callable[..., Any] | None]:
    """The functions in a pickle, by role; SlurmGPUError unless it is the one that was submitted, and this user's.

    Its bytes are compared before they are unpickled, as unpickling runs code.
    """
    if (python := planned["python"]) != minor_version():
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
    if hashlib.sha256(content).hexdigest() != planned["sha256"]:
        raise SlurmGPUError(f"{path} is not the function that the run was submitted with. Map the function again.")
    file = io.BytesIO(content)
    try:
        found: dict[str, Callable[..., Any] | None] = pickle.load(file)
    except ModuleNotFoundError as error:
        raise SlurmGPUError(
            f"{path} needs the module {error.name!r}, which is not installed here. Install it, or add it to the image."
        ) from error
    if file.tell() < len(content):  # an older slurmgpu has written no lines
        _show_lines(pickle.load(file))
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


def _dumps(value: Any, codes: list[CodeType] | None = None) -> bytes:
    """A pickle of a value; `codes` gets the code in it."""
    import cloudpickle  # takes long

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle's is not typed
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                if codes is not None:
                    codes.append(obj)
                made, arguments = self.dispatch_table[CodeType](obj)
                # cloudpickle 3.1.3 leaves the file's name out, by which errors tell their place.
                return _code_of_file, (made, arguments, obj.co_filename)
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
        raise _CannotPackError(f"cannot be pickled ({described(error)})") from error
    return file.getvalue()


def _code_of_file(make: Callable[..., CodeType], arguments: Sequence[Any], filename: str) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


def _lines_of(codes: Iterable[CodeType]) -> dict[str, dict[int, str]]:
    """The source lines of code as they are now, by file and line number, as far as they are known."""
    found: dict[str, dict[int, str]] = {}
    for code in codes:
        numbers = [number for _, _, number in code.co_lines() if number]
        for number in range(min(numbers, default=1), max(numbers, default=0) + 1):
            if line := linecache.getline(code.co_filename, number):
                found.setdefault(code.co_filename, {})[number] = line
    return {filename: dict(sorted(lines.items())) for filename, lines in sorted(found.items())}


def _show_lines(known: Mapping[str, Mapping[int, str]]) -> None:
    """Make tracebacks show these lines: the file may have changed since, and a node may lack it."""
    for filename, lines in known.items():
        text = [lines.get(number, "\n") for number in range(1, max(lines) + 1)]
        linecache.cache.setdefault(filename, (sum(map(len, text)), None, text, filename))


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
    if "refusal" in answer:
        raise SlurmGPUError(answer["refusal"])
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
    except SlurmGPUError as error:
        answer = {"refusal": str(error)}
    except Exception as error:  # any that the user's modules raise
        answer = {"error": described(error)}
    print("\n" + json.dumps(answer), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    _check()
