"""`status --watch`: follow a run full-screen on a terminal, or by lines in a pipe, until it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.text import Text

from slurmgpu.cli.console import json_text, result, say, screen_console
from slurmgpu.cli.exit_codes import EXIT_COMPLETE, EXIT_INCOMPLETE
from slurmgpu.cli.views.keyboard import Keyboard
from slurmgpu.cli.views.screens import Screen
from slurmgpu.cli.views.status import next_command, show_status
from slurmgpu.cli.views.status_poller import StatusPoller
from slurmgpu.report.state_words import LINE_S, News, line_of, tasks_of
from slurmgpu.report.status import Status
from slurmgpu.run.directory import Run
from slurmgpu.util.ansi import plain

WAIT_S = 5.0
"""A screen is redrawn at a key, a resize or a new status, and at least this often."""
MAX_ROWS = 50
"""The most attempts that are listed at the end."""

OnLook = Callable[[Status], None]


def watch(run: Run, *, as_json: bool = False, on_look: OnLook | None = None) -> int:
    """Follow a run until it ends or the user quits; the exit code. `on_look` gets each full status."""
    console = screen_console()
    try:
        if sys.stdout.isatty() and not console.is_dumb_terminal and not as_json:
            status = _on_screen(run, console, on_look)
        else:
            status = _in_lines(run, as_json, on_look)
            if not as_json and (command := next_command(status)):
                say(f"next: {command}")
    except KeyboardInterrupt:
        say(f"the run continues. To see it: slurmgpu status --watch {run.typed}")
        raise
    if status is None:
        return EXIT_INCOMPLETE  # a script that waits for completion must not go on after `q`
    return EXIT_INCOMPLETE if status["state"] in ("incomplete", "ended") else EXIT_COMPLETE


# On a terminal


def _on_screen(run: Run, console: Console, on_look: OnLook | None) -> Status | None:
    """Show the run until its end; its last status, None if the user quit."""
    keyboard = Keyboard()
    poller = StatusPoller(run, keyboard.wake)
    poller.visible = () if on_look is None else None
    poller.start()
    first, outcome = 0, "suspend"
    with _kept_from_the_screen() as notes:
        try:
            while outcome == "suspend":
                with keyboard.listening(), Live(console=console, screen=True, auto_refresh=False) as live:
                    first, outcome = _draw(keyboard, poller, live, first, notes, on_look)
                if outcome == "suspend":
                    # Signal the whole job, as the terminal would; an orphaned process group ignores it.
                    os.kill(0, signal.SIGTSTP)
        finally:
            poller.stop()
            keyboard.close()
    for note in notes:
        say(f"note: {note}")
    if outcome == "quit" or poller.status is None:
        return None
    show_status(poller.status, max_rows=MAX_ROWS)
    return poller.status


def _draw(
    keyboard: Keyboard, poller: StatusPoller, live: Live, first: int, notes: deque[str], on_look: OnLook | None
) -> tuple[int, str]:
    """Draw until the run ends or a key interrupts: the first visible row, and `ended`, `quit` or `suspend`."""
    seen: object = None
    screen: Screen | None = None
    live.update(Text(f"reading {plain(str(poller.run.folder))} …", style="dim"), refresh=True)
    while True:
        status, has_ended = poller.latest()
        if status is not None:
            if status is not seen:
                seen, tasks = status, tasks_of(status)
                if on_look is not None:
                    on_look(status)
            screen = Screen(status, tasks, first, poller.words, notes[-1] if notes else "")
            n_rows = screen.n_rows(live.console.height)
            first = screen.scrolled(0, live.console.height)
            poller.show([task["attempt"] for task in tasks[first : first + n_rows]])
            live.update(screen, refresh=True)
            if has_ended:
                # A terminal without an alternate screen would keep this one above the final status.
                live.console.control(Control.clear(), Control.home())
                return first, "ended"
        for key in keyboard.wait(WAIT_S):
            if key in ("quit", "suspend"):
                return first, key
            if screen is not None:
                page = max(1, n_rows - 1)
                steps = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -first, "end": len(tasks)}
                screen = Screen(screen.status, tasks, first)
                first = screen.scrolled(steps[key], live.console.height)


@contextlib.contextmanager
def _kept_from_the_screen() -> Iterator[deque[str]]:
    """Collect the last log messages, which would disturb the screen."""
    notes: deque[str] = deque(maxlen=5)

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (note := plain(record.getMessage())) not in notes:
                notes.append(note)

    root = logging.getLogger()
    former, root.handlers = root.handlers, [Notes()]
    try:
        yield notes
    finally:
        root.handlers = former


# In a pipe


def _in_lines(run: Run, as_json: bool, on_look: OnLook | None) -> Status:
    """Print a line at each change until the run ends; its last status."""
    looked = threading.Event()
    poller = StatusPoller(run, looked.set)
    poller.visible = () if on_look is None and not as_json else None
    poller.start()
    news, seen = News(), None
    try:
        while True:
            status, has_ended = poller.latest()
            if status is not None:
                if status is not seen and on_look is not None:
                    on_look(status)
                seen = status
                if news.is_due(status, always=as_json) or has_ended:
                    _tell(status, as_json)
                if has_ended:
                    return status
            looked.wait(LINE_S)
            looked.clear()
    finally:
        poller.stop()


def _tell(status: Status, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json_text(status)}\n")
    else:
        result(line_of(status))
    sys.stdout.flush()
