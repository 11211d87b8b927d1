"""Find the final answer in a text and its number, also in LaTeX.

All patterns take time in proportion to the text: models also write 100,000 blanks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

LONGEST = 400
"""The most characters of a number; longer ones are not answers, and slow to parse."""

_SCALES = {
    "hundred": Fraction(100),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
}
_SCALE = "|".join(_SCALES)

ONE, PERCENT = Fraction(1), Fraction(1, 100)

# Chinese, Japanese and Korean put no blank between a word and a number.
_LETTER = r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]"
# 1,234.5   -3/4   2 1/2   .5   6e23   50%   minus 3   2 million; and 10 minus 5 is no -5
_NUMBER = re.compile(
    rf"(?<![.)])(?<!{_LETTER})(?:(?P<sign>[-+]|(?<![\d%)]\s)(?i:minus\s)|(?i:negative\s))\s{{0,8}})?(?:\$\s{{0,8}})?"
    r"(?:(?P<whole>\d+)\s{1,8}(?=\d+/\d))?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    rf"(?P<exponent>[eE][-+]?\d{{1,3}}(?!{_LETTER}))?"
    r"(?:/(?P<below>\d+(?:\.\d+)?))?"
    rf"(?:\s{{0,8}}(?P<percent>%)|(?P<scales>(?:\s{{1,8}}(?i:{_SCALE})){{1,3}})(?![\w-]))?"
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
_MARK = re.compile(r"####|#(?=\s{0,8}[-−–+$.\d])")
_BOX = "\\boxed{"

# In a text with # for each number: a sign or function of mathematics, two numbers without a word between them, a number
# times a letter, a letter plus something, a factorial, which at the end of a
# sentence is an exclamation. Letters that are often units are left out.
_FORMULA = re.compile(
    r"\\[A-Za-z]|[\^√π∞±<>≤≥²³]|#[^A-Za-z#]*#|#!(?!\s*$)|^\s*#!\s*$|#\s?[bijnqruvwxyz](?![A-Za-z])"
    r"|(?<![A-Za-z])[A-Za-z]\s{0,3}[-+*×]|[-+*×]\s{0,3}[A-Za-z](?![A-Za-z])"
    r"|(?<![A-Za-z])(?:sin|cos|tan|log|ln|exp|sqrt|pi|mod)(?![A-Za-z])"
)
_SEVERAL = re.compile(r"#\s{1,8}(?:or|and)\s{1,8}#")
_BEFORE = re.compile(r"(?:\^\s?[{(]?|\\sqrt\s?\{?|√|\d:|/)$")
_BEHIND = re.compile(
    r"\s{0,3}(?:[\^√π²³]|\\(?:sqrt|pi|[dt]?frac|cdot|times|theta|log|ln|sin|cos|tan|binom|infty)(?![A-Za-z]))"
    r"|[xyz](?![A-Za-z])"
)
_WORD = re.compile(r"(?<![A-Za-z\\{])[A-Za-z]{2,}")  # not \begin{pmatrix}
_N_WORDS_OF_AN_ANSWER = 3

_ANY = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    "|eighteen|nineteen|twenty"
)
_NAMES = _ANY.split("|")
# Not a part of a larger number (twenty-one, two hundred, one half), and not the pronoun "one".
_NAMED = re.compile(
    rf"(?<![\w-])(?<!no )(?<!(?:this|that|each|eith|noth) )(?:(?P<minus>minus|negative)\s)?(?P<name>{_ANY})(?![\w-])"
    rf"(?!\s(?:{_ANY}|hundred|thousand|million|billion|dozen|hal(?:f|ves)|thirds?|quarters?|of|another|in|can|must)\b)",
    re.IGNORECASE,
)
# A last line such as "So the answer is eight apples."
_STATES = re.compile(r"(?:^|\b(?:is|are|equals)|[:=])\W{0,8}$", re.IGNORECASE)
_ENDS = re.compile(r"\W{0,8}(?:[A-Za-z]{1,20})?\W{0,8}")
_CONCLUDES = re.compile(r"^\W{0,8}$|\b(?:answer|total|result|so|thus|hence|therefore)\b", re.IGNORECASE)
_REASON = r"(?:since|because|as|from|see|by|where|given|note|after|using|steps?|lines?|rounded|check(?:ed)?|due)\b"
_REMARK = re.compile(rf"[(\[]\s{{0,3}}{_REASON}", re.IGNORECASE)
_BECAUSE = re.compile(r"(?:\s[A-Za-z]{1,20})?[,;]?\s(?:since|because)\b", re.IGNORECASE)


class Number(NamedTuple):
    """A number as written, and its value: `face` times the `scale` of a percent sign or of a word such as million."""

    text: str
    value: Fraction
    scale: Fraction = ONE

    @property
    def face(self) -> Fraction:
        """The value without the percent sign or the word for its scale."""
        return self.value / self.scale

    @property
    def is_percent(self) -> bool:
        """Whether there is a percent sign."""
        return self.scale == PERCENT


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
    r"""The number that a text gives as its answer; None without one, or if it is part of a formula such as `3\sqrt{2}`.

    It is the last number in `\boxed{}`, else the first after the last `####` or `#`, else the last number of the text,
    without a reason in brackets at its end. Parses thousands separators, fractions (also in LaTeX), mixed numbers,
    powers of ten, `minus` and `negative`, words up to twenty, and hundred to trillion after digits.
    """
    answer, is_boxed = marked(text)
    plain = _without_reason(_plain(text if answer is None else answer))
    if is_boxed:
        plain = _right_side(plain)
        if _is_formula(plain):
            return None
    numbers = list(_NUMBER.finditer(plain))
    if (named := _named(plain, numbers)) is not None:
        return named
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
    plain = _right_side(_plain(shown))
    if not is_prose and (_is_formula(plain) or _SEVERAL.search(_outline(plain))):
        return None
    found = number_in(text)
    return None if found is not None and is_prose and found.text.lower() in _NAMES else found


def number_of(text: str) -> Number | None:
    """The number in a text that is only a number, such as `1.0`, `1,000` or `eight`; None for other texts."""
    plain = _plain(text.strip())
    found = _NUMBER.fullmatch(plain)
    return _number(found) if found else _name(_NAMED.fullmatch(plain))


def _plain(text: str) -> str:
    """A text with LaTeX replaced by plain text, as far as numbers need it."""
    for pattern, instead in _PLAIN:
        text = pattern.sub(instead, text)
    return text


def _without_reason(plain: str) -> str:
    """The text without a reason after its final number: `8 (since 5+3=8, step 2)`, or `8, because 5+3=8`."""
    text = plain.rstrip(" \t\r\n.*_")
    start = text.rfind("\n") + 1
    number = _NUMBER.match(text, start) or _NAMED.match(text, start)
    if number and _BECAUSE.match(text, number.end()):
        return text[: number.end()]
    if text.endswith((")", "]")):
        depth, opening = 0, len(text) - 1
        for opening in range(len(text) - 1, start - 1, -1):
            depth += {")": 1, "]": 1, "(": -1, "[": -1}.get(text[opening], 0)
            if not depth:
                break
        stated = text[start:opening]
        if _REMARK.match(text, opening) and (_NUMBER.search(stated) or _NAMED.search(stated)):
            return text[:opening]
    return plain


def _named(plain: str, numbers: Sequence[re.Match[str]]) -> Number | None:
    """The number in words at the end of a text; after earlier digits only if the last line states just that number."""
    text = plain.rstrip()
    start = text.rfind("\n") + 1 if numbers else 0
    if numbers and numbers[-1].end() > start:
        return None
    names = list(_NAMED.finditer(text, start))
    if not names:
        return None
    before, behind = text[start : names[-1].start()], text[names[-1].end() :]
    if numbers and not (_STATES.search(before) and _CONCLUDES.search(before) and _ENDS.fullmatch(behind)):
        return None
    return _name(names[-1])


def _name(found: re.Match[str] | None) -> Number | None:
    if found is None:
        return None
    value = Fraction(_NAMES.index(found["name"].lower()))
    return Number(found[0], -value if found["minus"] else value)


def _right_side(plain: str) -> str:
    """The text after the last equals sign, if it has a digit."""
    right = plain.rpartition("=")[2]
    return right if any(each.isdigit() for each in right) else plain


def _is_formula(plain: str) -> bool:
    return _FORMULA.search(_outline(plain)) is not None


def _outline(plain: str) -> str:
    """The text with # for each number."""
    return _NUMBER.sub("#", plain.replace("#", " "))


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
    if found["sign"] not in (None, "+"):
        value = -value
    words = (found["scales"] or "").lower().split()
    scale = PERCENT if found["percent"] else math.prod((_SCALES[word] for word in words), start=ONE)
    return Number(found[0].strip(), value * scale, scale)
