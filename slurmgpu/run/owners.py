"""Whose a run is: who may write it, and whose word is executed by those who work on it.

What run.json and submissions.jsonl say is executed as whoever computes, merges or exports: the workload's code, images,
`setup` and `on_end`. So it is believed only where nobody but that user, or root, can have written it, or where that
user has said that whoever may write there is trusted: `--trust`, or SLURMGPU_TRUST in the environment.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.shared_files import OTHERS_WRITE, exists, is_own, may, retried

if TYPE_CHECKING:
    from slurmgpu.run.directory import Run

ENVIRON = "SLURMGPU_TRUST"
"""The variable that names the run directory whose writers are trusted; tasks and jobs inherit it."""


def trust(folder: Path) -> None:
    """Trust whoever can write in a run directory, here and in what this process starts."""
    os.environ[ENVIRON] = str(folder.expanduser().resolve())


def is_trusted(folder: Path) -> bool:
    """Whether this user has said so of that run directory."""
    named = os.environ.get(ENVIRON)
    return bool(named) and Path(named or "").expanduser().resolve() == folder.resolve()


def name_of(uid: int) -> str:
    """What a user is called here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"the user with the number {uid}"


def why_foreign(run: Run, others: Iterable[Path] = ()) -> str | None:
    """Why what a run says may be another user's word, as a sentence; None if it is this user's, or is trusted.

    It is asked of run.json as it was when the run was opened, and of `others`, as far as they are there.
    """
    if is_trusted(run.folder):
        return None
    found = [(run.folder / "run.json", run.status or retried((run.folder / "run.json").lstat))]
    found += [(path, retried(path.lstat)) for path in others if exists(path)]
    for path, status in found:
        if not is_own(status.st_uid, path.parent):
            return (
                f"{path} is {name_of(status.st_uid)}'s: this would run what {name_of(status.st_uid)} has written as you"
            )
        if status.st_mode & OTHERS_WRITE:
            mode = stat.S_IMODE(status.st_mode)
            return (
                f"others may write {path} (mode {mode:04o}), and what it says is run as you: "
                f"`chmod go-w {shlex.quote(str(path))}` once you have seen that it is as you have left it"
            )
    return None


def refuse_foreign(run: Run, to_do: str, others: Iterable[Path] = ()) -> None:
    """Raise a sentence where `to_do` would run what another user can have written."""
    if why := why_foreign(run, others):
        raise SlurmGPUError(
            f"You cannot {to_do} like this: {why}. If you trust whoever may write there: --trust, "
            f"or {ENVIRON}={run.typed} in the environment."
        )


def refuse_unwritable(run: Run, to_do: str, *, computes: bool = False, merges: bool = False) -> None:
    """Raise a sentence unless this user may write all that `to_do` writes, before any of it is done.

    Its owner is not asked: what fails then is the file system's, or is repaired by chmod.
    """
    owner = retried(run.folder.stat).st_uid
    if os.geteuid() == owner or (obstacle := _obstacle(run, computes=computes, merges=merges)) is None:
        return
    name, copy = name_of(owner), shlex.quote(f"MY-{run.name}")
    raise SlurmGPUError(
        f"{run.folder} is {name}'s, and you cannot {to_do}: {obstacle}. "
        f"Have {name} do it, or do it in a copy of your own: cp -r {run.typed} {copy}"
    )


def refuse_anothers(run: Run, line: Mapping[str, Any]) -> None:
    """Raise a sentence where what a submission has at work is another user's, whom alone the system lets stop it."""
    if (uid := line.get("uid", os.getuid())) != os.getuid() != 0:
        name = name_of(uid)
        raise SlurmGPUError(
            f"Submission {line['submission']} of {run.folder} is {name}'s, and so is what it has at work: "
            f"have {name} type `slurmgpu cancel {run.typed}`."
        )


def _obstacle(run: Run, *, computes: bool, merges: bool) -> str | None:
    """What keeps this user from writing what is to be written, in words."""
    changed = [run.folder, run.claims.folder, run.shards, run.tasks]
    added = [run.logs, run.folder / "telemetry"] if computes else []
    for folder in (*changed, *added):
        if not may(folder, os.W_OK | os.X_OK):
            return f"you may not write in {folder}"
    if merges and _keeps_others(run.folder):
        for name in ("merged.h5", "report.json", "report.html", "recompute.json"):
            path = run.folder / name
            if exists(path) and (owner := retried(path.lstat).st_uid) != os.geteuid():
                return f"{path} is {name_of(owner)}'s to replace, as its folder has the sticky bit"
    for folder in changed[1:]:
        if _keeps_others(folder):
            return f"you cannot remove what others have put into {folder}, as it has the sticky bit"
    path = run.folder / "submissions.jsonl"
    told = computes or any(line["state"] != "ended" for line in run.submissions())
    if told and exists(path) and not may(path, os.W_OK):
        return f"you may not write {path}"
    return None


def _keeps_others(folder: Path) -> bool:
    """Whether what others have put into a folder is theirs to remove or replace, and not this user's."""
    status = retried(folder.stat)
    return bool(status.st_mode & stat.S_ISVTX) and os.geteuid() not in (0, status.st_uid)
