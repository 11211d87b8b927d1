"""Prompts from Jinja templates, in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Composed
from slurmgpu.llm.prompts.templates import NO_VALUES, Fillable, Template, text_of
from slurmgpu.util.exceptions import described

TemplateFormat = Literal["f-string", "jinja2"]

OPEN, CLOSE = "\ufdd1", "\ufdd2"
"""Code points that Unicode reserves for internal use of programs: they mark the parts that come from an item."""


def template_class(template_format: str) -> Callable[[str, str], Fillable]:
    """The template class for a format, called with a text and its owner for messages; SlurmGPUError if unknown."""
    if template_format == "f-string":
        return Template
    if template_format == "jinja2":
        return JinjaTemplate
    raise SlurmGPUError(f"template_format is {template_format!r}; expected 'f-string' or 'jinja2'.")


class JinjaTemplate:
    """A Jinja template with an item's fields as variables: `{{ text }}`, `{% for choice in choices %}`.

    Expressions show strings unchanged, and other values as JSON. SlurmGPUError, which begins with `owner`, for a wrong
    template.
    """

    def __init__(self, text: str, owner: str = "prompt") -> None:
        try:
            from jinja2 import StrictUndefined, TemplateError, meta
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise SlurmGPUError(
                f"template_format = 'jinja2' needs the package Jinja2, which cannot be imported here ({error}). "
                f"Install it with pip install jinja2."
            ) from error

        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, finalize=_marked, keep_trailing_newline=True
        )
        try:
            parsed = environment.parse(text)
            self._template = environment.from_string(text)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" in line {line}"
            raise SlurmGPUError(f"{owner}: Jinja says{where}: {error.message}") from error
        self._fields = frozenset(meta.find_undeclared_variables(parsed)).difference(environment.globals)

    @property
    def fields(self) -> frozenset[str]:
        """The names of its fields."""
        return self._fields

    @property
    def whole_fields(self) -> frozenset[str]:
        """The names of its fields; it may use each as a whole."""
        return self._fields

    def render(self, data: Mapping[str, Any], given: Mapping[str, Any] = NO_VALUES) -> Composed:
        """The filled text; ItemError for a missing value, or if the template fails.

        Values in `given` override the items' fields.
        """
        try:
            marked = self._template.render({**data, **given})
        except ItemError:
            raise
        except Exception as error:  # a template computes, and may raise any error
            raise ItemError(f"the prompt's template: {described(error)}") from error
        return _composed(marked)

    def fill(self, word: str, given: Mapping[str, Any]) -> Composed:
        """The text with one word for every field that is not in `given`."""
        return self.render(dict.fromkeys(self._fields, word), given)


def _marked(value: Any) -> Any:
    """An expression's value as text between marks. Jinja also calls this for constants."""
    from jinja2 import Undefined

    if isinstance(value, Undefined):
        return value  # converting it to text raises the error
    if value is None:
        raise ItemError("the prompt's template prints a value that is null")
    text = text_of(value)
    # A block that was set before, or a macro, already has marks.
    if text.count(OPEN) != text.count(CLOSE) or (OPEN in text and not _is_nested(text)):
        raise ItemError("the item contains U+FDD1 or U+FDD2, which are not characters")
    return f"{OPEN}{text}{CLOSE}"


def _is_nested(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == OPEN) - (character == CLOSE)
        if depth < 0:
            return False
    return depth == 0


def _composed(marked: str) -> Composed:
    """The text without marks, and the ranges that were between them; the whole text if a filter removed a mark."""
    pieces: list[str] = []
    quoted: list[tuple[int, int]] = []
    length = depth = lowest = start = end = 0
    for place, character in enumerate(marked):
        if character not in (OPEN, CLOSE):
            continue
        pieces.append(marked[end:place])
        length += place - end
        end = place + 1
        depth += 1 if character == OPEN else -1
        lowest = min(lowest, depth)
        if character == OPEN and depth == 1:
            start = length
        elif character == CLOSE and depth == 0:
            quoted.append((start, length))
    text = "".join([*pieces, marked[end:]])
    # {% filter truncate(60) %} may cut between two marks: then it is unknown which parts come from the item.
    return Composed(text, ((0, len(text)),) if depth or lowest < 0 else tuple(quoted))
