"""submissions.jsonl: what is appended is there, and what is read of it is whole submissions."""

import errno
import json

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.slurm import Slurm
from slurmgpu.run import submission_log as module
from slurmgpu.run.submissions import Submission, gres_names, shares_gpus, times
from tests.support.runs import planned_run


@pytest.fixture
def run(tmp_path):
    return planned_run(tmp_path / "run")


def line(number, **more):
    return {"submission": number, "executor": "local", "state": "ended", "time": 1.0, **more}


def numbers(run):
    return [each["submission"] for each in run.submissions()]


@pytest.mark.parametrize(("n_bytes", "is_read"), [(20, False), (None, True)])  # or all of it but the end of the line
def test_a_line_after_one_that_was_cut_short_is_read_and_a_whole_one_before_it_as_well(run, n_bytes, is_read):
    run.record_submission(line(1))
    path = run.folder / "submissions.jsonl"
    path.write_bytes(path.read_bytes() + json.dumps(line(2)).encode()[:n_bytes])
    run.record_submission(line(3))
    run.record_submission({"submission": 3, "state": "refused"})
    assert numbers(run) == ([1, 2, 3] if is_read else [1, 3])
    assert run.last_submission()["state"] == "refused"


def test_submissions_come_by_their_number_without_those_whose_first_line_is_gone(run):
    lines = [line(3), line(1), {"submission": 2, "state": "ended"}, {"submission": 4, "executor": "local"}]
    (run.folder / "submissions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert numbers(run) == [1, 3]
    assert run.submission(2) == {"submission": 2}


def test_an_append_that_fails_for_a_moment_is_tried_again(run, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    real, fails = module._append, [OSError(errno.EIO, "for a moment")]

    def append(path, added):
        if fails:
            raise fails.pop()
        real(path, added)

    monkeypatch.setattr(module, "_append", append)
    run.record_submission(line(1))
    assert numbers(run) == [1]


def test_a_line_that_another_process_wrote_over_is_appended_again_and_one_that_is_always_lost_is_told(run, monkeypatch):
    real, lost = module._append, [None]
    monkeypatch.setattr(module, "_append", lambda path, added: lost.pop() if lost else real(path, added))
    (run.folder / "submissions.jsonl").touch()
    run.record_submission(line(1))
    assert numbers(run) == [1]
    monkeypatch.setattr(module, "_append", lambda path, added: None)
    with pytest.raises(SlurmGPUError, match="its file system loses data"):
        run.record_submission(line(2))


def test_a_line_is_fsynced(run, monkeypatch):
    synced = []
    monkeypatch.setattr(module.os, "fsync", synced.append)
    run.record_submission(line(1))
    assert synced


def submission(**values):
    return Submission(1, "slurm", "cuda", **{"n_tasks": 8, "n_concurrent": 2, "gpus_per_task": 4, **values})


def test_what_sbatch_is_given_is_what_was_asked_for():
    asked = submission(slurm={"exclude": "a1", "partition": "gpu", "account": "ours"}, exclude=("a2", "a3"))
    assert asked.sbatch_options["exclude"] == "a1,a2,a3"
    assert submission(exclude=("a2",)).sbatch_options["exclude"] == "a2"
    with_merge = submission(slurm=asked.slurm, merge={"partition": "cpu"})
    assert with_merge.merge_options == {"partition": "cpu", "account": "ours"}
    assert [submission(slurm={"time": time}).walltime_s for time in ("0", "90", "UNLIMITED")] == [None, 5400.0, None]
    assert submission(slurm={"mem": "8G"}, tasks_per_node=2).sbatch_options == {"mem": "16G"}
    assert submission().bound_gpu_hours(3600.0) == 32.0
    assert submission(gpus_per_task=0).bound_gpu_hours(None) == 0.0


@pytest.mark.parametrize(
    ("gres", "names", "shares"),
    [
        (None, set(), False),
        ("", set(), False),
        ("shard:2", {"shard"}, True),
        ("gpu:1,shard:2,", {"gpu", "shard"}, False),
        ("gpumem:40", {"gpumem"}, False),
    ],
)
def test_a_gres_of_shards_alone_shares_gpus(gres, names, shares):
    assert gres_names({"gres": gres}) == names
    assert shares_gpus({"gres": gres}) is shares


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"slurm": {"account": "\udcff"}}, "account"),  # as the bytes of SBATCH_ACCOUNT may be
        ({"slurm": {"setup": ["module load \udcff"]}}, "setup"),
        ({"merge": {"mail_user": "\udcff"}}, "mail_user"),
        ({"gpu_type": "\udcff"}, "gpu_type"),
    ],
)
def test_options_that_are_not_utf_8_are_refused_before_a_script_is_written(told, name):
    given = Submission(1, "slurm", "auto", n_tasks=1, n_concurrent=1, gpus_per_task=1, **told)
    with pytest.raises(SlurmGPUError, match=rf"^{name} is .*\\udcff.*, which is not UTF-8"):
        Slurm().check(given, None)


@pytest.mark.parametrize(
    ("amounts", "factor", "scaled"),
    [
        ("64G", 4, "256G"),
        ("1500", 2, "3000"),
        ("0", 4, "0"),
        ("gpu", 4, "gpu:4"),
        ("gpu:a100", 4, "gpu:a100:4"),
        ("gpu:a100:1,lscratch:50G", 4, "gpu:a100:4,lscratch:200G"),
        ("gpu:3g.20gb", 2, "gpu:3g.20gb:2"),  # a type of MIG, not 20 GB
        ("gpu:3g.20gb:1", 2, "gpu:3g.20gb:2"),
        ("gpu:2080ti", 2, "gpu:2080ti:2"),
        ("matlab@db,fft:2|fft@db:3", 4, "matlab@db:4,fft:8|fft@db:12"),
    ],
)
def test_a_job_asks_for_as_much_for_each_of_its_tasks(amounts, factor, scaled):
    assert times(amounts, factor) == scaled


@pytest.mark.parametrize(
    ("slurm", "asked"),
    [
        (
            {"mem": "8G", "cpus_per_task": 3, "mem_per_cpu": "1G"},
            {"mem": "32G", "cpus_per_task": 3, "mem_per_cpu": "1G"},
        ),
        ({"gres": "none"}, {"exclusive": True}),
        ({"gres": "gpumem:20", "licenses": "fft"}, {"gres": "gpumem:80", "licenses": "fft:4"}),
        ({"mem": False}, {}),
    ],
)
def test_options_of_a_task_become_those_of_its_job(slurm, asked):
    submission = Submission(1, "slurm", "auto", 8, 8, 1, tasks_per_node=4, slurm=slurm)
    assert submission.sbatch_options == asked
    assert (submission.n_jobs, submission.gpus_per_node) == (2, 0 if "none" in slurm.values() else 4)
