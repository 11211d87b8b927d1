"""Change the process for a block: its environment, working folder, umask, or garbage collection."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

_NEVER = 1 << 30
_lock = threading.RLock()


def _renew() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it, which a fork does not have


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep other threads out of such blocks: each restores what it found, which could be another thread's change."""
    with _lock:
        yield


def own_umask() -> int:
    """The umask of this process; it can only be read by setting it."""
    with one_thread():
        umask = os.umask(0o077)
        os.umask(umask)
    return umask


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of the environment in the block; None removes one."""
    with one_thread():
        former = {name: os.environ.get(name) for name in variables}
        _set(variables)
        try:
            yield
        finally:
            _set(former)


def safe_path() -> AbstractContextManager[None]:
    """Keep files of the current folder, such as a numbers.py, from shadowing modules in Pythons started in the block.

    `python -m`, which starts them, puts that folder first on the path; Python 3.11 and later can be told not to.
    """
    return environment({"PYTHONSAFEPATH": "1"})


@contextlib.contextmanager
def working_folder(path: Path, *, may_be_gone: bool = False) -> Iterator[None]:
    """Change to the folder `path` in the block, as `contextlib.chdir` of Python 3.11.

    If it `may_be_gone` and is, the block runs where it is: what it reads may lie elsewhere.
    """
    before = Path.cwd()
    with contextlib.suppress(FileNotFoundError) if may_be_gone else contextlib.nullcontext():
        os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Limit garbage collection to new objects in the block.

    An import of PyTorch and transformers makes 400,000 objects that stay: six full collections take 0.43 of 3.65 s.
    """
    new, young, old = gc.get_threshold()
    gc.set_threshold(new, young, _NEVER)
    try:
        yield
    finally:
        new, young, now = gc.get_threshold()
        if now == _NEVER:  # else the block has set another
            gc.set_threshold(new, young, old)
