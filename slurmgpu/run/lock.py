"""Per-run lock for submit, join and merge: one process holds it at a time, and it survives crashed holders.

The lock is a file with a token and a counter, which its holder increments. Processes that wait judge the counter by
their own clock, and remove the lock of a silent holder. A holder that was stopped may continue later: before each step
that cannot be undone it checks that the file still has its token (`Lock.check`), and it never removes another's lock.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, TypeVar, cast

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.counters import SIZE, counting, decode, encode
from slurmgpu.util.early_signals import deferred, heed
from slurmgpu.util.pids import lives, own_id
from slurmgpu.util.regular_files import UnusableFileError, open_new
from slurmgpu.util.shared_files import NO_HARD_LINKS, read_bytes, remove, replace, retried
from slurmgpu.util.users import name_in_words, own_name

log = logging.getLogger(__name__)

RUN_LOCK = ".submitting"
"""The name of a run's lock."""
RENEW_S = 5.0
"""How often a holder increments the counter."""
PATIENCE_S = 120.0
"""The holder of a lock that has not changed for this time is dead, by the observer's clock; NFS may lag 60 s."""
LONGEST_GAP_S = 10.0
"""An observer that has not looked for longer was stopped itself, and starts again."""
CHECKED_S = 1.0


_T = TypeVar("_T")


class LockLostError(SlurmGPUError):
    """Another process has taken this process's lock, because this one seemed dead."""


class Holder(TypedDict, total=False):
    """The content of a lock, about its holder; only the `text` of a damaged one."""

    token: str
    beat: int
    doing: str
    user: str
    since: float
    host: str
    boot: str
    pid_namespace: str
    pid: int
    ticks: int | None
    text: str


@dataclass
class Lock:
    """A lock that this process took; `check` raises if another process has removed it since."""

    path: Path
    content: Holder
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _beaten: float = field(default_factory=time.monotonic)

    @property
    def token(self) -> str:
        """The token that identifies this lock."""
        return str(self.content["token"])

    def beat(self) -> bool:
        """Increment the counter; False if the lock is no longer this process's."""
        with self._writing:
            try:
                # Read and written by the same descriptor: the file cannot become another's in between.
                fd = retried(lambda: os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
            except FileNotFoundError:
                return False
            try:
                if _parse(retried(lambda: os.pread(fd, SIZE, 0))).get("token") != self.token:
                    return False
                self.content["beat"] += 1
                begun = time.monotonic()  # before the write: if it is stopped after that, its silence began here
                retried(lambda: os.pwrite(fd, _encode(self.content), 0))
            finally:
                os.close(fd)
            self._beaten = begun
            return True

    def check(self) -> None:
        """Raise LockLostError unless the lock is still this process's; call it before steps that cannot be undone."""
        was_silent = time.monotonic() - self._beaten > PATIENCE_S / 2
        # An observer that tries to take the lock renames it for a moment.
        for pause in (0.0, 0.1, 0.5):
            time.sleep(pause)
            if self.beat():
                break
        else:
            self._raise_lost()
        if was_silent:
            time.sleep(0.5)  # an observer of the old counter has removed the lock by now
            if not self.beat():
                self._raise_lost()

    def _raise_lost(self) -> None:
        successor = _look(self.path)
        holder = _in_words(_parse(successor)) if successor else "nobody"
        raise LockLostError(
            f"This process was stopped, or could not write to {self.path.parent}, for more than {PATIENCE_S:.0f} s. "
            f"Others considered it dead, and its lock is now held by {holder}. It has changed nothing since. "
            f"Look at the run with `slurmgpu status`, and repeat the command if it is still needed."
        )

    def release(self) -> None:
        """Remove the lock, if it is still this process's."""
        content = _look(self.path)
        seen = None if content is None else _parse(content)
        if seen is not None and seen.get("token") == self.token:
            _take_away(self.path, seen, is_own=True)


def checked(values: Iterable[_T], check: Callable[[], None]) -> Iterator[_T]:
    """Each of `values`, for a loop that removes files: `check` is called before the first, and once a second.

    So a holder that was stopped in the middle checks its lock before it goes on.
    """
    last = -math.inf
    for value in values:
        now = time.monotonic()
        if now - last > CHECKED_S:
            check()
            last = now
        yield value


def is_left_by_dead(folder: Path) -> bool:
    """Whether the run directory has the lock of a process that is known to be dead, of this machine."""
    content = _look(folder / RUN_LOCK)
    return content is not None and lives(_parse(content)) is False


@contextlib.contextmanager
def run_lock(
    folder: Path, doing: str, *, patient: bool = False, on_wait: Callable[[], None] = lambda: None
) -> Iterator[Lock]:
    """Hold the lock of the run in `folder` while the block lasts.

    If another process holds it, `patient` waits; otherwise SlurmGPUError is raised. `doing` is shown to processes that
    wait. `on_wait` is called repeatedly while this one waits, and may raise to stop.
    """
    with (
        hold(folder / RUN_LOCK, doing, patient=patient, on_wait=on_wait) as lock,
        counting(lock.beat, RENEW_S, doing),
    ):
        yield lock


@contextlib.contextmanager
def hold(
    path: Path,
    doing: str,
    *,
    patient: bool,
    on_wait: Callable[[], None] = lambda: None,
    patience_s: float | None = None,
) -> Iterator[Lock]:
    """Hold the lock at `path` for a moment: it is not renewed while the block lasts."""
    with deferred() as allowed:  # a signal raises while it waits, or while it holds the lock, but not in between
        lock = _acquire(path, doing, patient, on_wait, PATIENCE_S if patience_s is None else patience_s)
        try:
            with allowed():
                yield lock
        finally:
            try:
                lock.release()
            except OSError as error:
                log.warning("%s cannot be removed: %s", path, error)


def _acquire(path: Path, doing: str, patient: bool, on_wait: Callable[[], None], patience_s: float) -> Lock:
    seen, since, looked, is_told = None, time.monotonic(), time.monotonic(), False
    while True:
        content = _look(path)  # one request: a thousand tasks may wait at once
        if content is None:
            if lock := _try(path, doing):
                return lock
            time.sleep(random.uniform(0.01, 0.1))  # another process was faster, and a cache may not show it yet
            continue
        holder, now = _parse(content), time.monotonic()
        life = lives(holder)
        has_beaten = seen is not None and content != seen
        if not patient and (life or has_beaten):
            raise SlurmGPUError(
                f"This run is being submitted or merged right now, by {_in_words(holder)}. "
                f"Wait for its end; `slurmgpu status {shlex.quote(str(path.parent))}` shows the state of the run."
            )
        if content != seen or now - looked > LONGEST_GAP_S:
            seen, since = content, now
        elif life is False or now - since > patience_s:
            if _take_away(path, holder):
                log.warning("removed the lock of a dead process: %s", _in_words(holder))
            continue
        if not is_told and patient:
            log.info("waiting for %s", _in_words(holder))
        elif not is_told and life is None:
            log.warning("waiting up to %.0f s to see whether %s is alive", patience_s, _in_words(holder))
        is_told = True
        looked = now
        heed()
        on_wait()
        time.sleep(random.uniform(0.05, 0.5) if life is not False else 0.01)


def _try(path: Path, doing: str) -> Lock | None:
    """The lock, if it is free. The file appears with its content, which names its holder."""
    about = {"token": os.urandom(16).hex(), "beat": 0, "doing": doing, "user": own_name(), "since": time.time()}
    value = cast(Holder, {**about, **own_id()})
    mine = path.with_name(f"{path.name}.{value['token']}.partial")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        retried(lambda: _write(os.open(mine, flags, 0o644), value))
        try:
            is_mine = _link(mine, path, value)
        finally:
            remove(mine)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise SlurmGPUError(f"{path.parent} is gone.") from None
        raise
    except OSError as error:
        error.filename = str(path)  # instead of the temporary name
        raise
    return Lock(path, value) if is_mine else None


def _write(fd: int, value: Holder) -> None:
    with os.fdopen(fd, "wb") as file:
        file.write(_encode(value))


def _link(mine: Path, path: Path, value: Holder) -> bool:
    """Link a file to the name of the lock, if that is free; also if the reply is lost."""
    try:
        try:
            retried(lambda: os.link(mine, path, follow_symlinks=False))
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            _write(open_new(path), value)
    except FileExistsError:
        found = _look(path)
        return found is not None and _parse(found).get("token") == value["token"]
    return True


def _take_away(path: Path, holder: Holder, *, is_own: bool = False) -> bool:
    """Remove the lock of `holder`, if its content is unchanged; one that `is_own` may have been renewed since.

    It is renamed first: one of several processes that try succeeds.
    """
    mine = path.with_name(f"{path.name}.{os.urandom(16).hex()}.taken")
    try:
        replace(path, mine)
        content = _parse(read_bytes(mine))
    except FileNotFoundError:
        return False  # another process was faster
    except PermissionError as error:
        if is_own:
            raise
        # In a folder with the sticky bit, the folder's owner may also remove it.
        owners = dict.fromkeys(name_in_words(each.stat().st_uid) for each in (path, path.parent))
        raise SlurmGPUError(
            f"{path} is the lock of a dead process ({_in_words(holder)}), but you may not remove it: "
            f"{error.strerror}. Have {' or '.join(owners)} remove it: rm {shlex.quote(str(path))}"
        ) from error
    taken = content.get("token") == holder["token"] if is_own else content == holder
    if not taken:
        _put_back(mine, path)  # it has another holder, or was renewed, since it was read
    remove(mine)
    return taken


def _put_back(mine: Path, path: Path) -> None:
    """Rename a lock back, as the same file: its holder may be another user, who could not renew a copy."""
    try:
        retried(lambda: os.link(mine, path, follow_symlinks=False))
    except FileExistsError:
        pass  # another process has taken it since, or the reply was lost
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        # No hard links, or none to others' files (protected_hardlinks). A process that takes it in between loses it.
        if _look(path) is None:
            replace(mine, path)


def _look(path: Path) -> bytes | None:
    try:
        return read_bytes(path, max_bytes=4 * SIZE)
    except FileNotFoundError:
        return None
    except UnusableFileError as error:
        raise SlurmGPUError(
            f"{path}, which should be the lock of a process that submits or merges the run, cannot be read: "
            f"{error.strerror}. Remove it, or ask its owner to."
        ) from error


def _parse(content: bytes) -> Holder:
    """The content of a lock; only its text if it is damaged."""
    value = decode(content)
    return {"text": content.decode("utf-8", "replace")} if value is None else cast(Holder, value)


def _encode(value: Holder) -> bytes:
    return str(value["text"]).encode() if "text" in value else encode(value)


def _in_words(holder: Holder) -> str:
    if "token" not in holder:
        return str(holder.get("text") or "an unknown process")[:200]
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):  # no time at all
        since = "an unknown time"
    return (
        f"process {holder.get('pid')} of {holder.get('user')} on {holder.get('host')}, "
        f"which began {holder.get('doing')} it at {since}"
    )
