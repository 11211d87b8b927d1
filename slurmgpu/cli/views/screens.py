"""The screen of `status --watch`, drawn from a status at any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slurmgpu.cli.views.columns import bare_table
from slurmgpu.report.state_words import (
    failure_words,
    last_message,
    merge_words,
    pace_words,
    part_of,
    parting_words,
    queue_words,
    shard_of,
    state_of,
)
from slurmgpu.report.status import Status, StatusAttempt
from slurmgpu.util.amounts import clock, rate_of, share_of
from slurmgpu.util.ansi import plain

LEAST_MESSAGE = 12
"""The least width of messages; columns are dropped to keep it."""
ROOM_FOR_MESSAGES = 48
"""Optional columns are added while messages keep this width."""
STYLES = {"running": "green", "loading": "cyan", "starting": "cyan", "silent": "yellow", "failed": "red"}
RUN_STYLES = {"complete": "bold green", "running": "green", "merging": "green", "incomplete": "bold red"}
WIDE = 120
"""Terminals of at least this width get wider gaps."""
HINT = "q quits, ↑↓ scroll"


@dataclass(frozen=True)
class Screen:
    """A screen that Rich renders at the terminal's present size.

    `first` is the task in the first row, `words` are last lines of logs by task, `note` is a warning.
    """

    status: Status
    tasks: Sequence[StatusAttempt]
    first: int = 0
    words: Mapping[str, str] | None = None
    note: str = ""

    def n_rows(self, height: int) -> int:
        """The number of tasks that fit."""
        return max(0, height - len(self._head(80)) - 3)

    def scrolled(self, by: int, height: int) -> int:
        """The first row after scrolling, clamped to the existing rows."""
        return max(0, min(self.first + by, len(self.tasks) - self.n_rows(height)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        n_rows = self.n_rows(height)
        first = self.scrolled(0, height)
        if self.tasks and not n_rows:
            yield Group(*self._head(width)[: max(0, height - 1)], _foot(self.tasks, first, 0))
            return
        yield Group(*self._head(width), Text())
        if self.tasks:
            say = partial(last_message, words=self.words or {}, now=self.status["time"])
            table = task_table(self.tasks, first, n_rows, width, say)
            yield table
            n_shown = min(n_rows, len(self.tasks) - first)
            yield Group(*[Text()] * (n_rows - n_shown), _foot(self.tasks, first, n_shown))
        else:
            yet = "" if self.status["state"] in ("ended", "complete", "incomplete") else " yet"
            yield Text(f"no task has started{yet}", style="dim")

    def _head(self, width: int) -> list[RenderableType]:
        status = self.status
        state = status["state"]
        title = Text.assemble((plain(status["run"]), "bold"), "  ", (state, RUN_STYLES.get(state, "yellow")))
        if status["submitted"]:
            title.append(f"  {clock(status['time'] - status['submitted'])}")
        title.append(f"  {HINT}", "dim")
        done = ((status["n_items_done"], status["n_items"]), (status["n_shards_done"], status["n_shards"]))
        bars = [_bar(name, *of, width) for name, of in zip(("items", "shards"), done, strict=True)]
        going = (("pace", pace_words(status)), ("merge", merge_words(status) or parting_words(status)))
        failures = ("failures", failure_words(status)), ("last", plain(status["last_failed"] or ""))
        said = (*going, *failures, ("queue", queue_words(status)))
        lines = [_line(name, text, "red" if name == "failures" else "") for name, text in said if text]
        return [_cut(title), *bars, *lines, *([_line("note", plain(self.note), "yellow")] if self.note else [])]


def _cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _line(name: str, text: str, style: str = "") -> Text:
    return _cut(Text.assemble((f"{name:<9}", "bold"), (text, style)))


def _bar(name: str, done: int, total: int, width: int) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    counts = f"{done:,} of {total:,}"
    grid.add_column(width=8)
    grid.add_column(width=max(4, width - 8 - len(counts) - 12))
    grid.add_column(width=len(counts), no_wrap=True)
    grid.add_column(width=7, no_wrap=True, justify="right")
    grid.add_row(Text(name, "bold"), ProgressBar(total=max(1, total), completed=done), counts, share_of(done, total))
    return grid


def _foot(tasks: Sequence[StatusAttempt], first: int, n_shown: int) -> Text:
    counts = Counter(map(state_of, tasks))
    words = ", ".join(f"{counts[state]:,} {state}" for state in (*STYLES, "ended") if counts[state])
    shown = f"tasks {first + 1:,}–{first + n_shown:,} of {len(tasks):,}" if n_shown else f"{len(tasks):,} tasks"
    return _cut(Text(f"{shown}: {words}", style="dim"))


# The table of tasks


@dataclass(frozen=True)
class Column:
    """A column of the table of tasks."""

    title: str
    show: Callable[[StatusAttempt], str]
    is_text: bool = False


def _gpu(
    key: Literal["utilisation", "memory_bytes", "temperature_c", "power_w"], show: Callable[[float], str]
) -> Callable[[StatusAttempt], str]:
    def text(task: StatusAttempt) -> str:
        value = task["gpu"] and task["gpu"][key]
        return "" if value is None else show(value)

    return text


def _count(key: Literal["n_shards", "n_errors", "n_deaths", "n_gpus"]) -> Callable[[StatusAttempt], str]:
    return lambda task: f"{task[key]:,}"


NEEDED = (
    Column("task", lambda task: plain(task["attempt"]), is_text=True),
    Column("state", state_of, is_text=True),
    Column("node", lambda task: plain(task["node"])[:24], is_text=True),
    Column("GPU %", _gpu("utilisation", lambda value: f"{value:.0f}")),
    Column("GPU GB", _gpu("memory_bytes", lambda value: f"{value / 1e9:.1f}")),
    Column("shard", shard_of),
    Column("part", part_of),
    Column("items/s", lambda task: "" if task["items_per_s"] is None else rate_of(task["items_per_s"])),
)
GIVING_WAY = ("GPU GB", "shard", "node", "GPU %", "items/s", "part")
"""Columns that a narrow terminal drops, in this order."""
MORE = (
    Column("shards", _count("n_shards")),
    Column("°C", _gpu("temperature_c", str)),
    Column("W", _gpu("power_w", lambda value: f"{value:.0f}")),
    Column("failed", _count("n_errors")),
    Column("deaths", _count("n_deaths")),
    Column("GPUs", _count("n_gpus")),
)
"""Columns that are added if there is room."""
GPU_WIDTHS = {"GPU %": 5, "GPU GB": 6, "°C": 3, "W": 5}
"""Fixed widths: GPUs are read only for visible rows."""


def task_table(
    tasks: Sequence[StatusAttempt], first: int, n_rows: int, width: int, say: Callable[[StatusAttempt], str]
) -> Table:
    """The visible rows, with the columns that fit; `say` gives a task's last message."""
    chosen = _columns(tasks, width)
    gap = 2 if width >= WIDE else 1
    table = bare_table(gap, width=width)
    for column, size in chosen:
        table.add_column(
            column.title, width=size, justify="left" if column.is_text else "right", no_wrap=True, overflow="ellipsis"
        )
    table.add_column("last message", ratio=1, no_wrap=True, overflow="ellipsis")
    for task in tasks[first : first + n_rows]:
        state = state_of(task)
        style = STYLES.get(state, "dim")
        cells = [Text(c.show(task), style if c.title == "state" else "") for c, _ in chosen]
        message = Text(say(task), "red" if state == "failed" else "")
        table.add_row(*cells, message, style="dim" if state == "ended" else None)
    return table


def _columns(tasks: Sequence[StatusAttempt], width: int) -> list[tuple[Column, int]]:
    has_gpus = any(task["n_gpus"] for task in tasks)
    needed = [column for column in NEEDED if has_gpus or column.title not in GPU_WIDTHS]
    more = [column for column in MORE if has_gpus or column.title not in (*GPU_WIDTHS, "GPUs")]
    sizes = {column.title: _size(column, tasks) for column in (*needed, *more)}
    for title in GIVING_WAY:
        if _left(needed, sizes, width) >= LEAST_MESSAGE:
            break
        needed = [column for column in needed if column.title != title]
    for column in more:
        if _left([*needed, column], sizes, width) >= ROOM_FOR_MESSAGES:
            needed.append(column)
    return [(column, sizes[column.title]) for column in needed]


def _left(columns: Iterable[Column], sizes: Mapping[str, int], width: int) -> int:
    gap = 2 if width >= WIDE else 1
    return width - sum(sizes[column.title] + gap for column in columns)


def _size(column: Column, tasks: Sequence[StatusAttempt]) -> int:
    if column.title in GPU_WIDTHS:
        return GPU_WIDTHS[column.title]
    return max(len(column.title), *(len(column.show(task)) for task in tasks))
