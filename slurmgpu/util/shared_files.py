"""Files that other machines and other users change: reads that are tried again, listings that are asked for again.

A network file system answers EIO or ESTALE for a moment, shows a folder as it was a minute ago, and reports failure of
an operation that happened when its reply was lost. Nothing here takes one such answer for the truth. What lies where a
file should be may be a link, a FIFO or a device: those are refused before a byte of them is read.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import random
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from slurmgpu.errors import SlurmGPUError

log = logging.getLogger(__name__)

TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EINTR,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EREMOTEIO,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENOLCK,
        errno.ESHUTDOWN,  # Lustre's, while a client that was evicted reconnects
        errno.ENOTCONN,
    }
)
"""What a file system answers that may answer otherwise a moment later."""
PATIENCE_S = 60.0
"""So long an operation is tried again, where the caller names no other time: NFS clients believe a cache no longer."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
BRIEF_PATIENCE_S = 5.0
"""So long where somebody waits at a terminal and can type it again, or where what cannot be read costs itself alone."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
MANY_BYTES = 256 << 20
"""More than any file that slurmgpu reads whole."""

_T = TypeVar("_T")


class UnusableFileError(OSError):
    """What lies at a path is no regular file, or one of a size that makes no sense."""

    def __init__(self, path: os.PathLike[str] | str, what: str) -> None:
        super().__init__(errno.EINVAL, what, os.fspath(path))


def is_transient(error: BaseException) -> bool:
    """Whether an error is of the kind that the same operation may not meet again."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


def retried(operation: Callable[[], _T], patience_s: float = PATIENCE_S) -> _T:
    """What `operation` returns, which is tried again for `patience_s` while it fails with a transient OSError.

    The pauses grow. `operation` must be one that can be repeated after it has happened: the reply may have been lost.
    """
    until, pause = None, FIRST_PAUSE_S
    while True:
        try:
            return operation()
        except OSError as error:
            if not is_transient(error):
                raise
            now = time.monotonic()
            if until is None:
                until = now + patience_s
                log.debug("tried again for up to %.0f s: %s", patience_s, error)
            if now + pause > until:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE_S)


def cause_raised(operation: Callable[[], _T]) -> _T:
    """What `operation` returns; where a sentence of ours stands for an error of a file system's moment, that is raised.

    So that `retried` knows it.
    """
    try:
        return operation()
    except SlurmGPUError as error:
        if error.__cause__ is not None and is_transient(error.__cause__):
            raise error.__cause__ from error
        raise


def open_regular(path: os.PathLike[str] | str) -> int:
    """A file descriptor to read a regular file by; UnusableFileError for a link, a FIFO, a socket or a device.

    It returns at once, also where opening would wait for a writer.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnusableFileError(path, "it is a symbolic link, not a file") from error
        if error.errno == errno.ENXIO:
            raise UnusableFileError(path, "it is a socket or a device, not a file") from error
        raise
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise UnusableFileError(path, f"it is {_kind(mode)}, not a file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(path: os.PathLike[str] | str, patience_s: float = 0.0) -> io.BufferedReader:
    """A regular file, open to be read, which names itself; UnusableFileError for anything else."""
    return open(path, "rb", opener=lambda name, flags: retried(lambda: open_regular(name), patience_s))


def open_to_append(path: os.PathLike[str] | str) -> io.BufferedWriter:
    """A regular file, open to be appended to, made if there is none; UnusableFileError for anything else."""
    return open(path, "ab", opener=_open_to_append)


def _open_to_append(path: str, flags: int) -> int:
    try:
        # Not O_NONBLOCK alone: with it a FIFO that somebody reads would be opened.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UnusableFileError(path, "it is a link, a FIFO or a device, not a file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnusableFileError(path, "it is a FIFO or a device, not a file")
    return fd


def read_bytes(path: os.PathLike[str] | str, *, max_bytes: int = MANY_BYTES, patience_s: float = PATIENCE_S) -> bytes:
    """The content of a regular file; UnusableFileError for anything else, and for one of more than `max_bytes`."""
    return retried(lambda: _read(path, max_bytes), patience_s)[0]


def read_with_status(path: os.PathLike[str] | str) -> tuple[bytes, os.stat_result]:
    """The content of a regular file as by `read_bytes`, and who can have written it."""
    return retried(lambda: _read(path, MANY_BYTES))


def read_own(path: os.PathLike[str] | str, *, max_bytes: int = MANY_BYTES, patience_s: float = PATIENCE_S) -> bytes:
    """The content of a regular file that nobody but this user, or root, could have written; else UnusableFileError."""
    return retried(lambda: _read(path, max_bytes, own=True), patience_s)[0]


def _read(path: os.PathLike[str] | str, max_bytes: int, own: bool = False) -> tuple[bytes, os.stat_result]:
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if own and (why_not := why_not_own(status, Path(path).parent)):
            raise UnusableFileError(path, why_not)
        size = status.st_size
        if size > max_bytes:
            raise UnusableFileError(path, f"it has {size:,} bytes, more than the {max_bytes:,} that make sense")
        content = b""
        while chunk := file.read(min(max_bytes + 1 - len(content), max(size, 4096))):
            content += chunk
            if len(content) > max_bytes:
                raise UnusableFileError(path, f"it grows beyond the {max_bytes:,} bytes that make sense")
        return content, status


def why_not_own(status: os.stat_result, folder: Path) -> str | None:
    """Why what lies in a folder may be another user's work; None if only this user or root can have written it."""
    if not is_own(status.st_uid, folder):
        return f"it is owned by the user with the number {status.st_uid}, not by you"
    # Of the mode of a link nothing follows. With an ACL the group's bits are the mask, and so the most that it grants.
    if status.st_mode & OTHERS_WRITE and not stat.S_ISLNK(status.st_mode):
        return f"others than its owner may write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def is_own(uid: int, folder: Path) -> bool:
    """Whether what a user owns in a folder is this user's work, or root's."""
    return uid in (os.geteuid(), 0) or uid == _uid_in(folder)


def _uid_in(folder: Path) -> int | None:
    """Who owns what this user makes in a folder: where a file server maps users, somebody else; None if unknown."""
    try:
        fd, path = tempfile.mkstemp(prefix=".", suffix=".owner", dir=folder)
    except OSError:
        return None
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def status_of(path: os.PathLike[str] | str, patience_s: float = PATIENCE_S) -> os.stat_result | None:
    """What `stat` says of a file or a folder, through links; None if there is none, an error that remains is raised."""
    try:
        return retried(lambda: os.stat(path), patience_s)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_file(path: os.PathLike[str] | str, patience_s: float = PATIENCE_S) -> bool:
    """Whether there is a regular file of that name, unlike os.path's also while the file system fails for a moment."""
    return stat.S_ISREG(_mode_of(path, patience_s))


def is_folder(path: os.PathLike[str] | str, patience_s: float = PATIENCE_S) -> bool:
    """The same for a folder."""
    return stat.S_ISDIR(_mode_of(path, patience_s))


def _mode_of(path: os.PathLike[str] | str, patience_s: float) -> int:
    """The mode of what is there, 0 where nothing can be seen to be there."""
    try:
        found = status_of(path, patience_s)
    except (OSError, ValueError) as error:
        if is_transient(error):
            raise
        return 0
    return 0 if found is None else found.st_mode


def may(path: os.PathLike[str] | str, mode: int, patience_s: float = PATIENCE_S) -> bool:
    """Whether this user may read (os.R_OK) or write (os.W_OK) what is there, unlike os.access, which hides errors."""

    def look() -> bool:
        if os.access(path, mode):
            return True
        # It says no to an error as well: what is there answers twice.
        os.stat(path)  # noqa: PTH116
        return os.access(path, mode)

    return retried(look, patience_s)


def make_folder(path: Path, mode: int = 0o777, patience_s: float = PATIENCE_S) -> None:
    """Make a folder, if there is none; its parents are there."""

    def make() -> None:
        try:
            path.mkdir(mode)
        except FileExistsError:  # or the reply was lost
            if not path.is_dir():
                raise

    retried(make, patience_s)


def list_entries(folder: Path, patience_s: float = PATIENCE_S) -> list[os.DirEntry[str]]:
    """What is in a folder, as this machine sees it, in no order; a transient error is tried again."""

    def scan() -> list[os.DirEntry[str]]:
        with os.scandir(folder) as entries:
            return list(entries)

    return retried(scan, patience_s)


def list_anew(folder: Path, patience_s: float = PATIENCE_S) -> list[str]:
    """The names in a folder, as the file server has them now.

    An NFS client keeps a listing as long as the folder's mtime looks the same, which it may do after a change within
    one tick of the server's clock, and then for ever. One's own change drops it: a file is made and removed first.
    Where nothing may be written it is an ordinary listing.
    """
    with contextlib.suppress(PermissionError):
        try:
            retried(lambda: _touch(folder), patience_s)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                raise
    return retried(lambda: os.listdir(folder), patience_s)


def list_names(folder: Path, patience_s: float = PATIENCE_S) -> list[str]:
    """The names in a folder, in order, as this machine sees it; a transient error is tried again."""
    return sorted(retried(lambda: os.listdir(folder), patience_s))


def _touch(folder: Path) -> None:
    path = folder / f".{secrets.token_hex(8)}.anew"
    try:
        with contextlib.suppress(FileExistsError):  # nobody else uses the name: the reply was lost
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def remove(path: Path, patience_s: float = PATIENCE_S) -> bool:
    """Remove a file; False if it was gone already, or if the reply to its removal was lost."""
    try:
        retried(path.unlink, patience_s)
    except FileNotFoundError:
        return False
    return True


def replace(source: Path, target: Path, patience_s: float = PATIENCE_S) -> None:
    """Rename a file over another; also where the reply is lost, and the request that is sent again finds nothing."""
    identity = retried(lambda: _identity(source), patience_s)

    def rename() -> None:
        try:
            os.replace(source, target)  # noqa: PTH105  (tests put another in its place)
        except FileNotFoundError:
            if _identity(target) != identity:
                raise

    retried(rename, patience_s)


def move(source: Path, target: Path, patience_s: float = PATIENCE_S) -> None:
    """Put a file at `target`, also on another file system, and fsync it; the reply to its renaming may be lost."""

    def put() -> None:
        try:
            shutil.move(source, target)
        except FileNotFoundError:
            if not exists(target, 0.0):
                raise
        with open(target, "rb") as moved:  # a copy, if it comes from another file system
            os.fsync(moved.fileno())

    retried(put, patience_s)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def exists(path: Path, patience_s: float = PATIENCE_S) -> bool:
    """Whether there is a file of that name, asked for by its name; an error that remains is raised, unlike pathlib's.

    Opened, where it can be: an NFS client answers `stat` out of a cache, and asks its server when a file is opened.
    """

    def look() -> bool:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in (errno.EACCES, errno.ELOOP, errno.ENXIO):
                return True
            raise
        return True

    return retried(look, patience_s)


@contextlib.contextmanager
def naming(path: os.PathLike[str] | str) -> Iterator[None]:
    """Have an OSError of the block that names no file name `path`: reads by descriptor know none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "no regular file")
