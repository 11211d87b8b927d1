"""Run prompts through the model: equal prompts once, and a shared prefix once."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.batching import (
    CPU_PADDING,
    GPU_PADDING,
    common_prefix,
    is_worthwhile,
    n_in_pack,
    of_like_length,
)
from slurmgpu.llm.interface.engine import Place, Tokens
from slurmgpu.llm.transformers_engine import caches, packing
from slurmgpu.llm.transformers_engine.call_lengths import CallLengths
from slurmgpu.llm.transformers_engine.last_layer import LastLayer
from slurmgpu.llm.transformers_engine.loading import Loaded
from slurmgpu.llm.transformers_engine.packing import Pack, Text
from slurmgpu.llm.transformers_engine.quantization import is_int8
from slurmgpu.llm.transformers_engine.selfcheck import EXACT, ROUNDED
from slurmgpu.util.exceptions import described

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


PADDING = "padding a text to the length of a longer one changes its logits"
"""Why rows of a model cannot be batched with longer ones."""
WRONG = 0.2
"""The relative difference of logits after a cache that is not rounding in any precision."""
PROBES = ((3, 11, 5, 7, 2, 13), (4, 6))
"""Texts that are read alone and in a pack when a model is loaded."""
PADDED = ((3, 11, 5, 7, 2, 13, 9, 12), (4, 6, 8), (8, 2, 5, 14), (7, 12, 3, 10, 6))
"""Texts that are read alone, and beside longer ones, when a model is loaded."""
PROBED = (1, 3)
"""The columns of the first text for comparing logits with a call for all columns."""


@dataclass
class Prefilled:
    """Prompts' keys and values, the mask of their columns, and the logits of the next tokens.

    `mask` is (row, column), int64; `logits` is (row, token).
    """

    cache: Any
    mask: Tensor
    logits: Tensor


class Prefill:
    """Reads prompts, and keeps their common prefix between calls.

    Sliding layers look back by columns, so they allow a shared prefix only if no row grows beyond the window; `longest`
    is the most columns that rows may reach.
    """

    def __init__(self, loaded: Loaded, place: Place) -> None:
        self._loaded, self._place = loaded, place
        self._cache_keyword = caches.keyword_of(loaded.model)
        self._has_columns = caches.has_columns(loaded.model)
        self._window = caches.window(loaded.model)
        self._shared: tuple[Tokens, Any] = ((), None)
        config = loaded.model.config.get_text_config()
        self.width = int(config.vocab_size)
        self.lengths = CallLengths.of(config)
        if self.lengths.border < loaded.context:
            log.info(
                "%s computes texts of more than %d tokens differently: no batch mixes shorter and longer texts",
                type(loaded.model).__name__,
                self.lengths.border,
            )
        self.has_rows = caches.has_rows(loaded.model)
        self.most_columns = loaded.context if config.model_type in caches.COLUMN_WINDOWS else sys.maxsize
        """The cache columns beyond which the model has no mask."""
        self._can_share = self.has_rows and caches.takes_holes(loaded.model)
        # Some models, mostly with their own code, always compute all logits.
        self.can_keep_few = "logits_to_keep" in inspect.signature(type(loaded.model).forward).parameters
        on_cpu = loaded.device.type == "cpu"
        self.padding = CPU_PADDING if on_cpu else GPU_PADDING
        self._last_layer: LastLayer | None = None
        if on_cpu and self.can_keep_few:
            otherwise = "computing its last layer for all tokens"
            self._last_layer = LastLayer(loaded.model) if self._is_right(self._off_in_last_layer, otherwise) else None
        # On GPUs many small kernels cost more than padding.
        self._can_pack = on_cpu and self.has_rows and self.can_keep_few and packing.is_possible(loaded.model)
        otherwise = "padding texts instead of packing them"
        self._can_pack = self._can_pack and self._is_right(self._off_in_pack, otherwise)
        # If packs are right, rows and steps are right, too.
        self.takes_padding = self._can_pack or self.is_so_on_all(self._pads_right())
        if not self.takes_padding:
            # Rows in a cache also have other columns than alone.
            self.has_rows = self._can_share = False

    def forget(self) -> None:
        """Free the memory of the shared prefix."""
        self._shared = ((), None)

    def share(self, prompts: Sequence[Tokens]) -> Tokens:
        """The common prefix, if it is worth computing once; else ()."""
        n_same = common_prefix(prompts)
        if n_same <= self.lengths.border < max(map(len, prompts)):
            return ()
        return prompts[0][:n_same] if self._can_share and is_worthwhile(n_same, prompts) else ()

    def new_cache(self, n_more: int = 0) -> Any:
        """An empty cache for the model, for prompts and `n_more` tokens after them."""
        return caches.new_cache(self._loaded.model, n_more)

    def n_together(self, prompts: Sequence[Tokens], shared: Tokens = (), behind: Sequence[int] = ()) -> int:
        """How many of these prompts, sorted by length, should be read at once, with `behind` tokens after each."""
        if not self.packs(prompts[0]):
            return of_like_length(prompts, self.padding if self.takes_padding else 0)
        different = zip([None, *prompts], prompts, behind or [0] * len(prompts), strict=False)
        return n_in_pack(
            more + (0 if prompt == before else len(prompt) - len(shared)) for before, prompt, more in different
        )

    def packs(self, longest: Tokens) -> bool:
        """Whether texts up to `longest` are packed into one row."""
        return self._can_pack and (self._window is None or len(longest) <= self._window)

    def read(self, prompts: Sequence[Tokens], longest: int, shared: Tokens = ()) -> Prefilled:
        """Read prompts as rows, in order; `shared` is their common prefix, if known."""
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

    def forward(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, n_logits: int | Tensor = 1, **more: Any
    ) -> Tensor:
        """Run `ids`; returns logits of the last `n_logits` columns (0: all), or of these: (row, column, token)."""
        n_columns = ids.shape[1]
        if self._last_layer is None or (isinstance(n_logits, int) and not 0 < n_logits < n_columns):
            return self._forward(ids, mask, positions, cache, n_logits, **more)
        with self._last_layer.only(slice(-n_logits, None) if isinstance(n_logits, int) else n_logits, n_columns):
            return self._forward(ids, mask, positions, cache, n_logits, **more)

    def _forward(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, n_logits: int | Tensor, **more: Any
    ) -> Tensor:
        if mask is not None and not self._has_columns:
            mask = mask[:, -ids.shape[1] :]  # only the new columns can be padding
        found: Tensor = self._loaded.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            **{self._cache_keyword: cache},
            use_cache=cache is not None,
            **({"logits_to_keep": n_logits} if self.can_keep_few else {}),
            **more,
        ).logits
        # With several GPUs the last one has them.
        return (found[:, -n_logits:] if isinstance(n_logits, int) else found).to(ids.device)

    def forward_pack(self, pack: Pack, columns: Sequence[int] = ()) -> Tensor:
        """Run a pack; returns logits of these columns, or of all: (column, token)."""
        import torch

        kept = torch.tensor(columns, device=pack.ids.device) if columns else 0
        with packing.attention_of_packs(self._loaded.model):
            return self.forward(pack.ids, None, pack.positions, pack.cache, kept, pack=pack)[0]

    def pack(self, texts: Sequence[Text], shared: Tokens = (), cache: Any = None) -> Pack:
        """Texts that all begin with `shared`, as a pack."""
        before = self._read_shared(shared) if shared else None
        return Pack(texts, self._loaded.model, cache, n_shared=len(shared), shared=before)

    def _read(self, prompts: Sequence[Tokens], shared: Tokens, n_more: int = 0) -> Prefilled:
        has_padding = len({*map(len, prompts)}) > 1
        if has_padding and self.packs(max(prompts, key=len)):
            cache = self.new_cache(n_more)
            pack = self.pack([Text(tokens) for tokens in prompts], shared, cache)
            logits = self.forward_pack(pack, pack.ends)
            return Prefilled(cache, pack.mask, logits)
        return self._read_rows(prompts, shared, n_more, has_padding=has_padding)

    def _read_rows(self, prompts: Sequence[Tokens], shared: Tokens, n_more: int, *, has_padding: bool) -> Prefilled:
        """Prompts as rows, padded on the left."""
        import torch

        n_shared, n_rows = len(shared), len(prompts)
        cache = caches.repeat(self._read_shared(shared), n_rows, n_more) if n_shared else self.new_cache(n_more)
        ids, mask = self.pad([tokens[n_shared:] for tokens in prompts])
        positions = n_shared + (mask.cumsum(1) - 1).clamp(min=0)
        whole = torch.cat([mask.new_ones(len(prompts), n_shared), mask], 1)
        return Prefilled(cache, whole, self.forward(ids, whole if has_padding else None, positions, cache)[:, -1])

    def _read_shared(self, tokens: Tokens) -> Any:
        known, cache = self._shared
        if known != tokens:
            self.forget()
            cache = self._read([tokens], ()).cache
            self._shared = tokens, cache
        return cache

    def pad(self, rows: Sequence[Sequence[int]], *, left: bool = True) -> tuple[Tensor, Tensor]:
        """Rows of token ids, padded on the left or right, and their mask; both (row, column), on the model's device."""
        import torch

        longest, pad_id, ids, mask = max(map(len, rows)), self._loaded.pad_id, [], []
        for row in rows:
            fill = longest - len(row)
            ids.append([pad_id] * fill + list(row) if left else list(row) + [pad_id] * fill)
            mask.append([0] * fill + [1] * len(row) if left else [1] * len(row) + [0] * fill)
        device = self._loaded.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _is_right(self, measure: Callable[[], float], otherwise: str) -> bool:
        """Whether logits differ only by rounding, on all ranks; if not, the log has `otherwise` and the reason."""
        import torch

        try:
            with torch.inference_mode():
                off = measure()
            is_right, said = self._is_rounding(off), f"logits are off by {off:.2g}"
        except Exception as error:  # a model with its own code can raise any error
            is_right, said = False, described(error)
        if not is_right:
            log.info("%s: %s: %s", type(self._loaded.model).__name__, otherwise, said)
        return self.is_so_on_all(is_right)

    def _off_in_last_layer(self) -> float:
        """How far logits are off if the last layer skips the columns whose logits are not needed."""
        import torch

        probe = [token % self.width for token in PROBES[0]]
        ids, _ = self.pad([probe, probe[::-1]])
        of_all = self.forward(ids, None, None, None, 0)
        with LastLayer(self._loaded.model).only(list(PROBED), ids.shape[1], math.nan):
            logits = self.forward(ids, None, None, None, torch.tensor(PROBED))
        return _difference(logits, of_all[:, list(PROBED)], of_all)

    def is_so_on_all(self, verdict: bool) -> bool:
        """Whether all processes that share the model agree: with different decisions they would wait for each other."""
        import torch

        if self._place.world_size == 1:
            return verdict
        shared = torch.tensor(int(verdict), device=self._loaded.device)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN)
        return bool(shared)

    def _is_rounding(self, off: float) -> bool:
        import torch

        return off <= (EXACT if self._loaded.model.dtype == torch.float32 else ROUNDED)

    def _off_in_pack(self) -> float:
        """How far logits of texts in a pack, and of a step from their rows, are from the logits of the texts alone."""
        import torch

        long, brief = (tuple(token % self.width for token in probe) for probe in PROBES)
        of_long, of_brief = (self.forward(self.pad([row])[0], None, None, None, 0)[0] for row in (long, brief))
        pack = self.pack([Text(long[:4], (long[4:],)), Text(brief)])
        found = [self.forward_pack(pack, [*pack.ends, *pack.branches])]
        expected = [of_long[3], of_brief[-1], *of_long[4:]]
        read = self._read([long[:-1], brief[:-1]], (), 1)
        ids, one = self.pad([long[-1:], brief[-1:]])
        next_ones = self.forward(ids, torch.cat([read.mask, one], 1), read.mask.sum(1)[:, None], read.cache)
        found += [read.logits, next_ones[:, -1]]
        expected += [of_long[-2], of_brief[-2], of_long[-1], of_brief[-1]]
        return _difference(torch.cat(found), torch.stack(expected), of_long)

    def _pads_right(self) -> bool:
        """Whether texts have the same logits with longer ones as alone; SlurmGPUError if the cache is wrong.

        The median over some texts counts, since rounding may change the experts for a token of one text. With int8
        weights of bitsandbytes every neighbour changes values, not only padding, so only the cache is checked. If a
        model names no argument for a cache, results with the cache must be right up to rounding.
        """
        import torch

        model = self._loaded.model
        rows = [tuple(token % self.width for token in row) for row in PADDED]
        off_steps: list[float] = []
        int8, named = is_int8(model), caches.argument_of(model) is not None
        try:
            with torch.inference_mode():
                alone = [self.forward(self.pad([row])[0], None, None, None, 0)[0] for row in rows]
                off_steps = [self._step_off([row], [logits])[0] for row, logits in zip(rows[:2], alone, strict=False)]
                off_padded = [0.0] if int8 else self._step_off(rows, alone)[1:]
        except Exception as error:  # a model with its own code can raise any error
            if not named and not off_steps:
                raise SlurmGPUError(
                    f"{type(model).__name__} has no argument for a cache in its forward pass "
                    f"({' or '.join(caches.ARGUMENTS)}), and fails with one: {described(error)}. The engine "
                    'transformers does not support it; engine = "vllm" may.'
                ) from error
            is_right, said = False, described(error)
        else:
            off = min(off_steps)
            if off > WRONG or not (named or int8 or self._is_rounding(off)):
                raise SlurmGPUError(
                    f"{type(model).__name__} computes other logits for a token after its cache than for the same text "
                    f"read at once: they are off by {off:.2g} of the greatest. The engine transformers "
                    'does not support it; engine = "vllm" may.'
                )
            off = sorted(off_padded)[len(off_padded) // 2]
            is_right, said = self._is_rounding(off), f"logits are off by {off:.2g}"
        if not is_right:
            log.warning(
                "%s: %s; batches only have texts of equal length, which is slower: %s",
                type(model).__name__,
                PADDING,
                said,
            )
        return is_right

    def _step_off(self, rows: Sequence[Tokens], alone: Sequence[Tensor]) -> list[float]:
        """How far the logits of rows and of a step after them are from the logits of the same texts read at once."""
        import torch

        brief, (ids, one) = [row[:-1] for row in rows], self.pad([row[-1:] for row in rows])
        read = self._read_rows(brief, (), 1, has_padding=len({*map(len, rows)}) > 1)
        mask = torch.cat([read.mask, one], 1) if len(rows) > 1 else None
        steps = self.forward(ids, mask, read.mask.sum(1)[:, None], read.cache)[:, -1]
        found = torch.stack([read.logits, steps], 1)
        return [_difference(each, logits[-2:], logits) for each, logits in zip(found, alone, strict=True)]


def _difference(found: Tensor, expected: Tensor, among: Tensor) -> float:
    """The greatest difference of logits, relative to the greatest logit of a text, or to 1."""
    return float((found - expected).abs().max() / among.abs().max().clamp(min=1))
