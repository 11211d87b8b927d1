"""Open regular files: a link, a FIFO, a socket or a device in the place of one is refused before it is read."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator


class UnusableFileError(OSError):
    """A path leads to no regular file, or to one of a size that makes no sense."""

    def __init__(self, path: os.PathLike[str] | str, what: str) -> None:
        super().__init__(errno.EINVAL, what, os.fspath(path))


def open_regular(path: os.PathLike[str] | str) -> int:
    """A file descriptor to read a regular file; UnusableFileError for a link, a FIFO, a socket or a device.

    It never waits for the writer of a FIFO.
    """
    return _open(path, os.O_RDONLY)


def _open(path: os.PathLike[str] | str, flags: int) -> int:
    return _open_checked(path, flags | os.O_NOFOLLOW)


def _open_checked(path: os.PathLike[str] | str, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise UnusableFileError(path, "it is a symbolic link, not a file") from error
        if error.errno == errno.ENXIO:
            raise UnusableFileError(path, "it is a FIFO, a socket or a device, not a file") from error
        raise
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode) and not flags & os.O_NOFOLLOW:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise UnusableFileError(path, f"it is {_kind(mode)}, not a file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(path: os.PathLike[str] | str) -> io.BufferedReader:
    """A regular file, open for reading; UnusableFileError for anything else."""
    return open(path, "rb", opener=_open)


def open_given(path: os.PathLike[str] | str) -> io.BufferedReader:
    """A regular file that a user has named, also through a link, open for reading; UnusableFileError for anything else.

    A folder is an IsADirectoryError.
    """
    return open(path, "rb", opener=_open_checked)


def open_to_append(path: os.PathLike[str] | str) -> io.BufferedWriter:
    """A regular file, open for appending, created if missing; UnusableFileError for anything else."""
    return open(path, "ab", opener=_open)


def open_to_overwrite(path: os.PathLike[str] | str) -> io.BufferedRandom:
    """A regular file, open at its beginning with its content; UnusableFileError for anything else."""
    return open(path, "r+b", opener=_open)


def open_new(path: os.PathLike[str] | str) -> int:
    """A file descriptor to write a file that this process alone makes; FileExistsError if there is one.

    SFTP has one error for a file that exists and one that may not be made, and sshfs makes it EPERM.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except PermissionError as error:
        if error.errno == errno.EPERM and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path)) from error
        raise


@contextlib.contextmanager
def naming(path: os.PathLike[str] | str) -> Iterator[None]:
    """Add `path` to an OSError of the block that names no file, such as one of a read by descriptor."""
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
