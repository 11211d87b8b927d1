"""`python -m tests.gpu [PART|PART.FINDING…]`: print each finding as it ends, and write results/GPU-NAME.md.

Exit codes: 0 all held, 1 something did not, 4 nothing was proven (there is no GPU, or nothing could be measured).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import GPUFaultError
from slurmgpu.util import gpus
from tests.gpu import record
from tests.gpu.findings import HELD, NOT_HELD, NOT_MEASURED, Finding, findings_of
from tests.gpu.record import Row

PARTS = {"core": 85, "influence": 20, "training": 95, "embedding": 105, "llm": 175}
"""The parts, with the seconds of each when all of them run; the next part may use what a part leaves.

So the first parts have most of the time to spare: they meet a machine that has read none of PyTorch's files yet.
"""
RESULTS = Path(__file__).with_name("results")
HOME = Path(__file__).parents[2]
EXIT_HELD, EXIT_NOT_HELD, EXIT_NOTHING_PROVEN = 0, 1, 4
MARKS = {HELD: "✓", NOT_HELD: "✗", NOT_MEASURED: "–"}
LOG_LINES = 15
NO_CODE = "no kernel image is available"
"""CUDA's words for a card for which PyTorch was not built: then each finding would fail, and break CUDA."""
PATIENCE = 20
"""How many times longer everything may take without a GPU."""


def main() -> int:
    """Run the parts that are named; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Prove slurmgpu on this machine's GPUs.")
    said = f"any of {', '.join(PARTS)} (default: all), or one finding by its function: core.two_runs_share_a_gpu"
    parser.add_argument("chosen", nargs="*", metavar="PART[.FINDING]", help=said)
    try:
        parts = choose(parser.parse_args().chosen or list(PARTS))
    except ValueError as error:
        parser.error(str(error))
    started = time.monotonic()
    try:
        found = gpus.probe(1) if gpus.count() else []  # none without a driver
    except GPUFaultError as error:
        print(f"nothing was proven: the GPUs of this machine cannot be used: {error}")
        return EXIT_NOTHING_PROVEN
    names = ", ".join(gpu.name for gpu in found) or "no GPU: each part runs on the CPU, at a toy size"
    patience = 1 if found else PATIENCE
    print(f"{names}. At most {sum(PARTS.values()) * patience / 60:.0f} minutes.", flush=True)
    # A toy size on a CPU only shows that the code runs.
    marks, words = (MARKS, {}) if found else ({**MARKS, HELD: "·"}, {HELD: "ran"})
    rows: list[Row] = []
    written: Path | None = None
    results = RESULTS
    claims = {each.claim for findings in choose(list(PARTS)).values() for each in findings}
    with contextlib.ExitStack() as stack:
        # All processes start now: the first part spends most of its time starting processes, and times nothing.
        waiting = {part: stack.enter_context(process_of(part, len(found))) for part in parts}
        for part, seconds in ends_of(parts).items():
            begun = time.monotonic()
            limit = seconds * patience - (begun - started)
            print(f"== {part} (at most {limit:.0f} s)", flush=True)
            for row in run_part(part, parts[part], len(found), limit, waiting[part]):
                print(f"{marks[row.verdict]} {row.claim}: {row.figures} [{row.seconds:.1f} s]", flush=True)
                if row.trace and row.figures not in [other.figures for other in rows]:
                    print("    " + row.trace.rstrip().replace("\n", "\n    "), flush=True)
                rows.append(row)
                if found:  # after each finding, so that an interrupted proof leaves a record
                    try:
                        written = record.write(results, found, rows, claims)
                    except OSError as error:  # the repository may be read-only, or its disk full
                        results = Path(tempfile.mkdtemp(prefix="slurmgpu-gpu-record-"))
                        written = record.write(results, found, rows, claims)
                        print(f"{error}; the record is written to {results}", flush=True)
            print(f"== {part} took {time.monotonic() - begun:.0f} s", flush=True)
    counts = record.count([row.verdict for row in rows], words)
    print(f"{counts}; {time.monotonic() - started:.0f} s", flush=True)
    if written is not None:
        print(f"written: {written.relative_to(HOME) if written.is_relative_to(HOME) else written}")
    if any(row.verdict == NOT_HELD for row in rows):
        return EXIT_NOT_HELD
    if not found or not any(row.verdict == HELD for row in rows):
        print("nothing was proven: there is no GPU" if not found else "nothing was proven: nothing could be measured")
        return EXIT_NOTHING_PROVEN
    return EXIT_HELD


def choose(names: Sequence[str]) -> dict[str, list[Finding]]:
    """The findings of each part that is named, all or those named; ValueError for an unknown name."""
    chosen: dict[str, list[Finding]] = {}
    for name in names:
        part, _, wanted = name.partition(".")
        if part not in PARTS:
            raise ValueError(f"there is no part {part!r}: choose from {', '.join(PARTS)}")
        findings = findings_of(importlib.import_module(f"tests.gpu.{part}"))
        found = [each for each in findings if wanted in ("", each.name)]
        if not found:
            names_of_part = ", ".join(each.name for each in findings)
            raise ValueError(f"{part} has no finding {wanted!r}: choose from {names_of_part}")
        chosen[part] = [each for each in findings if each in found or each in chosen.get(part, [])]
    return chosen


def ends_of(parts: Collection[str]) -> dict[str, float]:
    """The second by which each of these parts must end; the parts that run share the time of all."""
    seconds = [PARTS[part] * sum(PARTS.values()) / sum(PARTS[each] for each in parts) for part in parts]
    return dict(zip(parts, itertools.accumulate(seconds), strict=True))


@dataclass(frozen=True)
class Process:
    """The process of a part: it prepares what needs no GPU, then waits for the names of its findings."""

    popen: subprocess.Popen[bytes]
    log: Path


@contextlib.contextmanager
def process_of(part: str, n_gpus: int) -> Iterator[Process]:
    """The process of a part; the process and its folder end with the context."""
    with tempfile.TemporaryDirectory(prefix="slurmgpu-gpu-", ignore_cleanup_errors=True) as name:
        work, log = Path(name) / "work", Path(name) / "log"
        work.mkdir()
        with open(log, "wb") as errors:
            popen = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.part", part, str(work), str(n_gpus)],
                cwd=HOME,
                env=environ_of(n_gpus),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,  # else a line may wait in a buffer that select() does not see
                start_new_session=True,
            )
        try:
            yield Process(popen, log)
        finally:
            _end(popen)


def run_part(
    part: str, findings: Sequence[Finding], n_gpus: int, limit_s: float, first: Process | None = None
) -> Iterator[Row]:
    """A row for each of these findings of a part, within `limit_s`; a process that dies is replaced."""
    left = list(findings)
    end = time.monotonic() + limit_s
    while left:
        if (remaining := end - time.monotonic()) <= 0:
            for each in left:
                yield Row(part, each.claim, NOT_MEASURED, f"the part's {limit_s:.0f} s are used up", 0.0)
            return
        n_left = len(left)
        with contextlib.nullcontext(first) if first else process_of(part, n_gpus) as process:
            for row in _run_process(part, left, n_gpus, process, time.monotonic() + remaining):
                left = left[1:]
                yield row
                if NO_CODE in row.figures:
                    said = "this PyTorch has no code for the GPU"
                    yield from (Row(part, each.claim, NOT_MEASURED, said, 0.0) for each in left)
                    return
            if len(left) == n_left:  # it died before its first finding
                each, *left = left
                yield Row(part, each.claim, NOT_HELD, "its process ended before it began", 0.0, _tail(process.log, 0))
        first = None


def _run_process(part: str, left: Sequence[Finding], n_gpus: int, begun: Process, end: float) -> Iterator[Row]:
    process, log = begun.popen, begun.log
    assert process.stdin is not None  # it is a pipe
    with contextlib.suppress(BrokenPipeError):  # the process has ended; handled below
        process.stdin.write(" ".join(each.name for each in left).encode() + b"\n")
    try:
        for each in left:
            began, own_s = time.monotonic(), each.limit_s * (1 if n_gpus else PATIENCE)
            limit = min(end, began + own_s)
            begin, line = _hear(process, each.name, limit)
            seconds = time.monotonic() - began
            said = begin["log_bytes"] if begin else 0
            if line is not None:
                trace = line.get("trace", "")
                if line["verdict"] == NOT_HELD:
                    trace = "\n".join(filter(None, [trace, _tail(log, said)]))
                yield Row(part, each.claim, line["verdict"], line["figures"], seconds, trace)
                continue
            if begin is None and process.poll() is not None:
                return  # the previous finding broke CUDA
            is_hanging = process.poll() is None and time.monotonic() >= limit
            _end(process)
            how = f"it was stopped after {seconds:.0f} s" if is_hanging else f"its process ended with {_code(process)}"
            verdict = NOT_HELD
            if is_hanging and limit < began + own_s:  # cut short, so it measured nothing
                verdict, how = NOT_MEASURED, f"{how} (it may take {own_s:.0f} s), because the part's time is used up"
            yield Row(part, each.claim, verdict, how, seconds, _tail(log, said))
            return
    finally:
        _end(process)


def environ_of(n_gpus: int) -> dict[str, str]:
    """The environment of a part's process. With a GPU, the number of threads is as in a user's run."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    # The tasks of runs start in other folders; this lets them import the package without an install.
    environ["PYTHONPATH"] = os.pathsep.join([str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])])
    if n_gpus == 0:
        environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return environ


def _hear(
    process: subprocess.Popen[bytes], name: str, limit: float
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The lines of a finding's begin and end; None for a line that did not come before the end or the limit."""
    assert process.stdout is not None  # it is a pipe
    begin: dict[str, Any] | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, limit - time.monotonic())):
            line = process.stdout.readline()  # the writer flushes whole lines
            if not line:
                process.wait()
                break
            told: dict[str, Any] = json.loads(line)
            if told.get("begin") == name:
                begin = told
            if told.get("end") == name:
                return begin, told
    return begin, None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a part's process and its children, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path, start: int) -> str:
    """The last lines that a process wrote from byte `start` on."""
    with open(log, "rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-LOG_LINES:])


def _code(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def end(signum: int, _: object) -> None:
    """End like after Ctrl-C: the parts' processes, which have sessions of their own, end, too."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP under nohup
            signal.signal(number, end)
    sys.exit(main())
