"""Answer checkers: the final answer in a text, and whether it is the right one."""

from __future__ import annotations

import importlib
import importlib.util
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from slurmgpu.code import importer
from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.llm.final_answers import Number, marked, number_in, reference_number
from slurmgpu.llm.parsing import Pattern, compile_pattern, search_last

KINDS = ("numeric", "exact", "regex")

TOLERANCE = Fraction(1, 1_000_000)
"""The relative difference that a number may have, unless set; whole numbers may have none then."""


class Checker(Protocol):
    """Finds the final answer of a text, and says whether it is right for an item."""

    def answer(self, text: str) -> str | None:
        """The final answer as it stands in the text; None where there is none.

        ItemError where the user's pattern takes too long to find it.
        """

    def normal(self, answer: str) -> str:
        """A form that is equal for answers that mean the same, to count votes by."""

    def check_item(self, data: Mapping[str, Any]) -> None:
        """Raise ItemError for an item that does not tell what is right."""

    def is_correct(self, text: str, data: Mapping[str, Any]) -> bool:
        """Whether the text's answer is right; ItemError where the item cannot tell."""


def open_checker(
    kind: str, *, reference: str = "answer", pattern: str | None = None, tolerance: float | None = None
) -> Checker:
    """The checker of that kind: "numeric", "exact", "regex", or a function as "file.py:name" or "module:name".

    `reference` is the field with the right answer. `pattern` finds an answer in place of the kind's own rule: its last
    match, or its group there. `tolerance` is the relative difference that a number may have.
    """
    if kind not in KINDS and ":" not in kind:
        raise SlurmGPUError(
            f'checker is {kind!r}; expected the name of a kind, or a function as "file.py:name" or "module:name".'
            + did_you_mean(kind, KINDS)
        )
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise SlurmGPUError(f"tolerance is {tolerance!r}; expected at least 0, a share of the right number.")
    if tolerance is not None and kind != "numeric":
        raise SlurmGPUError(
            f'tolerance is set, and checker is {kind!r}: it is for the numbers of checker = "numeric". Leave it out.'
        )
    compiled = None if pattern is None else compile_pattern(pattern)
    if kind == "numeric":
        return Numeric(reference, compiled, None if tolerance is None else Fraction(str(tolerance)))
    if kind == "exact":
        return Exact(reference, compiled)
    if kind == "regex":
        if compiled is None:
            raise SlurmGPUError('checker = "regex" needs pattern, such as pattern = "Answer: ([A-D])".')
        return Exact(reference, compiled)
    return Function(kind, load_function(kind), compiled)


@dataclass(frozen=True)
class Numeric:
    """Right is the same number; see `number_in` for where it is looked for.

    `tolerance` is the relative difference that is as good as none; None: none between whole numbers, else TOLERANCE.
    Where one of the two has a percent sign, the other may be the number before the sign, or the share that it means.
    """

    reference: str
    pattern: Pattern | None
    tolerance: Fraction | None

    def answer(self, text: str) -> str | None:
        """The text's last number behind a mark, if there is a mark."""
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
        # 50 % of something is asked for, and answered, as 50%, as 50 and as 0.5.
        as_share = said.is_percent != wanted.is_percent and self._equal(said.value, wanted.value)
        return as_share or self._equal(said.face, wanted.face)

    def _equal(self, said: Fraction, wanted: Fraction) -> bool:
        if self.tolerance is None and said.denominator == wanted.denominator == 1:
            return said == wanted
        return abs(said - wanted) <= (TOLERANCE if self.tolerance is None else self.tolerance) * abs(wanted)

    def _said(self, text: str) -> Number | None:
        found = text if self.pattern is None else search_last(self.pattern, text)
        return None if found is None else number_in(found)

    def _wanted(self, data: Mapping[str, Any]) -> Number:
        wanted = reference_number(str(reference_of(data, self.reference)))
        if wanted is None:
            raise ItemError(
                f"field {self.reference!r} holds {data[self.reference]!r:.80}, which is not one number; "
                f'checker = "exact" compares answers as text'
            )
        return wanted


@dataclass(frozen=True)
class Exact:
    """Right is the same text, but for case, blanks, and punctuation and quotes around it."""

    reference: str
    pattern: Pattern | None

    def answer(self, text: str) -> str | None:
        """What the pattern finds; without one what is marked as the answer, else the last line."""
        if self.pattern is not None:
            return search_last(self.pattern, text)
        answer, _ = marked(text)
        lines = [line.strip() for line in (text if answer is None else answer).splitlines() if line.strip()]
        if not lines:
            return None
        return lines[-1] if answer is None else lines[0]

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
    pattern: Pattern | None

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


def load_function(name: str) -> Callable[[str, Mapping[str, Any]], Any]:
    """The function that "file.py:name" or "module:name" names; SlurmGPUError where there is none."""
    module_name, _, function_name = name.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except ImportError as error:
        raise SlurmGPUError(f"checker {name!r} cannot be imported: {error}.") from error
    except SlurmGPUError:
        raise
    except Exception as error:  # what the user's file does as it is imported
        raise SlurmGPUError(
            f"checker {name!r} cannot be imported: {_line_of(error)} has {type(error).__name__}: "
            f"{error.msg if isinstance(error, SyntaxError) else error}. Correct it there."
        ) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        raise SlurmGPUError(
            f"checker {name!r}: {module_name} has no function {function_name!r}; "
            f"expected `def {function_name}(text, item)` that returns whether the text's answer is right."
        )
    function: Callable[[str, Mapping[str, Any]], Any] = found
    return function


def _line_of(error: Exception) -> str:
    """The file and the line where an import failed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


def _import_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise SlurmGPUError(f"checker: there is no file {path}.")
    name = f"slurmgpu_checker_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=importer.loader_of(name, path))
    if spec is None or spec.loader is None:
        raise SlurmGPUError(f"checker: {path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
