"""Score each token of windows of text, in batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmgpu.llm.interface.batching import Budget, Load, n_in_pack, n_that_fit, of_like_length
from slurmgpu.llm.interface.engine import Tokens
from slurmgpu.llm.interface.sampling import log_probabilities
from slurmgpu.llm.prompts.windows import Read, Window
from slurmgpu.llm.transformers_engine.call_lengths import depends_on_length
from slurmgpu.llm.transformers_engine.packing import Text
from slurmgpu.llm.transformers_engine.prefill import Prefill
from slurmgpu.llm.transformers_engine.scoring import MOST_LOGITS
from slurmgpu.util.out_of_memory import free_memory


class TokenScorer:
    """Reads windows within the budget; `config` is that of the model's text part.

    Logits are large, so they are computed for a part of the columns at a time, and the next part continues after the
    cache. For models whose values depend on the length of a call, each text is read at once, with others of its length.
    """

    def __init__(self, budget: Budget, prefill: Prefill, config: Any) -> None:
        self._budget, self._prefill, self._width = budget, prefill, config.vocab_size
        self._most_logits = max(MOST_LOGITS, self._width)
        self._by_length = depends_on_length(config)
        self._in_parts = prefill.has_rows and not self._by_length

    def read(self, windows: Sequence[Window]) -> Iterator[tuple[int, Read]]:
        """The index and the log-probabilities of each window, long windows first."""
        waiting = sorted(range(len(windows)), key=lambda place: (-len(windows[place].tokens), windows[place].tokens))
        while waiting:
            rows = [windows[place].tokens for place in waiting]
            alike = rows[: self._n_alike(rows)]
            n_taken, load = n_that_fit(Load(), [(len(row) - 1, 0) for row in alike], self._most_tokens())
            some = [windows[place] for place in waiting[:n_taken]]
            found = self._budget.attempt(self._read, some)
            if found is None:
                free_memory()
                if n_taken > 1:
                    self._budget.reduce(load.tokens)
                    continue
                if self._in_parts and self._most_logits > self._width:
                    self._most_logits = max(self._width, self._most_logits // 2)
                    continue
                error = f"out of memory for this text alone, which has {len(some[0].tokens)} tokens"
                found = [Read(np.empty(0, np.float32), error)]
            else:
                self._budget.succeed()
            yield from zip(waiting[:n_taken], found, strict=True)
            waiting = waiting[n_taken:]

    def _n_alike(self, rows: Sequence[Tokens]) -> int:
        """How many of the texts, sorted by length, may be read at once."""
        if self._by_length:
            return sum(1 for row in rows if len(row) == len(rows[0]))
        if self._prefill.packs(rows[0]):
            return n_in_pack((len(row) - 1 for row in rows), self._most_logits // self._width)
        return of_like_length(rows, self._prefill.padding)  # on the right, where no token sees it

    def _most_tokens(self) -> int:
        """The most tokens of a batch: if texts are not read in parts, the most that may have logits at once."""
        most = self._budget.tokens
        return most if self._in_parts else min(most, self._most_logits // self._width)

    def _read(self, windows: Sequence[Window]) -> list[Read]:
        import torch

        rows = [window.tokens for window in windows]
        is_packed = len({*map(len, rows)}) > 1 and not self._by_length and self._prefill.packs(max(rows, key=len))
        with torch.inference_mode():
            found = self._read_pack(rows) if is_packed else self._read_rows(rows)
        return [
            Read(logprobs[len(row) - 1 - window.n_scored : len(row) - 1])
            for logprobs, row, window in zip(found, rows, windows, strict=True)
        ]

    def _read_pack(self, rows: Sequence[Tokens]) -> list[npt.NDArray[np.float32]]:
        """The log-probability of each token except the first, for packed texts."""
        import torch

        pack = self._prefill.pack([Text(row[:-1]) for row in rows])
        logits = self._prefill.forward_pack(pack).float()  # the half ones are freed
        following = torch.tensor([token for row in rows for token in row[1:]], device=logits.device)
        logprobs = log_probabilities(logits, following)
        return np.split(logprobs.cpu().numpy(), np.cumsum([len(row) - 1 for row in rows[:-1]]))

    def _read_rows(self, texts: Sequence[Tokens]) -> list[npt.NDArray[np.float32]]:
        """Like `_read_pack`, for texts as rows, with extra values after texts shorter than the longest."""
        import torch

        # Padded on the right, where no token sees it.
        ids, _ = self._prefill.pad([row[:-1] for row in texts], left=False)
        following, _ = self._prefill.pad([row[1:] for row in texts], left=False)
        n_rows, n_columns = ids.shape
        positions = torch.arange(n_columns, device=ids.device).expand(n_rows, -1)
        n_at_once = max(1, self._most_logits // (n_rows * self._width)) if self._in_parts else n_columns
        cache, found = self._prefill.new_cache(n_columns), []
        for start in range(0, n_columns, n_at_once):
            part = slice(start, start + n_at_once)
            mask = ids.new_ones(n_rows, min(n_columns, start + n_at_once)) if start else None
            logits = self._prefill.forward(ids[:, part], mask, positions[:, part], cache, n_logits=0).float()
            found.append(log_probabilities(logits, following[:, part]).cpu())
        return list(torch.cat(found, 1).numpy())
