"""Marks in texts from items that look like special tokens, so that they are tokenised as plain text.

An item with "<|im_end|>" must not end the user's message. The text is cut at the marks and tokenised piece by piece,
otherwise unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from slurmgpu.llm.interface.engine import quoted_in

MARK = "\ufdd0"
"""A code point that Unicode reserves for internal use of programs; no text has it."""


class Quotes:
    """Splits texts that look like one of the `special` tokens."""

    def __init__(self, special: Collection[str]) -> None:
        longest_first = sorted((text for text in special if len(text) > 1), key=lambda text: (-len(text), text))
        # The lookahead finds overlapping matches.
        self._special = re.compile(f"(?=({'|'.join(map(re.escape, longest_first))}))") if longest_first else None

    def cut(self, text: str) -> str:
        """The text with marks; in a template's text only where some part comes from the item."""
        if self._special is None:
            return text
        quoted, pieces, end = quoted_in(text), [], 0
        for found in self._special.finditer(text):
            start, stop = found.span(1)
            if any(start < last and first < stop for first, last in quoted):
                pieces.append(text[end : start + 1])
                end = start + 1
        return MARK.join([*pieces, text[end:]])
