"""Encode prompts as tokens, and decode generated tokens to text and reasoning.

Text from an item stays plain text, even if it looks like a special token: an item with "<|im_end|>" must not end the
user's message. Marks split such texts until the prompt is tokenised, piece by piece; the text itself is unchanged.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from slurmgpu.errors import ItemError
from slurmgpu.llm.interface.engine import (
    NOTHING_GENERATED,
    EngineOptions,
    FinishReason,
    Generated,
    Message,
    Output,
    Prompt,
    Request,
    quoted_in,
)
from slurmgpu.llm.prompts.images import place_of_images
from slurmgpu.llm.prompts.structures import Reasoning
from slurmgpu.llm.prompts.truncation import shorten
from slurmgpu.util.exceptions import message_of

log = logging.getLogger(__name__)

THINK, THOUGHT = "<think>", "</think>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
HARMONY_START, HARMONY_FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
HARMONY_END, HARMONY_OPEN = "<|end|>", "<|start|>"
HARMONY_ENDS = (HARMONY_END, "<|return|>", "<|call|>", HARMONY_OPEN)
IMAGES = "n_images"
"""The key of a message for the number of images before its text."""
STOP_MARGIN = 8
"""Tokens searched for a stop text beyond its length in bytes: special tokens have no bytes."""
MARK = "\ufdd0"
"""A code point that Unicode reserves for internal use of programs; no text has it."""

HIDDEN = (
    "the answer cannot be continued after {!r}: the model generated {!r} there, which the answer's text does not show. "
    "Reasoning is recognised between <think> and </think>, and in harmony's channels"
)
SHOWN = 20
"""Characters of an answer that an error shows."""


class PromptError(Exception):
    """A prompt that the model cannot take; the message is the request's error."""

    def output(self, request: Request) -> Output:
        """The output for the request."""
        return Output(request.id, finish_reason="error", error=str(self))


class FullContextError(PromptError):
    """A prompt that leaves no room for an answer with `fit`; the answer is empty."""

    def output(self, request: Request) -> Output:
        """An empty answer."""
        return Output(request.id, generated=request.prompt.generated or NOTHING_GENERATED, finish_reason="length")


@dataclass(frozen=True)
class Encoded:
    """A request with the tokens of its prompt; the last `n_begun` belong to the answer so far.

    `n_truncated` is the number of truncated prompt tokens.
    """

    request: Request
    tokens: tuple[int, ...]
    n_begun: int = 0
    n_truncated: int = 0


@dataclass(frozen=True)
class Finished:
    """The tokens generated for a request, perhaps with some after a stop text.

    `logprobs` are the model's own, one for each token, or None.
    """

    encoded: Encoded
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None
    error: str | None = None


class Part(NamedTuple):
    """The tokens of a part of an answer in OpenAI's harmony format, the position of the first, and the channel."""

    channel: str
    start: int
    tokens: list[int]


class Quotes:
    """Splits texts that look like one of the `special` tokens."""

    def __init__(self, special: Collection[str]) -> None:
        longest_first = sorted((text for text in special if len(text) > 1), key=lambda text: (-len(text), text))
        # The lookahead finds overlapping matches.
        self._special = re.compile(f"(?=({'|'.join(map(re.escape, longest_first))}))") if longest_first else None

    def cut(self, text: str) -> str:
        """The text with marks; in a template's text only where some part comes from the item."""
        if self._special is None:
            return text
        quoted, pieces, end = quoted_in(text), [], 0
        for found in self._special.finditer(text):
            start, stop = found.span(1)
            if any(start < last and first < stop for first, last in quoted):
                pieces.append(text[end : start + 1])
                end = start + 1
        return MARK.join([*pieces, text[end:]])


def refuse_surrogates(text: str) -> None:
    """Raise PromptError for half of a surrogate pair; a tokenizer would raise a TypeError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text has half of a surrogate pair, \\u{ord(text[error.start]):x}, which is not text"
        ) from error


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    known = getattr(tokenizer, "added_tokens_decoder", {}).items()
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return {**{number: token.content for number, token in known if token.special}, **dict(named)}


def _add_images(messages: list[Mapping[str, Any]], number: int, *, behind_examples: bool) -> None:
    """Put images before the text of a user turn; PromptError if there is none."""
    try:
        place = place_of_images([str(message["role"]) for message in messages], behind_examples=behind_examples)
    except ItemError as error:
        raise PromptError(str(error)) from error
    messages[place] = {**messages[place], IMAGES: number}


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
    """Converts prompts to tokens and tokens to answers with a model's tokenizer and chat template.

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
        self._n_known = n_known
        self._options = options
        self.context = context
        self._chat = bool(tokenizer.chat_template) if options.chat is None else options.chat
        self._special = _special_tokens(tokenizer)
        self._quotes = Quotes({*self._special.values(), *marks})
        self._joins_system = False
        known = tokenizer.get_added_vocab()
        self._harmony = CHANNEL in known and MESSAGE in known
        self._ids = {text: known[text] for text in (CHANNEL, MESSAGE, *HARMONY_ENDS, THINK, THOUGHT) if text in known}

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
        thoughts, begun = prompt.generated.thoughts, self._up_to(prompt.generated.answer, prompt.so_far)
        if begun is None and prompt.generated.mark:
            raise PromptError(HIDDEN.format(prompt.so_far[-SHOWN:], prompt.generated.mark))
        cut = self._quotes.cut(prompt.so_far)
        if begun is None and not thoughts:
            asked, whole = (self.tokens_of(each, is_whole=is_whole) for each in (text, text + cut))
            return whole, len(whole) - len(asked)
        if begun is None:
            begun = [*self.pieces(cut.split(MARK))]
        return (*self.tokens_of(text, is_whole=is_whole), *thoughts, *begun), len(begun)

    def _up_to(self, tokens: Sequence[int], text: str) -> Sequence[int] | None:
        """The first tokens, up to the end of this text; None if it ends within a token."""
        if not text:
            return ()
        n_tokens = self._n_first(tokens, lambda found: found.startswith(text))
        return tokens[:n_tokens] if n_tokens and self._text(tokens[:n_tokens]) == text else None

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

    def _chat_text(self, messages: Sequence[Mapping[str, Any]], **end: bool) -> str:
        """The template's text for messages; a refused system message goes before the user's first message."""
        options = {"tokenize": False, **end, **self._options.chat_options}
        try:
            text: str = self._tokenizer.apply_chat_template(_shaped(messages), **options)
        except Exception as error:  # a template may raise any error
            if [each.get("role") for each in messages[:2]] != ["system", "user"]:
                raise PromptError(f"the chat template rejects the messages: {message_of(error)}") from error
            joined = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            text = self._chat_text([{**messages[1], "content": joined}, *messages[2:]], **end)
            if not self._joins_system:
                log.info(
                    "the chat template takes no system message (%s); putting it before the user's first message",
                    message_of(error),
                )
                self._joins_system = True
        return text

    def tokens_of(self, text: str, *, is_whole: bool) -> tuple[int, ...]:
        """The tokens of a text; if it is not whole, with the tokenizer's own tokens at its beginning."""
        [tokens] = self.tokens_of_each([text], is_whole=is_whole)
        return tokens

    def check_known(self, tokens: Iterable[int]) -> None:
        """Raise PromptError for a token that the model does not know; on a GPU it would end the process."""
        last = max(tokens, default=0)
        if last >= self._n_known:
            raise PromptError(
                f"the tokenizer has {self._tokenizer.convert_ids_to_tokens(last)!r} as token {last}, and the model has "
                f"only {self._n_known} tokens: it was saved without embeddings for what was added to the tokenizer"
            )

    def _tokenize(self, text: str, **options: Any) -> list[int]:
        found: list[int] = self._tokenizer(text, **options)["input_ids"]
        self.check_known(found)
        return found

    @cached_property
    def own_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that the tokenizer puts before and after a text."""
        bare, whole = self._tokenize("a", add_special_tokens=False), self._tokenize("a")
        for start in range(len(whole) - len(bare) + 1):
            if bare and whole[start : start + len(bare)] == bare:
                return tuple(whole[:start]), tuple(whole[start + len(bare) :])
        return (), ()

    def tokens_of_each(self, texts: Sequence[str], *, is_whole: bool) -> list[tuple[int, ...]]:
        """The same for several texts, which is faster than one by one."""
        split = [self.parts(text) for text in texts]
        found = []
        end = () if is_whole else self.own_tokens[1]
        firsts = self._tokenizer([first for first, *_ in split], add_special_tokens=not is_whole)["input_ids"]
        for tokens, (_, *rest) in zip(firsts, split, strict=True):
            # Some tokenizers also add an end token, but the text continues here; one in the text itself is kept.
            n_kept = max(1, len(tokens) - len(end))
            tokens = (*(tokens[:n_kept] if tuple(tokens[n_kept:]) == end else tokens), *self.pieces(rest))
            if not tokens:
                raise PromptError("the prompt is empty; expected at least one token")
            self.check_known(tokens)
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
        own, whole = tuple(self.pieces([first])), tuple(self._tokenize(first))
        places = range(len(whole) - len(own) + 1)
        at = next((place for place in places if whole[place : place + len(own)] == own), None)
        if at is None:
            raise PromptError("the tokenizer gives the text different tokens after the tokens that it adds itself")
        own += tuple(self.pieces(rest))
        if at:
            return whole[:at], own
        ids = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        return next(((number,) for number in ids if number is not None), ()), own

    def pieces(self, texts: Sequence[str]) -> Iterator[int]:
        """The tokens of texts that are parts of one."""
        for text in texts:
            yield from self._tokenize(text, add_special_tokens=False)

    def stop_ids_of(self, stop: Sequence[str]) -> list[int]:
        """The special tokens that are stop texts: the text of an answer does not show them."""
        return [token for token, text in self._special.items() if text in stop]

    def has_stopped(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether a stop text ended with the last token."""
        if not stop:
            return False
        n_last = max(len(each.encode()) for each in stop) + STOP_MARGIN
        return self._n_until_stop(tokens[-n_last:], stop) is not None

    def reasoning_of(self, encoded: Encoded) -> Reasoning | None:
        """The reasoning that may precede the model's answer; None if the answer begins at once."""
        prompt = encoded.request.prompt
        if prompt.answer or prompt.continues or prompt.generated is not None:
            return None
        last = encoded.tokens[-3:]
        if self._harmony:
            names = (CHANNEL, MESSAGE, HARMONY_END, HARMONY_OPEN)
            channel, message, end, start = (self._ids.get(name, -1) for name in names)
            return Reasoning(harmony=(channel, message, end, start)) if start in last else None
        opens, closes = self._ids.get(THINK), self._ids.get(THOUGHT)
        if closes is None or closes in last:
            return None
        return Reasoning(None if opens in last else opens, closes)

    def decode(self, finished: Finished) -> Output:
        """The output of a request, with tokens and text cut at a stop text."""
        encoded, tokens, reason = finished.encoded, list(finished.tokens), finished.finish_reason
        n_prompt, request = len(encoded.tokens), encoded.request
        if finished.error is not None:
            return Output(request.id, n_prompt_tokens=n_prompt, finish_reason="error", error=finished.error)
        stop = request.sampling.stop
        if stop and (n_tokens := self._n_until_stop(tokens, stop)) is not None:
            tokens, reason = tokens[:n_tokens], "stop"
        text, reasoning, generated = self._split(encoded, tokens)
        for each in stop:
            text, reasoning = text.split(each)[0], reasoning.split(each)[0]
        logprobs = finished.logprobs
        kept = None if logprobs is None else np.array(logprobs[: len(tokens)], np.float32)
        found = Output(request.id, text, reasoning, generated, np.array(tokens, np.int32), kept, n_prompt, reason)
        return replace(found, n_truncated=encoded.n_truncated)

    def _to_answer(self, text: str) -> str:
        """The text to append to the template's text so that the model answers without reasoning."""
        if self._harmony and text.endswith(HARMONY_START):
            return HARMONY_FINAL
        if text.rstrip().endswith(THINK):
            return f"\n{THOUGHT}\n\n"
        return ""

    def _n_until(self, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
        """The number of tokens up to the first stop text; None if there is none."""
        return self._n_first(tokens, lambda text: any(each in text for each in stop))

    def _n_until_stop(self, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
        """The same, also for a special token that is a stop text, which the text of an answer does not show."""
        marked = (place + 1 for place, token in enumerate(tokens) if self._special.get(token) in stop)
        found = next(marked, None), self._n_until(tokens, stop)
        return min((n_tokens for n_tokens in found if n_tokens is not None), default=None)

    def _n_first(self, tokens: Sequence[int], is_met: Callable[[str], bool]) -> int | None:
        """The least number of tokens whose text meets a monotonic condition; None if all tokens do not meet it."""
        if not is_met(self._text(tokens)):
            return None
        low, high = 0, len(tokens)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_met(self._text(tokens[:middle])) else (middle, high)
        return high

    def _text(self, tokens: Sequence[int]) -> str:
        found: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return found

    def _split(self, encoded: Encoded, tokens: Sequence[int]) -> tuple[str, str, Generated]:
        """The answer, the reasoning, and the tokens of both."""
        goes_on = encoded.request.prompt.generated is not None
        if self._harmony:
            parts = list(self._channels(tokens, "final"))
            answer = "".join(self._text(part.tokens) for part in parts if part.channel == "final")
            thought = "".join(self._text(part.tokens) for part in parts if part.channel != "final")
            begin = next((part.start for part in parts if part.channel == "final"), len(tokens))
            return answer, thought, self._generated(encoded, tokens, 0 if goes_on else begin, answer)
        text = self._text(tokens)
        start, end, last = self._ids.get(THINK), self._ids.get(THOUGHT), encoded.tokens[-3:]
        is_opened = text.lstrip().startswith(THINK) or (start in last and end not in last)
        if goes_on or (not is_opened and not (end is not None and THOUGHT in text)):
            return text, "", self._generated(encoded, tokens, 0, text)
        thought, _, answer = text.partition(THOUGHT)
        thought, answer = thought.strip().removeprefix(THINK).strip(), answer.lstrip("\n")
        n_thoughts = self._n_until(tokens, [THOUGHT])
        begin = len(tokens) if n_thoughts is None else n_thoughts
        return answer, thought, self._generated(encoded, tokens, begin, answer)

    def _generated(self, encoded: Encoded, tokens: Sequence[int], begin: int, answer: str) -> Generated:
        """The tokens so far; those before `begin`, and blank lines after them, are thoughts."""
        told = list(tokens[begin:])
        while told and told[-1] in self._special:
            told.pop()
        before, begun = encoded.request.prompt.generated, encoded.tokens[len(encoded.tokens) - encoded.n_begun :]
        mark = next((self._special[token] for token in (*begun, *told) if token in self._special), "")
        if before is not None:
            return Generated(before.thoughts, (*begun, *told), mark)
        text = self._text(told)
        blank = text.removesuffix(answer)
        # Otherwise there are several messages, or the last token of the thoughts has part of the answer.
        if not text.endswith(answer) or blank.strip("\n"):
            return Generated(tuple(tokens), (), mark or self._text(tokens[begin - 1 : begin]))
        blanks = self._up_to(told, blank)
        if blanks is None:
            return Generated((*tokens[:begin], *self.pieces([blank])), (), mark)
        return Generated((*tokens[:begin], *blanks), tuple(told[len(blanks) :]), mark)

    def _channels(self, tokens: Sequence[int], channel: str) -> Iterator[Part]:
        """The parts of an answer in OpenAI's harmony format, with their channel: analysis, commentary or final."""
        ends = {self._ids[text] for text in HARMONY_ENDS if text in self._ids}
        part: list[int] = []
        start, in_header = 0, False
        for place, token in enumerate(tokens):
            if token == self._ids[CHANNEL] or token in ends:
                if part and not in_header:
                    yield Part(channel, start, part)
                # Between two messages there is only the role of the next one.
                part, in_header = [], True
            elif token == self._ids[MESSAGE]:
                words = self._text(part).split()
                channel, part, start, in_header = words[0] if words else channel, [], place + 1, False
            else:
                part.append(token)
        if part and not in_header:
            yield Part(channel, start, part)
