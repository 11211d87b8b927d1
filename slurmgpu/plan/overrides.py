"""Values that override a run file: from options, from `-s KEY=VALUE`, and from a profile of the site file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.loader.names import title_of
from slurmgpu.plan.merged_tables import Part, merge_tables
from slurmgpu.plan.run_file import RunFile, read_value, table_of, takes
from slurmgpu.plan.slurm_options import plain_names
from slurmgpu.run.private import OF_SBATCH
from slurmgpu.util.toml import parts_of

SET = "--set"
TABLES = [name for name, field in RunFile.model_fields.items() if table_of((name,)) or "dict[" in str(field.annotation)]
"""The tables of a run file."""


class Overrides(dict[str, Any]):
    """Values by key and table, as in a run file.

    `sources` has, by table and key, the option or the profile that gave a value; a key at the top is in the table "".
    `bare` are keys at the top that were written without a dot, like a setting, each with its source: `-s` or [sweep].
    `replaced` are values that replace the run file's; a table is replaced completely.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[tuple[str, str], str] = {}
        self.bare: dict[str, str] = {}
        self.replaced: dict[str, Any] = {}

    def put(self, tables: Mapping[str, Any], source: str = "") -> None:
        """Override values by tables; without `source`, each value comes from the option of the same name."""
        for table, key in _keys_of(tables):
            self.sources[table, key] = source or f"--{key.replace('_', '-')}"
        self.update({key: value for key, value in merge_tables(self, tables).items() if value != {}})

    def assign(self, path: Sequence[str], value: Any, source: str = SET) -> None:
        """Override one value, as `-s` or [sweep] does. SlurmGPUError if an option also gives it."""
        for name in reversed(path):
            value = Part({name: value})
        for place in _keys_of(value):
            if (other := self.sources.get(place, source)).startswith("--") and other != source:
                both = f"{'-s' if other == SET else other} and {'-s' if source == SET else source}"
                raise SlurmGPUError(f"{both} {'.'.join(path)} set the same key. Leave one out.")
        self.put(value, source)

    def assign_text(self, text: str) -> None:
        """Assign KEY=VALUE; the value is read as TOML if it is valid and fits the key, else as text.

        A key that takes a list also takes one value, or texts separated by commas.
        """
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise SlurmGPUError(f"-s {text!r} is not of the form KEY=VALUE, such as -s resources.gpus=4.")
        path, found = self.path_of(key.strip()), read_value(value)
        if path[0] == "sweep" and found == value and "," in value and not value.startswith("["):
            several, one = ([read_value(part.strip()) for part in value.strip("()").split(",")], [value])
            raise SlurmGPUError(
                f"-s {text} is read as one text with a comma. For several values write -s "
                f"'{key}={json.dumps(several)}'; for this text, -s '{key}={json.dumps(one)}'."
            )
        if takes(path, found) is False:
            found = next(
                (each for each in (value, [part.strip() for part in value.split(",")], [found]) if takes(path, each)),
                found,
            )
        self.assign(path, found)

    def assign_keys(self, values: Mapping[str, Any]) -> None:
        """Assign values by key, as `-s` names them; SlurmGPUError for a key that is no text."""
        for key, value in plain(values, "overrides").items():
            self.assign(self.path_of(key), value)

    def path_of(self, key: str, source: str = "-s") -> tuple[str, ...]:
        """The path of a key in a run file: `resources.gpus`, a key at the top, or the name of a setting.

        `source` names the origin of the key in errors.
        """
        first, *rest = parts_of(key.removeprefix("."))
        if _is_of_file(key):
            if not (rest or key.startswith(".")):
                self.bare[first] = source
        elif rest and (hint := did_you_mean(first, TABLES)).startswith(" Did"):
            raise SlurmGPUError(
                f"{source} {key}: a run file has no table {first!r}.{hint} For a setting, write "
                f"{source} settings.{key}."
            )
        return place_of(key)

    def refuse_ambiguous(self, full_name: str, names: Collection[str] | None) -> None:
        """Raise SlurmGPUError if a bare key may also be a setting; `names` are the workload's, None for any."""
        for key in sorted(self.bare if names is None else self.bare.keys() & set(names)):
            source = self.bare[key]
            former, latter = ("-s .{}=…", "-s settings.{}=…") if source == "-s" else ('".{}" = …', "settings.{} = …")
            typed, workload = "=…" if source == "-s" else "", title_of(full_name, "workload")
            raise SlurmGPUError(
                f"{source} {key}{typed} is ambiguous. Write {former.format(key)} for the key of the run file, or "
                f"{latter.format(key)} for the setting of {workload}."
            )


def plain(value: Any, where: str) -> Any:
    """A value as TOML has it: paths become text, tuples become lists, and keys without a value are left out.

    Raises SlurmGPUError for a key that is no text; `where` names the value in the message.
    """
    if isinstance(value, Mapping):
        if odd := [name for name in value if not isinstance(name, str)]:
            raise SlurmGPUError(
                f"{where}: the key {odd[0]!r:.80} is of type {type(odd[0]).__name__}; expected text, as in a run file."
            )
        return {name: plain(inner, f"{where}, {name}") for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [plain(inner, where) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def source_of(overrides: Mapping[str, Any], table: str, key: str) -> str:
    """The option or the profile that gave a value of `overrides`."""
    if isinstance(overrides, Overrides):
        return overrides.sources[table, key]
    return {"slurm": "--slurm", "merge": "--mail-user"}.get(table, f"--{key.replace('_', '-')}")


def _keys_of(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in tables.items():
        if not isinstance(value, Mapping):
            yield from [("", key)] if value is not None else ()
        else:
            yield from ((key, name) for name, inner in value.items() if inner is not None)


def place_of(key: str) -> tuple[str, ...]:
    """The path of a key in a run file, as `Overrides.path_of`."""
    first, *rest = path = parts_of(key.removeprefix("."))
    if not _is_of_file(key):
        return "settings", *path
    return tuple([first, *plain_names(dict.fromkeys(rest))] if first in OF_SBATCH else path)


def _is_of_file(key: str) -> bool:
    """Whether a key is one of a run file, at the top or in a table, and not the bare name of a setting."""
    first, *rest = parts_of(key.removeprefix("."))
    return key.startswith(".") or (first in TABLES if rest else first in RunFile.model_fields)
