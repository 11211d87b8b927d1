"""Progress reports of a training: log lines for evaluations, and callbacks to its place."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from slurmgpu.training.curves import Curve
from slurmgpu.training.outcome import Standing
from slurmgpu.training.ranks import Place

log = logging.getLogger(__name__)

REPORT_S = 2.0
"""The interval of reports between checkpoints."""


class Reporter:
    """Rank 0's progress reports; other ranks are silent."""

    def __init__(self, place: Place, n_epochs: int | None, standing: Standing, curve: Curve) -> None:
        self._place, self._n_epochs, self._standing, self._curve = place, n_epochs, standing, curve
        self._furthest = self._n_logged = 0
        self.rest()

    def resumed(self) -> None:
        """Report a resumption; `read` logs the whole curve again, as the attempt before may have died before it did."""
        self._furthest = self._standing.step
        self._log_evaluation()
        if self._place.leads:
            log.info("resumed from step %s", f"{self._standing.step:,}")

    def read(self) -> None:
        """Log the points of the learning curve that were read since the last call."""
        if self._place.leads:
            for step, loss in zip(
                self._curve.steps[self._n_logged :], self._curve.values[self._n_logged :], strict=True
            ):
                self._place.log(step, loss=loss)
            self._n_logged = len(self._curve.steps)

    def evaluated(self) -> None:
        """Log an evaluation."""
        if self._place.leads:
            self._log_evaluation()
            found = ", ".join(f"{name} {value:.4g}" for name, value in self._standing.final.items())
            log.info("%s: %s", self._standing.tell(self._n_epochs), found)

    def tested(self, found: Mapping[str, float]) -> None:
        """Log what the test split gave."""
        if self._place.leads and found:
            self._place.log(self._standing.step, **found)

    def saved(self) -> None:
        """Report a checkpoint as progress if it is beyond all earlier ones."""
        if self._place.leads and self._standing.step > self._furthest:
            self._furthest = self._standing.step
            self._place.progress(f"{self._standing.tell(self._n_epochs)}{self._loss()}")

    def stepped(self) -> None:
        """Report the state after some steps."""
        seconds = time.monotonic() - self._since
        if self._place.leads and seconds >= REPORT_S:
            rate = (self._standing.samples - self._samples) / seconds
            self._place.tell(f"{self._standing.tell(self._n_epochs)}{self._loss()}, {rate:,.4g} samples/s")
            self.rest()

    def rest(self) -> None:
        """Start measuring the rate again."""
        self._since, self._samples = time.monotonic(), self._standing.samples

    def _log_evaluation(self) -> None:
        if self._place.leads and self._standing.final:
            self._place.log(self._standing.evaluated, **self._standing.final)

    def _loss(self) -> str:
        return f", loss {self._curve.values[-1]:.4g}" if self._curve.values else ""
