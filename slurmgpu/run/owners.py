"""Check who may write a run, because its files name what is executed.

run.json and submissions.jsonl name what runs as the user who computes, merges or exports: the workload's code, images,
`setup` and `on_end`. So they are used only if nobody but that user or root can have written them, or if the user trusts
all who may write there: `--trust`, or SLURMGPU_TRUST in the environment.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util import users
from slurmgpu.util.own_files import OTHERS_WRITE, is_own, why_not_own
from slurmgpu.util.process_wide import own_umask
from slurmgpu.util.shared_files import exists, may, retried
from slurmgpu.util.users import name_in_words, resolved

if TYPE_CHECKING:
    from slurmgpu.run.directory import Run

ENVIRON = "SLURMGPU_TRUST"
"""This variable names the run directory whose writers are trusted; tasks and jobs inherit it."""
LEFT_ALONE = "%s is not stopped: only files that others can write say that it belongs to the run (%s)"
"""The message about a process or a job that is not ended, with `why_forgeable`."""


def trust(folder: Path) -> None:
    """Trust all who may write in a run directory, in this process and its children."""
    os.environ[ENVIRON] = str(resolved(folder))


def is_trusted(folder: Path) -> bool:
    """Whether the user trusts all who may write in this run directory."""
    named = os.environ.get(ENVIRON)
    return bool(named) and resolved(named or "") == folder.resolve()


def is_owner(run: Run) -> bool:
    """Whether the run directory is this user's."""
    return retried(run.folder.stat).st_uid == os.geteuid()


def why_foreign(run: Run, others: Iterable[Path] = ()) -> str | None:
    """Why another user may have written a run's files, as a sentence; None if not, or if these are trusted.

    Checks run.json as it was when the run was opened, and those of the files `others` that exist.
    """
    if is_trusted(run.folder):
        return None
    found = [(run.folder / "run.json", run.status or retried((run.folder / "run.json").lstat))]
    found += [(path, retried(path.lstat)) for path in others if exists(path)]
    for path, status in found:
        if not is_own(status.st_uid, path.parent):
            return (
                f"{path} belongs to {(name := name_in_words(status.st_uid))}: this would run, as you, what {name} wrote"
            )
        if status.st_mode & OTHERS_WRITE:
            mode = stat.S_IMODE(status.st_mode)
            return (
                f"others may write {path} (mode {mode:04o}), and what it names would run as you. "
                f"Check its content, then `chmod go-w {shlex.quote(str(path))}`"
            )
    return None


def refuse_foreign(run: Run, to_do: str, others: Iterable[Path] = ()) -> None:
    """Raise SlurmGPUError if `to_do` would run what another user can have written."""
    if why := why_foreign(run, others):
        raise SlurmGPUError(
            f"You cannot {to_do} like this: {why}. If you trust all who may write there, use --trust, "
            f"or set {ENVIRON}={run.typed} in the environment."
        )


def why_forgeable(run: Run, *others: Path) -> str | None:
    """Why others may have forged the list of the run's processes and jobs, naming the file; None if they cannot have.

    If so, a process or a job in that list is ended only if something else shows that it belongs to the run. `others`
    are further folders that name some.
    """
    folder = retried(run.folder.stat)
    if not (folder.st_mode & stat.S_ISVTX and is_own(folder.st_uid, run.folder)):  # they could replace files in it
        others = (run.folder, *others)
    for path in (run.folder / "submissions.jsonl", *others):
        if exists(path) and (why := why_not_own(retried(path.stat), path.parent)):
            return f"{path}: {why}"
    return None


def refuse_unwritable(run: Run, to_do: str, *, computes: bool = False, merges: bool = False) -> None:
    """Raise SlurmGPUError unless this user may write all that `to_do` writes; called before it begins.

    The owner is not checked, because owners can change the modes.
    """
    owner = retried(run.folder.stat).st_uid
    if os.geteuid() == owner or (obstacle := _obstacle(run, owner, computes=computes, merges=merges)) is None:
        return
    name, copy = name_in_words(owner), shlex.quote(f"MY-{run.name}")
    raise SlurmGPUError(
        f"{run.folder} belongs to {name}, and you cannot {to_do}: {obstacle}. "
        f"Have {name} do it, or do it in your own copy: cp -r {run.typed} {copy}"
    )


def refuse_other_users(run: Run, line: Mapping[str, Any]) -> None:
    """Raise SlurmGPUError if a submission belongs to another user, who alone can cancel it."""
    if (uid := line.get("uid", os.getuid())) != os.getuid() != 0:
        name = name_in_words(uid)
        raise SlurmGPUError(
            f"Submission {line['submission']} of {run.folder} and its tasks belong to {name}: "
            f"have {name} type `slurmgpu cancel {run.typed}`."
        )


def _obstacle(run: Run, owner: int, *, computes: bool, merges: bool) -> str | None:
    changed = [run.folder, run.claims.folder, run.shards, run.tasks]
    added = [run.logs, run.folder / "telemetry"] if computes else []
    for folder in (*changed, *added):
        if not may(folder, os.W_OK | os.X_OK):
            return f"you may not write in {folder}"
    if merges and _keeps_others(run.folder):
        for name in ("merged.h5", "report.json", "report.html", "recompute.json"):
            path = run.folder / name
            if exists(path) and (holder := retried(path.lstat).st_uid) != os.geteuid():
                return f"only {name_in_words(holder)} may replace {path}, because its folder has the sticky bit"
    for folder in changed[1:]:
        if _keeps_others(folder):
            return f"you cannot remove files of others from {folder}, because it has the sticky bit"
    path = run.folder / "submissions.jsonl"
    told = computes or any(line["state"] != "ended" for line in run.submissions())
    if told and exists(path) and not may(path, os.W_OK):
        return f"you may not write {path}"
    if _hides_from(owner, run.shards):
        return (
            f"{name_in_words(owner)} could not read what you write there with the umask {own_umask():04o}; "
            f"type `umask 0022` first"
        )
    return None


def _hides_from(owner: int, folder: Path) -> bool:
    """Whether a user other than root cannot read what this process writes in a folder, because of the umask."""
    umask = own_umask()
    if owner == 0 or not umask & stat.S_IROTH or _has_default_acl(folder):
        return False
    status = retried(folder.stat)
    group = status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()
    return bool(umask & stat.S_IRGRP) or group not in users.groups_of(owner)


def _has_default_acl(folder: Path) -> bool:
    """Whether an access control list decides who may read new files in a folder, instead of the umask: acl(5)."""
    try:
        return "system.posix_acl_default" in os.listxattr(folder)
    except OSError:  # a file system without such attributes
        return False


def _keeps_others(folder: Path) -> bool:
    """Whether this user cannot remove or replace files of others in a folder, because of its sticky bit."""
    status = retried(folder.stat)
    return bool(status.st_mode & stat.S_ISVTX) and os.geteuid() not in (0, status.st_uid)
