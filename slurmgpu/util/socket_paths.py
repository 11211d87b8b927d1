"""A folder for unix sockets, whose paths are short."""

from __future__ import annotations

import os
import tempfile

MOST_BYTES = 107
"""The longest path of a unix socket: unix(7)."""
NAME_BYTES = 40
"""Room for a file name such as a UUID, and the slash before it."""


def socket_folder() -> str:
    """The folder for temporary files; /tmp where its path leaves a socket no room for a name."""
    found = tempfile.gettempdir()
    return found if len(os.fsencode(found)) <= MOST_BYTES - NAME_BYTES else "/tmp"
