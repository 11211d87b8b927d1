"""The finding with vLLM of the proof on a GPU, on this machine's CPU."""

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.__main__ import EXIT_NOTHING_PROVEN

HOME = Path(__file__).parents[2]


def test_the_finding_runs_on_a_cpu():
    """By the command: an engine that is closed ends all of its process."""
    command = [sys.executable, "-m", "tests.gpu", "llm.vllm_answers_as_fp32"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=HOME, env=environ, capture_output=True, text=True, timeout=800)
    assert done.returncode == EXIT_NOTHING_PROVEN, done.stdout + done.stderr
    assert "1 ran, 0 did not hold" in done.stdout
