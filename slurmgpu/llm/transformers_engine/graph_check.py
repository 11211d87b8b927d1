"""The self-check of steps in slots, by the model's own weights: they are right, and faster, or not used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmgpu.llm.transformers_engine.decoding import Decoding, GrowingRows
from slurmgpu.llm.transformers_engine.prefilling import Prefill, Tokens
from slurmgpu.llm.transformers_engine.selfcheck import miss
from slurmgpu.llm.transformers_engine.slots import READ_SHARE, Runner, SlotRows, Slots, column_size, row_size

if TYPE_CHECKING:
    from torch import Tensor

SIZES = ((1, 40), (32, 60), (4, 1500))
"""Rows, and the tokens of the longest prompt: one row, many, whose columns cross a size, and few that are long."""
N_STEPS = 6
"""Steps that are compared with all rows, and again with some."""
N_ROUNDS, N_TIMED = 3, 3
"""Rounds of timed steps, of which the best counts, and the steps of each."""
N_MORE = 2 * N_STEPS + N_ROUNDS * N_TIMED
LIMIT_S = 30.0
"""The usual limit of a check."""


@dataclass(frozen=True)
class Trial:
    """What was seen of a size: the greatest difference of scores as a share of their range, and seconds of a step."""

    n_rows: int
    longest: int
    off: float
    eager_s: float = 0.0
    slots_s: float = 0.0

    def __str__(self) -> str:
        """The figures of a right one."""
        times = f"{self.eager_s * 1e3:.2f} ms eagerly, {self.slots_s * 1e3:.2f} ms so"
        return f"{self.n_rows} x {self.longest} tokens: off by {self.off:.2g}, {times}"


@dataclass(frozen=True)
class Verdict:
    """What a self-check found in `seconds`: why the steps are not used, None if they are, and what was seen."""

    reason: str | None
    trials: tuple[Trial, ...] = ()
    seconds: float = 0.0

    @property
    def slots_s(self) -> float:
        """The seconds of a step of each size together."""
        return sum(each.slots_s for each in self.trials)

    @property
    def gain(self) -> float:
        """How many times as fast as eager steps they are."""
        return sum(each.eager_s for each in self.trials) / max(1e-9, self.slots_s)

    def __str__(self) -> str:
        """The figures."""
        return f"{'; '.join(map(str, self.trials))}; {self.gain:.2f} times as fast; checked in {self.seconds:.1f} s"


@dataclass(frozen=True)
class Checked:
    """What is checked: steps by `make_runner` in slots of `n_tokens`, beside those of rows in a cache that grows.

    `n_words` is the vocabulary from which prompts are drawn, `context` the model's; `bound` is how far scores may be
    off, as a share of their range. With `must_gain` steps that are not faster fail. `clock` gives seconds, as soon as
    the device has done what it was given; after `limit_s` of them no further size is tried, and the check has failed.
    """

    prefill: Prefill
    make_runner: Callable[[], Runner]
    n_tokens: int
    n_words: int
    context: int
    bound: float
    must_gain: bool
    clock: Callable[[], float]
    limit_s: float = LIMIT_S


def check(checked: Checked) -> Verdict:
    """Compare steps of several sizes, and time them."""
    began, trials = checked.clock(), []
    for trial in _try(checked):
        if trial.off > checked.bound:
            return Verdict(
                f"with {trial.n_rows} rows scores are off by {trial.off:.2g} of their range, and rounding makes up for "
                f"{checked.bound:g} at most"
            )
        trials.append(trial)
        if checked.clock() - began > checked.limit_s:
            return Verdict(f"the self-check takes longer than {checked.limit_s:.0f} s")
    if not trials:
        return Verdict(f"batches of {checked.n_tokens} tokens are too small")
    found = Verdict(None, tuple(trials), checked.clock() - began)
    if checked.must_gain and found.gain <= 1:
        return Verdict(f"they are not faster: {found}", found.trials, found.seconds)
    return found


def _try(checked: Checked) -> Iterator[Trial]:
    slots: Slots | None = None
    for n_rows, most in SIZES:
        longest = min(most, checked.context - N_MORE, int(READ_SHARE * checked.n_tokens) // n_rows)
        if longest < 1 or row_size(n_rows) * column_size(longest + N_MORE) > checked.n_tokens:
            continue
        prompts = _prompts(n_rows, longest, checked.n_words)
        read = checked.prefill.read(prompts, longest + N_MORE)
        slots = slots or Slots(read, checked.n_tokens, checked.make_runner())
        ours = SlotRows(slots, checked.prefill, checked.context)
        ours.join(read, [N_MORE + 1] * n_rows)
        theirs = GrowingRows(read, checked.prefill, checked.context)  # after ours, since it appends to the read cache
        off, latest = _compare(theirs, ours, read.logits.argmax(-1))
        if off > checked.bound:
            yield Trial(n_rows, longest, off)
            return
        yield Trial(n_rows, longest, off, *_time(theirs, ours, latest, checked.clock))


def _prompts(n_rows: int, longest: int, n_words: int) -> list[Tokens]:
    """Prompts of different length, the longest first."""
    drawn = random.Random(0)
    lengths = [max(1, longest - row * longest // (2 * n_rows)) for row in range(n_rows)]
    return [tuple(drawn.randrange(n_words) for _ in range(length)) for length in lengths]


def _compare(theirs: Decoding, ours: Decoding, latest: Tensor) -> tuple[float, Tensor]:
    """The greatest difference over steps in which both get the same tokens, at first of all rows; and the last ones."""
    import torch

    worst = 0.0
    for step in range(2 * N_STEPS):
        if step == N_STEPS:
            order = theirs.keep(_some(len(latest)))
            if ours.keep(_some(len(latest))) != order:
                raise ArithmeticError("rows have another order")
            latest = latest[torch.tensor(order, device=latest.device)]
        expected = theirs.step(latest)
        worst = max(worst, miss(expected, ours.step(latest)))
        latest = expected.argmax(-1)
    return worst, latest


def _some(n_rows: int) -> Sequence[int]:
    return [row for row in range(n_rows) if row % 3 != 1]


def _time(theirs: Decoding, ours: Decoding, latest: Tensor, clock: Callable[[], float]) -> list[float]:
    """The seconds of a step of each, which take turns; the best of some rounds."""
    best = [float("inf")] * 2
    for _ in range(N_ROUNDS):
        for place, each in enumerate((theirs, ours)):
            started = clock()
            for _ in range(N_TIMED):
                each.step(latest)
            best[place] = min(best[place], (clock() - started) / N_TIMED)
    return best
