"""The progress of a run that Python waits for: a bar in a terminal, a line in a notebook, else lines on stderr.

May import: report, run and util.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from slurmgpu.report.state_words import News, line_of
from slurmgpu.report.status import Status, StatusReader
from slurmgpu.run.directory import Run
from slurmgpu.util.amounts import count_of

UPDATE_S = 0.5
"""How often a notebook's line changes at most."""


@contextlib.contextmanager
def following(run: Run, on_tick: Callable[[dict[str, Any]], None] | None = None) -> Iterator[Callable[[Status], None]]:
    """A function that shows each status it gets: `on_tick`, or what suits the place where Python runs."""
    if on_tick is not None:
        yield on_tick  # type: ignore[misc]  # a Status is a dict
        return
    try:
        if (display := _notebook()) is not None:
            yield _Line(display).show
        elif sys.stderr.isatty():
            with _bar(run) as show:
                yield show
        else:
            yield _lines()
    except KeyboardInterrupt:
        _say(f"interrupted; the run goes on. To come back: slurmgpu.open_run({str(run.folder)!r})")
        raise


def telling() -> Callable[[Run], None]:
    """A function that tells how far a run is that this process computes itself: no bar, beside a debugger's prompt."""
    show = _lines() if (display := _notebook()) is None else _Line(display).show
    reader: StatusReader | None = None
    looked = -math.inf

    def tell(run: Run) -> None:
        nonlocal reader, looked
        if time.monotonic() - looked < UPDATE_S:
            return
        reader, looked = reader or StatusReader(run), time.monotonic()
        show(reader.read(gpus_of=()))

    return tell


def in_words(status: Status) -> str:
    """A status in a line: `1,024 of 4,096 items, 3 failed; running, 2 tasks`."""
    n_failed = sum(status["errors_by_class"].values())
    failed = f", {n_failed:,} failed" if n_failed else ""
    running = sum(attempt["state"] != "ended" and not attempt["silent"] for attempt in status["attempts"])
    return (
        f"{status['n_items_done']:,} of {count_of(status['n_items'], 'item')}{failed}; "
        f"{status['state']}, {count_of(running, 'task')}"
    )


def _lines() -> Callable[[Status], None]:
    """Tells statuses in lines for a log; a run that ends soon has none."""
    news = News(at_once=False)
    return lambda status: _say(line_of(status)) if news.is_due(status) else None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - only while Python waits for a run


class _Line:
    """A line of a notebook's output that is updated in place."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display, self._handle, self._shown, self._at = display, None, "", 0.0

    def show(self, status: Status) -> None:
        """Show a status, unless it is as before or the line has just changed."""
        text, now = in_words(status), time.monotonic()
        is_done = status["n_items_done"] == status["n_items"] or status["state"] == "incomplete"
        if text == self._shown or (now - self._at < UPDATE_S and not is_done):
            return
        self._shown, self._at = text, now
        bar = f'<progress value="{status["n_items_done"]}" max="{status["n_items"]}"></progress>'
        data = {"text/plain": text, "text/html": f"{bar} {text}"}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _notebook() -> Callable[..., Any] | None:
    """IPython's `display` in a notebook; None elsewhere, also in IPython's terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display  # type: ignore[no-any-return]


@contextlib.contextmanager
def _bar(run: Run) -> Iterator[Callable[[Status], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=run.plan.n_items)
        yield lambda status: bar.update(task, completed=status["n_items_done"], description=in_words(status))
