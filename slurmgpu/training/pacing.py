"""When the processes of a training stop to agree on what rank 0 decides: to leave a checkpoint, to end."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import distributed

from slurmgpu.training.places import Place
from slurmgpu.training.settings import TrainingSettings

MEETING_S = 0.5
"""About how often they agree: so late may a training hear that it shall stop, beside the length of a step."""
CHECKPOINT_S = 600.0
SHARE_OF_CHECKPOINTS = 0.01


class Decision(NamedTuple):
    """What rank 0 wants of all."""

    stop: bool
    checkpoint: bool


class Pace:
    """Meetings every so many steps that they are MEETING_S apart; all ranks count the same."""

    def __init__(self, settings: TrainingSettings, place: Place, device: torch.device) -> None:
        self._given_s = settings.checkpoint_s
        self._apart_s = MEETING_S if self._given_s is None else min(MEETING_S, self._given_s)
        self._place = place
        self._device = device
        self._every, self._count = 1, 0
        self._met = self._saved = time.monotonic()
        self._cost_s = 0.0

    def due(self) -> bool:
        """Whether, another step or batch being done, it is time to meet."""
        self._count += 1
        return self._count >= self._every

    def meet(self, *, epoch_ends: bool = False) -> Decision:
        """What rank 0 decides; all ranks come here together."""
        now = time.monotonic()
        each_s = (now - self._met) / max(1, self._count)
        # Never many more than last time: the next steps may be slower.
        every = max(1, min(2 * self._every, int(self._apart_s / max(each_s, 1e-9))))
        wants = (
            self._place.leads and self._place.stopping(),
            self._place.leads and self._wants_checkpoint(now, epoch_ends),
        )
        stop, checkpoint, self._every = self._told(int(wants[0]), int(wants[1]), every)
        self._met, self._count = time.monotonic(), 0
        return Decision(bool(stop), bool(checkpoint))

    def saved(self, cost_s: float) -> None:
        """A checkpoint has been left, which took rank 0 so long."""
        self._saved, self._cost_s = time.monotonic(), cost_s
        self._met, self._count = self._saved, 0

    def rest(self) -> None:
        """What has been since the last meeting tells nothing of how long a step takes."""
        self._met, self._count = time.monotonic(), 0

    def _wants_checkpoint(self, now: float, epoch_ends: bool) -> bool:
        cheap_s = self._cost_s / SHARE_OF_CHECKPOINTS
        interval_s = max(CHECKPOINT_S, cheap_s) if self._given_s is None else self._given_s
        return now - self._saved >= (min(interval_s, cheap_s) if epoch_ends else interval_s)

    def _told(self, *values: int) -> list[int]:
        if self._place.world_size == 1:
            return list(values)
        told = torch.tensor(values, device=self._device)
        distributed.broadcast(told, 0)
        found: list[int] = told.tolist()
        return found
