"""Prompts through the model: equal ones once, and what all begin with once, too."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmgpu.llm import caches
from slurmgpu.llm.batching import CPU_PADDING, GPU_PADDING, common_prefix, is_worthwhile, of_like_length
from slurmgpu.llm.loading import Loaded

if TYPE_CHECKING:
    from torch import Tensor

Tokens = tuple[int, ...]


@dataclass
class Prefilled:
    """Prompts that the model has read: their keys and values, which columns hold them, and the logits that follow.

    `mask` is (row, column), int64; `logits` is (row, token).
    """

    cache: Any
    mask: Tensor
    logits: Tensor


class Prefill:
    """Reads prompts; the beginning that they share is kept from one call to the next.

    `longest` is what the rows may yet grow to, in columns: sliding layers look back by columns, so for them a shared
    beginning is used only where no row grows beyond the window.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._window = caches.window(loaded.model)
        self._shared: tuple[Tokens, Any] = ((), None)
        self.has_rows = caches.has_rows(loaded.model)
        self._can_share = self.has_rows and caches.takes_holes(loaded.model)
        # Some models, those that bring their own code most of all, know only all logits.
        self.can_keep_few = "logits_to_keep" in inspect.signature(type(loaded.model).forward).parameters
        self._padding = CPU_PADDING if loaded.device.type == "cpu" else GPU_PADDING

    def forget(self) -> None:
        """Give back the memory of the shared beginning."""
        self._shared = ((), None)

    def share(self, prompts: Sequence[Tokens]) -> Tokens:
        """What all of these begin with, if that is worth computing once; else nothing."""
        n_same = common_prefix(prompts)
        return prompts[0][:n_same] if self._can_share and is_worthwhile(n_same, prompts) else ()

    def new_cache(self) -> Any:
        """An empty cache for the model."""
        return caches.new_cache(self._loaded.model)

    def n_together(self, prompts: Sequence[Tokens]) -> int:
        """How many of these prompts, sorted by length, `read` had better be given at once."""
        return of_like_length(prompts, self._padding)

    def read(self, prompts: Sequence[Tokens], longest: int, shared: Tokens = ()) -> Prefilled:
        """Prompts, in order, as rows; `shared` is the beginning that all of the call's prompts have."""
        import torch

        different = list(dict.fromkeys(prompts)) if self.has_rows else list(prompts)
        shared = shared or self.share(different)
        if self._window is not None and longest > self._window:
            shared = ()
        found = self._read(different, shared)
        if len(different) < len(prompts):
            places = {tokens: row for row, tokens in enumerate(different)}
            rows = torch.tensor([places[tokens] for tokens in prompts], device=found.mask.device)
            caches.select(found.cache, rows)
            found = Prefilled(found.cache, found.mask[rows], found.logits[rows])
        return found

    def forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, n_logits: int = 1) -> Tensor:
        """Logits behind the last `n_logits` columns of `ids` (0: all), which join the cache: (row, column, token)."""
        found: Tensor = self._loaded.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **({"logits_to_keep": n_logits} if self.can_keep_few else {}),
        ).logits
        # Of a model on several GPUs the last one says them.
        return found[:, -n_logits:].to(ids.device)

    def _read(self, prompts: Sequence[Tokens], shared: Tokens) -> Prefilled:
        import torch

        n_shared = len(shared)
        cache = caches.repeat(self._read_shared(shared), len(prompts)) if n_shared else self.new_cache()
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
        """Rows of token ids, filled up at their left or right, and their mask, both on the model's device."""
        import torch

        longest, pad_id, ids, mask = max(map(len, rows)), self._loaded.pad_id, [], []
        for row in rows:
            fill = longest - len(row)
            ids.append([pad_id] * fill + list(row) if left else list(row) + [pad_id] * fill)
            mask.append([0] * fill + [1] * len(row) if left else [1] * len(row) + [0] * fill)
        device = self._loaded.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
