"""How likely each text is to a causal language model: `use = "perplexity"`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Unpack

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Likelihood, Passage, Prompt
from slurmgpu.llm.prompts.templates import Prompts, Template
from slurmgpu.llm.settings import ModelSettings, check_range
from slurmgpu.shards.columns import Array, Column, Ragged
from slurmgpu.workload import FETCH, Item, Row
from slurmgpu.workload import Template as Proposal
from slurmgpu.workloads.item_errors import compute_good, value_or_error
from slurmgpu.workloads.language_model import LanguageModelWorkload, answer_of, good_blocks, total

if TYPE_CHECKING:
    from slurmgpu.results import Merged

MOST_EXPONENT = math.log(np.finfo(np.float32).max)
"""The largest finite perplexity in the column; above it is infinity."""


class Perplexity(LanguageModelWorkload):
    """The log-probability and the perplexity of each item's `text`, after a `prompt` or the chat in `messages` if set.

    docs/reference/language-models.md has all settings.
    """

    texts = ("text", "prompt", "system")
    template = Proposal(
        Path(__file__).with_name("template.toml"),
        items=[{"text": "The Nile flows north through eleven countries."}, {"text": "Nile the north eleven flows."}],
        first=FETCH,
    )

    def __init__(
        self,
        *,
        model: str,
        text: str,
        prompt: str | None = None,
        messages: str | None = None,
        system: str | None = None,
        stride: int | None = None,
        tokens: bool = False,
        logprobs: bool = False,
        keep: Sequence[str] = (),
        **settings: Unpack[ModelSettings],
    ) -> None:
        self._text, self._stride = Template(text, "text"), stride
        self._is_alone = prompt is None and messages is None
        if self._is_alone:
            if system is not None or "chat" in settings:
                name = "chat" if system is None else "system"
                raise SlurmGPUError(
                    f"{name} is for a prompt before the text, and neither prompt nor messages is set. Remove {name}, "
                    f"or set one of them."
                )
            self.prompts = Prompts(text)
        else:
            if stride is not None:
                raise SlurmGPUError(
                    "stride is for long texts without a prompt; a text after a prompt must fit the context. "
                    "Remove stride, or remove prompt and messages."
                )
            self.prompts = Prompts(prompt, messages, system, last=None if messages is None else "drop")
        if stride is not None:
            check_range("stride", stride, 1, None)
        self.tokens, self.logprobs, self.kept_fields = tokens, logprobs, tuple(keep)
        self.columns = self._own_columns()
        self.fields = self.prompts.fields | self._text.fields
        self.use_model(model, settings, beyond=["it does not return the probabilities of a text's tokens."])

    def _own_columns(self) -> dict[str, Column]:
        columns: dict[str, Column] = {"logprob": Array("float64"), "perplexity": Array("float32")}
        columns |= {"n_tokens": Array("int32"), "n_bytes": Array("int64")}
        if self.tokens:
            columns["tokens"] = Ragged("int32")
        if self.logprobs:
            columns["logprobs"] = Ragged("float32")
        return columns

    def sort_key(self, item: Item) -> int | tuple[str, int]:
        """Long texts first; if items choose an adapter, grouped by adapter."""
        own = super().sort_key(item)
        if self._is_alone:  # the text is the prompt
            return own
        try:
            length = len(self._text.render(item.data))
        except ItemError:
            length = 0
        return own - length if isinstance(own, int) else (own[0], own[1] - length)

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The log-probability of each item's text, or an ItemError for a missing or too long text."""
        return compute_good(items, self._ask, self._rows)

    def _ask(self, item: Item) -> tuple[Prompt, str]:
        """The prompt, and the text after it."""
        text = self._text.render(item.data)
        if not text:
            raise ItemError("the text is empty; expected at least one token")
        prompt = self.prompts.of(item.data, seed=item.seed)
        return prompt if self._is_alone else replace(prompt, answer=text), text

    def _rows(self, asked: Sequence[tuple[Prompt, str]]) -> list[Row | ItemError]:
        passages = [Passage(number, prompt, self._stride) for number, (prompt, _) in enumerate(asked)]
        found = {each.id: each for each in self._told_scores.each(self.engine.likelihoods(passages))}
        return [value_or_error(self._row, found.get(number), text) for number, (_, text) in enumerate(asked)]

    def _row(self, given: Likelihood | None, text: str) -> Row:
        found = answer_of(given)
        logprob = float(found.logprobs.sum(dtype=np.float64))
        if not math.isfinite(logprob):
            raise ItemError('a log-probability is not finite; precision = "fp32" has a larger range')
        row: dict[str, Any] = {"logprob": logprob, "perplexity": _exp(-logprob / len(found.logprobs))}
        row |= {"n_tokens": len(found.logprobs), "n_bytes": len(text.encode())}
        if self.tokens:
            row["tokens"] = found.tokens
        if self.logprobs:
            row["logprobs"] = found.logprobs
        return row

    def summarize(self, merged: Merged) -> dict[str, Any]:
        """Perplexity and bits per byte of all texts together."""
        logprob = sum(float(each.sum()) for each in good_blocks(merged, "logprob"))
        n_tokens, n_bytes = total(merged, "n_tokens"), total(merged, "n_bytes")
        summary: dict[str, Any] = {"n_failed": int(merged.failed.sum()), "n_tokens": n_tokens, "n_bytes": n_bytes}
        if not n_tokens:
            return summary | {"perplexity": None, "byte_perplexity": None, "bits_per_byte": None}
        each = -logprob / n_bytes
        return summary | {
            "perplexity": _finite(_exp(-logprob / n_tokens)),
            "byte_perplexity": _finite(_exp(each)),
            "bits_per_byte": each / math.log(2),
        }


def _exp(value: float) -> float:
    return math.exp(value) if value < MOST_EXPONENT else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
