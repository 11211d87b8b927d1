"""Answers of a given form by a server: what it is asked, and whether it has followed.

A schema goes as OpenAI's `response_format`, which many servers take; choices and a regular expression go in the words
of vLLM's server. A server may ignore all of them, so that answers are compared with what they must be.
"""

from __future__ import annotations

import json
import re
from typing import Any

from slurmgpu.llm.interface.engine import Structure
from slurmgpu.llm.prompts.structures import OWN_KEYWORD


def asked(structure: Structure) -> dict[str, Any]:
    """The keys of a request that ask for a structure."""
    if structure.kind == "schema":
        schema = {name: value for name, value in json.loads(structure.text).items() if name != OWN_KEYWORD}
        told = {"name": "answer", "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": told}}
    if structure.kind == "choices":
        return {"structured_outputs": {"choice": json.loads(structure.text)}}
    return {"structured_outputs": {"regex": structure.text}}


def problem(structure: Structure, text: str) -> str | None:
    """What shows that the server has ignored a structure; None if nothing does. JSON is looked at where it is read."""
    if structure.kind == "choices":
        is_followed = text in json.loads(structure.text)
    elif structure.kind == "regex":
        try:
            is_followed = re.fullmatch(structure.text, text) is not None
        except re.error:  # an expression that is none in Python
            return None
    else:
        return None
    if is_followed:
        return None
    return f"the answer is {text!r:.80}, which {structure.kind} does not allow: the server does not follow it"
