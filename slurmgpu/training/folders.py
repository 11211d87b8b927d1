"""Folders of checkpoints that are moved aside, taken back and removed, so that one is whole whenever a process dies."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path

from slurmgpu.training.written import unique_partial

log = logging.getLogger(__name__)

REPLACED = ".replaced"


def set_aside(path: Path) -> None:
    """Give a damaged checkpoint a name under which none is looked for."""
    aside = path.with_name(f"{path.name}.damaged")
    remove(aside)
    try:
        path.rename(aside)
    except OSError as error:
        log.warning("%s stays where it is: %s", path, error)


def make_way(path: Path) -> None:
    """Move the checkpoint that is to be replaced aside, where the next process finds it if this one dies here."""
    aside = path.with_name(path.name + REPLACED)
    remove(aside)
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)


def take_back(aside: Path) -> None:
    """Undo half a replacement, or end a whole one."""
    path = aside.with_name(aside.name.removesuffix(REPLACED))
    if path.is_dir():
        remove(aside)
    else:
        aside.rename(path)


def remove(path: Path) -> None:
    """Remove a file or a folder; a folder under a name at which nobody looks, so that no half of it is taken for it."""
    gone = unique_partial(path).with_suffix(".removed")
    try:
        path.rename(gone)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
        return
    if gone.is_dir():
        shutil.rmtree(gone, ignore_errors=True)
    else:
        gone.unlink(missing_ok=True)
