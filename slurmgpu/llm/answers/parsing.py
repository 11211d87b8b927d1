"""Parse a model's free answer with a regular expression, as JSON, or for labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.final_answers import Number, number_of

TIME_LIMIT_S = 10.0
"""The time limit of one search: some patterns need exponential time."""


@dataclass(frozen=True)
class Pattern:
    """A setting's regular expression, with at most one group; `name` is the setting's name."""

    text: str
    name: str
    n_groups: int


def compile_pattern(pattern: str, name: str = "pattern") -> Pattern:
    """A setting's regular expression; `^` and `$` match at lines. SlurmGPUError for more than one group."""
    try:
        n_groups = re.compile(pattern, re.MULTILINE).groups
    except re.error as error:
        raise SlurmGPUError(f"{name} is {pattern!r}, which is not a regular expression: {error}.") from error
    if n_groups > 1:
        raise SlurmGPUError(
            f"{name} is {pattern!r}, which has {n_groups} groups; expected one, around the answer. Write (?:…) for the "
            f"other groups."
        )
    return Pattern(pattern, name, n_groups)


def search_all(pattern: Pattern, text: str) -> list[str]:
    """The pattern's group in each match, or the whole match without a group; ItemError after TIME_LIMIT_S."""
    # A dependency of transformers, which login nodes may lack; the standard library's re has no time limit.
    import regex

    matches = regex.finditer(pattern.text, text, regex.MULTILINE, timeout=TIME_LIMIT_S)
    try:
        found = [match[pattern.n_groups] for match in matches]
    except TimeoutError as error:
        raise ItemError(
            f"{pattern.name} {pattern.text!r:.200} took more than {TIME_LIMIT_S:g} s to search a text of {len(text)} "
            f"characters; expected a pattern without overlapping repetitions such as (a+)+"
        ) from error
    return [each for each in found if each is not None]


def search_last(pattern: Pattern, text: str) -> str | None:
    """The last result of `search_all`; None without a match."""
    found = search_all(pattern, text)
    return found[-1] if found else None


def json_field(text: str, field: str) -> Any:
    """The value of `field` in the last JSON object in a text that has it; None without one."""
    found = None
    for value in _objects(text):
        if field in value:
            found = value[field]
    return found


_DASH = re.compile(r"[−–](?=\s{0,8}\.?\d)")
_SURE_SIGN = re.compile(r"(?:−|(?<![^\W\d_])(?<![^\W\d_]\s)–)(?=\s{0,8}\.?\d)")  # not "Score –3"
_HYPHENED = re.compile(r"[^\W\d_]\s?-\s{0,8}\.?\d")
_SPACED, _WORD_BEFORE = re.compile(r"-\s"), re.compile(r"\w ")


class Labels:
    """Finds a label in a text, ignoring case unless labels differ only in case. Numbers match by value: 1.0 is 1."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        folded = {name.casefold(): name for name in self.names}
        self._folds = len(folded) == len(self.names)
        self._known = folded if self._folds else {name: name for name in self.names}
        self._by_number: dict[tuple[Fraction, bool], list[str]] = {}
        for name in self.names:
            if number := number_of(name):
                self._by_number.setdefault(_value(number), []).append(name)
        # Dashes before digits are minus signs, as in `exactly`, unless a label such as 1–2 is not a number.
        dashed = [name for name in self.names if _DASH.search(name)]
        self._has_signs = bool(self._by_number) and all(number_of(name) for name in dashed)
        signed = any(value < 0 for value, _ in self._by_number)
        # After a word an en dash may be a dash if no label is negative, and none has a hyphen there, such as "A-1".
        self._sign = _DASH if signed or any(map(_HYPHENED.search, self.names)) else _SURE_SIGN
        # The longest labels first: "hate speech" before "hate".
        longest_first = sorted(map(self._signs, self.names), key=lambda name: -len(name))
        names = "|".join(map(re.escape, longest_first))
        # Whole numbers, so that neither 1.5 nor minus 1 is read as 1; "negative 1" may be a word and a label.
        sign = r"(?:-\s{0,8}|(?i:minus|negative)\s{1,8})" if signed else r"(?i:minus)\s{1,8}"
        numbers = rf"|{sign}\d+(?:[.,]\d+)*|\d+(?:[.,]\d+)+" if self._by_number else ""
        end = r"(?![\w-]|[.,]\d)" if self._by_number else r"(?![\w-])"
        self._pattern = re.compile(rf"(?<![\w-])(?:{names}{numbers}){end}", re.IGNORECASE if self._folds else 0)

    def exactly(self, text: str) -> str | None:
        """The label that equals a text without white space and punctuation at its ends; else None."""
        for stripped in (text.strip(), text.strip(" \t\r\n.,;:!?\"'`*()[]{}<>")):
            found = self._known.get(stripped.casefold() if self._folds else stripped)
            if found is not None:
                return found
            # 5/5 is a rating of 5, not 1.
            number = number_of(stripped) if self._by_number and "/" not in stripped else None
            named = self._by_number.get(_value(number), []) if number else []
            if len(named) == 1:
                return named[0]
        return None

    def within(self, text: str) -> str | None:
        """The label that equals a text or its last line, or the only label named in it; None if ambiguous."""
        lines = [line for line in text.splitlines() if line.strip()]
        for part in (text, *lines[-1:]):
            found = self.exactly(part)
            if found is not None:
                return found
        for part in (*lines[-1:], text):
            if named := self._named(part):
                labels = named - {None}
                return labels.pop() if len(labels) == 1 else None
        return None

    def _signs(self, text: str) -> str:
        return self._sign.sub("-", text) if self._has_signs else text

    def _named(self, text: str) -> set[str | None]:
        """The labels named in a text, and None for a number that is not a label."""
        plain = self._signs(text)
        named = set()
        for found in self._pattern.finditer(plain):
            label = self.exactly(found[0])
            if _SPACED.match(found[0]):
                # A minus, or after a word also a dash; if it is not a label, the line may be an entry of a list.
                behind_word = found.start() > 1 and _WORD_BEFORE.match(plain, found.start() - 2)
                named |= {label, self.exactly(found[0][1:]) if behind_word else None} - {None}
            else:
                named.add(label)
        return named


def _value(number: Number) -> tuple[Fraction, bool]:
    return number.value, number.is_percent


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    decoder, position = json.JSONDecoder(), text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            yield value
        position = text.find("{", end)


def check_labels(labels: Sequence[str], name: str = "labels") -> tuple[str, ...]:
    """The labels; SlurmGPUError for too few, an empty one, or a repeated one."""
    found = tuple(labels)
    if len(found) < 2:
        raise SlurmGPUError(f"{name} has {len(found)}: {list(found)}; expected at least 2.")
    for number, label in enumerate(found):
        if not label.strip():
            raise SlurmGPUError(f"{name} holds {label!r}; expected a text to choose.")
        if label in found[:number]:
            raise SlurmGPUError(f"{name} holds {label!r} twice; remove one.")
    return found
