"""One process that answers JSON lines: kept between calls, and restarted after a failure."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from slurmgpu.errors import NodeError
from slurmgpu.workloads.command.output_formats import parse_object
from slurmgpu.workloads.command.outputs import Collected
from slurmgpu.workloads.command.process import GRACE_S, CallFailedError, Child, DiedError
from slurmgpu.workloads.command.sinks import Lines, OutputError, ToLog

log = logging.getLogger(__name__)

READY = {"ready": True}
START_MARK = "command | "
TOLD_AFTER_S, TOLD_EVERY_S = 30.0, 300.0
"""When the log says that a stream is not ready, first and again."""


class Stream:
    """The process that `start(out, err)` starts; `timeout_s` limits the time to its next answer.

    `tell` gets a line for `slurmgpu status` while the process is not ready. The process is restarted if it `is_stale`
    once it is ready: a module that it imports has changed.
    """

    def __init__(
        self,
        start: Callable[[Lines, ToLog], Child],
        timeout_s: float | None,
        tell: Callable[[str], None] = lambda text: None,
        is_stale: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_stale = is_stale
        self._tell = tell
        self._start = start
        self._timeout_s = timeout_s
        self._child: Child | None = None
        self._lines = Lines()
        self._former: set[int] = set()
        self._has_served = False

    def start(self) -> Child:
        """Start the process, and wait for `{"ready": true}`; CallFailedError if it says anything else, or ends."""
        self._lines, self._has_served = Lines(), False
        child = self._child = self._start(self._lines, ToLog(START_MARK))
        try:
            line = self._next_line(child, None, is_first=True)
            if _parsed(line) != READY:
                found = line[:80].decode(errors="replace")
                raise OutputError(
                    f"the first line of stdout is {found!r}; expected {json.dumps(READY)}, which slurmgpu.serve "
                    f"writes. Print everything before it to stderr"
                )
        except OutputError as error:
            self._kill()
            raise child.misprinted(error) from error
        except BaseException:
            self._kill()
            raise
        if self._is_stale():
            log.warning(
                "a code file changed while %s started, and it may have read the file: starting it again", child.name
            )
            self._kill()
            return self.start()
        return child

    def ask(self, requests: Mapping[int, bytes], mark: str) -> dict[int, Mapping[str, Any]]:
        """The answer to each request, by index; CallFailedError if one is missing or wrong, which ends the process.

        If a process that has served earlier calls dies, the requests are asked once more: an earlier call may be the
        cause.
        """
        former, self._former = self._former - requests.keys(), set(requests)
        if self._child is not None and not self._child.has_ended() and not self._lines.whole:
            try:
                rows = self._ask(self._child, requests, mark, former)
            except DiedError as error:
                if not self._has_served:
                    raise
                log.warning("%s; asking it once more", str(error).partition("\n")[0])
                rows = None
            if rows is not None:
                return rows
        if self._child is not None:
            log.warning("%s has ended, or has sent an extra answer; starting it again", self._child.name)
            self._kill()
        try:
            child = self.start()
        except CallFailedError as error:
            raise NodeError(str(error)) from error
        rows = self._ask(child, requests, mark, ())
        assert rows is not None
        return rows

    def _ask(
        self, child: Child, requests: Mapping[int, bytes], mark: str, former: Collection[int]
    ) -> dict[int, Mapping[str, Any]] | None:
        """The answers; None if the process sends another answer to the `former` call."""
        collected = Collected(requests)
        try:
            child.take(time.monotonic())  # what it has printed since its last answer
            child.err.set_mark(mark)
            child.send(b"".join(requests.values()))
            while len(collected.rows) < len(requests):
                answer = parse_object(self._next_line(child, self._timeout_s), "a line of stdout")
                if answer.get("index") in former:
                    return None
                collected.add(answer, "a line of stdout")
        except OutputError as error:
            self._kill()
            raise child.misprinted(error) from error
        except BaseException:
            self._kill()
            raise
        self._has_served = True
        return collected.rows

    def close(self) -> None:
        """End the process; it may exit by itself first."""
        if self._child is not None:
            child, self._child = self._child, None
            child.end()

    def _kill(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.close()

    def _next_line(self, child: Child, timeout_s: float | None, *, is_first: bool = False) -> bytes:
        told_at = time.monotonic() + TOLD_AFTER_S
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._lines.whole:
            if child.has_ended() or not child.out_is_open:
                self._take_last(child)
            else:
                child.take(deadline)
                if is_first and time.monotonic() >= told_at:
                    waiting = f"waiting for {json.dumps(READY)} on the stdout of {child.name}"
                    log.info("%s", waiting)
                    self._tell(waiting)
                    told_at += TOLD_EVERY_S
                if deadline is not None and time.monotonic() >= deadline and not self._lines.whole:
                    child.close()
                    raise child.failed(f"did not answer within timeout_s = {timeout_s:g}", "timeout")
        return self._lines.whole.popleft()

    def _take_last(self, child: Child) -> None:
        """Take what a process wrote before it ended; CallFailedError if nothing is left."""
        try:
            code = child.wait(time.monotonic() + GRACE_S)
        except TimeoutError:
            child.close()
            raise child.failed("closed its stdout and went on", "output") from None
        if not self._lines.whole:
            raise child.failure(code)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
