"""Encode prompts as tokens, and decode generated tokens to text and reasoning.

Text from an item is text for the model, even if it looks like a special token: an item with "<|im_end|>" must not end
the user's message. Marks split such texts until the prompt is tokenised, piece by piece; the text itself is unchanged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slurmgpu.llm.engine import Composed, EngineOptions, FinishReason, Output, Prompt, Request

log = logging.getLogger(__name__)

THINK, THOUGHT = "<think>", "</think>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
HARMONY_START, HARMONY_FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
STOP_MARGIN = 8
"""Tokens searched for a stop text beyond its length in bytes: special tokens have no bytes."""
MARK = "\ufdd0"
"""A code point that Unicode reserves for a program's internal use, and which no text has."""


class PromptError(Exception):
    """A prompt that the model cannot take; the message is the request's error."""

    def output(self, request: Request) -> Output:
        """The output for the request."""
        return Output(request.id, finish_reason="error", error=str(self))


class FullContextError(PromptError):
    """A prompt that leaves no room for an answer with `fit`, which is therefore empty."""

    def output(self, request: Request) -> Output:
        """An answer of no tokens."""
        return Output(request.id, finish_reason="length")


@dataclass(frozen=True)
class Encoded:
    """A request with the tokens of its prompt."""

    request: Request
    tokens: tuple[int, ...]


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


class Quotes:
    """Splits texts that look like special tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        known = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        known |= set(tokenizer.all_special_tokens)
        longest_first = sorted((text for text in known if len(text) > 1), key=lambda text: (-len(text), text))
        # The lookahead finds overlapping ones.
        self._special = re.compile(f"(?=({'|'.join(map(re.escape, longest_first))}))") if longest_first else None

    def cut(self, text: str) -> str:
        """The text with marks; in a template's text only where at least a part comes from the item."""
        if self._special is None:
            return text
        quoted = text.quoted if isinstance(text, Composed) else ((0, len(text)),)
        pieces, end = [], 0
        for found in self._special.finditer(text):
            start, stop = found.span(1)
            if any(start < last and first < stop for first, last in quoted):
                pieces.append(text[end : start + 1])
                end = start + 1
        return MARK.join([*pieces, text[end:]])


class Codec:
    """Converts prompts to tokens and tokens to answers with a model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any, options: EngineOptions, context: int) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._context = context
        self._chat = bool(tokenizer.chat_template) if options.chat is None else options.chat
        self._quotes = Quotes(tokenizer)
        self._joins_system = False
        known = tokenizer.get_added_vocab()
        self._harmony = CHANNEL in known and MESSAGE in known
        self._ids = {text: known[text] for text in (CHANNEL, MESSAGE, *HARMONY_ENDS, THINK, THOUGHT) if text in known}

    def encode(self, request: Request) -> Encoded:
        """The request's prompt as tokens; PromptError if prompt and answer are too long for the model."""
        tokens = self.tokens_of(self.render(request.prompt))
        more, room = request.sampling.max_tokens, self._context - len(tokens)
        if more > room and request.sampling.fit:
            if room < 1:
                raise FullContextError(f"the prompt has {len(tokens)} tokens, the whole context")
            request = replace(request, sampling=replace(request.sampling, max_tokens=room))
        elif more > room:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, which with max_tokens = {more} exceeds the context of "
                f"{self._context} tokens"
            )
        return Encoded(request, tokens)

    def render(self, prompt: Prompt, *, answers_at_once: bool = False) -> tuple[str, bool]:
        """The prompt as one text with marks, and whether that is whole, with a template's special tokens.

        With `answers_at_once`, or if the answer's beginning is given, the model answers without reasoning.
        """
        cut = self._quotes.cut
        if not prompt.messages and not self._chat:
            before = f"{cut(prompt.system)}\n\n" if prompt.system else ""
            return before + cut(prompt.text) + cut(prompt.answer), False
        if not self._tokenizer.chat_template:
            raise PromptError("the model's tokenizer has no chat template; expected a plain prompt, or chat = false")
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages = prompt.messages or (*system, {"role": "user", "content": prompt.text})
        cut_messages = [{**each, "content": cut(each["content"])} if "content" in each else each for each in messages]
        text = self._chat_text(cut_messages)
        if prompt.answer or answers_at_once:
            text += self._to_answer(text)
        return text + cut(prompt.answer), True

    def _chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The template's text of messages; a refused system message goes before the user's first message."""
        options = {"tokenize": False, "add_generation_prompt": True, **self._options.chat_options}
        try:
            text: str = self._tokenizer.apply_chat_template([*messages], **options)
        except Exception as error:  # a template may raise any error
            if [each.get("role") for each in messages[:2]] != ["system", "user"]:
                raise PromptError(f"the chat template refuses the messages: {error}") from error
            joined = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            text = self._chat_text([{**messages[1], "content": joined}, *messages[2:]])
            if not self._joins_system:
                log.info("the chat template takes no system message (%s); it goes before the user's first", error)
                self._joins_system = True
        return text

    def tokens_of(self, rendered: tuple[str, bool]) -> tuple[int, ...]:
        """The tokens of a text; if it is not whole, with the tokenizer's own at its beginning."""
        text, is_whole = rendered
        try:
            text.encode()
        except UnicodeEncodeError as error:  # for which a tokenizer raises a TypeError
            raise PromptError(
                f"the prompt has half of a surrogate pair, \\u{ord(text[error.start]):x}, which is not text"
            ) from error
        text, *rest = text.split(MARK)
        tokens = self._tokenizer(text, add_special_tokens=not is_whole)["input_ids"]
        if not is_whole and len(tokens) > 1 and tokens[-1] == self._tokenizer.eos_token_id:
            tokens = tokens[:-1]  # some tokenizers also end a text, which continues here
        for piece in rest:
            tokens = tokens + self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        if not tokens:
            raise PromptError("the prompt is empty; expected at least one token")
        return tuple(tokens)

    def has_stopped(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether a stop text ended with the last token."""
        if not stop:
            return False
        n_last = max(len(each.encode()) for each in stop) + STOP_MARGIN
        return self._n_until(tokens[-n_last:], stop) is not None

    def decode(self, finished: Finished) -> Output:
        """The output of a request, with tokens and text cut at a stop text."""
        encoded, tokens, reason = finished.encoded, list(finished.tokens), finished.finish_reason
        n_prompt, request = len(encoded.tokens), encoded.request
        if finished.error is not None:
            return Output(request.id, n_prompt_tokens=n_prompt, finish_reason="error", error=finished.error)
        stop = request.sampling.stop
        if stop and (n_tokens := self._n_until(tokens, stop)) is not None:
            tokens, reason = tokens[:n_tokens], "stop"
        text, reasoning = self._split(encoded, tokens)
        for each in stop:
            text, reasoning = text.split(each)[0], reasoning.split(each)[0]
        logprobs = finished.logprobs
        kept = None if logprobs is None else np.array(logprobs[: len(tokens)], np.float32)
        return Output(request.id, text, reasoning, np.array(tokens, np.int32), kept, n_prompt, reason)

    def _to_answer(self, text: str) -> str:
        """The text after the template's that makes the model answer without reasoning."""
        if self._harmony and text.endswith(HARMONY_START):
            return HARMONY_FINAL
        if text.rstrip().endswith(THINK):
            return f"\n{THOUGHT}\n\n"
        return ""

    def _n_until(self, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
        """The number of tokens up to the first stop text; None if there is none."""

        def has_come(n_tokens: int) -> bool:
            text = self._text(tokens[:n_tokens])
            return any(each in text for each in stop)

        if not has_come(len(tokens)):
            return None
        low, high = 0, len(tokens)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if has_come(middle) else (middle, high)
        return high

    def _text(self, tokens: Sequence[int]) -> str:
        found: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return found

    def _split(self, encoded: Encoded, tokens: Sequence[int]) -> tuple[str, str]:
        if self._harmony:
            parts = list(self._channels(tokens, "final"))
            return tuple(  # type: ignore[return-value]
                "".join(self._text(part) for channel, part in parts if (channel == "final") == is_final)
                for is_final in (True, False)
            )
        text = self._text(tokens)
        start, end, last = self._ids.get(THINK), self._ids.get(THOUGHT), encoded.tokens[-3:]
        is_opened = text.lstrip().startswith(THINK) or (start in last and end not in last)
        if not is_opened and not (end is not None and THOUGHT in text):
            return text, ""
        thought, ended, answer = text.partition(THOUGHT)
        thought = thought.strip().removeprefix(THINK).strip()
        return (answer.lstrip("\n"), thought) if ended else ("", thought)

    def _channels(self, tokens: Sequence[int], channel: str) -> Iterator[tuple[str, list[int]]]:
        """The parts of an answer in OpenAI's harmony format, with their channel: analysis, commentary or final."""
        ends = {self._ids[text] for text in HARMONY_ENDS if text in self._ids}
        part: list[int] = []
        in_header = False
        for token in tokens:
            if token == self._ids[CHANNEL] or token in ends:
                if part and not in_header:
                    yield channel, part
                # Between two messages there is only the next one's role.
                part, in_header = [], True
            elif token == self._ids[MESSAGE]:
                words = self._text(part).split()
                channel, part, in_header = words[0] if words else channel, [], False
            else:
                part.append(token)
        if part and not in_header:
            yield channel, part
