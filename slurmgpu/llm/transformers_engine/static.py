"""Generation in padded batches, on any device: finished rows make room for the next requests.

Every process of a group does the same in the same order, since all decisions follow from the tokens alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.interface.batching import MOST_ROWS, Budget, Load, attempt, free_memory, n_that_fit
from slurmgpu.llm.interface.engine import Place
from slurmgpu.llm.interface.sampling import Rules
from slurmgpu.llm.prompts.codec import Codec, Encoded, Finished
from slurmgpu.llm.transformers_engine import caches
from slurmgpu.llm.transformers_engine.grammars import Grammars
from slurmgpu.llm.transformers_engine.loading import Loaded
from slurmgpu.llm.transformers_engine.prefilling import Prefill, Tokens
from slurmgpu.llm.transformers_engine.rows import Chooser, Row, lengths_of, too_large

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Batch:
    """Rows that are generated together; each one's last token is not in the cache yet.

    `mask` (row, column) marks a row's columns in the cache, `lengths` (row,) counts them; `latest` (row,) has the last
    tokens, `counts` (row,) the numbers of tokens in the answers.
    """

    rows: list[Row]
    cache: Any
    mask: Tensor
    lengths: Tensor
    counts: Tensor
    rules: Rules
    latest: Tensor
    is_padded: bool = True

    def load(self) -> Load:
        """The batch's load."""
        return Load(len(self.rows), self.mask.shape[1], max(row.more for row in self.rows))


@dataclass
class _Work:
    """The state of a call: waiting requests, those being read (`taken`), and the current batch.

    `finished` has the answers that the caller has not received yet.
    """

    waiting: deque[Encoded]
    shared: Tokens
    taken: list[Encoded] = field(default_factory=list)
    batch: _Batch | None = None
    load: Load = field(default_factory=Load)
    finished: list[Finished] = field(default_factory=list)

    def report(self) -> None:
        """Move answers of ended rows to `finished`, where running out of memory cannot lose them."""
        for row in self.batch.rows if self.batch is not None else ():
            if row.ended is not None and not row.is_reported:
                self.finished.append(row.finish())
                row.is_reported = True


class StaticBatches:
    """Generates answers in batches within the budget."""

    def __init__(
        self, loaded: Loaded, place: Place, codec: Codec, grammars: Grammars, budget: Budget, prefill: Prefill
    ) -> None:
        self._loaded = loaded
        self._place = place
        self._chooser = Chooser(codec, grammars, loaded.eos_ids)
        self._budget = budget
        self._prefill = prefill

    def generate(self, requests: Sequence[Encoded]) -> Iterator[Finished]:
        """Each request's answer, in the order in which they finish."""
        # The longest first: a batch too large fails at once. Equal prompts are neighbours and are read once.
        order = sorted(requests, key=lambda each: (-len(each.tokens), each.tokens, -lengths_of(each)[1]))
        work = _Work(deque(order), self._prefill.share([each.tokens for each in order]))
        while work.waiting or work.batch is not None:
            if attempt(lambda: self._advance(work), self._place) is None:
                self._back_off(work)
            finished, work.finished = work.finished, []
            yield from finished

    def _back_off(self, work: _Work) -> None:
        """After running out of memory: retry the batch with a smaller budget; a request alone fails."""
        rows = work.batch.rows if work.batch is not None else []
        redone = [row.encoded for row in rows if row.ended is None] + work.taken
        was_alone = len(rows) + len(work.taken) == 1 and redone
        work.batch, work.taken = None, []
        self._prefill.forget()
        free_memory()
        if was_alone:
            work.finished.append(too_large(redone[0]))
        else:
            self._budget.reduce(work.load.tokens)
            work.waiting.extendleft(reversed(redone))

    def _advance(self, work: _Work) -> bool:
        """Generate one token for each row, then replace ended rows by waiting requests."""
        import torch

        with torch.inference_mode():
            if work.batch is not None:
                self._step(work.batch)
                work.report()
                if not self._drop_ended(work):
                    return True
            self._fill(work)
        return True

    def _step(self, batch: _Batch) -> None:
        import torch

        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.rows), 1)], 1)
        mask = batch.mask if batch.is_padded else None  # attention is faster without a mask
        # Ended rows are computed until they are dropped; some models have no further positions.
        positions = batch.lengths.clamp(max=self._loaded.context - 1)[:, None]
        logits = self._prefill.forward(batch.latest[:, None], mask, positions, batch.cache)[:, -1]
        batch.lengths = batch.lengths + 1
        self._record(batch, logits)

    def _record(self, batch: _Batch, logits: Tensor) -> None:
        """Choose each row's next token, and mark rows that end with it."""
        batch.latest = self._chooser.record(batch.rows, logits, batch.rules, batch.counts)
        batch.counts = batch.counts + 1

    def _drop_ended(self, work: _Work) -> bool:
        """Remove ended rows from the batch once there are enough to be worth the copy; returns whether it did."""
        import torch

        batch = work.batch
        assert batch is not None
        going_on = [i for i, row in enumerate(batch.rows) if row.ended is None]
        n_ended = len(batch.rows) - len(going_on)
        if n_ended < max(1, len(batch.rows) // 8) or (going_on and not self._prefill.has_rows):
            return False
        if not going_on:
            work.batch = None
            return True
        order = caches.drop(batch.cache, going_on, batch.mask.device)
        batch.rows = [batch.rows[i] for i in order]
        rows = torch.tensor(order, device=batch.mask.device)
        batch.mask = caches.trim(batch.cache, batch.mask[rows])
        batch.lengths, batch.counts, batch.latest = batch.lengths[rows], batch.counts[rows], batch.latest[rows]
        batch.rules = batch.rules.select(rows)
        batch.is_padded = not bool(batch.mask.all())
        return True

    def _fill(self, work: _Work) -> None:
        """Read the next requests into the free budget."""
        if not work.waiting or (work.batch is not None and not self._prefill.has_rows):
            return
        held = work.batch.load() if work.batch is not None else Load()
        next_ones = [lengths_of(each) for each in islice(work.waiting, MOST_ROWS)]
        n_taken, load = n_that_fit(held, next_ones, self._budget.tokens)
        # Reading even a few costs as much as a step.
        if n_taken < min(len(work.waiting), held.n_rows // 4 + 1):
            return
        work.load = load
        work.taken = [work.waiting.popleft() for _ in range(n_taken)]
        batch, left = work.batch, work.taken
        while left:
            n_read = self._prefill.n_together([each.tokens for each in left]) if self._prefill.has_rows else len(left)
            batch = self._join(batch, self._read(left[:n_read], work.shared, load))
            left = left[n_read:]
        assert batch is not None  # n_taken is at least 1
        work.batch, work.taken = batch, []
        batch.is_padded = not bool(batch.mask.all())
        self._budget.succeed()
        work.report()
        self._drop_ended(work)

    def _read(self, requests: Sequence[Encoded], shared: Tokens, load: Load) -> _Batch:
        read = self._prefill.read([each.tokens for each in requests], load.columns + load.more, shared)
        mask = read.mask
        samplings, keys = [each.request.sampling for each in requests], [each.request.key for each in requests]
        rules, lengths = Rules.of(samplings, keys, mask.device), mask.sum(1)
        rows = [self._chooser.start(each) for each in requests]
        batch = _Batch(rows, read.cache, mask, lengths, lengths.new_zeros(len(rows)), rules, lengths)
        self._record(batch, read.logits)
        return batch

    def _join(self, first: _Batch | None, second: _Batch) -> _Batch:
        import torch

        if first is None:
            return second
        caches.join(first.cache, second.cache, first.mask.shape[1], second.mask.shape[1])
        together = [(getattr(first, name), getattr(second, name)) for name in ("lengths", "counts", "latest")]
        lengths, counts, latest = (torch.cat(pair) for pair in together)
        mask = caches.join_masks(first.mask, second.mask)
        rules = first.rules.join(second.rules)
        return _Batch(first.rows + second.rows, first.cache, mask, lengths, counts, rules, latest)
