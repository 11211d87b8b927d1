"""Weights & Biases: `--to wandb:PROJECT` or `wandb:ENTITY/PROJECT`; WANDB_MODE and its other variables have effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from slurmgpu.errors import SlurmGPUError
from slurmgpu.trackers.interface import TrackedRun, Tracker, package


class WeightsAndBiases(Tracker):
    """Sends a run by wandb's own process."""

    name: ClassVar[str] = "wandb"

    def open(self, where: str, run: TrackedRun) -> int:
        """Begin or resume a run.

        Offline, each call writes the run from its start: `wandb sync` keeps only one of a run's offline copies.
        """
        wandb = package("wandb", self.name)
        entity, _, project = where.rpartition("/")
        settings = wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_stats=True)
        try:
            self._run: Any = wandb.init(
                entity=entity or None,
                project=project,
                id=run.id,
                name=run.name,
                group=run.group,
                config=dict(run.config),
                resume="allow",
                reinit="create_new",
                settings=settings,
            )
        except wandb.Error as error:
            raise SlurmGPUError(
                f"wandb:{where} cannot be opened: {error}. Log in with `wandb login`, or set WANDB_MODE=offline."
            ) from error
        return int(self._run.step) - 1 if self._run.resumed else -1

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log a step, with its time as `_timestamp`."""
        self._run.log({**values, "_timestamp": time}, step=step)

    def close(self, summary: Mapping[str, float], *, finished: bool) -> None:
        """Finish the run."""
        self._run.summary.update(dict(summary))
        self._run.finish()
