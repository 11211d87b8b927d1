"""`python -m tests.gpu [PART…]`: tell each finding as it comes, and write results/GPU-NAME.md.

Exit codes: 0 all held, 1 something did not, 4 nothing was proven, as there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import GPUFaultError
from slurmgpu.util import gpus
from tests.gpu.findings import HELD, NOT_HELD, NOT_TO_BE_HAD, Finding, findings_of

PARTS = {"core": 130, "llm": 150, "influence": 40, "training": 110, "embedding": 50}
"""The parts, and the most seconds that each may take."""
RESULTS = Path(__file__).with_name("results")
HOME = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "triton", "h5py", "numpy", "accelerate", "torchao", "bitsandbytes", "vllm")
EXIT_HELD, EXIT_NOT_HELD, EXIT_NOTHING_PROVEN = 0, 1, 4
MARKS = {HELD: "✓", NOT_HELD: "✗", NOT_TO_BE_HAD: "–"}
LOG_LINES = 15
PATIENCE = 20
"""How many times longer everything may take without a GPU, where it proves nothing."""


@dataclass(frozen=True)
class Row:
    """What came of a finding."""

    part: str
    claim: str
    verdict: str
    figures: str
    seconds: float
    trace: str = ""


def main() -> int:
    """Run the parts that are asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Prove slurmgpu on this machine's GPUs.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which (default: all): {', '.join(PARTS)}")
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    started = time.monotonic()
    found = visible_gpus()
    names = ", ".join(gpu.name for gpu in found) or "no GPU: each part runs on the CPU, at a toy size"
    print(f"{names}. At most {sum(PARTS[part] for part in parts) / 60:.0f} minutes.", flush=True)
    # What a toy size on a CPU shows is that the code runs.
    marks, words = (MARKS, {}) if found else ({**MARKS, HELD: "·"}, {HELD: "ran"})
    rows: list[Row] = []
    for part in parts:
        begun = time.monotonic()
        print(f"== {part} (at most {PARTS[part]} s)", flush=True)
        for row in run_part(part, len(found)):
            print(f"{marks[row.verdict]} {row.claim}: {row.figures} [{row.seconds:.1f} s]", flush=True)
            if row.trace and row.figures not in [other.figures for other in rows]:
                print("    " + row.trace.rstrip().replace("\n", "\n    "), flush=True)
            rows.append(row)
        print(f"== {part} took {time.monotonic() - begun:.0f} s", flush=True)
    counts = ", ".join(f"{sum(row.verdict == each for row in rows)} {words.get(each, each)}" for each in MARKS)
    print(f"{counts}; {time.monotonic() - started:.0f} s", flush=True)
    if found:
        print(f"written: {write(found, rows, counts)}")
    if any(row.verdict == NOT_HELD for row in rows):
        return EXIT_NOT_HELD
    if not found or not any(row.verdict == HELD for row in rows):
        print("nothing was proven: there is no GPU" if not found else "nothing was proven: nothing could be tried")
        return EXIT_NOTHING_PROVEN
    return EXIT_HELD


def visible_gpus() -> Sequence[gpus.GPU]:
    """The GPUs of this machine; none without a driver."""
    try:
        return gpus.probe(1) if gpus.count() else []
    except GPUFaultError as error:
        print(f"the GPUs of this machine cannot be used: {error}", file=sys.stderr)
        return []


def run_part(part: str, n_gpus: int) -> Iterator[Row]:
    """A row for each finding of a part, by as many processes as it takes."""
    left = findings_of(importlib.import_module(f"tests.gpu.{part}"))
    end = time.monotonic() + PARTS[part] * (1 if n_gpus else PATIENCE)
    while left:
        if (remaining := end - time.monotonic()) <= 0:
            for each in left:
                yield Row(part, each.claim, NOT_TO_BE_HAD, f"the {PARTS[part]} s of the part are over", 0.0)
            return
        n_left = len(left)
        with tempfile.TemporaryDirectory(prefix="slurmgpu-gpu-", ignore_cleanup_errors=True) as folder:
            for row in _run_process(part, left, n_gpus, Path(folder), time.monotonic() + remaining):
                left = left[1:]
                yield row
        if len(left) == n_left:  # it died before its first finding
            each, *left = left
            yield Row(part, each.claim, NOT_HELD, "its process did not come to it", 0.0)


def _run_process(part: str, left: Sequence[Finding], n_gpus: int, folder: Path, end: float) -> Iterator[Row]:
    command = [sys.executable, "-m", "tests.gpu.part", part, str(folder / "work"), str(n_gpus)]
    (folder / "work").mkdir()
    log = folder / "log"
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Nothing needs to be installed: the tasks of runs begin elsewhere, and find the package here.
    environ["PYTHONPATH"] = os.pathsep.join([str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])])
    if n_gpus == 0:
        environ["OMP_NUM_THREADS"] = "1"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [*command, *(each.name for each in left)],
            cwd=HOME,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            bufsize=0,  # else a line may wait in a buffer that select() does not see
            start_new_session=True,
        )
    try:
        for each in left:
            begun = time.monotonic()
            limit = min(end, begun + each.limit_s * (1 if n_gpus else PATIENCE))
            has_begun, line = _hear(process, each.name, limit)
            seconds = time.monotonic() - begun
            if line is not None:
                yield Row(part, each.claim, line["verdict"], line["figures"], seconds, line.get("trace", ""))
                continue
            if not has_begun and process.poll() is not None:
                return  # the finding before has broken CUDA
            is_hanging = process.poll() is None and time.monotonic() >= limit
            _end(process)
            how = f"it was stopped after {seconds:.0f} s" if is_hanging else f"its process ended by {_code(process)}"
            if is_hanging and limit == end:
                how += ", as the part's time is over"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            yield Row(part, each.claim, NOT_HELD, how, seconds, tail)
            return
    finally:
        _end(process)


def _hear(process: subprocess.Popen[bytes], name: str, limit: float) -> tuple[bool, dict[str, Any] | None]:
    """Whether a finding has begun, and the line of its end; None if the process ended or the time is over before."""
    assert process.stdout is not None  # it is a pipe
    has_begun = False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, limit - time.monotonic())):
            line = process.stdout.readline()  # the writer flushes whole lines
            if not line:
                process.wait()
                return has_begun, None
            told: dict[str, Any] = json.loads(line)
            has_begun = has_begun or told.get("begin") == name
            if told.get("end") == name:
                return True, told
    return has_begun, None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a part's process and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _code(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def write(found: Sequence[gpus.GPU], rows: Sequence[Row], counts: str) -> Path:
    """Write the record of this kind of GPU; its path, relative to the repository."""
    gpu = found[0]
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu.name).strip("-")
    facts = [
        f"{len(found)} × {gpu.name}, {gpu.memory_bytes / 1e9:.1f} GB, driver {gpu.driver}, for CUDA {gpu.cuda}",
        f"Python {platform.python_version()}, {', '.join(versions())}",
        f"{len(os.sched_getaffinity(0))} cores, measured {time.strftime('%F')}: {counts}",
    ]
    lines = [f"# {gpu.name}", "", "`python -m tests.gpu`", "", *(f"- {fact}" for fact in facts)]
    for part in dict.fromkeys(row.part for row in rows):
        of_part = [row for row in rows if row.part == part]
        lines += ["", f"## {part} ({sum(row.seconds for row in of_part):.0f} s)", "", "| what must hold | | figures |"]
        lines += ["| --- | --- | --- |"]
        lines += [f"| {_cell(row.claim)} | {row.verdict} | {_cell(row.figures)} |" for row in of_part]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path.relative_to(HOME)


def versions() -> Iterator[str]:
    """The packages that matter, as far as they are installed."""
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
