"""The container of a run, from [container] in its run file, and what a resubmission may change in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmgpu.containers.runtime import DEFAULT_RUNTIME, runtime_named
from slurmgpu.containers.settings import Bind, Container, ContainerRecord, Identity, check_env, home_folder, whole_path
from slurmgpu.errors import SlurmGPUError
from slurmgpu.loader.names import title_of
from slurmgpu.plan.run_file import ContainerTable
from slurmgpu.plan.site_file import RunFileSource, origins, path_of, read_run_file
from slurmgpu.util.users import expanded, resolved


def image_path(table: ContainerTable, base: Path) -> Path | None:
    """The image that a run file in `base` names; None if tasks run without one."""
    if table.image is None or table.runtime == "none":
        return None
    return resolved(base / expanded(table.image))


def identify_image(image: Path, runtime: str, run_file: RunFileSource, overrides: Mapping[str, Any] | None) -> Identity:
    """The identity of a run file's image; a SlurmGPUError also says where it is named."""
    try:
        return runtime_named(runtime).identify(image)
    except SlurmGPUError as error:
        source = origins(run_file, overrides or {})["container"]["image"]["from"]
        where = source if source.startswith("--") else f"[container] image in {source}"
        raise SlurmGPUError(f"{error} {where} names it.") from error


def contain(
    table: ContainerTable, full_name: str, run_file: RunFileSource, overrides: Mapping[str, Any] | None
) -> Container | None:
    """The container to freeze, checked without starting anything; None if tasks run without one."""
    base = path_of(run_file).parent
    image = image_path(table, base)
    if image is None and (overrides or {}).get("container", {}).get("image"):
        found = origins(run_file, overrides or {})["container"]
        raise SlurmGPUError(
            f'{found["image"]["from"]} names an image, but [container] runtime = "none" in {found["runtime"]["from"]} '
            f"runs without one. Remove one of the two."
        )
    if image is None:
        return None
    settings = _settings(table, base)
    identity = identify_image(image, settings["runtime"], run_file, overrides)
    made = Container(image=str(image), identity=identity, packages=packages_of(full_name, base), **settings)
    runtime_named(made.runtime).check(made)
    return made


def _settings(table: ContainerTable, base: Path) -> dict[str, Any]:
    """The settings of [container] except the image."""
    check_env(table.env)
    _refuse_home(table, base)
    given = [bind if isinstance(bind, str) else bind.model_dump() for bind in table.binds]
    return {
        # "none" only if the run file of a run with an image was changed since.
        "runtime": DEFAULT_RUNTIME if table.runtime == "none" else table.runtime,
        "python": table.python,
        "binds": tuple(Bind.parse(bind, base) for bind in given),
        "env": table.env,
        "home": table.home,
        "stage": table.stage,
        "scratch": table.scratch and whole_path(table.scratch, base),
        "strict": table.strict,
    }


def packages_of(full_name: str, base: Path) -> tuple[tuple[str, str], ...]:
    """Name and path of the package of the workload, unless it is in the run file's folder."""
    module = full_name.rpartition(":")[0]
    top = module.partition(".")[0]
    if module.endswith(".py") or top == "slurmgpu":
        return ()
    folders = [Path(folder) for folder in getattr(sys.modules[top], "__path__", ())]
    file = sys.modules[top].__file__
    if folders and file:
        found = [(top, Path(file).parent)]
    elif file:
        found = [(Path(file).name, Path(file))]
    else:  # a namespace package: each of its folders gets its own folder on PYTHONPATH
        outside = [folder for folder in folders if folder.is_dir() and folder.resolve() != base / top]
        found = [(f".{number}/{top}" if number else top, folder) for number, folder in enumerate(outside)]
    if not folders and not found:
        raise SlurmGPUError(f"{title_of(full_name)}: package {top!r} has no file, so it cannot be bound into an image.")
    return tuple((name, str(path.resolve())) for name, path in found if path.resolve() != base / name)


def _refuse_home(table: ContainerTable, base: Path) -> None:
    """Refuse a run file in home, or above it, if tasks must not see home: its folder is bound."""
    home = Path(home_folder(os.environ)).resolve()
    if (table.strict or table.home != "host") and base in (home, *home.parents):
        what = "strict = true" if table.strict else f'home = "{table.home}"'
        raise SlurmGPUError(
            f"The run file is in {base}, which holds your home directory and would be bound into the container, but "
            f"[container] {what} keeps home out of it. Move the run file into a folder of its own, or remove that line."
        )


def contain_again(
    frozen: ContainerRecord, run_file: Path, overrides: Mapping[str, Any]
) -> tuple[ContainerRecord, list[str]]:
    """A run's container with the current [container] of its run file, for a resubmission; and notes on changes.

    `overrides` are the values of [container] that overrode the run file when the run was planned. The image must be
    the same, but may have another path. If the run file is missing or cannot be read, nothing changes.
    """
    before = Container.from_json(frozen)
    try:
        table, base = read_run_file(run_file, {"container": overrides}).container, run_file.parent
    except SlurmGPUError as error:
        return frozen, [f"[container] is unchanged: {error}"] if os.path.exists(run_file) else []
    after = replace(before, **_settings(table, base), image=str(image_path(table, base) or before.image))
    runtime_named(after.runtime).check(after)
    changed = [name for name in before.__dataclass_fields__ if getattr(before, name) != getattr(after, name)]
    notes = [f"[container] in {run_file} has changed and is used: {', '.join(changed)}."] if changed else []
    return after.to_json(), notes
