"""Turns at a run: of those who submit, join or merge it, one at a time, whoever dies meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.runs import Run

log = logging.getLogger(__name__)

RENEW_S = 20.0
PATIENCE_S = 120.0
"""A lock that has not changed for so long, by the observer's clock, is a dead one's; NFS may show it 60 s late."""


@contextlib.contextmanager
def turn(run: Run, *, patient: bool = False) -> Iterator[None]:
    """Keep others out while the block lasts; who comes while somebody is in is refused, or waits if `patient`.

    The patient take the lock of a dead one away: a task in the night has no user who would remove it.
    """
    with contextlib.ExitStack() as stack:
        _enter(run, stack, patient)
        stack.enter_context(_renewed(_lock(run)))
        yield


def _enter(run: Run, stack: contextlib.ExitStack, patient: bool) -> None:
    seen, since = None, time.monotonic()
    while True:
        try:
            stack.enter_context(run.submitting())
            return
        except FileNotFoundError:
            if not run.folder.is_dir():
                raise SlurmGPUError(f"{run.folder} is gone.") from None
            # it was released while we looked at who holds it
        except SlurmGPUError:
            if not patient:
                raise
        now = _look(_lock(run))
        if now != seen:
            seen, since = now, time.monotonic()
        elif now is not None and (_is_dead(now[0]) or time.monotonic() - since > PATIENCE_S):
            _remove(_lock(run), now[0])
        time.sleep(random.uniform(0.05, 0.5))  # a thousand tasks may wait here at once


def _lock(run: Run) -> Path:
    return run.folder / ".submitting"  # of Run.submitting


def _look(lock: Path) -> tuple[str, int] | None:
    try:
        return lock.read_text("utf-8", "replace"), lock.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _is_dead(holder: str) -> bool:
    """Whether the holder was a process of this machine, and is no more."""
    found = re.match(r"(.*), process (\d+), at ", holder)
    return found is not None and found[1] == socket.gethostname() and not Path(f"/proc/{found[2]}").exists()


def _remove(lock: Path, holder: str) -> None:
    """Remove a dead one's lock, and no other: of several who try, one has it after the renaming."""
    mine = lock.with_name(f".submitting.{socket.gethostname()}.{os.getpid()}.taken")
    try:
        lock.rename(mine)
    except FileNotFoundError:
        return
    if mine.read_text("utf-8", "replace") == holder:
        log.warning("removed the lock of one who is dead: %s", holder)
    else:
        with contextlib.suppress(FileExistsError):
            os.link(mine, lock)  # somebody was quicker, and this is his
    mine.unlink()


@contextlib.contextmanager
def _renewed(lock: Path) -> Iterator[None]:
    """Show others, while the block lasts, that the holder lives: a merge may take an hour."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            with contextlib.suppress(OSError):
                os.utime(lock)

    thread = threading.Thread(target=renew, daemon=True, name="turn")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
