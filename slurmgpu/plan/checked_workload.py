"""Build the workload that a run file names, and check each setting against its annotation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from slurmgpu.code.namesakes import importing_anew, namesakes_hidden
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.fields import with_kept
from slurmgpu.loader.adapted import Adapted
from slurmgpu.loader.build import build
from slurmgpu.loader.modules import at_planning, load_class
from slurmgpu.loader.names import resolve_use, title_of
from slurmgpu.loader.settings import UnknownSettingError, names_of_settings, settings_hints, texts_of_files
from slurmgpu.plan.overrides import TABLES, Overrides
from slurmgpu.plan.run_file import MOST, RunFile, table_of
from slurmgpu.plan.site_file import read_run_file
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.shards.columns import check_columns, columns_from_json, columns_to_json
from slurmgpu.util.amounts import some_of
from slurmgpu.util.process_wide import one_thread, working_folder
from slurmgpu.util.users import resolved


def workload_of(run_file: Path, overrides: Mapping[str, Any] | None) -> Adapted:
    """The workload that a run file names, with its settings, checked."""
    path = resolved(run_file)
    return build_workload(read_run_file(path, overrides), path.parent, overrides)[2]


def build_workload(
    config: RunFile, base: Path, overrides: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any], Adapted]:
    """The workload's full name, its settings as they will be frozen, and the workload."""
    full_name = resolve_use(config.workload.use, base)
    with one_thread(), working_folder(base), at_planning(full_name):
        settings = _settings(full_name, config.settings, base)
        if isinstance(overrides, Overrides):
            overrides.refuse_ambiguous(full_name, names_of_settings(load_class(full_name, base)))
        try:
            return full_name, settings, build(full_name, settings, base)
        except UnknownSettingError as error:
            raise SlurmGPUError(f"{error}{_where_it_belongs(error.name, settings)}") from error


def refuse_other_columns(plan: Plan) -> None:
    """SlurmGPUError if the class of a planned run has other columns now: no row of it would fit the run's files.

    They are not compared if this machine, from which the run need not have been submitted, lacks a module that the
    run's image may have.
    """
    base = Path(plan.search_path)
    try:
        with namesakes_hidden(base), working_folder(base), at_planning(plan.workload):
            workload, _ = importing_anew(base, lambda: build(plan.workload, plan.settings, base))
    except SlurmGPUError as error:
        if plan.container is not None and isinstance(error.__cause__, ModuleNotFoundError):
            return
        raise
    title = title_of(plan.workload, "workload")
    now = with_kept(check_columns(workload.columns, title), plan.keep)
    now, then = (json.loads(json.dumps(columns_to_json(each))) for each in (now, columns_from_json(plan.columns)))
    changed = [name for name in {**then, **now} if now.get(name) != then.get(name)]
    if not changed:
        return
    told = some_of(
        [f"{name!r} was {_in_words(then.get(name))} and is {_in_words(now.get(name))}" for name in changed], 3
    )
    raise SlurmGPUError(
        f"The columns of {title} have changed since the run was planned, and its files keep the planned ones: {told}. "
        f"Submit a new run with another --run-dir, restore the columns, or compute with earlier code: --code."
    )


def _in_words(column: Mapping[str, Any] | None) -> str:
    if column is None:
        return "absent"
    told = [column["kind"]]
    if dtype := column.get("dtype"):
        told.append(f"of {np.dtype(dtype)}")
    if shape := column.get("shape"):
        told.append(f"and shape {tuple(shape)}")
    return " ".join(told)


def _where_it_belongs(name: str, settings: Mapping[str, Any]) -> str:
    outer, dot, inner = name.partition(".")
    if dot:
        return f" A table is set as a whole: {outer}={{{inner}={json.dumps(settings[name])}}}."
    if name in RunFile.model_fields:
        return f" {name} is a key at the top of the run file, above its tables: set it there, or with -s .{name}=…."
    for table in TABLES:
        if (model := table_of((table,))) is not None and name in model.model_fields:
            return f" {name} is a key of [{table}] in the run file: set it there, or with -s {table}.{name}=…."
    return ""


def batch_size_of(config: RunFile, workload: Adapted) -> int:
    """The largest number of items in a call, by the run file or the class."""
    asked = config.workload.batch_size
    if workload.takes_one:
        if asked in (None, 1):
            return 1
        own = " Its own batch_size is set in [settings]." if "batch_size" in _hints(type(workload.user)) else ""
        raise SlurmGPUError(
            f"[workload] batch_size = {asked}, but {title_of(workload.name, 'workload')} computes items one by one. "
            f"Remove the key.{own}"
        )
    size = asked or workload.batch_size
    if size is None:
        raise SlurmGPUError(
            f"{title_of(workload.name)} has no batch_size; expected a whole number of at least 1. "
            f"Set it in the class or in [workload]."
        )
    return min(size, MOST)


def _hints(cls: type) -> dict[str, Any]:
    try:
        return settings_hints(cls)
    except (NameError, TypeError):
        return {}  # annotations that exist for type checkers only


def _settings(full_name: str, settings: Mapping[str, Any], search_path: Path) -> dict[str, Any]:
    """The settings to freeze: plain JSON, of the types that the workload's __init__ is annotated with."""
    for name, value in settings.items():
        if isinstance(value, date | time):
            raise SlurmGPUError(
                f"[settings] of {title_of(full_name, 'workload')}: {name} = {value.isoformat()} is a date or time of "
                f'TOML; expected text. Put it in quotes: {name} = "{value.isoformat()}".'
            )
    try:
        frozen: dict[str, Any] = json.loads(json.dumps(settings))
    except TypeError as error:
        raise SlurmGPUError(
            f"[settings] of {title_of(full_name, 'workload')}: {error}; expected text, numbers, booleans and lists."
        ) from error
    cls = load_class(full_name, search_path)
    frozen |= texts_of_files(full_name, cls, frozen)
    hints = _hints(cls)
    for name, value in frozen.items():
        if name in hints:
            _check_type(full_name, name, value, hints[name])
    return frozen


def _check_type(full_name: str, name: str, value: Any, hint: Any) -> None:
    try:
        is_model = isinstance(hint, type) and hasattr(hint, "model_fields")
        adapter = TypeAdapter(hint, config=None if is_model else ConfigDict(arbitrary_types_allowed=True))
    except PydanticSchemaGenerationError:
        return
    try:
        # JSON mode, strict: "5" is no int, but 5 is a float and a list is a tuple.
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        # If a setting may have several types, the deepest error belongs to the one that was meant.
        worst = max(error.errors(), key=lambda each: len(each["loc"]))
        problem, found, place = worst["msg"].removeprefix("Input "), worst.get("input", value), worst["loc"]
        where = f"setting {name!r}" + (f", at {place[-1]!r}," if place and found != value else "")
        as_text = _as_text(name, place, value) if worst["type"] == "string_type" else ""
        raise SlurmGPUError(f"{title_of(full_name)}: {where} {problem}; found {found!r}.{as_text}") from error


def _as_text(name: str, place: Sequence[str | int], value: Any) -> str:
    """A sentence on how to write a number, true or false as text in the run file and with -s, to append to an error."""
    keys = [name]
    for part in place:
        if not isinstance(value, Mapping) or part not in value:
            break  # a list, or one of several types
        keys, value = [*keys, str(part)], value[part]
    if not isinstance(value, int | float):
        return ""
    text = f'"{json.dumps(value)}"'
    return f" As text: {keys[-1]} = {text}, on the command line -s '{'.'.join(keys)}={text}'."
