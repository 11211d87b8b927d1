"""Configurations: what an item makes of `[settings]`, checked at planning and again where it is trained."""

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
    """What one training is made of: the settings and the arguments that were given, by their names."""

    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @property
    def shown(self) -> dict[str, Any]:
        """All of it as a row keeps it."""
        return {**self.settings, **self.arguments}

    def over(self, data: Mapping[str, Any], cls: TrainingClass | None) -> Configuration:
        """The configuration with an item's values in place of its own; SlurmGPUError for a name that is neither's."""
        settings = dict(self.settings)
        arguments = {name: _argument(name, value, cls) for name, value in self.arguments.items()}
        for name, value in data.items():
            if name in HINTS:
                if value == "" or (value is None and not takes_none(name)):
                    continue  # an empty cell
                if method := taken_over(name, cls):
                    raise SlurmGPUError(
                        f"{name} has no effect: the class has a method {method} of its own. Take {name} as an argument "
                        f"of __init__ and use it there, or leave it out."
                    )
                settings[name] = typed(name, value)
            elif name in ("training", "arguments"):
                raise SlurmGPUError(f"{name} is for [settings] alone; an argument is varied by its own name.")
            elif cls is None or cls.takes_any or name in cls.arguments:
                if value != "" or cls is None or cls.arguments.get(name) in (None, "", "str"):  # else an empty cell
                    arguments[name] = _argument(name, value, cls)
            else:
                raise SlurmGPUError(
                    f"{name!r} is neither a setting nor an argument of {cls.name}.{meant(name, cls.arguments)}"
                )
        return Configuration(settings, arguments)

    def for_class(self, cls: TrainingClass, checked: TrainingSettings) -> dict[str, Any]:
        """What the class's `__init__` is given: the arguments, and the settings that it takes as well.

        A setting that nobody gave does not go over a default of the class's own; the seed is given always.
        """
        given = HINTS.keys() & {"seed", *self.settings, *cls.required}
        return {**self.arguments, **{name: getattr(checked, name) for name in cls.arguments if name in given}}

    def check(self, cls: TrainingClass | None) -> TrainingSettings:
        """The settings of this training; SlurmGPUError for what cannot go together, and for arguments that lack."""
        for name in self.arguments:
            if name in HINTS:
                raise SlurmGPUError(
                    f"{name} under [settings.arguments] is a setting of the training, too, and your class is given its "
                    f"value: set it under [settings]."
                )
        if cls is not None:
            self._check_arguments(cls)
        return check(self.settings)

    def _check_arguments(self, cls: TrainingClass) -> None:
        for name in self.arguments:
            if name not in cls.arguments and not cls.takes_any:
                known = did_you_mean(name, [*cls.arguments]) or " It takes none."
                raise SlurmGPUError(f"{cls.name} takes no argument {name!r}.{known}")
        for name in sorted(cls.required - self.arguments.keys() - HINTS.keys()):
            raise SlurmGPUError(
                f"{cls.name} needs the argument {name!r}: put it under [settings.arguments], or into each item."
            )


def taken_over(name: str, cls: TrainingClass | None) -> str:
    """The method of the class that leaves a setting without effect; "" where it has one, as far as is known."""
    method = TAKEN_OVER.get(name, "")
    if cls is None or method not in cls.methods or name in cls.arguments:
        return ""
    return "" if cls.takes_any and not cls.is_whole else method  # its __init__ may be inherited


def check_items(files: Iterable[Path], base: Configuration, cls: TrainingClass | None) -> Iterator[TrainingSettings]:
    """The settings of each configuration of an input; SlurmGPUError says which of its items is none."""
    seen: set[str] = set()
    for path in files:
        for number, data in enumerate(_items(path)):
            try:
                found = base.over(data, cls)
                checked = found.check(cls)
            except SlurmGPUError as error:
                place = f"{sweeps.place_of(path, number, data)}: " if data else ""
                raise SlurmGPUError(f"{place}{error}") from error
            text = json.dumps(found.shown, sort_keys=True, default=str)
            if text in seen and found.settings.get("seed") is not None:
                log.warning("%s: it is there before, with the same seed.", sweeps.place_of(path, number, data))
            seen.add(text)
            yield checked


def _argument(name: str, value: Any, cls: TrainingClass | None) -> Any:
    """An argument's value; of a text where the class takes a number, that number.

    What an annotation says is kept to; a default tells only what a text may stand for: 0 may be followed by 0.5.
    """
    kind = cls.arguments.get(name, "") if cls is not None else ""
    is_strict = cls is not None and name in cls.annotated
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
    """What a text is where the class takes a number or a truth value; KeyError or ValueError if it is none."""
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
    # Parquet's column of integers with gaps is one of floats.
    return is_number and (kind == "float" or isinstance(value, int) or value.is_integer())


def _items(path: Path) -> Iterator[Mapping[str, Any]]:
    """The data of a file's items; nothing of a file that another run has yet to make."""
    if not path.exists():
        return
    its_format = format_of([path])
    if isinstance(its_format, Txt):
        raise SlurmGPUError(
            f"{path}: an item is a configuration, with names, and a line of text has none. Expected .jsonl, .csv or "
            f".parquet, [sweep] in the run file, or no input at all for one training."
        )
    yield from (data for data in its_format.items(path) if not isinstance(data, ItemError))
