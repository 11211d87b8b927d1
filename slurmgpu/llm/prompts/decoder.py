"""Decode generated tokens to an answer and its reasoning, up to a stop text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slurmgpu.llm.interface.engine import Generated, Output
from slurmgpu.llm.prompts.encoded import Encoded, Finished
from slurmgpu.llm.prompts.structures import Reasoning
from slurmgpu.llm.prompts.vocabulary import (
    CHANNEL,
    HARMONY_END,
    HARMONY_ENDS,
    HARMONY_OPEN,
    MESSAGE,
    THINK,
    THOUGHT,
    Vocabulary,
)

STOP_MARGIN = 8
"""Tokens searched for a stop text beyond its length in bytes: special tokens have no bytes."""


class Part(NamedTuple):
    """The tokens of a part of an answer in OpenAI's harmony format, the position of the first, and the channel."""

    channel: str
    start: int
    tokens: list[int]


class Decoder:
    """Converts the tokens of answers to outputs; recognises reasoning between <think> and </think>, and in harmony."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

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

    def has_stopped(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether a stop text ended with the last token."""
        if not stop:
            return False
        n_last = max(len(each.encode()) for each in stop) + STOP_MARGIN
        return self._n_until_stop(tokens[-n_last:], stop) is not None

    def stop_ids_of(self, stop: Sequence[str]) -> list[int]:
        """The special tokens that are stop texts: the text of an answer does not show them."""
        return [token for token, text in self._vocabulary.special.items() if text in stop]

    def reasoning_of(self, encoded: Encoded) -> Reasoning | None:
        """The reasoning that may precede the model's answer; None if the answer begins at once."""
        prompt = encoded.request.prompt
        if prompt.answer or prompt.continues or prompt.generated is not None:
            return None
        last, ids = encoded.tokens[-3:], self._vocabulary.ids
        if self._vocabulary.has_harmony:
            names = (CHANNEL, MESSAGE, HARMONY_END, HARMONY_OPEN)
            channel, message, end, start = (ids.get(name, -1) for name in names)
            return Reasoning(harmony=(channel, message, end, start)) if start in last else None
        opens, closes = ids.get(THINK), ids.get(THOUGHT)
        if closes is None or closes in last:
            return None
        return Reasoning(None if opens in last else opens, closes)

    def _n_until(self, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
        """The number of tokens up to the first stop text; None if there is none."""
        return self._vocabulary.n_first(tokens, lambda text: any(each in text for each in stop))

    def _n_until_stop(self, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
        """The same, also for a special token that is a stop text, which the text of an answer does not show."""
        marked = (place + 1 for place, token in enumerate(tokens) if self._vocabulary.special.get(token) in stop)
        found = next(marked, None), self._n_until(tokens, stop)
        return min((n_tokens for n_tokens in found if n_tokens is not None), default=None)

    def _split(self, encoded: Encoded, tokens: Sequence[int]) -> tuple[str, str, Generated]:
        """The answer, the reasoning, and the tokens of both."""
        goes_on = encoded.request.prompt.generated is not None
        if self._vocabulary.has_harmony:
            parts = list(self._channels(tokens, "final"))
            answer = "".join(self._vocabulary.text_of(part.tokens) for part in parts if part.channel == "final")
            thought = "".join(self._vocabulary.text_of(part.tokens) for part in parts if part.channel != "final")
            begin = next((part.start for part in parts if part.channel == "final"), len(tokens))
            return answer, thought, self._generated(encoded, tokens, 0 if goes_on else begin, answer)
        text, ids = self._vocabulary.text_of(tokens), self._vocabulary.ids
        start, end, last = ids.get(THINK), ids.get(THOUGHT), encoded.tokens[-3:]
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
        special, text_of = self._vocabulary.special, self._vocabulary.text_of
        told = list(tokens[begin:])
        while told and told[-1] in special:
            told.pop()
        before, begun = encoded.request.prompt.generated, encoded.tokens[len(encoded.tokens) - encoded.n_begun :]
        mark = next((special[token] for token in (*begun, *told) if token in special), "")
        if before is not None:
            return Generated(before.thoughts, (*begun, *told), mark)
        text = text_of(told)
        blank = text.removesuffix(answer)
        # Otherwise there are several messages, or the last token of the thoughts has part of the answer.
        if not text.endswith(answer) or blank.strip("\n"):
            return Generated(tuple(tokens), (), mark or text_of(tokens[begin - 1 : begin]))
        blanks = self._vocabulary.up_to(told, blank)
        if blanks is None:
            return Generated((*tokens[:begin], *self._vocabulary.pieces([blank], goes_on=True)), (), mark)
        return Generated((*tokens[:begin], *blanks), tuple(told[len(blanks) :]), mark)

    def _channels(self, tokens: Sequence[int], channel: str) -> Iterator[Part]:
        """The parts of an answer in OpenAI's harmony format, with their channel: analysis, commentary or final."""
        ids = self._vocabulary.ids
        ends = {ids[text] for text in HARMONY_ENDS if text in ids}
        part: list[int] = []
        start, in_header = 0, False
        for place, token in enumerate(tokens):
            if token == ids[CHANNEL] or token in ends:
                if part and not in_header:
                    yield Part(channel, start, part)
                # Between two messages there is only the role of the next one.
                part, in_header = [], True
            elif token == ids[MESSAGE]:
                words = self._vocabulary.text_of(part).split()
                channel, part, start, in_header = words[0] if words else channel, [], place + 1, False
            else:
                part.append(token)
        if part and not in_header:
            yield Part(channel, start, part)
