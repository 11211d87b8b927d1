"""`python -m slurmgpu.executors.begin -u -m submitit.core._submit FOLDER`: Submitit's job, with early signals kept.

Submitit handles a job's signals itself before it calls the job's function: SIGUSR2 ends it with a TypeError if the job
has no walltime of Submitit's, and SIGTERM is ignored. Here they are remembered instead, for the task to handle.
"""

from slurmgpu.util.early_signals import remember

remember()  # before anything that takes time is imported

import runpy  # noqa: E402
import sys  # noqa: E402


def main() -> None:
    """Run the module that the arguments name, as `python -m` would."""
    from submitit.core import job_environment

    from slurmgpu.executors.steady import make_steady

    make_steady()
    # If another version of Submitit names it otherwise, the task's function sets its own handlers later.
    setattr(job_environment.JobEnvironment, "_handle_signals", lambda *ignored: None)  # noqa: B010
    place = sys.argv.index("-m")
    module, sys.argv = sys.argv[place + 1], sys.argv[place + 1 :]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
