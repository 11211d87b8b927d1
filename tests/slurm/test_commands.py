"""What Slurm's commands are asked, and told: what we mean, whatever the user prefers, and whatever they answer."""

import os
import subprocess
import time
from collections import Counter

import pytest
import submitit

from slurmgpu.errors import MayBeQueuedError
from slurmgpu.executors import registry, slurm_jobs, slurm_preview
from slurmgpu.executors.submitit_patches import patch_submitit
from slurmgpu.report.attempts import attempts_of
from slurmgpu.report.outcomes import Accounted
from slurmgpu.report.queued import is_held
from slurmgpu.report.status import StatusReader
from slurmgpu.run.submissions import Submission
from slurmgpu.slurm import accounting, commands, facts, queue
from slurmgpu.slurm.survey import survey
from slurmgpu.util import users
from tests.files.test_status import change
from tests.support.pretend_runs import pretend_run
from tests.support.runs import planned_run

PREFERRED = {
    "SQUEUE_STATES": "RUNNING",
    "SQUEUE_FORMAT": "%j",
    "SINFO_PARTITION": "cpu",
    "SACCT_FORMAT": "User",
    "SCANCEL_INTERACTIVE": "1",
    "SLURM_CLUSTERS": "other",
    "SLURM_TIME_FORMAT": "relative",
}


@pytest.fixture
def pretending(tmp_path, monkeypatch):
    """`pretending("squeue", "echo something")`: a command that is a line of shell."""

    def pretend(name, line):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return pretend


def test_what_a_user_prefers_to_see_does_not_change_what_is_asked(pretending, monkeypatch):
    for name, value in {**PREFERRED, "SLURM_CONF": "/here/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    pretending("squeue", "env")
    told = dict(line.partition("=")[::2] for line in commands.run("squeue").splitlines())
    assert {name: told[name] for name in (*PREFERRED, "SLURM_CONF") if name in told} == {
        "SLURM_CONF": "/here/slurm.conf",
        "SLURM_TIME_FORMAT": "standard",
    }


def test_outside_of_a_job_slurm_is_found_as_before(monkeypatch):
    found = {"SLURM_CONF": "/here/slurm.conf", "SLURM_CONF_SERVER": "controller:6817", "SLURM_JWT": "token"}
    for name, value in {**found, "SLURM_JOB_ID": "7", "SBATCH_QOS": "high", "SLURM_GPUS": "2"}.items():
        monkeypatch.setenv(name, value)
    with commands.outside_job():
        assert {name: value for name, value in os.environ.items() if name.startswith(commands.INHERITED)} == found


def test_what_sbatch_says_of_a_script_may_be_any_bytes(pretending):
    pretending("sbatch", r"printf 'sbatch: error: no account \351tude\n' >&2; exit 1")
    assert commands.try_script("x.sbatch")[1] == "error: no account \N{REPLACEMENT CHARACTER}tude"


def test_a_command_that_is_late_is_named_once_and_its_answer_is_whole(pretending, monkeypatch, caplog, tmp_path):
    awaited = tmp_path / "awaited"

    class Popen(subprocess.Popen):
        def communicate(self, *given, timeout):
            if timeout > 1:  # it is waited for again
                awaited.touch()
            return super().communicate(*given, timeout=timeout)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(commands, "TELL_S", 0.2)
    monkeypatch.setattr(commands, "_NAMED", set())
    wait = f"until rm {awaited} 2>/dev/null; do sleep 0.05; done"
    pretending("sacctmgr", f"printf 'normal|'; {wait}; echo high; echo so >&2")
    for _ in range(2):
        assert commands.sacctmgr("qos", ("Name", "Other")) == [{"Name": "normal", "Other": "high"}]
    assert caplog.messages == ["Slurm is slow: waiting for sacctmgr, up to 30 s"]
    monkeypatch.setattr(commands, "TIMEOUT_S", 0.4)
    with pytest.raises(commands.SlurmUnavailableError, match=r"sacctmgr did not answer within 0\.4 s"):
        commands.sacctmgr("qos", ("Name", "Other"))


@pytest.mark.parametrize("job", [None, "77"])
def test_a_job_on_a_node_without_slurms_commands_is_not_told_to_submit_elsewhere(monkeypatch, tmp_path, job):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    with pytest.raises(commands.SlurmUnavailableError) as raised:
        commands.sacctmgr("qos", ("Name",))
    assert str(raised.value) == ("This node has no sacctmgr." if job else commands.NOT_HERE.format("sacctmgr"))


# Before Slurm 25.05 squeue answers so, with exit code 0, where a uid has no name.
NAMES_ONLY = r"""
case "$*" in *--user*) echo 'squeue: error: Invalid user: 54321' >&2; exit 0;; esac
echo "$*" | grep -q PENDING || {
    printf '54321\0377\037PENDING\037None\037slurmgpu\037N/A\037\037/\037x\036\n'
    printf '1000\0378\037PENDING\037None\037slurmgpu\037N/A\037\037/\037x\036\n'; exit; }
printf '54321|9|afterany:7(unfulfilled)\n1000|10|afterany:7(unfulfilled)\n'
"""


def test_the_jobs_of_a_user_without_a_name_here_are_known_all_the_same(pretending, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    pretending("squeue", NAMES_ONLY)
    assert [job.job_id for job in queue.own_jobs()] == ["7"]
    assert [job.job_id for job in queue.own_jobs([1000])] == ["7", "8"]
    assert queue.dependents("7") == [("9", "afterany:7")]
    assert users.own_name() == "54321"


STATES = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "EXPEDITING",
    "RESV_DEL_HOLD",
    "COMPLETING",
    "NEVER_HEARD",
)


def test_settings_of_the_cluster_are_asked_for_once_in_a_block(pretending, tmp_path):
    """Also by accounting that does not answer, but not the rest of Slurm, which may be back soon."""
    for name, end in (
        ("scontrol", "echo ClusterName = $(wc -l < asked)"),
        ("sacctmgr", "exit 1"),
        ("squeue", "exit 1"),
    ):
        pretending(name, f"cd {tmp_path}; echo {name} >> asked; {end}")
    with commands.settings_asked_once():
        for _ in range(3):
            assert commands.cluster_name() == "1"
            for asked in ("sacctmgr", "squeue"):
                with pytest.raises(commands.SlurmUnavailableError, match=f"{asked} show") as raised:
                    commands.run(asked, "show")
                assert len(raised.traceback) < 5  # it holds no frames of former calls
    assert Counter((tmp_path / "asked").read_text().split()) == {"scontrol": 1, "sacctmgr": 1, "squeue": 3}
    assert commands.cluster_name() == "6"


def test_what_will_run_again_is_in_the_queue_and_what_has_ended_is_not(pretending):
    ended = ("COMPLETED", "CANCELLED", "DEADLINE", "NODE_FAIL", "REVOKED")
    records = [
        "\\037".join([str(os.getuid()), str(number), state, "None", "slurmgpu", "N/A", "", "/", "x"]) + "\\036\\n"
        for number, state in enumerate((*STATES, *ended))
    ]
    pretending("squeue", f"printf '{''.join(records)}'")
    assert tuple(job.state for job in queue.own_jobs()) == STATES


def test_a_task_that_slurm_holds_for_its_exit_code_is_shown_as_held(pretending):
    """squeue's answer of 22.05.8 with RequeueExitHold=1 in slurm.conf."""
    line = [str(os.getuid()), "1_0", "SPECIAL_EXIT", "JobHeldUser", "slurmgpu:x", "2026-11-28T09:59:49", "", "/", "x"]
    pretending("squeue", "printf '" + "\\037".join(line) + "\\036\\n'")
    [job] = queue.own_jobs()
    told = job.to_json(is_merge=False)
    assert is_held(told)
    assert (told["state"], told["start"]) == ("PENDING", None)


@pytest.mark.parametrize(
    ("line", "is_hazard"),
    [
        ("SignalChildrenProcesses=yes", True),
        (" signalchildrenprocesses = YES # so", True),
        ("#SignalChildrenProcesses=yes", False),
        ("SignalChildrenProcesses=no", False),
        ("ConstrainRAMSpace=yes", False),
    ],
)
def test_that_slurm_signals_every_process_is_read_from_cgroup_conf(pretending, tmp_path, monkeypatch, line, is_hazard):
    """`scontrol show config` says nothing of it, from 23.11, where it came, to 26.05."""
    (tmp_path / "cgroup.conf").write_text(f"CgroupPlugin=autodetect\n{line}\n")
    pretending("scontrol", f"echo 'ProctrackType = proctrack/cgroup'; echo 'SLURM_CONF = {tmp_path}/slurm.conf'")
    container = {"runtime": "apptainer", "stage": "copy", "identity": {"kind": "sif"}}
    for name in (None, f"{tmp_path}/slurm.conf"):
        monkeypatch.delenv("SLURM_CONF", raising=False)
        if name:
            monkeypatch.setenv("SLURM_CONF", name)
        told = slurm_preview.hazards(container)
        assert ["SignalChildrenProcesses = yes" in text for text in told] == [True] * is_hazard


def test_what_had_ended_before_a_run_was_submitted_was_another_job_with_its_id(pretending, tmp_path):
    run = pretend_run(tmp_path / "run", 300, n_tasks=2)
    began = run.submissions()[0]["time"]
    then, now = (time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(began + days * 86400)) for days in (-400, 0.1))
    pretending(
        "sacct",
        f"cat <<END\n4711_0|FAILED|864000|gres/gpu=8|old1|1:0|{then}\n"
        f"4711_0.batch|OUT_OF_MEMORY|864000||old1|0:125|{then}\n4711_7|NODE_FAIL|60|gres/gpu=8|old2|1:0|{then}\n"
        f"4711_0|COMPLETED|300|gres/gpu=1|gpu1|0:0|{now}\n4711_1|RUNNING|300|gres/gpu=1|gpu2|0:0|Unknown\nEND",
    )
    known = accounting.accounting_of(run)
    assert {task: [(each.state, each.failure, each.node) for each in told] for task, told in known.items()} == {
        "4711_0": [("COMPLETED", None, "gpu1")],
        "4711_1": [("RUNNING", None, "gpu2")],
    }


def test_accounting_is_asked_for_the_jobs_of_this_cluster_alone(pretending, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    run = pretend_run(tmp_path / "run", 300, n_tasks=2)
    first = run.submissions()[0]
    run.record_submission({"submission": 1, "cluster": "here"})
    run.record_submission({**first, "submission": 2, "cluster": "there", "array_job": "99"})
    pretending("sacct", f"echo \"$@\" > {tmp_path}/asked; echo '4711_0|RUNNING|300||gpu1|0:0|Unknown'")
    assert list(accounting.accounting_of(run)) == ["4711_0"]
    assert (tmp_path / "asked").read_text().endswith("--jobs 4711\n")


def test_accounting_is_not_asked_for_the_jobs_of_the_run_that_one_was_copied_from(pretending, tmp_path):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    pretending("sacct", "echo '4711_0|RUNNING|300||gpu1|0:0|Unknown'")
    assert accounting.accounting_of(run) is not None
    run.record_submission({"submission": 1, "folder": "/elsewhere", "inode": 1})
    assert run.submissions()[0]["copied"]
    assert accounting.accounting_of(run) is None


@pytest.mark.parametrize(
    ("state", "failure"),
    [
        ("FAILED", "host_oom"),
        ("CANCELLED by 1000", "cancelled"),
        ("PREEMPTED", "preempted"),
        ("TIMEOUT", "timeout"),
        ("NODE_FAIL", "node_fail"),
    ],
)
def test_a_step_in_which_the_kernel_killed_a_process_tells_only_why_its_job_failed(pretending, state, failure):
    lines = [f"6_0|{state}|70|gres/gpu=1|gpu1|0:0|Unknown", "6_0.0|OUT_OF_MEMORY|70|gres/gpu=1|gpu1|0:125|Unknown"]
    pretending("sacct", "cat <<END\n" + "\n".join(lines) + "\nEND")
    [each] = commands.accounting(["6"], {})["6_0"]
    assert each.failure == failure


def test_of_an_array_that_has_no_merge_job_the_queue_says_when_it_has_ended(pretending, tmp_path):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    pretending("squeue", "true")
    run.record_submission({"submission": 1, "state": "submitting"})  # its merge job was refused
    assert queue.queued_jobs(run) == []
    run.record_submission({"submission": 1, "state": "ended"})
    assert queue.queued_jobs(run) is None


def test_an_empty_queue_tells_of_a_submission_here_after_one_on_another_cluster(pretending, tmp_path):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    first = run.submissions()[0]
    run.record_submission({"submission": 1, "cluster": "there", "state": "ended"})
    run.record_submission({**first, "submission": 2, "cluster": "here", "array_job": "12", "merge_job": "13"})
    pretending("squeue", "true")
    pretending("scontrol", "echo 'ClusterName = here'")
    assert queue.queued_jobs(run) == []
    run.record_submission({"submission": 2, "cluster": "there"})
    assert queue.queued_jobs(run) is None


@pytest.mark.parametrize(
    ("age_s", "told", "queued"), [(1.0, {}, None), (1000.0, {}, []), (1.0, {"cancelled": True}, [])]
)
def test_a_submission_whose_process_ended_before_it_recorded_the_jobs_has_none(
    pretending, tmp_path, age_s, told, queued
):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    run.record_submission({"submission": 1, "state": "ended"})
    line = {key: value for key, value in run.last_submission().items() if key not in ("array_job", "merge_job")}
    run.record_submission({**line, "submission": 2, "state": "submitting", "time": time.time() - age_s, **told})
    pretending("squeue", "true")
    assert queue.queued_jobs(run) == queued


def test_where_squeue_does_not_answer_the_queue_is_that_of_before_and_no_task_waits_again(pretending, tmp_path):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    job = "0\x1f4711_0\x1fPENDING\x1fPriority\x1fslurmgpu:judge\x1fN/A\x1f\x1f/x\x1f{}\x1e"
    pretending("squeue", "cat <<'END'\n" + job.format(run.logs / "submission_file_1.sh") + "\nEND")
    queue_of = registry.queued_jobs(run)
    assert [told["job_id"] for told in queue_of] == ["4711_0"]
    reader, heard = StatusReader(run), run.attempts()[0]["updated"]
    assert reader.read(queue_of, now=heard + 5)["pace"]["n_waiting"] == 1
    change(run, "4711_0.0", updated=heard + 8)
    assert reader.read(queue_of, now=heard + 10)["pace"]["n_waiting"] == 0  # it has started since
    pretending("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    queue_of = registry.queued_jobs(run, queue_of)
    assert reader.read(queue_of, now=heard + 40)["pace"]["n_waiting"] == 0
    pretending("squeue", "true")
    assert registry.queued_jobs(run, queue_of) == []


def test_an_array_without_a_merge_job_that_cannot_be_cancelled_is_told_with_one_advice(pretending, tmp_path):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    pretending("scancel", "echo 'scancel: error: Unable to contact slurm controller' >&2; exit 1")
    why = commands.SlurmUnavailableError(
        "Slurm takes no jobs at present: no answer. The job is not queued. Once Slurm does"
    )
    with pytest.raises(MayBeQueuedError) as told:
        slurm_jobs._take_back(run, 1, "4711", why)
    assert "its merge job is not: Slurm takes no jobs at present: no answer. The array cannot be" in str(told.value)
    assert "is not queued" not in str(told.value)


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        ("Problem talking to the database: Connection refused", "cancelled"),
        ("Slurm accounting storage is disabled", "preempted"),  # and will be
    ],
)
def test_a_merge_asks_an_accounting_again_that_is_away_for_a_moment(pretending, tmp_path, says, verdict):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    change(run, "4711_0.0", state="ended", ended=run.attempts()[0]["updated"], failure="preempted", message="SIGTERM")
    pretending(
        "sacct",
        f"[ -e {tmp_path}/asked ] && exec echo '4711|CANCELLED by 0|300|gres/gpu=1|gpu1|0:0|Unknown'\n"
        f"touch {tmp_path}/asked; echo 'sacct: error: {says}' >&2; exit 1",
    )
    pretending("scontrol", "exit 1")  # without a cluster Slurm's own asks DNS for one, and may wait for 20 s
    known = accounting.accounting_of(run, settled=True)
    assert [attempt["failure"] for attempt in attempts_of(run, known)] == [verdict]


def test_an_array_that_accounting_shows_as_a_plain_job_at_first_is_asked_for_again(pretending, tmp_path):
    """sacct's answers of 22.05.8, 0.3 and 2.4 s after one of two tasks was cancelled, and the other had ended well."""
    run = pretend_run(tmp_path / "run", 300, n_tasks=2)
    change(run, "4711_0.0", state="ended", ended=run.attempts()[0]["updated"], failure="preempted", message="SIGTERM")
    pretending(
        "sacct",
        f"if [ -e {tmp_path}/asked ]; then echo '4711_0|CANCELLED by 0|300|gres/gpu=1|gpu1|0:0|Unknown'; "
        f"echo '4711_1|COMPLETED|300|gres/gpu=1|gpu1|0:0|Unknown'; "
        f"else touch {tmp_path}/asked; echo '4711|COMPLETED|300|gres/gpu=1|gpu1|0:0|Unknown'; fi",
    )
    pretending("scontrol", "exit 1")
    known = accounting.accounting_of(run, settled=True)
    assert attempts_of(run, known)[0]["failure"] == "cancelled"


def test_a_merge_asks_again_when_its_first_look_took_all_the_time(pretending, tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    change(run, "4711_0.0", state="ended", ended=run.attempts()[0]["updated"], failure="preempted", message="SIGTERM")
    monkeypatch.setattr(accounting, "PATIENCE_S", 0.0)
    pretending(
        "sacct", f"echo >> {tmp_path}/asked; [ $(wc -l < {tmp_path}/asked) = 3 ] && echo '4711|CANCELLED||||0:0|'"
    )
    pretending("scontrol", "exit 1")
    assert attempts_of(run, accounting.accounting_of(run, settled=True))[0]["failure"] == "cancelled"


@pytest.mark.slurm
@pytest.mark.parametrize("sacct", ["exec false", "exec echo '4711_0|RUNNING|9|gres/gpu=1|gpu1|0:0|Unknown'"])
def test_slurmctld_knows_who_ended_a_task_while_accounting_does_not(pretending, tmp_path, sacct):
    run = pretend_run(tmp_path / "run", 300, n_tasks=3)
    for record in run.attempts():
        ended = {"state": "ended", "ended": record["updated"], "failure": "preempted", "message": "SIGTERM"}
        change(run, record["attempt"], **ended)
    began = run.submissions()[0]["time"]
    then, now = (time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(began + days * 86400)) for days in (-400, 0.1))
    job = (
        "JobId=4711 ArrayJobId=4711 ArrayTaskId={} JobName=JobState=x Restarts={} RunTime=00:05:00 {} NodeList=gpu1 "
        "Command=/home/ada/array.sbatch Restarts=no WorkDir=/home/ada Comment=JobState=y JobState=RUNNING"
    )
    lines = [
        job.format(0, 0, f"JobState=CANCELLED EndTime={now} TRES=cpu=1,gres/gpu=1"),
        job.format(1, 1, f"JobState=CANCELLED EndTime={now} AllocTRES=cpu=1"),  # the attempt before was requeued
        job.format(2, 0, f"JobState=CANCELLED EndTime={then}"),  # another job with this id
        job.format(3, 0, f"JobState=FAILED EndTime={now}"),  # and may be OUT_OF_MEMORY
        job.format("4-9%2", 0, "JobState=PENDING EndTime=Unknown"),
    ]
    pretending("sacct", sacct)
    pretending("scontrol", "cat <<END\n" + "\n".join(lines) + "\nEND")
    known = accounting.accounting_of(run)
    told = {task: [(each.state, each.ended, each.elapsed_s) for each in its] for task, its in known.items()}
    assert told == {
        "4711_0": [("CANCELLED", True, 300)],
        "4711_1": [("REQUEUED", False, 0), ("CANCELLED", True, 300)],
    }
    assert known["4711_0"][0].n_gpus == 1
    assert [attempt["failure"] for attempt in attempts_of(run, known)] == ["cancelled", "preempted", "preempted"]


def test_what_accounting_has_of_a_hetjobs_task_is_that_of_its_first_part_whose_id_all_have(pretending, tmp_path):
    """sacct's and scontrol's answers of 22.05.8."""
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    now = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
    lines = [f"4711+{part}|TIMEOUT|9|gres/gpu={part + 1}|gpu1|0:0|{now}" for part in (0, 1)]
    pretending("sacct", "cat <<END\n" + "\n".join([*lines, f"4711+0.batch|CANCELLED|9|||0:15|{now}"]) + "\nEND")
    assert [each.n_gpus for each in accounting._ask(run, commands.accounting)["4711_0"]] == [1]
    jobs = [f"JobId={4711 + n} HetJobId=4711 JobState=TIMEOUT Restarts=0 EndTime={now} NumNodes={n}" for n in (0, 1)]
    pretending("scontrol", "cat <<END\n" + "\n".join(jobs) + "\nEND")
    assert [*commands.remembered(["4711"], {})] == ["4711", "4712"]


@pytest.mark.parametrize(("setting", "code"), [("1,3", 4), ("2-5", 6), ("30,1-2", 3), ("(null)", 3), ("0-255", 3)])
def test_a_merge_job_ends_with_a_code_for_which_slurm_does_not_start_it_again(pretending, setting, code):
    pretending("scontrol", f'echo "RequeueExit = (null)"; echo "RequeueExitHold = {setting}"')
    assert commands.final_code(3) == code


def test_a_merge_job_by_hand_does_so_too_and_a_merge_at_a_terminal_ends_with_3(pretending, slurmgpu, tmp_path):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    pretending("scontrol", 'echo "RequeueExit = 3"')
    for command in ("squeue", "sacct"):
        pretending(command, "exit 0")
    slurmgpu("merge", "--wait", run.folder, expect=4, SLURM_JOB_ID="7")
    slurmgpu("merge", "--wait", run.folder, expect=3)


def test_an_end_that_accounting_has_is_not_replaced(pretending, tmp_path):
    run = pretend_run(tmp_path / "run", 300, n_tasks=1)
    now = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
    pretending("sacct", f"echo '4711_0|NODE_FAIL|9|gres/gpu=1|gpu1|0:0|{now}'; echo '4711_0|PENDING|||||Unknown'")
    told = {"4711_0": [Accounted("CANCELLED", "cancelled", True, 5, 0, "")]}
    known = accounting._ask(run, commands.accounting)
    assert accounting._filled(known, told) == known
    later = {"4711_0": [Accounted("REQUEUED", None, False, 0, 0, ""), *told["4711_0"]]}
    assert [each.state for each in accounting._filled(known, later)["4711_0"]] == ["NODE_FAIL", "CANCELLED"]


def test_a_task_whose_prolog_failed_never_began(pretending):
    """sacct's answers of 22.05.8: a prolog fails after 6 s, somebody requeues a job, another is preempted.

    The last is requeued while its prolog of 12 s works.
    """
    lines = [
        "6_0|REQUEUED|7|gres/gpu=1|gpu1|0:0|2026-11-27T21:57:01",
        "6_0.batch|CANCELLED|7|gres/gpu=1|gpu1||2026-11-27T21:57:01",
        "7|REQUEUED|5|gres/gpu=1|gpu2|0:0|2026-11-27T21:56:59",
        "7.batch|CANCELLED|5|gres/gpu=1|gpu2|0:15|2026-11-27T21:56:59",
        "11_0|PREEMPTED|1|gres/gpu=4|gpu2|0:0|2026-11-27T21:57:35",
        "11_0.batch|CANCELLED|2|gres/gpu=4|gpu2|0:15|2026-11-27T21:57:36",
        "12|REQUEUED|4|gres/gpu=1|gpu1|0:0|2026-11-27T23:18:52",
        "12.batch|CANCELLED|12|gres/gpu=1|gpu1||2026-11-27T23:19:00",
    ]
    pretending("sacct", "cat <<END\n" + "\n".join(lines) + "\nEND")
    found = commands.accounting(["6", "7", "11", "12"], {})
    began = {"6_0": False, "7": True, "11_0": True, "12": True}
    assert {task: each.began for task, [each] in found.items()} == began


def test_accounting_of_a_job_is_that_of_each_of_its_tasks(pretending, tmp_path):
    run = planned_run(tmp_path / "run")
    for number, (job, n_tasks) in enumerate([("6", 8), ("9", 4)], 1):
        line = Submission(number, "slurm", "auto", n_tasks, n_tasks, 1, tasks_per_node=4).to_json()
        run.record_submission({**line, "state": "queued", "array_job": job})
    lines = [
        "6_0|COMPLETED|60|gres/gpu=4|gpu1|0:0|2099-11-27T21:57:01",
        "6_1|REQUEUED|7|gres/gpu=4|gpu2|0:0|2099-11-27T21:57:01",
        "6_1|NODE_FAIL|9|gres/gpu=4|gpu2|0:0|2099-11-27T22:57:01",
        "9|TIMEOUT|60|gres/gpu=4|gpu1|0:0|2099-11-27T21:57:01",
    ]
    pretending("sacct", "cat <<END\n" + "\n".join(lines) + "\nEND")
    found = accounting.accounting_of(run)
    states = {task: [each.state for each in told] for task, told in found.items()}
    assert states == {
        **{f"6_{task}": ["COMPLETED"] for task in range(4)},
        **{f"6_{task}": ["REQUEUED", "NODE_FAIL"] for task in range(4, 8)},
        **{f"9_{task}": ["TIMEOUT"] for task in range(4)},
    }
    assert {each.n_gpus for told in found.values() for each in told} == {1}


SHOWN = (
    "JobId={} {}JobName=slurmgpu:run JobState={} Requeue={} Restarts=0 EndTime=2026-11-28T10:08:03 "
    "PreemptEligibleTime=2026-11-28T10:07:29 PreemptTime={} SuspendTime=None Command=/home/ada/a.sh PreemptTime=x"
)
"""A line of `scontrol --oneliner show job` of 22.05.8, without what is not read."""
TASK, PREEMPTED = "ArrayJobId=6 ArrayTaskId=3 ", "2026-11-28T10:07:33"


@pytest.mark.parametrize(
    ("job_id", "shown", "requeued"),
    [
        ("6", (6, TASK, "RUNNING", 1, PREEMPTED), ["requeue 6_3"]),
        ("8", (8, "", "RUNNING", 1, PREEMPTED), ["requeue 8"]),
        ("6", (6, TASK, "RUNNING", 0, PREEMPTED), []),
        ("6", (6, TASK, "RUNNING", 1, "None"), []),  # somebody sent a signal
        ("6", (6, TASK, "COMPLETING", 1, PREEMPTED), []),  # it was cancelled, or Slurm has ended it
        ("6", (7, TASK, "RUNNING", 1, PREEMPTED), []),  # another task: 6 stands for all
    ],
)
def test_a_task_that_is_preempted_with_a_grace_time_asks_to_be_requeued(pretending, tmp_path, job_id, shown, requeued):
    said = SHOWN.format(*shown)
    pretending("scontrol", f"case $* in requeue*) echo $* >> {tmp_path}/asked;; *) echo '{said}';; esac")
    (tmp_path / "asked").touch()
    commands.requeue_preempted(job_id)
    assert (tmp_path / "asked").read_text().splitlines() == requeued


def test_the_jobs_are_those_of_the_process_whatever_logname_says(cluster, monkeypatch):
    """`su` and `sudo -E` may leave it as it was."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "munge")
    job = cluster.run("sbatch", "--parsable", "--hold", "--wrap", "true").strip()
    behind = cluster.run("sbatch", "--parsable", f"--dependency=afterany:{job}", "--wrap", "true").strip()
    try:
        assert {job, behind} <= {found.job_id for found in queue.own_jobs()}
        assert [waiting for waiting, _ in queue.dependents(job)] == [behind]
    finally:
        commands.cancel(job, behind)


OWN = os.getuid()
ANSWERS = {
    "sacct": "7_0|FAILED|5|gres/gpu=1|gpu1|1:0|2026-11-22T06:17:00",
    "squeue": "\x1f".join([str(OWN), "7_0", "RUNNING", "None", "slurmgpu:run", "N/A", "", "/", "x"]) + "\x1e",
    "scontrol": "ClusterName = main",
    "sinfo": "gpu*\x1fup\x1f1:00:00\x1f2\x1fgpu:a100:4",
    "sacctmgr": "lab|lab",
}


def test_lines_of_a_sites_wrapper_around_an_answer_are_passed_over(pretending):
    def answer(name, text):
        pretending(name, f"echo '*** quota 83 % used, see job 4711 ***'; echo '{text}'")

    for name, text in ANSWERS.items():
        answer(name, text)
    assert [each.state for each in commands.accounting(["7"], {})["7_0"]] == ["FAILED"]
    assert [job.job_id for job in queue.own_jobs()] == ["7_0"]
    found = survey()
    assert [(each.name, each.gpus) for each in found.partitions] == [("gpu", {"a100": 4})]
    assert (found.accounts, found.qos) == (["lab"], ["lab"])
    answer("squeue", f"{OWN}|12|afterany:7(unfulfilled)")
    assert queue.dependents("7") == [("12", "afterany:7")]
    node = "NodeName=n1 CPUTot=64 Gres=gpu:a100:4 RealMemory=257000 Sockets=2 CoresPerSocket=32 Partitions=gpu"
    answer("scontrol", node)
    known = facts.read_facts({})
    assert known.nodes == {"gpu": [facts.Node({"a100": 4}, 64, 257_000)]}
    assert known.default_account == "lab"


def test_the_id_of_a_job_is_the_one_that_sbatch_prints_itself():
    patch_submitit()
    read = submitit.SlurmExecutor._get_job_id_from_submission_command
    assert read("Your last job 4711 has ended.\nSubmitted batch job 12\n") == "12"
    assert read(b"caf\xe9 job 4711\nSubmitted batch job 12 on cluster main\n") == "12"


SAID = "error: Batch job submission failed: {}"


@pytest.mark.parametrize(
    ("said", "not_taken", "silent"),
    [
        ("Resource temporarily unavailable", True, True),
        ("Unable to create job record, try again", True, True),
        ("Unable to contact slurm controller (connect failure)", True, True),
        ("Unable to contact slurm controller (connect failure); Socket timed out on send/recv operation", False, True),
        ("Socket timed out on send/recv operation", False, True),
        ("Invalid account or account/partition combination specified", False, False),
    ],
)
def test_a_full_queue_is_no_refusal_and_leaves_no_job(said, not_taken, silent):
    assert (commands.was_not_taken(SAID.format(said)), commands.is_silence(SAID.format(said))) == (not_taken, silent)


def test_of_a_script_that_is_tried_while_the_queue_is_full_nothing_is_known(pretending):
    pretending("sbatch", "echo 'allocation failure: Resource temporarily unavailable' >&2; exit 1")
    with pytest.raises(commands.SlurmUnavailableError, match="allocation failure: Resource temp"):
        commands.try_script("x.sbatch")
