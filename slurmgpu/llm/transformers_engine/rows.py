"""The rows of a generated batch: choose each row's next token, and find out which rows end with it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurmgpu.llm.interface.engine import FinishReason
from slurmgpu.llm.interface.host_copies import HostCopies
from slurmgpu.llm.interface.sampling import choose, log_probabilities
from slurmgpu.llm.interface.sampling_rules import Rules
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import Encoded, Finished
from slurmgpu.llm.transformers_engine.grammars import Grammars, Matcher

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Row:
    """A request with the tokens of its answer so far; `ended` says why it has no more."""

    encoded: Encoded
    matcher: Matcher | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: FinishReason | None = None
    error: str | None = None
    is_reported: bool = False
    n_before: int = 0
    """The tokens of the answer that existed when its row began."""

    @property
    def more(self) -> int:
        """How many more tokens the answer may have."""
        return self.encoded.request.sampling.max_tokens - len(self.tokens)

    def finish(self) -> Finished:
        """The finished answer."""
        wanted = self.encoded.request.sampling.logprobs
        assert self.ended is not None
        logprobs = tuple(self.logprobs) if wanted else None
        return Finished(self.encoded, tuple(self.tokens), self.ended, logprobs, self.error)


@dataclass(frozen=True)
class Waiting:
    """A request that waits for a row, with the tokens that its answer already has, and their log-probabilities."""

    encoded: Encoded
    answer: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @classmethod
    def again(cls, row: Row) -> Waiting:
        """The request of a row as it was when the row began."""
        return cls(row.encoded, tuple(row.tokens[: row.n_before]), tuple(row.logprobs[: row.n_before]))

    @classmethod
    def longer(cls, row: Row) -> Waiting:
        """The request of a row, including the generated tokens."""
        return cls(row.encoded, tuple(row.tokens), tuple(row.logprobs))

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens to read: the prompt, and the answer so far."""
        return self.encoded.tokens + self.answer

    @property
    def more(self) -> int:
        """How many more tokens the answer may have."""
        return self.encoded.request.sampling.max_tokens - len(self.answer)


class Chosen:
    """The next token of each row with its logit, and its log-probability if some row wants it.

    They are on their way from the device.
    """

    def __init__(self, tokens: Tensor, logits: Tensor, logprobs: Tensor | None) -> None:
        self.tokens = tokens
        self._copies = HostCopies(*(each for each in (tokens, logits, logprobs) if each is not None))

    def read(self) -> tuple[Sequence[int], Sequence[float], Sequence[float | None]]:
        """The tokens, logits and log-probabilities, once they are computed; does not wait for later work."""
        tokens, logits, *logprobs = (each.tolist() for each in self._copies.wait())
        return tokens, logits, logprobs[0] if logprobs else [None] * len(tokens)


class Chooser:
    """Chooses tokens with the sampling and the structure of each row; a token in `ends` ends an answer."""

    def __init__(self, codec: Codec, grammars: Grammars, ends: Collection[int]) -> None:
        self._codec = codec
        self._grammars = grammars
        self._ends = ends

    def start(self, encoded: Encoded) -> Row:
        """The row of a request, without tokens."""
        return Row(encoded, self._grammars.start(encoded))

    def go_on(self, waiting: Waiting) -> Row:
        """The row of a request, with the tokens that its answer has."""
        row = self.start(waiting.encoded)
        if row.matcher is not None:
            for token in waiting.answer:
                row.matcher.take(token)
        row.tokens, row.logprobs, row.n_before = [*waiting.answer], [*waiting.logprobs], len(waiting.answer)
        return row

    def choose(self, rows: Sequence[Row], logits: Tensor, rules: Rules, counts: Tensor) -> Chosen:
        """Start to choose each row's next token, from `logits`: (row, token).

        `counts` (row,) has the numbers of tokens in the answers so far; rows with a structure must have taken them.
        """
        matchers = [row.matcher if row.ended is None else None for row in rows]
        tokens = choose(logits, rules, counts, self._grammars.allowed(matchers, logits.device))
        wants_them = any(row.encoded.request.sampling.logprobs for row in rows)
        own = logits.gather(-1, tokens[:, None])[:, 0]
        return Chosen(tokens, own, log_probabilities(logits, tokens) if wants_them else None)

    def take(self, rows: Sequence[Row], chosen: Chosen) -> None:
        """Append the chosen tokens to the rows that have not ended, and mark rows that end with them.

        Of logits with NaN, the NaN counts as the greatest.
        """
        for row, token, logit, logprob in zip(rows, *chosen.read(), strict=True):
            if row.ended is None and not math.isfinite(logit):
                row.ended, row.error = "error", 'the logits are not finite; precision = "fp32" has a larger range'
            elif row.ended is None:
                row.tokens.append(token)
                if logprob is not None:
                    row.logprobs.append(logprob)
                row.ended = self._ending(row)

    def record(self, rows: Sequence[Row], logits: Tensor, rules: Rules, counts: Tensor) -> Tensor:
        """Choose each row's next token, and take it: (row,)."""
        chosen = self.choose(rows, logits, rules, counts)
        self.take(rows, chosen)
        return chosen.tokens

    def _ending(self, row: Row) -> FinishReason | None:
        if row.matcher is not None:
            row.matcher.take(row.tokens[-1])
            row.error = row.matcher.error
            if row.error is not None:
                return "error"
        if row.tokens[-1] in self._ends:
            return "stop"
        if self._codec.decoder.has_stopped(row.tokens, row.encoded.request.sampling.stop):
            return "stop"
        return "length" if row.more <= 0 else None


def lengths_of(encoded: Encoded) -> tuple[int, int]:
    """The tokens of a request's prompt, and the most of its answer."""
    return len(encoded.tokens), encoded.request.sampling.max_tokens


def too_large(encoded: Encoded) -> Finished:
    """The error for a request that runs out of memory even alone."""
    n_prompt, n_more = lengths_of(encoded)
    error = f"out of memory for this prompt alone, which has {n_prompt} tokens, with max_tokens = {n_more}"
    return Finished(encoded, (), "error", error=error)
