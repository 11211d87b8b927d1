"""Heartbeats: the counter in `tasks/ATTEMPT@CLUSTER.alive` goes up from a task's first second until its process ends.

It exists before the record does, while images are staged and models are loaded, and goes up while the task waits. An
observer watches the counter by its own clock, whatever the task's user, host, cluster and PID namespace. A killed task
leaves its file, whose counter no longer changes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.counters import SIZE, counting, decode, encode
from slurmgpu.run.submissions import DirectoryId, cluster_in_names, directory_id, was_written_in
from slurmgpu.util.pids import lives, own_id
from slurmgpu.util.regular_files import open_new
from slurmgpu.util.shared_files import list_fresh, read_bytes, remove
from slurmgpu.util.users import own_name

BEAT_S = 3.0
"""How often a task counts up."""
LONGEST_GAP_S = 15.0
"""An observer that has not looked for longer was stopped itself, and starts again."""
SUFFIX = ".alive"


class Heartbeat(DirectoryId, total=False):
    """The content of a heartbeat; empty while it is written for the first time, or if it is damaged."""

    token: str
    beat: int
    attempt: str
    job: str
    uid: int
    user: str
    cluster: str | None
    boot: str
    pid_namespace: str
    host: str
    pid: int
    ticks: int | None


@contextlib.contextmanager
def beating(folder: Path, attempt: str, job: str, node: int = 0) -> Iterator[None]:
    """Keep a heartbeat while the block lasts; `node` is the rank of this node in its task.

    `folder` is the run directory. An error of the file does not end the task.
    """
    cluster, path = os.environ.get("SLURM_CLUSTER_NAME"), _path(folder, attempt, job, node)
    value = cast(
        Heartbeat,
        {
            "token": os.urandom(16).hex(),
            "beat": 0,
            "attempt": attempt,
            "job": job,
            "uid": os.getuid(),
            "user": own_name(),
            "cluster": cluster,
            **own_id(),
        },
    )
    with contextlib.suppress(OSError):
        value.update(cast(Heartbeat, directory_id(folder)))
    _write(path, value)

    def beat() -> None:
        value["beat"] += 1
        _write(path, value)

    try:
        with counting(beat, BEAT_S, "heartbeat"):
            yield
    finally:
        with contextlib.suppress(OSError):
            told = decode(read_bytes(path, max_bytes=4 * SIZE))
            if told and told.get("token") == value["token"]:
                remove(path)


def refuse_twin(
    folder: Path, attempt: str, job: str, node: int, patience_s: float, on_wait: Callable[[], None] = lambda: None
) -> None:
    """Raise SlurmGPUError if another process keeps this heartbeat; waits up to `patience_s` if it is of another host.

    Each step of a job may start a task, also those of the parts of a hetjob, and all have the same job id. `on_wait` is
    called repeatedly while this one waits, and may raise to stop.
    """
    path, observer = _path(folder, attempt, job, node), Observer(folder, patience_s)
    try:
        os.close(open_new(path))
    except FileExistsError:
        while (task := observer.look_at(path.name)) is not None and task.lives is None:
            on_wait()
            time.sleep(min(1.0, patience_s / 20))
        if task is not None and task.lives and was_written_in(directory_id(folder), task.told):
            raise SlurmGPUError(
                f"Job {job} has another process that computes this run, {task.in_words}. Start one task in a job, by "
                "one srun: it uses all GPUs that it sees. For several tasks submit an array."
            ) from None
    except OSError:
        return  # as for a heartbeat that cannot be written


def may_live(folder: Path, attempt: str, job: str, patience_s: float) -> bool:
    """Whether a task on this node may be alive: it keeps a heartbeat, and its process is not known to be gone."""
    task = Observer(folder, patience_s).look_at(_path(folder, attempt, job, 0).name)
    return task is not None and task.lives is not False


def _path(folder: Path, attempt: str, job: str, node: int) -> Path:
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    # Two clusters that share the disk may give the same job id. Jobs of the local executor have none.
    where = f"@{cluster_in_names(cluster)}" if cluster and job.isdecimal() else ""
    return folder / "tasks" / f"{attempt}{where}{f'.node{node}' if node else ''}{SUFFIX}"


def _write(path: Path, value: Heartbeat) -> None:
    # In place, always of one length: cheaper than a rename, and readers see the old counter or the new one. Made again
    # if it is gone: a merge removes the files of silent tasks, and a task that was stopped may continue.
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, encode(value), 0)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class ObservedTask:
    """The task of a heartbeat as an observer sees it; `lives` is None until that is known."""

    name: str
    told: Heartbeat
    lives: bool | None

    @property
    def in_words(self) -> str:
        """The task, its user and its host, in words."""
        return f"task {self.name} of {self.told.get('user', '?')} on {self.told.get('host', '?')}"


@dataclass
class Observer:
    """The heartbeats of a run as one process has seen them, by its own clock."""

    folder: Path
    patience_s: float
    _seen: dict[str, tuple[bytes | None, float, bool, Heartbeat]] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self) -> list[ObservedTask]:
        """The tasks of this run directory, not of one that it was copied from, that have not ended by themselves."""
        names = [name for name in list_fresh(self._tasks) if name.endswith(SUFFIX) and not name.startswith(".")]
        now = time.monotonic()  # a file server that hangs stops this observer in the listing, and the tasks as well
        if now - self._looked > LONGEST_GAP_S:
            self._seen.clear()
        self._looked = now
        own = directory_id(self.folder) if names else {}
        tasks = (self.look_at(name) for name in sorted(names))
        return [task for task in tasks if task is not None and was_written_in(own, task.told)]

    def forget(self, tasks: Sequence[ObservedTask]) -> None:
        """Remove the files of dead tasks, unless they have changed; a task that is alive makes its file again."""
        for task in tasks:
            path = self._tasks / f"{task.name}{SUFFIX}"
            with contextlib.suppress(OSError):
                if read_bytes(path, max_bytes=4 * SIZE) == self._seen[path.name][0]:
                    remove(path)

    @property
    def _tasks(self) -> Path:
        return self.folder / "tasks"

    def look_at(self, name: str) -> ObservedTask | None:
        """The task of one heartbeat, by the name of its file; None without the file."""
        now = time.monotonic()
        seen, since, has_beaten, told = self._seen.get(name, (None, now, False, {}))
        try:
            # Without a second try: the next look comes soon, and one that took longer would count as a stop.
            content: bytes | None = read_bytes(self._tasks / name, max_bytes=4 * SIZE, patience_s=0.0)
        except FileNotFoundError:
            return None
        except OSError:
            content = seen  # a heartbeat that cannot be read does not change
        told = cast(Heartbeat, (content and decode(content)) or told)  # nothing while it is written
        if seen != content:
            since, has_beaten = now, has_beaten or seen is not None
        self._seen[name] = content, since, has_beaten, told
        is_silent = now - since > self.patience_s
        known = lives(told)
        if known is None:
            known = False if is_silent else True if has_beaten else None
        return ObservedTask(name.removesuffix(SUFFIX), told, known)
