"""The messages of FUSE, between the kernel and /dev/fuse: linux/fuse.h, protocol 7.31."""

from __future__ import annotations

import os
import stat
import struct
from enum import IntEnum

ROOT = 1
"""The number of the mounted folder itself."""
MAX_WRITE = 1 << 17
BUFFER_SIZE = MAX_WRITE + 4096
IN_HEADER = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
OUT_HEADER = struct.Struct("<IiQ")  # length, -errno, unique
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
ENTRY = struct.Struct("<QQQQII")  # node, generation, entry_valid, attr_valid, and both in nanoseconds
ATTRIBUTES_OUT = struct.Struct("<QII")
OPENED = struct.Struct("<QII")
INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
READ_IN = struct.Struct("<QQI")
WRITE_IN = struct.Struct("<QQIIQII")
SETATTR_IN = struct.Struct("<IIQQQQQQIIIIIIII")
DIRECT_IO = 1
"""The flag of an opened file of which the kernel shall keep no page."""


class Op(IntEnum):
    """The requests that are answered; the kernel is told ENOSYS of others, and does without."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    RENAME2 = 45


def attributes(found: os.stat_result, mtime_ns: int, ctime_ns: int) -> bytes:
    """A fuse_attr."""
    second = 1_000_000_000
    times = (found.st_atime_ns // second, mtime_ns // second, ctime_ns // second)
    parts = (found.st_atime_ns % second, mtime_ns % second, ctime_ns % second)
    owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev)
    return ATTRIBUTES.pack(found.st_ino, found.st_size, found.st_blocks, *times, *parts, *owner, 4096, 0)


def dirent(number: int, name: str, offset: int, kind: int) -> bytes:
    """A fuse_dirent, padded."""
    encoded = os.fsencode(name)
    padding = -len(encoded) % 8
    return struct.pack("<QQII", number, offset, len(encoded), kind >> 12) + encoded + bytes(padding)


def names(body: bytes) -> list[str]:
    """The names, each ended by a NUL, at the end of a request."""
    return [os.fsdecode(name) for name in body.split(b"\0")[:-1]]


def is_folder(found: os.stat_result) -> bool:
    """Whether these are the attributes of a folder."""
    return stat.S_ISDIR(found.st_mode)
