"""The run file: TOML in, checked values out. Unknown keys are refused with a suggestion.

docs/reference/run-file.md lists every key.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from slurmgpu.errors import SlurmGPUError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SlurmValue = str | int | float | bool

SLURM_RESERVED = {
    "array": "--gpus, --tasks and --array of slurmgpu set it",
    "dependency": "--after of slurmgpu sets it",
    "gpus": "[resources] gpus sets it",
    "gpus_per_node": "[resources] gpus and gpus_per_task set it",
    "gpus_per_task": "[resources] gpus_per_task sets it",
    "output": "logs lie in the run directory",
    "error": "logs lie in the run directory",
    "open_mode": "logs lie in the run directory",
    "wrap": "slurmgpu writes the script",
    "parsable": "slurmgpu reads sbatch's answer",
}
"""sbatch options that slurmgpu sets itself, and why."""


def _slurm_names(value: Any) -> Any:
    """Sbatch's long names with '-' or '_', as users copy them; refused are those that slurmgpu sets itself."""
    if not isinstance(value, Mapping):
        return value
    # An unquoted 04:00:00 is a time of day to TOML.
    options = {
        str(name).lstrip("-").replace("-", "_"): str(option) if isinstance(option, datetime.time) else option
        for name, option in value.items()
    }
    for name in options:
        if name in SLURM_RESERVED:
            raise ValueError(f"{name!r} cannot be set here: {SLURM_RESERVED[name]}")
    return options


SlurmOptions = Annotated[dict[str, SlurmValue], BeforeValidator(_slurm_names)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WorkloadTable(_Table):
    """[workload]: which class computes the rows."""

    use: str
    batch_size: int | None = Field(None, ge=1)


class Resources(_Table):
    """[resources]: what the run may hold at once, and where its tasks run."""

    gpus: int = Field(1, ge=0)
    array: bool = False
    gpus_per_task: int | None = Field(None, ge=1)
    tasks: int | None = Field(None, ge=1)
    executor: Literal["slurm", "local", "debug"] = "slurm"
    device: Literal["auto", "cpu"] = "auto"


class RunFile(_Table):
    """A run file, and where it lies: relative paths in it are relative to its folder."""

    input: str | list[str]
    run_dir: str | None = None
    seed: int = 0
    shard_items: int | None = Field(None, ge=1)
    auto_resubmit: int = Field(0, ge=0, le=100)
    lease_s: float = Field(120.0, gt=0)
    margin_s: float = Field(60.0, ge=0)
    workload: WorkloadTable
    settings: dict[str, Any] = Field(default_factory=dict)
    resources: Resources = Resources.model_validate({})
    slurm: SlurmOptions = Field(default_factory=dict)
    merge: SlurmOptions = Field(default_factory=dict)


def read_run_file(path: Path, overrides: Mapping[str, Any] | None = None) -> RunFile:
    """The run file at `path`, with `overrides` (tables and keys as in the file) put over it; SlurmGPUError if wrong."""
    try:
        value = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SlurmGPUError(f"There is no run file {path}. `slurmgpu init` writes one.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SlurmGPUError(f"{path} is not TOML: {error}.") from error
    return parse_run_file(merge_tables(value, overrides or {}), str(path))


def parse_run_file(value: Mapping[str, Any], where: str) -> RunFile:
    """The run file that a mapping describes; `where` names it in errors."""
    try:
        return RunFile.model_validate(value)
    except ValidationError as error:
        raise SlurmGPUError(f"{where}: {_first_problem(error)}") from error


def parse_resources(value: Mapping[str, Any]) -> Resources:
    """[resources] from a mapping: of a run, with flags put over it."""
    try:
        return Resources.model_validate(value)
    except ValidationError as error:
        raise SlurmGPUError(f"resources: {_first_problem(error)}") from error


def parse_slurm_options(texts: Sequence[str]) -> dict[str, SlurmValue]:
    """The sbatch options in KEY=VALUE of --slurm; KEY alone is an option without a value, such as `no-requeue`."""
    pairs = (text.partition("=") for text in texts)
    options = {key.strip(): value if equals else True for key, equals, value in pairs}
    try:
        return TypeAdapter(SlurmOptions).validate_python(options)
    except ValidationError as error:
        raise SlurmGPUError(f"--slurm: {_first_problem(error)}") from error


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` put over `below`, key by key and within tables key by key; a None above changes nothing.

    A value that is itself a mapping, a setting say, is replaced whole.
    """
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping):
            given = {name: inner for name, inner in value.items() if inner is not None}
            merged[key] = {**merged.get(key, {}), **given}
        elif value is not None:
            merged[key] = value
    return merged


def parse_setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE of --set: the value is TOML where it can be read so, else the text itself."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SlurmGPUError(f"--set {text!r} is not of the form KEY=VALUE.")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def _first_problem(error: ValidationError) -> str:
    # A misspelt key is missing under its right name, too: the wrong one says more.
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(part) for part in problem["loc"] if part not in ("str", "int", "float", "bool", "list[str]")]
    table, key = path[:-1], path[-1] if path else ""
    place = f"[{'.'.join(table)}] {key}" if table else key
    if problem["type"] == "extra_forbidden":
        tables: dict[str, type[_Table]] = {"workload": WorkloadTable, "resources": Resources}
        known = (tables[table[0]] if table else RunFile).model_fields
        return f"unknown key {place}.{did_you_mean(key, known)}"
    if problem["type"] == "missing":
        return f"{place} is missing."
    text = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return f"{place}: {text}; found {problem['input']!r}.".removeprefix(": ")
