"""The debug executor: one task in this process, so that a debugger works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.here import Here, tasks_here
from slurmgpu.executors.interface import Lines, Started
from slurmgpu.faults import KINDS, Fault
from slurmgpu.report.outcomes import Accounting
from slurmgpu.run.directory import Run
from slurmgpu.run.heartbeats import beating
from slurmgpu.run.records import Attempt
from slurmgpu.run.submissions import Submission, job_here
from slurmgpu.util.early_signals import ended_by_exception


class Debug(Here):
    """Everything in the process that submits."""

    name = "debug"
    in_process = True

    def check_faults(self, faults: Sequence[Fault]) -> None:
        """Refuse faults that end the process."""
        for fault in faults:
            if KINDS[fault.kind].kills:
                raise SlurmGPUError(
                    f"--inject {fault} ends the process that computes, which with the executor debug is your own. "
                    f"Use --executor local."
                )

    def cancel(self, run: Run, lines: Lines, among: Sequence[Any] | None = None) -> list[str]:
        """Refuse to end the user's own process."""
        for line in lines:
            for pid in tasks_here(run, self.name, line["submission"]):
                raise SlurmGPUError(
                    f"Process {pid} computes this run with the executor debug, so it may be a debugger or a notebook. "
                    f"Interrupt it there (Ctrl-C), or type kill {pid}."
                )
        return super().cancel(run, lines)

    def start(self, run: Run, submission: Submission) -> Started:
        """Nothing yet: the task runs in `wait`."""
        from slurmgpu.task.supervisor import Task  # here, because the import is slow and `status` uses executors

        number = submission.submission
        job = job_here(self.name, number)
        attempt = Attempt(job, 0, 0, number, self.name, submission.gpus_per_task, submission.device)

        def work(on_tick: Callable[[], None]) -> Accounting:
            with ended_by_exception(then_killed=True), beating(run.folder, attempt.name_here, attempt.job):
                Task(run, attempt).run_in_process(on_tick)
            return {}

        return Started(wait=work)
