"""The sockets on which processes listen, from /proc/net/tcp: proc(5)."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

LISTEN = "0A"


def listeners(pids: Iterable[int]) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """The addresses and ports on which these processes wait for TCP connections."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(fd))  # what it names is no path
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                    found.add(_address(fields[1]))
    return found


def _address(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    address, port = text.split(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return ip_address(socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)), int(port, 16)
