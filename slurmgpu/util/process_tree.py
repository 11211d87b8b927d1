"""Process trees, their host memory and CPU time, out of /proc: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import NoReturn

from slurmgpu.util.pids import DEAD, stat

log = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")

GRACE_S = 2.0
"""How long they may take to end: guards, and multiprocessing's resource trackers, clean up after this process."""

REAPER = """
import os, signal, sys, time

def stat(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[3]), int(fields[19]))

grace_s, session, *pids = sys.argv[1:]
known = {int(pid): stat(pid) for pid in pids}
os.close(1)
time.sleep(float(grace_s))
for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
    found = stat(pid)
    if found is not None and pid != os.getpid() and (found == known.get(pid) or found[0] == int(session)):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # it has just ended
"""


@dataclass(frozen=True)
class Tree:
    """A process tree at one moment.

    `rss_bytes` is the sum over its processes, which counts shared pages several times; `cpu_s` includes their ended
    children.
    """

    n_processes: int
    rss_bytes: int
    cpu_s: float


@dataclass(frozen=True)
class _Process:
    has_ended: bool
    parent: int
    session: int
    rss_bytes: int
    cpu_s: float


class TreeWatch:
    """Reads process trees, and remembers which processes of the node are not in them."""

    def __init__(self) -> None:
        self._foreign: set[int] = set()
        self._root: int | None = None

    def read(self, root: int) -> Tree | None:
        """The tree of `root`: its session and all descendants; None if none is left.

        Descendants may lead their own sessions, as the ranks of a group do.
        """
        if root != self._root:
            self._foreign, self._root = set(), root
        listed = _listed()
        # A foreign process never joins the tree: to read each of the thousands of a node takes tens of milliseconds.
        # The pid of one that has ended may be reused.
        self._foreign &= listed
        processes = {pid: found for pid in listed - self._foreign if (found := _read(pid)) is not None}
        members = _members(processes, root)
        self._foreign |= processes.keys() - members
        ours = [processes[pid] for pid in members]
        if not ours:
            return None
        return Tree(len(ours), sum(one.rss_bytes for one in ours), sum(one.cpu_s for one in ours))


def living(root: int) -> set[int]:
    """The processes of a tree, as defined in `TreeWatch.read`, that have not ended."""
    found = {pid: process for pid in _listed() if (process := _read(pid)) is not None and not process.has_ended}
    return _members(found, root)


def children_of(parent: int) -> list[int]:
    """The child processes of a process, also those that have ended and are not waited for yet."""
    return [pid for pid in _listed() if (process := _read(pid)) is not None and process.parent == parent]


def _listed() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def _members(processes: dict[int, _Process], root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    todo = [pid for pid, process in processes.items() if pid == root or process.session == root]
    members: set[int] = set()
    while todo:
        pid = todo.pop()
        if pid not in members:
            members.add(pid)
            todo += children.get(pid, [])
    return members


def _read(pid: int) -> _Process | None:
    if (fields := stat(pid)) is None:
        return None
    ticks = sum(int(field) for field in fields[11:15])  # utime, stime, and those of children that it has waited for
    return _Process(fields[0] in DEAD, int(fields[1]), int(fields[3]), int(fields[21]) * _PAGE, ticks / _TICKS)


def leave_with_all(code: int) -> NoReturn:
    """End this process with `code` now, and kill its session and descendants if they do not end within a moment.

    A daemon in its own session whose parent has ended stays.
    """
    own = os.getpid()
    try:
        if others := living(own) - {own}:
            argv = [sys.executable, "-I", "-S", "-c", REAPER, str(GRACE_S), str(own), *map(str, sorted(others))]
            reaper = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert reaper.stdout is not None
            reaper.stdout.read()  # until it has looked at them: their pids may be others' once this process is gone
    except OSError as error:
        log.warning("processes that this one has started may continue after its end: %s", error)
    finally:
        os._exit(code)
