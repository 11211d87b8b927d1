"""Heartbeats: the counter in `tasks/ATTEMPT@CLUSTER.alive` goes up from a task's first second until its process ends.

It is there before a record is, while images are staged and models loaded, and goes on while the task itself waits for
something. Whoever wants to know whether the task lives watches the counter by a clock of its own, whatever the user,
the host, the cluster or the PID namespace of the task. What died leaves its file, and the counter stands still.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from slurmgpu.run.counters import SIZE, counting, encode, own_name
from slurmgpu.run.submissions import Place, cluster_in_names, is_at, place_of
from slurmgpu.util.pids import lives, own_id
from slurmgpu.util.shared_files import list_anew, read_bytes, remove

BEAT_S = 3.0
"""How often a task counts up."""
LONGEST_GAP_S = 15.0
"""An observer that has not looked for so long was stopped itself, and its clock says nothing of others."""
SUFFIX = ".alive"


class Heartbeat(Place, total=False):
    """What a task tells of itself; nothing while the file is written for the first time, or is damaged."""

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
    """Show others that this process lives, while the block lasts; `node` is its place among those of its task.

    `folder` is the run directory. A file that cannot be written costs the sign, not the task.
    """
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    # Two clusters that share the disk may give the same job id. A local executor's jobs have none.
    where = f"@{cluster_in_names(cluster)}" if cluster and job.isdecimal() else ""
    path = folder / "tasks" / f"{attempt}{where}{f'.node{node}' if node else ''}{SUFFIX}"
    value = cast(
        Heartbeat,
        {
            "token": secrets.token_hex(16),
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
        place = place_of(folder)
        value["folder"], value["inode"] = place["folder"], place["inode"]
    _write(path, value)

    def beat() -> None:
        value["beat"] += 1
        _write(path, value)

    try:
        with counting(beat, BEAT_S, "heartbeat"):
            yield
    finally:
        with contextlib.suppress(OSError):
            if _parse(read_bytes(path, max_bytes=4 * SIZE)).get("token") == value["token"]:
                remove(path)


def _write(path: Path, value: Heartbeat) -> None:
    # In place, and of one length: a rename would cost the server more, and readers see the old counter or the new one.
    # Made again if it is gone: a merge removes those that are silent, and a task that was stopped may wake.
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, encode(value), 0)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Sign:
    """What an observer knows of one heartbeat; `lives` is None while it cannot tell."""

    name: str
    told: Heartbeat
    lives: bool | None

    @property
    def in_words(self) -> str:
        """Which task it is of, and where."""
        return f"task {self.name} of {self.told.get('user', '?')} on {self.told.get('host', '?')}"


@dataclass
class Observer:
    """The heartbeats of a run as one process has seen them, by its own clock; it may look again and again."""

    folder: Path
    patience_s: float
    _seen: dict[str, tuple[bytes, float, bool, Heartbeat]] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self) -> list[Sign]:
        """A sign for each task of this run directory, no copy's, that has not ended by itself."""
        now = time.monotonic()
        if now - self._looked > LONGEST_GAP_S:
            self._seen.clear()
        self._looked = now
        names = [name for name in list_anew(self._tasks) if name.endswith(SUFFIX) and not name.startswith(".")]
        place = place_of(self.folder) if names else {}
        signs = (self._look_at(name, now) for name in sorted(names))
        return [sign for sign in signs if sign is not None and is_at(place, sign.told)]

    def forget(self, signs: Sequence[Sign]) -> None:
        """Remove the files of dead tasks, unless they have changed; one that lives after all makes its own again."""
        for sign in signs:
            path = self._tasks / f"{sign.name}{SUFFIX}"
            with contextlib.suppress(OSError):
                if read_bytes(path, max_bytes=4 * SIZE) == self._seen[path.name][0]:
                    remove(path)

    @property
    def _tasks(self) -> Path:
        return self.folder / "tasks"

    def _look_at(self, name: str, now: float) -> Sign | None:
        try:
            content = read_bytes(self._tasks / name, max_bytes=4 * SIZE)
        except FileNotFoundError:
            return None
        except OSError as error:
            content = str(error).encode()  # it cannot be read, and so does not change
        seen, since, has_beaten, told = self._seen.get(name, (content, now, False, {}))
        told = _parse(content) or told  # while it is written, it is of whom it was of
        if seen != content:
            since, has_beaten = now, True
        self._seen[name] = content, since, has_beaten, told
        is_silent = now - since > self.patience_s
        known = lives(told)
        if known is None:
            known = False if is_silent else True if has_beaten else None
        return Sign(name.removesuffix(SUFFIX), told, known)


def _parse(content: bytes) -> Heartbeat:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}  # it is being written for the first time, or damaged
    return cast(Heartbeat, value) if isinstance(value, dict) else {}
