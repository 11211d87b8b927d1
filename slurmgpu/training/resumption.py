"""The checkpoint that a training continues from, by the code that made it and the code that trains now."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.checkpoint_files import CheckpointMismatchError
from slurmgpu.training.checkpoints import Checkpoint, Checkpoints

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Version:
    """The digest of the training class's code (None: any), and whether the training replaces one that has ended.

    If it does, a checkpoint by other code is not used. An interrupted training continues from such a checkpoint.
    """

    code: str | None = None
    is_again: bool = False


UNKNOWN = Version()


def checkpoint_to_resume(checkpoints: Checkpoints, version: Version) -> tuple[Checkpoint | None, dict[str, Any]]:
    """The checkpoint to continue from, and its `shared` state; None and {} to train from the start.

    All ranks call it together. Checkpoints of a training that is replaced are removed if other code made the last one.
    """
    checkpoint = checkpoints.last()
    if checkpoint is None:
        return None, {}
    found = checkpoint.shared()
    codes = found["code"], version.code
    if version.code is None or codes[0] == version.code:
        return checkpoint, found
    if version.is_again:
        if checkpoints.place.is_rank_zero:
            log.info("training from the start: the checkpoint was made by code %s, the code is %s now", *codes)
        checkpoints.clear()
        return None, {}
    if checkpoints.place.is_rank_zero:
        log.warning("continuing with changed code: the checkpoint was made by code %s, the code is %s now", *codes)
    return checkpoint, found


@contextmanager
def advising_on(found: Mapping[str, Any], version: Version) -> Iterator[None]:
    """Add advice to the error for a checkpoint, with the `shared` state `found`, that does not fit the class."""
    try:
        yield
    except CheckpointMismatchError as error:
        former = found["code"]
        advice = error.advice
        if former not in (None, version.code):
            advice = (
                f"The checkpoint was made by code {former}. To continue with that code: `slurmgpu resubmit "
                f"--failed --code {former}`. To train from the start with the changed code: `slurmgpu resubmit "
                "--failed`."
            )
        raise SlurmGPUError(f"{error} {advice}") from error
