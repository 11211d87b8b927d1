"""Rubrics: a judge's prompt, its verdicts, and their values, in TOML files; this folder has some."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.llm.answers.parsing import Labels, check_labels, compile_pattern, search_all
from slurmgpu.llm.prompts.jinja_templates import template_class
from slurmgpu.util.shared_files import list_names, read_given
from slurmgpu.util.toml import tomllib
from slurmgpu.util.users import expanded

FOLDER = Path(__file__).parent
METHODS = ("parse", "score")
MEASURES = ("accuracy", "win_rate", "mean")
TIE = "tie"


@dataclass(frozen=True)
class Rubric:
    """A judge's prompt and verdicts; docs/how-to/judge-a-run.md has the format.

    `verdicts` are the texts that a judge writes, and `values` the numbers, by the verdicts' names. `swap` names two
    fields that are exchanged to ask a second time, and `swapped` maps a verdict in that order to the first order.
    `answer` is the beginning of an answer whose verdict is scored. `template_format` is the template language of
    `prompt` and `system`.
    """

    prompt: str
    verdicts: Mapping[str, str]
    values: Mapping[str, float]
    description: str = ""
    system: str = ""
    method: str = "parse"
    measure: str = "mean"
    pattern: str = ""
    answer: str = ""
    fallback: bool = True
    max_tokens: int = 512
    swap: tuple[str, ...] = ()
    swapped: Mapping[str, str] | None = None
    template_format: str = "f-string"

    @property
    def names(self) -> tuple[str, ...]:
        """The verdicts' names, in order."""
        return tuple(self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """The rubric as a table, for a plan."""
        return {**asdict(self), "swap": list(self.swap)}

    def mirrored(self, verdict: str) -> str:
        """A verdict on the swapped texts, translated to the texts in their own order."""
        return (self.swapped or {}).get(verdict, verdict)


class Reader:
    """Finds a rubric's verdict in an answer."""

    def __init__(self, rubric: Rubric) -> None:
        self._names = {text: name for name, text in rubric.verdicts.items()}
        self._labels = Labels(self._names)
        self._pattern = compile_pattern(rubric.pattern, "pattern of the rubric") if rubric.pattern else None

    def verdict(self, text: str) -> str | None:
        """The name of the verdict in an answer; None if it has none, or several.

        The last verdict among a pattern's matches counts: a judge may write more after its verdict.
        """
        if self._pattern is None:
            found = self._labels.within(text)
        else:
            named = map(self._labels.exactly, reversed(search_all(self._pattern, text)))
            found = next((label for label in named if label is not None), None)
        return None if found is None else self._names[found]


def are_shares(values: Iterable[float]) -> bool:
    """Whether all values of verdicts lie between those of a loss and a win, so that their mean is a win rate."""
    return all(0 <= value <= 1 for value in values)


def check_choices(choices: Sequence[str], reader: Reader, rubric: Rubric) -> None:
    """Refuse `choices` that contain no verdict."""
    for choice in choices:
        if reader.verdict(choice) is None:
            raise SlurmGPUError(
                f"choices has {choice!r:.80}, but the rubric finds no verdict in it; expected whole answers, such as "
                f"{f'{rubric.answer} {next(iter(rubric.verdicts.values()))}'.strip()!r}."
            )


def shipped() -> list[str]:
    """The names of the rubrics that come with slurmgpu."""
    return [Path(name).stem for name in list_names(FOLDER) if name.endswith(".toml")]


def read_rubric(rubric: str | Mapping[str, Any], template_format: str | None = None) -> Rubric:
    """The rubric by its name, from a TOML file, or from a table; SlurmGPUError for a wrong one.

    `template_format` overrides the rubric's own.
    """
    more = {} if template_format is None else {"template_format": template_format}
    if not isinstance(rubric, str):
        return _checked({**rubric, **more}, "the rubric")
    if rubric in shipped():
        path = FOLDER / f"{rubric}.toml"
    elif rubric.endswith(".toml"):
        path = expanded(rubric)
    else:
        raise SlurmGPUError(
            f"There is no rubric {rubric!r}; expected the name of a built-in one, or the path of a .toml file."
            + did_you_mean(rubric, shipped())
        )
    return _checked({**_read_toml(path), **more}, f"rubric {path if rubric.endswith('.toml') else rubric}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = tomllib.loads(read_given(path).decode("utf-8-sig"))
    except OSError as error:
        raise SlurmGPUError(f"The rubric {path.absolute()} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SlurmGPUError(f"The rubric {path} is not TOML: {error}.") from error
    return value


_TYPES: Mapping[Any, tuple[type, str]] = {
    str: (str, "a text"),
    int: (int, "a whole number"),
    bool: (bool, "true or false"),
    tuple[str, ...]: (list, "a list of two fields"),
}
"""The TOML types of the fields of `Rubric`, by annotation; all others are tables."""


def _checked(table: Mapping[str, Any], owner: str) -> Rubric:
    known = get_type_hints(Rubric)
    for name, value in table.items():
        if name not in known:
            raise SlurmGPUError(f"{owner} has an unknown key {name!r}.{did_you_mean(name, known)}")
        kind, described = _TYPES.get(known[name], (Mapping, "a table"))
        if not isinstance(value, kind) and not (name == "swapped" and value is None):
            raise SlurmGPUError(f"{owner}: {name} is {value!r:.80}; expected {described}.")
    for name in ("prompt", "verdicts"):
        if name not in table:
            raise SlurmGPUError(f"{owner} has no {name}, which is required.")
    for name, choices in (("method", METHODS), ("measure", MEASURES)):
        if table.get(name, choices[0]) not in choices:
            raise SlurmGPUError(f"{owner}: {name} is {table[name]!r}; expected one of {', '.join(choices)}.")
    verdicts = dict(table["verdicts"])
    for name, text in verdicts.items():
        if not isinstance(text, str):
            raise SlurmGPUError(f"{owner}: verdict {name!r} is {text!r}; expected the text that a judge writes for it.")
    check_labels(list(verdicts.values()), f"verdicts of {owner}")
    values = {name: _value(name, table.get("values", {}), owner) for name in verdicts}
    _check_names(owner, verdicts, table)
    swap = tuple(table.get("swap", ()))
    measure = {"measure": "win_rate" if swap and are_shares(values.values()) else "mean"}
    rubric = Rubric(**{**measure, **table, "verdicts": verdicts, "values": values, "swap": swap})
    _check_texts(rubric, owner)
    return rubric


def _value(name: str, values: Mapping[str, Any], owner: str) -> float:
    """A verdict's value: its number in `values`, or its name as a number."""
    value = values.get(name, name if re.fullmatch(r"-?\d+(\.\d+)?", name) else None)
    if value is None:
        raise SlurmGPUError(f"{owner}: verdict {name!r} has no number under [values], and its name is not a number.")
    if isinstance(value, bool) or (not isinstance(value, int | float) and name in values):
        raise SlurmGPUError(f"{owner}: the value of verdict {name!r} is {value!r}; expected a number.")
    return float(value)


def _check_names(owner: str, verdicts: Mapping[str, str], table: Mapping[str, Any]) -> None:
    swapped = table.get("swapped") or {}
    for where, names in (("values", table.get("values", {})), ("swapped", [*swapped, *swapped.values()])):
        for name in names:
            if name not in verdicts:
                hint = did_you_mean(str(name), verdicts)
                raise SlurmGPUError(f"{owner}: [{where}] names {name!r}, which is not a verdict.{hint}")


def _check_texts(rubric: Rubric, owner: str) -> None:
    make = template_class(rubric.template_format)
    template = make(rubric.prompt, f"prompt of {owner}")
    make(rubric.system, f"system of {owner}")
    Reader(rubric)
    if rubric.max_tokens < 1:
        raise SlurmGPUError(f"{owner}: max_tokens is {rubric.max_tokens}; expected at least 1.")
    if rubric.swap:
        if len(rubric.swap) != 2 or not template.fields.issuperset(rubric.swap):
            raise SlurmGPUError(f"{owner}: swap is {list(rubric.swap)}; expected two fields of its prompt.")
        if TIE not in rubric.verdicts:
            raise SlurmGPUError(f"{owner} has swap, but no verdict {TIE!r} for orders that disagree.")
    elif rubric.swapped:
        raise SlurmGPUError(f"{owner} has [swapped], but no swap = [two fields of its prompt].")
