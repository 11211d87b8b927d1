"""Default access control lists (acl(5)), which replace the umask for all that is made in a folder."""

import errno
import os
import struct

import pytest

_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF


def let_all_write_below(*folders, user=None):
    """Give the group, and a user by uid, all permissions on what is made in the folders, and others none."""
    named = [] if user is None else [(_USER, 7, user), (_MASK, 7, _NOBODY)]
    entries = sorted([(_OWNER, 7, _NOBODY), (_GROUP, 7, _NOBODY), (_OTHERS, 0, _NOBODY), *named])
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    for folder in folders:
        try:
            os.setxattr(folder, "system.posix_acl_default", content)
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            pytest.skip(f"the file system of {folder} has no access control lists")
