"""When the processes of a training agree on what rank 0 decides: to leave a checkpoint, to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slurmgpu.training.places import Place
from slurmgpu.training.settings import TrainingSettings

MEETING_S = 0.5
"""About how often they agree: so late may a training hear that it shall stop, beside the length of a step."""
CHECKPOINT_S = 600.0
SHARE_OF_CHECKPOINTS = 0.01
SHARE_AT_EPOCH_ENDS = 0.005
"""What checkpoints may cost that are left because an epoch ends."""

Summed = Callable[[Sequence[float]], list[float]]
"""Gives all ranks, which call it together, the sums of what each of them has."""


class Decision(NamedTuple):
    """What rank 0 wants of all."""

    stop: bool
    checkpoint: bool


class Pace:
    """Meetings every so many steps, or batches of an evaluation, that they are MEETING_S apart; all ranks count."""

    def __init__(self, settings: TrainingSettings, place: Place) -> None:
        self._given_s = settings.checkpoint_s
        self._place = place
        apart_s = MEETING_S if self._given_s is None else min(MEETING_S, self._given_s)
        self._steps, self._batches = _Rhythm(apart_s), _Rhythm(apart_s)
        self._saved = time.monotonic()
        self._cost_s = 0.0

    def due(self, *, evaluating: bool = False) -> bool:
        """Whether, another step being done, or another batch of an evaluation, it is time to meet."""
        rhythm = self._batches if evaluating else self._steps
        rhythm.count += 1
        return rhythm.count >= rhythm.every

    def meet(self, summed: Summed, *, epoch_ends: bool = False, evaluating: bool = False) -> Decision:
        """What rank 0 decides; all ranks come here together."""
        rhythm = self._batches if evaluating else self._steps
        wishes = (0.0, 0.0, 0.0)
        if self._place.leads:
            checkpoint = not evaluating and self._wants_checkpoint(epoch_ends)
            wishes = float(self._place.stopping()), float(checkpoint), float(rhythm.following())
        stop, checkpoint_too, every = summed(wishes)
        rhythm.every = int(every)
        rhythm.begin()
        return Decision(bool(stop), bool(checkpoint_too))

    def saved(self, cost_s: float) -> None:
        """A checkpoint has been left, which took rank 0 so long."""
        self._cost_s = cost_s
        self.rest()
        self._saved = time.monotonic()

    def rest(self) -> None:
        """What has been since the last meeting tells nothing of how long a step takes."""
        self._steps.begin()
        self._batches.begin()

    def _wants_checkpoint(self, epoch_ends: bool) -> bool:
        interval_s = self._given_s
        if interval_s is None:
            interval_s = max(CHECKPOINT_S, self._cost_s / SHARE_OF_CHECKPOINTS)
        if epoch_ends:
            interval_s = min(interval_s, self._cost_s / SHARE_AT_EPOCH_ENDS)
        return time.monotonic() - self._saved >= interval_s


class _Rhythm:
    """Meetings every so many steps that they are so many seconds apart."""

    def __init__(self, apart_s: float) -> None:
        self._apart_s = apart_s
        self.every = 1
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        self.count, self._since = 0, time.monotonic()

    def following(self) -> int:
        """After how many the next meeting shall be, by how long the last ones took."""
        each_s = (time.monotonic() - self._since) / max(1, self.count)
        # Never many more than last time, and no more if there were fewer: the next steps may be slower.
        most = 2 * self.every if self.count >= self.every else self.every
        return max(1, min(most, int(self._apart_s / max(each_s, 1e-9))))
