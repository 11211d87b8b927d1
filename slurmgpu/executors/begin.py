"""`python -m slurmgpu.executors.begin -u -m submitit.core._submit FOLDER`: run Submitit's job, remembering signals.

Submitit handles a job's signals itself before it calls the job's function: SIGUSR2 ends it with a TypeError if Submitit
knows no walltime for the job, and SIGTERM is ignored. Here they are remembered instead, for the task to handle.
"""

from slurmgpu.util.early_signals import remember

if __name__ == "__main__":
    remember()  # before anything that takes time is imported

import contextlib
import runpy
import sys
from typing import Any


def import_submitit() -> None:
    """Import what runs Submitit's pickles, without NumPy.

    If NumPy is installed, Submitit imports it for pickles that hold arrays. Ours hold none, and a task never needs
    NumPy: importing it took a third of a task's CPU time.
    """
    modules: dict[str, Any] = sys.modules
    modules.setdefault("numpy", None)  # makes its import an ImportError
    try:
        with contextlib.suppress(ImportError):  # another version may have no such module
            import submitit.core.submission  # noqa: F401
    finally:
        if modules["numpy"] is None:
            del modules["numpy"]


def run_job(folder: str) -> None:
    """Run the Submitit job that the environment of this process names; its files are in `folder`."""
    from submitit.core.submission import process_job

    _prepare_submitit()
    process_job(folder)


def _prepare_submitit() -> None:
    from submitit.core import job_environment

    from slurmgpu.executors.submitit_patches import patch_submitit

    patch_submitit()
    # If another version of Submitit names it otherwise, the task's function sets its own handlers later.
    setattr(job_environment.JobEnvironment, "_handle_signals", lambda *ignored: None)  # noqa: B010


def main() -> None:
    """Run the module that the arguments name, as `python -m` would."""
    import_submitit()
    _prepare_submitit()
    place = sys.argv.index("-m")
    module, sys.argv = sys.argv[place + 1], sys.argv[place + 1 :]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
