"""Prompts from templates over the fields of an item."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.llm.interface.engine import Composed, Message, Prompt, TruncationSide
from slurmgpu.llm.models.adapters import AdapterField
from slurmgpu.llm.prompts.fewshot import Fewshot, shuffled
from slurmgpu.llm.prompts.images import sources_of

ROLES = ("system", "developer", "user", "assistant", "tool")

Last = Literal["drop", "continue"]
"""What to do with the assistant's turn at the end of a chat: leave it out, or continue from its text."""

NO_VALUES: Mapping[str, Any] = {}

_PIECES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
# Not every field name: {"label": …} in a prompt is JSON, and its braces must be doubled.
_FIELD = re.compile(r"(\w[\w .\-/]*)((?:\[[^\[\]]+\])*)")


class Fillable(Protocol):
    """A template over an item's fields; its class is called with a text and its owner for messages."""

    @property
    def fields(self) -> frozenset[str]:
        """The names of its fields."""

    @property
    def whole_fields(self) -> frozenset[str]:
        """The names of fields that it uses without a key."""

    def render(self, data: Mapping[str, Any], given: Mapping[str, Any] = NO_VALUES) -> Composed:
        """The filled text; ItemError for a missing value. Values in `given` override the items' fields."""

    def fill(self, word: str, given: Mapping[str, Any]) -> Composed:
        """The text with one word for every field that is not given."""


class Template:
    """A text with fields to fill in: `{text}`, `{choices[0]}`, `{meta[title]}`; `{{` and `}}` are braces.

    SlurmGPUError, which begins with `owner`, for a wrong text.
    """

    def __init__(self, text: str, owner: str = "prompt") -> None:
        self._parts: list[str | tuple[str, tuple[str, ...]]] = []
        end = 0
        for found in _PIECES.finditer(text):
            self._parts.append(text[end : found.start()])
            end = found.end()
            self._parts.append(_part(found, owner))
        self._parts.append(text[end:])

    @property
    def fields(self) -> frozenset[str]:
        """The names of its fields."""
        return frozenset(part[0] for part in self._parts if not isinstance(part, str))

    @property
    def whole_fields(self) -> frozenset[str]:
        """The names of fields that it uses without a key: `{text}`, not `{text[0]}`."""
        return frozenset(part[0] for part in self._parts if not isinstance(part, str) and not part[1])

    def render(self, data: Mapping[str, Any], given: Mapping[str, Any] = NO_VALUES) -> Composed:
        """The filled text: strings unchanged, other values as JSON; ItemError for a missing value.

        Values in `given` override the items' fields.
        """
        return Composed.joined(
            Composed(part) if isinstance(part, str) else text_of(_value(given if part[0] in given else data, *part))
            for part in self._parts
        )

    def fill(self, word: str, given: Mapping[str, Any]) -> Composed:
        """The text with one word for every field that is not given."""
        values = (part if isinstance(part, str) else given.get(part[0], word) for part in self._parts)
        return Composed("".join(map(text_of, values)))


class Prompts:
    """The items' prompts: by the template `prompt`, or from the field `messages` with a chat, with `system` before.

    Examples of `fewshot` come before a `prompt`, in the same template; an item is never an example for itself.

    A chat that ends with the assistant's turn is an error without `last`: the model would see the answer that it should
    give.
    """

    def __init__(
        self,
        prompt: str | None = None,
        messages: str | None = None,
        system: str | None = None,
        given: Mapping[str, Any] = NO_VALUES,
        last: Last | None = None,
        fewshot: Fewshot | None = None,
        make: Callable[[str, str], Fillable] = Template,
        truncation_side: TruncationSide | None = None,
        images: str | None = None,
        image_folder: str = "",
    ) -> None:
        """Check the settings; `given` are values for templates in addition to the items' fields.

        The field `images` has an item's images; relative paths start at `image_folder`.
        """
        if (prompt is None) == (messages is None):
            found = "neither is set" if prompt is None else "both are set"
            raise SlurmGPUError(
                f'expected prompt, a template such as "Translate: {{text}}", or messages, a field with a chat; {found}.'
            )
        self._prompt = None if prompt is None else make(prompt, "prompt")
        self._system = None if system is None else make(system, "system")
        if last not in (None, "drop", "continue"):
            raise SlurmGPUError(
                f"last is {last!r}; expected 'drop', to leave the assistant's last turn out, or 'continue'."
            )
        if last is not None and messages is None:
            raise SlurmGPUError(f"last = {last!r} needs messages, which is not set. Remove last.")
        self._messages, self._last, self._given = messages, last, given
        self.choice: AdapterField | None = None
        if fewshot is not None and messages is not None:
            raise SlurmGPUError(
                "fewshot and messages are both set; fewshot adds examples only before prompt. Remove one of them."
            )
        if truncation_side not in (None, "left", "right"):
            raise SlurmGPUError(f"truncation_side is {truncation_side!r}; expected 'left' or 'right'.")
        self._truncation_side = truncation_side
        self._images, self._image_folder = images, image_folder
        if self._prompt is not None and images is None and not self._prompt.fields.difference(given):
            raise SlurmGPUError(
                f"prompt is {prompt!r:.100}, which has no field, so it is the same for all items; expected a template "
                f'such as "Translate: {{text}}".'
            )
        self._fewshot = fewshot
        target = None if fewshot is None else make(fewshot.target, "target")
        self._examples = [] if target is None else [*self._rendered_examples(target)]

    @property
    def fields(self) -> frozenset[str]:
        """The item fields that the prompts use."""
        found = frozenset(name for name in (self._messages, self._images) if name is not None)
        for template in (self._prompt, self._system):
            found |= frozenset() if template is None else template.fields
        return found.difference(self._given)

    @property
    def whole_fields(self) -> frozenset[str]:
        """The names of fields that its templates use without a key."""
        return frozenset[str]().union(*(each.whole_fields for each in (self._prompt, self._system) if each is not None))

    def beyond(self, *, chat: bool) -> Iterator[str]:
        """Features of these prompts that a server's chat or completions endpoint lacks, as sentences."""
        if self._messages is not None and not chat:
            yield "it takes messages only at its chat endpoint. Remove chat = false."
        if self._last == "continue":
            yield 'in a chat it cannot continue from a given text. Set last = "drop", or choose another engine.'

    def of(self, data: Mapping[str, Any], seed: int = 0, forms: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """The prompt from an item's data and seed; ItemError for a missing or wrong field.

        `forms` are other forms of the item's data, such as two texts in another order; they are not used as its
        examples.
        """
        found = replace(self._of(data, seed, forms), truncation_side=self._truncation_side)
        if self._images is not None:
            images = sources_of(self._images, take(data, self._images), self._image_folder)
            found = replace(found, images=images)
        return found if self.choice is None else replace(found, adapter=self.choice.of(data))

    def _of(self, data: Mapping[str, Any], seed: int, forms: Sequence[Mapping[str, Any]]) -> Prompt:
        system = None if self._system is None else self._system.render(data, self._given)
        if self._messages is not None:
            messages = self._chat(_messages(self._messages, take(data, self._messages)))
            continues = self._last == "continue" and messages[-1]["role"] == "assistant"
            if system is None:
                return Prompt(messages=messages, continues=continues)
            if messages[0]["role"] == "system":
                raise ItemError(f"field {self._messages!r} begins with a system message, and system is also set")
            return Prompt(messages=({"role": "system", "content": system}, *messages), continues=continues)
        assert self._prompt is not None
        own = () if self._fewshot is None else tuple(self._prompt.render(form, self._given) for form in forms)
        return self._after_examples(self._prompt.render(data, self._given), system or "", seed, own)

    def _after_examples(self, text: str, system: str, seed: int, own: Sequence[str] = ()) -> Prompt:
        """The prompt of a text, with examples that differ from it and from its `own` other forms."""
        if self._fewshot is None:
            return Prompt(text, system=system)
        examples, number = self._examples, self._fewshot.number
        places = range(len(examples)) if number is None else shuffled(len(examples), seed)
        shots = [examples[place] for place in places if examples[place][0] not in (text, *own)][:number]
        return Prompt(text, system=system, shots=tuple(shots), between=self._fewshot.delimiter)

    def _rendered_examples(self, target: Fillable) -> Iterator[tuple[Composed, Composed]]:
        """The examples' questions and answers; SlurmGPUError for one that lacks fields of the templates."""
        assert self._prompt is not None
        assert self._fewshot is not None
        for number, example in enumerate(self._fewshot.examples, 1):
            try:
                yield self._prompt.render(example, self._given), target.render(example, self._given)
            except ItemError as error:
                raise SlurmGPUError(f"fewshot: example {number}: {error}") from error

    def _chat(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages for the model; of an assistant's turn at the end only what `last` says."""
        if messages[-1]["role"] != "assistant":
            return messages
        if self._last is None:
            raise ItemError(
                f"field {self._messages!r} ends with an assistant turn, which may be the answer itself; "
                f'set last = "drop" to leave it out of the prompt, or last = "continue" to continue from its text'
            )
        if len(messages) == 1:
            raise ItemError(f"field {self._messages!r} has only an assistant turn; expected a turn before it")
        return messages if self._last == "continue" else messages[:-1]

    def fill(self, word: str) -> Prompt:
        """The prompt with one word for every field; not with `messages`."""
        assert self._prompt is not None
        system = None if self._system is None else self._system.fill(word, self._given)
        return self._after_examples(self._prompt.fill(word, self._given), system or "", 0)

    def length(self, data: Mapping[str, Any]) -> int:
        """The length of an item's prompt in characters, to sort items by; 0 without a prompt."""
        try:
            return self.of(data).length
        except ItemError:
            return 0


def take(data: Mapping[str, Any], field: str) -> Any:
    """The value of an item's field; ItemError if it has no such field."""
    if field not in data:
        raise ItemError(f"no field {field!r}.{did_you_mean(field, data)}")
    return data[field]


def text_of(value: Any) -> str:
    """A value in a prompt: strings unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def _part(found: re.Match[str], owner: str) -> str | tuple[str, tuple[str, ...]]:
    if found[0] in ("{{", "}}"):
        return found[0][0]
    field = _FIELD.fullmatch(found[1]) if found[1] is not None else None
    if field is None:
        line = found.string.count("\n", 0, found.start()) + 1
        raise SlurmGPUError(
            f"{owner}: found {found[0]!r:.60} in line {line}; expected a field of items in braces, such as {{text}} "
            f"or {{choices[0]}}. For literal braces write {{{{ and }}}}."
        )
    return field[1], tuple(re.findall(r"\[([^\[\]]+)\]", field[2]))


def _value(data: Mapping[str, Any], field: str, keys: tuple[str, ...]) -> Any:
    value, path = take(data, field), field
    for key in keys:
        value = _inner(value, path, key)
        path += f"[{key}]"
    if value is None:
        raise ItemError(f"field {path!r} is null")
    return value


def _inner(value: Any, path: str, key: str) -> Any:
    if isinstance(value, Mapping):
        if key not in value:
            raise ItemError(f"field {path!r} has no [{key}].{did_you_mean(key, map(str, value))}")
        return value[key]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ItemError(f"field {path!r} holds {text_of(value)!r:.80}; expected a list or a table with [{key}]")
    if not re.fullmatch(r"-?\d+", key) or not -len(value) <= int(key) < len(value):
        raise ItemError(f"field {path!r} is a list of {len(value)} entries, so it has no [{key}]")
    return value[int(key)]


def _messages(field: str, value: Any) -> tuple[Message, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ItemError(f'field {field!r} holds {value!r:.80}; expected a list of {{"role": …, "content": …}}')
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ItemError(f'message {number} of field {field!r} is {message!r:.80}; expected "role" and "content"')
        if message["role"] not in ROLES:
            raise ItemError(
                f"message {number} of field {field!r} has the role {message['role']!r:.40}; "
                f"expected one of {', '.join(ROLES)}"
            )
        if message.get("tool_calls"):
            raise ItemError(
                f"message {number} of field {field!r} has tool_calls, which the prompt would lack; expected them as "
                f"text in its content"
            )
        if not isinstance(message["content"], str):
            raise ItemError(f"message {number} of field {field!r} has {message['content']!r:.80}; expected a text")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
