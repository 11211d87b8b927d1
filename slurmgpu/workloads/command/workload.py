"""Run any program as a workload: `use = "command"`, as in docs/how-to/run-a-command.md.

The placeholders in `run` decide how it is called: for one item, for a slice of the input, or once, as a stream.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from slurmgpu.code.importer import present_files
from slurmgpu.errors import ItemError, Retry, SlurmGPUError, WorkerBrokenError, WorkloadError
from slurmgpu.shards.column_types import columns_of
from slurmgpu.util import cgroups, gpus
from slurmgpu.util.guard import Guard
from slurmgpu.util.logging import mark_of
from slurmgpu.util.out_of_memory import GPU_TEXTS, MEMORY_TEXTS, OutOfMemoryError
from slurmgpu.util.packages import check_imports
from slurmgpu.util.signals import is_self_inflicted
from slurmgpu.workload import Item, Placement, Row, Share, TaskContext, Template
from slurmgpu.workloads.command.caller import Call, Caller
from slurmgpu.workloads.command.items_file import request_of, taken_for
from slurmgpu.workloads.command.output_formats import Values, WrongFormError, check_format
from slurmgpu.workloads.command.outputs import in_order, without_namesakes
from slurmgpu.workloads.command.placeholders import (
    IN,
    IN_FORMATS,
    ONE,
    PARQUET,
    SLICE,
    START,
    STREAM,
    escape_in_words,
    mode_of,
    parse,
)
from slurmgpu.workloads.command.process import CallFailedError, Child, DiedError
from slurmgpu.workloads.command.programs import check_program, check_script, filled_folders, scripts_of
from slurmgpu.workloads.command.sinks import OF_GPUS, Lines, ToLog
from slurmgpu.workloads.command.stream import Stream
from slurmgpu.workloads.command.submitted_program import SubmittedProgram, inherited_environment
from slurmgpu.workloads.command.undeclared import Undeclared, as_columns

log = logging.getLogger(__name__)

Answer = Row | ItemError | Retry
ENOUGH_DEATHS = 2.0
"""The weight of deaths from which an item counts as their cause; see `run.crash_history`."""
FILES = {"input": "reads its items from is {in:jsonl}", "output": "writes its rows to is {out}"}
"""Names that other tools use for files, and that may be fields here."""
BATCH_SIZES = {SLICE: 256, ONE: 1, STREAM: 32}
"""The most items of a batch by mode; for a stream, the most requests without an answer."""


class Command:
    """The rows that a program writes.

    `run` is the program and its arguments; no shell reads them. With `{in}` or `{start}` and `{end}`, and `{out}`, it
    is called for a slice of the input; with the name of a field, or without `{out}`, for one item; with `stream` it is
    started once, and answers JSON lines. `columns` has a type for each column. The rows of a slice have the index of
    their item, or its field `match`, or are `in_order`. A call, or the next answer of a stream, may take `timeout_s`
    seconds. `env` is added to the worker's environment. `values` are the user's own placeholders in `run`. A program
    that `resumes` saves the progress of its item: when the task has to end, it gets SIGTERM and time to save, and is
    called again later.
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
        in_order: bool = False,
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
        self._mode = mode_of(self._line, stream=stream)
        if resumes and self._mode != ONE:
            of = "a stream" if self._mode == STREAM else "a slice"
            raise SlurmGPUError(
                f"command: resumes = true, and a call is for {of}; expected calls for one item, whose progress the "
                f"program saves. Name a field of the items in run, as in {{text}}, or leave resumes out."
            )
        if (in_order or match is not None) and self._mode != SLICE:
            of = "a stream" if self._mode == STREAM else "one item"
            key, value = ("in_order", "true") if match is None else ("match", repr(match))
            raise SlurmGPUError(
                f"command: {key} = {value}, and a call is for {of}; expected calls for slices. Name {{in}} and "
                f"{{out}} in run, or leave {key} out."
            )
        if in_order and match is not None:
            raise SlurmGPUError(
                f"command: match = {match!r}, and in_order = true; expected one of them. Leave match out if rows are "
                "as many as the items, and in their order."
            )
        self.resumes = self.takes_one = resumes
        self._match, self._is_ordered = match, in_order
        self._program = run[0]
        self._timeout_s, self._env = timeout_s, env or {}
        self._stream: Stream | None = None
        self.columns = columns_of(columns, "command")
        self.batch_size = BATCH_SIZES[self._mode]
        self.fields = (*self._line.fields, *([] if match is None else [match]))
        self.advice = {name: escape_in_words(text) for name, text in self._line.meant_as_text.items()}
        for name, file in FILES.items():
            if name in self.fields:
                self.advice[name] = f" The file that a call {file}."
        if self._line.items != IN_FORMATS[0] and self._has_index:
            self.not_fields += ("index",)
            self.advice["index"] = taken_for("index", self._line.items)
        elif "index" in self._line.fields:
            self.advice["index"] = " The number of an item is $SLURMGPU_INDEX, or {start} in a call without fields."
        if self._line.out is not None:
            check_format(self._line.out, self.columns)
        if self._line.out == "npy" and self._mode == SLICE and not in_order:
            raise SlurmGPUError(
                "command: {out:npy} has no index. If the array has a row for each item, in their order, set "
                "in_order = true."
            )

    @property
    def _has_index(self) -> bool:
        """Whether rows are matched by the index of their item."""
        return self._match is None and not self._is_ordered

    @property
    def scripts(self) -> list[Path]:
        """The scripts that the command names or starts, which a snapshot keeps; see `programs.scripts_of`."""
        return scripts_of(self._program, self._line.texts, self._search_path)

    @property
    def _search_path(self) -> str | None:
        return {**os.environ, **self._env}.get("PATH")

    def check_here(self) -> None:
        """Refuse a program that this machine lacks or cannot start, and a script that does not exist."""
        if PARQUET in (self._line.items, self._line.out):
            check_imports(
                "command: a call with Parquet files needs", {"pyarrow": "pyarrow"}, "pip install 'slurmgpu[parquet]'"
            )
        check_program(self._program, self._search_path)
        check_script(self._line.texts)

    def check_input(self, files: Sequence[Path], n_items: int) -> list[str]:
        """A note on each folder for outputs that has files already."""
        return [
            f"{folder}, which {option} names, has files already, such as {entry}: a script that continues from its "
            "checkpoints, or skips what is there, uses them. To begin again, remove them or name another folder."
            for option, folder, entry in filled_folders(self._line.arguments)
        ]

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
        submitted = SubmittedProgram(self._program, self._line, environ | self._env)
        if self._mode != STREAM:
            present_files().expect_reads_again()
        self._has_rows = False
        self._n_gpus = task.gpus
        self._guard = Guard()
        weakref.finalize(self, self._guard.close)
        self._undeclared = Undeclared(self.columns)
        self._caller = Caller(
            submitted,
            self._line,
            self.columns,
            self._match,
            self._is_ordered,
            self._mode == ONE,
            self.resumes,
            self._timeout_s,
            self._guard,
            task.stopping,
        )
        if self._mode == STREAM:
            start = functools.partial(_start_stream, submitted, self._guard)
            self._stream = Stream(start, self._timeout_s, task.tell, present_files().has_just_changed)
            weakref.finalize(self, self._stream.close)
            try:
                self._stream.start()
            except (CallFailedError, WorkloadError) as error:
                raise SlurmGPUError(str(error)) from error

    def explain_misfit(self, row: Mapping[str, object]) -> str:
        """A sentence for a row with names that are not columns, unless one of the names may be mistyped."""
        return f"Do not write it.{as_columns(row, self.columns)}" if self.columns.keys() < row.keys() else ""

    def __call__(self, items: Sequence[Item]) -> list[Answer]:
        """The rows that the program writes for these items; CallFailedError if a slice or a stream fails."""
        if self._mode == ONE:
            return [self._one(item) for item in items]
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
            rows |= _by_index(call, self._caller.rows_of(Call(call)))
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
            answer = self._tried(lambda: _by_index(requests, self._caller.rows_of(call)), is_alone=True)[item.index]
        except (ItemError, Retry) as error:
            return error
        if self._line.out is not None or isinstance(answer, ItemError | Retry):
            return answer
        return self._undeclared.left_out_of(answer, item.data)

    def _request(self, item: Item) -> bytes:
        """The line of an item in `{in}`, and on a stream's standard input."""
        if self._match is not None and item.data.get(self._match) is None:
            raise ItemError(f"the item has no field {self._match!r}, which match needs")
        return request_of(item.index, item.seed, item.data, self._line.items, has_index=self._has_index)


def _start_stream(program: SubmittedProgram, guard: Guard, out: Lines, err: ToLog) -> Child:
    return Child(program.arguments({}, {}), program.environment(), out, err, guard, has_stdin=True)


def _by_index(requests: Mapping[int, bytes], rows: Mapping[int, Values]) -> dict[int, Answer]:
    return dict(zip(requests, in_order(list(requests), rows), strict=True))
