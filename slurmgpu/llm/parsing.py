"""Parsing: what a model's free answer says, by a regular expression, as JSON, or by the labels that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slurmgpu.errors import SlurmGPUError


def compile_pattern(pattern: str, name: str = "pattern") -> re.Pattern[str]:
    """A setting's regular expression, with `^` and `$` for lines; SlurmGPUError unless it has one group, or none."""
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise SlurmGPUError(f"{name} is {pattern!r}, which is no regular expression: {error}.") from error
    if compiled.groups > 1:
        raise SlurmGPUError(
            f"{name} is {pattern!r}, which has {compiled.groups} groups; expected one, around what is wanted. "
            f"Write (?:…) for the others."
        )
    return compiled


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """What the pattern's group holds where it matches last (the whole match without a group); None without a match."""
    found = None
    for match in pattern.finditer(text):
        found = match[pattern.groups] if match[pattern.groups] is not None else found
    return found


def json_field(text: str, field: str) -> Any:
    """The value of `field` in the last JSON object of a text that has it; None without one.

    There may be words, or a code fence, around the object.
    """
    found = None
    for value in _objects(text):
        if field in value:
            found = value[field]
    return found


class Labels:
    """Finds a label in what a model wrote. Upper and lower case are one, unless labels differ in nothing else."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        folded = {name.casefold(): name for name in self.names}
        self._folds = len(folded) == len(self.names)
        self._known = folded if self._folds else {name: name for name in self.names}
        # The longest first: "hate speech" is not "hate".
        longest_first = "|".join(map(re.escape, sorted(self.names, key=lambda name: -len(name))))
        self._pattern = re.compile(rf"(?<![\w-])(?:{longest_first})(?![\w-])", re.IGNORECASE if self._folds else 0)

    def exactly(self, text: str) -> str | None:
        """The label that a text is, white space and punctuation around it aside; None for anything else."""
        for stripped in (text.strip(), text.strip(" \t\r\n.,;:!?\"'`*()[]{}<>")):
            found = self._known.get(stripped.casefold() if self._folds else stripped)
            if found is not None:
                return found
        return None

    def within(self, text: str) -> str | None:
        """The label that a text names: all of it, or its last line, or the text names one and no other.

        A text that names several, so that one would have to be guessed, gives None.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        for part in (text, *lines[-1:]):
            found = self.exactly(part)
            if found is not None:
                return found
        for part in (*lines[-1:], text):
            named = {self.exactly(found) for found in self._pattern.findall(part)}
            if named:
                return named.pop() if len(named) == 1 else None
        return None


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a text, those within others aside."""
    decoder, position = json.JSONDecoder(), text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            yield value
        position = text.find("{", end)


def check_labels(labels: Sequence[str], name: str = "labels", n_least: int = 2) -> tuple[str, ...]:
    """The labels; SlurmGPUError if there are too few, an empty one, or one twice."""
    found = tuple(labels)
    if len(found) < n_least:
        raise SlurmGPUError(f"{name} has {len(found)} of them: {list(found)}; expected at least {n_least}.")
    for number, label in enumerate(found):
        if not label.strip():
            raise SlurmGPUError(f"{name} holds {label!r}; expected a text to choose.")
        if label in found[:number]:
            raise SlurmGPUError(f"{name} holds {label!r} twice; leave one out.")
    return found
