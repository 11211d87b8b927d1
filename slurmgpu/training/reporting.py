"""Progress reports of a training: log lines for evaluations, and callbacks to its place."""

from __future__ import annotations

import logging
import time

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
        self._furthest = 0
        self.rest()

    def resumed(self) -> None:
        """Report a resumption."""
        self._furthest = self._standing.step
        if self._place.leads:
            log.info("resumed from step %s", f"{self._standing.step:,}")

    def evaluated(self) -> None:
        """Log an evaluation."""
        if self._place.leads:
            found = ", ".join(f"{name} {value:.4g}" for name, value in self._standing.final.items())
            log.info("%s: %s", self._standing.tell(self._n_epochs), found)

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

    def _loss(self) -> str:
        return f", loss {self._curve.values[-1]:.4g}" if self._curve.values else ""
