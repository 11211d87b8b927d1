"""Call a program: write its input files, start it, wait for it, and read its rows."""

from __future__ import annotations

import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurmgpu.code.importer import present_files
from slurmgpu.errors import Interrupted, NodeError
from slurmgpu.shards.columns import Column
from slurmgpu.util.exceptions import message_of
from slurmgpu.util.guard import Guard
from slurmgpu.util.logging import mark_of
from slurmgpu.util.pipes import has_outlived
from slurmgpu.workloads.command.items_file import write_items
from slurmgpu.workloads.command.output_formats import Values
from slurmgpu.workloads.command.outputs import Collected, Match, read_output
from slurmgpu.workloads.command.placeholders import END, FILE, IN, IN_FORMATS, OUT, START, CommandLine, content_of
from slurmgpu.workloads.command.printed_row import PrintedRow, is_metric
from slurmgpu.workloads.command.process import SETTLE_S, CallFailedError, Child
from slurmgpu.workloads.command.sinks import OutputError, ToLog
from slurmgpu.workloads.command.submitted_program import SubmittedProgram

log = logging.getLogger(__name__)

LONG_CALL_S = 10.0
"""After a longer call all of its output is logged: the row may not fit the columns, and is expensive to repeat."""
LEAST_BYTES = 1 << 20
"""The least free space for temporary files: with less, even calls with small files fail."""


class EditedError(Exception):
    """A code file was edited while a process started, and the process may have read it."""


@dataclass(frozen=True)
class Call:
    """The items of a call, as their lines in `{in}`; a call for one item also has its fields and variables."""

    requests: Mapping[int, bytes]
    data: Mapping[str, object] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Caller:
    """Calls `program`, which has the arguments of `line`, for one item or for a slice of the input.

    `match` is the field by which rows are matched with items, None for their index, or for their order if the output
    `is_ordered`. A call takes at most `timeout_s` seconds. A program that `resumes` is told to end when its task is
    `stopping`. `guard` removes the files of a call that dies with this process.
    """

    program: SubmittedProgram
    line: CommandLine
    columns: Mapping[str, Column]
    match: str | None
    is_ordered: bool
    is_one: bool
    resumes: bool
    timeout_s: float | None
    guard: Guard
    stopping: Callable[[], bool]

    @property
    def _has_files(self) -> bool:
        return self.line.out is not None or IN in self.line or bool(self.line.in_files)

    def rows_of(self, call: Call) -> dict[int, Values]:
        """The rows that the program writes for these items, by index; at least one.

        The program imports modules from disk. If a module is edited while the program starts, or the program fails
        after an edit, it is called once more. It may also import modules later: after an edit during a long call, the
        code of its rows is unknown.
        """
        try:
            rows = self._rows_once(call)
        except EditedError:
            pass
        except CallFailedError:
            if not present_files().has_just_changed():
                raise
        else:
            if present_files().has_just_changed():
                log.warning("a code file changed during a long call: its rows may come from the old code or the new")
                present_files().note_unknown_code()
            return rows
        log.warning("a code file changed during a call, and the program may have read it: calling it again")
        return self._rows_once(call)

    def _rows_once(self, call: Call) -> dict[int, Values]:
        if not self._has_files:
            return self._run(call, "")
        try:
            with tempfile.TemporaryDirectory(prefix="slurmgpu-command-", ignore_cleanup_errors=True) as folder:
                self.guard.remove(folder)
                try:
                    return self._run(call, folder)
                finally:
                    self.guard.remove("")
        except (OSError, CallFailedError) as error:
            # This call's files are gone by now, so a call that alone needs too much space does not end here.
            if why := _why_unusable(Path(tempfile.gettempdir())):
                raise NodeError(f"{why}; {message_of(error)}") from error
            raise

    def _run(self, call: Call, folder: str) -> dict[int, Values]:
        """Run the program once, with its files in `folder`; Interrupted if it failed because it was told to end."""
        values, given = self._write_files(call, folder)
        try:
            return self._started(call, values, given)
        except CallFailedError as error:
            if self.resumes and self._will_stop():
                log.info("the program was told to end, and left no row: %s", str(error).partition("\n")[0])
                raise Interrupted from error
            raise

    def _write_files(self, call: Call, folder: str) -> tuple[dict[str, str], dict[int, Values]]:
        """Write the program's input files; returns the placeholders' texts, and fields that it may write back."""
        line, requests = self.line, call.requests
        in_path = Path(folder, f"in.{'jsonl' if line.items == IN_FORMATS[0] else line.items}")
        out_path = Path(folder, f"out.{line.out}")
        given: dict[int, Values] = {}
        if IN in line:
            given = write_items(in_path, line.items, requests, has_index=self.match is None and not self.is_ordered)
        values = {IN: str(in_path), OUT: str(out_path), START: str(min(requests)), END: str(max(requests) + 1)}
        for number, name in enumerate(line.in_files):
            path = Path(folder, f"{number}.{re.sub(r'[^a-zA-Z0-9._-]', '_', name)}")
            path.write_bytes(content_of(name, call.data))
            values[name + FILE] = str(path)
        return values, given

    def _started(self, call: Call, values: Mapping[str, str], given: Mapping[int, Values]) -> dict[int, Values]:
        """Start the program, wait until it ends, and read its rows."""
        line, requests = self.line, call.requests
        temporary = {path: f"{{{name}}}" for name, path in values.items() if name not in (START, END)}
        temporary[str(Path(values[OUT]).parent)] = "…"
        mark = mark_of(min(requests), max(requests))
        out, err = (ToLog(mark, temporary if self._has_files else None) for _ in range(2))
        printed = PrintedRow(self.columns, out)
        program = self.program
        arguments, environ = program.arguments(values, call.data), {**program.environment(), **call.about}
        started = time.monotonic()
        child = Child(arguments, environ, printed if line.out is None else out, err, self.guard)
        try:
            child.finish(self.timeout_s, _check_unchanged, self._shall_end, self._will_stop if self.resumes else None)
            if line.out is None:
                row = printed.row(is_logged=time.monotonic() - started > LONG_CALL_S)
                if is_metric(row.get("error")) and self.columns.keys() <= row.keys():
                    row.pop("error")
                return _only_row(row, requests)
            match = None if self.match is None else Match(self.match, requests)
            rows = read_output(
                Path(values[OUT]),
                line.out,
                self.columns,
                requests,
                is_one=self.is_one,
                given=given,
                match=match,
                is_ordered=self.is_ordered,
            )
        except OutputError as error:
            raise child.misprinted(error) from error
        if not rows:
            raise child.failed("exited with code 0, but wrote no row to {out}", "no rows")
        return rows

    def _will_stop(self) -> bool:
        """Whether the task has to end; a signal to the whole job may have reached the program first."""
        deadline = time.monotonic() + SETTLE_S
        while not (stops := self.stopping()) and time.monotonic() < deadline:
            time.sleep(SETTLE_S / 20)
        return stops

    def _shall_end(self) -> bool:
        """Whether to tell the program to end, unless a signal to the whole job has told it."""
        return self.resumes and self.stopping() and not has_outlived(signal.SIGTERM)


def _why_unusable(folder: Path) -> str | None:
    """Why calls cannot use the folder for temporary files, in words; None if they can."""
    named = f"the folder for temporary files, {folder},"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f"{named} cannot be used: {error.strerror}"
    if found.f_flag & os.ST_RDONLY:
        return f"{named} cannot be written"
    if found.f_bavail * found.f_frsize < LEAST_BYTES or (found.f_files and not found.f_favail):
        return f"{named} is full"
    return None


def _check_unchanged() -> None:
    """Raise EditedError if a file of the code is seen to have changed for the first time."""
    if present_files().has_just_changed():
        raise EditedError


def _only_row(row: Values, requests: Mapping[int, bytes]) -> dict[int, Values]:
    collected = Collected(requests, is_one=True)
    collected.add(row, "stdout")
    return collected.rows
