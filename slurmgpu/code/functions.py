"""Send the user's functions to tasks: by name if a task can import them, else pickled into the run directory.

`python -m slurmgpu.code.functions` unpickles in a fresh process, as a worker does, before anything is submitted.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import io
import json
import linecache
import os
import pickle
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import CodeType
from typing import Any

from slurmgpu.code import pickling
from slurmgpu.code.files_in_source import DOTTED, FilesInSource
from slurmgpu.code.imported_modules import note_named
from slurmgpu.code.locator import Locator, own_modules
from slurmgpu.code.pickling import CannotPickleError
from slurmgpu.code.snapshots import DIGITS
from slurmgpu.code.value_digest import digest_of
from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.submissions import Pickled
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.exceptions import described
from slurmgpu.util.json_values import is_utf8
from slurmgpu.util.own_files import read_own
from slurmgpu.util.packages import own_python_path
from slurmgpu.util.redact import hidden
from slurmgpu.util.regular_files import UnusableFileError
from slurmgpu.util.shared_files import retried

PICKLE = "function.pkl"
SOURCE = "function.py"
_CHECK_S = 600.0
"""Time limit of the fresh process, which imports what the function needs."""
_READS_ARGUMENTS = re.compile(rb"\b(?:parse_args|parse_known_args|parse_args_into_dataclasses|argv)\b")
_OF_TEXTS = re.compile(r"(?i).*tokens? (?:\d+|<.*>|\[.*\])")
"""Arguments about a language model's tokens, which are no secrets: --max-tokens 100, --pad-token "<pad>"."""
_OF_JUPYTER = ("ipykernel_launcher.py", "colab_kernel_launcher.py")
_NAMED = 3


@dataclass(frozen=True)
class Packed:
    """A pickle of functions by role, and what it needs.

    `source` is that of the first function, if it is known. `modules` are the user's modules that the functions need,
    and `texts` are texts in their sources that may name files which they read. `digest` identifies the functions and
    their variables; it does not depend on the process or on where the code lies.
    """

    roles: tuple[str, ...]
    content: bytes
    digest: str
    source: str | None
    modules: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def record(self) -> Pickled:
        """The digests of the pickle and of the functions, and the version of Python that can read it."""
        pickle_digest = hashlib.sha256(self.content).hexdigest()
        return {"sha256": pickle_digest, "python": minor_version(), "same": self.digest}


def minor_version() -> str:
    """The version of Python without its last number, such as `3.12`: only that version can read a pickle of code."""
    return ".".join(platform.python_version_tuple()[:2])


def check(function: Callable[..., Any] | None, load: Callable[..., Any] | None, *, loads: bool) -> None:
    """Raise SlurmGPUError unless `function(item)` can be called, or `function(item, loaded)` with `loads`."""
    for name, each, takes in (("function", function, "that takes an item"), ("load", load, "without arguments")):
        if each is not None and not callable(each):
            raise SlurmGPUError(f"{name} is {each!r}; expected a function {takes}.")
    if function is None:
        return
    arguments = ("item", "loaded") if loads else ("item",)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        advice = ""
        if loads:
            advice = " Its second argument is what load returns; the function must accept it."
        elif "missing" in str(error):
            advice = (
                " A second argument is what load returns: name a function that makes it, a model for instance, as load."
            )
        raise SlurmGPUError(
            f"{shown_name(function)} cannot be called as function({', '.join(arguments)}): {error}.{advice}"
        ) from error
    except ValueError:
        pass  # some functions written in C have no signature


def shown_name(function: Callable[..., Any]) -> str:
    """The name of a function in messages and of its run directory: letters, digits and `_`."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return name.strip("<>")


def import_named(name: str) -> Any:
    """Import a function by its name from `pickling.name_of`. SlurmGPUError if its module no longer has it."""
    module, _, path = name.partition(":")
    note_named(module)
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise SlurmGPUError(f"{module} no longer has the function {path!r}, which it had when the run was planned.")
    return found


def arguments_read() -> list[str] | None:
    """The command line, `sys.argv`, if an imported module of the user's reads it; else None.

    A task imports such a module in a process of its own. None in a notebook, whose command line is Jupyter's.
    SlurmGPUError if it holds a secret, because the plan would show it.
    """
    if not sys.argv or Path(sys.argv[0]).name in _OF_JUPYTER or not all(map(is_utf8, sys.argv)):
        return None
    for name in own_modules(sys.modules.keys() - {"__main__"}):
        file = sys.modules[name].__file__
        if file is not None and file.endswith(".py"):
            with contextlib.suppress(OSError):
                if _READS_ARGUMENTS.search(retried(Path(file).read_bytes)):
                    _refuse_secrets(sys.argv, file)
                    return list(sys.argv)
    return None


def _refuse_secrets(arguments: Sequence[str], file: str) -> None:
    for before, text in zip(("", *arguments), arguments, strict=False):
        name = before.lstrip("-") if before.startswith("-") else ""
        if hidden(text, name) != text and not _OF_TEXTS.fullmatch(f"{name} {text}"):
            raise SlurmGPUError(
                f"{file} reads the command line, which is stored in the plan, where others may read it, and it has "
                f"what looks like a secret{f' after {before}' if name else ''}. Pass the secret in an environment "
                "variable."
            )


def pack(
    functions: Mapping[str, Callable[..., Any] | None], folder: Path, arguments: Sequence[str] | None = None
) -> Packed:
    """Pickle functions by role, and unpickle them in a fresh process that has the command line of tasks.

    SlurmGPUError if that fails; it names a variable that is too large, on a GPU, or that cannot be pickled.
    """
    try:
        pickled = pickling.dumps(dict(functions))
        digest = digest_of(dict(functions))
    except CannotPickleError as error:
        raise SlurmGPUError(_why_not(functions, error)) from error
    modules = {*_read_in_fresh_process(pickled.content, folder, arguments), *pickled.imports}
    modules |= _named_in(pickled.codes, folder)
    sources = [None if each is None else _source_of(each) for each in functions.values()]
    texts = {text for source in sources if source is not None for text in _read_texts(source)}
    used = [value for each in functions.values() for _, value in pickling.used_by(each)]
    folders = {value for value in used if isinstance(value, PurePath)}  # DATA / "prompts.json"
    texts |= {str(folder / text) for folder in folders for text in texts if PurePath(text).suffix}
    content = pickled.content + pickle.dumps(_lines_of(pickled.codes))
    return Packed(tuple(functions), content, digest, sources[0], tuple(sorted(modules)), tuple(sorted(texts)))


def _source_of(function: Callable[..., Any]) -> str | None:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError, SyntaxError):  # SyntaxError: lines of a lambda that are no tokens, since Python 3.13
        return None


def _read_texts(source: str) -> set[str]:
    """The texts in a function's source that may name what it reads; none if the lines of a lambda do not parse."""
    try:
        return FilesInSource(ast.parse(textwrap.dedent(source))).read_texts()
    except (SyntaxError, ValueError, RecursionError):  # RecursionError: an expression with hundreds of operators
        return set()


def keep(run: Path, packed: Packed) -> Pickled:
    """Write the pickle and the source that a resubmission was given into a run directory; return their record."""
    path = path_of(run, packed.record)
    write_bytes(path, packed.content, mode=0o600)
    if packed.source is not None:
        write_bytes(path.with_suffix(".py"), packed.source.encode("utf-8", "backslashreplace"))
    return packed.record


def path_of(run: Path, given: Pickled) -> Path:
    """The path of a pickle that a resubmission was given."""
    return run / f"function.{given['sha256'][:DIGITS]}.pkl"


def read_pickle(path: Path, planned: Pickled) -> bytes:
    """The bytes of a pickle; SlurmGPUError unless it is the submitted one and belongs to this user."""
    try:
        content = read_own(path, max_bytes=2 * pickling.MOST_BYTES)
    except FileNotFoundError as error:
        raise SlurmGPUError(
            f"{path}, the function of this run, is gone. Restore the file, or hand the function over again, in Python: "
            f"slurmgpu.open_run({str(path.parent)!r}).resubmit(function=…)"
        ) from error
    except (PermissionError, UnusableFileError) as error:
        raise SlurmGPUError(
            f"{path}, the function of this run, cannot be read: {error.strerror}. Only the user who submitted it can "
            f"compute it. Map the function again in your own folder."
        ) from error
    if hashlib.sha256(content).hexdigest() != planned["sha256"]:
        raise SlurmGPUError(f"{path} is not the function that the run was submitted with. Map the function again.")
    return content


def unpack(path: Path, planned: Pickled) -> dict[str, Callable[..., Any] | None]:
    """The functions in a pickle, by role; SlurmGPUError unless it is the submitted one and belongs to this user.

    Its bytes are compared before they are unpickled, because unpickling runs code.
    """
    if (python := planned["python"]) != minor_version():
        raise SlurmGPUError(
            f"{path} has a function pickled by Python {python}, but this is Python {minor_version()}. Submit from "
            f"Python {minor_version()}, use an image with Python {python}, or put the function into a module to be "
            "imported."
        )
    content = read_pickle(path, planned)
    file = io.BytesIO(content)
    note_named(str(path))
    try:
        found: dict[str, Callable[..., Any] | None] = pickle.load(file)
    except ModuleNotFoundError as error:
        raise SlurmGPUError(
            f"{path} needs the module {error.name!r}, which is not installed here. Install it, or add it to the image."
        ) from error
    _show_lines(pickle.load(file))
    return found


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


def _why_not(functions: Mapping[str, Callable[..., Any] | None], error: CannotPickleError) -> str:
    """A message about the variables that cannot be pickled."""
    found: dict[str, str] = {}
    for function in functions.values():
        if function is not None:
            found |= pickling.to_blame(function)
    what = ", and ".join(f"the variable {name!r} {why}" for name, why in list(found.items())[:_NAMED])
    whose = " and ".join(shown_name(function) for function in functions.values() if function is not None)
    return (
        f"{whose} cannot be sent to tasks: {what or f'it {error}'}. Create it in `load`, which runs on the node, "
        f"read it from a file there, or put it into a module that tasks import."
    )


def _named_in(codes: Iterable[CodeType], folder: Path) -> set[str]:
    """The texts in code that name a module of the user's, or something that it defines: `"nets.deep.Net"`."""
    where = Locator(folder, None)
    texts = {text for code in codes for text in code.co_consts if isinstance(text, str) and DOTTED.fullmatch(text)}
    places = {text: where.look(text.partition(".")[0]) for text in texts}
    # `train.loss` need not name a module.
    return {text for text in texts if places[text] and where.locate(".".join(text.split(".")[:2])) is not None}


def _read_in_fresh_process(content: bytes, folder: Path, arguments: Sequence[str] | None) -> list[str]:
    """The user's modules that unpickling imports; SlurmGPUError if a fresh process cannot unpickle."""
    given = [json.dumps(each) for each in ([str(folder), *sys.path], arguments)]
    command = [sys.executable, "-m", "slurmgpu.code.functions", *given]
    environ = {**os.environ, **own_python_path(), "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, input=content, capture_output=True, env=environ, cwd=folder, timeout=_CHECK_S)
    except subprocess.TimeoutExpired as error:
        raise SlurmGPUError(
            f"Importing what the function needs takes a new process more than {_CHECK_S:g} s. Import less at "
            f"the top of its modules."
        ) from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = {"error": f"exit code {done.returncode}: {done.stderr.decode(errors='replace')[-2000:].strip()}"}
    if "refusal" in answer:
        raise SlurmGPUError(answer["refusal"])
    if "error" in answer:
        raise SlurmGPUError(
            f"The function cannot be loaded in a new process, as tasks load it: {answer['error']}. Whatever it imports "
            f"must be installed, or importable from {folder}."
        )
    modules: list[str] = answer["modules"]
    return modules


def _check() -> None:
    """Unpickle standard input, and print the user's modules that this imported, or the error."""
    sys.path += [folder for folder in json.loads(sys.argv[1]) if folder not in sys.path]
    sys.argv = json.loads(sys.argv[2]) or sys.argv
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
