"""What text may hold that is meant for a terminal and not for a reader: escape sequences and control characters."""

from __future__ import annotations

import re

ESCAPES = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]|"  # of control: colours, the cursor
    r"[\]PX^_].*?(?:\x07|\x1b\\|$)|"  # with a text of their own, such as a window's title
    r"[ -/]*[0-~])",
    re.MULTILINE,
)
"""Escape sequences as ECMA-48 has them; the text of one that is not ended goes to the end of its line."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tabs and ends of lines, and those that turn the direction of a text and of what follows."""


def without_escapes(text: str) -> str:
    """A text without escape sequences."""
    return ESCAPES.sub("", text)


def harmless(text: str) -> str:
    """A text as lines that a terminal only shows: no escape sequences, and a sign in place of control characters."""
    return CONTROLS.sub("\ufffd", without_escapes(text.replace("\r\n", "\n").replace("\r", "\n")))
