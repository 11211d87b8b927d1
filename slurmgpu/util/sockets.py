"""Places for sockets: a folder whose path is short enough for unix sockets, and a free port."""

from __future__ import annotations

import os
import socket
import tempfile

MOST_BYTES = 107
"""The longest path of a unix socket: unix(7)."""
NAME_BYTES = 60
"""Room for a folder such as slurmgpu-12345678 and a file name such as a UUID, with the slashes before them."""


def socket_folder() -> str:
    """The folder for temporary files; /tmp where its path leaves a socket no room for a name."""
    found = tempfile.gettempdir()
    return found if len(os.fsencode(found)) <= MOST_BYTES - NAME_BYTES else "/tmp"


def free_port() -> int:
    """A port that is free now on all addresses of this machine."""
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
        return port
