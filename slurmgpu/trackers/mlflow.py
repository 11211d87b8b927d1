"""MLflow: `--to mlflow:URI`, a server or a store such as sqlite:///mlflow.db.

Needs mlflow or mlflow-skinny; the latter writes a database only beside SQLAlchemy and Alembic.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from slurmgpu.errors import SlurmGPUError
from slurmgpu.trackers.interface import TrackedRun, Tracker, package

EXPERIMENT = "slurmgpu"
"""The experiment unless MLFLOW_EXPERIMENT_NAME names another one."""
TAG = "slurmgpu.id"
MOST_METRICS = 1000
MOST_PARAMS = 100
MOST_CHARACTERS = 500
MOST_OF_KEY = 250


class MLflow(Tracker):
    """Sends a run with MLflow's client. MLflow chooses ids itself, so ours is a tag."""

    name: ClassVar[str] = "mlflow"

    def open(self, where: str, run: TrackedRun) -> int:
        """Find the run by its tag, or create it."""
        self._entities = package("mlflow.entities", self.name)
        mlflow = package("mlflow", self.name)
        self._waiting: list[Any] = []
        try:
            self._client = mlflow.MlflowClient(tracking_uri=where)
            experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT)
            found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
            if not found:
                tags = {TAG: run.id, "slurmgpu.run": run.group}
                self._id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
                self._log_config(run.config)
                return -1
            self._id = found[0].info.run_id
            keys = found[0].data.metrics
            return max(
                (each.step for key in keys for each in self._client.get_metric_history(self._id, key)), default=-1
            )
        except mlflow.exceptions.MlflowException as error:
            raise SlurmGPUError(f"mlflow:{where} cannot be opened: {error}") from error

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Keep the values of a step for the next batch."""
        metrics = [self._entities.Metric(key_of(name), value, int(1000 * time), step) for name, value in values.items()]
        if len(self._waiting) + len(metrics) > MOST_METRICS:
            self._send()
        self._waiting += metrics

    def close(self, summary: Mapping[str, float], *, finished: bool) -> None:
        """Send the last batch, and the summary as the run's tags."""
        self._send()
        for name, value in summary.items():
            self._client.set_tag(self._id, f"slurmgpu.{key_of(name)}", str(value))
        if finished:
            self._client.set_terminated(self._id)

    def _experiment(self, name: str) -> str:
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:  # another process has just created it; that error has no class of its own
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return str(found.experiment_id)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        params = [self._entities.Param(key_of(name), str(value)[:MOST_CHARACTERS]) for name, value in config.items()]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:MOST_METRICS])
            del self._waiting[:MOST_METRICS]


def key_of(name: str) -> str:
    """A name that MLflow accepts: of some characters, not too long, and one that could be the path of a file."""
    parts = (part if part.strip(".") else f"_{part}" for part in re.sub(r"[^\w.\-/ :]", "_", name).split("/"))
    return re.sub(r"/\.*$", "", "/".join(parts)[:MOST_OF_KEY])
