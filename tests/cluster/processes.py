"""A cluster's processes: started with a mark in their environment, found again by that mark and by descent.

Nothing is remembered in pid files: what a crashed session left behind is found the same way, and a number that
the kernel has given to another process since is never killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

MARK = "SLURMGPU_TEST_CLUSTER"
REAPER = Path(__file__).with_name("reaper.py")


class ClusterError(RuntimeError):
    """The test cluster cannot be started, or one of its commands failed; with the daemons' last words."""


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float, poll_s: float = 0.02) -> None:
    """Return once `condition()` is true; a ClusterError that says `what` was waited for after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s in vain until {what}")
        time.sleep(poll_s)


def start(
    argv: list[str],
    *,
    mark: str,
    output: Path,
    env: Mapping[str, str],
    user: str | None = None,
    reaper: bool = False,
) -> subprocess.Popen[bytes]:
    """A daemon in a session of its own; under a reaper, nothing that it starts gets lost."""
    if reaper:
        argv = [sys.executable, "-I", "-S", str(REAPER), *argv]
    with open(output, "ab") as file:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**env, MARK: mark},
            cwd="/",
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )


def find(mark: str) -> list[int]:
    """The living processes that carry `mark` (a cluster's, or `cluster/daemon`) and all their descendants.

    Ancestors come before descendants.
    """
    children: dict[int, list[int]] = defaultdict(list)
    marked = []
    for pid, parent in living():
        children[parent].append(pid)
        if _carries(pid, mark):
            marked.append(pid)
    found: dict[int, None] = {}  # a set that keeps its order
    generation = marked
    while generation:
        found.update(dict.fromkeys(generation))
        generation = [child for pid in generation for child in children[pid] if child not in found]
    return list(found)


def kill(mark: str) -> None:
    """SIGKILL to whatever `find(mark)` finds, until nothing is left.

    Ancestors first, as in a power failure: a slurmstepd that outlives its job by a millisecond reports that the job
    failed. A reaper is spared as long as there are others: what is orphaned meanwhile comes to it; it ends by itself.
    """

    def nothing_left() -> bool:
        pids = find(mark)
        for pid in [pid for pid in pids if not _is_reaper(pid)] or pids:
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_for(nothing_left, f"the processes of {mark} were gone", timeout_s=120)


def living() -> Iterator[tuple[int, int]]:
    """(pid, parent's pid) of each process that is no zombie."""
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            # proc(5): the command's name, in parentheses, may itself hold blanks and parentheses.
            fields = _read(directory.name, "stat").rpartition(b")")[2].split()
            if fields and fields[0] not in (b"Z", b"X"):
                yield int(directory.name), int(fields[1])


def _carries(pid: int, mark: str) -> bool:
    wanted = f"{MARK}={mark}".encode()
    return any(
        variable == wanted or variable.startswith(wanted + b"/") for variable in _read(pid, "environ").split(b"\0")
    )


def _is_reaper(pid: int) -> bool:
    return os.fsencode(REAPER) in _read(pid, "cmdline").split(b"\0")


def _read(pid: int | str, name: str) -> bytes:
    """A file of /proc; empty when the process has ended, or is closed even to root (then it is none of ours)."""
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
