"""A context in which a test gives up root's privileges, so that permissions apply."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.somebody import USER


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root gets the rights of another user, within a `with` block."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(USER.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        importlib.invalidate_caches()  # else Python's own folders that this user may not enter stay without modules


@contextlib.contextmanager
def locked_folder() -> Iterator[Path]:
    """A folder that nobody but root may enter, in one that everybody may: pytest's own are root's alone."""
    world = Path(tempfile.mkdtemp(prefix="slurmgpu-test-locked-", dir="/tmp"))
    world.chmod(0o755)
    locked = world / "locked"
    locked.mkdir()
    (locked / "file").touch()
    locked.chmod(0)
    try:
        yield locked
    finally:
        locked.chmod(0o755)
        shutil.rmtree(world)
