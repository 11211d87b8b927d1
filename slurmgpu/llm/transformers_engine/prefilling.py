"""Run prompts through the model: equal prompts once, and a shared prefix once."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.interface.batching import CPU_PADDING, GPU_PADDING, common_prefix, is_worthwhile, of_like_length
from slurmgpu.llm.transformers_engine import caches
from slurmgpu.llm.transformers_engine.loading import Loaded

if TYPE_CHECKING:
    from torch import Tensor

Tokens = tuple[int, ...]


@dataclass
class Prefilled:
    """Prompts' keys and values, the mask of their columns, and the logits of the next tokens.

    `mask` is (row, column), int64; `logits` is (row, token).
    """

    cache: Any
    mask: Tensor
    logits: Tensor


class Prefill:
    """Reads prompts, and keeps their shared prefix between calls.

    Sliding layers look back by columns, so that they allow a shared prefix only if no row grows beyond the window;
    `longest` is the most columns that rows may reach.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._window = caches.window(loaded.model)
        self._shared: tuple[Tokens, Any] = ((), None)
        self.has_rows = caches.has_rows(loaded.model)
        self._can_share = self.has_rows and caches.takes_holes(loaded.model)
        # Some models, mostly with their own code, always compute all logits.
        self.can_keep_few = "logits_to_keep" in inspect.signature(type(loaded.model).forward).parameters
        self._padding = CPU_PADDING if loaded.device.type == "cpu" else GPU_PADDING

    def forget(self) -> None:
        """Free the memory of the shared prefix."""
        self._shared = ((), None)

    def share(self, prompts: Sequence[Tokens]) -> Tokens:
        """The shared prefix, if it is worth computing once; else nothing."""
        n_same = common_prefix(prompts)
        return prompts[0][:n_same] if self._can_share and is_worthwhile(n_same, prompts) else ()

    def new_cache(self, n_more: int = 0) -> Any:
        """An empty cache for the model, for prompts and `n_more` tokens after them."""
        return caches.new_cache(self._loaded.model, n_more)

    def n_together(self, prompts: Sequence[Tokens]) -> int:
        """How many of these prompts, sorted by length, `read` should get at once."""
        return of_like_length(prompts, self._padding)

    def read(self, prompts: Sequence[Tokens], longest: int, shared: Tokens = ()) -> Prefilled:
        """Read prompts as rows, in order; `shared` is their shared prefix, if it is known."""
        import torch

        different = list(dict.fromkeys(prompts)) if self.has_rows else list(prompts)
        shared = shared or self.share(different)
        if self._window is not None and longest > self._window:
            shared = ()
        found = self._read(different, shared, longest - max(map(len, different)))
        if len(different) < len(prompts):
            places = {tokens: row for row, tokens in enumerate(different)}
            rows = torch.tensor([places[tokens] for tokens in prompts], device=found.mask.device)
            caches.select(found.cache, rows)
            found = Prefilled(found.cache, found.mask[rows], found.logits[rows])
        return found

    def forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, n_logits: int = 1) -> Tensor:
        """Run `ids`, and return logits of the last `n_logits` columns (0: all): (row, column, token)."""
        found: Tensor = self._loaded.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **({"logits_to_keep": n_logits} if self.can_keep_few else {}),
        ).logits
        # With several GPUs the last one has them.
        return found[:, -n_logits:].to(ids.device)

    def _read(self, prompts: Sequence[Tokens], shared: Tokens, n_more: int = 0) -> Prefilled:
        import torch

        n_shared, n_rows = len(shared), len(prompts)
        cache = caches.repeat(self._read_shared(shared), n_rows, n_more) if n_shared else self.new_cache(n_more)
        ids, mask = self.pad([tokens[n_shared:] for tokens in prompts])
        positions = n_shared + (mask.cumsum(1) - 1).clamp(min=0)
        whole = torch.cat([mask.new_ones(len(prompts), n_shared), mask], 1)
        has_padding = len({*map(len, prompts)}) > 1
        return Prefilled(cache, whole, self.forward(ids, whole if has_padding else None, positions, cache)[:, -1])

    def _read_shared(self, tokens: Tokens) -> Any:
        known, cache = self._shared
        if known != tokens:
            self.forget()
            cache = self._read([tokens], ()).cache
            self._shared = tokens, cache
        return cache

    def pad(self, rows: Sequence[Sequence[int]], *, left: bool = True) -> tuple[Tensor, Tensor]:
        """Rows of token ids, padded at the left or right, and their mask, both on the model's device."""
        import torch

        longest, pad_id, ids, mask = max(map(len, rows)), self._loaded.pad_id, [], []
        for row in rows:
            fill = longest - len(row)
            ids.append([pad_id] * fill + list(row) if left else list(row) + [pad_id] * fill)
            mask.append([0] * fill + [1] * len(row) if left else [1] * len(row) + [0] * fill)
        device = self._loaded.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
