"""Access control lists (acl(5)): of files, and default ones, which replace the umask for what is made in a folder."""

import errno
import os
import struct

import pytest

_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF


def let_all_write_below(*folders, user=None):
    """Give the group, and a user by uid, all permissions on what is made in the folders, and others none."""
    named = [] if user is None else [(_USER, 7, user), (_MASK, 7, _NOBODY)]
    for folder in folders:
        _set(folder, "system.posix_acl_default", [(_OWNER, 7, _NOBODY), (_GROUP, 7, _NOBODY), *named])


def let_user_read(path, user):
    """Let a user, by uid, read a file, which neither its group nor others can."""
    entries = [(_OWNER, 6, _NOBODY), (_USER, 4, user), (_GROUP, 0, _NOBODY), (_MASK, 4, _NOBODY)]
    _set(path, "system.posix_acl_access", entries)


def _set(path, name, entries):
    entries = sorted([*entries, (_OTHERS, 0, _NOBODY)])
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, name, content)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip(f"the file system of {path} has no access control lists")
