"""Out-of-memory kills in this task, and the memory that is left.

cgroup v2's and v1's files: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events) and
cgroup-v1/memory.html (memory.oom_control).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

LATE_S = 5.0
"""How long a kill, or a worker's word on what it does, may stay unread."""
ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def oom_kills() -> int:
    """The sum of `oom_kill` over this process's memory cgroups, up to its task's or job's; 0 if none can be read.

    Only the difference between two calls is meaningful. Slurm limits the step, the job, or both; the kernel counts a
    kill in the group of the process that dies, and cgroup v2 also in those above it.
    """
    return sum(_counter(file) for files in _counter_files() for file in _of_task(files))


class KillWatch:
    """When the kernel last killed a process of this task for lack of memory, if `look` is called every second or so."""

    def __init__(self) -> None:
        self._n_kills, self._looked, self._risen = oom_kills(), time.monotonic(), -math.inf

    def look(self) -> None:
        """Read the counter, but not more than once a second."""
        if time.monotonic() - self._looked > 1.0:
            self._read()

    @property
    def age_s(self) -> float:
        """The seconds since the counter was last seen to have risen; infinite if it never was."""
        self._read()
        return time.monotonic() - self._risen

    def _read(self) -> None:
        n_kills, self._looked = oom_kills(), time.monotonic()
        if n_kills > self._n_kills:
            self._n_kills, self._risen = n_kills, self._looked


def memory_left() -> int | None:
    """Bytes of memory that the machine, the job and the groups above it still allow this process.

    Cached files do not count as used, except those of a tmpfs such as /dev/shm. None if the kernel does not say.
    """
    machine = _value(Path("/proc/meminfo"), "MemAvailable:")
    found = [] if machine is None else [machine * 1024]
    for file in (file for files in _counter_files() for file in files):
        _, used_name, total = V2 if file.name == V2_EVENTS else V1
        limits = _limits(file)
        used = _value(file.with_name(used_name))
        if limits and used is not None:
            stat = file.with_name("memory.stat")
            cached = sum(_value(stat, f"{total}{name}_file") or 0 for name in ("active", "inactive"))
            found.append(max(0, min(limits) - used + min(used, cached)))
    return min(found, default=None)


def memory_of_job() -> int | None:
    """Bytes of memory that the kernel lets this process's job use on this node; None without such a limit.

    The narrowest limit of the groups up to the job's: Slurm limits the step, the job, or both.
    """
    found = []
    for files in _counter_files():
        n_up = next((n for n, file in enumerate(files, 1) if file.parent.name.startswith("job_")), 0)
        found += [limit for file in files[:n_up] for limit in _limits(file) if limit < UNLIMITED]
    return min(found, default=None)


V2_EVENTS = "memory.events"
V2 = ("memory.max", "memory.high"), "memory.current", ""
V1 = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"
"""The files with limits and with what is used, and the prefix in memory.stat of sums over the groups below."""


UNLIMITED = 1 << 60
"""From here on, a limit of cgroup v1 is none."""


def _limits(file: Path) -> list[int]:
    """The limits of the group that has this file of kills."""
    names, *_ = V2 if file.name == V2_EVENTS else V1
    return [limit for name in names if (limit := _value(file.with_name(name))) is not None]


def _counter_files() -> list[list[Path]]:
    """The file that counts kills of each group of this process, from its own up to the root, for each version."""
    found = []
    for line in OWN.read_text("utf-8", "surrogateescape").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            top, name = (ROOT, V2_EVENTS) if number == "0" else (ROOT / "memory", "memory.oom_control")
            own = Path(path.strip("/"))
            found.append([top / group / name for group in (own, *own.parents)])
    return found


def _of_task(files: Sequence[Path]) -> Sequence[Path]:
    """The files up to the task's: above it, cgroup v2 counts the kills of the job's other tasks, and of other jobs.

    Up to the job's where tasks have none, and without a job the first that is here. In a container the path may be that
    of the host, where only the container's own group is mounted.
    """
    task = next((n for n, file in enumerate(files, 1) if file.parent.name.startswith("task_") and file.is_file()), None)
    last = task or next((n for n, file in enumerate(files, 1) if file.parent.name.startswith("job_")), None)
    return files[:last] if last else [file for file in files if file.is_file()][:1]


def _value(file: Path, name: str = "") -> int | None:
    """The number in a file, or in its line that begins with `name`; None for "max", or if it cannot be read."""
    try:
        words = (line.split() for line in file.read_text("utf-8").splitlines())
        return next((int(line[1 if name else 0]) for line in words if line and name in ("", line[0])), None)
    except (OSError, ValueError):
        return None


def _counter(file: Path) -> int:
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError:
        return 0  # not mounted here, or not ours to read
    return sum(int(value) for name, _, value in (line.partition(" ") for line in lines) if name == "oom_kill")
