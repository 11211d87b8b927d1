"""Find the final answer in a text, and its number, also in LaTeX.

All patterns take time in proportion to the text: models also write 100,000 blanks.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

LONGEST = 400
"""The most characters of a number; longer ones are no answers, and slow."""

# 1,234.5   -3/4   2 1/2   .5   6e23   50%
_NUMBER = re.compile(
    r"(?<![\w.)])(?:(?P<sign>[-+])\s{0,8})?(?:\$\s{0,8})?"
    r"(?:(?P<whole>\d+)\s{1,8}(?=\d+/\d))?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d{1,3}(?!\w))?"
    r"(?:/(?P<below>\d+(?:\.\d+)?))?(?:\s{0,8}(?P<percent>%))?"
)
_POWER = r"10\s{0,3}\^\s{0,3}(?:\{\s{0,3}([-+]?\d{1,3})\s{0,3}\}|([-+]?\d{1,3})(?!\d))"
_PLAIN = [
    (re.compile("[−–]"), "-"),
    (re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\s{0,3}\{([^{}]*)\}(?:\^\{?[23]\}?)?"), r" \1 "),
    (re.compile(r"\\(?:left|right|displaystyle|q?quad)(?![A-Za-z])|\\[!,;: ]|\^\s{0,3}(?:\{\\circ\}|\\circ)"), ""),
    (re.compile(r"\\(?:degrees?)(?![A-Za-z])|(?:(?<=[A-Za-z]{2})|(?<=\d m))\^\{?[23]\}?"), ""),  # 5 cm^2 is a 5
    (re.compile(r"\\[dtc]?frac\s{0,3}(?:\{([^{}]+)\}|(\d))\s{0,3}(?:\{([^{}]+)\}|(\d))"), r" \1\2/\3\4"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\\approx(?![A-Za-z])|≈"), "="),
    (re.compile(r"(?<=\d)\s{0,3}(?:\\times|\\cdot|[×·*x])\s{0,3}" + _POWER), r"e\1\2"),
    (re.compile(r"(?<![\w.^{(/*])" + _POWER), r"1e\1\2"),
]
_MARK = re.compile(r"####|#(?=\s{0,8}[-+$.\d])")
_BOX = "\\boxed{"

# In a text with # for each number: a sign or function of mathematics, two numbers without a word between them, a number
# times a letter, a letter plus something. Letters that are often units are left out.
_FORMULA = re.compile(
    r"\\[A-Za-z]|[\^√π∞±<>≤≥²³]|#[^A-Za-z#]*#|#\s?[bijnqruvwxyz](?![A-Za-z])"
    r"|(?<![A-Za-z])[A-Za-z]\s{0,3}[-+*×]|[-+*×]\s{0,3}[A-Za-z](?![A-Za-z])"
    r"|(?<![A-Za-z])(?:sin|cos|tan|log|ln|exp|sqrt|pi|mod)(?![A-Za-z])"
)
_BEFORE = re.compile(r"(?:\^\s?[{(]?|\\sqrt\s?\{?|√|\d:|/)$")
_BEHIND = re.compile(
    r"\s{0,3}(?:[\^√π²³]|\\(?:sqrt|pi|[dt]?frac|cdot|times|theta|log|ln|sin|cos|tan|binom|infty)(?![A-Za-z]))"
    r"|[xyz](?![A-Za-z])"
)
_WORD = re.compile("[A-Za-z]{2,}")
_N_WORDS_OF_AN_ANSWER = 3


class Number(NamedTuple):
    """A number as written, and its value, a hundredth of what is written if it is in percent."""

    text: str
    value: Fraction
    is_percent: bool

    @property
    def face(self) -> Fraction:
        """The value without the percent sign."""
        return self.value * 100 if self.is_percent else self.value


def marked(text: str) -> tuple[str | None, bool]:
    r"""The marked answer in a text, or None, and whether it is boxed.

    It is the content of the last `\boxed{}`, else the text after the last `####`, or after `#` before a number.
    """
    start = text.rfind(_BOX)
    if start >= 0:
        return _braced(text, start + len(_BOX)), True
    marks = list(_MARK.finditer(text))
    return (text[marks[-1].end() :] if marks else None), False


def number_in(text: str) -> Number | None:
    r"""The number that a text gives as its answer; None without one, or if it is part of a formula as `3\sqrt{2}`.

    It is the last number in `\boxed{}`, else the first after the last `####` or `#`, else the last of all. Thousands
    separators, fractions, also in LaTeX, mixed numbers and powers of ten are understood.
    """
    answer, is_boxed = marked(text)
    plain = _plain(text if answer is None else answer)
    if is_boxed:
        plain = _right_side(plain)
        if _is_formula(plain):
            return None
    numbers = list(_NUMBER.finditer(plain))
    if not numbers:
        return None
    found = numbers[-1 if answer is None or is_boxed else 0]
    in_formula = _BEFORE.search(plain[max(0, found.start() - 8) : found.start()]) or _BEHIND.match(plain, found.end())
    return None if in_formula else _number(found)


def reference_number(text: str) -> Number | None:
    """The number of a reference answer or solution; None if it is not just one number.

    Formulas, intervals, pairs, ratios and times are None; a solution in words without a mark is checked less strictly.
    """
    answer, is_boxed = marked(text)
    lines = [line for line in (text if answer is None else answer).splitlines() if line.strip()]
    if not lines:
        return None
    shown = answer if is_boxed and answer is not None else lines[-1] if answer is None else lines[0]
    is_prose = answer is None and len(_WORD.findall(shown)) > _N_WORDS_OF_AN_ANSWER
    if not is_prose and _is_formula(_right_side(_plain(shown))):
        return None
    return number_in(text)


def _plain(text: str) -> str:
    """A text with LaTeX replaced by plain text, as far as numbers need it."""
    for pattern, instead in _PLAIN:
        text = pattern.sub(instead, text)
    return text


def _right_side(plain: str) -> str:
    """The text after the last equals sign, if it has a digit."""
    right = plain.rpartition("=")[2]
    return right if any(each.isdigit() for each in right) else plain


def _is_formula(plain: str) -> bool:
    return _FORMULA.search(_NUMBER.sub("#", plain.replace("#", " "))) is not None


def _braced(text: str, start: int) -> str:
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start:position]
    return text[start:]


def _number(found: re.Match[str]) -> Number | None:
    if len(found[0]) > LONGEST:
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
    return Number(found[0].strip(), value / 100 if found["percent"] else value, bool(found["percent"]))
