"""Hide values that look like tokens, keys and passwords before they are shown or shared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "•••"
NAME = r"(?:token|secret|passw(?:or)?d|credentials?|auth|(?:api|access|private|secret)[_-]?key)"
NAMED = re.compile(rf"(?:^|[_.-]){NAME}s?$", re.IGNORECASE)
SHAPES = (
    re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|wandb_v1_)[\w-]{16,}"),
    re.compile(r"(?<=hooks\.slack\.com/services/)[\w/-]+"),
    re.compile(r"(?<=bearer )[\w.~+/=-]{8,}", re.IGNORECASE),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(rf"(?<![A-Za-z0-9])({NAME}[\"']?\s*[=:]\s*[\"']?)(?!\s)([^\s\"',;]{{6,}})", re.IGNORECASE),
)
"""Secrets in texts: by their prefixes, their places, or the names before them."""


def hide_in(text: str) -> str:
    """The text with everything that looks like a secret hidden."""
    for shape in SHAPES:
        text = shape.sub(lambda found: (found[1] if found.re.groups else "") + HIDDEN, text)
    return text


def hidden(value: Any, name: str = "") -> Any:
    """The JSON value with texts under keys such as "api_key", and all that look like secrets, hidden."""
    if isinstance(value, Mapping):
        return {key: hidden(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(each, name) for each in value]
    if isinstance(value, str) and value:
        return HIDDEN if NAMED.search(name) else hide_in(value)
    return value
