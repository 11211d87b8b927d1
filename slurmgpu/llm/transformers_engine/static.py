"""Generate in padded batches, on any device: finished rows make room for the next requests.

All processes of a group do the same in the same order, since all decisions depend only on the tokens.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from slurmgpu.llm.interface.batching import MOST_ROWS, Budget, Load, n_that_fit
from slurmgpu.llm.interface.engine import Tokens
from slurmgpu.llm.interface.sampling_rules import Rules
from slurmgpu.llm.prompts.encoded import Encoded, Finished
from slurmgpu.llm.transformers_engine.decoding import Decoding
from slurmgpu.llm.transformers_engine.decoding_choice import DecodingChoice
from slurmgpu.llm.transformers_engine.prefill import Prefill
from slurmgpu.llm.transformers_engine.rows import Chooser, Chosen, Row, Waiting, too_large
from slurmgpu.llm.transformers_engine.slots import SlotsError
from slurmgpu.util.exceptions import described
from slurmgpu.util.out_of_memory import free_memory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Batch:
    """Rows that are generated together.

    `latest` (row,) has the last tokens, `counts` (row,) the numbers of tokens in the answers. `ahead` has the tokens of
    a step that was started before the tokens of the last step were known; the rows have not taken them yet.
    """

    rows: list[Row]
    decoding: Decoding
    counts: Tensor
    rules: Rules
    latest: Tensor
    ahead: Chosen | None = None

    def load(self, limit: int) -> Load:
        """The batch's load, with at most `limit` tokens in a row."""
        more = max(min(row.more, limit - _length(row) + 1) for row in self.rows)
        return Load(len(self.rows), self.decoding.columns, more)


@dataclass
class _Work:
    """The state of a call: waiting requests, those being read (`taken`), and the current batch.

    `finished` has the answers that the caller has not received yet. Rows that grow beyond `limit` tokens leave the
    batch, and are `crossed`: those requests have to be read again.
    """

    waiting: deque[Waiting]
    shared: Tokens
    limit: int = sys.maxsize
    crossed: list[Waiting] = field(default_factory=list)
    taken: list[Waiting] = field(default_factory=list)
    batch: _Batch | None = None
    load: Load = field(default_factory=Load)
    finished: list[Finished] = field(default_factory=list)

    def lengths_of(self, waiting: Waiting) -> tuple[int, int]:
        """The tokens to read for a request, and the most that follow in its row."""
        n_read = len(waiting.tokens)
        return n_read, min(waiting.more, self.limit - n_read + 1)

    def report(self) -> None:
        """Move the answers of ended rows to `finished`, where running out of memory cannot lose them."""
        for row in self.batch.rows if self.batch is not None else ():
            if row.ended is None and _length(row) > self.limit:
                self.crossed.append(Waiting.longer(row))
                row.ended, row.is_reported = "length", True  # only here
            if row.ended is not None and not row.is_reported:
                self.finished.append(row.finish())
                row.is_reported = True


class StaticBatches:
    """Generates answers in batches within the budget."""

    def __init__(self, chooser: Chooser, budget: Budget, prefill: Prefill, decodings: DecodingChoice) -> None:
        self._chooser = chooser
        self._budget = budget
        self._prefill = prefill
        self._decodings = decodings

    def generate(self, requests: Sequence[Encoded]) -> Iterator[Finished]:
        """Each request's answer, in the order in which they finish."""
        waiting = [Waiting(each) for each in requests]
        for group in self._prefill.lengths.groups(waiting, lambda each: (len(each.tokens), each.more - 1)):
            left = group
            while left:
                left = yield from self._answer(left)

    def _answer(self, waiting: Sequence[Waiting]) -> Generator[Finished, None, list[Waiting]]:
        """The answers of requests that may share a batch; returns the requests that cannot finish in it."""
        # The longest first: a batch too large fails at once. Equal prompts are neighbours and are read once.
        order = sorted(waiting, key=lambda each: (-len(each.tokens), each.tokens, -each.more))
        limit = self._prefill.lengths.limit(len(order[0].tokens))
        work = _Work(deque(order), self._prefill.share([each.tokens for each in order]), limit)
        while work.waiting or work.batch is not None:
            failure = self._attempt(work)
            if failure is not None and self._decodings.give_up(failure):
                self._redo(work)
            elif failure is not None:
                self._back_off(work)
            finished, work.finished = work.finished, []
            yield from finished
        return work.crossed

    def _attempt(self, work: _Work) -> str | None:
        """Why the step failed, by slots or memory, after all references to its tensors are gone; None on success."""
        try:
            return "out of memory" if self._budget.attempt(self._advance, work) is None else None
        except SlotsError as error:
            return str(error)
        except Exception as error:
            # A fault in a replay is raised by the next call that waits for the GPU.
            if self._decodings.uses_slots:
                self._decodings.raise_if_lost(described(error).partition("\n")[0])
            raise

    def _redo(self, work: _Work) -> list[Waiting]:
        """Put the requests of the batch back into the queue; returns them."""
        rows = work.batch.rows if work.batch is not None else []
        redone = [Waiting.again(row) for row in rows if row.ended is None] + work.taken
        work.batch, work.taken = None, []
        self._prefill.forget()
        free_memory()
        work.waiting.extendleft(reversed(redone))
        return redone

    def _back_off(self, work: _Work) -> None:
        """After running out of memory: retry the batch with a smaller budget; a single request fails."""
        n_rows = len(work.batch.rows) if work.batch is not None else 0
        was_alone = n_rows + len(work.taken) == 1
        redone = self._redo(work)
        if was_alone and redone:
            work.finished.append(too_large(work.waiting.popleft().encoded))
        else:
            self._budget.reduce(work.load.tokens)

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
        """Let the rows take their next tokens while the device computes the tokens after them."""
        chosen = batch.ahead or self._begin(batch)
        batch.ahead = self._begin(batch) if self._goes_ahead(batch) else None
        self._chooser.take(batch.rows, chosen)

    def _begin(self, batch: _Batch) -> Chosen:
        logits = batch.decoding.step(batch.latest)
        chosen = self._chooser.choose(batch.rows, logits, batch.rules, batch.counts)
        batch.latest, batch.counts = chosen.tokens, batch.counts + 1
        return chosen

    def _goes_ahead(self, batch: _Batch) -> bool:
        """Whether to start a step before the last tokens are known: it may, and some row needs it if no row ends."""
        left = [row for row in batch.rows if row.ended is None]
        is_free = batch.decoding.goes_ahead and all(row.matcher is None for row in left)
        return is_free and any(row.more > 1 for row in left)

    def _drop_ended(self, work: _Work) -> bool:
        """Remove ended rows from the batch once there are enough to be worth the copy; returns whether it did."""
        import torch

        batch = work.batch
        assert batch is not None
        if not self._shall_drop(batch):
            return False
        if batch.ahead is not None and any(row.ended is None for row in batch.rows):
            self._chooser.take(batch.rows, batch.ahead)
            batch.ahead = None
            work.report()
        going_on = [i for i, row in enumerate(batch.rows) if row.ended is None]
        if not going_on:
            work.batch = None
            return True
        order = batch.decoding.keep(going_on)
        batch.rows = [batch.rows[i] for i in order]
        rows = torch.tensor(order, device=batch.latest.device)
        batch.counts, batch.latest, batch.rules = batch.counts[rows], batch.latest[rows], batch.rules.select(rows)
        return True

    def _shall_drop(self, batch: _Batch) -> bool:
        n_left = sum(row.ended is None for row in batch.rows)
        is_full = batch.decoding.columns >= self._prefill.most_columns
        n_least = 1 if is_full else max(1, len(batch.rows) // 8)
        return len(batch.rows) - n_left >= n_least and (n_left == 0 or self._prefill.has_rows)

    def _fill(self, work: _Work) -> None:
        """Read the next requests into the free budget."""
        if not work.waiting or (work.batch is not None and not self._prefill.has_rows):
            return
        held = work.batch.load(work.limit) if work.batch is not None else Load()
        next_ones = [*islice(work.waiting, MOST_ROWS)]
        if not self._prefill.takes_padding:
            next_ones = next_ones[: self._prefill.n_together([each.tokens for each in next_ones])]
        size = self._decodings.size if work.batch is None else work.batch.decoding.size
        n_taken, load = n_that_fit(held, [work.lengths_of(each) for each in next_ones], self._budget.tokens, size)
        # Reading even a few costs as much as a step.
        if n_taken < min(len(work.waiting), held.n_rows // 4 + 1):
            return
        work.load = load
        work.taken = [work.waiting.popleft() for _ in range(n_taken)]
        batch, left = work.batch, work.taken
        while left:
            n_read = len(left)
            if self._prefill.has_rows:
                n_alike = self._prefill.n_together([each.tokens for each in left], work.shared)
                n_read = min(n_alike, self._decodings.n_read(left))
            batch = self._read(batch, left[:n_read], work, load)
            left = left[n_read:]
        assert batch is not None  # n_taken is at least 1
        work.batch, work.taken = batch, []
        self._budget.succeed()
        work.report()
        self._drop_ended(work)

    def _read(self, batch: _Batch | None, requests: Sequence[Waiting], work: _Work, load: Load) -> _Batch:
        """The batch with these requests."""
        import torch

        read = self._prefill.read([each.tokens for each in requests], load.columns + load.more, work.shared)
        asked = [each.encoded.request for each in requests]
        rules = Rules.of([each.sampling for each in asked], [each.key for each in asked], read.mask.device)
        rows = [self._chooser.go_on(each) for each in requests]
        counts = read.mask.new_tensor([len(each.answer) for each in requests])
        latest = self._chooser.record(rows, read.logits, rules, counts)
        counts = counts + 1
        most = [work.lengths_of(each)[1] for each in requests]
        if batch is None:
            return _Batch(rows, self._decodings.open(read, most, load), counts, rules, latest)
        batch.decoding.join(read, most)
        counts, latest = torch.cat([batch.counts, counts]), torch.cat([batch.latest, latest])
        return _Batch(batch.rows + rows, batch.decoding, counts, batch.rules.join(rules), latest)


def _length(row: Row) -> int:
    """The number of tokens in a row; the last one is not read yet."""
    return len(row.encoded.tokens) + len(row.tokens)
