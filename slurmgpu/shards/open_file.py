"""Read an open file at any place, for the rows of a merged file."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

from slurmgpu.util.regular_files import naming, open_regular
from slurmgpu.util.shared_files import is_transient, retried


class Identity(NamedTuple):
    """The identity of a file; another file at its path, or the same one after a change, differs. `mtime` in ns."""

    device: int
    inode: int
    size: int
    mtime: int


class ReplacedFileError(Exception):
    """Another file was at the path when a file had to be opened again."""

    def __init__(self, before: Identity, now: Identity) -> None:
        sizes = f"it has {now.size} bytes, but had {before.size} a moment ago"
        super().__init__(sizes if now.size != before.size else "it was replaced while it was read")


class OpenFile:
    """Reads a regular file at any place, from any thread and after a fork; closed when nothing refers to it.

    Transient errors are retried for `patience_s`, then raised. A stale NFS handle stays stale, so the file is opened
    again: ReplacedFileError unless it is the `same` as before. UnusableFileError for anything but a regular file.
    """

    def __init__(
        self,
        path: os.PathLike[str],
        patience_s: float,
        same: Callable[[Identity, Identity], bool],
    ) -> None:
        self.path, self._patience_s, self._same = path, patience_s, same
        self._fd, self.identity = retried(lambda: _opened(path), patience_s)
        self._close = weakref.finalize(self, os.close, self._fd)

    def __reduce__(self) -> str:
        raise TypeError(f"an open file cannot be pickled; open {self.path} in each process")

    def close(self) -> None:
        """Close the file now; nothing more can be read."""
        self._close()

    def read_into(self, found: memoryview, start: int) -> int:
        """Fill `found` with the bytes from `start` on; returns their number, which is less at the end of the file."""
        n_found = 0
        while n_found < len(found):
            rest, place = found[n_found:], start + n_found
            with naming(self.path):
                n_read = retried(lambda: self._read(rest, place), self._patience_s)  # noqa: B023  (called at once)
            if not n_read:
                break
            n_found += n_read
        return n_found

    def forget_cache(self) -> None:
        """Make the next read bypass the page cache, if the kernel honours the hint."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _read(self, into: memoryview, place: int) -> int:
        try:
            return os.preadv(self._fd, [into], place)
        except OSError as error:
            if is_transient(error):
                self._reopen(error)
            raise

    def _reopen(self, failed: OSError) -> None:
        try:
            fd, identity = _opened(self.path)
        except OSError:
            return  # the next try raises
        try:
            if not self._same(self.identity, identity):
                raise ReplacedFileError(self.identity, identity) from failed
            os.dup2(fd, self._fd, inheritable=False)  # other threads go on with the number they have
        finally:
            os.close(fd)


def _opened(path: os.PathLike[str]) -> tuple[int, Identity]:
    fd = open_regular(path)
    try:
        found = os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd, Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
