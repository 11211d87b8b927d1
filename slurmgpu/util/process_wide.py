"""A lock for what a thread changes of the whole process: its environment, its umask, its working folder."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()


def _renew() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it, which a fork does not have


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let no other thread into such a block: each puts back what it found, which is another's change otherwise."""
    with _lock:
        yield


def own_umask() -> int:
    """The umask of this process, which is only told when it is set."""
    with one_thread():
        umask = os.umask(0o077)
        os.umask(umask)
    return umask
