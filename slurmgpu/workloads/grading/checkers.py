"""Answer checkers: find the final answer in a text, and say whether it is right for an item."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.llm.answers.final_answers import ONE, Number, marked, number_in, reference_number
from slurmgpu.llm.answers.parsing import Pattern, compile_pattern, search_last
from slurmgpu.loader.modules import import_named
from slurmgpu.loader.names import with_whole_path
from slurmgpu.util.exceptions import described
from slurmgpu.workloads.grading import sandbox
from slurmgpu.workloads.grading.symbolic import Symbols
from slurmgpu.workloads.user_code import located

KINDS = ("numeric", "exact", "regex", "math", "python")

_FORMULA = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|\\[(\[]|\\boxed)")
"""A mark of mathematics. The sign of dollars has a backslash before it, and `\\\\[` is the end of a matrix's row."""

_OF_NUMBERS = (
    "sin|cos|tan|cot|sec|csc|log|exp|mod|modulo|sqrt|root|squared|cubed|factorial|infinity"
    "|hundred|thousand|million|billion|trillion|dozen|percent|half|halves|thirds?|quarters?"
    "|times|divided|multiplied|plus|minus|over|choose|and|or|out|less|more|than"
    "|alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|tau|phi|psi|rho|omega"
)
"""Words that make another number of the one before them, or stand for one."""

_COUNTED = re.compile(
    r"([-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?)\s+"
    rf"(?!.*\b(?:{_OF_NUMBERS})\b)[A-Za-z]{{3,}}(?:\s+[A-Za-z]{{2,}})*",
    re.IGNORECASE,
)
"""A number of things: math-verify reads a word that it does not know as a product of its letters."""

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.S)

TOLERANCE = Fraction(1, 1_000_000)
"""The default relative difference of numbers; integers must then be equal."""


@dataclass(frozen=True)
class Checker:
    """Compares answers with an item's field `reference` as text.

    Case, white space, and punctuation and quotes at the ends are ignored.
    """

    reference: str
    pattern: Pattern | None

    def load(self) -> None:
        """Start what the checker needs in a task; SlurmGPUError if it is missing."""

    def check_here(self) -> None:
        """At planning, refuse a machine that lacks what the checker needs; not called if tasks run in an image."""

    def answer(self, text: str) -> str | None:
        """The final answer in a text, or None: the pattern's match, else the marked answer, else the last line.

        ItemError if the user's pattern takes too long.
        """
        if self.pattern is not None:
            return search_last(self.pattern, text)
        answer, _ = marked(text)
        lines = [line.strip() for line in (text if answer is None else answer).splitlines() if line.strip()]
        if not lines:
            return None
        return lines[-1] if answer is None else lines[0]

    def normal(self, answer: str) -> str:
        """A form that is equal for answers with the same meaning, to count votes by."""
        return " ".join(answer.casefold().split()).strip(" .,;:!?\"'`*()[]{}$")

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Raise ItemError for an item without a right answer."""
        _reference_in(data, self.reference)

    def failure(self, text: str, data: Mapping[str, Any]) -> str | None:
        """Why the text's answer is wrong, in words that can be counted; None if it is right."""
        return None if self.is_correct(text, data) else "wrong"

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """Whether the text's answer is right; ItemError if the item has none to compare with."""
        wanted = _reference_in(data, self.reference)
        said = self.answer(text)
        return said is not None and self.normal(said) == self.normal(str(wanted))


@dataclass(frozen=True)
class Numeric(Checker):
    """Compares answers as numbers; see `number_in` for where a number is found.

    `tolerance` is the allowed relative difference; None for no difference between integers, and TOLERANCE otherwise.
    If one number has a percent sign or a word such as million, the other may be the bare number or the full value.
    """

    tolerance: Fraction | None

    def answer(self, text: str) -> str | None:
        """The text's last number, after a mark if there is one."""
        number = self._said(text)
        return None if number is None else number.text

    def normal(self, answer: str) -> str:
        """The number in lowest terms."""
        number = number_in(answer)
        return answer if number is None else str(number.value)

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Raise ItemError for an item whose right answer is not one number."""
        self._wanted(data)

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """Whether both are the same number."""
        wanted, said = self._wanted(data), self._said(text)
        if said is None:
            return False
        if said.scale == wanted.scale:
            return self._equal(said.face, wanted.face)
        # 50 % may be asked for, and answered, as 50%, as 50 and as 0.5; 2 million as 2 million, as 2 and as 2000000.
        has_one = ONE in (said.scale, wanted.scale)
        return self._equal(said.value, wanted.value) or (has_one and self._equal(said.face, wanted.face))

    def _equal(self, said: Fraction, wanted: Fraction) -> bool:
        if self.tolerance is None and said.denominator == wanted.denominator == 1:
            return said == wanted
        return abs(said - wanted) <= (TOLERANCE if self.tolerance is None else self.tolerance) * abs(wanted)

    def _said(self, text: str) -> Number | None:
        found = text if self.pattern is None else search_last(self.pattern, text)
        return None if found is None else number_in(found)

    def _wanted(self, data: Mapping[str, Any]) -> Number:
        wanted = reference_number(str(_reference_in(data, self.reference)))
        if wanted is None:
            raise ItemError(
                f"field {self.reference!r} holds {data[self.reference]!r:.80}, which is not one number; "
                f'checker = "exact" compares answers as text'
            )
        return wanted


@dataclass(frozen=True)
class Symbolic(Checker):
    """Compares answers as mathematical expressions, by math-verify (https://github.com/huggingface/Math-Verify)."""

    symbols: Symbols

    def load(self) -> None:
        """Start math-verify; SlurmGPUError if it is not installed."""
        self.symbols.start()

    def answer(self, text: str) -> str | None:
        """The marked answer, or the last expression that the library finds in a text without one."""
        if self.pattern is None and marked(text)[0] is None:
            # math-verify finds no number behind a typeset minus sign, and "3.**" in **3.**
            return (self.symbols.written(text.replace("−", "-")) or "").rstrip("*.") or None
        return super().answer(text)

    def normal(self, answer: str) -> str:
        """The simplest form of the expression."""
        return self.symbols.simplest(_as_formula(answer)) or super().normal(answer)

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Raise ItemError for an item whose right answer is no expression."""
        if not self.symbols.has_expression(self._wanted(data)):
            raise ItemError(
                f"field {self.reference!r} holds {data[self.reference]!r:.80}, where math-verify finds no expression; "
                f'checker = "exact" compares answers as text'
            )

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """Whether the answer equals the right one, which math-verify takes first: it treats the two differently."""
        said = self.answer(text)
        return said is not None and self.symbols.are_equal(self._wanted(data), _as_formula(said))

    def _wanted(self, data: Mapping[str, Any]) -> str:
        wanted = str(_reference_in(data, self.reference))
        return _as_formula(super().answer(wanted) or "" if marked(wanted)[0] is not None else wanted)


@dataclass(frozen=True)
class Program(Checker):
    """Runs the program in an answer, followed by the tests in the item's field `reference`, in a sandbox.

    The program is the last block between triple backticks, or the whole text without one. It is right if the tests
    run to their end.
    """

    def load(self) -> None:
        """Refuse a machine that cannot run programs in a sandbox."""
        sandbox.check()

    def check_here(self) -> None:
        """Refuse a machine that cannot run programs in a sandbox."""
        sandbox.check()

    def answer(self, text: str) -> str | None:
        """The program in a text; None in a blank one."""
        if self.pattern is not None:
            return search_last(self.pattern, text)
        blocks = _BLOCK.findall(text)
        return blocks[-1].rstrip("\n") if blocks else text if text.strip() else None

    def normal(self, answer: str) -> str:
        """The program without blank lines and blanks at the ends of lines."""
        return "\n".join(line.rstrip() for line in answer.splitlines() if line.strip())

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Raise ItemError for an item without tests."""
        self._tests(data)

    def failure(self, text: str, data: Mapping[str, Any]) -> str | None:
        """Why the tests do not run to their end after the program: `no program`, or as in `sandbox.failure`."""
        program = self.answer(text)
        return "no program" if program is None else sandbox.failure(program, self._tests(data))

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """Whether the tests run to their end after the program."""
        return self.failure(text, data) is None

    def _tests(self, data: Mapping[str, Any]) -> str:
        found = _reference_in(data, self.reference)
        lines = [found] if isinstance(found, str) else found
        if not isinstance(lines, Sequence) or not lines or not all(isinstance(line, str) for line in lines):
            raise ItemError(f"field {self.reference!r} holds {found!r:.80}; expected a program, or a list of them")
        return "\n".join(lines)


@dataclass(frozen=True)
class Function(Checker):
    """Asks the user's function `check(text, item) -> bool`; `item` is the item's mapping."""

    name: str
    check: Callable[[str, Mapping[str, Any]], Any]

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Accept any item: only the function knows what it needs."""

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """The function's result as a bool; any exception becomes an ItemError."""
        try:
            return bool(self.check(text, data))
        except ItemError:
            raise
        except Exception as error:
            raise ItemError(f"checker {self.name} raised {described(error)}") from error


def open_checker(
    kind: str, *, reference: str = "answer", pattern: str | None = None, tolerance: float | None = None
) -> Checker:
    """A checker by its kind: one of `KINDS`, or a function as "file.py:name" or "module:name".

    `reference` is the field with the right answer. If `pattern` is set, its last match, or that of its group, is the
    answer. `tolerance` is the allowed relative difference of numbers.
    """
    if kind not in KINDS and ":" not in kind:
        raise SlurmGPUError(
            f'checker is {kind!r}; expected the name of a kind, or a function as "file.py:name" or "module:name".'
            + did_you_mean(kind, KINDS)
        )
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise SlurmGPUError(f"tolerance is {tolerance!r}; expected a relative difference of at least 0.")
    if tolerance is not None and kind != "numeric":
        raise SlurmGPUError(f'tolerance is set, and checker is {kind!r}; it needs checker = "numeric". Remove it.')
    compiled = None if pattern is None else compile_pattern(pattern)
    if kind == "numeric":
        return Numeric(reference, compiled, None if tolerance is None else Fraction(str(tolerance)))
    if kind == "regex" and compiled is None:
        raise SlurmGPUError('checker = "regex" needs pattern, such as pattern = "Answer: ([A-D])".')
    if kind == "math":
        return Symbolic(reference, compiled, Symbols())
    if kind == "python":
        return Program(reference, compiled)
    if kind in KINDS:
        return Checker(reference, compiled)
    return Function("", compiled, kind, _load_function(kind))


def _reference_in(data: Mapping[str, Any], field: str) -> Any:
    if data.get(field) is None:
        raise ItemError(f"no right answer in field {field!r}.{did_you_mean(field, data)}")
    return data[field]


def _as_formula(answer: str) -> str:
    """An answer as text that math-verify parses as a formula: without delimiters it reads x^2 as words."""
    if _FORMULA.search(answer):
        return answer
    plain = answer.strip(" *").rstrip(" *.")
    counted = _COUNTED.fullmatch(plain)
    return rf"\boxed{{{counted[1] if counted else plain}}}"


def _load_function(name: str) -> Callable[[str, Mapping[str, Any]], Any]:
    module_name, _, function_name = with_whole_path(name, Path(), f"checker {name!r}").rpartition(":")
    with located(f"the import of checker {name!r}", module_name, "Correct it there."):
        module = import_named(module_name)
    found = getattr(module, function_name, None)
    if not callable(found):
        raise SlurmGPUError(
            f"checker {name!r}: {module_name} has no function {function_name!r}; "
            f"expected `def {function_name}(text, item)` that returns whether the text's answer is right."
        )
    function: Callable[[str, Mapping[str, Any]], Any] = found
    return function
