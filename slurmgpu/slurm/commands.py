"""Run Slurm's commands and parse their answers; if one fails, details are lost, never data."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from slurmgpu.errors import NoAnswerError
from slurmgpu.report.outcomes import Accounted
from slurmgpu.run.failures import class_of_job
from slurmgpu.run.submissions import seconds_of
from slurmgpu.util import process_wide
from slurmgpu.util.array_ids import array_of
from slurmgpu.util.forks import TOO_MANY

log = logging.getLogger(__name__)

TIMEOUT_S, TELL_S = 30, 5
"""How long a command may take, and how long until a warning names it: sacctmgr waits for a slurmdbd that hangs."""
_NAMED: set[str] = set()
"""Commands that were logged: a command that waits for a run asks again every few seconds."""
ARRAY_JOB = "ARRAY_JOB"
"""The placeholder of the array's id in the script of a merge that is only shown."""
_ELSEWHERE = (
    "Submit from a node of the cluster, or compute here: --executor local, with --gpus 0 if there are none "
    '(in Python: executor="local", gpus=0).'
)
NOT_HERE = f"This machine has no {{}}. {_ELSEWHERE}"
NOT_SET_UP = (
    "{} is installed here but finds no cluster: neither SLURM_CONF, nor /etc/slurm/slurm.conf, nor DNS names one. "
    + _ELSEWHERE
)
NO_CONFIGURATION = "Could not establish a configuration source"
"""The end of Slurm's message for it."""

FULL = "Resource temporarily unavailable|Unable to create job record, try again"
"""sbatch says so after two minutes if slurmctld has MaxJobCount jobs, those that ended within MinJobAge included."""
SILENCE = re.compile(
    "Unable to contact slurm controller|Socket timed out|Zero Bytes were|Communication \\w+ failure|standby mode"
    f"|{FULL}"
)
"""Messages of slurm_errno.h; sbatch may still have queued a job, unless no slurmctld took its request."""
NOT_TAKEN = re.compile(f"Unable to contact slurm controller \\(connect failure\\)|standby mode|{FULL}")

INHERITED = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "SUBMITIT_")
KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}
"""Variables that do not belong to a job: they tell Slurm's commands the cluster and the user's token."""

PREFERENCES = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_", "SLURM_CLUSTERS")
"""Prefixes of a user's options for commands, which could hide jobs or ask other clusters."""
ENVIRON = {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
"""Names of arrays are not cut at 64 characters, and times have the format that `queue` reads."""

CLUSTER_VARIABLES = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
"""The variable that sbatch reads as --clusters."""


OF_SETTINGS = {"sacctmgr", "scontrol --all", "scontrol show", "sbatch --version"}
"""The beginnings of commands whose answers are settings of the cluster."""


class SlurmUnavailableError(NoAnswerError):
    """A Slurm command is missing, failed or did not answer."""


_known: ContextVar[dict[tuple[str, ...], str | SlurmUnavailableError] | None] = ContextVar("known", default=None)


@contextlib.contextmanager
def settings_asked_once() -> Iterator[None]:
    """Cache Slurm's answers about settings of the cluster in the block: the runs of a sweep ask for the same.

    Missing answers of accounting are cached as well: each run would wait up to TIMEOUT_S for one.
    """
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def has_ended(state: str) -> bool:
    """Whether a job in this state has ended; False for an unknown state."""
    return state == "COMPLETED" or class_of_job(state) is not None


def is_silence(said: str) -> bool:
    """Whether a command's message says that slurmctld did not answer: it is down, restarting, or too busy."""
    return SILENCE.search(said) is not None


def was_not_taken(said: str) -> bool:
    """Whether a command's message says that no slurmctld took its request, so that nothing is queued."""
    rest, n_such = NOT_TAKEN.subn("", said)
    return n_such > 0 and not is_silence(rest)


def run(*command: str) -> str:
    """Standard output of a Slurm command; SlurmUnavailableError with its message if it fails."""
    known = _known.get()
    if known is None or OF_SETTINGS.isdisjoint({command[0], " ".join(command[:2])}):
        return _output_of(*command)
    if command not in known:
        try:
            known[command] = _output_of(*command)
        except SlurmUnavailableError as error:
            if command[0] != "sacctmgr":
                raise
            known[command] = error
    if isinstance(answer := known[command], SlurmUnavailableError):
        raise answer.with_traceback(None)  # else it would hold the frames of each run that met it
    return answer


def _output_of(*command: str) -> str:
    done = _call(*command)
    if done.returncode and NO_CONFIGURATION in done.stderr:
        raise SlurmUnavailableError(NOT_SET_UP.format(command[0]), is_absent=True)
    if done.returncode:
        said = f"{' '.join(command[:2])} failed: {done.stderr.strip()}"
        if is_silence(said):
            raise SlurmUnavailableError(f"{said.rstrip('.')}. Try again later.", is_silent=True)
        raise SlurmUnavailableError(said)
    return done.stdout


def table(separator: str, n_fields: int, *command: str) -> list[list[str]]:
    """The lines of a Slurm command's output that have `n_fields` fields.

    Other lines come from a site's wrapper, which may print anything before and after.
    """
    found = (line.split(separator) for line in run(*command).splitlines())
    return [fields for fields in found if len(fields) == n_fields]


def sacctmgr(what: str, keys: Sequence[str], *which: str) -> list[dict[str, str]]:
    """The rows of a table of the accounting database, by these columns."""
    ask = ("sacctmgr", "--noheader", "--parsable2", "show", what, *which, f"format={','.join(keys)}")
    return [dict(zip(keys, fields, strict=True)) for fields in table("|", len(keys), *ask)]


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFERENCES)} | ENVIRON
    try:
        # replace: names and arguments of jobs may be any bytes.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environ
        ) as process:
            try:
                output = _communicate(process, command[0])
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, *output)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # of PATH, a part may not be searched
        said = f"This node has no {command[0]}." if "SLURM_JOB_ID" in os.environ else NOT_HERE.format(command[0])
        raise SlurmUnavailableError(said) from None
    except BlockingIOError as error:
        raise SlurmUnavailableError(f"{command[0]} cannot be asked. {TOO_MANY}", is_silent=True) from error
    except subprocess.TimeoutExpired as error:
        said = f"{command[0]} did not answer within {TIMEOUT_S} s. Try again later."
        raise SlurmUnavailableError(said, is_silent=True) from error


def _communicate(process: subprocess.Popen[str], name: str) -> tuple[str, str]:
    try:
        return process.communicate(timeout=TELL_S)
    except subprocess.TimeoutExpired:
        if name not in _NAMED:
            _NAMED.add(name)
            log.warning("Slurm is slow: waiting for %s, up to %d s", name, TIMEOUT_S)
        return process.communicate(timeout=TIMEOUT_S - TELL_S)


def submit_lines(job_ids: Sequence[str]) -> dict[str, str]:
    """The command line by which each job was submitted, for the jobs that accounting knows."""
    asked = ("--allocations", "--format", "JobID,SubmitLine", "--jobs", ",".join(job_ids))
    found: dict[str, str] = {}
    current = ""
    for line in run("sacct", "--noheader", "--parsable2", *asked).splitlines():
        if match := re.match(r"(\d+)(?:_[^|]*|\+\d+)?\|", line):
            current = match[1]
            found[current] = line[match.end() :]
        elif current:
            found[current] += f"\n{line}"  # an argument may hold a newline
    return found


def try_script(path: str) -> tuple[bool, str]:
    """Whether sbatch would accept the script at `path`, and what it says; nothing is queued.

    SlurmUnavailableError if slurmctld does not answer, or can take no job of anybody at present.
    """
    with outside_job():
        done = _call("sbatch", "--test-only", path)
    lines = [" ".join(line.removeprefix("sbatch: ").split()) for line in done.stderr.splitlines()]
    said = "; ".join(line for line in lines if line)
    if done.returncode and is_silence(said):
        raise SlurmUnavailableError(f"sbatch failed: {said.rstrip('.')}. Try again later.", is_silent=True)
    return done.returncode == 0, said


@contextlib.contextmanager
def outside_job() -> Iterator[None]:
    """Hide the enclosing job, if any: its SLURM_* and SBATCH_* variables change what sbatch and srun do."""
    with process_wide.one_thread():
        names = [name for name in os.environ if name.startswith(INHERITED) and name not in KEPT]
        with process_wide.environment(dict.fromkeys(names)):
            yield


def accounting(job_ids: Sequence[str], since: Mapping[str, float]) -> dict[str, list[Accounted]]:
    """The attempts by sacct: of each array task ("1234_7") or plain job in order, one for each restart.

    For two or three seconds sacct may show of an array its last task alone, as a plain job (measured with 22.05).

    `since` is when a job cannot have ended yet, in seconds since the epoch: what ended before was another job with its
    id. Ids begin again where slurmctld has lost its state, and behind MaxJobId.
    """
    fields = "JobID,State,ElapsedRaw,AllocTRES,NodeList,ExitCode,End"
    asked = ("--noheader", "--parsable2", "--duplicates", "--format", fields, "--jobs", ",".join(job_ids))
    found: dict[str, list[Accounted]] = {}
    for job_id, state, elapsed, tres, node, exit_code, end in table("|", 7, "sacct", *asked):
        state = state.split(" ")[0].rstrip("+")  # "CANCELLED by 1000"
        task, is_step, step = job_id.replace("+0", "", 1).partition(".")  # a hetjob's tasks have its first id
        if (ended := epoch(end)) is not None and ended < since.get(array_of(task), 0.0):
            continue
        if not is_step:
            failure, elapsed_s = class_of_job(state, exit_code), int(elapsed or 0)
            told = Accounted(state, failure, has_ended(state), elapsed_s, _gpus_in(tres), node)
            found.setdefault(task, []).append(told)
        elif state == "OUT_OF_MEMORY" and task in found and found[task][-1].state == "FAILED":
            # Slurm says so of a step in which any process was killed, also where the job was cancelled later.
            found[task][-1] = replace(found[task][-1], failure=class_of_job(state))
        elif step == "batch" and state == "CANCELLED" and not exit_code and task in found:
            # Measured with 22.05: one that began has a code. A prolog outlasts a task that is requeued meanwhile.
            found[task][-1] = replace(last := found[task][-1], began=int(elapsed or 0) > last.elapsed_s + 1)
    return found


def remembered(job_ids: Sequence[str], since: Mapping[str, float]) -> dict[str, list[Accounted]]:
    """The attempts by slurmctld, as `accounting` gives them: the last one of each task, if it has ended.

    slurmctld knows an end at once, and for MinJobAge after it (300 s by default). FAILED is left out: it may hide a
    step's OUT_OF_MEMORY, which accounting alone has.
    """
    found: dict[str, list[Accounted]] = {}
    for job_id in job_ids:
        try:
            text = run("scontrol", "--oneliner", "show", "job", job_id)
        except SlurmUnavailableError as error:  # it has forgotten the job, or does not answer
            log.debug("%s", error)
            continue
        for told in _jobs_in(text):
            state, index = told.get("JobState", ""), told.get("ArrayTaskId")
            ended = epoch(told.get("EndTime", ""))
            if state == "FAILED" or class_of_job(state) is None or (ended or 0.0) < since.get(job_id, 0.0):
                continue
            n_gpus = _gpus_in(told.get("AllocTRES") or told.get("TRES", ""))
            elapsed_s = int(seconds_of(told.get("RunTime", "")) or 0)
            last = Accounted(state, class_of_job(state), True, elapsed_s, n_gpus, told.get("NodeList", ""))
            before = [Accounted("REQUEUED", None, False, 0, 0, "")] * int(told.get("Restarts", "0"))
            found[told.get("JobId", job_id) if index is None else f"{job_id}_{index}"] = [*before, last]
    return found


def _gpus_in(tres: str) -> int:
    """The GPUs in a list such as "cpu=4,gres/gpu=2,gres/gpu:a100=2"."""
    found = re.search(r"gres/gpu=(\d+)", tres)
    return int(found[1]) if found else 0


def requeue_preempted(job_id: str) -> None:
    """Requeue this job if Slurm is preempting it and has given it a GraceTime.

    Slurm itself requeues a job at the end of its GraceTime, and not one that ends before, as a task does at SIGTERM.
    """
    for told in _jobs_in(run("scontrol", "--oneliner", "show", "job", job_id)):
        if told.get("JobId") != job_id:  # the last task of an array has the array's id, which stands for all of them
            continue
        is_preempted = told.get("JobState") == "RUNNING" and epoch(told.get("PreemptTime", "")) is not None
        if is_preempted and told.get("Requeue") == "1":
            index = told.get("ArrayTaskId")
            run("scontrol", "requeue", job_id if index is None else f"{told['ArrayJobId']}_{index}")
            log.info("Slurm takes this allocation back, so the task waits in the queue again")


def final_code(code: int) -> int:
    """The exit code for a job that fails with `code` and is not to start again: another one, if Slurm would start it.

    slurm.conf may name codes for all jobs (RequeueExit, RequeueExitHold). Before 23.11 they stand over --no-requeue.
    """
    try:
        config = configuration()
    except SlurmUnavailableError as error:
        log.debug("%s", error)
        return code
    named = ",".join(config.get(key, "") for key in ("RequeueExit", "RequeueExitHold"))
    spans = [(int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", named)]
    return next((n for n in range(code, 126) if not any(first <= n <= last for first, last in spans)), code)


def _jobs_in(text: str) -> Iterator[dict[str, str]]:
    """The jobs in the output of `scontrol --oneliner show job`, without what follows the user's words in a line."""
    for line in text.splitlines():
        yield dict(re.findall(r"(?<!\S)(\w+)=(\S+)", line.partition(" Command=")[0]))


def epoch(text: str) -> float | None:
    """Slurm's "2026-11-22T06:17:00", a time of this machine's zone, in seconds since the epoch; None for "N/A"."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def cancel(*arguments: str) -> None:
    """Run scancel; jobs that have ended by now are no error."""
    try:
        run("scancel", "--quiet", *arguments)
    except SlurmUnavailableError as error:
        # A line for each job that it could not cancel, and those of a site's wrapper.
        lines = str(error).splitlines()
        have_ended = ["Invalid job id" in line for line in lines if "error:" in line]
        if not have_ended or not all(have_ended):
            raise


def hostnames(expression: str) -> tuple[str, ...]:
    """The nodes of a list such as `gpu[1-2]`; none when Slurm does not answer."""
    try:
        return tuple(run("scontrol", "show", "hostnames", expression).split())
    except SlurmUnavailableError as error:
        log.warning("%s", error)
        return ()


def configuration() -> dict[str, str]:
    """The cluster's slurm.conf and cgroup.conf, as `scontrol show config` gives them."""
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", run("scontrol", "show", "config"), re.MULTILINE))


def signals_children(config: Mapping[str, str]) -> bool:
    """Whether Slurm signals every process of a step, by cgroup.conf; False if that cannot be read here.

    It lies beside slurm.conf, or where a configless node keeps both. `scontrol show config` of Slurm 26.05 does not
    print this setting.
    """
    beside = Path(os.environ.get("SLURM_CONF") or config.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    for folder in (beside, Path("/run/slurm/conf")):
        with contextlib.suppress(OSError):
            text = (folder / "cgroup.conf").read_text(encoding="utf-8", errors="replace")
            found = re.findall(r"^\s*SignalChildrenProcesses\s*=\s*(\w+)", text, re.MULTILINE | re.IGNORECASE)
            return bool(found) and found[-1].lower() in ("yes", "up", "true", "1")
    return False


def cluster_name() -> str:
    """The name of the cluster that Slurm's commands ask here."""
    return configuration().get("ClusterName", "")


def other_cluster() -> str | None:
    """Why sbatch would submit to another cluster than this one, because of the environment; or None.

    If the environment names several, sbatch takes the one where the job starts first.
    """
    for name in CLUSTER_VARIABLES:
        named = os.environ.get(name, "")
        if named and named.lower() != (own := cluster_name()).lower():  # Slurm's names of clusters are in lower case
            return f"{name} = {named} in the environment names other clusters than this one, {own}."
    return None


def array_limits(config: Mapping[str, str]) -> dict[str, int]:
    """How many tasks an array may have, by name of the cluster's limit; MaxArraySize 0 means no arrays.

    Indices run to MaxArraySize - 1.
    """
    limits = {"MaxArraySize": int(config.get("MaxArraySize", "1001"))}  # Slurm's default
    if found := re.search(r"\bmax_array_tasks=(\d+)", config.get("SchedulerParameters", "")):
        limits["max_array_tasks"] = int(found[1])
    return limits
