"""The progress of a training, and its reports by log lines and the callbacks of `Place`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurmgpu.training.batches import Position
from slurmgpu.training.learning_curve import LearningCurve
from slurmgpu.training.ranks import Place
from slurmgpu.util.amounts import rate_of

log = logging.getLogger(__name__)

REPORT_S = 2.0
"""The interval of reports between checkpoints."""


@dataclass
class Progress:
    """The progress of a training, and its costs."""

    step: int = 0
    epoch: int = 0
    sample: int = 0
    """Samples of the current epoch."""
    samples: int = 0
    evaluated: int = 0
    """The step of the last evaluation."""
    early: bool = False
    final: dict[str, float] = field(default_factory=dict)
    """The results of that evaluation."""
    wall_s: float = 0.0
    start_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    peak_memory_bytes: int = 0
    resumed: int = 0

    @property
    def position(self) -> Position:
        """The position of the next step."""
        return Position(self.epoch, self.sample)

    def tell(self, n_epochs: int | None) -> str:
        """The progress in words: "epoch 3 of 10, step 1,200"."""
        number = self.epoch + (self.sample > 0 or self.epoch == 0)
        of = f" of {n_epochs}" if n_epochs else ""
        return f"epoch {number}{of}, step {self.step:,}"


class ProgressReporter:
    """Rank 0's progress reports; other ranks are silent."""

    def __init__(self, place: Place, n_epochs: int | None, progress: Progress, curve: LearningCurve) -> None:
        self._place, self._n_epochs, self._progress, self._curve = place, n_epochs, progress, curve
        self._furthest = self._n_logged = 0
        self.restart_clock()

    def resumed(self) -> None:
        """Report a resumption; `read` then logs the whole curve: the previous attempt may have died before it did."""
        self._furthest = self._progress.step
        self._log_evaluation()
        if self._place.is_rank_zero:
            log.info("resumed from step %s", f"{self._progress.step:,}")

    def read(self) -> None:
        """Log the points of the learning curve that were read since the last call."""
        if self._place.is_rank_zero:
            for step, loss in zip(
                self._curve.steps[self._n_logged :], self._curve.values[self._n_logged :], strict=True
            ):
                self._place.log(step, loss=loss)
            self._n_logged = len(self._curve.steps)

    def evaluated(self) -> None:
        """Log an evaluation."""
        if self._place.is_rank_zero:
            self._log_evaluation()
            found = ", ".join(f"{name} {value:.4g}" for name, value in self._progress.final.items())
            log.info("%s: %s", self._progress.tell(self._n_epochs), found)

    def tested(self, found: Mapping[str, float]) -> None:
        """Log the results of the test split."""
        if self._place.is_rank_zero and found:
            self._place.log(self._progress.step, **found)

    def saved(self) -> None:
        """Report a checkpoint as progress if it is beyond all earlier ones."""
        if self._place.is_rank_zero and self._progress.step > self._furthest:
            self._furthest = self._progress.step
            self._place.progress(f"{self._progress.tell(self._n_epochs)}{self._loss()}")

    def stepped(self) -> None:
        """Report the state after some steps."""
        seconds = time.monotonic() - self._since
        if self._place.is_rank_zero and seconds >= REPORT_S:
            rate = (self._progress.samples - self._samples) / seconds
            self._place.tell(f"{self._progress.tell(self._n_epochs)}{self._loss()}, {rate_of(rate)} samples/s")
            self.restart_clock()

    def restart_clock(self) -> None:
        """Measure the rate from now on."""
        self._since, self._samples = time.monotonic(), self._progress.samples

    def _log_evaluation(self) -> None:
        if self._place.is_rank_zero and self._progress.final:
            self._place.log(self._progress.evaluated, **self._progress.final)

    def _loss(self) -> str:
        return f", loss {self._curve.values[-1]:.4g}" if self._curve.values else ""
