"""Structured answers from a server: the request's keys, and a check that the server has followed them.

A schema is sent as OpenAI's `response_format`, which many servers take; choices and a regular expression use the keys
of vLLM's server. A server may ignore all of them, so answers are checked.
"""

from __future__ import annotations

import functools
import json
from importlib.util import find_spec
from typing import Any

from slurmgpu.llm.interface.engine import Structure
from slurmgpu.llm.prompts.structures import OWN_KEYWORD, lark_of, library


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
    """Why the answer shows that the server ignored a structure; None if it does not. JSON is checked when it is parsed.

    A regular expression is only checked if llguidance is installed: Python's own matching may take forever.
    """
    if structure.kind == "choices":
        is_followed = text in json.loads(structure.text)
    elif structure.kind == "regex" and find_spec("llguidance") is not None:
        is_followed = _matches(structure, text)
    else:
        return None
    if is_followed:
        return None
    return f"the answer is {text!r:.80}, which {structure.kind} does not allow: the server ignores {structure.kind}"


def _matches(structure: Structure, text: str) -> bool:
    found = _bytes()
    matcher = library().LLMatcher(found, lark_of(structure), log_level=0)
    data = text.encode("utf-8", "replace")
    return matcher.try_consume_tokens([*data]) == len(data) and bool(matcher.is_accepting())


@functools.cache
def _bytes() -> Any:
    """A tokenizer for llguidance with bytes as tokens."""

    class Bytes:
        eos_token_id, bos_token_id = 256, None
        tokens = (*(bytes([number]) for number in range(256)), b"<end>")
        special_token_ids = (256,)

        def __call__(self, text: str) -> list[int]:
            return [*text.encode()]

    return library().LLTokenizer(library().TokenizerWrapper(Bytes()))
