"""Environment variables in run files and site files: `${NAME}` and `${NAME:-default}`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.run_file import RunFile, read_value, takes
from slurmgpu.util.redact import NAMED, hide_in
from slurmgpu.util.toml import parts_of

VARIABLE = re.compile(r"\$(\$?)\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}")
"""A variable; with two dollar signs it is a literal text with one."""

LITERAL = {
    ("on_end",),
    ("settings", "run"),
    ("slurm", "setup"),
    ("merge", "setup"),
    ("container", "binds"),
    ("container", "env"),
    ("container", "scratch"),
}
"""Keys whose texts are not substituted: a shell, a program or the node expands its own variables there."""

SHOWN = 120
"""The most characters of a text that are shown."""


def substitute(tables: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The tables of a file with the values of variables in their texts, and a line for each text that changed.

    Raises SlurmGPUError for a variable that is not set, or that looks like a secret; `where` names the file.
    """
    told: list[str] = []
    sweep = tables.get("sweep")
    varies_runs = "input" in tables or (isinstance(sweep, Mapping) and "input" in sweep)

    def each(path: tuple[str, ...], value: Any) -> Any:
        place = _varied(path[1:], varies_runs) if path[:1] == ("sweep",) else path
        return value if place in LITERAL else inside(path, place, value)

    def inside(path: tuple[str, ...], place: tuple[str, ...], value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: each((*path, key), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [inside(path, place, inner) for inner in value]
        if (
            not isinstance(value, str)
            or (text := VARIABLE.sub(lambda match: _value(match, path, where), value)) == value
        ):
            return value
        told.append(f"{'.'.join(path)} is {_shown(text)}, from {_shown(value)} in {where}")
        # If the key takes no text, read it as a number.
        return read_value(text) if takes(place, text) is False else text

    return each((), tables), told


def _varied(path: tuple[str, ...], varies_runs: bool) -> tuple[str, ...]:
    """The key of the run file that one of [sweep] varies, as in `"slurm.setup" = […]`; a name alone is a setting's."""
    place = tuple(name for key in path for name in parts_of(key))
    is_setting = varies_runs and len(place) == 1 and place[0] not in RunFile.model_fields
    return ("settings", *place) if is_setting else place


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= SHOWN else f"{text[:SHOWN]}…", ensure_ascii=False)


def _value(match: re.Match[str], path: tuple[str, ...], where: str) -> str:
    escape, name, default = match.groups()
    if escape:
        return match[0][1:]
    value = os.environ.get(name)
    if default is not None and not value:
        return default
    key = ".".join(path)
    if value is None:
        raise SlurmGPUError(
            f"{where}: {key} has ${{{name}}}, but the variable {name} is not set. Set it, give a default with "
            f"${{{name}:-value}}, or write $${{{name}}} for the literal text."
        )
    if NAMED.search(name) or hide_in(value) != value:
        raise SlurmGPUError(
            f"{where}: {key} has ${{{name}}}, which looks like a secret, and others may read run.json, where values "
            "are frozen. Leave it out: tasks inherit the environment in which you submit."
        )
    return value
