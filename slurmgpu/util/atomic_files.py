"""Files that appear whole or not at all: written next to the target, fsynced, renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from slurmgpu.util.regular_files import UnusableFileError, naming, open_to_overwrite
from slurmgpu.util.shared_files import FULL, PATIENCE_S, give_mode, link_first, replace, retried

log = logging.getLogger(__name__)

_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)

_T = TypeVar("_T")


def date_in_whole_seconds(path: Path) -> None:
    """Set a file's modification time to now, in whole seconds, which every copy keeps."""
    now = int(time.time())
    with naming(path):  # os.utime's errors name no file
        os.utime(path, (now, now))


def fsync_dir(path: Path, patience_s: float = PATIENCE_S) -> None:
    """Make renames and links in a directory survive a power loss, on file systems that can sync a directory."""

    def sync() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_FOLDERS:
                raise
        finally:
            os.close(fd)

    retried(sync, patience_s)


def partial_path(path: Path) -> Path:
    """A hidden name next to `path`, ending in `.partial`, that no other process, thread or machine uses.

    It cannot be guessed: in a folder where others may write, a link of that name would redirect the writer.
    """
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary name next to `path`; after an error it is removed, and the error names `path` instead."""
    partial = partial_path(path)
    try:
        yield partial
    except BaseException as error:
        with contextlib.suppress(OSError):  # on a file system that cannot be written
            try:
                partial.unlink()  # not asked first what it is: the status may be what cannot be had
            except (IsADirectoryError, PermissionError):
                shutil.rmtree(partial)
        if isinstance(error, OSError):
            name = error.filename
            if name is None and error.errno in FULL:
                error.filename = str(path)
            elif isinstance(name, str) and Path(name).is_relative_to(partial):
                error.filename = str(path / Path(name).relative_to(partial))
        raise


@contextlib.contextmanager
def whole_file(
    path: Path, *, durable: bool = True, mode: int | None = None, patience_s: float = PATIENCE_S
) -> Iterator[BinaryIO]:
    """A file to write in the block; at the end of the block it replaces `path` in one step.

    A reader sees the old file or the new one, never a part; after an error the old one stays. Without `durable` nothing
    is fsynced: for progress that may be lost if the machine fails. The last step alone is retried, for `patience_s`.
    `mode` sets the permissions of the file, by default those of the umask, and of `keep_readers`.
    """
    with beside(path) as partial:
        if mode is not None:
            partial.touch(mode)  # others could open a file that has more at first
        with open(partial, "wb") as file:
            if mode is not None:
                with naming(path):
                    give_mode(file.fileno(), mode)
            else:
                keep_readers(file.fileno(), path, patience_s)
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        replace(partial, path, patience_s)
    if durable:
        fsync_dir(path.parent, patience_s)


def keep_readers(fd: int, path: Path, patience_s: float = PATIENCE_S) -> None:
    """Let all read an open file who may read the file at `path`, which it will replace, whatever the umask is.

    An access control list is not copied.
    """
    with contextlib.suppress(FileNotFoundError):
        former, new = retried(path.lstat, patience_s), os.fstat(fd)
        of_group = stat.S_IRGRP if former.st_gid == new.st_gid and not _has_access_list(path) else 0
        readers = former.st_mode & (stat.S_IROTH | of_group)
        if stat.S_ISREG(former.st_mode) and readers & ~new.st_mode:
            with naming(path):
                give_mode(fd, stat.S_IMODE(new.st_mode) | readers)


def _has_access_list(path: Path) -> bool:
    """Whether a file has an access control list, of which the group's bits of its mode are the mask (acl(5))."""
    try:
        return "system.posix_acl_access" in os.listxattr(path, follow_symlinks=False)
    except OSError:  # the file system has none
        return False


def write_bytes(
    path: Path, content: bytes, *, durable: bool = True, mode: int | None = None, patience_s: float = PATIENCE_S
) -> None:
    """Write `content` to `path` as `whole_file` does; transient errors are retried for `patience_s`."""

    def write() -> None:
        with whole_file(path, durable=durable, mode=mode, patience_s=0.0) as file:  # all of it is retried
            file.write(content)

    retried(write, patience_s)


def write_new(path: Path, content: bytes) -> bool:
    """Write `content` to `path` in one step; False if the path exists already, which leaves it as it is.

    If the disk gets full, no file of that name is left, and the error names it.
    """
    if os.path.lexists(path):
        return False
    with beside(path) as partial, naming(path):
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # some file systems say only now that they are full
        is_first = link_first(partial, path)
        partial.unlink(missing_ok=True)
    return is_first


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write `value` to `path` as indented JSON, in one step."""
    write_json_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=durable)


def write_json_text(
    path: Path,
    text: str,
    *,
    durable: bool = True,
    in_place_if_full: bool = False,
    patience_s: float = PATIENCE_S,
) -> None:
    """Write JSON to `path`, in one step.

    With `in_place_if_full`, if the disk has no room for a second file, the content is written over the old file, and
    readers may see a part of it.
    """
    # A lone surrogate, from a file name for example, becomes its JSON escape.
    content = text.encode("utf-8", "backslashreplace")
    try:
        write_bytes(path, content, durable=durable, patience_s=patience_s)
    except OSError as error:
        if not in_place_if_full or error.errno not in FULL or not path.exists():
            raise
        try:
            with open_to_overwrite(path) as file:
                file.truncate(file.write(content))
        except UnusableFileError:  # a link, where others may write in the folder, to a file that they may not
            raise error from None


def once_more_if_full(operation: Callable[[], _T]) -> _T:
    """The result of `operation`, retried once after a second if the disk was full: space may be freed."""
    try:
        return operation()
    except OSError as error:
        if error.errno not in FULL:
            raise
        log.warning("tried again in a second: %s", error)
    time.sleep(1.0)
    return operation()
