"""When the processes of a training synchronise on rank 0's decisions to save a checkpoint or to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slurmgpu.training.ranks import Place
from slurmgpu.training.settings import TrainingSettings

SYNC_S = 0.5
"""The interval of synchronisations, which delays stopping, as does the length of a step."""
CHECKPOINT_S = 600.0
SHARE_OF_CHECKPOINTS = 0.01
SHARE_AT_EPOCH_ENDS = 0.005
"""The largest cost of checkpoints at the ends of epochs."""
PARAMETER_BYTES, BYTES_S = 12, 0.5e9
"""Estimate of a first checkpoint: bytes of weights and two moments in fp32, and the speed of a disk with fsync."""

Summed = Callable[[Sequence[float]], list[float]]
"""Returns the sums over all ranks, which call it together."""


class Decision(NamedTuple):
    """Rank 0's decision for all ranks."""

    stop: bool
    checkpoint: bool


class SyncSchedule:
    """Schedules synchronisations every so many steps or batches, about SYNC_S apart; all ranks count alike.

    Until there is a checkpoint, the cost of one at the end of an epoch is estimated from the number of parameters.
    """

    def __init__(self, settings: TrainingSettings, place: Place, n_parameters: int) -> None:
        self._given_s = settings.checkpoint_s
        self._place = place
        apart_s = SYNC_S if self._given_s is None else min(SYNC_S, self._given_s)
        self._steps, self._batches = _Interval(apart_s), _Interval(apart_s)
        self._saved = time.monotonic()
        self._expected_s = n_parameters * PARAMETER_BYTES / BYTES_S
        self._cost_s = 0.0

    def due(self, *, evaluating: bool = False) -> bool:
        """Count a step, or a batch of an evaluation; return whether it is time to synchronise."""
        interval = self._batches if evaluating else self._steps
        interval.count += 1
        return interval.count >= interval.every

    def decide(self, summed: Summed, *, epoch_ends: bool = False, evaluating: bool = False) -> Decision:
        """Rank 0's decision; called by all ranks together."""
        interval = self._batches if evaluating else self._steps
        wishes = (0.0, 0.0, 0.0)
        if self._place.is_rank_zero:
            checkpoint = not evaluating and self._wants_checkpoint(epoch_ends)
            wishes = float(self._place.stopping()), float(checkpoint), float(interval.next_length())
        stop, checkpoint_too, every = summed(wishes)
        interval.every = int(every)
        interval.restart()
        return Decision(bool(stop), bool(checkpoint_too))

    def saved(self, cost_s: float) -> None:
        """Note a checkpoint that took rank 0 `cost_s`."""
        self._cost_s = cost_s
        self.restart_clock()
        self._saved = time.monotonic()

    def restart_clock(self) -> None:
        """Exclude the time since the last synchronisation from the estimated length of steps."""
        self._steps.restart()
        self._batches.restart()

    def _wants_checkpoint(self, epoch_ends: bool) -> bool:
        interval_s = self._given_s
        if interval_s is None:
            interval_s = max(CHECKPOINT_S, self._cost_s / SHARE_OF_CHECKPOINTS)
        if epoch_ends:
            interval_s = min(interval_s, (self._cost_s or self._expected_s) / SHARE_AT_EPOCH_ENDS)
        return time.monotonic() - self._saved >= interval_s


class _Interval:
    """An interval in steps that takes about `apart_s` seconds."""

    def __init__(self, apart_s: float) -> None:
        self._apart_s = apart_s
        self.every = 1
        self.restart()

    def restart(self) -> None:
        self.count, self._since = 0, time.monotonic()

    def next_length(self) -> int:
        each_s = (time.monotonic() - self._since) / max(1, self.count)
        # At most twice as long, and no longer if cut short: the next steps may be slower.
        most = 2 * self.every if self.count >= self.every else self.every
        return max(1, min(most, int(self._apart_s / max(each_s, 1e-9))))
