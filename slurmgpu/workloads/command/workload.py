"""Run any program as a workload: `use = "command"`, as in docs/how-to/run-a-command.md.

The placeholders in `run` decide how it is called: for one item, for a slice of the input, or once, as a stream.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import shlex
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from slurmgpu.code.file_kinds import SCRIPTS
from slurmgpu.code.importer import present_files
from slurmgpu.code.locator import is_others
from slurmgpu.code.started_modules import file_of_module, module_of
from slurmgpu.errors import Interrupted, ItemError, NodeError, Retry, SlurmGPUError, WorkerBrokenError, WorkloadError
from slurmgpu.shards.column_types import columns_of, types_of_rows
from slurmgpu.util import cgroups, gpus
from slurmgpu.util.amounts import some_of
from slurmgpu.util.exceptions import message_of
from slurmgpu.util.guard import Guard
from slurmgpu.util.logging import mark_of
from slurmgpu.util.out_of_memory import GPU_TEXTS, MEMORY_TEXTS, OutOfMemoryError
from slurmgpu.util.pipes import has_outlived
from slurmgpu.util.signals import is_self_inflicted
from slurmgpu.workload import Item, Placement, Row, Share, TaskContext, Template
from slurmgpu.workloads.command.items_file import request_of, taken_for, write_items
from slurmgpu.workloads.command.outputs import (
    Collected,
    Match,
    Values,
    WrongFormError,
    check_format,
    in_order,
    is_written_back,
    read_output,
    without_namesakes,
)
from slurmgpu.workloads.command.placeholders import END, FILE, IN, IN_FORMATS, OUT, START, content_of, parse
from slurmgpu.workloads.command.printed_row import PrintedRow, is_metric
from slurmgpu.workloads.command.process import SETTLE_S, CallFailedError, Child, DiedError
from slurmgpu.workloads.command.programs import check_program, check_script, entry_script, filled_folders, is_launcher
from slurmgpu.workloads.command.sinks import OF_GPUS, Lines, OutputError, ToLog
from slurmgpu.workloads.command.stream import Stream
from slurmgpu.workloads.command.submitted_program import SubmittedProgram, inherited_environment

log = logging.getLogger(__name__)

Answer = Row | ItemError | Retry
CODE = SCRIPTS | {".ipynb"}
"""Suffixes of files that are code."""
LONGEST_SCRIPT = 1 << 20
"""The largest file, in bytes, that is taken for one of the user's scripts."""
ENOUGH_DEATHS = 2.0
"""The weight of deaths from which an item counts as their cause; see `run.crash_history`."""
LONG_CALL_S = 10.0
"""After a longer call all of its output is logged: the row may not fit the columns, and is expensive to repeat."""
LEAST_BYTES = 1 << 20
"""The least free space for temporary files: with less, even calls with small files fail."""
FILES = {"input": "reads its items from is {in:jsonl}", "output": "writes its rows to is {out}"}
"""Names that other tools use for files, and that may be fields here."""
SLICE, ONE, STREAM = "slice", "one", "stream"
BATCH_SIZES = {SLICE: 256, ONE: 1, STREAM: 32}
"""The most items of a batch by mode; for a stream, the most requests without an answer."""


class EditedError(Exception):
    """A code file was edited while a process started, and the process may have read it."""


@dataclass(frozen=True)
class Call:
    """The items of a call, as their lines in `{in}`; a call for one item also has its fields and variables."""

    requests: Mapping[int, bytes]
    data: Mapping[str, object] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)


class Command:
    """The rows that a program writes.

    `run` is the program and its arguments; no shell reads them. With `{in}` or `{start}` and `{end}`, and `{out}`, it
    is called for a slice of the input; with the name of a field, or without `{out}`, for one item; with `stream` it is
    started once, and answers JSON lines. `columns` has a type for each column. The rows of a slice have the index of
    their item, or its field `match`. A call, or the next answer of a stream, may take `timeout_s` seconds. `env` is
    added to the worker's environment. `values` are the user's own placeholders in `run`. A program that `resumes` saves
    the progress of its item: when the task has to end, it gets SIGTERM and time to save, and is called again later.
    """

    template = Template(
        Path(__file__).with_name("template.toml"),
        items=[{"text": text} for text in ("a cat sleeps", "a dog", "the bank lends money to farmers")],
        files={"score.py": Path(__file__).with_name("example") / "score.py"},
    )

    def __init__(
        self,
        *,
        run: list[str],
        columns: dict[str, str],
        stream: bool = False,
        match: str | None = None,
        timeout_s: float | None = None,
        env: dict[str, str] | None = None,
        values: dict[str, str | bool | int | float] | None = None,
        resumes: bool = False,
    ) -> None:
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise SlurmGPUError(f"command: timeout_s is {timeout_s:g}; expected seconds, or leave it out.")
        if odd := [name for name, value in (env or {}).items() if "=" in name or "\0" in name + value]:
            raise SlurmGPUError(f"command: env has {odd[0]!r}, with a = in its name or a NUL character. Leave it out.")
        self._line = parse(run, values)
        self._values = self.not_fields = tuple(values or ())
        self._has_files = self._line.out is not None or IN in self._line or bool(self._line.in_files)
        self._mode = self._mode_of(stream)
        if resumes and self._mode != ONE:
            of = "a stream" if self._mode == STREAM else "a slice"
            raise SlurmGPUError(
                f"command: resumes = true, and a call is for {of}; expected calls for one item, whose progress the "
                f"program saves. Name a field of the items in run, as in {{text}}, or leave resumes out."
            )
        if match is not None and self._mode != SLICE:
            of = "a stream" if self._mode == STREAM else "one item"
            raise SlurmGPUError(
                f"command: match = {match!r}, and a call is for {of}; expected calls for slices. Name {{in}} and "
                f"{{out}} in run, or leave match out."
            )
        self.resumes = self.takes_one = resumes
        self._match = match
        self._program = run[0]
        self._timeout_s, self._env = timeout_s, env or {}
        self._stream: Stream | None = None
        self.columns = columns_of(columns, "command")
        self.batch_size = BATCH_SIZES[self._mode]
        self.fields = (*self._line.fields, *([] if match is None else [match]))
        self.advice = {name: _write(text) for name, text in self._line.meant_as_text.items()}
        for name, file in FILES.items():
            if name in self.fields:
                self.advice[name] = f" The file that a call {file}."
        if self._line.items != IN_FORMATS[0] and match is None:
            self.not_fields += ("index",)
            self.advice["index"] = taken_for("index", self._line.items)
        elif "index" in self._line.fields:
            self.advice["index"] = " The number of an item is $SLURMGPU_INDEX, or {start} in a call without fields."
        if self._line.out is not None:
            check_format(self._line.out, self.columns)

    def _mode_of(self, stream: bool) -> str:
        line = self._line
        found = [*line.named, *([OUT] if line.out else []), *line.fields]
        if stream:
            if found:
                raise SlurmGPUError(
                    f"command: stream = true, and run has {{{found[0]}}}. A stream reads its items from "
                    f"standard input: remove one of the two.{_write(line.meant_as_text.get(found[0]))}"
                )
            return STREAM
        if not found:
            raise SlurmGPUError(
                "command: run has no placeholder for an item, so all calls would be the same. Name a field of the "
                "items, as in {text}, use {in} and {out}, or set stream = true."
            )
        if line.fields and line.named:
            field = next(iter(line.meant_as_text), line.fields[0])
            raise SlurmGPUError(
                f"command: run has {{{field}}}, a field of one item, and {{{line.named[0]}}}, which stands "
                f"for a slice. Use one or the other; {{in}} has all fields.{_write(line.meant_as_text.get(field))}"
            )
        if line.fields or line.out is None:
            return ONE
        if IN not in line and not (START in line and END in line):
            raise SlurmGPUError(
                "command: run has {out}, but nothing says for which items. Add {in}, or {start} and {end}."
            )
        return SLICE

    @property
    def scripts(self) -> list[Path]:
        """The scripts among the arguments; the one that the command starts comes before those that are its arguments.

        These are: files below the working folder, which is the run file's folder; files elsewhere whose names are
        those of code and that are not installed; the file of a module that Python or a launcher runs by
        `-m package.module`, with the files of its packages; the script of a program that imports the user's modules.
        A launcher is none of them, also in an environment below the working folder.
        """
        here = Path.cwd().resolve()
        found = [Path(text) for text in self._line.texts.values() if not is_launcher(text)]
        if (module := module_of(self._line.texts)) is not None and (file := file_of_module(module[1])) is not None:
            packages = [folder / "__init__.py" for folder in file.parents if folder != Path()]
            found = [file, *(path for path in packages if path.is_file()), *found]
        places = [(path, path.resolve()) for path in found]
        entry = entry_script(self._program, {**os.environ, **self._env}.get("PATH"))
        return ([] if entry is None else [entry]) + [
            path
            for path, place in places
            if (place.is_relative_to(here) or (place.suffix in CODE and not is_others(str(place)))) and _is_script(path)
        ]

    def check_here(self) -> None:
        """Refuse a program that this machine lacks or cannot start, and a script that does not exist.

        A warning names folders for outputs that have files already.
        """
        check_program(self._program, {**os.environ, **self._env}.get("PATH"))
        check_script(self._line.texts)
        for option, folder, entry in filled_folders(self._line.arguments):
            _warn_of_files(option, folder, entry)

    def place(self, share: Share) -> Placement:
        """One process, which has all GPUs of its task."""
        if share.processes == "per-gpu":
            raise SlurmGPUError(
                'command: processes = "per-gpu" is for workloads whose processes form one group. To run the command on '
                "each GPU, set array = true under [resources]."
            )
        return Placement()

    def load(self, task: TaskContext) -> None:
        """Start the process of a stream."""
        # Slurm numbers GPUs by their bus; CUDA's default is the fastest first.
        environ = {**inherited_environment(), "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
        if task.device == "cpu":
            environ["CUDA_VISIBLE_DEVICES"] = ""
        if self._mode == STREAM:
            environ["PYTHONUNBUFFERED"] = "1"  # else Python buffers its output
        self._submitted = SubmittedProgram(self._program, self._line, environ | self._env)
        if self._mode != STREAM:
            present_files().expect_reads_again()
        self._stopping = task.stopping
        self._passed_over: set[str] = set()
        self._has_rows = False
        self._n_gpus = task.gpus
        self._guard = Guard()
        weakref.finalize(self, self._guard.close)
        if self._mode == STREAM:
            start = functools.partial(_start_stream, self._submitted, self._guard)
            self._stream = Stream(start, self._timeout_s, task.tell, present_files().has_just_changed)
            weakref.finalize(self, self._stream.close)
            try:
                self._stream.start()
            except (CallFailedError, WorkloadError) as error:
                raise SlurmGPUError(str(error)) from error

    def explain_misfit(self, row: Mapping[str, object]) -> str:
        """A sentence for a row with names that are not columns, unless one of the names may be mistyped."""
        return f"Do not write it.{self._as_columns(row)}" if self.columns.keys() < row.keys() else ""

    def _declared(self, answer: Answer, data: Mapping[str, object]) -> Answer:
        """The printed row of a call without names that are not columns; unchanged if it lacks a column.

        It may repeat fields of the item's `data` as they are, which the run may keep by itself. The log has the whole
        row. A row in `{out}`, or from a stream, is nowhere else, so there an extra name is an error.
        """
        if not (self._line.out is None and isinstance(answer, Mapping) and self.columns.keys() < answer.keys()):
            return answer
        others = {
            name: value
            for name, value in answer.items()
            if name not in self.columns and not (name in data and is_written_back(name, value, data[name]))
        }
        if not self._passed_over.issuperset(others):
            self._passed_over.update(others)
            log.warning("not a column, so not kept: %s.%s", some_of(map(repr, others), 10), self._as_columns(others))
        return {name: answer[name] for name in self.columns}

    def _as_columns(self, row: Mapping[str, object]) -> str:
        """How to declare names that are not columns, to append to a sentence; "" if their types are not known."""
        try:
            types = types_of_rows([{name: value for name, value in row.items() if name not in self.columns}])
        except SlurmGPUError:
            return ""
        line = ", ".join(
            f"{json.dumps(name, ensure_ascii=False)} = {json.dumps(kind or 'json')}" for name, kind in types.items()
        )
        options = shlex.join(text for name, kind in types.items() for text in ("--col", f"{name}:{kind or 'json'}"))
        return (
            f" To keep them, add {line} to the columns (with `slurmgpu run`: {options}), and submit again into another "
            f"run directory."
        )

    def __call__(self, items: Sequence[Item]) -> list[Answer]:
        """The rows that the program writes for these items; CallFailedError if a slice or a stream fails."""
        if self._mode == ONE:
            return [self._declared(self._one(item), item.data) for item in items]
        requests: dict[int, bytes] = {}
        rows: dict[int, Answer] = {}
        for item in items:
            try:
                requests[item.index] = self._request(item)
            except ItemError as error:
                rows[item.index] = error
        if requests:
            call = self._stream_of if self._mode == STREAM else self._slices
            try:
                rows |= self._tried(functools.partial(call, requests), is_alone=len(items) == 1)
            except CallFailedError as error:
                self._say_where(error, items[0].data)
                if isinstance(error.__cause__, WrongFormError) and not self._has_rows:
                    raise WorkloadError(str(error)) from error
                raise
            self._has_rows = True
        return [rows[item.index] for item in items]

    def _say_where(self, error: CallFailedError, data: Mapping[str, object]) -> None:
        """Add a hint to the KeyError of a program that looks for a field at the top level of a line of `{in}`."""
        first, _, rest = str(error).partition("\n")
        found = re.search(r"KeyError: '([^']+)'", first)
        if found and found[1] in data and IN in self._line and self._line.items == IN_FORMATS[0]:
            where = '{in} has the fields of an item under "data"; write {in:jsonl} to have them at the top of each line'
            error.args = (f"{first}. {where}\n{rest}".rstrip(),)

    def _tried(self, call: Callable[[], dict[int, Answer]], *, is_alone: bool) -> dict[int, Answer]:
        """The result of `call`. An item alone in its call that kills its process is tried again.

        As with workers, a kill from outside weighs 1/2, so that a single chance kill costs no row.
        """
        weight = 0.0
        while True:
            n_oom_kills = cgroups.oom_kills()
            try:
                return call()
            except CallFailedError as error:
                self._blame(error, is_alone=is_alone, is_oom=cgroups.oom_kills() > n_oom_kills)
                if not (isinstance(error, DiedError) and error.signal and is_alone):
                    raise
                weight += 1.0 if is_self_inflicted(error.code) else 0.5
                if weight >= ENOUGH_DEATHS:
                    raise
                log.warning("%s; trying it again", str(error).partition("\n")[0])

    def _blame(self, error: CallFailedError, *, is_alone: bool, is_oom: bool) -> None:
        """Raise the error that a failed call means, unless it is its items'; `is_oom` if the OOM killer was at work."""
        said = str(error)
        if isinstance(error, DiedError) and error.code == os.EX_TEMPFAIL:
            raise Retry(said) from error
        if self._n_gpus and error.says(OF_GPUS):
            gpus.check_again(self._n_gpus)
        # Not only after SIGKILL: the kernel may kill a process that the program has started, such as a torchrun rank.
        if isinstance(error, DiedError) and is_oom:
            short = f"the kernel killed a process of this job for lack of host memory: {said}"
            raise (WorkerBrokenError(short, is_sure=True) if is_alone else MemoryError(short)) from error
        if not (is_alone and self._mode == ONE) and error.says(MEMORY_TEXTS):
            raise (OutOfMemoryError if error.says(GPU_TEXTS) else MemoryError)(said) from error

    def _stream_of(self, requests: Mapping[int, bytes]) -> dict[int, Answer]:
        assert self._stream is not None
        return _by_index(requests, self._stream.ask(requests, mark_of(min(requests), max(requests))))

    def _slices(self, requests: Mapping[int, bytes]) -> dict[int, Answer]:
        """The rows of a slice's items, by one call unless `_calls` needs several."""
        rows: dict[int, Answer] = {}
        for call in self._calls(requests):
            rows |= _by_index(call, self._slice(Call(call)))
        return rows

    def _calls(self, requests: Mapping[int, bytes]) -> Iterator[Mapping[int, bytes]]:
        """The items of each call; with `{start}` and `{end}`, one call for each range without gaps.

        Items with the same value of `match` are in different calls.
        """
        calls: Sequence[Mapping[int, bytes]] = [requests]
        if self._match is not None and len(calls := without_namesakes(requests, self._match)) > 1:
            log.warning("several items have the same %r, which match needs: calling %d times", self._match, len(calls))
        for call in calls:
            if START not in self._line:
                yield call
                continue
            for _, group in groupby(enumerate(sorted(call)), lambda pair: pair[1] - pair[0]):
                yield {index: call[index] for _, index in group}

    def _one(self, item: Item) -> Answer:
        """The row of one item; a nonzero exit code is the item's error."""
        about = {"SLURMGPU_INDEX": str(item.index), "SLURMGPU_SEED": str(item.seed)}
        try:
            if both := next((name for name in self._values if name in item.data), None):
                raise ItemError(f"it has a field {both!r}, which is also one of the values under [settings]")
            requests = {item.index: self._request(item) if IN in self._line else b""}
            call = Call(requests, item.data, about)
            return self._tried(lambda: _by_index(requests, self._slice(call)), is_alone=True)[item.index]
        except (ItemError, Retry) as error:
            return error

    def _request(self, item: Item) -> bytes:
        """The line of an item in `{in}`, and on a stream's standard input."""
        if self._match is not None and item.data.get(self._match) is None:
            raise ItemError(f"the item has no field {self._match!r}, which match needs")
        return request_of(item.index, item.seed, item.data, self._line.items, has_index=self._match is None)

    def _slice(self, call: Call) -> dict[int, Values]:
        """The rows that a call of the program writes, by index; at least one.

        The program imports modules from disk. If a module is edited while the program starts, or the program fails
        after an edit, it is called once more. It may also import modules later: after an edit during a long call, the
        code of its rows is unknown.
        """
        try:
            rows = self._slice_once(call)
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
        return self._slice_once(call)

    def _slice_once(self, call: Call) -> dict[int, Values]:
        if not self._has_files:
            return self._run(call, "")
        try:
            with tempfile.TemporaryDirectory(prefix="slurmgpu-command-", ignore_cleanup_errors=True) as folder:
                self._guard.remove(folder)
                try:
                    return self._run(call, folder)
                finally:
                    self._guard.remove("")
        except (OSError, CallFailedError) as error:
            # This call's files are gone by now, so a call that alone needs too much space does not end here.
            if why := _why_unusable(Path(tempfile.gettempdir())):
                raise NodeError(f"{why}; {message_of(error)}") from error
            raise

    def _run(self, call: Call, folder: str) -> dict[int, Values]:
        """Run the program once, with its files in `folder`; Interrupted if it failed because it was told to end."""
        values, given = self._write_files(call, folder)
        try:
            return self._rows(call, values, given)
        except CallFailedError as error:
            if self.resumes and self._will_stop():
                log.info("the program was told to end, and left no row: %s", str(error).partition("\n")[0])
                raise Interrupted from error
            raise

    def _write_files(self, call: Call, folder: str) -> tuple[dict[str, str], dict[int, Values]]:
        """Write the program's input files; returns the placeholders' texts, and fields that it may write back."""
        line, requests = self._line, call.requests
        in_path = Path(folder, f"in.{'jsonl' if line.items == IN_FORMATS[0] else line.items}")
        out_path = Path(folder, f"out.{line.out}")
        given: dict[int, Values] = {}
        if IN in line:
            given = write_items(in_path, line.items, requests, has_index=self._match is None)
        values = {IN: str(in_path), OUT: str(out_path), START: str(min(requests)), END: str(max(requests) + 1)}
        for number, name in enumerate(line.in_files):
            path = Path(folder, f"{number}.{re.sub(r'[^a-zA-Z0-9._-]', '_', name)}")
            path.write_bytes(content_of(name, call.data))
            values[name + FILE] = str(path)
        return values, given

    def _rows(self, call: Call, values: Mapping[str, str], given: Mapping[int, Values]) -> dict[int, Values]:
        """Start the program, wait until it ends, and read its rows."""
        line, requests = self._line, call.requests
        temporary = {path: f"{{{name}}}" for name, path in values.items() if name not in (START, END)}
        temporary[str(Path(values[OUT]).parent)] = "…"
        mark = mark_of(min(requests), max(requests))
        out, err = (ToLog(mark, temporary if self._has_files else None) for _ in range(2))
        printed = PrintedRow(self.columns, out)
        program = self._submitted
        arguments, environ = program.arguments(values, call.data), {**program.environment(), **call.about}
        started = time.monotonic()
        child = Child(arguments, environ, printed if line.out is None else out, err, self._guard)
        try:
            child.finish(self._timeout_s, _check_unchanged, self._shall_end)
            if line.out is None:
                row = printed.row(is_logged=time.monotonic() - started > LONG_CALL_S)
                if is_metric(row.get("error")) and self.columns.keys() <= row.keys():
                    row.pop("error")
                return _only_row(row, requests)
            is_one = self._mode == ONE
            match = None if self._match is None else Match(self._match, requests)
            rows = read_output(
                Path(values[OUT]), line.out, self.columns, requests, is_one=is_one, given=given, match=match
            )
        except OutputError as error:
            raise child.misprinted(error) from error
        if not rows:
            raise child.failed("exited with code 0, but wrote no row to {out}", "no rows")
        return rows

    def _will_stop(self) -> bool:
        """Whether the task has to end; a signal to the whole job may have reached the program first."""
        deadline = time.monotonic() + SETTLE_S
        while not (stops := self._stopping()) and time.monotonic() < deadline:
            time.sleep(SETTLE_S / 20)
        return stops

    def _shall_end(self) -> bool:
        """Whether to tell the program to end, unless a signal to the whole job has told it."""
        return self.resumes and self._stopping() and not has_outlived(signal.SIGTERM)


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


@functools.cache  # once for all runs of a sweep
def _warn_of_files(option: str, folder: str, entry: str) -> None:
    log.warning(
        "%s, which %s names, has files already, such as %s: a script that continues from its checkpoints, or skips "
        "what is there, uses them. To begin again, remove them or name another folder.", folder, option, entry,
    )  # fmt: skip


def _start_stream(program: SubmittedProgram, guard: Guard, out: Lines, err: ToLog) -> Child:
    return Child(program.arguments({}, {}), program.environment(), out, err, guard, has_stdin=True)


def _write(text: str | None) -> str:
    """How to escape the program's own braces, to append to an error."""
    return "" if text is None else f" If the braces are the program's own, write {text}."


def _is_script(path: Path) -> bool:
    """Whether a file is a script, by its suffix or its first line; data files are not copied."""
    try:
        if not path.is_file() or path.stat().st_size > LONGEST_SCRIPT:
            return False
        with open(path, "rb") as file:
            return path.suffix in CODE or file.read(2) == b"#!"
    except OSError:
        return False


def _only_row(row: Values, requests: Mapping[int, bytes]) -> dict[int, Values]:
    collected = Collected(requests, is_one=True)
    collected.add(row, "stdout")
    return collected.rows


def _by_index(requests: Mapping[int, bytes], rows: Mapping[int, Values]) -> dict[int, Answer]:
    return dict(zip(requests, in_order(list(requests), rows), strict=True))
