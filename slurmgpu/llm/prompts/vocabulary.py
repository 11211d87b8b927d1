"""A model's vocabulary: texts as tokens, tokens as text, and the tokens around reasoning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from slurmgpu.llm.prompts.encoded import PromptError

THINK, THOUGHT = "<think>", "</think>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
HARMONY_START, HARMONY_FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
HARMONY_END, HARMONY_OPEN = "<|end|>", "<|start|>"
HARMONY_ENDS = (HARMONY_END, "<|return|>", "<|call|>", HARMONY_OPEN)
BEFORE = ("\n", ")", "1")
"""Texts to tokenise before another one; the first that is not merged with it is used."""


class Vocabulary:
    """The tokens of `tokenizer`, of which the model knows `n_known`.

    `special` are the texts of its special tokens by token, and `ids` those of the tokens around reasoning by text;
    `has_harmony` if these are OpenAI's channels.
    """

    def __init__(self, tokenizer: Any, n_known: int = sys.maxsize) -> None:
        self._tokenizer, self._n_known = tokenizer, n_known
        self.special = _special_tokens(tokenizer)
        known = tokenizer.get_added_vocab()
        self.ids = {text: known[text] for text in (CHANNEL, MESSAGE, *HARMONY_ENDS, THINK, THOUGHT) if text in known}
        self.has_harmony = CHANNEL in known and MESSAGE in known

    def tokenize(self, text: str, **options: Any) -> list[int]:
        """The tokens of a text, with the tokenizer's own unless `options` say otherwise."""
        found: list[int] = self._tokenizer(text, **options)["input_ids"]
        self.check_known(found)
        return found

    def check_known(self, tokens: Iterable[int]) -> None:
        """Raise PromptError for a token that the model does not know; on a GPU it would end the process."""
        last = max(tokens, default=0)
        if last >= self._n_known:
            raise PromptError(
                f"the tokenizer has {self._tokenizer.convert_ids_to_tokens(last)!r} as token {last}, and the model has "
                f"only {self._n_known} tokens: it was saved without embeddings for what was added to the tokenizer"
            )

    def pieces(self, texts: Sequence[str], *, goes_on: bool = False) -> Iterator[int]:
        """The tokens of texts that are parts of one; `goes_on` if another part is before them."""
        for number, text in enumerate(texts):
            yield from self._going_on(text) if goes_on or number else self._bare(text)

    def _bare(self, text: str) -> list[int]:
        return self.tokenize(text, add_special_tokens=False)

    def _going_on(self, text: str) -> list[int]:
        """The tokens of a text after another one: without the blank that some tokenizers, as Llama 2's, put first."""
        for before in BEFORE if self._puts_blank else ():
            own, both = self._bare(before), self._bare(before + text)
            if both[: len(own)] == own:
                return both[len(own) :]
        return self._bare(text)

    @cached_property
    def _puts_blank(self) -> bool:
        return self._bare(f"{BEFORE[0]}a") != self._bare(BEFORE[0]) + self._bare("a")

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        found: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return found

    def n_first(self, tokens: Sequence[int], is_met: Callable[[str], bool]) -> int | None:
        """The least number of tokens whose text meets a monotonic condition; None if all tokens do not meet it."""
        if not is_met(self.text_of(tokens)):
            return None
        low, high = 0, len(tokens)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_met(self.text_of(tokens[:middle])) else (middle, high)
        return high

    def up_to(self, tokens: Sequence[int], text: str) -> Sequence[int] | None:
        """The first tokens, up to the end of this text; None if it ends within a token."""
        if not text:
            return ()
        n_tokens = self.n_first(tokens, lambda found: found.startswith(text))
        return tokens[:n_tokens] if n_tokens and self.text_of(tokens[:n_tokens]) == text else None


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    known = getattr(tokenizer, "added_tokens_decoder", {}).items()
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return {**{number: token.content for number, token in known if token.special}, **dict(named)}


def eos_ids_of(*holders: Any) -> frozenset[int]:
    """All end tokens of a generation config, a model's config, and a tokenizer."""
    found: set[int] = set()
    for holder in holders:
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)
