"""The first process of a pretended node: it mounts the file system, and answers for it until the node is gone."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

from .client import Behaviour, Client
from .faults import Faults

MS_NOSUID, MS_NODEV = 2, 4


def mount(target: Path) -> int:
    """Mount in this process's namespace; the descriptor of /dev/fuse to answer by."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    given = (b"pretend_nfs", os.fsencode(target), b"fuse.pretend_nfs", MS_NOSUID | MS_NODEV, options.encode())
    if libc.mount(*given):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))
    return fd


def _end_with_the_test() -> None:
    """End when nobody holds the other end of standard input any more; the node's other processes end with it."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Be a node, as standard input's JSON says; a line "mounted" tells that it is there."""
    given = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the first process of a namespace inherits orphans
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.umask(0)
    socket.sethostname(given["name"])
    faults = Faults(given["name"], given["seed"], given["rates"], Path(given["log"]), Path(given["orders"]))
    client = Client(Path(given["server"]), Behaviour(**given["behaviour"]), faults)
    fd = mount(Path(given["target"]))
    print("mounted", flush=True)
    threading.Thread(target=_end_with_the_test, daemon=True).start()
    client.serve(fd)


if __name__ == "__main__":
    main()
