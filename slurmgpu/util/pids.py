"""Identify a process for other processes of the same kernel and PID namespace, and check whether it runs.

The pid alone is not enough: another machine may have the same name, a container has its own pids, /proc may hide the
processes of other users, and pids are reused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")
DEAD = (b"Z", b"X")
"""States of a process that has ended, by proc(5)."""


class Numbering(TypedDict):
    """The scope of a pid: the kernel since its boot, and the PID namespace; "" if /proc does not say."""

    boot: str
    pid_namespace: str


class ProcessId(Numbering):
    """A process, for JSON."""

    host: str
    pid: int
    ticks: int | None


def has_ended(child: int) -> bool:
    """Whether a child of this process has ended; it is not reaped, so its pid is not reused."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def has_failed(child: int) -> bool:
    """Whether a child of this process has ended by a signal, or with another exit code than 0; it is not reaped."""
    try:
        found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is not None and found.si_status != 0


def is_alone_in_group(leader: int) -> bool:
    """Whether no other process of the process group that this one leads is alive."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    others = (stat(pid) for pid in pids if pid != leader)
    return not any(found and found[0] not in DEAD and int(found[2]) == leader for found in others)


def numbering() -> Numbering:
    """The boot and the PID namespace of this process."""
    return _numbering_of(os.getpid())


@functools.cache
def _numbering_of(pid: int) -> Numbering:  # a forked process may be in another namespace
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = BOOT_ID.read_text("ascii").strip()
        namespace = str(NAMESPACE.readlink())
    return {"boot": boot, "pid_namespace": namespace}


def own_id() -> ProcessId:
    """The identity of this process."""
    seen = look(os.getpid())
    return {"host": platform.node(), **numbering(), "pid": os.getpid(), "ticks": seen[1] if seen else None}


class Processes(TypedDict):
    """Processes of this machine, for JSON: their pids, and the start of each in ticks since boot; None if hidden."""

    pids: list[int]
    ticks: list[int | None]


def processes(pids: Sequence[int]) -> Processes:
    """The identity of processes that are running or not reaped yet, so that their pids are not reused."""
    seen = map(look, pids)
    return {"pids": list(pids), "ticks": [None if each is None else each[1] for each in seen]}


def are_numbered_here(other: Mapping[str, object]) -> bool:
    """Whether the pids of another process mean the same here."""
    here = numbering()
    return all(here.values()) and all(other.get(key) == value for key, value in here.items())


def lives(other: Mapping[str, object]) -> bool | None:
    """Whether the process with this `own_id` runs; None if that cannot be known here."""
    pid = other.get("pid")
    if not are_numbered_here(other) or type(pid) is not int or pid < 1:
        return None
    return runs(pid, other.get("ticks"))


def runs(pid: int, ticks: object) -> bool | None:
    """Whether the process with this pid, which began at `ticks`, runs; None if that cannot be known."""
    if not is_there(pid):
        return False
    seen = look(pid)
    if seen is None or ticks is None:
        return None  # hidden, or gone since; its pid may be another's now
    return seen[0] not in DEAD and seen[1] == ticks


def is_there(pid: int) -> bool:
    """Whether any user has a process with that pid; by kill(2), as /proc may hide it."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def look(pid: int) -> tuple[bytes, int] | None:
    """A process's state, and its start in ticks since boot; None if it cannot be seen."""
    fields = _visible_stat(pid)
    return None if fields is None else (fields[0], int(fields[19]))


def parent_of(pid: int) -> int | None:
    """The pid of a process's parent; None if it cannot be seen."""
    fields = _visible_stat(pid)
    return None if fields is None else int(fields[1])


def _visible_stat(pid: int) -> list[bytes] | None:
    """The same as `stat`; None if /proc is of another PID namespace."""
    try:
        return stat(pid) if str(Path("/proc/self").readlink()) == str(os.getpid()) else None
    except OSError:
        return None


def stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on, the third of proc(5); None if it has ended or is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()  # behind the name in parentheses, which may hold any
    except OSError:
        return None
