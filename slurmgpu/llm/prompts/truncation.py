"""Truncate the item's text in a prompt that is too long; the template's text stays whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slurmgpu.llm.interface.engine import Composed, Prompt


def shorten(prompt: Prompt, fits: Callable[[Prompt], bool]) -> Prompt:
    """The prompt with as much of its longest part as fits; unchanged if it does not even fit without that part.

    The part is the longest field in the text, or the user's last message, and is cut at `truncation_side`.
    """
    text, put = _place(prompt)
    start, stop = max(text.quoted, key=lambda part: part[1] - part[0], default=(0, 0))

    def of_length(length: int) -> Prompt:
        kept = text[start : start + length] if prompt.truncation_side == "right" else text[stop - length : stop]
        missing = stop - start - length
        before = [part for part in text.quoted if part[1] <= start]
        after = [(part[0] - missing, part[1] - missing) for part in text.quoted if part[0] >= stop]
        return put(Composed(text[:start] + kept + text[stop:], (*before, (start, start + length), *after)))

    low, high = 0, stop - start  # bisect: `low` characters fit, and `high` do not
    if not fits(of_length(low)):
        return prompt
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(of_length(middle)) else (low, middle)
    return of_length(low)


def _place(prompt: Prompt) -> tuple[Composed, Callable[[Composed], Prompt]]:
    """The text that may be shortened, and a function that replaces it in the prompt."""
    if not prompt.messages:
        text = prompt.text if isinstance(prompt.text, Composed) else Composed(prompt.text, ((0, len(prompt.text)),))
        return text, lambda other: replace(prompt, text=other)
    users = [number for number, message in enumerate(prompt.messages) if message["role"] == "user"]
    if not users:
        return Composed(""), lambda other: prompt
    before, message, after = prompt.messages[: users[-1]], prompt.messages[users[-1]], prompt.messages[users[-1] + 1 :]
    content = message["content"]

    def put(other: Composed) -> Prompt:
        # Without the ranges of a Composed, all of a message's text comes from the item.
        return replace(prompt, messages=(*before, {**message, "content": str(other)}, *after))

    return Composed(content, ((0, len(content)),)), put
