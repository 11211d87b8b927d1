"""Out-of-memory kills in this job, and the memory that is left.

cgroup v2's and v1's files: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events) and
cgroup-v1/memory.html (memory.oom_control).
"""

from __future__ import annotations

import math
import time
from pathlib import Path

LATE_S = 5.0
"""How long a kill, or a worker's word on what it does, may stay unread."""
ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """The sum of `oom_kill` over this process's memory cgroups, up to its job's; 0 if none can be read.

    Only the difference between two calls is meaningful. Slurm limits the step, the job, or both.
    """
    return sum(_counter(file) for file in _counter_files())


class KillWatch:
    """When the kernel last killed a process of this job for lack of memory, if `look` is called every second or so."""

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
    """Bytes of memory that the machine and the job still allow this process; cached files do not count as used.

    None if the kernel does not say.
    """
    machine = _value(Path("/proc/meminfo"), "MemAvailable:")
    found = [] if machine is None else [machine * 1024]
    for file in _counter_files():
        is_v2 = file.name == "memory.events"
        limit = _value(file.with_name("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _value(file.with_name("memory.current" if is_v2 else "memory.usage_in_bytes"))
        cached = _value(file.with_name("memory.stat"), "file" if is_v2 else "total_cache")
        if limit is not None and used is not None:
            found.append(max(0, limit - used + min(used, cached or 0)))
    return min(found, default=None)


def _counter_files() -> list[Path]:
    files = []
    for line in Path("/proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            files += [ROOT / part / "memory.events" for part in _upwards(path)]
        elif "memory" in controllers.split(","):
            files += [ROOT / "memory" / part / "memory.oom_control" for part in _upwards(path)]
    return files


def _value(file: Path, name: str = "") -> int | None:
    """The number in a file, or in its line that begins with `name`; None for "max", or if it cannot be read."""
    try:
        words = (line.split() for line in file.read_text("utf-8").splitlines())
        return next((int(line[1 if name else 0]) for line in words if line and name in ("", line[0])), None)
    except (OSError, ValueError):
        return None


def _upwards(path: str) -> list[str]:
    parts = path.strip("/").split("/")
    # Not above the job's: cgroup v2 counts other jobs' kills there.
    job = next((n for n, part in enumerate(parts, 1) if part.startswith("job_")), len(parts))
    return ["/".join(parts[:n]) for n in range(len(parts), job - 1, -1)]


def _counter(file: Path) -> int:
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError:
        return 0  # not mounted here, or not ours to read
    return sum(int(value) for name, _, value in (line.partition(" ") for line in lines) if name == "oom_kill")
