"""sweep.json, which marks the folder of a sweep: the names of its runs, and the values of each."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import hold
from slurmgpu.run.submission_log import RECORDING_S
from slurmgpu.util.atomic_files import write_json
from slurmgpu.util.redact import hidden
from slurmgpu.util.regular_files import UnusableFileError
from slurmgpu.util.shared_files import exists, read_bytes
from slurmgpu.util.users import expanded

FILE = "sweep.json"
SWEEP_FORMAT = "slurmgpu sweep"
SWEEP_VERSION = 1


class SweepFile(TypedDict):
    """The content of sweep.json: by the name of a run, its values by the keys of [sweep], without secrets."""

    format: str
    version: int
    runs: dict[str, dict[str, Any]]


Listed = Mapping[str, Mapping[str, Any]]
"""The values of runs, by their names."""


def record_runs(folder: Path, runs: Listed, beside: Callable[[Listed], Listed] = lambda listed: listed) -> None:
    """Add runs to sweep.json.

    `beside` gets the runs that sweep.json has by then and returns them under the keys of `runs`, or raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # One process at a time: of two that write at once, the later would drop the runs of the other.
    with hold(folder / ".recording", "recording", patient=True, patience_s=RECORDING_S):
        listed = beside(listed_runs(folder))
        there = {name: dict(values) for name, values in listed.items() if was_submitted(folder / name)}
        named = {**there, **{name: hidden(values) for name, values in runs.items()}}
        value: SweepFile = {"format": SWEEP_FORMAT, "version": SWEEP_VERSION, "runs": named}
        write_json(folder / FILE, value)


def listed_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """The values of each run that sweep.json has, made or not, without secrets; {} if there is no such file."""
    return _read(folder) if exists(folder / FILE) else {}


def runs_of_sweep(folder: Path) -> list[Path] | None:
    """The run directories of a sweep, in its order, including those not made yet; None if `folder` holds no sweep."""
    folder = expanded(folder).absolute()
    if exists(folder / "run.json") or not exists(folder / FILE):
        return None
    return [folder / name for name in _read(folder)]


def was_submitted(folder: Path) -> bool:
    """Whether a run of a sweep exists; Slurm may have refused an earlier one, which ends the command."""
    return exists(folder / "run.json")


def said_not_submitted(folder: Path) -> str:
    """A sentence on a run of a sweep that was never made."""
    return f"{folder.name}: not submitted. Repeat the command that submitted the others to submit it."


def open_run(folder: Path) -> Run:
    """The run in a run directory. For the folder of a sweep, a SlurmGPUError that names its runs."""
    runs = [run for run in runs_of_sweep(folder) or () if was_submitted(run)]
    if not runs:
        return Run.open(folder)
    typed = shlex.quote(str(folder))
    raise SlurmGPUError(
        f"{folder} is the folder of a sweep, with {len(runs)} runs: {_listed([run.name for run in runs])}. Name one of "
        f"them, such as {shlex.quote(str(folder / runs[0].name))}; `slurmgpu status {typed}` shows all, "
        f"and `slurmgpu export {typed} rows.csv` writes the rows of all."
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 8 else [*names[:7], "…"])


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / FILE
    try:
        value = json.loads(read_bytes(path))
        if value["format"] != SWEEP_FORMAT or value["version"] != SWEEP_VERSION:
            raise SlurmGPUError(
                f"{path} has the format {value['format']!r} version {value['version']}; this slurmgpu reads "
                f"{SWEEP_FORMAT!r} version {SWEEP_VERSION}. Use the slurmgpu that made it, or name one of its runs."
            )
        runs: dict[str, dict[str, Any]] = {str(name): dict(values) for name, values in value["runs"].items()}
    except UnusableFileError as error:
        raise SlurmGPUError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SlurmGPUError(f"{path} is damaged: {error}. Name one of the runs in its folder.") from error
    if odd := [name for name in runs if "/" in name or name in ("", ".", "..")]:
        raise SlurmGPUError(f"{path} is damaged: {odd[0]!r} is no run's name. Name one of the runs in its folder.")
    return runs
