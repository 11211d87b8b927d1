"""The site file: settings for all of a user's runs on a cluster. Run files override it, and flags override both.

docs/how-to/site-file.md shows one; `slurmgpu init --site` writes one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from slurmgpu.containers.settings import whole_path
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.executors import DEFAULT
from slurmgpu.plan.run_file import (
    ALL,
    ContainerTable,
    ExecutorName,
    GpuMemory,
    RunFile,
    SlurmOptions,
    Table,
    counted,
    merge_tables,
    parse_table,
    plain_names,
    read_toml,
)

NO_RUN_FILE = "slurmgpu run"
"""The file name of a run file that is not read: the command line gave all of it."""

TABLES = ("resources", "container", "slurm", "merge")
"""The tables that a site file may have."""

Origins = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By table and key: the `value`, and `from` where it was set, a flag or a file's name."""


class SiteResources(Table):
    """[resources] of a site file: the keys that describe the cluster, not the run."""

    gpu_type: str | None = None
    gpu_memory: GpuMemory | None = None
    executor: ExecutorName = DEFAULT
    device: Literal["auto", "cpu"] = "auto"


class SiteFile(Table):
    """A site file. Relative paths in it are relative to its folder."""

    resources: SiteResources = SiteResources.model_validate({})
    container: ContainerTable = ContainerTable.model_validate({})
    slurm: SlurmOptions = Field(default_factory=dict)
    merge: SlurmOptions = Field(default_factory=dict)


def site_path() -> Path:
    """The path of this user's site file, which may not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "slurmgpu" / "site.toml"


def read_site() -> dict[str, Any]:
    """The tables of the site file, with only the keys that it sets; empty without a site file."""
    path = site_path()
    try:
        value = read_toml(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    tables = parse_table(SiteFile, value, str(path)).model_dump(exclude_unset=True)
    if "container" in tables:
        tables["container"] = _absolute(tables["container"], path.parent)
    return tables


def read_run_file(path: Path, overrides: Mapping[str, Any] | None = None) -> RunFile:
    """The run file at `path`, which overrides the site file; `overrides`, by table and key, override both."""
    tables = merge_tables(merge_tables(read_site(), _read(path)), overrides or {})
    if "resources" in tables:
        tables["resources"] = counted(tables["resources"])
    return parse_table(RunFile, tables, str(path))


def origins(path: Path, overrides: Mapping[str, Any]) -> Origins:
    """Every value in TABLES that was set, and where."""
    site, own = read_site(), _read(path)
    values = read_run_file(path, overrides).model_dump()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    flags = {"slurm": "--slurm", "merge": "--mail-user"}
    for table in TABLES:
        sources = dict.fromkeys(site.get(table, {}), site_path().name)
        sources |= dict.fromkeys(own.get(table, {}), path.name)
        given = [key for key, value in overrides.get(table, {}).items() if value is not None]
        sources |= {key: flags.get(table, f"--{key.replace('_', '-')}") for key in given}
        found[table] = {key: {"value": values[table][key], "from": source} for key, source in sources.items()}
    return found


def _read(path: Path) -> dict[str, Any]:
    if path.name == NO_RUN_FILE:
        return {}
    try:
        value = read_toml(path)
    except FileNotFoundError:
        raise SlurmGPUError(f"There is no run file {path}. `slurmgpu init` writes one.") from None
    alone = value
    if isinstance(resources := value.get("resources"), dict) and resources.get("gpus") == ALL:
        alone = {**value, "resources": {**resources, "gpus": 0}}  # the executor may be the site file's, or an option's
    parse_table(RunFile, alone, str(path))  # by itself, so that errors name this file
    return {**value, **{table: plain_names(value[table]) for table in ("slurm", "merge") if table in value}}


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
