"""File operations that fail as on a network file system: before they happen, or after."""

import errno
import os
import pathlib
from pathlib import Path

TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN)

SITE = """
import builtins, errno, os, random, sys

PLACES = ("/run/claims/", "/run/shards/")
ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR)
CHANCE = float(os.environ.get("CHANCE", "0.08"))
chance = random.Random(os.getpid())

class Function:  # a function of Python's would become a method of pathlib's accessor on Python 3.10
    def __init__(self, call):
        self.call = call

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)

def failing(real, can_lose_replies):
    def call(path, *args, **kwargs):
        if not isinstance(path, (str, os.PathLike)) or not any(place in os.fspath(path) for place in PLACES):
            return real(path, *args, **kwargs)
        if chance.random() < CHANCE:
            number = chance.choice(ERRORS)
            if can_lose_replies and chance.random() < 0.5:
                real(path, *args, **kwargs)
            os.write(2, f"injected: {real.__name__} of {path}\\n".encode())
            raise OSError(number, "injected", os.fspath(path))
        return real(path, *args, **kwargs)
    return Function(call)

STARTS = ("submitit", "slurmgpu.executors.slot", "slurmgpu.worker.main")
IS_TASK = any(start in word for start in STARTS for word in sys.orig_argv)
for name in IS_TASK * ("link", "rename", "replace", "unlink", "mkdir"):
    setattr(os, name, failing(getattr(os, name), True))
for name in IS_TASK * ("open", "stat", "lstat"):
    setattr(os, name, failing(getattr(os, name), False))
if IS_TASK:
    builtins.open = failing(builtins.open, False)
"""
"""A sitecustomize.py that puts a run's claims and shards on such a file system, for its tasks and workers."""

SLOT_CANNOT_OPEN = """
import os, sys
if "slurmgpu.executors.slot" in sys.orig_argv:
    opened = os.open
    def fail(path, *given, **more):
        if str(path).endswith("{ending}"):
            raise OSError({number}, os.strerror({number}), str(path))
        return opened(path, *given, **more)
    os.open = fail
"""
"""A sitecustomize with which slots, and what they fork, cannot open files whose paths have this ending."""

TASK_DIES = """
import os, sys
if "slurmgpu.executors.slot" in sys.orig_argv:
    fork = os.fork
    os.fork = lambda: fork() or os._exit({code})
"""
"""A sitecustomize.py with which a slot's task, a fork of the slot, exits with this code before it prints anything."""


def places_of(function):
    """What to patch for a function of `os`: on Python 3.10 paths keep their own references."""
    accessor = getattr(pathlib, "_NormalAccessor", None)
    return [os, *([accessor] if hasattr(accessor, function) else [])]


def put(function, call, setter=setattr):
    """Replace a function of `os`, for `os` and for paths."""
    for place in places_of(function):
        setter(place, function, call if place is os else staticmethod(call))


class Failing:
    """Makes functions of `os` fail, for a test: `failing("rename", errno.EIO, of="00003")`.

    Calls with a path whose name contains `of` fail, `times` of them; with `lost` after they have happened.
    """

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.n_failed = 0

    def __call__(self, function, number, *, of="", times=1, lost=False):
        real, left = getattr(os, function), [times]

        def call(path, *args, **kwargs):
            if left[0] and isinstance(path, str | os.PathLike) and of in Path(path).name:
                left[0] -= 1
                self.n_failed += 1
                if lost:
                    result = real(path, *args, **kwargs)
                    if isinstance(result, int):
                        os.close(result)
                raise OSError(number, os.strerror(number), os.fspath(path))
            return real(path, *args, **kwargs)

        put(function, call, self._monkeypatch.setattr)


def read_wrongly_once(monkeypatch, name, at=None):
    """Flip a bit of what the next read of a file gives, or of the byte `at` a place, the next time that is read.

    The list that is returned is empty once that has happened.
    """
    real, wrong = os.preadv, [name]

    def preadv(fd, buffers, offset):
        n_read = real(fd, buffers, offset)
        place = n_read // 2 if at is None else at - offset
        if wrong and 0 <= place < n_read and os.readlink(f"/proc/self/fd/{fd}").endswith(name):
            wrong.pop()
            buffers[0][place] ^= 1
        return n_read

    monkeypatch.setattr(os, "preadv", preadv)
    return wrong
