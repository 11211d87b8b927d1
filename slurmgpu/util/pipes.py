"""The worker's ends of its two pipes: events to the task in lines of JSON, and commands from it.

Standard output and standard input are the pipes. The processes of a group share them: rank 0 reports and listens, the
others report only why they fail, and all of them notice if the task dies.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from slurmgpu.util.process_tree import leave_with_all

EXIT_ABANDONED = 75
FAILURES = ("failed", "broken")

_outlived: set[int] = set()


def report_on_stdout(rank: int, local_rank: int) -> Callable[[Mapping[str, Any]], None]:
    """Reserve the pipe to the task for events: the workload's output goes to standard error.

    On each node the first rank reports that it has started.
    """
    pipe = os.dup(1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def report(event: Mapping[str, Any]) -> None:
        line = _line(event)
        with lock:
            while line:
                line = line[os.write(pipe, line) :]

    def report_failure(event: Mapping[str, Any]) -> None:
        if event["event"] in FAILURES:
            report_briefly({**event, "message": f"rank {rank}: {event['message']}"}, pipe)
        elif event["event"] == "loading" and local_rank == 0:
            report(event)

    return report_failure if rank else report


def report_briefly(event: Mapping[str, Any], pipe: int = 1) -> None:
    """Report with one write that is atomic among several writers: pipe(7); long texts are cut."""
    brief, room = event, select.PIPE_BUF
    while len(line := _line(brief)) > select.PIPE_BUF:
        room //= 2
        # Keep the end of a traceback, but the beginning of any other text.
        brief = {key: _cut(value, room, key == "traceback") for key, value in event.items()}
    os.write(pipe, line)


def listen_on_stdin(stopping: threading.Event, on_end_time: Callable[[float], None]) -> None:
    """Set `stopping` when the task says so, and exit when the task is gone, which closes its end of the pipe.

    The processes that this one has started end too, as when the task ends them.
    `on_end_time` is called with the end of the walltime if the task learns it later.
    """
    stdin = _take_stdin()

    def watch() -> None:
        rest = b""
        while chunk := os.read(stdin, 4096):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                word, _, value = line.partition(b" ")
                if word == b"end":
                    on_end_time(float(value))
                else:
                    stopping.set()
        leave_with_all(EXIT_ABANDONED)

    threading.Thread(target=watch, daemon=True, name="the task's words").start()


def watch_stdin(on_end: Callable[[], None] = lambda: leave_with_all(EXIT_ABANDONED)) -> None:
    """Call `on_end` when the task is gone, without reading what it writes."""
    stdin = os.dup(0)

    def watch() -> None:
        poll = select.poll()
        poll.register(stdin, 0)  # only the closed end, which is always reported
        poll.poll()
        on_end()

    threading.Thread(target=watch, daemon=True, name="the task's life").start()


def outlive_signals() -> None:
    """Ignore signals that Slurm may send to every process of a job: the task gets them too, and tells the worker."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A handler: programs that the workload starts would inherit SIG_IGN.
        signal.signal(signum, lambda signum, frame: _outlived.add(signum))
        signal.siginterrupt(signum, False)


def has_outlived(signum: int) -> bool:
    """Whether this process has ignored such a signal, which its child processes then got as well."""
    return signum in _outlived


def close_stdin() -> None:
    """Give the workload an empty standard input, so that it does not read the task's commands."""
    os.close(_take_stdin())


def _take_stdin() -> int:
    stdin = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return stdin


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(event)).encode() + b"\n"


def _cut(value: Any, room: int, from_end: bool) -> Any:
    if not isinstance(value, str):
        return value
    return value[-room:] if from_end else value[:room]
