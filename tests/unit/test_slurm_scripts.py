"""The scripts that are handed to sbatch, and the options of [slurm] in them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmgpu.errors import MayBeQueuedError, NoAnswerError, SlurmGPUError
from slurmgpu.executors import manual, slurm_jobs, slurm_preview
from slurmgpu.executors.manual import lines_to_type
from slurmgpu.plan.run_file import RunFile, parse_slurm_options, parse_table
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from slurmgpu.run.submissions import Submission
from slurmgpu.slurm import commands
from tests.support.pretend_runs import Pretended
from tests.support.runs import planned_run


@pytest.fixture
def pretending(tmp_path, monkeypatch):
    """`pretending("srun", "echo something")`: a command that is a line of shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def pretend(name, line):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    return pretend


@pytest.fixture
def written(pretending):
    """`written(n_tasks=4, slurm={"mem": "4G"})`: the scripts of such a submission, by job."""
    pretending("srun", "exit 1")  # Submitit looks whether there is one

    def scripts(**asked):
        usual = {"n_tasks": 1, "n_concurrent": 1, "gpus_per_task": 1}
        submission = Submission(submission=1, executor="slurm", device="auto", **{**usual, **asked})
        return slurm_jobs.scripts(Path("/runs/x"), "x", submission)

    return scripts


def flags(script):
    """The options of sbatch in a script."""
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def step(script):
    """The arguments of srun in a script, to the first that is no option."""
    [line] = [line for line in script.splitlines() if line.startswith("srun ")]
    return line.partition(" sh -c ")[0].split()


def test_an_array_waits_for_the_merge_jobs_of_other_runs_and_the_merge_for_the_end_of_the_array(written):
    scripts = written(n_tasks=4, n_concurrent=2, after=("7", "9"))
    waits = {"--dependency=afterok:7,afterok:9", "--kill-on-invalid-dep=yes"}
    assert {*waits, "--array=0-3%2"} <= flags(scripts["array"])
    assert {f"--dependency=afterany:{commands.ARRAY_JOB}", "--kill-on-invalid-dep=yes"} <= flags(scripts["merge"])
    alone = flags(written()["array"])
    assert not [flag for flag in alone if flag.startswith(("--dependency", "--kill", "--array", "--nodes=2"))]


def test_each_node_of_a_task_has_its_share_of_the_gpus_and_of_their_type(written):
    its = flags(written(gpus_per_task=8, nodes_per_task=2, gpu_type="a100")["array"])
    assert {"--gpus-per-node=a100:4", "--nodes=2"} <= its
    assert "--gpus-per-node=8" in flags(written(gpus_per_task=8)["array"])


@pytest.mark.parametrize("table", ["slurm", "merge"])
def test_an_option_with_a_line_break_is_refused_before_it_ends_its_line_of_the_script(written, table):
    with pytest.raises(SlurmGPUError, match="comment has a line break"):
        written(**{table: {"comment": "first\nrm -r ~"}})


@pytest.mark.parametrize(("slurm", "n_nodes"), [({}, 1), ({"cpus_per_task": 3}, 1), ({"exclusive": True}, 2)])
def test_a_step_is_one_process_on_each_node(written, slurm, n_nodes):
    scripts = written(slurm=slurm, merge=slurm, gpus_per_task=n_nodes, nodes_per_task=n_nodes)
    alone = {"--ntasks-per-node=1", f"--ntasks={n_nodes}"}
    assert alone <= set(step(scripts["array"]))
    assert {"--ntasks-per-node=1", "--ntasks=1"} <= set(step(scripts["merge"]))
    for script in scripts.values():
        assert ("--cpus-per-task=3" in step(script)) == ("cpus_per_task" in slurm)


@pytest.mark.parametrize(
    ("gres", "asks_beside"), [("gpu:a100:2", False), ("shard:1", False), ("gpumem:20g", True), ("tmpdisk:9,gpu", False)]
)
def test_gpus_are_asked_for_beside_a_gres_that_names_none(written, gres, asks_beside):
    """`gpumem`, the memory that a GPU must have on some clusters, is a name of its own."""
    options = flags(written(gpus_per_task=2, slurm={"gres": gres})["array"])
    assert f"--gres={gres}" in options
    assert ("--gpus-per-node=2" in options) is asks_beside


def test_a_cluster_that_knows_no_gpus_is_asked_for_a_node_of_its_own_and_for_no_gpu(written):
    """There GPUs come with a partition or a constraint; tasks on one node would all take its first GPU."""
    asked = {"gres": "none", "partition": "gpu-a100"}
    script = written(gpus_per_task=3, gpu_type="a100", slurm=asked)["array"]
    assert {"--exclusive", "--partition=gpu-a100"} <= flags(script)
    assert not [flag for flag in flags(script) if flag.startswith(("--gpus", "--gres"))]
    whole = written(gpus_per_task=3, slurm={**asked, "exclusive": False})["array"]
    assert "--exclusive" not in flags(whole)
    by_hand = Submission(1, "manual", "auto", 1, 1, 3, slurm=asked)
    with pytest.raises(SlurmGPUError, match="would find none"):
        manual.Manual().fit(by_hand, None)


def test_who_asks_for_gpus_where_slurm_knows_none_is_told_how_to_leave_that_out(pretending, tmp_path):
    pretending("srun", "exit 1")
    pretending("sbatch", "echo 'sbatch: error: Invalid generic resource (gres) specification' >&2; exit 1")
    with pytest.raises(SlurmGPUError, match='set gres = "none" under'):
        slurm_jobs.submit(planned_run(tmp_path / "run"), Submission(1, "slurm", "auto", 1, 1, 1), "")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("Batch job submission failed: Requested node configuration is not available", "with --dry-run says what"),
        ("invalid partition specified: gpuu", "`sinfo -s` lists the partitions"),
    ],
)
def test_who_asks_for_what_the_cluster_lacks_is_told_where_to_look(pretending, tmp_path, said, advice):
    pretending("srun", "exit 1")
    pretending("sbatch", f"echo 'sbatch: error: {said}' >&2; exit 1")
    with pytest.raises(SlurmGPUError, match=advice):
        slurm_jobs.submit(planned_run(tmp_path / "run"), Submission(1, "slurm", "auto", 1, 1, 1), "")


def test_a_step_has_the_variables_of_the_script_whatever_sbatch_exports(written):
    for script in written(slurm={"export": "NONE"}, merge={"export": "FOO=7"}).values():
        assert "--export=ALL" in step(script)
        assert not {"--export=NONE", "--export=FOO=7"}.isdisjoint(flags(script))


def test_srun_waits_for_a_slurmctld_that_is_being_restarted(written, pretending, tmp_path, monkeypatch):
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    pretending("sleep", 'echo "sleep $1" >> $LOG')
    pretending(
        "scontrol", 'n=$(grep -c sleep $LOG); [ $n = 2 ] && word=UP; echo "Slurmctld(backup) at b is ${word:-DOWN}"'
    )
    scripts = written(slurm={"setup": ["set -eu", 'echo "setup" > $LOG']}, merge={"setup": ['echo "setup" > $LOG']})
    pretending("srun", 'echo "srun" >> $LOG')
    for script in scripts.values():
        subprocess.run(["bash", "-c", script], check=True)
        assert (tmp_path / "log").read_text().splitlines() == ["setup", "sleep 5", "sleep 5", "srun"]
    pretending("scontrol", "exit 127")  # nobody says that it is away
    subprocess.run(["bash", "-c", scripts["merge"]], check=True)
    assert (tmp_path / "log").read_text().splitlines() == ["setup", "srun"]


@pytest.mark.parametrize(
    "script", sorted((Path(__file__).parents[2] / "sbatch").glob("*.sbatch")), ids=lambda path: path.stem
)
def test_the_scripts_for_plain_sbatch_wait_for_slurmctld_right_before_srun(script):
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    sruns = [number for number, line in enumerate(lines) if line.startswith("srun ")]
    assert [lines[number - 1] for number in sruns] == [slurm_jobs.ONCE_REACHED] * len(sruns)
    assert len(sruns) == (script.stem != "merge")


OPTIONS = {"requeue", "no_requeue", "cpus_per_task", "setup", "mem", "job_name"}


def test_options_that_are_false_are_left_out(written, monkeypatch):
    false = {**dict.fromkeys(OPTIONS - {"requeue", "no_requeue"}, False), "account": False}
    assert written(slurm=false, merge=false) == written()
    asked = Submission(1, "slurm", "auto", 1, 1, 1, slurm=false, merge=false)
    assert lines_to_type(Run(Path("/runs/x"), None), asked) == lines_to_type(
        Run(Path("/runs/x"), None), Submission(1, "slurm", "auto", 1, 1, 1)
    )
    monkeypatch.setattr(slurm_preview, "respect_limits", lambda asked, **given: (asked, []))
    assert manual.Manual().fit(asked, None)[1] == []


@pytest.mark.parametrize(
    ("options", "asked", "typed"),
    [
        ({}, {"--requeue"}, set()),  # the scripts in sbatch/ say --requeue themselves
        ({"requeue": True}, {"--requeue"}, {"--requeue"}),
        ({"no_requeue": True}, {"--no-requeue"}, {"--no-requeue"}),
        ({"requeue": False}, {"--no-requeue"}, {"--no-requeue"}),
        ({"no_requeue": False}, {"--requeue"}, set()),
    ],
)
def test_a_job_is_started_again_unless_the_options_say_otherwise(written, options, asked, typed):
    both = {"--requeue", "--no-requeue"}
    for script in written(slurm=options, merge=options).values():
        assert flags(script) & both == asked
    submission = Submission(1, "slurm", "auto", 1, 1, 1, slurm=options, merge=options)
    for line in lines_to_type(Run(Path("/runs/x"), None), submission):
        assert set(line.split()) & both == typed


@pytest.mark.parametrize("job", ["run_task", "run_merge"])
def test_copies_of_a_job_end_with_a_sentence(tmp_path, job):
    run = planned_run(tmp_path / "run")
    run.record_submission(Submission(1, "slurm", "auto", 1, 1, 1).to_json())
    copies = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NUM_NODES": "1"}
    code = (
        f"from pathlib import Path; from slurmgpu.executors.job_entry import {job}; {job}(Path({str(run.folder)!r}), 1)"
    )
    env = {**os.environ, **copies, "SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "0", "SLURM_PROCID": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "was started 16 times on 1 of the job's 1 nodes; expected once per node" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(run.tasks.iterdir())


def test_a_merge_job_without_its_submission_ends_with_a_sentence(tmp_path):
    run = planned_run(tmp_path / "run")
    merges = f"run_merge(Path({str(run.folder)!r}), 1)"
    code = f"from pathlib import Path; from slurmgpu.executors.job_entry import run_merge; {merges}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{run.folder}/submissions.jsonl has no submission 1" in done.stderr
    assert f"slurmgpu merge {run.folder}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["ntasks", "--ntasks-per-node", "tasks-per-node", "ntasks_per_gpu"])
@pytest.mark.parametrize("table", ["slurm", "merge"])
def test_a_number_of_processes_is_not_the_users_to_set(name, table):
    with pytest.raises(SlurmGPUError, match="cannot be set here: a task is one process on each of its nodes"):
        parse_table(RunFile, {"input": "x", "workload": {"use": "x.py:X"}, table: {name: 2}}, "x.toml")


@pytest.mark.parametrize("value", ["USR1@120", "B:USR2@60", "TERM"])
def test_a_signal_that_would_kill_a_task_is_refused(value):
    with pytest.raises(SlurmGPUError, match=r"must be USR2, such as .*: another one would kill tasks"):
        parse_slurm_options([f"signal={value}"])


def test_the_notice_may_come_earlier(written):
    options = parse_slurm_options(["signal=USR2@300"])
    assert {flag for flag in flags(written(slurm=options)["array"]) if "signal" in flag} == {"--signal=USR2@300"}


@pytest.mark.parametrize("name", ["quiet", "test-only", "wait", "parsable"])
def test_an_option_that_keeps_the_job_id_from_slurmgpu_is_refused(name):
    with pytest.raises(SlurmGPUError, match=r"cannot be set here: (slurmgpu reads|sbatch would not) .*answer"):
        parse_slurm_options([name])


@pytest.mark.parametrize("name", ["clusters", "cluster", "M"])
def test_another_cluster_is_no_option(name):
    with pytest.raises(SlurmGPUError, match="cannot be set here: slurmgpu finds its jobs on this cluster only"):
        parse_slurm_options([f"{name}=far"])


def test_a_shell_that_submits_to_another_cluster_is_told_so(pretending, monkeypatch, project, slurmgpu):
    pretending("sbatch", "echo slurm 22.05.8")
    pretending("scontrol", "echo 'ClusterName = here'")
    folder = project(4)
    for command in (("submit", "--dry-run"), ("submit",)):
        done = slurmgpu(*command, cwd=folder, expect=2, SLURM_CLUSTERS="far")
        assert "SLURM_CLUSTERS = far in the environment names other clusters than this one, here" in done.stderr
        assert "Submit from a login node of that cluster" in done.stderr
    assert not (folder / "run").exists()
    monkeypatch.setenv("SBATCH_CLUSTERS", "Here")
    assert commands.other_cluster() is None
    monkeypatch.setenv("SBATCH_CLUSTERS", "here,far")
    assert str(commands.other_cluster()).startswith("SBATCH_CLUSTERS = here,far in the environment")


def test_the_lines_of_plan_wait_for_the_id_alone_where_sbatch_prints_a_cluster(pretending, project, slurmgpu):
    pretending("sbatch", 'case "$*" in *array.sbatch*) echo "15;far";; *) echo "$1";; esac')
    folder = project(4)
    lines = slurmgpu("plan", "--gpus", "0", cwd=folder, expect=0).stdout
    done = subprocess.run(["bash", "-ec", lines], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "--dependency=afterany:15\n"


def test_nothing_is_queued_by_a_slurmctld_that_sbatch_did_not_reach(tmp_path, pretending):
    """Messages of sbatch, from slurm_errno.c; of the last two another slurmctld may have taken the first request."""
    pretending("srun", "exit 1")
    run = create_run(tmp_path / "run", Pretended().plan(), ())
    unreached, failed = "Unable to contact slurm controller (connect failure)", "Batch job submission failed:"
    cases = [
        (f"{failed} {unreached}", False),
        (f"{failed} Slurm backup controller in standby mode", False),
        (f"{failed} Unable to contact slurm controller (receive failure)", True),
        (f"slurm_receive_msg: Socket timed out on send/recv operation\nsbatch: {failed} {unreached}", True),
    ]
    for said, may_be in cases:
        pretending("sbatch", f"printf 'sbatch: error: {said}\n' >&2; exit 1")
        with pytest.raises(NoAnswerError) as refused:
            slurm_jobs.submit(run, Submission(1, "slurm", "auto", 1, 1, 1), "")
        assert isinstance(refused.value, MayBeQueuedError) == (not refused.value.is_silent) == may_be
