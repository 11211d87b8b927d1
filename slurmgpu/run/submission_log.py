"""submissions.jsonl: its lines are read and merged by submission, and appended one process at a time."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import cast

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run import private
from slurmgpu.run.lock import hold
from slurmgpu.run.submissions import ENDS, DirectoryId, SubmissionLine, as_seen_in, directory_id
from slurmgpu.util.regular_files import naming
from slurmgpu.util.shared_files import exists, may, read_bytes, retried
from slurmgpu.util.typed_json import check_kinds
from slurmgpu.util.users import name_in_words

log = logging.getLogger(__name__)

RECORDING_S = 20.0
"""Appending a line takes less time; a process that holds the lock longer is dead."""
N_APPENDED = 3
_NEVER_NULL = {"submission", "executor", "state"}
"""Keys of a line of submissions.jsonl."""


def read_submissions(folder: Path) -> list[SubmissionLine]:
    """The submissions of the run in `folder`; see `Run.submissions`."""
    merged: dict[int, SubmissionLine] = {}
    try:
        lines = read_bytes(folder / "submissions.jsonl").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            value = json.loads(line)
            if isinstance(value, dict):
                check_kinds(value, SubmissionLine, _NEVER_NULL & value.keys())
        except (ValueError, RecursionError):
            continue  # blank, cut short by a full disk or a kill, or not what a line may hold
        if isinstance(value, dict) and type(value.get("submission")) is int:
            merged.setdefault(value["submission"], cast(SubmissionLine, {})).update(cast(SubmissionLine, value))
    # A submission whose first line is damaged cannot be used.
    found = [line for _, line in sorted(merged.items()) if "executor" in line and "state" in line]
    # The directory does not matter for submissions that have ended: `list` reads it for few of many runs.
    own: DirectoryId = directory_id(folder) if any(line["state"] not in ENDS for line in found) else {}
    return [as_seen_in(line, own) for line in found]


def append_submission(folder: Path, value: SubmissionLine) -> None:
    """Append a line to the submissions of the run in `folder`; see `Run.record_submission`."""
    own: DirectoryId = directory_id(folder) if "executor" in value else {}
    path = folder / "submissions.jsonl"
    if exists(path) and not may(path, os.W_OK):
        if "executor" in value:
            owner = name_in_words(path.stat().st_uid)
            raise SlurmGPUError(f"Only {owner} may write {path}: have {owner} submit this run.")
        log.warning("%s belongs to another user, so this is not recorded: %s", path, value)
        return
    with hold(folder / ".recording", "recording", patient=True, patience_s=RECORDING_S):
        shown = private.keep(folder, str(value["submission"]), value)
        line = json.dumps({**shown, **own}).encode() + b"\n"
        for _ in range(N_APPENDED):
            retried(lambda: _append(path, line))
            if line in read_bytes(path).splitlines(keepends=True):
                return
    raise SlurmGPUError(f"A line that was written to {path} is missing from it: its file system loses data.")


def _append(path: Path, line: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with naming(path), os.fdopen(fd, "a+b") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            line = b"\n" + line  # the line before was cut short
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
