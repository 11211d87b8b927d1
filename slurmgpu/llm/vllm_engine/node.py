"""Manage vLLM's compiled code, ports and shared memory on a node.

Each engine takes one of the user's numbered places on the node, and keeps it while it lives. So engines that start
together neither write into one cache nor take each other's ports; and the next engine in a place removes shared memory
that a killed engine has left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import socket
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util import shared_memory
from slurmgpu.util.exceptions import message_of
from slurmgpu.util.own_files import is_own_folder

log = logging.getLogger(__name__)

FIRST_PORT, PORTS_EACH, N_BLOCKS = 20_000, 100, 120
"""Blocks of ports below Linux's range for outgoing connections, which starts at 32768 (ip(7), ip_local_port_range)."""
STRIDE = 41
"""Blocks between places, so that the next job's block in the first place differs from this job's in the second."""
N_STARTS = 3
"""How often an engine is started if others take its ports."""
LOOK_S = 0.5

T = TypeVar("T")


class NodePlace:
    """A place of one engine on this node, until `close` or the end of this process."""

    def __init__(self) -> None:
        base = _own_folder(Path(tempfile.gettempdir()) / f"slurmgpu-vllm-{os.getuid()}")
        self._lock, self._number = _first_free(base)
        self.folder = base / str(self._number)
        self.folder.mkdir(exist_ok=True)
        self._list = self.folder / "shared-memory"
        self._names: set[str] = set()
        self._before = shared_memory.used_by(os.getpid())
        if self._list.exists():
            shared_memory.remove(self._list.read_text(encoding="utf-8").split("\n"))
            self._list.unlink()

    @property
    def cache(self) -> Path:
        """The folder for compiled code, which stays for the next engine in this place."""
        return self.folder / "cache"

    def port(self, start: int) -> int:
        """A free port, the first of a block; a different one for each `start`."""
        # If each job has its own /tmp, all are in the first place; jobs of an array have consecutive numbers.
        job = os.environ.get("SLURM_JOB_ID", "")
        own = zlib.crc32(str(os.getuid()).encode()) + (int(job) if job.isdecimal() else 0) + STRIDE * self._number
        first = FIRST_PORT + own % N_BLOCKS * PORTS_EACH + start * PORTS_EACH // N_STARTS
        return next((port for port in range(first, first + PORTS_EACH // N_STARTS) if is_free(port)), first)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the shared memory of the engine that starts within the context, in case it is killed."""
        done = threading.Event()

        def record() -> None:
            while not done.wait(LOOK_S):
                self._record()

        recorder = threading.Thread(target=record, daemon=True)
        recorder.start()
        try:
            yield
        finally:
            done.set()
            recorder.join()
            self._record()

    def close(self) -> None:
        """Remove the shared memory of an ended engine, and free the place."""
        shared_memory.remove(
            name for name in self._names if not name.startswith("sem.")
        )  # Python removes those when it ends
        self._list.unlink(missing_ok=True)
        os.close(self._lock)

    def _record(self) -> None:
        new = shared_memory.used_by(os.getpid()) - self._before - self._names
        if new:
            self._names |= new
            with open(self._list, "a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in sorted(new))


def start_with_port(make: Callable[[], T], place: NodePlace) -> T:
    """The engine that `make` starts on the ports from VLLM_PORT on; retried on others if another process takes them."""
    for start in range(N_STARTS):
        port = place.port(start)
        os.environ["VLLM_PORT"] = str(port)
        try:
            return make()
        except Exception as error:
            # If processes of the engine fail, only their log says why.
            if start + 1 == N_STARTS or not (_says_in_use(error) or not is_free(port)):
                raise
            log.warning(
                "another process has taken port %d of the engine; starting it again: %s", port, message_of(error)
            )
    raise AssertionError("the last start returns or raises")


def is_free(port: int) -> bool:
    """Whether a process could listen on the port now."""
    with socket.socket() as found:
        try:
            found.bind(("", port))
        except OSError:
            return False
    return True


def _says_in_use(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) == errno.EADDRINUSE or "address already in use" in message_of(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _own_folder(folder: Path) -> Path:
    with contextlib.suppress(FileExistsError):  # a file, or a link that leads nowhere
        folder.mkdir(mode=0o700, exist_ok=True)
    if not is_own_folder(folder):
        raise SlurmGPUError(
            f"{folder}, the folder for vLLM's caches, is not a folder that only you may write. Remove it, or set "
            f"TMPDIR to another folder on this node."
        )
    return folder


def _first_free(base: Path) -> tuple[int, int]:
    """A locked file, and its number."""
    for number in itertools.count():
        lock = os.open(base / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return lock, number
    raise AssertionError("numbers do not end")
