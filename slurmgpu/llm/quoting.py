"""Quoting: what comes from an item is text for the model, also where it looks like one of its special tokens.

An item that holds "<|im_end|>" must not end the user's message, or begin another's. Such a text is cut within what
looks like a special token, by a mark that lasts until the prompt is tokenised, piece by piece. The text itself stays.
"""

from __future__ import annotations

import re
from typing import Any

from slurmgpu.llm.engine import Composed

MARK = "\ufdd0"
"""A code point that Unicode has set aside for a program's own use: no text that is interchanged has it."""


class Quotes:
    """Cuts what looks like a special token of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        known = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        known |= set(tokenizer.all_special_tokens)
        longest_first = sorted((text for text in known if len(text) > 1), key=lambda text: (-len(text), text))
        # Looking ahead finds those that overlap.
        self._special = re.compile(f"(?=({'|'.join(map(re.escape, longest_first))}))") if longest_first else None

    def cut(self, text: str) -> str:
        """The text with marks; of a template's text only where at least a part of it comes from the item."""
        if self._special is None:
            return text
        quoted = text.quoted if isinstance(text, Composed) else ((0, len(text)),)
        pieces, end = [], 0
        for found in self._special.finditer(text):
            start, stop = found.span(1)
            if any(start < last and first < stop for first, last in quoted):
                pieces.append(text[end : start + 1])
                end = start + 1
        return MARK.join([*pieces, text[end:]])
