"""The path of a run directory, from the run file and the options, and the paths that are refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.run_file import RunFile
from slurmgpu.util.users import expanded

LOOK = "-look"
"""The suffix of the name of a look at a run."""

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
NOT_UTF8 = re.compile(r"[\ud800-\udfff]")
"""Python's characters for bytes in a path that are not UTF-8."""


def run_path(config: RunFile, path: Path, run_dir: Path | None, *, is_look: bool) -> Path:
    """The absolute path of the run directory for the run file at `path`; `run_dir` is the option's."""
    named = expanded(config.run_dir or f"runs/{path.stem}")
    if is_look:
        named = named.with_name(f"{named.name}{LOOK}")
    return (path.parent / named if run_dir is None else expanded(run_dir)).absolute()


def refuse_odd_path(run_dir: Path, not_in_paths: str) -> None:
    """Raise SlurmGPUError for a run directory whose path Slurm would change, or that is not UTF-8.

    Nor may Python take it for another encoding, in which run.json would name other files.
    The executor refuses `not_in_paths`. Submitit and Slurm replace %j and other patterns anywhere in the path of a log;
    a backslash turns that off. A line break ends an #SBATCH line, and versions of sbatch read a quote in one
    differently.
    """
    path = str(run_dir)
    if (encoding := sys.getfilesystemencoding()) != "utf-8" and not path.isascii():
        what = (
            f"letters that this shell's locale reads as {encoding}, so that another would not find the files that "
            "the run names (LC_ALL=C.UTF-8 or PYTHONUTF8=1 changes that)"
        )
    elif found := CONTROL.search(path):
        what = f"the control character {found[0]!a}"
    elif found := NOT_UTF8.search(path):
        what = f"{found[0]!a}, a byte that is not valid in UTF-8, which a run's files and Slurm's messages are in"
    elif "%" in path:
        what = "a %, which in the paths of logs Slurm replaces by job numbers"
    elif odd := sorted({each for each in path if each in not_in_paths}):
        what = f"{' and '.join(odd)}, which versions of Slurm read differently"
    else:
        return
    raise SlurmGPUError(
        f"The path of the run directory {path!r} has {what}. "
        f"Name another with --run-dir, or run_dir in the run file, or rename the folder."
    )
