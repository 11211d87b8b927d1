"""Encode prompts as tokens with a model's tokenizer and chat template."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from slurmgpu.errors import ItemError
from slurmgpu.llm.interface.engine import EngineOptions, Message, Prompt, Request
from slurmgpu.llm.prompts.decoder import Decoder
from slurmgpu.llm.prompts.encoded import Encoded, FullContextError, PromptError
from slurmgpu.llm.prompts.images import place_of_images
from slurmgpu.llm.prompts.quotes import MARK, Quotes
from slurmgpu.llm.prompts.template_dates import FUNCTION, with_date
from slurmgpu.llm.prompts.truncation import shorten
from slurmgpu.llm.prompts.vocabulary import HARMONY_FINAL, HARMONY_START, THINK, THOUGHT, Vocabulary
from slurmgpu.util.exceptions import message_of

log = logging.getLogger(__name__)

IMAGES = "n_images"
"""The key of a message for the number of images before its text."""
HIDDEN = (
    "the answer cannot be continued after {!r}: the model generated {!r} there, which the answer's text does not show. "
    "Reasoning is recognised between <think> and </think>, and in harmony's channels"
)
OTHER, ANOTHER = "something else", "and another thing"
"""The content of a turn in place of its own, to see whether a chat template shows it; the second in place of OTHER."""
TELLING = 24
"""A content of so many characters that is in a chat template's text is usually that of its turn."""
SHOWN = 20
"""Characters of an answer that an error shows."""


def refuse_surrogates(text: str) -> None:
    """Raise PromptError for half of a surrogate pair; a tokenizer would raise a TypeError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text has half of a surrogate pair, \\u{ord(text[error.start]):x}, which is not text"
        ) from error


def _add_images(messages: list[Mapping[str, Any]], number: int, *, behind_examples: bool) -> None:
    """Put images before the text of a user turn; PromptError if there is none."""
    try:
        place = place_of_images([str(message["role"]) for message in messages], behind_examples=behind_examples)
    except ItemError as error:
        raise PromptError(str(error)) from error
    messages[place] = {**messages[place], IMAGES: number}


def without(start: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens without `start` at their beginning, such as the BOS token that a prompt has itself."""
    return tokens[len(start) :] if start and tokens[: len(start)] == start else tokens


def _shaped(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages for a chat template; if one of them has images, each content is a list of parts."""
    if not any(IMAGES in message for message in messages):
        return [*messages]
    return [
        {
            "role": message["role"],
            "content": [{"type": "image"}] * message.get(IMAGES, 0) + [{"type": "text", "text": message["content"]}],
        }
        for message in messages
    ]


class Codec:
    """Converts prompts to tokens with a model's tokenizer and chat template; `decoder` converts tokens to answers.

    `context` is the most tokens of a prompt with its answer; the model knows `n_known` tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: EngineOptions,
        context: int,
        marks: Collection[str] = (),
        n_known: int = sys.maxsize,
    ) -> None:
        """Texts of `marks` in an item's text are plain text, like those of the tokenizer's special tokens."""
        self._tokenizer = tokenizer
        self._options = options
        self.context = context
        self._chat = bool(tokenizer.chat_template) if options.chat is None else options.chat
        self.vocabulary = Vocabulary(tokenizer, n_known)
        self.decoder = Decoder(self.vocabulary)
        self._quotes = Quotes({*self.vocabulary.special.values(), *marks})
        self._joins_system = False

    def encode(self, request: Request) -> Encoded:
        """The request's prompt as tokens; PromptError if prompt and answer are too long for the model."""
        prompt, n_truncated = request.prompt, 0
        if prompt.truncation_side is not None:
            prompt, n_truncated = self._shortened(prompt, self.context - request.sampling.max_tokens)
        tokens, n_begun = self._prompt_tokens(prompt)
        return self.fit(request, tokens, n_begun, n_truncated)

    def _shortened(self, prompt: Prompt, most: int) -> tuple[Prompt, int]:
        """The prompt with at most `most` tokens before its answer, and how many tokens were cut off.

        The answer so far does not count: a path continues after the prompt that it began with.
        """
        asked = replace(prompt, so_far="", generated=None)
        n_whole = len(self._prompt_tokens(asked)[0])
        if n_whole <= most:
            return prompt, 0
        shorter = shorten(asked, lambda each: len(self._prompt_tokens(each)[0]) <= most)
        n_cut = n_whole - len(self._prompt_tokens(shorter)[0])
        return replace(shorter, so_far=prompt.so_far, generated=prompt.generated), n_cut

    def fit(self, request: Request, tokens: tuple[int, ...], n_begun: int = 0, n_truncated: int = 0) -> Encoded:
        """The request with these tokens; PromptError if the context has no room for its answer after them."""
        more, room = request.sampling.max_tokens, self.context - len(tokens)
        if more > room and request.sampling.fit:
            if room < 1:
                raise FullContextError(f"the prompt has {len(tokens)} tokens and fills the whole context")
            request = replace(request, sampling=replace(request.sampling, max_tokens=room))
        elif more > room:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, which with max_tokens = {more} exceeds the context of "
                f"{self.context} tokens"
            )
        return Encoded(request, tokens, n_begun, n_truncated)

    def _prompt_tokens(self, prompt: Prompt) -> tuple[tuple[int, ...], int]:
        """The tokens of a prompt, and how many of them are the answer so far, as the model generated it.

        If a token extends beyond the end of `so_far`, the tokenizer's own tokens of that text are used; PromptError if
        they would lack a special token.
        """
        text, is_whole = self.render(prompt)
        if prompt.generated is None:
            return self.tokens_of(text, is_whole=is_whole), 0
        thoughts, begun = prompt.generated.thoughts, self.vocabulary.up_to(prompt.generated.answer, prompt.so_far)
        if begun is None and prompt.generated.mark:
            raise PromptError(HIDDEN.format(prompt.so_far[-SHOWN:], prompt.generated.mark))
        cut = self._quotes.cut(prompt.so_far)
        if begun is None and not thoughts:
            asked, whole = (self.tokens_of(each, is_whole=is_whole) for each in (text, text + cut))
            return whole, len(whole) - len(asked)
        if begun is None:
            begun = [*self.vocabulary.pieces(cut.split(MARK))]
        return (*self.tokens_of(text, is_whole=is_whole), *thoughts, *begun), len(begun)

    def render(self, prompt: Prompt, *, answers_at_once: bool = False) -> tuple[str, bool]:
        """The prompt as one text with marks, and whether it is whole, that is, has a template's special tokens.

        With `answers_at_once`, or if the answer's beginning is given, the model answers without reasoning. A turn of
        the assistant that the model continues is as the template writes it, which may put a blank before it. Without
        text in that turn the model answers, without reasoning.
        """
        cut = self._quotes.cut
        if not prompt.messages and not self._chat:
            return cut(prompt.plain) + cut(prompt.answer), False
        if not self._tokenizer.chat_template:
            raise PromptError("the model's tokenizer has no chat template; expected a plain prompt, or chat = false")
        cut_messages: list[Mapping[str, Any]] = [{**each, "content": cut(each["content"])} for each in prompt.turns]
        if prompt.images:
            _add_images(cut_messages, len(prompt.images), behind_examples=not prompt.messages)
        if prompt.continues and not prompt.messages[-1]["content"].strip():
            # A template that trims would write the turn's header without its end.
            cut_messages, answers_at_once = cut_messages[:-1], True
        elif prompt.continues:
            return self._chat_text(cut_messages, continue_final_message=True), True
        text = self._chat_text(cut_messages, add_generation_prompt=True)
        if prompt.answer or answers_at_once:
            text += self._to_answer(text)
        return text + cut(prompt.answer), True

    def cut(self, text: str) -> str:
        """A text with marks in parts from an item that look like special tokens."""
        return self._quotes.cut(text)

    def render_chat(self, messages: Sequence[Message], n_images: int = 0, *, behind_examples: bool = False) -> str:
        """A whole chat as one text with marks, without the beginning of another answer; images as in a prompt."""
        cut: list[Mapping[str, Any]] = [{**each, "content": self._quotes.cut(each["content"])} for each in messages]
        if n_images:
            _add_images(cut, n_images, behind_examples=behind_examples)
        return self._chat_text(cut)

    @cached_property
    def _dated(self) -> dict[str, str]:
        """The argument for a chat template with the run's date, if it writes one."""
        asked, date = self._options.chat_options, self._options.date
        if date is None or FUNCTION not in f"{self._tokenizer.chat_template}{asked.get('chat_template')}":
            return {}
        template = self._tokenizer.get_chat_template(asked.get("chat_template"), asked.get("tools"))
        return {"chat_template": with_date(template, date)}

    def _chat_text(self, messages: Sequence[Mapping[str, Any]], **end: bool) -> str:
        """The template's text for messages; PromptError if it refuses them, or leaves one out.

        A system message that is refused or left out goes before the user's first message.
        """
        has_system = [each.get("role") for each in messages[:2]] == ["system", "user"]
        try:
            text = self._as_written(messages, end)
        except Exception as error:  # a template may raise any error
            if not has_system:
                raise PromptError(f"the chat template rejects the messages: {message_of(error)}") from error
            return self._joined_text(messages, end, message_of(error))
        left_out = next((each for each in messages if self._leaves_out(each, text, messages, end)), None)
        if left_out is None:
            return text
        if has_system and left_out is messages[0]:
            return self._joined_text(messages, end, "it leaves it out")
        raise PromptError(
            f"the chat template leaves out a turn of the role {left_out['role']!r}, {left_out['content']!r:.60}"
        )

    def _joined_text(self, messages: Sequence[Mapping[str, Any]], end: Mapping[str, bool], why: str) -> str:
        """The template's text with the system message before the text of the user's first message."""
        joined = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        text = self._chat_text([{**messages[1], "content": joined}, *messages[2:]], **end)
        if not self._joins_system:
            log.info("the chat template takes no system message (%s); putting it before the user's first message", why)
            self._joins_system = True
        return text

    def _as_written(self, messages: Sequence[Mapping[str, Any]], end: Mapping[str, bool]) -> str:
        options = {"tokenize": False, **end, **self._options.chat_options, **self._dated}
        text: str = self._tokenizer.apply_chat_template(_shaped(messages), **options)
        return text

    def _leaves_out(
        self, message: Mapping[str, Any], text: str, messages: Sequence[Mapping[str, Any]], end: Mapping[str, bool]
    ) -> bool:
        """Whether the template's text for messages would be the same with another content of this one."""
        content = message["content"].strip()
        if not content or (len(content) >= TELLING and content in text):
            return False  # else a template may encode it, or leave reasoning out, and a short one may be another turn's
        other = ANOTHER if content == OTHER else OTHER
        others = [{**each, "content": other} if each is message else each for each in messages]
        with contextlib.suppress(Exception):  # of a template that takes no such content, and so looks at it
            return self._as_written(others, end) == text
        return False

    def tokens_of(self, text: str, *, is_whole: bool) -> tuple[int, ...]:
        """The tokens of a text; if it is not whole, with the tokenizer's own tokens at its beginning, once."""
        [tokens] = self.tokens_of_each([text], is_whole=is_whole)
        return tokens

    @cached_property
    def own_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that the tokenizer puts before and after a text."""
        bare, whole = self.vocabulary.tokenize("a", add_special_tokens=False), self.vocabulary.tokenize("a")
        for start in range(len(whole) - len(bare) + 1):
            if bare and whole[start : start + len(bare)] == bare:
                return tuple(whole[:start]), tuple(whole[start + len(bare) :])
        return (), ()

    def tokens_of_each(self, texts: Sequence[str], *, is_whole: bool) -> list[tuple[int, ...]]:
        """The same for several texts, which is faster than one by one."""
        split = [self.parts(text) for text in texts]
        found = []
        before, end = ((), ()) if is_whole else self.own_tokens
        firsts = self._tokenizer([first for first, *_ in split], add_special_tokens=not is_whole)["input_ids"]
        for tokens, (_, *rest) in zip(firsts, split, strict=True):
            # Some tokenizers also add an end token, but the text continues here; one in the text itself is kept.
            n_kept = max(1, len(tokens) - len(end))
            tokens = tuple(tokens[:n_kept] if tuple(tokens[n_kept:]) == end else tokens)
            n_before = len(before)
            tokens = (*tokens[:n_before], *without(before, tokens[n_before:]))
            tokens += tuple(self.vocabulary.pieces(rest, goes_on=True))
            if not tokens:
                raise PromptError("the prompt is empty; expected at least one token")
            self.vocabulary.check_known(tokens)
            found.append(tokens)
        return found

    def parts(self, text: str) -> list[str]:
        """The texts between marks, to be tokenised one by one."""
        refuse_surrogates(text)
        return text.split(MARK)

    def begin(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens before a plain text, and the text's own tokens.

        Before it are the tokenizer's own tokens; if it adds none, the BOS token, or else the EOS token; nothing without
        either.
        """
        first, *rest = self.parts(self.cut(text))
        own, whole = tuple(self.vocabulary.pieces([first])), tuple(self.vocabulary.tokenize(first))
        places = range(len(whole) - len(own) + 1)
        at = next((place for place in places if whole[place : place + len(own)] == own), None)
        if at is None:
            raise PromptError("the tokenizer gives the text different tokens after the tokens that it adds itself")
        own += tuple(self.vocabulary.pieces(rest, goes_on=True))
        ids = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        before = whole[:at] or next(((number,) for number in ids if number is not None), ())
        return before, without(before, own)

    def _to_answer(self, text: str) -> str:
        """The text to append to the template's text so that the model answers without reasoning."""
        if self.vocabulary.has_harmony and text.endswith(HARMONY_START):
            return HARMONY_FINAL
        if text.rstrip().endswith(THINK):
            return f"\n{THOUGHT}\n\n"
        return ""
