"""Files that other machines and other users change: operations with retries, listings without caches.

A network file system may return EIO or ESTALE for a moment, list a folder as it was a minute ago, and, if a reply is
lost, report the failure of an operation that succeeded. These functions do not rely on one such answer, and read
only what is a regular file (`regular_files`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.chance import CHANCE
from slurmgpu.util.regular_files import UnusableFileError, naming, open_given, open_regular

log = logging.getLogger(__name__)

# ESHUTDOWN is Lustre's, while a client that was evicted reconnects.
TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ETIMEDOUT", "EINTR", "EAGAIN", "EBUSY", "EREMOTEIO", "ECONNRESET", "ECONNABORTED"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENOLCK", "ESHUTDOWN", "ENOTCONN"),
    )
)
"""Errors of a file system that may pass within a moment."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, or an exceeded quota."""
NO_HARD_LINKS = frozenset(
    getattr(errno, name) for name in ("EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EMLINK", "EXDEV")
)
"""Errors of a link within a folder on a file system without hard links. EXDEV is that of a union of several disks."""
_NO_OTHER_GROUP = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EINVAL}
"""EINVAL: a user namespace, such as a container's, does not have the group."""
_NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
PATIENCE_S = 60.0
"""How long an operation is retried by default: NFS clients use a cached answer no longer than that."""
BRIEF_PATIENCE_S = 5.0
"""How long it is retried if a user waits at a terminal, or if a file that cannot be read is left out."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
MANY_BYTES = 256 << 20
"""More than any file that slurmgpu reads whole."""

_T = TypeVar("_T")

_NONE = (-math.inf, -math.inf)
_outage = _NONE
"""When the file system began to fail, and when an operation with a long patience was last given up, monotonic."""


def is_transient(error: BaseException) -> bool:
    """Whether the operation may succeed if it is tried again."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


def retried(operation: Callable[[], _T], patience_s: float = PATIENCE_S) -> _T:
    """The result of `operation`, which is retried for `patience_s` while it raises a transient OSError.

    The pauses grow. `operation` must be repeatable even after it has succeeded: its reply may have been lost.

    Once one has been given up, the patience of others counts from the beginning of the same outage, with at least
    BRIEF_PATIENCE_S for each: a process whose file system is gone would else wait for each of its files in turn. The
    outage is over when a retry succeeds, or if nothing has been given up for a minute.
    """
    global _outage
    until, pause, is_long = None, FIRST_PAUSE_S, patience_s > BRIEF_PATIENCE_S
    while True:
        try:
            result = operation()
        except OSError as error:
            if not is_transient(error):
                raise
            now = time.monotonic()
            if until is None:
                began = _outage[0] if is_long and now - _outage[1] < PATIENCE_S else now
                until = max(began + patience_s, now + min(patience_s, BRIEF_PATIENCE_S))
                log.debug("tried again for up to %.0f s: %s", until - now, error)
            if now + pause > until:
                if is_long:
                    _outage = began, now
                raise
        else:
            if until is not None:
                _outage = _NONE
            return result
        time.sleep(pause * CHANCE.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE_S)


def cause_raised(operation: Callable[[], _T]) -> _T:
    """The result of `operation`; a SlurmGPUError caused by a transient error is raised as that error, for `retried`."""
    try:
        return operation()
    except SlurmGPUError as error:
        if error.__cause__ is not None and is_transient(error.__cause__):
            raise error.__cause__ from error
        raise


def read_bytes(path: os.PathLike[str] | str, *, max_bytes: int = MANY_BYTES, patience_s: float = PATIENCE_S) -> bytes:
    """The content of a regular file; UnusableFileError for anything else, and for one of more than `max_bytes`."""
    return retried(lambda: _read(path, max_bytes), patience_s)[0]


def read_given(path: os.PathLike[str] | str, *, patience_s: float = BRIEF_PATIENCE_S) -> bytes:
    """The content of a file as by `open_given`; UnusableFileError for one of more than MANY_BYTES."""
    return retried(lambda: _content(open_given(path), path, MANY_BYTES)[0], patience_s)


def read_with_status(path: os.PathLike[str] | str, *, max_bytes: int = MANY_BYTES) -> tuple[bytes, os.stat_result]:
    """The content of a regular file as by `read_bytes`, and its status, with its owner and mode."""
    return retried(lambda: _read(path, max_bytes))


def _read(path: os.PathLike[str] | str, max_bytes: int) -> tuple[bytes, os.stat_result]:
    return _content(os.fdopen(open_regular(path), "rb", buffering=0), path, max_bytes)


def _content(
    opened: io.FileIO | io.BufferedReader, path: os.PathLike[str] | str, max_bytes: int
) -> tuple[bytes, os.stat_result]:
    with opened as file, naming(path):
        status = os.fstat(file.fileno())
        size = status.st_size
        if size > max_bytes:
            raise UnusableFileError(path, f"it has {size:,} bytes; at most {max_bytes:,} are plausible")
        content = b""
        while chunk := file.read(min(max_bytes + 1 - len(content), max(size, 4096))):
            content += chunk
            if len(content) > max_bytes:
                raise UnusableFileError(path, f"it grows beyond {max_bytes:,} bytes, which is not plausible")
        return content, status


def time_in(folder: Path) -> float:
    """The time by the clock that dates the files of a folder, a file server's; this machine's if none can be made."""
    made = status_of_new_file(folder)
    return time.time() if made is None else made.st_mtime


def status_of_new_file(folder: Path) -> os.stat_result | None:
    """The status of a file that is made in a folder, and removed; None if none can be made."""
    try:
        fd, path = tempfile.mkstemp(prefix=".", suffix=".anew", dir=folder)
    except OSError:
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def status_of(path: os.PathLike[str] | str, patience_s: float = PATIENCE_S) -> os.stat_result | None:
    """The status of a file or a folder, through links; None if there is none. Raises errors that persist."""
    try:
        return retried(lambda: os.stat(path), patience_s)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_file(path: os.PathLike[str] | str, patience_s: float = PATIENCE_S) -> bool:
    """Whether there is a regular file of that name; unlike os.path's, it tries again after a transient error."""
    return stat.S_ISREG(_mode_of(path, patience_s))


def is_folder(path: os.PathLike[str] | str, patience_s: float = PATIENCE_S) -> bool:
    """The same for a folder."""
    return stat.S_ISDIR(_mode_of(path, patience_s))


def _mode_of(path: os.PathLike[str] | str, patience_s: float) -> int:
    """The mode of a file or folder, 0 if none can be seen."""
    try:
        found = status_of(path, patience_s)
    except (OSError, ValueError) as error:
        if is_transient(error):
            raise
        return 0
    return 0 if found is None else found.st_mode


def may(path: os.PathLike[str] | str, mode: int, patience_s: float = PATIENCE_S) -> bool:
    """Whether this user may read (os.R_OK) or write (os.W_OK) `path`; unlike os.access it does not hide errors."""

    def look() -> bool:
        if os.access(path, mode):
            return True
        # False after an error as well: stat raises that.
        os.stat(path)
        return os.access(path, mode)

    return retried(look, patience_s)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder in an existing one, unless it exists already."""

    def make() -> None:
        try:
            path.mkdir(mode)
        except FileExistsError:  # or the reply was lost
            if not path.is_dir():
                raise

    retried(make)


def list_entries(folder: os.PathLike[str] | str, patience_s: float = PATIENCE_S) -> list[os.DirEntry[str]]:
    """The entries of a folder, as this machine sees it, in no order; a transient error is tried again.

    A folder that is not there has none, here and below, if the one above is: a copy of a run may lack the empty ones.
    """

    def scan() -> list[os.DirEntry[str]]:
        with os.scandir(folder) as entries:
            return list(entries)

    return _listed(folder, scan, patience_s)


def list_fresh(folder: Path, patience_s: float = PATIENCE_S) -> list[str]:
    """The names in a folder, as the file server has them now.

    An NFS client caches a listing until the folder's mtime changes, which a change within one tick of the server's
    clock does not do. The client's own change drops the cache: a file is made and removed first, if that is allowed.
    """
    with contextlib.suppress(PermissionError, FileNotFoundError):
        path = folder / f".{os.urandom(8).hex()}.anew"  # one name for all tries, or a failed removal would leave it
        try:
            retried(lambda: _touch(path), patience_s)
        except OSError as error:
            if error.errno not in (errno.EROFS, *FULL):
                raise
    return _listed(folder, lambda: os.listdir(folder), patience_s)


def list_names(folder: Path, patience_s: float = PATIENCE_S) -> list[str]:
    """The names in a folder, in order, as this machine sees it; a transient error is tried again."""
    return sorted(_listed(folder, lambda: os.listdir(folder), patience_s))


def _listed(folder: os.PathLike[str] | str, look: Callable[[], list[_T]], patience_s: float) -> list[_T]:
    try:
        return retried(look, patience_s)
    except FileNotFoundError:
        if Path(folder).is_symlink() or not is_folder(Path(folder).parent):  # a link to what is away
            raise
        return []


def _touch(path: Path) -> None:
    try:
        with contextlib.suppress(FileExistsError):  # the reply was lost: no other process uses the name
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def remove(path: Path, patience_s: float = PATIENCE_S) -> bool:
    """Remove a file; False if it did not exist, or if the reply to its removal was lost."""
    try:
        retried(path.unlink, patience_s)
    except FileNotFoundError:
        return False
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder with all in it, or what lies in its place.

    Before Python 3.13 shutil.rmtree opens a FIFO, and waits for its writer.
    """
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def replace(source: Path, target: Path, patience_s: float = PATIENCE_S) -> None:
    """Rename a file over another; it succeeds also if the reply is lost and the retry finds no source."""
    identity = retried(lambda: _identity(source), patience_s)

    def rename() -> None:
        try:
            os.replace(source, target)  # noqa: PTH105  (tests put another in its place)
        except FileNotFoundError:
            if _identity(target) != identity:
                raise

    retried(rename, patience_s)


def link_first(partial: Path, target: Path, patience_s: float = PATIENCE_S) -> bool:
    """Make a file appear at `target` as well; False if `target` exists already: the first file stays."""
    return retried(lambda: _link(partial, target), patience_s)


def _link(partial: Path, target: Path) -> bool:
    try:
        os.link(partial, target)
    except FileExistsError:
        # NFS may report this for its own link: the reply was lost, and the request sent again.
        return partial.samefile(target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        # Without hard links, two tasks that do this at the same moment may both get True. The file is whole in any
        # case.
        if exists(target):
            return False
        replace(partial, target)
    return True


def move(source: Path, target: Path) -> None:
    """Move a file to `target`, also on another file system, and fsync it; succeeds also if the reply is lost.

    It gets the group that a file made there would have, where the folder hands on its group (setgid).
    """

    def put() -> None:
        try:
            shutil.move(source, target, _copy)
        except FileNotFoundError:
            if not exists(target, 0.0):
                raise
        except OSError as error:
            if error.errno in FULL:
                error.filename, error.filename2 = str(target), None  # an error of a copy names both, the source first
            raise
        folder = target.parent.stat()
        with open(target, "rb") as moved:  # a copy, if it comes from another file system
            if folder.st_mode & stat.S_ISGID and os.fstat(moved.fileno()).st_gid != folder.st_gid:
                try:
                    os.fchown(moved.fileno(), -1, folder.st_gid)
                except OSError as error:  # a file that is made there may belong to it, all the same
                    if error.errno not in _NO_OTHER_GROUP:
                        raise
            os.fsync(moved.fileno())

    retried(put)


def _copy(source: str, target: str) -> None:
    """Copy a file with its time and mode; `shutil.copy2` fails where a share refuses chmod, whatever the mode is."""
    shutil.copyfile(source, target)
    with naming(target), open(target, "rb") as copy:
        found, made = os.stat(source), os.fstat(copy.fileno())
        os.utime(copy.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        if (mode := stat.S_IMODE(found.st_mode)) != stat.S_IMODE(made.st_mode):
            give_mode(copy.fileno(), mode)


def give_mode(fd: int, mode: int) -> None:
    """Set the mode of an open file, also where the file system refuses to, if others may do no more than asked for.

    Shares and FAT may have the same mode for all files; with access lists alone there is no chmod.
    """
    try:
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in _NO_MODES or os.fstat(fd).st_mode & ~mode & 0o066:
            raise


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def exists(path: Path, patience_s: float = PATIENCE_S) -> bool:
    """Whether there is a file of that name. Unlike pathlib's it raises errors that persist.

    The file is opened if possible: an NFS client answers `stat` from a cache, but asks the server to open a file.
    """

    def look() -> bool:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):  # or what should be its folder is a file
            return False
        except OSError as error:
            if error.errno in (errno.EACCES, errno.ELOOP, errno.ENXIO):
                return True
            raise
        return True

    return retried(look, patience_s)
