"""The folder in which PyTorch keeps compiled code on a node, one that only this user may write."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from slurmgpu.util.own_files import why_not_own


def take_folder() -> str | None:
    """Name the folder to PyTorch; return why code must not be compiled: another user may have written there.

    Inductor imports what lies in TORCHINDUCTOR_CACHE_DIR, which PyTorch sets to a folder below TMPDIR, named after the
    user. Another user of the node may have made it.
    """
    folder = Path(
        os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/slurmgpu-inductor-{os.getuid()}"
    )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder}, the folder for compiled code, cannot be made: {error.strerror}"
    why = why_not_own(folder.lstat(), folder.parent)
    return f"another user may write {folder}, the folder for compiled code: {why}" if why else None


def take_new_folder() -> None:
    """Name a new folder to PyTorch, which goes with this process."""
    folder = tempfile.mkdtemp(prefix="slurmgpu-inductor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
