"""`python -m tests.benchmarks [NAME…] [--quick] [--write]`: run benchmarks, each in a process of its own."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

QUICK = {
    "command": ["--quick"],
    "container": ["--quick"],
    "elasticity": ["--quick"],
    "embed": [],
    "front": ["--quick"],
    "map": ["--quick"],
    "inputs": ["--size-mb", "100"],
    "llm": ["--quick"],
    "merge": ["--quick"],
    "overhead": ["--quick"],
    "page": ["--quick"],
    "structures": ["--quick"],
    "tracin": ["--quick"],
    "train": ["--quick"],
    "watch": ["--quick"],
}
"""The benchmarks, and what makes each of them quick."""

RESULTS = Path(__file__).with_name("results")
QUIET_LOAD = 0.3
"""Runnable processes for each core above which a measurement is put off, for a while."""
PATIENCE_S = 180


def main() -> int:
    """Run what is asked for; 1 when a target was missed or a benchmark failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(QUICK)}")
    parser.add_argument("--quick", action="store_true", help="see that they work: the numbers are worth less")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}/NAME.md")
    arguments = parser.parse_args()
    names = arguments.names or list(QUICK)
    if unknown := set(names) - set(QUICK):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(QUICK)}")
    codes = [run(name, quick=arguments.quick, write=arguments.write) for name in names]
    return 1 if any(codes) else 0


def run(name: str, *, quick: bool, write: bool) -> int:
    """Run one benchmark, show what it prints, and keep it if asked to; its exit code."""
    load = wait_for_quiet()
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", f"tests.benchmarks.bench_{name}", *(QUICK[name] if quick else [])]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # it is a pipe
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    print(flush=True)
    if write:
        shown = " ".join(["python", *command[1:]])
        facts = "".join(f"- {fact}\n" for fact in [*machine(), f"load before it: {load:.2f}"])
        parts = (
            f"# {name}",
            f"`{shown}`",
            f"```text\n{''.join(lines).rstrip()}\n```",
            f"Measured {time.strftime('%F')} on:",
        )
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text("\n\n".join([*parts, facts]))
    return process.returncode


def wait_for_quiet() -> float:
    """Wait until little else runs on this machine, or for three minutes; the 1-minute load then."""
    deadline = time.monotonic() + PATIENCE_S
    limit = QUIET_LOAD * (os.cpu_count() or 1)
    while (load := os.getloadavg()[0]) > limit:
        if time.monotonic() > deadline:
            print(f"the load is {load:.2f}: something else runs here, and the numbers may suffer", file=sys.stderr)
            break
        time.sleep(2)
    return load


def machine() -> list[str]:
    """What the numbers were measured on; nothing that names a host or a site."""
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = re.match(r"\d+\.\d+(\.\d+)?", platform.release())
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("h5py", "numpy", "submitit")]
    return [
        f"{len(os.sched_getaffinity(0))} cores of {cpu[1] if cpu else platform.machine()}, {memory_gb:.0f} GB memory",
        f"{platform.freedesktop_os_release()['PRETTY_NAME']}, Linux {kernel[0] if kernel else ''}, {slurm_version()}",
        f"Python {platform.python_version()}, {', '.join(versions)}",
    ]


def slurm_version() -> str:
    """Slurm's version, as its controller prints it; or that there is none."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    program = shutil.which("slurmctld", path=path)
    if program is None:
        return "no Slurm"
    return subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
