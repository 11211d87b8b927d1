"""What a shell's Tab key is offered for arguments and options. It runs at each Tab, so it imports next to nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

RUN = "run.json"
"""What makes a folder a run directory."""
PROBE = "-probe"
"""How the name of a probe's run directory ends, by `executors.probes`, which imports pydantic."""
FAULTS = ("kill@", "preempt@", "timeout", "oom@", "cuda_oom@", "error@", "crash@", "damage@")
"""Those of `slurmgpu.faults`, as they are begun."""
FORMATS = ("jsonl", "csv", "parquet", "pt")
"""Those of `slurmgpu.merge.export`, which imports NumPy."""


class Typed(str):
    """A word as it has to be typed, its blanks escaped.

    Typer offers only words that begin with what was typed so far, which it knows without its escapes.
    """

    __slots__ = ()

    def startswith(self, *_: object) -> bool:
        """Whether it may be offered: always; it was chosen already."""
        return True


def complete_run(incomplete: str) -> list[str]:
    """Run directories that begin so, and the folders on the way to others."""
    return _paths(
        incomplete,
        lambda path: (path / RUN).exists() and not _is_probe(path),
        lambda path: path.is_dir() and not (path / RUN).exists(),
    )


def complete_folder(incomplete: str) -> list[str]:
    """Folders that begin so and may hold runs."""
    return _paths(incomplete, lambda path: False, lambda path: path.is_dir() and not (path / RUN).exists())


def complete_run_file(incomplete: str) -> list[str]:
    """TOML files that begin so, and folders; not what lies in run directories."""
    return _paths(
        incomplete,
        lambda path: path.suffix == ".toml" and path.is_file(),
        lambda path: path.is_dir() and not (path / RUN).exists(),
    )


def complete_task(context: typer.Context, incomplete: str) -> list[str]:
    """The tasks and attempts of the run that was named before."""
    folder = context.params.get("folder")
    if folder is None:
        return []
    try:
        names = sorted(os.listdir(Path(folder).expanduser() / "tasks"))
    except OSError:
        return []
    attempts = [name[: -len(".json")] for name in names if name.endswith(".json") and not name.startswith(".")]
    tasks = dict.fromkeys(name.rpartition(".")[0] for name in attempts)
    return [name for name in (*tasks, *attempts) if name.startswith(incomplete)]


def complete_workload(incomplete: str) -> list[str]:
    """The built-in workloads, and those of installed packages."""
    from slurmgpu.workload import BUILT_IN, installed_workloads

    installed = installed_workloads() if _are_offered(b"[slurmgpu.workloads]") else ()
    return _words(incomplete, dict.fromkeys([*BUILT_IN, *installed]))


def complete_executor(incomplete: str) -> list[str]:
    """The built-in executors, and those of installed packages."""
    from slurmgpu.plan.executors import EXECUTORS

    is_offered = _are_offered(f"[{EXECUTORS.group}]".encode())
    return _words(incomplete, EXECUTORS.names() if is_offered else EXECUTORS.built_in)


def _are_offered(group: bytes) -> bool:
    """Whether a package other than slurmgpu has such entry points: cheaper than to import importlib.metadata."""
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if name.endswith((".dist-info", ".egg-info")) and not name.startswith("slurmgpu-"):
                    with contextlib.suppress(OSError):
                        if group in Path(folder, name, "entry_points.txt").read_bytes():
                            return True
    return False


def complete_class(incomplete: str) -> list[str]:
    """Failure classes."""
    from slurmgpu.run.failures import POLICIES

    return _words(incomplete, POLICIES)


def complete_fault(incomplete: str) -> list[str]:
    """Faults on demand, also behind others and a comma."""
    before, comma, begun = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in _words(begun, FAULTS)]


def words(*known: str) -> Callable[[str], list[str]]:
    """What offers some of these words."""

    def complete(incomplete: str) -> list[str]:
        return _words(incomplete, known)

    return complete


def _is_probe(run: Path) -> bool:
    """Whether it is the probe of a run: such a run takes ranges of an input."""
    if not run.name.endswith(PROBE):
        return False
    from slurmgpu.util.shared_files import read_bytes

    try:
        return '"ranges": [' in read_bytes(run / RUN, patience_s=0.0).decode("utf-8", "replace")
    except OSError:
        return False


def _words(incomplete: str, known: Iterable[str]) -> list[str]:
    return [word for word in known if word.startswith(incomplete)]


def _paths(incomplete: str, wanted: Callable[[Path], bool], entered: Callable[[Path], bool]) -> list[str]:
    """The paths that begin so and are wanted, or are folders to enter; a single folder is entered at once.

    A shell puts a blank behind the only word that it is offered, and a folder on the way wants none.
    """
    head, prefix = os.path.split(incomplete)
    shown = incomplete[: len(incomplete) - len(prefix)]
    folder = Path(head or ".").expanduser()
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(prefix))
    except OSError:
        return []
    names = [name for name in names if prefix.startswith(".") or not name.startswith(".")]
    ends = [name for name in names if wanted(folder / name)]
    ways = [name for name in names if name not in ends and entered(folder / name)]
    if len(ways) == 1 and not ends:
        return _paths(f"{shown}{ways[0]}/", wanted, entered) or [_typed(f"{shown}{ways[0]}/")]
    return [_typed(f"{shown}{name}") for name in ends] + [_typed(f"{shown}{name}/") for name in ways]


def _typed(path: str) -> str:
    """A path as bash inserts it at the cursor: escaped, unless the word begins with a quote; other shells escape."""
    if "COMP_WORDS" not in os.environ:
        return Typed(path)
    words = os.environ["COMP_WORDS"].split("\n")
    position = int(os.environ.get("COMP_CWORD", "0"))
    raw = words[position] if position < len(words) else ""
    if raw.startswith(("'", '"')):
        return Typed(path)
    if shlex.quote(path) == path:
        return Typed(path)
    return Typed(re.sub(r"([^\w@%+=:,./~-])", r"\\\1", path))
