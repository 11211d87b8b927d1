"""`make demo-train`: sweep over four trainings with two tasks, rank them, and read digits with the best one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(*command: str) -> None:
    """Run a command of Python's in this folder, after showing it."""
    print("$", *command[1:] if command[0] == "-m" else ("python", *command), flush=True)
    subprocess.run([sys.executable, *command], cwd=HERE, check=True)


shutil.rmtree(HERE / "runs", ignore_errors=True)
run("-m", "slurmgpu", "submit", "train.toml", "--executor", "local", "--gpus", "0", "--tasks", "2", *sys.argv[1:])
run("read.py")
