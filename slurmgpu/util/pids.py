"""A process as others may know it, and whether it is known to live: only where the same kernel numbers both.

A number alone says nothing: another machine may bear the same name, a container has numbers of its own, /proc may hide
the processes of others, and numbers are given again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")
DEAD = (b"Z", b"X")
"""States of a process that has ended, by proc(5)."""


class Numbering(TypedDict):
    """What numbers processes: the kernel since its start, and the PID namespace; "" where /proc is silent."""

    boot: str
    pid_namespace: str


class ProcessId(Numbering):
    """A process as JSON has it."""

    host: str
    pid: int
    ticks: int | None


def numbering() -> Numbering:
    """What numbers the processes here."""
    return _numbering_of(os.getpid())


@functools.cache
def _numbering_of(pid: int) -> Numbering:  # a forked process may be in another namespace
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = BOOT_ID.read_text("ascii").strip()
        namespace = str(NAMESPACE.readlink())
    return {"boot": boot, "pid_namespace": namespace}


def own_id() -> ProcessId:
    """What tells this process from all others."""
    seen = look(os.getpid())
    return {"host": platform.node(), **numbering(), "pid": os.getpid(), "ticks": seen[1] if seen else None}


def are_numbered_here(other: Mapping[str, object]) -> bool:
    """Whether the process numbers of another process mean the same here."""
    here = numbering()
    return all(here.values()) and all(other.get(key) == value for key, value in here.items())


def lives(other: Mapping[str, object]) -> bool | None:
    """Whether a process lives, from its `own_id`: True and False are certain, None is for what nobody here can know."""
    pid = other.get("pid")
    if not are_numbered_here(other) or type(pid) is not int or pid < 1:
        return None
    if not is_there(pid):
        return False
    seen = look(pid)
    if seen is None or other.get("ticks") is None:
        return None  # hidden, or gone since; its number may be another's by now
    state, ticks = seen
    return state not in DEAD and ticks == other.get("ticks")


def is_there(pid: int) -> bool:
    """Whether there is a process of that number, of whatever user: kill(2) asks the kernel, whatever /proc hides."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def look(pid: int) -> tuple[bytes, int] | None:
    """A process's state, and when it began in ticks since the machine's start; None of one that cannot be seen."""
    try:
        if str(Path("/proc/self").readlink()) != str(os.getpid()):
            return None  # /proc is that of another PID namespace
        # proc(5): behind the name in parentheses come the state and, 19 fields later, the start in ticks since boot.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
