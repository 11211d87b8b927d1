"""One array task on its node: checks GPUs, keeps a worker alive, renews leases, handles signals, writes its record.

It runs on the host, outside any container image. A worker that dies is started again within the same allocation, and
an item that kills its workers is quarantined.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable

from slurmgpu.code import importer
from slurmgpu.code.snapshots import code_digest
from slurmgpu.containers.settings import ContainerError
from slurmgpu.errors import GPUFaultError, SlurmGPUError
from slurmgpu.report.outcomes import CUT_FINER, TOO_LARGE
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import FILES, POLICIES, class_of, describe_exit, is_of_disk
from slurmgpu.run.metric_log import MetricWriter
from slurmgpu.run.records import Attempt
from slurmgpu.run.worker_events import Failed, WorkerEvent
from slurmgpu.shards.names import partials_of
from slurmgpu.task.attempt_writer import END_PATIENCE_S, AttemptWriter
from slurmgpu.task.crash_tracking import Deaths
from slurmgpu.task.launcher import Launcher
from slurmgpu.task.leases import Leases
from slurmgpu.task.nodes import NodeFaultError, OtherNodes
from slurmgpu.task.spare_worker import SpareWorker
from slurmgpu.task.telemetry import sampler_of
from slurmgpu.task.walltime import Walltime
from slurmgpu.task.worker_process import (
    EXIT_STOPPED,
    GRACE_S,
    PARTING_S,
    TICK,
    Events,
    StoppedError,
    StopSignals,
    TaskEvent,
    WorkerProcess,
    next_event,
)
from slurmgpu.util import cgroups, gpus
from slurmgpu.util.early_signals import INTERRUPTS, SIGNUMS
from slurmgpu.util.exceptions import described, trace_of
from slurmgpu.util.shared_files import remove
from slurmgpu.util.signals import signal_of
from slurmgpu.worker.assignment import Assignment, WorkerFailedError
from slurmgpu.worker.parts import Parts
from slurmgpu.worker.shard_claimer import Claimer

log = logging.getLogger(__name__)

EXIT_S = 120.0
"""How long a worker may take to end after its work: something that it started may be uploading, or hang."""
GOOD_ENDS = {"complete": "every shard is published", "others": "living tasks compute the rest"}
"""Why a task takes no more shards without a failure; see docs/reference/files.md."""
ENDS = ("signal", "eof", "failed", "broken", "preempt", "timeout")
"""Events that end a worker or its task, which do not matter once a signal has ended them."""


class Task:
    """An attempt that works: `run_worker` with a worker process, `run_in_process` for the debugger.

    `spare` becomes the first worker process, if there is one.
    """

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        end_time: Callable[[], float | None] = lambda: None,
        spare: SpareWorker | None = None,
    ) -> None:
        self.run = run = run.computing(attempt.submission)
        self.attempt = attempt
        self._walltime = Walltime(attempt.end_time, end_time)
        self._launcher, self._spare = Launcher(run, attempt), spare
        self._worker_pid: int | None = None
        self._sampler = sampler_of(run, attempt, lambda: self._worker_pid)
        self.writer = AttemptWriter(run, attempt, self._sampler.usage)
        self.record = self.writer.record
        self._metrics = MetricWriter(run.folder, attempt)
        self.record["end_time"] = attempt.end_time
        self._leases = Leases(run, attempt, self.record["node"])
        self._deaths = Deaths(run, attempt.submission)
        self._kills = cgroups.KillWatch()
        self._begun = 0.0  # when the worker began what it does, as far as it is known
        self._heard = False
        self._was_told = False
        self._keeps_progress = False
        self._stopped_by: int | None = None
        self._part_by = self._exit_by = float("inf")
        self._left: int | None = None

    def run_worker(self) -> int:
        """Work with a worker process until no shard is left for this task; return the exit code."""
        signals = StopSignals(self.writer.write_if_due)  # also during long waits, such as for an image
        with signals, self._sampler, OtherNodes(self.run, self.attempt, signals) as others:
            return self._finish(self._guarded(lambda: self._keep_a_worker(signals, others)))

    def run_in_process(self, on_published: Callable[[], None]) -> int:
        """Work in this process, so that `breakpoint()` works; return the exit code. Calls `on_published` per shard."""
        try:
            return self._finish(self._guarded(lambda: self._work_here(on_published)))
        except BaseException as error:  # Ctrl-C, or the end of the debugger
            failure = "cancelled" if isinstance(error, INTERRUPTS) else "crash"
            self._fail(failure, described(error))
            self._finish(1)
            raise

    def _guarded(self, work: Callable[[], int]) -> int:
        try:
            self.run.make_folders()  # a purge may have removed those that were empty while the job was queued
            self.writer.write()
            if self.attempt.uses_gpus:
                gpus.check_visible(self.attempt.n_gpus)
            self._leases.drop_earlier()
            return work()
        except GPUFaultError as error:
            return self._fail("gpu_fault", str(error))
        except ContainerError as error:
            self.record["bad_node"] = self.record["node"] if error.node_at_fault else None
            return self._fail(error.kind, str(error))
        except NodeFaultError as error:
            self.record["bad_node"] = error.node
            return self._fail(error.kind, str(error))
        except WorkerFailedError as error:
            return self._fail(error.kind, str(error), error.trace)
        except SlurmGPUError as error:
            return self._fail(class_of(error, FILES), str(error))
        except OSError as error:
            kind = class_of(error, FILES)
            return self._fail(kind, str(error), "" if is_of_disk(kind) else trace_of(error))
        except Exception as error:
            # A bug in slurmgpu: record it and give the claims back before the task ends.
            return self._fail("crash", described(error), trace_of(error))

    def _fail(self, failure: str, message: str, trace: str = "") -> int:
        policy = POLICIES[failure]
        if policy.node_at_fault and self.record["bad_node"] is None:
            self.record["bad_node"] = self.record["node"]
        if policy.names_node:
            message = f"{self.record['bad_node']} {policy.says}: {message}"
        self.writer.fail(failure, message, trace)
        return 1

    def _parts(self) -> Parts:
        return Parts(self.run, self._leases.claim, self.attempt.submission)

    def _finish(self, code: int) -> int:
        self._leases.give_back(self._leases.find_unreported(self.record) if code else ())
        if code or self.record["deaths"]:  # otherwise the workers have given back what they claimed
            self._parts().give_back()
        self._remove_partials()
        self._metrics.close(END_PATIENCE_S)
        if self._spare is not None:
            self._spare.drop()
        self.writer.end()
        self._launcher.close()
        failure = self.record["failure"]
        own = POLICIES[failure].exit_code if failure else None
        return own if code and own else code

    def _remove_partials(self) -> None:
        """Remove partial files of dead workers; the merge removes those that cannot be removed now."""
        with contextlib.suppress(OSError):
            for partial in partials_of(self.run.shards, self.attempt.name):
                remove(partial, 0.0)

    def _keep_a_worker(self, signals: StopSignals, others: OtherNodes) -> int:
        try:
            signals.pause(0.0)  # raises if a signal came before this task listened
            others.meet()
            claimer = Claimer(self.run, self._leases.claim, pause=signals.pause)
            if self.run.plan.parts > 1:
                claimer.joins = self._parts().shard_to_join
            found = claimer.look()
            self.writer.wait(claimer.idle_s)
            if found != "work":
                self._ended_early(found)  # no need to load a model
                return 0
            self._launcher.prepare(signals.pause)
            self.record["image"] = self._launcher.image
            while (code := self._run_a_worker(signals, others)) is None:
                pass
            return code
        except StoppedError as stopped:
            self._hear_out(signals.events)
            is_over = self.record["reason"] in GOOD_ENDS and self.record["failure"] is None
            if is_over and not self._works():
                return self._end_of_work()
            return self._stopped(stopped.signum)

    def _run_a_worker(self, signals: StopSignals, others: OtherNodes) -> int | None:
        """Run one worker to its end; the exit code of the task, None if another worker is to go on."""
        self._kills, self._begun = cgroups.KillWatch(), time.monotonic()
        self._heard = self._keeps_progress = False
        self.record["reason"], self._exit_by = None, float("inf")
        with self._start_worker(others) as worker:
            self._worker_pid = worker.pid
            if self._was_told:
                worker.take_no_more()  # the previous worker may have died before it kept its progress
            self._follow(signals.events, worker)
            returncode = worker.wait()
        self._worker_pid = None
        if self._stopped_by is not None and self.record["failure"] is None:
            raise StoppedError(self._stopped_by)
        if self._is_done(returncode):
            return self._end_of_work()
        if self.record["failure"] is not None:
            return 1
        if signal_of(returncode) in SIGNUMS:
            # A signal to the whole job may reach the worker before this process: that is not a crash.
            signals.pause(0.5)
        if not self._heard and (complaint := self._launcher.explain(worker.said(), returncode)):
            raise complaint
        since_kill_s = min(self._kills.age_s, worker.since_kill_s)
        return self._add_death(returncode, was_oom=since_kill_s < time.monotonic() - self._begun + cgroups.LATE_S)

    def _end_of_work(self) -> int:
        parked = self._deaths.parked
        return self._fail("host_oom", "; ".join(parked)) if parked else 0

    def _is_done(self, returncode: int) -> bool:
        """Whether the worker had done its work when it ended."""
        if returncode == 0 or self.record["failure"] is not None:
            return returncode == 0 and self.record["reason"] is not None
        if self._works():
            return False
        log.warning("the worker %s after it had done its work", describe_exit(returncode, was_done=True))
        return True

    def _works(self) -> bool:
        """Whether the worker may still take shards, or has one to publish."""
        return self.record["reason"] is None or bool(self._leases.held)

    def _start_worker(self, others: OtherNodes) -> WorkerProcess:
        if (spare := self._spare) is not None:
            self._spare = None
            return WorkerProcess(spare.begin(self._assignment()), others.signals.events)
        return others.start(self._launcher, self._assignment(), self.run.logs / f"{self.attempt.name}.log")

    def _follow(self, events: Events, worker: WorkerProcess) -> None:
        """Handle events until the worker has ended or must be killed."""
        tick = min(1.0, self.run.plan.lease_s / 12)
        while True:
            event = next_event(events, tick) or TICK
            if event["event"] == "tick":
                worker.reap()
            if (end_time := self._learn_end()) is not None:
                worker.tell_end(end_time)
            if event["event"] == "signal":
                self._handle_signal(event["signum"], worker)
            if self._stopped_by is not None and time.monotonic() > self._part_by:
                log.warning("the worker did not end within %.0f s of the signal", PARTING_S)
                worker.stop()
                raise StoppedError(self._stopped_by)
            if event["event"] == "eof" and event["pid"] == worker.pid:
                if not worker.ends_within(GRACE_S):
                    self._deaths.note_broken("the worker closed the pipe through which it reports to its task")
                    worker.end()
                return
            if time.monotonic() > self._exit_by:
                log.warning("the worker has done its work but did not end within %.0f s; killing it", EXIT_S)
                worker.end()
                return
            self._heard = self._heard or event["event"] not in ("tick", "eof")
            self.handle(event)
            if not self._works():
                self._exit_by = min(self._exit_by, time.monotonic() + EXIT_S)

    def _hear_out(self, events: Events) -> None:
        """Record what a worker had done before it was stopped: shards that are published, and values that it logged."""
        while (event := next_event(events, 0.0)) is not None:
            if event["event"] not in ENDS:
                self.handle(event)

    def _learn_end(self) -> float | None:
        """When the walltime ends, if that was not known before."""
        if (end_time := self._walltime.learn()) is not None:
            self.record["end_time"] = end_time
        return end_time

    def _handle_signal(self, signum: int, worker: WorkerProcess) -> None:
        """Take no more shards at Slurm's notice; end the task at other signals, once the worker keeps its progress."""
        if signum == signal.SIGUSR2:
            # If the notice is about the walltime, the worker itself knows better when to stop.
            if not self._walltime.is_near:
                log.warning("SIGUSR2: this task takes no more shards")
                self._was_told = True
                worker.take_no_more()
            return
        # A user who types Ctrl-C twice does not want to wait. Slurm sends SIGTERM twice: GraceTime, then KillWait.
        if not self._keeps_progress or (self._stopped_by == signum == signal.SIGINT):
            worker.stop()
            raise StoppedError(signum)
        if self._stopped_by is None:
            log.warning("%s: the worker saves its progress and ends", signal.Signals(signum).name)
            self._stopped_by, self._part_by = signum, time.monotonic() + PARTING_S
            worker.take_no_more()

    def handle(self, event: TaskEvent) -> None:
        """Handle one event, and keep leases and the record fresh."""
        self.writer.add_event(event)
        self._kills.look()
        if event["event"] in ("batch", "progress", "waiting", "published"):
            self._begun = time.monotonic()  # what the kernel killed before, the worker has outlived
        match event["event"]:
            case "gpus":
                self._sampler.use_gpus(event["uuids"])
            case "ready":
                self._keeps_progress = event["resumes"]
                self._sampler.mark_ready()
                self.writer.write()
            case "claim" | "ahead":
                self._left = None
                self._leases.add(event["shard"])
            case "skipped":
                self._leases.let_go(event["shard"])
                self._deaths.end_call(event["shard"])
            case "batch":
                if (shard := self.record["shard"]) is not None:
                    self._deaths.begin_call(shard, event["items"], event["isolated"], event["ahead"])
            case "waiting":
                self._deaths.end_call()
            case "progress":
                self._deaths.forget_in_flight()
            case "published":
                self._leases.let_go(event["shard"])
                self._deaths.end_call(event["shard"])
                self._deaths.forget()
            case "log":
                self._metrics.write(event["points"])
            case "left":
                self._left = event["shard"]
                self._deaths.end_call()
                # An attempt that takes the shard over continues from the progress that is kept by then.
                self.writer.leave(is_kept=self._leases.leave(event["shard"]))
            case "done":
                self._ended_early(event["reason"])
            case "failed":
                self._note_failure(event)
            case "preempt":
                os.kill(os.getpid(), signal.SIGTERM)  # a fault on demand, like a real one
            case "timeout":
                self._walltime.set(event["end_time"])
                self.record["end_time"] = event["end_time"]
            case "broken":
                self._deaths.note_broken(event["message"], is_sure=event["is_sure"])
                if not event["blames_items"]:
                    self._deaths.end_call()
        self._leases.renew_if_due()
        self.writer.write_if_due()

    def _note_failure(self, event: Failed) -> None:
        """Note why the worker fails: the first of several processes counts, the others may fail because of it."""
        if self.record["failure"] is None:
            if POLICIES[event["class"]].node_at_fault:
                self.record["bad_node"] = event.get("node", self.record["node"])
            self._fail(event["class"], event["message"], event["traceback"])

    def _ended_early(self, reason: str) -> None:
        """Record why the worker took no more shards, and what happened to the one that it left."""
        self.record["reason"] = reason
        if reason in GOOD_ENDS:
            log.info("this task takes no more shards: %s", GOOD_ENDS[reason])
            return
        if self._stopped_by is not None:
            return  # see _stopped
        left, has_any = self._of_what_was_left(), bool(self.record["published"])
        done = left or f"it took no {'more shards' if has_any else 'shard'}"
        if reason == "deadline":
            self.record["failure"] = "timeout"
            longer = "" if left or has_any else "; ask for more with --slurm time=…"
            self.record["message"] = f"{done}: too little of the walltime was left{longer}"
        elif reason == "told to stop":
            self.record["failure"] = "preempted"
            self.record["message"] = f"{done}: Slurm announced the end with SIGUSR2"
        log.warning("%s: %s", self.record["failure"], self.record["message"])

    def _of_what_was_left(self) -> str | None:
        if self._left is None:
            return None
        return f"shard {self._left} was given back" + (", with its progress kept" if self._keeps_progress else "")

    def _add_death(self, returncode: int, was_oom: bool) -> int | None:
        """Record why a worker died; return the task's exit code, None if another worker should go on."""
        at = self.writer.now()  # first: the lines of the log on this death are looked for from then on
        death, why_no_more = self._deaths.add_death(returncode, was_oom, self._leases.held)
        self.writer.add_death(death, at)
        if why_no_more is not None:
            return self._fail(death["class"], why_no_more)
        self.writer.enter("starting")
        self.writer.write()
        return None

    def _stopped(self, signum: int) -> int:
        self._learn_end()  # no worker may have begun yet
        name = signal.Signals(signum).name
        by_hand = signum in (signal.SIGINT, signal.SIGHUP) or self._is_cancelled()
        is_near = self._walltime.is_near
        self.record["failure"] = "cancelled" if by_hand else "timeout" if is_near else "preempted"
        self.record["message"] = f"stopped by {name}; {self._of_what_was_left() or 'its shards were given back'}"
        if time.monotonic() > self._part_by:
            self.record["message"] += f". Its worker did not end within {PARTING_S:g} s"
        if is_near and not by_hand and self.record["shard"] is not None:
            finer = CUT_FINER if self.run.plan.shard_items > 1 else ""
            self.record["message"] += f". Shard {self.record['shard']} {TOO_LARGE}{finer}"
        log.warning("%s: %s", self.record["failure"], self.record["message"])
        return EXIT_STOPPED

    def _is_cancelled(self) -> bool:
        return bool(self.run.submission(self.attempt.submission).get("cancelled"))

    def _assignment(self) -> Assignment:
        given, line = self.attempt, self.run.submission(self.attempt.submission)
        return Assignment(
            given.task_name,
            given.name,
            given.n_gpus,
            given.device,
            self._walltime.end_time,
            self._leases.hold_all(),
            tuple(line.get("inject") or ()),
            given.cluster,
            given.submission,
            code_digest([line]),
        )

    def _work_here(self, on_published: Callable[[], None]) -> int:
        from slurmgpu.worker.worker import Worker

        def report(event: WorkerEvent) -> None:
            self.handle(event)
            if event["event"] == "published":
                on_published()

        assignment = self._assignment()
        with importer.using(self.run.folder, assignment.code):
            Worker(self.run, assignment, report).work()
        return 0
