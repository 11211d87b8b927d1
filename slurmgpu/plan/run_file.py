"""The run file's tables: TOML in, checked values out. Unknown keys are refused with a suggestion.

docs/reference/run-file.md lists every key; `site_file` reads a run file over the site file.
"""

from __future__ import annotations

import copy
import datetime
import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from slurmgpu.containers.runtime import DEFAULT_RUNTIME, RUNTIMES
from slurmgpu.errors import GPUFaultError, SlurmGPUError, did_you_mean
from slurmgpu.plan.executors import DEFAULT, EXECUTORS
from slurmgpu.plan.slurm_options import SlurmOptions, SlurmValue, refuse_nul
from slurmgpu.plan.trackers import CredentialError, parse_destination
from slurmgpu.util import gpus
from slurmgpu.util.plugins import Plugins
from slurmgpu.util.regular_files import UnusableFileError
from slurmgpu.util.shared_files import read_given
from slurmgpu.util.toml import tomllib

TableT = TypeVar("TableT", bound=BaseModel)

MOST = 2**63 - 1
"""The largest integer in a run's HDF5 files and in the index of its input."""

ALL = "all"
"""Instead of a number of GPUs: as many as this machine has."""

SIZE = re.compile(r"(\d+(?:\.\d+)?) *([GMT])(i?)B?\Z")


def size_bytes(text: str) -> int:
    """Bytes of a size such as "80G" or "80GB", powers of ten as on data sheets, or "79.2GiB"; ValueError for others."""
    if not (found := SIZE.match(text)):
        raise ValueError('should be a size such as "80G" or "79.2GiB"')
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** {"M": 2, "G": 3, "T": 4}[found[2]])


def _checked_size(text: str) -> str:
    size_bytes(text)
    return text


GpuMemory = Annotated[str, AfterValidator(_checked_size)]


def _one_of(known: Plugins, *also: str) -> BeforeValidator:
    """A validator that accepts the names of these classes, and `also` others."""

    def check(value: Any) -> Any:
        if value not in (*known.built_in, *also) and value not in (names := [*known.names(), *also]):
            *others, last = map(repr, names)
            raise ValueError(f"should be {', '.join(others)} or {last}")
        return value

    return BeforeValidator(check)


RuntimeName = Annotated[str, _one_of(RUNTIMES, "none")]
ExecutorName = Annotated[str, _one_of(EXECUTORS)]


class Table(BaseModel):
    """A table that refuses unknown keys, and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _without_nul(cls, value: Any) -> Any:
        refuse_nul(value)
        return value


class WorkloadTable(Table):
    """[workload]: which class computes the rows."""

    use: str
    batch_size: int | None = Field(None, ge=1, le=MOST)
    retries: int = Field(3, ge=0, le=10)


class Resources(Table):
    """[resources]: what the run may use at once, and where its tasks run."""

    gpus: int = Field(1, ge=0)
    array: bool = False
    gpus_per_task: int | None = Field(None, ge=1)
    gpu_type: str | None = None
    gpu_memory: GpuMemory | None = None
    tasks: int | None = Field(None, ge=1)
    processes: Literal["one", "per-gpu"] | None = None
    nodes_per_task: int = Field(1, ge=1)
    tasks_per_node: int | None = Field(None, ge=1)
    executor: ExecutorName = DEFAULT
    device: Literal["auto", "cpu"] = "auto"


class BindTable(Table):
    """A bind of [container] whose path holds a colon; others are text, SRC[:DST[:ro]]."""

    src: str
    dst: str | None = None
    ro: bool = False


class ContainerTable(Table):
    """[container]: the image in which the workers run, and what they see of the node."""

    image: str | None = None
    runtime: RuntimeName = DEFAULT_RUNTIME
    python: str = "python3"
    binds: list[str | BindTable] = Field(default_factory=list)
    env: dict[str, str | bool] = Field(default_factory=dict)
    home: Literal["host", "private", "none"] = "host"
    stage: Literal["none", "node", "unpack"] = "none"
    scratch: str | None = None
    strict: bool = False


def _destinations(value: Any) -> Any:
    """Texts such as "tensorboard:DIR", each checked."""
    texts = [value] if isinstance(value, str) else value
    errors = []
    for text in texts if isinstance(texts, list) else ():
        try:
            parse_destination(str(text))
        except SlurmGPUError as error:
            errors.append(error)
    # Check for secrets first: the message about another error would show all texts.
    for cause in sorted(errors, key=lambda error: not isinstance(error, CredentialError)):
        raise ValueError(str(cause).removesuffix(".")) from cause
    return texts


class TrackTable(Table):
    """[track]: the trackers to which the merge job sends what tasks logged."""

    to: Annotated[list[str], BeforeValidator(_destinations)]


class RunFile(Table):
    """A run file. Relative paths in it are relative to its folder."""

    input: str | list[str] | None = None
    run_dir: str | None = None
    seed: int = Field(0, ge=-MOST - 1, le=MOST)
    shard_items: int | None = Field(None, ge=1)
    auto_resubmit: int = Field(0, ge=0, le=100)
    lease_s: float = Field(120.0, gt=0)
    margin_s: float = Field(60.0, ge=0)
    sample_s: float = Field(5.0, ge=0)
    on_end: str | None = None
    html: bool = True
    keep: list[str] = Field(default_factory=list)
    rename: dict[str, str] = Field(default_factory=dict)
    key: str | None = Field(None, min_length=1)
    workload: WorkloadTable
    settings: dict[str, Any] = Field(default_factory=dict)
    sweep: dict[str, Any] | None = None
    resources: Resources = Resources.model_validate({})
    container: ContainerTable = ContainerTable.model_validate({})
    slurm: SlurmOptions = Field(default_factory=dict)
    merge: SlurmOptions = Field(default_factory=dict)
    track: TrackTable | None = None


def table_of(path: Sequence[str], model: type[BaseModel] = RunFile) -> type[BaseModel] | None:
    """The model of a table, by default in the run file; None for a table of any keys, or if it is no table."""
    for name in path:
        field = model.model_fields.get(name)
        kinds = () if field is None else get_args(field.annotation) or (field.annotation,)
        inner = [
            kind
            for kind in kinds
            if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not inner:
            return None
        [model] = inner
    return model


def takes(path: Sequence[str], value: Any) -> bool | None:
    """Whether a key of the run file takes a value of this type; None for an unknown key."""
    field = None if (table := table_of(path[:-1])) is None else table.model_fields.get(path[-1])
    if field is None or field.annotation is None:
        return None
    adapter: TypeAdapter[Any] = TypeAdapter(
        field.rebuild_annotation(), config=None if table_of(path) else Table.model_config
    )
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def read_value(text: str) -> Any:
    """The value of a text as TOML; the text itself if it is no valid TOML, or a date."""
    try:
        # In an inline table nothing can follow the value, neither a comment nor another key.
        value = tomllib.loads(f"table = {{ value = {text} }}")["table"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    is_text = value.keys() != {"value"} or isinstance(value["value"], (datetime.date, datetime.time))
    return text if is_text else value["value"]


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; FileNotFoundError without one, SlurmGPUError if it is not TOML."""
    try:
        value = _parsed(read_given(path).decode("utf-8-sig"))
    except UnusableFileError as error:
        raise SlurmGPUError(f"{path} cannot be read: {error.strerror}. Name a file of TOML.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SlurmGPUError(f"{path} is not TOML: {error}.{_of_script(path)}") from error
    return copy.deepcopy(value)


@functools.lru_cache(maxsize=2)  # the site file and the run file, which are read again for each run of a sweep
def _parsed(text: str) -> dict[str, Any]:
    value: dict[str, Any] = tomllib.loads(text)
    return value


def _of_script(path: Path) -> str:
    """The command to type if a script, or an input, was named instead of a run file; "" for other files."""
    if path.suffix == ".toml":
        return ""
    name = shlex.quote(path.name if not path.name.startswith("-") else f"./{path.name}")
    each, program = {".py": ("FILE", f"python {name} …"), ".sh": ("FILE", f"bash {name} …")}.get(
        path.suffix, (name, "PROGRAM …")
    )
    return (
        f" A run file says what to compute. To run a program for each item of an input, use "
        f"slurmgpu run --each {each} --col NAME:TYPE -- {program}"
    )


def parse_table(model: type[TableT], value: Mapping[str, Any], where: str) -> TableT:
    """The values of a table, or of a file of them; `where` names it in errors."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise SlurmGPUError(f"{where}: {_first_problem(error, model)}") from error


def parse_resources(value: Mapping[str, Any]) -> Resources:
    """[resources] from a mapping, such as a run's, updated by flags."""
    return parse_table(Resources, counted(value), "resources")


def counted(resources: Mapping[str, Any]) -> Mapping[str, Any]:
    """[resources] with this machine's number of GPUs instead of `gpus = "all"`."""
    if resources.get("gpus") != ALL:
        return resources
    executor = EXECUTORS.make(resources.get("executor", DEFAULT))
    if executor.queues:
        raise SlurmGPUError(
            f'gpus = "{ALL}" counts the GPUs of this machine, but the executor {executor.name} computes elsewhere. '
            f"Give a number, such as --gpus 4, or compute here with --executor local."
        )
    try:
        return {**resources, "gpus": gpus.count()}
    except GPUFaultError as error:
        raise SlurmGPUError(f'gpus = "{ALL}": {error}. To compute on CPUs: --gpus 0.') from error


def parse_slurm_options(texts: Sequence[str]) -> dict[str, SlurmValue]:
    """The sbatch options in KEY=VALUE of --slurm; KEY alone is an option without a value, such as `no-requeue`.

    Values stay text, except true and false, so that times and names of digits are not changed.
    """
    pairs = (text.partition("=") for text in texts)
    words = {"true": True, "false": False}
    options = {key.strip(): words.get(value, value) if equals else True for key, equals, value in pairs}
    try:
        return TypeAdapter(SlurmOptions).validate_python(options)
    except ValidationError as error:
        raise SlurmGPUError(f"--slurm: {_first_problem(error)}") from error


def _first_problem(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    # A misspelt key is also missing under its right name; the message about the wrong name says more.
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(part) for part in problem["loc"] if part not in ("str", "int", "float", "bool", "list[str]")]
    table, key = path[:-1], path[-1] if path else ""
    place = f"[{'.'.join(table)}] {key}" if table else key
    if problem["type"] == "extra_forbidden" and model is not None:
        return f"unknown key {place}.{did_you_mean(key, (table_of(table, model) or model).model_fields)}"
    if problem["type"] == "missing":
        return f"{place} is missing."
    text = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if problem["type"] in ("model_type", "dict_type"):
        text = f"should be a table, [{'.'.join(path)}] with its keys in lines of their own"
    if isinstance(getattr(problem.get("ctx", {}).get("error"), "__cause__", None), CredentialError):
        return f"{place}: {text}."
    return f"{place}: {text}; found {problem['input']!r}.".removeprefix(": ")
