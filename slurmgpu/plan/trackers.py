"""The trackers that a run file and `track --to` may name: built-in ones, and those of packages.

Their classes are in `trackers`; the group of entry points is `slurmgpu.trackers`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.util.plugins import Plugins
from slurmgpu.util.redact import NAME, hide_in

TRACKERS = Plugins(
    "slurmgpu.trackers",
    "tracker",
    "slurmgpu.trackers.interface.Tracker",
    {
        "tensorboard": "slurmgpu.trackers.tensorboard:TensorBoard",
        "wandb": "slurmgpu.trackers.wandb:WeightsAndBiases",
        "mlflow": "slurmgpu.trackers.mlflow:MLflow",
        "trackio": "slurmgpu.trackers.trackio:Trackio",
    },
)
WHERE = {"tensorboard": "DIR", "wandb": "PROJECT", "mlflow": "URI", "trackio": "PROJECT"}
CREDENTIALS = re.compile(
    r"://[^/@\s]*:[^/@\s]+@|https?://[^/@\s]+@"
    rf"|[?&;](?:(?:[^=&;\s]*[_.-])?(?:{NAME}s?|pwd|sig(?:nature)?)|key)=[^&;\s]",
    re.IGNORECASE,
)
"""Passwords and tokens in an address: before the host name, or among the query's parameters."""


class CredentialError(SlurmGPUError):
    """A value that must not be shown, not even in the message about it."""


@dataclass(frozen=True)
class Destination:
    """A tracker's name, and the folder, project or address that it takes: `tensorboard:DIR`."""

    tracker: str
    where: str

    def __str__(self) -> str:
        return f"{self.tracker}:{self.where}"


def parse_destination(text: str) -> Destination:
    """The destination in TRACKER:WHERE. Raises SlurmGPUError for anything else.

    An address with a secret raises CredentialError, whose text does not show the secret.
    """
    if CREDENTIALS.search(text) or hide_in(text) != text:
        raise CredentialError(
            "The tracker's address holds a password or a token, which files and process lists would show. Leave it "
            "out, and set the tracker's own environment variable, such as MLFLOW_TRACKING_PASSWORD or "
            "MLFLOW_TRACKING_TOKEN."
        )
    tracker, _, where = text.partition(":")
    if tracker not in TRACKERS.built_in and tracker not in (names := TRACKERS.names()):
        known = ", ".join(f"{name}:{WHERE.get(name, 'WHERE')}" for name in names)
        raise SlurmGPUError(f"There is no tracker {tracker!r}; expected one of {known}.{did_you_mean(tracker, names)}")
    if not where:
        raise SlurmGPUError(f"{text!r} names no destination: write {tracker}:{WHERE.get(tracker, 'WHERE')}.")
    return Destination(tracker, where)
