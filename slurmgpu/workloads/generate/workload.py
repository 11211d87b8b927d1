"""Text generation with any causal language model: `use = "generate"`, as in docs/how-to/generate-text.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Unpack

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.metrics import ratio
from slurmgpu.llm.interface.engine import Output, Prompt, Request
from slurmgpu.llm.interface.sampling import mix
from slurmgpu.llm.prompts.structures import structure_of
from slurmgpu.llm.prompts.templates import Last
from slurmgpu.llm.server_engine.settings import uses_chat
from slurmgpu.llm.settings import PromptedSettings, prompts_of, sampling
from slurmgpu.shards.columns import Array, Column, Json, Ragged, Text
from slurmgpu.workload import FETCH, Item, Row, Template
from slurmgpu.workloads.item_errors import compute_good, value_of, value_or_error
from slurmgpu.workloads.language_model import LanguageModelWorkload, ends_summary, good_values, n_truncated, total
from slurmgpu.workloads.structured import Answers

if TYPE_CHECKING:
    from slurmgpu.results import Merged


MOST_ANSWERS = 2048
"""The most answers of a call, all of which a crash loses; on CPUs 6,400 at once are no faster."""


class Generate(LanguageModelWorkload):
    """One answer for each item, or `n` answers, to a `prompt` over its fields, or to the chat in its field `messages`.

    `system` comes before either. `keep` copies fields of the input into columns; `tokens`, `logprobs` and
    `keep_reasoning` add columns, and so do the properties of a `schema`. `schema`, `choices`, `regex` or `grammar`
    constrain the answers. docs/reference/language-models.md has all settings.
    """

    texts = ("prompt", "system", "fewshot", "target", "schema", "grammar")

    template = Template(
        Path(__file__).with_name("template.toml"),
        items=[
            {"text": "Slurm is a workload manager. It gives nodes to users, starts their jobs, and queues the rest."},
            {"text": "The Nile flows north through eleven countries, and reaches the sea in a wide delta."},
        ],
        first=FETCH,
    )

    def __init__(
        self,
        *,
        model: str,
        prompt: str | None = None,
        messages: str | None = None,
        last: Last | None = None,
        system: str | None = None,
        n: int = 1,
        keep: Sequence[str] = (),
        tokens: bool = False,
        logprobs: bool = False,
        keep_reasoning: bool = False,
        schema: str | dict[str, Any] | None = None,
        choices: Sequence[str] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        **settings: Unpack[PromptedSettings],
    ) -> None:
        self.prompts = prompts_of(settings, prompt, messages, system, last)
        structure = structure_of(schema, choices, regex, grammar)
        self.sampling = sampling(settings, logprobs=logprobs, structure=structure)
        if n < 1:
            raise SlurmGPUError(f"n is {n}; expected at least 1 answer for each item.")
        if n > 1 and self.sampling.temperature == 0:
            raise SlurmGPUError(
                f"n = {n} answers with temperature = 0 would all be the same; set temperature, or n = 1."
            )
        self.n = self.most_parts = n
        self.batch_size = max(1, min(self.batch_size, MOST_ANSWERS // n))
        self.tokens, self.logprobs, self.keep_reasoning = tokens, logprobs, keep_reasoning
        self._truncates = "truncation_side" in settings
        self.kept_fields = tuple(keep)
        self.columns = self._own_columns()
        self._structured = None if structure is None else Answers(structure, n, self.sampling.max_tokens)
        if self._structured is not None:
            self.columns |= self._structured.columns({*self.columns, *self.kept_fields})
        self.fields = self.prompts.fields
        beyond = [*self.prompts.beyond(chat=uses_chat(settings))]
        if tokens:
            beyond.append("it does not report token counts. Remove tokens.")
        self.use_model(model, settings, max_tokens=self.sampling.max_tokens, beyond=beyond)

    def _own_columns(self) -> dict[str, Column]:
        each: Column = Text() if self.n == 1 else Json()
        columns: dict[str, Column] = {"text": each}
        if self.keep_reasoning:
            columns["reasoning"] = each
        columns["n_prompt_tokens"] = Array("int32")
        if self._truncates:
            columns["n_truncated"] = Array("int32")
        columns["n_tokens"] = Array("int32", () if self.n == 1 else (self.n,))
        columns["finish_reason"] = each
        if self.tokens:
            columns["tokens"] = Ragged("int32")
        if self.logprobs:
            columns["logprobs"] = Ragged("float32")
        return columns

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The answers to each item, or an ItemError for one without a prompt or an answer."""
        return compute_good(items, self._ask, self._rows)

    def _ask(self, item: Item) -> tuple[Prompt, int]:
        return self.prompts.of(item.data, seed=item.seed), item.seed

    def _rows(self, asked: Sequence[tuple[Prompt, int]]) -> list[Row | ItemError]:
        """The row of each prompt with its item's seed."""
        requests = [
            Request(number * self.n + sample, prompt, self.sampling, mix(seed, sample))
            for number, (prompt, seed) in enumerate(asked)
            for sample in range(self.n)
        ]
        answers = iter(self._answers(requests))
        return [value_or_error(self._row, [*islice(answers, self.n)]) for _ in asked]

    def _row(self, answers: Sequence[Output | ItemError]) -> Row:
        outputs = [value_of(answer) for answer in answers]
        values = {} if self._structured is None else self._structured.values(outputs)
        each: dict[str, list[Any]] = {
            "text": [output.text for output in outputs],
            "n_tokens": [output.n_tokens for output in outputs],
            "finish_reason": [output.finish_reason for output in outputs],
        }
        if self.keep_reasoning:
            each["reasoning"] = [output.reasoning for output in outputs]
        row = {name: values if self.n > 1 else values[0] for name, values in each.items()}
        row["n_prompt_tokens"] = outputs[0].n_prompt_tokens
        if self._truncates:
            row["n_truncated"] = outputs[0].n_truncated
        if self.tokens:
            row["tokens"] = np.concatenate([output.tokens for output in outputs])
        if self.logprobs:
            row["logprobs"] = np.concatenate([output.logprobs for output in outputs if output.logprobs is not None])
        return row | values

    def summarize(self, merged: Merged) -> dict[str, Any]:
        """Count tokens of prompts and answers, and why answers ended."""
        ends = good_values(merged, "finish_reason")
        reasons = Counter[str](ends if self.n == 1 else chain.from_iterable(ends))
        n_answers, n_tokens = reasons.total(), total(merged, "n_tokens")
        summary = {
            "n_answers": n_answers,
            "n_failed": int(merged.failed.sum()),
            "n_prompt_tokens": total(merged, "n_prompt_tokens"),
            "n_tokens": n_tokens,
            "tokens_per_answer": ratio(n_tokens, n_answers),
        }
        if self._truncates:
            summary["n_truncated"] = n_truncated(merged)
        return summary | ends_summary(reasons, self.sampling.max_tokens)
