"""The run directory: its submissions, attempts and shards. What is on disk is the only state.

Standard library only, since the worker, `status` and the merge all start here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run import private
from slurmgpu.run.claims import Claims
from slurmgpu.run.frozen_plan import RUN_FORMAT, RUN_VERSION, FileRecord, InputRecord, Plan
from slurmgpu.run.recompute import Recompute, read_recompute
from slurmgpu.run.records import Record, Unread, read_record
from slurmgpu.run.submission_log import append_submission, read_submissions
from slurmgpu.run.submissions import SubmissionLine
from slurmgpu.shards.names import shard_name
from slurmgpu.util.regular_files import UnusableFileError
from slurmgpu.util.shared_files import (
    BRIEF_PATIENCE_S,
    exists,
    list_fresh,
    list_names,
    make_folder,
    read_bytes,
    read_with_status,
)
from slurmgpu.util.users import expanded

log = logging.getLogger(__name__)

MOST_RECORD_BYTES = 64 << 20
"""More than the record of an attempt that published every shard of the largest run."""
FOLDERS = ("claims", "shards", "tasks", "logs", "telemetry")
_SHARD_NAME = re.compile(r"(\d{5}|[1-9]\d{5,})(?:\.r([1-9]\d{0,8}))?\.h5")


@dataclass(frozen=True)
class Run:
    """A run directory and the plan in it.

    `recompute` is set by `computing`. `status` is that of run.json when it was read; None if this process made it.
    """

    folder: Path
    plan: Plan
    recompute: Recompute | None = None
    status: os.stat_result | None = field(default=None, compare=False, repr=False)

    @classmethod
    def open(cls, folder: Path) -> Run:
        """The run in `folder`. SlurmGPUError if there is none, a newer slurmgpu made it, or its plan was changed."""
        folder = expanded(folder).absolute()
        try:
            content, status = read_with_status(folder / "run.json")
            value = json.loads(content)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SlurmGPUError(_no_run(folder, is_file=isinstance(error, NotADirectoryError))) from None
        except UnusableFileError as error:
            raise SlurmGPUError(f"{folder / 'run.json'} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise SlurmGPUError(f"{folder / 'run.json'} is damaged: {error}.") from error
        if not isinstance(value, dict):
            raise SlurmGPUError(f"{folder / 'run.json'} is damaged: it is not a JSON object.")
        if value.get("format") != RUN_FORMAT or value.get("version") != RUN_VERSION:
            raise SlurmGPUError(
                f"{folder / 'run.json'} has the format {value.get('format')!r} version {value.get('version')}; "
                f"this slurmgpu reads {RUN_FORMAT!r} version {RUN_VERSION}. Use the slurmgpu that made the run."
            )
        try:
            plan = Plan.from_json(private.reveal(folder, private.PLAN, value))
        except ValueError as error:
            raise SlurmGPUError(f"{folder / 'run.json'} is damaged: {error}.") from error
        if value.get("fingerprint", plan.fingerprint) != plan.fingerprint:
            raise SlurmGPUError(
                f"{folder / 'run.json'} has the fingerprint {value['fingerprint']!r:.80}, but its values give "
                f"{plan.fingerprint!r}: another version of slurmgpu made it, or somebody edited values that rows "
                "depend on. Use that version, or undo the edit; to compute with other values, submit another run."
            )
        return cls(folder, plan, status=status)

    @property
    def name(self) -> str:
        """The current name of the run directory, which may have been renamed since the run was planned."""
        return self.folder.name if self.folder.name != ".." else self.folder.resolve().name

    @property
    def typed(self) -> str:
        """The run directory quoted for a shell, for commands in messages."""
        return shlex.quote(str(self.folder))

    @cached_property
    def claims(self) -> Claims:
        """The claims of this run."""
        return Claims(self.folder / "claims", self.plan.lease_s)

    @cached_property
    def shards(self) -> Path:
        """The folder of published shards."""
        return self.folder / "shards"

    @property
    def tasks(self) -> Path:
        """The folder of attempts, one JSON file each."""
        return self.folder / "tasks"

    @cached_property
    def logs(self) -> Path:
        """The folder of Submitit's files and the workers' output."""
        return self.folder / "logs"

    @property
    def merged(self) -> Path:
        """The path of the merged file."""
        return self.folder / "merged.h5"

    @property
    def index(self) -> Path:
        """The index of the input's records, made at planning."""
        return self.folder / "input.idx"

    @property
    def input(self) -> InputRecord:
        """The plan's input, with the current paths of files in the run directory."""
        of_plan = self.plan.input
        files: list[FileRecord] = [{**file, "path": str(self.folder / file["path"])} for file in of_plan["files"]]
        return {**of_plan, "files": files}

    def computing(self, submission: int) -> Run:
        """The run as tasks of a submission see it: shards with items to recompute count as not published."""
        return self.recomputing(read_recompute(self.folder), submission)

    def recomputing(self, again: Recompute | None, submission: int) -> Run:
        """The same, with a recompute.json that was read already, which may belong to another submission."""
        is_its_own = again is not None and again.submission == submission
        return dataclasses.replace(self, recompute=again if is_its_own else None)

    def shard_path(self, shard: int) -> Path:
        """The path at which a shard is published; the shard is done if this file exists.

        `00005.h5`, or `00005.r1.h5` for a submission that recomputes items of a published shard.
        """
        return self.revision_path(shard, self.revision_to_make(shard))

    def revision_to_make(self, shard: int) -> int:
        """The revision of a shard that this submission computes; 0 for a shard that was not published before."""
        again = None if self.recompute is None else self.recompute.shards.get(shard)
        return 0 if again is None else again.revision

    def revision_path(self, shard: int, revision: int) -> Path:
        """The path of a revision of a shard; 0 is the shard as it was computed first."""
        return self.shards / shard_name(shard, revision)

    @staticmethod
    def revision_of(name: str) -> tuple[int, int] | None:
        """The shard and the revision of a file such as `00005.r1.h5`; None for any other name."""
        match = _SHARD_NAME.fullmatch(name)
        return None if match is None else (int(match[1]), int(match[2] or 0))

    def items_of(self, shard: int) -> Sequence[tuple[int, int]]:
        """The items of a shard to compute, as spans (start, stop); all of them unless only some are recomputed."""
        again = None if self.recompute is None else self.recompute.shards.get(shard)
        return [self.plan.bounds(shard)] if again is None else again.items

    def shard_files(self, *, fresh: bool = False) -> dict[int, list[int]]:
        """The existing revisions of each published shard, ascending, from one listing.

        With `fresh` no cache is used: the folder is listed from the file server, and each shard that is still missing
        is opened by its name.
        """
        found: dict[int, list[int]] = {}
        n_shards = self.plan.n_shards
        for name in list_fresh(self.shards) if fresh else list_names(self.shards):
            numbers = self.revision_of(name) if name.endswith(".h5") else None
            if numbers is not None and numbers[0] < n_shards:
                found.setdefault(numbers[0], []).append(numbers[1])
        if fresh:
            for shard in range(n_shards):
                if shard not in found and exists(self.revision_path(shard, 0)):
                    found[shard] = [0]
        for revisions in found.values():
            revisions.sort()
        return found

    def published(self, *, fresh: bool = False) -> set[int]:
        """The shards that are done, from one listing; `fresh` as for `shard_files`."""
        files = self.shard_files(fresh=fresh)
        again = {} if self.recompute is None else self.recompute.shards
        return {shard for shard, there in files.items() if shard not in again or again[shard].revision in there}

    def damaged(self) -> dict[int, str]:
        """Shards that a merge set aside and that have not been recomputed since, with what was wrong with them."""
        return {shard: why for (shard, revision), why in self._set_aside().items() if not revision}

    def damaged_revisions(self) -> dict[str, str]:
        """The same for files with recomputed items, by file name."""
        found = sorted(self._set_aside().items())
        return {self.revision_path(*numbers).name: why for numbers, why in found if numbers[1]}

    def _set_aside(self) -> dict[tuple[int, int], str]:
        """What was wrong with files that a merge set aside and that nothing has replaced, by shard and revision."""
        found, files = {}, self.shard_files()
        for name in list_names(self.shards):
            numbers = self.revision_of(name.removesuffix(".damaged.txt") + ".h5")
            if name.endswith(".damaged.txt") and numbers is not None:
                shard, revision = numbers
                with contextlib.suppress(OSError):  # unreadable or gone
                    if max(files.get(shard, [-1])) < revision:
                        found[shard, revision] = read_bytes(self.shards / name, max_bytes=1 << 20, patience_s=1.0)
        return {numbers: why.decode("utf-8", "replace").strip() for numbers, why in found.items()}

    def attempts(self) -> list[Record]:
        """The records of attempts, by start; without those that cannot be used."""
        return self.read_attempts()[0]

    def attempt(self, name: str) -> Record | Unread:
        """The record of one attempt, or why it cannot be used."""
        return _read_record(self.tasks / f"{name}.json")

    def read_attempts(self) -> tuple[list[Record], dict[str, Unread]]:
        """The records by start; and by attempt, in order, why a record is left out."""
        records, left_out = [], {}
        for name in list_names(self.tasks):
            if not name.endswith(".json") or name.startswith("."):
                continue
            if isinstance(record := _read_record(self.tasks / name), Unread):
                left_out[name.removesuffix(".json")] = record
            else:
                records.append(record)
        return sorted(records, key=lambda record: (record["started"], record["attempt"])), left_out

    def submissions(self) -> list[SubmissionLine]:
        """The submissions, each merged from its lines, which were written before sbatch, after it, and at its end.

        If the run directory was copied while tasks were alive, they do not belong to the copy: there the submission
        has ended and is `copied`.
        """
        return read_submissions(self.folder)

    def submission(self, number: int) -> SubmissionLine:
        """One submission, merged from its lines; nothing but its number if these are gone or damaged."""
        unknown: SubmissionLine = {"submission": number}
        return next((line for line in self.submissions() if line["submission"] == number), unknown)

    def as_submitted(self, line: SubmissionLine) -> SubmissionLine:
        """A submission with its private options if this user may read them; else they are dots."""
        return private.reveal(self.folder, str(line["submission"]), line)

    def last_submission(self) -> SubmissionLine:
        """The last submission; SlurmGPUError if there is none."""
        lines = self.submissions()
        if not lines:
            raise SlurmGPUError(f"{self.folder} was never submitted. `slurmgpu resubmit {self.typed}` submits it.")
        return lines[-1]

    def make_folders(self) -> None:
        """Make the folders of the run that are not there: a copy may lack those that were empty."""
        for name in FOLDERS:
            # As `creation.protect` has it, from the beginning.
            make_folder(self.folder / name, 0o755 if name == "logs" else 0o777)

    def record_submission(self, value: SubmissionLine) -> None:
        """Append a line to submissions.jsonl; lines of one submission have the same number `submission`.

        One process at a time: on NFS, two processes that append at once overwrite each other's line.
        """
        if "executor" in value:
            self.make_folders()
        append_submission(self.folder, value)


def _no_run(path: Path, *, is_file: bool) -> str:
    """What is wrong with the path of a run, and what to name: rows may have been copied without their directory."""
    if is_file and exists(path.parent / "run.json"):
        return f"{path} is a file; expected a run directory, perhaps {shlex.quote(str(path.parent))}."
    what = (
        f"{path} is a file; expected a run directory"
        if is_file
        else f"{path} is not a run directory: it has no run.json"
    )
    rows = path if is_file else path / "merged.h5"
    if rows.suffix == ".h5" and exists(rows):
        typed = shlex.quote(str(rows))
        return f"{what}. A merged file alone is read by `slurmgpu export {typed} -o rows.csv`, and by slurmgpu.open."
    return f"{what}. `slurmgpu list` shows the runs here."


def _read_record(path: Path) -> Record | Unread:
    """An attempt's record. It may be damaged: progress is not fsynced, and nodes die."""
    try:
        # A record that could not be read before gets no retries: it delays readers only once.
        patience_s = 0.0 if path in _told_of else BRIEF_PATIENCE_S
        record = read_record(read_bytes(path, max_bytes=MOST_RECORD_BYTES, patience_s=patience_s))
        if record["attempt"] != path.stem:
            raise ValueError(f"it belongs to the attempt {record['attempt']!r:.80}")
    except (ValueError, OSError) as error:
        is_damaged = isinstance(error, (ValueError, UnusableFileError))
        if path not in _told_of:
            _told_of.add(path)
            log.warning("%s %s, and is left out: %s", path, "is damaged" if is_damaged else _AT_PRESENT, error)
        return Unread.DAMAGED if is_damaged else Unread.UNREADABLE
    return record


_AT_PRESENT = "cannot be read at present"
_told_of: set[Path] = set()
"""Records that were warned about: a process that follows a run reads them every second."""
