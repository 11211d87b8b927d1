"""`make demo`: embed 4,000 definitions on this machine's CPU, without Slurm, and look at the neighbours."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
N_TASKS = min(4, os.cpu_count() or 1)


def run(*command: str) -> None:
    """Run a command of Python's in this folder, after showing it."""
    print("$", *command[1:] if command[0] == "-m" else ("python", *command), flush=True)
    subprocess.run([sys.executable, *command], cwd=HERE, check=True)


shutil.rmtree(HERE / "runs", ignore_errors=True)
run("-m", "slurmgpu", "submit", "--executor", "local", "--gpus", "0", "--tasks", str(N_TASKS))
run("neighbours.py")
