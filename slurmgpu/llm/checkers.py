"""Answer checkers: the final answer in a text, and whether it is the right one."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean

KINDS = ("numeric", "exact", "regex")

# 1,234.5   -3/4   2 1/2   .5   6e23   50%
_NUMBER = re.compile(
    r"(?<![\w.)])(?P<sign>[-+]?)\s*\$?\s*"
    r"(?:(?P<whole>\d+)\s+(?=\d+/\d))?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d{1,3}(?![\d\w]))?"
    r"(?:/(?P<below>\d+(?:\.\d+)?))?\s*(?P<percent>%?)"
)
_LATEX = [
    (re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}"), r" \1/\2"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\\[!,;: ]|\\(?:left|right|text|mathrm)\b"), ""),
    (re.compile("[−–]"), "-"),
]
_MARK = re.compile(r"####|#(?=\s*[-+$.\d])")
_LONGEST = 400
"""Digits of a number: what is longer is no answer, and slow to compute with."""


class Checker(Protocol):
    """Finds the final answer of a text, and says whether it is right for an item."""

    def answer(self, text: str) -> str | None:
        """The final answer as it stands in the text; None where there is none."""

    def normal(self, answer: str) -> str:
        """A form that is equal for answers that mean the same, to count votes by."""

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Raise ItemError for an item that does not tell what is right."""

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """Whether the text's answer is right; ItemError where the item cannot tell."""


def open_checker(
    kind: str, *, reference: str = "answer", pattern: str | None = None, tolerance: float = 1e-6
) -> Checker:
    """The checker of that kind: "numeric", "exact", "regex", or a function as "file.py:name" or "module:name".

    `reference` is the field with the right answer. `pattern` finds an answer in place of the kind's own rule: the last
    match, its first group if it has one. `tolerance` is the relative difference that a number may have.
    """
    if kind not in KINDS and ":" not in kind:
        raise SlurmGPUError(
            f'checker is {kind!r}; expected {", ".join(KINDS)}, or a function as "file.py:name" or "module:name".'
            + did_you_mean(kind, KINDS)
        )
    if tolerance < 0:
        raise SlurmGPUError(f"tolerance is {tolerance!r}; expected at least 0, a share of the right number.")
    compiled = None if pattern is None else _compiled(pattern)
    if kind == "numeric":
        return Numeric(reference, compiled, Fraction(tolerance))
    if kind == "exact":
        return Exact(reference, compiled)
    if kind == "regex":
        if compiled is None:
            raise SlurmGPUError('checker = "regex" needs pattern, such as pattern = "Answer: ([A-D])".')
        return Exact(reference, compiled)
    return Function(kind, load_function(kind), compiled)


@dataclass(frozen=True)
class Numeric:
    """Right is a number that is as good as equal; see `number_in` for where it is looked for.

    One with a percent sign equals one without it both as a share and as the number before the sign.
    """

    reference: str
    pattern: re.Pattern[str] | None
    tolerance: Fraction

    def answer(self, text: str) -> str | None:
        """The text's last number behind a mark, if there is a mark."""
        found = text if self.pattern is None else matched(self.pattern, text)
        number = None if found is None else number_in(found)
        return None if number is None else number[0]

    def normal(self, answer: str) -> str:
        """The number in lowest terms."""
        number = number_in(answer)
        return answer if number is None else str(number[1])

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Raise ItemError for an item without a number as its right answer."""
        self._wanted(data)

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """Whether both are the same number."""
        wanted = self._wanted(data)
        said = self.answer(text)
        found = None if said is None else number_in(said)
        if found is None:
            return False
        factors = (1,) if found[2] == wanted[2] else (1, 100, Fraction(1, 100))
        return any(abs(found[1] * factor - wanted[1]) <= self.tolerance * abs(wanted[1]) for factor in factors)

    def _wanted(self, data: Mapping[str, Any]) -> tuple[str, Fraction, bool]:
        wanted = number_in(str(reference_of(data, self.reference)))
        if wanted is None:
            raise ItemError(f"field {self.reference!r} holds no number, but {data[self.reference]!r:.80}")
        return wanted


@dataclass(frozen=True)
class Exact:
    """Right is the same text, but for case, blanks, and punctuation and quotes around it."""

    reference: str
    pattern: re.Pattern[str] | None

    def answer(self, text: str) -> str | None:
        """What the pattern finds; without one what is marked as the answer, else the last line."""
        if self.pattern is not None:
            return matched(self.pattern, text)
        marked = text_behind_mark(text)
        lines = [line.strip() for line in (text if marked is None else marked).splitlines() if line.strip()]
        if not lines:
            return None
        return lines[-1] if marked is None else lines[0]

    def normal(self, answer: str) -> str:
        """Lower case, single blanks, nothing around it."""
        return " ".join(answer.casefold().split()).strip(" .,;:!?\"'`*()[]{}$")

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Raise ItemError for an item without a right answer."""
        reference_of(data, self.reference)

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """Whether both are the same text."""
        wanted = reference_of(data, self.reference)
        said = self.answer(text)
        return said is not None and self.normal(said) == self.normal(str(wanted))


@dataclass(frozen=True)
class Function:
    """Right is what a function of the user's says, `check(text, item) -> bool`; `item` is the item's mapping."""

    name: str
    check: Callable[[str, Mapping[str, Any]], Any]
    pattern: re.Pattern[str] | None

    def answer(self, text: str) -> str | None:
        """What the pattern finds; without one what is marked as the answer, else the last line."""
        return Exact("", self.pattern).answer(text)

    def normal(self, answer: str) -> str:
        """Lower case, single blanks, nothing around it."""
        return Exact("", None).normal(answer)

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Nothing: what an item needs is the function's affair."""

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """What the function returns, as a truth value; what it raises is the item's error."""
        try:
            return bool(self.check(text, data))
        except ItemError:
            raise
        except Exception as error:
            raise ItemError(f"checker {self.name} raised {type(error).__name__}: {error}") from error


def reference_of(data: Mapping[str, Any], field: str) -> Any:
    """The right answer that an item has; ItemError where it has none."""
    if data.get(field) is None:
        raise ItemError(f"no right answer in field {field!r}.{did_you_mean(field, data)}")
    return data[field]


def matched(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group of the last match, or all of it; None where nothing matches."""
    last = None
    for last in pattern.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if last is None:
        return None
    found: str | None = last[1] if pattern.groups else last[0]
    return found


def text_behind_mark(text: str) -> str | None:
    r"""The content of the last `\boxed{}`, else what follows the last `####` or `#` before a number; else None."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        return _braced(text, start + len("\\boxed{"))
    marks = list(_MARK.finditer(text))
    return text[marks[-1].end() :] if marks else None


def number_in(text: str) -> tuple[str, Fraction, bool] | None:
    r"""The number that a text ends on: as it is written, its value, and whether it is in percent; None without one.

    It is the last number in `\boxed{}`, else the first behind the last `####` or `#`, else the last of all. Commas
    between thousands, fractions, also LaTeX's, mixed numbers and exponents are understood.
    """
    marked = text_behind_mark(text)
    plain = text if marked is None else marked
    for pattern, instead in _LATEX:
        plain = pattern.sub(instead, plain)
    numbers = list(_NUMBER.finditer(plain))
    if not numbers:
        return None
    found = numbers[0] if marked is not None and "\\boxed{" not in text else numbers[-1]
    value = _value(found)
    return None if value is None else (found[0].strip(), value, bool(found["percent"]))


def load_function(name: str) -> Callable[[str, Mapping[str, Any]], Any]:
    """The function that "file.py:name" or "module:name" names; SlurmGPUError where there is none."""
    module_name, _, function_name = name.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except ImportError as error:
        raise SlurmGPUError(f"checker {name!r} cannot be imported: {error}.") from error
    found = getattr(module, function_name, None)
    if not callable(found):
        raise SlurmGPUError(
            f"checker {name!r}: {module_name} has no function {function_name!r}; "
            f"expected `def {function_name}(text, item)` that returns whether the text's answer is right."
        )
    function: Callable[[str, Mapping[str, Any]], Any] = found
    return function


def _import_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise SlurmGPUError(f"checker: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"slurmgpu_checker_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SlurmGPUError(f"checker: {path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SlurmGPUError(f"pattern {pattern!r} is no regular expression: {error}.") from error


def _braced(text: str, start: int) -> str:
    """What stands from `start` to the brace that closes it; to the end if none does."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start:position]
    return text[start:]


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > _LONGEST:
        return None
    value = Fraction(found["digits"].replace(",", "") + (found["exponent"] or ""))
    if found["below"]:
        below = Fraction(found["below"])
        if not below:
            return None
        value /= below
    value += int(found["whole"] or 0)
    if found["sign"] == "-":
        value = -value
    return value / 100 if found["percent"] else value
