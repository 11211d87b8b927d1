"""The run directory: the frozen plan, the submissions and the attempts. What is on disk is the only state.

Standard library only, since the worker, `status` and the merge all start here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slurmgpu.claims import Claims
from slurmgpu.errors import SlurmGPUError
from slurmgpu.files import beside, fsync_dir, write_json
from slurmgpu.records import read_record
from slurmgpu.submissions import ENDS, as_seen_at, place_of

log = logging.getLogger(__name__)

RUN_FORMAT = "slurmgpu run"
RUN_VERSION = 1
FOLDERS = ("claims", "shards", "tasks", "logs", "telemetry")


@dataclass(frozen=True)
class Plan:
    """What a run computes, frozen: everything that its rows depend on, and what it was first asked to run on.

    `shard_items` consecutive items make a shard; the last may have fewer. `fingerprint` covers what the rows depend on.
    """

    name: str
    input: Mapping[str, Any]
    input_digest: str
    n_items: int
    workload: str
    search_path: str
    settings: Mapping[str, Any]
    columns: Mapping[str, Any]
    batch_size: int
    shard_items: int
    seed: int
    lease_s: float
    margin_s: float
    auto_resubmit: int
    resources: Mapping[str, Any]
    slurm: Mapping[str, Any]
    merge: Mapping[str, Any]
    provenance: Mapping[str, Any]
    container: Mapping[str, Any] | None = None
    processes: str = "one"
    placement: Sequence[str] = ()
    paths: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    sample_s: float = 5.0
    summarizes: bool = False
    exports: Sequence[str] = ()
    on_end: str | None = None
    html: bool = True

    @property
    def n_shards(self) -> int:
        """How many shards there are."""
        return -(-self.n_items // self.shard_items)

    def bounds(self, shard: int) -> tuple[int, int]:
        """First item of a shard, and the one after its last."""
        start = shard * self.shard_items
        return start, min(start + self.shard_items, self.n_items)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what the rows depend on; every shard carries it."""
        parts = [self.input_digest, self.n_items, self.workload, self.settings, self.columns]
        parts += [self.batch_size, self.shard_items, self.seed]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """The content of run.json."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"format": RUN_FORMAT, "version": RUN_VERSION, "fingerprint": self.fingerprint, **fields}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """The plan in a run.json."""
        return cls(**{name: value[name] for name in cls.__dataclass_fields__ if name in value})


@dataclass(frozen=True)
class Run:
    """A run directory and the plan in it."""

    folder: Path
    plan: Plan

    @classmethod
    def open(cls, folder: Path) -> Run:
        """The run in `folder`; a sentence when there is none, or one of a newer slurmgpu."""
        folder = folder.expanduser().absolute()
        try:
            value = json.loads((folder / "run.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise SlurmGPUError(
                f"{folder} is no run directory: it has no run.json. `slurmgpu submit` makes one."
            ) from None
        except ValueError as error:
            raise SlurmGPUError(f"{folder / 'run.json'} is damaged: {error}.") from error
        if value.get("format") != RUN_FORMAT or value.get("version") != RUN_VERSION:
            raise SlurmGPUError(
                f"{folder / 'run.json'} is of format {value.get('format')!r} version {value.get('version')}; "
                f"this slurmgpu reads {RUN_FORMAT!r} version {RUN_VERSION}. Use the slurmgpu that made the run."
            )
        return cls(folder, Plan.from_json(value))

    @property
    def name(self) -> str:
        """What the run is called: the run directory's name, whatever it was when the run was planned."""
        return self.folder.name if self.folder.name != ".." else self.folder.resolve().name

    @property
    def typed(self) -> str:
        """The run directory as it is typed in a shell, for the commands that messages propose."""
        return shlex.quote(str(self.folder))

    @property
    def claims(self) -> Claims:
        """The claims of this run."""
        return Claims(self.folder / "claims")

    @property
    def shards(self) -> Path:
        """The folder of published shards."""
        return self.folder / "shards"

    @property
    def tasks(self) -> Path:
        """The folder of attempts, one JSON file each."""
        return self.folder / "tasks"

    @property
    def logs(self) -> Path:
        """The folder of Submitit's files and the workers' output."""
        return self.folder / "logs"

    @property
    def merged(self) -> Path:
        """Where the merge puts the joined file."""
        return self.folder / "merged.h5"

    @property
    def index(self) -> Path:
        """The index of the input's records, made at planning."""
        return self.folder / "input.idx"

    @property
    def input(self) -> dict[str, Any]:
        """The plan's input; of files that lie in the run directory, the paths where that is now."""
        files = [{**file, "path": str(self.folder / file["path"])} for file in self.plan.input["files"]]
        return {**self.plan.input, "files": files}

    def shard_path(self, shard: int) -> Path:
        """Where a published shard lies. Its presence is the only meaning of done."""
        return self.shards / f"{shard:05d}.h5"

    def published(self) -> set[int]:
        """The shards that are done, from one listing."""
        return {int(name[:-3]) for name in os.listdir(self.shards) if name.endswith(".h5") and name[:-3].isdecimal()}

    def damaged(self) -> dict[int, str]:
        """Shards that a merge set aside and nobody has computed since, with what was wrong with them."""
        found = {}
        for name in sorted(os.listdir(self.shards)):
            number, _, rest = name.partition(".")
            if rest == "damaged.txt" and not self.shard_path(int(number)).exists():
                found[int(number)] = (self.shards / name).read_text("utf-8", "replace").strip()
        return found

    def attempts(self) -> list[dict[str, Any]]:
        """What each attempt wrote of itself, in the order of their start; without those that are damaged."""
        return self.read_attempts()[0]

    def attempt(self, name: str) -> dict[str, Any] | None:
        """What one attempt wrote of itself; None if that is damaged."""
        return _read_record(self.tasks / f"{name}.json")

    def damaged_records(self) -> list[str]:
        """The attempts whose records cannot be read: a dying node, or a full disk, may have left them so."""
        return self.read_attempts()[1]

    def read_attempts(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Both of these, from one reading."""
        records, damaged = [], []
        for name in _json_names(self.tasks):
            if (record := _read_record(self.tasks / name)) is None:
                damaged.append(name.removesuffix(".json"))
            else:
                records.append(record)
        return sorted(records, key=lambda record: (record["started"], record["attempt"])), damaged

    def submissions(self) -> list[dict[str, Any]]:
        """The submissions, each with what all its lines say: of before sbatch, of after it, and of its end.

        In a copy of a run that was at work, what works is not the copy's: its submission has ended there, and is
        `copied`.
        """
        merged: dict[int, dict[str, Any]] = {}
        try:
            lines = (self.folder / "submissions.jsonl").read_bytes().splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                continue  # blank, or torn by a full disk or a kill; a line that counts was written whole
            if isinstance(value, dict) and type(value.get("submission")) is int:
                merged.setdefault(value["submission"], {}).update(value)
        # Without its first line, a damaged one, nothing is known of a submission that could be used.
        found = [line for _, line in sorted(merged.items()) if "executor" in line and "state" in line]
        # Of what has ended the place does not matter: a list of many runs asks the file system for none.
        place = place_of(self.folder) if any(line["state"] not in ENDS for line in found) else {}
        return [as_seen_at(line, place) for line in found]

    def last_submission(self) -> dict[str, Any]:
        """The last submission; a sentence when there was none."""
        lines = self.submissions()
        if not lines:
            raise SlurmGPUError(f"{self.folder} was never submitted. `slurmgpu resubmit {self.typed}` does it.")
        return lines[-1]

    def record_submission(self, value: Mapping[str, Any]) -> None:
        """Append a line to submissions.jsonl; `submission` in it is the number that lines of one submission share."""
        place = place_of(self.folder) if "executor" in value else {}
        line = json.dumps({**value, **place}) + "\n"
        with open(self.folder / "submissions.jsonl", "a+b") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = "\n" + line  # a line of its own, behind a torn one
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Keep a second shell from submitting at the same moment."""
        lock = self.folder / ".submitting"
        who = f"{socket.gethostname()}, process {os.getpid()}, at {time.strftime('%Y-%m-%d %H:%M:%S')}"
        try:
            with open(lock, "x", encoding="utf-8") as file:
                file.write(who)
        except FileExistsError:
            holder = lock.read_text("utf-8", "replace")
            raise SlurmGPUError(
                f"Somebody is submitting this run right now ({holder}). "
                f"If that process is gone, remove {lock} and submit again."
            ) from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # who waits for a turn may have taken us for dead


def create_run(folder: Path, plan: Plan, files: Sequence[Path]) -> Run:
    """Make the run directory, whole or not at all; refuse one that exists.

    `files` are moved into it. Of two shells that make the same run at once, one succeeds.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with beside(folder) as partial:
        partial.mkdir()
        for name in FOLDERS:
            (partial / name).mkdir()
        for file in files:
            shutil.move(file, partial / file.name)
            with open(partial / file.name, "rb") as moved:  # a copy, if it comes from another file system
                os.fsync(moved.fileno())
        write_json(partial / "run.json", plan.to_json())
        try:
            partial.rename(folder)  # fails on a directory that is not empty
        except OSError:
            refuse_existing(folder)
            raise
    fsync_dir(folder.parent)
    return Run(folder, plan)


def refuse_existing(folder: Path) -> None:
    """Raise a sentence when `folder` holds a run, or anything else."""
    if (folder / "run.json").exists():
        typed = shlex.quote(str(folder))
        raise SlurmGPUError(
            f"{folder} holds a run already. `slurmgpu resubmit {typed}` computes what it lacks, "
            f"`slurmgpu status {typed}` shows it; for another run of this file name another directory with --run-dir."
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise SlurmGPUError(f"{folder} exists and is no run directory; name another with --run-dir.")


def _read_record(path: Path) -> dict[str, Any] | None:
    """An attempt's record; None for one that makes no sense: progress is not fsynced, and nodes die."""
    try:
        record = read_record(path.read_bytes())
        if record["attempt"] != path.stem:
            raise ValueError(f"it is that of {record['attempt']!r:.80}")
    except (ValueError, OSError) as error:
        if path not in _told_of:
            _told_of.add(path)
            log.warning("%s is damaged, and left out: %s", path, error)
        return None
    return record


_told_of: set[Path] = set()
"""Damaged records that were warned of: those who follow a run read them every second."""


def _json_names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith("."))
