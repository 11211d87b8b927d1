"""Score each token of windows of text, in batches of like length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slurmgpu.llm.interface.batching import Budget, Load, attempt, free_memory, n_that_fit
from slurmgpu.llm.interface.engine import Place
from slurmgpu.llm.transformers_engine.prefilling import Prefill
from slurmgpu.llm.transformers_engine.scoring import MOST_LOGITS
from slurmgpu.llm.transformers_engine.windows import Read, Window

LENGTH_ROPES = {"dynamic", "longrope"}
"""Rotary positions whose frequencies transformers chooses by the greatest position of a call."""
LENGTH_MASKS = {"doge"}
"""Model types that attend to a number of columns, padding among them."""


class TokenScorer:
    """Reads windows within the budget; `width` is the model's vocabulary.

    Logits are many, so that a part of the columns has them at a time, and the next part goes on behind the cache. Of
    models whose values depend on how long all of a call is, each text is read at once, beside others of its length.
    """

    def __init__(self, place: Place, budget: Budget, prefill: Prefill, config: Any) -> None:
        self._place, self._budget, self._prefill, self._width = place, budget, prefill, config.vocab_size
        self._most_logits = max(MOST_LOGITS, self._width)
        self._by_length = depends_on_length(config)
        self._in_parts = prefill.has_rows and not self._by_length

    def read(self, windows: Sequence[Window]) -> Iterator[tuple[int, Read]]:
        """The place and the log-probabilities of each window, long ones first."""
        waiting = sorted(range(len(windows)), key=lambda place: (-len(windows[place].tokens), windows[place].tokens))
        while waiting:
            rows = [windows[place].tokens for place in waiting]
            alike = rows[: self._prefill.n_together(rows)]
            if self._by_length:
                alike = [row for row in alike if len(row) == len(rows[0])]
            n_taken, load = n_that_fit(Load(), [(len(row) - 1, 0) for row in alike], self._most_tokens())
            some = [windows[place] for place in waiting[:n_taken]]
            found = attempt(lambda some=some: self._read(some), self._place)  # type: ignore[misc]
            if found is None:
                free_memory()
                if n_taken > 1:
                    self._budget.reduce(load.tokens)
                    continue
                if self._in_parts and self._most_logits > self._width:
                    self._most_logits = max(self._width, self._most_logits // 2)
                    continue
                error = f"out of memory for a text of {len(some[0].tokens)} tokens alone"
                found = [Read(np.empty(0, np.float32), error)]
            else:
                self._budget.succeed()
            yield from zip(waiting[:n_taken], found, strict=True)
            waiting = waiting[n_taken:]

    def _most_tokens(self) -> int:
        """The most tokens of a batch; of a model that is not read in parts, as many as may have logits at once."""
        most = self._budget.tokens
        return most if self._in_parts else min(most, self._most_logits // self._width)

    def _read(self, windows: Sequence[Window]) -> list[Read]:
        import torch

        with torch.inference_mode():
            # Padded at the right, where no token sees it.
            ids, _ = self._prefill.pad([window.tokens[:-1] for window in windows], left=False)
            following, _ = self._prefill.pad([window.tokens[1:] for window in windows], left=False)
            n_rows, n_columns = ids.shape
            positions = torch.arange(n_columns, device=ids.device).expand(n_rows, -1)
            n_at_once = max(1, self._most_logits // (n_rows * self._width)) if self._in_parts else n_columns
            cache, found = self._prefill.new_cache(n_columns), []
            for start in range(0, n_columns, n_at_once):
                part = slice(start, start + n_at_once)
                mask = ids.new_ones(n_rows, min(n_columns, start + n_at_once)) if start else None
                logits = self._prefill.forward(ids[:, part], mask, positions[:, part], cache, n_logits=0).float()
                taken = logits.gather(-1, following[:, part, None])[..., 0] - logits.logsumexp(-1)
                found.append(taken.cpu())
            logprobs = torch.cat(found, 1).numpy()
        ends = [len(window.tokens) - 1 for window in windows]
        return [
            Read(logprobs[row, end - window.n_scored : end])
            for row, (window, end) in enumerate(zip(windows, ends, strict=True))
        ]


def depends_on_length(config: Any) -> bool:
    """Whether a text's values depend on the columns of all rows of a call: those of its neighbours, and padding."""
    types = _rope_types(getattr(config, "rope_parameters", {}))
    return config.model_type in LENGTH_MASKS or not LENGTH_ROPES.isdisjoint(types)


def _rope_types(parameters: Any) -> Iterator[str]:
    """The types of rotary positions: of all layers, or of each kind of layer."""
    if isinstance(parameters, Mapping):
        yield str(parameters.get("rope_type", parameters.get("type", "")))
        for each in parameters.values():
            yield from _rope_types(each)
