"""The site file: settings for all of a user's runs on a cluster, and profiles of them by name.

A group that shares an installation may have one, too, which the user's overrides; what sbatch reads in the user's
environment is below both. Run files override them, a chosen profile overrides run files, and options override all.

docs/how-to/site-file.md shows one; `slurmgpu init --site` writes one.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from slurmgpu.containers.settings import whole_path
from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.plan.executors import DEFAULT
from slurmgpu.plan.merged_tables import merge_tables
from slurmgpu.plan.overrides import Overrides, plain, source_of
from slurmgpu.plan.run_file import (
    ALL,
    ContainerTable,
    ExecutorName,
    GpuMemory,
    Resources,
    RunFile,
    Table,
    counted,
    parse_table,
    read_toml,
)
from slurmgpu.plan.slurm_options import SlurmOptions, plain_names
from slurmgpu.plan.variables import substitute
from slurmgpu.run.frozen_plan import GIVEN_RUN_FILE, NO_RUN_FILE
from slurmgpu.run.private import OF_SBATCH
from slurmgpu.util.shared_files import exists
from slurmgpu.util.users import expanded

TABLES = ("resources", "container", *OF_SBATCH)
"""The tables that a site file may have."""

OF_THE_SHELL = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
}
"""Variables of sbatch's, by which many users choose who pays, and where; Slurm sets none of them for a job."""


@dataclass(frozen=True)
class GivenRunFile:
    """A run file as a mapping instead of TOML. Relative paths in it are relative to `folder`, an absolute path.

    The file `items` is the input and moves into the run directory, as do `files`. `modules` are modules of the user
    that tasks import although no setting names them; `texts` are the sources of functions, which may name files.
    `called` is its name in errors; by default a run file's.
    """

    tables: Mapping[str, Any]
    folder: Path
    items: Path | None = None
    files: Sequence[Path] = ()
    modules: Sequence[str] = ()
    texts: Sequence[str] = ()
    called: str | None = None

    @property
    def path(self) -> Path:
        """Its path in the plan; no file exists there."""
        return self.folder / GIVEN_RUN_FILE


RunFileSource = Path | GivenRunFile
"""The path of a run file, or its tables."""

Origins = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By table and key: the `value`, and `from` where it was set, a flag or a file's name."""


class SiteResources(Table):
    """[resources] of a site file: the keys that describe the cluster, not the run."""

    gpu_type: str | None = None
    gpu_memory: GpuMemory | None = None
    executor: ExecutorName = DEFAULT
    device: Literal["auto", "cpu"] = "auto"


class Profile(Table):
    """[profiles.NAME] of a site file: values for the runs that name it. Relative paths are relative to the file."""

    resources: Resources = Resources.model_validate({})
    container: ContainerTable = ContainerTable.model_validate({})
    slurm: SlurmOptions = Field(default_factory=dict)
    merge: SlurmOptions = Field(default_factory=dict)


class SiteFile(Table):
    """A site file. Relative paths in it are relative to its folder."""

    resources: SiteResources = SiteResources.model_validate({})
    container: ContainerTable = ContainerTable.model_validate({})
    slurm: SlurmOptions = Field(default_factory=dict)
    merge: SlurmOptions = Field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)


def site_path() -> Path:
    """The path of this user's site file, which may not exist."""
    return expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "slurmgpu" / "site.toml"


def group_path() -> Path:
    """The path of the site file of all who share this Python environment, which may not exist."""
    return Path(sys.prefix, "etc", "slurmgpu", "site.toml")


def read_site() -> dict[str, Any]:
    """The tables of the site files, over the user's variables, with only the keys that they set."""
    tables: dict[str, Any] = {}
    for _, site in _sites():
        tables = merge_tables(tables, site)
    return tables


def profile_names() -> list[str]:
    """The profiles of the site files."""
    return list(_profiles())


def put_profile(overrides: Overrides, name: str | None) -> None:
    """Put the values of a profile into the overrides; by default of the profile in SLURMGPU_PROFILE, if it is set.

    SlurmGPUError for an unknown name.
    """
    if name := name or os.environ.get("SLURMGPU_PROFILE"):
        known = _profiles()
        if name not in known:
            hint = did_you_mean(name, known) or " It has none; write one, for example [profiles.debug.slurm]."
            files = " or ".join(str(path) for path, _ in _site_files()) or site_path()
            raise SlurmGPUError(f"The site file {files} has no profile {name!r}.{hint}")
        path, value = known[name]
        tables = _tables(Profile, value, path, f"{path}, profile {name}")
        overrides.put(tables, f"{_shown(path)}, profile {name}")


def _site_files() -> list[tuple[Path, dict[str, Any]]]:
    """The site files that there are, the group's before the user's, which overrides it."""
    found = []
    for path in (group_path(), site_path()):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append((path, read_toml(path)))
    return found


def _sites() -> list[tuple[Path, dict[str, Any]]]:
    """The same with the tables of `read_site`, behind a table for each of the user's variables, under its name."""
    told = {name: text for name in OF_THE_SHELL if (text := os.environ.get(name))}
    shell = [(Path(name), {"slurm": {OF_THE_SHELL[name]: text}}) for name, text in told.items()]
    return shell + [(path, _tables(SiteFile, value, path, str(path))) for path, value in _site_files()]


def _profiles() -> dict[str, tuple[Path, dict[str, Any]]]:
    """By name each profile and its file; the user's of a name in place of the group's."""
    return {
        name: (path, value)
        for path, tables in _site_files()
        for name, value in parse_table(SiteFile, tables, str(path)).profiles.items()
    }


def _shown(path: Path) -> str:
    """The name of a site file where a value's origin is shown."""
    return path.name if path == site_path() else str(path)


def _tables(model: type[Table], value: Mapping[str, Any], path: Path, where: str) -> dict[str, Any]:
    own = {key: table for key, table in value.items() if key != "profiles"}
    tables = parse_table(model, substitute(own, where)[0], where).model_dump(exclude_unset=True)
    if "container" in tables:
        tables["container"] = _absolute(tables["container"], path.parent)
    return tables


def path_of(source: RunFileSource) -> Path:
    """The path of a run file; for a mapping, a path without a file."""
    return source.path if isinstance(source, GivenRunFile) else source


def named(path: Path) -> str:
    """The name of a run file in messages; if there is no file at this path, the source of its keys."""
    return {GIVEN_RUN_FILE: "the given run file", NO_RUN_FILE: NO_RUN_FILE}.get(path.name, str(path))


def read_run_file(source: RunFileSource, overrides: Mapping[str, Any] | None = None) -> RunFile:
    """A run file, which overrides the site file; `overrides`, by table and key, override both."""
    below = merge_tables(read_site(), _read(source))
    where = _called(source) or named(path_of(source)) + " with the options over it" * any((overrides or {}).values())
    tables = merge_tables(below, overrides or {})
    if isinstance(overrides, Overrides):
        tables |= overrides.replaced
    if "resources" in tables:
        tables["resources"] = counted(tables["resources"])
    return parse_table(RunFile, tables, where)


def substitutions(source: RunFileSource) -> list[str]:
    """A line for each text of a run file, and of the site files, that has variables of the environment."""
    files = [
        (_shown(path), {table: keys for table, keys in tables.items() if table in TABLES})
        for path, tables in _site_files()
    ]
    if not isinstance(source, GivenRunFile) and source.name != NO_RUN_FILE:
        files.append((source.name, read_toml(source)))
    lines: list[str] = []
    for name, tables in files:  # a later file overrides the keys with which the lines begin
        lines = [line for line in lines if _at(tables, line.partition(" is ")[0]) is None]
        lines += substitute(tables, name)[1]
    return lines


def _at(tables: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None if there is none."""
    value: Any = tables
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def origins(source: RunFileSource, overrides: Mapping[str, Any]) -> Origins:
    """Every value in TABLES that was set, and where."""
    sites, own, path = _sites(), _read(source), path_of(source)
    values = read_run_file(source, overrides).model_dump()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for table in TABLES:
        sources: dict[str, str] = {}
        for site, tables in sites:
            sources |= dict.fromkeys(tables.get(table, {}), _shown(site))
        sources |= dict.fromkeys(own.get(table, {}), path.name)
        given = [key for key, value in overrides.get(table, {}).items() if value is not None]
        sources |= {key: source_of(overrides, table, key) for key in given}
        found[table] = {key: {"value": values[table][key], "from": source} for key, source in sources.items()}
    return found


def _called(source: RunFileSource) -> str | None:
    if isinstance(source, GivenRunFile):
        return source.called
    return f"the options of {NO_RUN_FILE}" if source.name == NO_RUN_FILE else None


def _read(source: RunFileSource) -> dict[str, Any]:
    if isinstance(source, GivenRunFile):
        value: dict[str, Any] = plain(source.tables, named(path_of(source)))
    elif source.name == NO_RUN_FILE:
        return {}
    else:
        try:
            value, _ = substitute(read_toml(source), str(source))
        except FileNotFoundError:
            raise SlurmGPUError(f"There is no run file {source}. `slurmgpu init` writes one.") from None
        except IsADirectoryError:
            resubmit = f"slurmgpu resubmit {shlex.quote(str(source))}"
            what = f"a run, which `{resubmit}` completes" if exists(source / "run.json") else "a folder"
            raise SlurmGPUError(f"{source} is {what}. Name a run file, such as slurmgpu.toml.") from None
    alone = value
    if isinstance(resources := value.get("resources"), dict) and resources.get("gpus") == ALL:
        alone = {**value, "resources": {**resources, "gpus": 0}}  # the site file or an option may set the executor
    parse_table(RunFile, alone, _called(source) or named(path_of(source)))  # alone, so that errors name this file
    return {**value, **{table: plain_names(value[table]) for table in OF_SBATCH if table in value}}


def _absolute(container: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    def whole_bind(bind: str | Mapping[str, Any]) -> str | dict[str, Any]:
        if isinstance(bind, str):
            source, colon, rest = bind.partition(":")
            return whole_path(source, folder) + colon + rest
        return {**bind, "src": whole_path(bind["src"], folder)}

    changed: dict[str, Any] = {
        key: whole_path(container[key], folder) for key in ("image", "scratch") if container.get(key)
    }
    if "binds" in container:
        changed["binds"] = [whole_bind(bind) for bind in container["binds"]]
    return {**container, **changed}
