"""Remember on this node that a process ended while it tried CUDA graphs, so that the next one does not try them.

A GPU fault may end the process, or break its CUDA context; the worker that replaces it must not do the same. A mark is
a file that its process locks; an unlocked mark belongs to an ended process. It holds for the same job, and for an hour:
nobody removes the mark of a killed process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from slurmgpu.util.own_files import is_own_folder

log = logging.getLogger(__name__)

KEEP_S = 3600.0
ENDED = "a process on this node ended while it tried them"


class Marks:
    """The marks of one model, with one set of versions, on one kind of device, in this job."""

    def __init__(self, *what: str) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"slurmgpu-graphs-{os.getuid()}"
        name = "\n".join([*what, os.environ.get("SLURM_JOB_ID", "")])
        self._name = hashlib.sha256(name.encode()).hexdigest()[:16]

    def found(self) -> str | None:
        """The text of the mark that an ended process left; None if there is none."""
        if not is_own_folder(self._folder):
            return None
        for path in sorted(self._folder.glob(f"{self._name}-*")):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > KEEP_S:
                    path.unlink()
                elif _is_unlocked(path):
                    return path.read_text(encoding="utf-8").strip() or ENDED
        return None

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Hold a mark, which stays if this process ends inside the context."""
        mark = self._make(ENDED)
        try:
            yield
        finally:
            if mark is not None:
                mark[0].unlink(missing_ok=True)
                os.close(mark[1])

    def leave(self, reason: str) -> None:
        """Leave a mark for the process that replaces this one."""
        mark = self._make(reason)
        if mark is not None:
            os.close(mark[1])

    def _make(self, text: str) -> tuple[Path, int] | None:
        """A locked file and its descriptor; None, with a line in the log, if it cannot be created."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not is_own_folder(self._folder):
                raise PermissionError(f"{self._folder} is not a folder that only you may write")
            new = self._folder / f"new-{uuid.uuid4().hex}"
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # before it gets the name that others look for
            os.write(descriptor, text.encode())
            path = self._folder / f"{self._name}-{uuid.uuid4().hex}"
            new.rename(path)
        except OSError as error:
            log.info("cannot mark the try of CUDA graphs on this node: %s", error)
            return None
        return path, descriptor


def _is_unlocked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
