"""A submission in a process of its own, which goes on when the process that submits ends or is interrupted.

`python -m slurmgpu.executors.detached` is that process. It does what `submission.start` does, to the end of the merge.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.job_entry import safe_path
from slurmgpu.executors.submission import Outcome
from slurmgpu.executors.submission import start as start_here
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import Submission
from slurmgpu.util.logging import log_to_stderr

LOG = "submit.log"
"""The log of that process, in the run's logs/."""


def start(run: Run, submission: Submission, notes: Sequence[str] = ()) -> Outcome:
    """Start a submission in the background; SlurmGPUError if it does not begin."""
    read, write = os.pipe()
    command = [sys.executable, "-m", __name__, str(write)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with safe_path(), open(run.logs / LOG, "ab") as log, open(read, encoding="utf-8") as answers:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[write],
                start_new_session=True,
            )
        finally:
            os.close(write)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(pickle.dumps((run.folder, submission)))
        answer = json.loads(answers.readline() or "{}")
    if "error" in answer:
        process.wait()
        raise SlurmGPUError(answer["error"])
    if not answer:
        raise SlurmGPUError(
            f"The process that was to compute the run ended with exit code {process.wait()} before it began: "
            f"{run.logs / LOG} may say why."
        )
    threading.Thread(target=process.wait, daemon=True).start()  # else it stays a zombie, which looks alive
    return Outcome(submission, {}, tuple(notes))


def main() -> int:
    """Run the submission that standard input describes; say on the given pipe once it has begun, or why not."""
    log_to_stderr()
    folder, submission = pickle.load(sys.stdin.buffer)
    answers = open(int(sys.argv[1]), "w", encoding="utf-8")  # noqa: SIM115 - closed once it has answered

    def tell(**answer: object) -> None:
        if not answers.closed:
            with answers:
                answers.write(json.dumps(answer) + "\n")

    os.set_inheritable(answers.fileno(), False)
    try:
        start_here(Run.open(folder), lambda _: (submission, []), lambda: tell(begun=True))
    except SlurmGPUError as error:
        if answers.closed:
            logging.getLogger(__name__).error("%s", error)
        else:
            tell(error=str(error))
        return 1
    tell(begun=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
