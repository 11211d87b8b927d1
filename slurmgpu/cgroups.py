"""How often the kernel has killed a process of this job for want of memory: cgroup v2's and v1's counters.

https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events) and cgroup-v1/memory.html (memory.oom_control).
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """The sum of `oom_kill` over this process's memory cgroups, from its own up to its job's; 0 where none can be read.

    Only its growth between two calls means something. Slurm limits the step, the job, or both.
    """
    return sum(_counter(file) for file in _counter_files())


def _counter_files() -> list[Path]:
    files = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            files += [ROOT / part / "memory.events" for part in _upwards(path)]
        elif "memory" in controllers.split(","):
            files += [ROOT / "memory" / part / "memory.oom_control" for part in _upwards(path)]
    return files


def _upwards(path: str) -> list[str]:
    parts = path.strip("/").split("/")
    # Above the job's cgroup v2 counts other jobs' kills as well.
    job = next((n for n, part in enumerate(parts, 1) if part.startswith("job_")), len(parts))
    return ["/".join(parts[:n]) for n in range(len(parts), job - 1, -1)]


def _counter(file: Path) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0  # not mounted here, or not ours to read
    return sum(int(value) for name, _, value in (line.partition(" ") for line in lines) if name == "oom_kill")
