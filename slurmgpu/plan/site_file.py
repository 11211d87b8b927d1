"""The site file: what holds for all of a user's runs on a cluster. Run files go over it, and flags over both.

docs/how-to/site-file.md shows one; `slurmgpu init --site` writes one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.executors import DEFAULT
from slurmgpu.plan.run_file import (
    ContainerTable,
    ExecutorName,
    GpuMemory,
    RunFile,
    SlurmOptions,
    Table,
    merge_tables,
    parse_run_file,
    parse_table,
    plain_names,
    read_toml,
)

TABLES = ("resources", "container", "slurm", "merge")
"""The tables that a site file may have."""

Origins = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By table and key: the `value`, and `from` where it is, a flag or a file's name."""


class SiteResources(Table):
    """[resources] of a site file: what is the cluster's, not the run's."""

    gpu_type: str | None = None
    gpu_memory: GpuMemory | None = None
    executor: ExecutorName = DEFAULT
    device: Literal["auto", "cpu"] = "auto"


class SiteFile(Table):
    """A site file, and where it lies: relative paths in it are relative to its folder."""

    resources: SiteResources = SiteResources.model_validate({})
    container: ContainerTable = ContainerTable.model_validate({})
    slurm: SlurmOptions = Field(default_factory=dict)
    merge: SlurmOptions = Field(default_factory=dict)


def site_path() -> Path:
    """Where this user's site file lies, if there is one."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "slurmgpu" / "site.toml"


def read_site() -> dict[str, Any]:
    """The tables of the site file, with no other keys than those it sets; none where there is no site file."""
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
    """The run file at `path` over the site file, and `overrides`, tables and keys as in them, over both."""
    return parse_run_file(_merged([read_site(), _own(path, overrides or {}), overrides or {}]), str(path))


def origins(path: Path, overrides: Mapping[str, Any]) -> Origins:
    """Every value of these tables that was set, and where."""
    site, own = read_site(), _own(path, overrides)
    values = read_run_file(path, overrides).model_dump()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for table in TABLES:
        sources = dict.fromkeys(site.get(table, {}), site_path().name)
        sources |= dict.fromkeys(own.get(table, {}), path.name)
        sources |= {key: _flag(table, key) for key, value in overrides.get(table, {}).items() if value is not None}
        found[table] = {key: {"value": values[table][key], "from": source} for key, source in sources.items()}
    return found


def _own(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The run file's tables; none where `overrides` name the workload, and so are a whole run file."""
    return {} if "workload" in overrides else _read(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = read_toml(path)
    except FileNotFoundError:
        raise SlurmGPUError(f"There is no run file {path}. `slurmgpu init` writes one.") from None
    parse_run_file(value, str(path))  # by itself: what is wrong in it is said of it
    return {**value, **{table: plain_names(value[table]) for table in ("slurm", "merge") if table in value}}


def _merged(layers: list[Mapping[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for layer in layers:
        value = merge_tables(value, layer)
    return value


def _flag(table: str, key: str) -> str:
    named = {"slurm": "--slurm", "merge": "--mail-user"}
    return named.get(table, f"--{key.replace('_', '-')}")


def _absolute(container: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """[container] with its relative paths made absolute; those that begin with ~ or a variable are a node's."""

    def whole(path: str) -> str:
        return path if path.startswith(("/", "~", "$")) else os.path.normpath(folder / path)

    def whole_bind(bind: str | Mapping[str, Any]) -> str | dict[str, Any]:
        if isinstance(bind, str):
            source, colon, rest = bind.partition(":")
            return whole(source) + colon + rest
        return {**bind, "src": whole(bind["src"])}

    changed: dict[str, Any] = {key: whole(container[key]) for key in ("image", "scratch") if container.get(key)}
    if "binds" in container:
        changed["binds"] = [whole_bind(bind) for bind in container["binds"]]
    return {**container, **changed}
