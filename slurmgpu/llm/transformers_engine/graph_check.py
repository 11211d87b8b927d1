"""Self-check of steps in slots, with the model's own weights: they are used only if they are right and faster.

Two comparisons are made, each with its own bound. A replay runs the same kernels as a call of the forward pass in the
same memory, so both give the same scores except where the model's kernels are nondeterministic: if they differ, both
are repeated until they have agreed once. Slots and a growing cache have different shapes and kernels: they may differ
as much as the same rows do in batches of half the size, and as neighbouring numbers of their type do. One row is
compared first; noise that is seen there counts as noise in all sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmgpu.llm.interface.engine import Tokens
from slurmgpu.llm.transformers_engine.decoding import Decoding, GrowingRows
from slurmgpu.llm.transformers_engine.prefill import Prefill
from slurmgpu.llm.transformers_engine.selfcheck import bound_of, miss, spacing
from slurmgpu.llm.transformers_engine.slots import (
    READ_SHARE,
    Forward,
    Frame,
    Runner,
    SlotRows,
    Slots,
    column_size,
    compare_replay,
    row_size,
)

if TYPE_CHECKING:
    from torch import Tensor

SIZES = ((1, 40), (32, 60), (4, 1500))
"""Rows, and tokens of the longest prompt: one row; many rows that cross a column size; and a few long rows."""
N_STEPS = 6
"""Steps that are compared with all rows, and again with some."""
N_LONGER = 8
"""How many tokens longer the additional row is in the batches of half the size."""
N_ROUNDS, N_TIMED = 3, 3
"""Rounds of timed steps, of which the best counts, and the steps in each."""
N_MORE = 2 * N_STEPS + N_ROUNDS * N_TIMED
REPLAYED = 1e-3
"""How far a replay's scores may be from those of a call, as a share of their range."""
LIMIT_S = 30.0
"""The usual limit of a check."""


@dataclass(frozen=True)
class Trial:
    """Measurements for a size: the greatest difference of scores as a share of their range, and seconds per step.

    A step and a call in the same memory are repeated until they agree: `replayed` is their difference then, `flipped`
    the greatest difference seen before. `off` is the difference from rows in a growing cache, and bounds both.
    """

    n_rows: int
    longest: int
    replayed: float
    replayed_bound: float
    flipped: float
    off: float
    bound: float
    eager_s: float = 0.0
    slots_s: float = 0.0

    @property
    def fault(self) -> str | None:
        """The fault of the scores; None if they are right."""
        for off, bound, other in (
            (self.replayed, self.replayed_bound, "the same step when it is called"),
            (self.flipped, self.bound, "the same step when it is called once"),
            (self.off, self.bound, "rows in a cache that grows"),
        ):
            if off > bound:
                return (
                    f"with {self.n_rows} rows scores are off by {off:.2g} of their range from {other}, and rounding "
                    f"explains at most {bound:.2g}"
                )
        return None

    def __str__(self) -> str:
        """The figures of a passed trial."""
        times = f"{self.eager_s * 1e3:.2f} ms eagerly, {self.slots_s * 1e3:.2f} ms in slots"
        replays = f"replays by {self.replayed:.2g}, at most by {self.flipped:.2g}"
        return f"{self.n_rows} x {self.longest} tokens: off by {self.off:.2g} of {self.bound:.2g}, {replays}, {times}"


@dataclass(frozen=True)
class Verdict:
    """The result of a self-check that took `seconds`: why steps are not used (None if they are), and its trials."""

    reason: str | None
    trials: tuple[Trial, ...] = ()
    seconds: float = 0.0

    @property
    def bound(self) -> float:
        """How far the model's scores may be off with other kernels, given the observed noise."""
        return max((each.bound for each in self.trials), default=0.0)

    @property
    def slots_s(self) -> float:
        """The seconds of one step of each size, summed."""
        return sum(each.slots_s for each in self.trials)

    @property
    def gain(self) -> float:
        """The speedup over eager steps."""
        return sum(each.eager_s for each in self.trials) / max(1e-9, self.slots_s)

    def __str__(self) -> str:
        """The figures."""
        return f"{'; '.join(map(str, self.trials))}; {self.gain:.2f} times as fast; checked in {self.seconds:.1f} s"


@dataclass(frozen=True)
class Checked:
    """The subject of a check: steps of `make_runner` in slots of `n_tokens`, compared with steps in a growing cache.

    `n_words` is the vocabulary from which prompts are drawn, `context` the model's context; `rounding` and `replayed`
    are how far scores may be off, as a share of their range, if the model has no noise. With `must_gain` steps that are
    not faster fail. `clock` returns seconds after waiting for the device; after `limit_s` no further size is tried, and
    the check fails.
    """

    prefill: Prefill
    make_runner: Callable[[], Runner]
    n_tokens: int
    n_words: int
    context: int
    rounding: float
    replayed: float
    must_gain: bool
    clock: Callable[[], float]
    limit_s: float = LIMIT_S


def check(checked: Checked) -> Verdict:
    """Compare steps of several sizes, and time them."""
    began, trials = checked.clock(), []
    for trial in _try(checked):
        if trial.fault is not None:
            return Verdict(trial.fault)
        trials.append(trial)
        if checked.clock() - began > checked.limit_s:
            return Verdict(f"the self-check took longer than {checked.limit_s:.0f} s")
    if not trials:
        return Verdict(f"batches of {checked.n_tokens} tokens are too small")
    found = Verdict(None, tuple(trials), checked.clock() - began)
    if checked.must_gain and found.gain <= 1:
        return Verdict(f"they are not faster: {found}", found.trials, found.seconds)
    return found


def _try(checked: Checked) -> Iterator[Trial]:
    """A trial of each size that has room, with times; then the first size again without times, on its own graphs."""
    slots: Slots | None = None
    noise, done = 0.0, []
    for n_rows, most in SIZES:
        longest = min(most, checked.context - N_MORE, int(READ_SHARE * checked.n_tokens) // n_rows)
        if longest < 1 or row_size(n_rows) * column_size(longest + N_MORE) > checked.n_tokens:
            continue
        done.append((n_rows, longest))
        trial, slots, noise = _try_size(checked, n_rows, longest, slots, noise)
        yield trial
    # A graph has fixed addresses: objects that Python replaced for a larger size are not at a smaller size's addresses.
    if len(done) > 1:
        yield _try_size(checked, *done[0], slots, noise, is_timed=False)[0]


def _try_size(
    checked: Checked, n_rows: int, longest: int, slots: Slots | None, noise: float, *, is_timed: bool = True
) -> tuple[Trial, Slots, float]:
    """The trial, its slots, and the greatest noise so far."""
    prompts = _prompts(n_rows, longest, checked.n_words)
    read = checked.prefill.read(prompts, longest + N_MORE)
    slots = slots or Slots(read, checked.n_tokens, _Replays(checked.make_runner(), checked.replayed))
    replays = slots.runner
    assert isinstance(replays, _Replays)
    ours = SlotRows(slots, checked.prefill, checked.context)
    ours.join(read, [N_MORE + 1] * n_rows)
    theirs = GrowingRows(read, checked.prefill, checked.context)  # after ours: it appends to the cache that was read
    halves = _Halves(checked, prompts)
    with replays.compared():
        off, its_noise, latest = _compare(theirs, ours, halves, read.logits.argmax(-1))
    noise = max(noise, its_noise)
    bound = bound_of(noise, checked.rounding)
    trial = Trial(n_rows, longest, replays.off, replays.bound, replays.flipped, off, bound)
    if trial.fault is None and is_timed:
        eager_s, slots_s = _time(theirs, ours, latest, checked.clock)
        trial = dataclasses.replace(trial, eager_s=eager_s, slots_s=slots_s)
    return trial, slots, noise


class _Replays:
    """A runner that also calls each step eagerly while steps are compared."""

    def __init__(self, runner: Runner, least: float) -> None:
        self._runner = runner
        self._least = least
        self._is_compared = False
        self.off, self.bound = 0.0, least
        """The difference of the step furthest beyond its bound, as a share of the range, and that bound."""
        self.flipped = 0.0
        """The greatest difference between a step and a call of it."""

    def run(self, frame: Frame, forward: Forward) -> None:
        """Set the frame's logits, keys and values, from a replay of the step."""
        if not self._is_compared:
            self._runner.run(frame, forward)
            return
        found = compare_replay(frame, forward, lambda: self._runner.run(frame, forward), self._least)
        bound = bound_of(found.noise, self._least)
        self.flipped = max(self.flipped, found.most)
        if found.steady - bound >= self.off - self.bound:
            self.off, self.bound = found.steady, bound

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Compare steps within this context."""
        self.off, self.bound, self.flipped = 0.0, self._least, 0.0
        self._is_compared = True
        try:
            yield
        finally:
            self._is_compared = False


class _Halves:
    """The rows again, in two batches with every other row, and in each a further row that is longer than the others.

    So they have other rows, columns and padding, which are all causes of different rounding.
    """

    def __init__(self, checked: Checked, prompts: Sequence[Tokens]) -> None:
        beside = prompts[0][:N_LONGER] + prompts[0]
        self._parts = []
        for places in filter(None, (range(0, len(prompts), 2), range(1, len(prompts), 2))):
            read = checked.prefill.read([*(prompts[place] for place in places), beside], len(beside) + N_MORE)
            self._parts.append((list(places), GrowingRows(read, checked.prefill, checked.context)))

    def miss(self, expected: Tensor, latest: Tensor) -> float:
        """How far the next step's scores are from the scores of all rows together."""
        import torch

        worst = 0.0
        for places, part in self._parts:
            rows = torch.tensor(places, device=latest.device)
            found = part.step(torch.cat([latest[rows], latest[:1]]))[:-1]
            worst = max(worst, miss(expected[rows], found))
        return worst


def _prompts(n_rows: int, longest: int, n_words: int) -> list[Tokens]:
    """Prompts of different length, the longest first."""
    drawn = random.Random(0)
    lengths = [max(1, longest - row * longest // (2 * n_rows)) for row in range(n_rows)]
    return [tuple(drawn.randrange(n_words) for _ in range(length)) for length in lengths]


def _compare(theirs: Decoding, ours: Decoding, halves: _Halves, latest: Tensor) -> tuple[float, float, Tensor]:
    """The greatest difference between both ways, the noise, and the last tokens.

    Both get the same tokens in each step, at first with all rows, then with some.
    """
    import torch

    worst = noise = 0.0
    for step in range(2 * N_STEPS):
        if step == N_STEPS:
            order = theirs.keep(_some(len(latest)))
            if ours.keep(_some(len(latest))) != order:
                raise ArithmeticError("the rows are in a different order")
            latest = latest[torch.tensor(order, device=latest.device)]
        expected = theirs.step(latest)
        worst = max(worst, miss(expected, ours.step(latest)))
        if step < N_STEPS:
            noise = max(noise, halves.miss(expected, latest), spacing(expected))
        latest = expected.argmax(-1)
    return worst, noise, latest


def _some(n_rows: int) -> Sequence[int]:
    return [row for row in range(n_rows) if row % 3 != 1]


def _time(theirs: Decoding, ours: Decoding, latest: Tensor, clock: Callable[[], float]) -> list[float]:
    """The seconds of a step for each, measured alternately; the best of several rounds."""
    best = [float("inf")] * 2
    for _ in range(N_ROUNDS):
        for place, each in enumerate((theirs, ours)):
            started = clock()
            for _ in range(N_TIMED):
                each.step(latest)
            best[place] = min(best[place], (clock() - started) / N_TIMED)
    return best
