"""Tokens of the inputs of a trained head: texts, pairs, chats, and answers in steps."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmgpu.llm.heads.head import HeadInput
from slurmgpu.llm.interface.engine import Composed, EngineOptions, Message, Prompt
from slurmgpu.llm.prompts.codec import Codec, refuse_surrogates, without
from slurmgpu.llm.prompts.encoded import PromptError
from slurmgpu.llm.prompts.truncation import shorten

STEP, END = "\ufdd1", "\ufdd2"
"""Marks before and after the text that ends a step; see `codec.MARK`."""


@dataclass(frozen=True)
class EncodedInput:
    """An input's `tokens`, the number of truncated tokens, and the positions of tokens that end steps.

    `types` are the segments of a pair, for models that distinguish them; else empty.
    """

    id: int
    tokens: tuple[int, ...]
    n_cut: int = 0
    ends: tuple[int, ...] = ()
    types: tuple[int, ...] = ()


class HeadCodec:
    """Converts inputs to tokens.

    `cut` truncates texts that exceed the `context` at their end; otherwise they are errors. `step_end` is put after
    each step. `marks` that occur in an item's text are plain text. The model knows `n_known` tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: EngineOptions,
        context: int,
        *,
        cut: bool,
        step_end: str,
        marks: Collection[str],
        n_known: int,
    ) -> None:
        self._tokenizer, self._context, self._cut, self._step_end = tokenizer, context, cut, step_end
        self.codec = Codec(tokenizer, options, context, marks, n_known)
        self._before, self._after = self.codec.own_tokens

    def encode(self, asked: HeadInput) -> EncodedInput:
        """The input's tokens; PromptError for an input that the model cannot take."""
        found = self._encode(asked)
        n_whole = len(found.tokens)
        if n_whole > self._context and asked.prompt.truncation_side is not None:
            shorter = shorten(asked.prompt, lambda each: self._n_tokens(asked, each) <= self._context)
            found = self._encode(replace(asked, prompt=shorter))
            found = replace(found, n_cut=n_whole - len(found.tokens))
        if len(found.tokens) > self._context:
            raise PromptError(f"the text has {len(found.tokens)} tokens; the model takes at most {self._context}")
        return found

    def parts(self, asked: HeadInput) -> list[str]:
        """The texts between the marks of a chat with images; the model's processor tokenises them."""
        prompt = asked.prompt
        text = self.codec.render_chat(
            _messages(asked, asked.answer), len(prompt.images), behind_examples=not prompt.messages
        )
        return self.codec.parts(text)

    def _n_tokens(self, asked: HeadInput, prompt: Prompt) -> int:
        return len(self._encode(replace(asked, prompt=prompt)).tokens)

    def _encode(self, asked: HeadInput) -> EncodedInput:
        if asked.steps is not None:
            return self._steps(asked, asked.steps)
        if asked.second is not None:
            return self._pair(asked, asked.second)
        if asked.chat:
            text = self.codec.render_chat(_messages(asked, asked.answer))
            return EncodedInput(asked.id, self.codec.tokens_of(text, is_whole=True))
        return self._single(asked)

    def _single(self, asked: HeadInput) -> EncodedInput:
        body = without(self._before, tuple(self._pieces(self.codec.cut(asked.prompt.plain))))
        room = self._context - len(self._before) - len(self._after)
        n_cut = max(0, len(body) - room) if self._cut else 0
        body = body[: len(body) - n_cut]
        return EncodedInput(asked.id, (*self._before, *body, *self._after), n_cut)

    def _pair(self, asked: HeadInput, second: str) -> EncodedInput:
        # Both texts are plain text, even if they look like special tokens.
        first = asked.prompt.plain
        refuse_surrogates(first + second)
        whole = self._tokenizer(first, second, split_special_tokens=True, return_token_type_ids=True)
        n_cut = max(0, len(whole["input_ids"]) - self._context) if self._cut else 0
        if n_cut:
            room = len(self._tokenizer(second, split_special_tokens=True, add_special_tokens=False)["input_ids"])
            if n_cut >= room:
                raise PromptError(
                    f"the first text of the pair leaves no room for the second: both have {len(whole['input_ids'])} "
                    f"tokens, and the model takes at most {self._context}"
                )
            whole = self._tokenizer(
                first,
                second,
                split_special_tokens=True,
                return_token_type_ids=True,
                truncation="only_second",
                max_length=self._context,
            )
        self.codec.vocabulary.check_known(whole["input_ids"])
        types = whole["token_type_ids"] if "token_type_ids" in self._tokenizer.model_input_names else ()
        return EncodedInput(asked.id, tuple(whole["input_ids"]), n_cut, types=tuple(types))

    def _steps(self, asked: HeadInput, steps: Sequence[str]) -> EncodedInput:
        """Tokens of an answer in steps; without a chat template as in TRL's PRMTrainer (5.x, `tokenize_row`)."""
        if asked.chat:
            end_mark = Composed(f"{STEP}{self._step_end}{END}")
            answer = Composed.joined(part for step in steps for part in (step, end_mark))
            text = self.codec.render_chat(_messages(asked, answer))
            tokens: list[int] = []
            ends: list[int] = []
            for piece in re.split(f"({STEP}|{END})", text):
                if piece == END:
                    ends.append(len(tokens) - 1)
                elif piece and piece != STEP:
                    tokens += self._pieces(piece, goes_on=bool(tokens))
            if len(ends) != len(steps):
                raise PromptError(f"the chat template shows {len(ends)} of {len(steps)} steps")
            return EncodedInput(asked.id, tuple(tokens), ends=tuple(ends))
        end = self._pieces(self._step_end)
        bos = () if self._tokenizer.bos_token_id is None else (self._tokenizer.bos_token_id,)
        tokens = [*bos, *without(bos, tuple(self._pieces(self.codec.cut(asked.prompt.plain))))]
        ends = []
        for step in steps:
            tokens += [*self._pieces(self.codec.cut(step)), *end]
            ends.append(len(tokens) - 1)
        return EncodedInput(asked.id, tuple(tokens), ends=tuple(ends))

    def _pieces(self, text: str, *, goes_on: bool = False) -> list[int]:
        """The tokens of a text with marks, without the tokenizer's own at its ends; it `goes_on` after another text."""
        return [*self.codec.vocabulary.pieces(self.codec.parts(text), goes_on=goes_on)]


def _messages(asked: HeadInput, answer: str | None) -> list[Message]:
    return [*asked.prompt.turns, *([] if answer is None else [{"role": "assistant", "content": answer}])]
