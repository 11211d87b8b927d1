"""The errors: the user can fix it (SlurmGPUError), one item is bad (ItemError); any other exception is a bug."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlurmGPUError(Exception):
    """An error that the user can fix. It says what was found, what was expected and what to do."""


class NoAnswerError(SlurmGPUError):
    """A scheduler does not answer; if it `is_absent` it is not installed here, and waiting does not help.

    It helps if it `is_silent`: out of reach, or too busy.
    """

    def __init__(self, message: str, *, is_absent: bool = False, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_absent = is_absent
        self.is_silent = is_silent


class MayBeQueuedError(NoAnswerError):
    """A scheduler got a job and did not answer: it may have queued it."""


class NothingToSubmitError(SlurmGPUError):
    """A run is at work, or has all that was asked for, so that nothing of it is submitted."""


class ItemError(Exception):
    """One item cannot be computed. A workload returns it in place of a row, or raises it.

    Its message becomes the item's `error`. The other items of the batch are not affected.
    `way`, if there is one, is equal for items that failed for the same reason. `failure` is the failure class.
    """

    way: tuple[str, ...] | None = None
    failure = "item_error"


class NodeError(Exception):
    """The node can compute no item, whatever the item: the task ends, and other nodes compute what it leaves."""


class WorkloadError(Exception):
    """The workload can compute no item, on this node or another: the task ends, and leaves what it has not computed."""


class GPUFaultError(Exception):
    """A GPU was allocated but cannot be used; the text says why."""


class WorkerBrokenError(Exception):
    """The process can compute no more, as after it lost its CUDA context or its group; a new worker can go on.

    Without `blames_items` what came before has broken it, and not the items that it computes. `is_sure`: nothing but
    these items can have broken it.
    """

    def __init__(self, message: str, *, blames_items: bool = True, is_sure: bool = False) -> None:
        super().__init__(message)
        self.blames_items = blames_items
        self.is_sure = is_sure


class Interrupted(Exception):  # noqa: N818 - not an error: a later task continues the item
    """An item is left for a later task: raised by a workload that keeps its progress once `task.stopping()` is true."""


class Retry(Exception):  # noqa: N818 - not an error yet: the items may still get their rows
    """What failed may pass. A workload returns it in place of a row, or raises it for a whole batch.

    The items are computed again at the end of their shard, after `after` seconds if that is given, as often as
    `retries` in the run file says; then `message` is their error. ConnectionError and TimeoutError count the same.
    """

    after: float = 0.0  # also of a subclass whose `__init__` does not call this one

    def __init__(self, message: str = "", *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = 0.0 if after is None else float(after)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean …?` with the closest known word, else all known words; to append to a sentence."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else ""
