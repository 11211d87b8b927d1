"""Remove escape sequences and control characters, which a terminal would obey, from text."""

from __future__ import annotations

import re

ESCAPES = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]|"  # of control: colours, the cursor
    r"[\]PX^_].*?(?:\x07|\x1b\\|$)|"  # with a text of their own, such as a window's title
    r"[ -/]*[0-~])",
    re.MULTILINE,
)
"""Escape sequences by ECMA-48; one that does not end goes to the end of its line."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tabs and ends of lines, and those that change the direction of text."""


def without_escapes(text: str) -> str:
    """A text without escape sequences."""
    return ESCAPES.sub("", text)


def plain(text: str) -> str:
    """A text as one line without escape sequences and control characters."""
    printable = "".join(letter if letter.isprintable() else " " for letter in without_escapes(text))
    return " ".join(printable.split())


def harmless(text: str) -> str:
    """A text that a terminal only shows: without escape sequences, and with a sign for control characters."""
    return CONTROLS.sub("\ufffd", without_escapes(text.replace("\r\n", "\n").replace("\r", "\n")))
