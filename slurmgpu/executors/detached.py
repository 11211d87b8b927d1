"""Run a submission in a separate process, which goes on when the process that submits ends or is interrupted.

`python -m slurmgpu.executors.detached` is that process. It does what `submission.start` does, to the end of the merge.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import submission as submitting
from slurmgpu.executors.registry import executor_named
from slurmgpu.executors.submission import Outcome
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import Submission
from slurmgpu.util.logging import log_to_stderr
from slurmgpu.util.packages import own_python_path
from slurmgpu.util.process_wide import safe_path
from slurmgpu.util.regular_files import open_to_append

LOG = "submit.log"
"""The log of that process, in the run's logs/."""
MOST = 2000
"""The most characters of its output that an error quotes."""


class Background:
    """A process that imports its modules while it waits for a submission; leaving the `with` block ends an idle one.

    `executor` is the requested executor's name, `n_slots` the number of tasks at once. `workload` is a built-in
    workload, "package.module:Class", which is imported as well.
    """

    def __init__(self, executor: str, n_slots: int, workload: str) -> None:
        self._asked = executor, str(n_slots), workload.partition(":")[0]

    def __enter__(self) -> Background:
        answers, given = os.pipe()
        self._answers, self._errors = open(answers, encoding="utf-8"), tempfile.TemporaryFile()
        try:
            with safe_path():
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-m", __name__, str(given), *self._asked],
                    stdin=subprocess.PIPE,
                    stdout=self._errors,
                    stderr=self._errors,
                    env={**os.environ, **own_python_path()},
                    pass_fds=[given],
                    start_new_session=True,
                )
        finally:
            os.close(given)
        threading.Thread(
            target=self._process.wait, daemon=True
        ).start()  # otherwise it becomes a zombie, which looks alive
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._answers.close()
        self._errors.close()

    def start(self, run: Run, submission: Submission, notes: Sequence[str] = ()) -> Outcome:
        """Start a submission; SlurmGPUError if it does not begin."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(pickle.dumps((run.folder, submission)))
        answer = json.loads(self._answers.readline() or "{}")
        if "error" in answer:
            raise SlurmGPUError(answer["error"])
        if not answer:
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip() or f"{run.logs / LOG} may say why"
            raise SlurmGPUError(
                f"The background process that computes the run ended with exit code {code} before it began: "
                f"{said[-MOST:]}"
            )
        return Outcome(submission, {}, tuple(notes))


def main() -> int:
    """Run the submission that standard input describes; report on the given pipe that it has begun, or why not."""
    answers = open(int(sys.argv[1]), "w", encoding="utf-8")  # noqa: SIM115 - closed once it has answered
    os.set_inheritable(answers.fileno(), False)
    executor, n_slots = executor_named(sys.argv[2]), int(sys.argv[3])
    executor.import_ahead(n_slots)
    importlib.import_module(sys.argv[4])
    if not (given := sys.stdin.buffer.read()):
        return 0  # nothing is submitted

    def tell(**answer: object) -> None:
        if not answers.closed:
            with answers:
                answers.write(json.dumps(answer) + "\n")

    folder, submission = pickle.loads(given)
    with open_to_append(folder / "logs" / LOG) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    is_as_asked = (submission.executor, submission.n_concurrent) == (executor.name, n_slots)
    if is_as_asked and (work := executor.fork_ahead(n_slots)) is not None:  # in a fork
        answers.close()
        work()
    log_to_stderr()
    try:
        submitting.start(Run.open(folder), lambda _: (submission, []), lambda: tell(begun=True))
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
