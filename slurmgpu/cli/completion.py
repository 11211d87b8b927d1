"""Completions of arguments and options for the Tab key. It runs at each Tab, so it imports almost nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import typer

from slurmgpu.util.array_ids import task_of_attempt
from slurmgpu.util.users import expanded

RUN = "run.json"
"""The file that marks a run directory."""
PROBE = "-probe"
"""The suffix of a probe's run directory: `operations.probe.SUFFIX`, without importing pydantic."""
FAULTS = ("kill@", "preempt@", "timeout", "oom@", "cuda_oom@", "error@", "crash@", "damage@")
"""The beginnings of the faults in `slurmgpu.faults`."""
FORMATS = ("jsonl", "csv", "tsv", "parquet", "hf", "pt")
"""The formats of `slurmgpu.merge.export`, without importing NumPy."""
TASK = re.compile(r"\w[\w.@-]*\.json")
"""The names of records; another name may be a command for the shell that completes it."""
SPECIAL = {"": "\\\"'$`", '"': '\\"$`!', "'": "'"}
"""Paths with these characters are not offered to shells other than bash, nor to bash after an open quote.

Typer escapes too little for zsh, which evaluates its words: `\\$(command)` as the name of somebody's folder ran it.
"""


class Typed(str):
    """A word with escaped blanks.

    Typer drops words that do not begin with the typed text, which it has without escapes.
    """

    __slots__ = ()

    def startswith(self, *_: object) -> bool:
        """True: the word is already known to match."""
        return True


def complete_run(incomplete: str) -> list[str]:
    """Run directories that match, and folders that may hold others."""
    return _paths(incomplete, lambda path: _is_run(path) and not _is_probe(path))


def complete_folder(incomplete: str) -> list[str]:
    """Folders that match and may hold runs."""
    return _paths(incomplete, lambda path: False)


def complete_run_file(incomplete: str) -> list[str]:
    """TOML files that match, and folders other than run directories."""
    return _paths(incomplete, lambda path: path.suffix == ".toml" and os.path.isfile(path))


def complete_task(context: typer.Context, incomplete: str) -> list[str]:
    """The tasks and attempts of the run in the argument before."""
    folder = context.params.get("folder")
    if folder is None:
        return []
    try:
        names = sorted(os.listdir(expanded(folder) / "tasks"))
    except OSError:
        return []
    attempts = [name[: -len(".json")] for name in names if TASK.fullmatch(name)]
    tasks = dict.fromkeys(task_of_attempt(name) for name in attempts)
    return [name for name in (*tasks, *attempts) if name.startswith(incomplete)]


def complete_workload(incomplete: str) -> list[str]:
    """The built-in workloads, and those of installed packages."""
    from slurmgpu.loader.names import BUILT_IN, installed_workloads

    installed = installed_workloads() if _are_offered(b"[slurmgpu.workloads]") else ()
    return _words(incomplete, dict.fromkeys([*BUILT_IN, *installed]))


def complete_executor(incomplete: str) -> list[str]:
    """The built-in executors, and those of installed packages."""
    from slurmgpu.plan.executors import EXECUTORS

    is_offered = _are_offered(f"[{EXECUTORS.group}]".encode())
    return _words(incomplete, EXECUTORS.names() if is_offered else EXECUTORS.built_in)


def _are_offered(group: bytes) -> bool:
    """Whether a package other than slurmgpu has such entry points; quicker than importlib.metadata."""
    return any(group in told for told in _entry_points())


def _entry_points() -> Iterator[bytes]:
    """The files of entry points of the installed packages other than slurmgpu."""
    for folder in sys.path:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(folder or ".")
        for name in names:
            if name.endswith((".dist-info", ".egg-info")) and not name.startswith("slurmgpu-"):
                with contextlib.suppress(OSError):
                    yield Path(folder, name, "entry_points.txt").read_bytes()


def complete_class(incomplete: str) -> list[str]:
    """Failure classes."""
    from slurmgpu.run.failures import POLICIES

    return _words(incomplete, POLICIES)


def complete_fault(incomplete: str) -> list[str]:
    """Faults on demand, also after others and a comma."""
    before, comma, begun = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in _words(begun, FAULTS)]


def complete_key(incomplete: str) -> list[str]:
    """Keys of the run file for -s."""
    from slurmgpu.plan.run_file import RunFile, table_of

    keys = []
    for name in RunFile.model_fields:
        table = table_of((name,))
        keys += [f"{name}.{key}=" for key in table.model_fields] if table else [f"{name}="]
    return _words(incomplete, keys)


def complete_profile(incomplete: str) -> list[str]:
    """The profiles of the site file."""
    from slurmgpu.errors import SlurmGPUError
    from slurmgpu.plan.site_file import profile_names

    try:
        return _words(incomplete, profile_names())
    except SlurmGPUError:
        return []


def words(*known: str) -> Callable[[str], list[str]]:
    """A completion from fixed words."""
    return lambda incomplete: _words(incomplete, known)


def _is_probe(run: Path) -> bool:
    """Whether a run is a probe."""
    if not run.name.endswith(PROBE):
        return False
    from slurmgpu.util.shared_files import read_bytes

    try:
        text = read_bytes(run / RUN, patience_s=0.0).decode("utf-8", "replace")
    except OSError:
        return False
    return '"look": "probe"' in text


def _words(incomplete: str, known: Iterable[str]) -> list[str]:
    return [word for word in known if word.startswith(incomplete)]


def _paths(incomplete: str, wanted: Callable[[Path], bool]) -> list[str]:
    """The matching paths that are wanted, and matching folders that are no run; a single folder is entered at once.

    A shell appends a blank to the only word that it is offered, which is wrong for a folder to enter.
    """
    head, prefix = os.path.split(incomplete)
    shown = incomplete[: len(incomplete) - len(prefix)]
    folder = expanded(head or ".")
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(prefix))
    except OSError:
        return []
    names = [name for name in names if prefix.startswith(".") or not name.startswith(".")]
    names = [name for name in names if _can_be_typed(name)]
    ends = [name for name in names if wanted(folder / name)]
    ways = [n for n in names if n not in ends and os.path.isdir(folder / n) and not _is_run(folder / n)]
    if len(ways) == 1 and not ends:
        return _paths(f"{shown}{ways[0]}/", wanted) or [_typed(f"{shown}{ways[0]}/")]
    return [_typed(f"{shown}{name}") for name in ends] + [_typed(f"{shown}{name}/") for name in ways]


def _is_run(folder: Path) -> bool:
    # pathlib raises for a path in a folder that may not be entered.
    return os.path.exists(folder / RUN)


def _can_be_typed(name: str) -> bool:
    """Whether the shell takes this name as text, not as a command that somebody put into a folder's name."""
    raw = _raw_word()
    if not name.isprintable():
        return False
    if raw is None:
        return not set(SPECIAL[""]) & set(name)
    if raw[:1] not in ("'", '"'):  # it will be escaped
        return True
    is_open = raw[0] not in raw[1:]
    return not set(SPECIAL[raw[0]]) & set(name) if is_open else shlex.quote(name) == name


def _raw_word() -> str | None:
    """The word that bash completes, as it was typed; None in other shells."""
    if "COMP_WORDS" not in os.environ:
        return None
    words = os.environ["COMP_WORDS"].split("\n")
    position = int(os.environ.get("COMP_CWORD", "0"))
    return words[position] if position < len(words) else ""


def _typed(path: str) -> str:
    """A path as bash inserts it: escaped, unless the word begins with a quote. Other shells escape it themselves."""
    raw = _raw_word()
    if raw is None or raw.startswith(("'", '"')) or shlex.quote(path) == path:
        return Typed(path)
    return Typed(re.sub(r"([^\w@%+=:,./~-])", r"\\\1", path))
