"""Configurations: `[settings]` with an item's values, checked at planning and in the task."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.inputs import sweeps
from slurmgpu.inputs.formats import format_of
from slurmgpu.inputs.lines import Txt
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.workloads.train.settings import HINTS, TAKEN_OVER, check, meant, several, takes_none, typed
from slurmgpu.workloads.train.training_class import TrainingClass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Configuration:
    """The given settings and arguments of one training, by their names."""

    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @property
    def shown(self) -> dict[str, Any]:
        """The column `config`."""
        return {**self.settings, **self.arguments}

    def over(self, data: Mapping[str, Any], cls: TrainingClass | None) -> Configuration:
        """The configuration with an item's values; SlurmGPUError for a name that is neither setting nor argument."""
        settings = dict(self.settings)
        arguments = {name: _argument(name, value, cls) for name, value in self.arguments.items()}
        for name, value in data.items():
            if name in HINTS:
                if value == "" or (value is None and not takes_none(name)):
                    continue  # an empty cell
                if method := taken_over(name, cls):
                    raise SlurmGPUError(
                        f"{name} has no effect: the class has its own method {method}. Take {name} as an argument of "
                        f"__init__ and use it there, or remove it."
                    )
                settings[name] = typed(name, value)
            elif name in ("training", "arguments"):
                raise SlurmGPUError(f"{name} belongs in [settings]; vary an argument under its own name.")
            elif cls is None or cls.takes_any or name in cls.arguments:
                if value != "" or cls is None or _kind(name, cls) in ("", "str"):  # else an empty cell
                    arguments[name] = _argument(name, value, cls)
            else:
                raise SlurmGPUError(
                    f"{name!r} is neither a setting nor an argument of {cls.name}.{meant(name, cls.arguments)}"
                )
        return Configuration(settings, arguments)

    def for_class(self, cls: TrainingClass, checked: TrainingSettings) -> dict[str, Any]:
        """The arguments for the class's `__init__`, including settings that it also takes.

        For a setting that is not given, the class keeps its default; the seed is always passed.
        """
        given = HINTS.keys() & {"seed", *self.settings, *cls.required}
        return {**self.arguments, **{name: getattr(checked, name) for name in cls.arguments if name in given}}

    def check(self, cls: TrainingClass | None) -> TrainingSettings:
        """The settings of this training; SlurmGPUError for conflicts, and for missing arguments."""
        for name in self.arguments:
            if name in HINTS:
                raise SlurmGPUError(
                    f"{name} under [settings.arguments] is also a setting, and your class gets the setting's value: "
                    f"move it to [settings]."
                )
        if cls is not None:
            self._check_arguments(cls)
        return check(self.settings)

    def _check_arguments(self, cls: TrainingClass) -> None:
        for name in self.arguments:
            if name not in cls.arguments and not cls.takes_any:
                known = did_you_mean(name, [*cls.arguments]) or " It takes no arguments."
                raise SlurmGPUError(f"{cls.name} takes no argument {name!r}.{known}")
        for name in sorted(cls.required - self.arguments.keys() - HINTS.keys()):
            raise SlurmGPUError(
                f"{cls.name} needs the argument {name!r}. Put it under [settings.arguments], or into each item."
            )


def taken_over(name: str, cls: TrainingClass | None) -> str:
    """The class's method that replaces a setting; "" if the setting has an effect, as far as is known."""
    method = TAKEN_OVER.get(name, "")
    if cls is None or method not in cls.methods or name in cls.arguments:
        return ""
    return "" if cls.takes_any and not cls.is_whole else method  # its __init__ may be inherited


def check_items(
    files: Iterable[Path], base: Configuration, cls: TrainingClass | None
) -> Iterator[tuple[TrainingSettings, list[str]]]:
    """The settings of each configuration in an input, and the names in `base` whose values it does not use.

    The SlurmGPUError for a wrong item names it.
    """
    seen: set[int] = set()  # hashes, since an input may have millions of configurations
    given = base.over({}, cls).shown  # with the types that the class takes, as below
    for path in files:
        for number, data in enumerate(_items(path)):
            try:
                found = base.over(data, cls)
                checked = found.check(cls)
            except SlurmGPUError as error:
                place = f"{sweeps.place_of(path, number, data)}: " if data else ""
                raise SlurmGPUError(f"{place}{error}") from error
            shown = hash(json.dumps(found.shown, sort_keys=True, default=str))
            if shown in seen and found.settings.get("seed") is not None:
                log.warning("%s repeats an earlier configuration and its seed.", sweeps.place_of(path, number, data))
            seen.add(shown)
            yield checked, [name for name in data if name in given and found.shown[name] != given[name]]


def _kind(name: str, cls: TrainingClass | None) -> str:
    """The type of an argument: "int", "float", "bool" or "str"; "" if it is unknown."""
    return cls.arguments[name].kind if cls is not None and name in cls.arguments else ""


def _argument(name: str, value: Any, cls: TrainingClass | None) -> Any:
    """An argument's value; a text becomes a number if the class takes one.

    An annotation is enforced; a default only decides how to convert a text, since a default 0 also allows 0.5.
    """
    kind = _kind(name, cls)
    is_strict = cls is not None and name in cls.arguments and cls.arguments[name].is_annotated
    try:
        found = _out_of_text(value, kind) if isinstance(value, str) else value
        if is_strict and found is not None and not _fits(found, kind):
            raise ValueError(f"it is a {type(found).__name__}")
    except (ValueError, KeyError) as error:
        raise SlurmGPUError(
            f"{name} is {json.dumps(value, default=str)}; expected what {cls and cls.name} takes, of type {kind}."
            f"{several(value)}"
        ) from error
    return int(found) if is_strict and kind == "int" and found is not None else found


def _out_of_text(value: str, kind: str) -> Any:
    """A text as the bool or number that the class takes; KeyError or ValueError for another text."""
    if kind == "bool":
        return {"true": True, "false": False}[value.strip().lower()]
    if kind in ("int", "float"):
        if kind == "int" and re.fullmatch(r"\s*[+-]?\d+(\.0*)?\s*", value):
            return int(value.partition(".")[0])
        return float(value)
    return value


def _fits(value: Any, kind: str) -> bool:
    if kind in ("bool", "str"):
        return isinstance(value, bool if kind == "bool" else str)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Parquet stores integers with missing values as floats.
    return is_number and (kind == "float" or isinstance(value, int) or value.is_integer())


def _items(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.exists():
        return
    its_format = format_of([path])
    if isinstance(its_format, Txt):
        raise SlurmGPUError(
            f"{path}: an item of train needs named values, and a line of text has no names. Expected .jsonl, .csv or "
            f".parquet, [sweep] in the run file, or no input for one training."
        )
    yield from (data for data in its_format.items(path) if not isinstance(data, ItemError))
