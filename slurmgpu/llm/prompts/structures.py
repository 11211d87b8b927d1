"""Constrain answers to JSON of a schema, to choices, or to a match of a regular expression or a grammar.

Each becomes a grammar in llguidance's variant of Lark, which both engines follow; vLLM has the library as its backend
"guidance". Reasoning before the answer is a part of the grammar that allows every token, so that one grammar defines
where the answer begins.

JSON has no white space except one blank after each structural comma and colon, and only the properties that the schema
names: with more freedom, models fill an answer with blanks or properties up to max_tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.engine import STRUCTURE_ENGINES, Structure
from slurmgpu.util.exceptions import message_of

EXTRA = "slurmgpu[structured]"

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance: JSON as Python's `json.dumps` writes it, which models have seen most."""

OWN_KEYWORD = "x-guidance"
"""The schema keyword for options of llguidance."""

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""JSON Schema keywords with schemas by name as values."""

APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})
"""Keywords that apply other schemas to the same object, which may name more of its properties."""

VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords with values that are not schemas."""

_NAMES = re.compile(r'"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|//[^\n]*|#[^\n]*|\b(?:start|answer)\b')
"""Names of a grammar's rules that are also ours; the first alternatives skip texts, expressions and comments."""


@dataclass(frozen=True)
class Reasoning:
    """The token ids around reasoning that a model may write before its answer.

    `opens` and `closes` are `<think>` and `</think>`; `opens` is None if the prompt has already opened the reasoning.
    With `harmony`, the ids of `<|channel|>`, `<|message|>`, `<|end|>` and `<|start|>`, reasoning is in OpenAI's
    channels.
    """

    opens: int | None = None
    closes: int = -1
    harmony: tuple[int, int, int, int] | None = None

    def rules(self, ends: Collection[int]) -> str:
        """The rule `start` of a grammar in which the rule `answer` is the answer; `ends` are the model's end tokens."""
        if self.harmony is not None:
            channel, message, end, start = (f"<[{token}]>" for token in self.harmony)
            return (
                f'start: (thought_ {end} {start} "assistant")* {channel} "final" {message} answer\n'
                f"thought_: {channel} /analysis|commentary/ {message} {_any_but({self.harmony[2], *ends})}*\n"
            )
        thought = f"{_any_but({self.closes, *ends})}* <[{self.closes}]>"
        return f"start: {thought} answer\n" if self.opens is None else f"start: (<[{self.opens}]> {thought})? answer\n"


def _any_but(tokens: Collection[int]) -> str:
    return f"<[^{','.join(map(str, sorted(tokens)))}]>"


def structure_of(
    schema: str | Mapping[str, Any] | None = None,
    choices: Sequence[str] | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> Structure | None:
    """The structure in the settings, of which at most one may be set; SlurmGPUError for a wrong one."""
    given = {"schema": schema, "choices": choices, "regex": regex, "grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise SlurmGPUError(f"{names[0]} and {names[1]} are both set; an answer can have only one form. Remove one.")
    if schema is not None:
        return Structure("schema", json.dumps(_strict(_read_schema(schema)), ensure_ascii=False))
    if choices is not None:
        if not choices or "" in choices or len({*choices}) < len(choices):
            raise SlurmGPUError(f"choices is {[*choices]!r:.200}; expected different texts, none of them empty.")
        return Structure("choices", json.dumps([*choices], ensure_ascii=False))
    if regex is not None:
        return Structure("regex", regex)
    return None if grammar is None else Structure("grammar", grammar)


def check_structure(structure: Structure, engine: str, stop: Sequence[str]) -> None:
    """Refuse structures that the engine or llguidance does not support, and stop texts, which would cut answers."""
    able = [name for name, kinds in STRUCTURE_ENGINES.items() if structure.kind in kinds]
    if engine not in able:
        raise SlurmGPUError(
            f"{structure.kind} is set, and engine = {engine!r} does not support it; expected engine = "
            f"{' or '.join(map(repr, able))}, or no {structure.kind}."
        )
    if stop:
        raise SlurmGPUError(
            f"stop is set, but {structure.kind} already defines where an answer ends: a stop text would break it. "
            f"Remove stop."
        )
    if engine == "server" and find_spec("llguidance") is None:
        return  # the server has its own library
    is_own = structure.kind == "grammar"  # its lines are the user's
    lark = _as_lark(structure.text) if is_own else lark_of(structure)
    is_wrong, said = library().LLMatcher.validate_grammar_with_warnings(lark)
    if is_wrong:
        words = said[0] if is_own else re.sub(r"^at \d+\(\d+\): |\n +1 \| %llguidance[\s\S]*", "", said[0])
        raise SlurmGPUError(f"{structure.kind} cannot be used; llguidance says: {words.strip()}")


def library() -> Any:
    """The module llguidance; SlurmGPUError with the extra to install if it is missing."""
    try:
        import llguidance
    except ImportError as error:
        raise SlurmGPUError(
            f"schema, choices, regex and grammar need the package llguidance, which cannot be imported here ({error}). "
            f"Install it with pip install '{EXTRA}'."
        ) from error
    return llguidance


def lark_of(structure: Structure, reasoning: Reasoning | None = None, ends: Collection[int] = ()) -> str:
    """The grammar of an answer in llguidance's Lark, preceded by `reasoning` if the model may reason.

    SlurmGPUError for a grammar that is not Lark and cannot be converted to it.
    """
    before = "start: answer\n" if reasoning is None else reasoning.rules(ends)
    return f"%llguidance {{}}\n{before}{_answer_of(structure)}\n"


def _answer_of(structure: Structure) -> str:
    """The rules of a grammar with the rule `answer`."""
    text = structure.text
    if structure.kind == "schema":
        return f"answer: %json {text}"
    if structure.kind == "choices":
        return f"answer: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))}"
    if structure.kind == "regex":
        made = json.loads(library().LLMatcher.grammar_from_regex(text))
        return f"answer: {made['grammars'][0]['lark_grammar'].removeprefix('start:').strip()}"
    renamed = {"start": "answer", "answer": "answer_"}
    return _NAMES.sub(lambda found: renamed.get(found[0], found[0]), _as_lark(text))


def _as_lark(grammar: str) -> str:
    """The user's grammar in Lark; GBNF is converted."""
    library()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # a converter, which may raise any error
        raise SlurmGPUError(f"grammar is neither Lark nor GBNF; llguidance says: {message_of(error)}") from error


def _read_schema(schema: str | Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = schema
    if isinstance(schema, str):
        try:
            found = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise SlurmGPUError(
                f"schema is {schema!r:.80}, which is not JSON ({error}); expected a JSON schema, as a table or as "
                f'"file:answer.schema.json".'
            ) from error
    if not isinstance(found, Mapping):
        raise SlurmGPUError(f"schema is {found!r:.80}; expected a JSON schema, which is a table.")
    return {**found, OWN_KEYWORD: LAYOUT}


def _strict(schema: Any) -> Any:
    """The schema; objects with named properties get no additional ones unless the schema says so."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    has_names = isinstance(schema.get("properties"), Mapping)
    left_alone = VALUES | APPLICATORS if has_names else VALUES | {"allOf"}
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in left_alone:
            found[name] = value
        elif name in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            found[name] = {key: _strict(each) for key, each in value.items()}
        else:
            found[name] = _strict(value)
    if has_names and not APPLICATORS & schema.keys():
        found.setdefault("additionalProperties", False)
    return found
