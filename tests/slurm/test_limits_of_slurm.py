"""A dry run foretells what Slurm then does with jobs that ask for more than it allows."""

import contextlib
import json

import pytest

from slurmgpu.slurm import queue


@contextlib.contextmanager
def limited(cluster):
    """A QOS and a partition with limits of their own, in a cluster that other tests share."""
    cluster.run("sacctmgr", "-i", "add", "qos", "tight", "MaxWall=01:00:00", "MaxTRESPerUser=gres/gpu=2")
    cluster.run("sacctmgr", "-i", "modify", "qos", "tight", "set", "MaxTRESPerJob=gres/gpu=2")
    cluster.run("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=tight")
    cluster.run("scontrol", "create", "PartitionName=brief", "Nodes=gpu[1-2]", "MaxTime=00:30:00")
    try:
        yield
    finally:
        cluster.run("scancel", "--user=root")
        cluster.wait_until(lambda: not cluster.run("squeue", "-h", "--user=root"), "their end")
        cluster.run("scontrol", "delete", "PartitionName=brief")
        cluster.run("sacctmgr", "-i", "modify", "user", "root", "set", "qos-=tight")
        cluster.run("sacctmgr", "-i", "delete", "qos", "tight")


@pytest.mark.slurm
def test_slurm_does_what_a_dry_run_foretold(project, slurmgpu, cluster, monkeypatch):
    folder = project(400)

    def dry_run(*argv, code=0, **environ):
        asked = ("submit", "--device", "cpu", "--array", "--dry-run", "--json", *argv)
        done = slurmgpu(*asked, cwd=folder, expect=code, **environ)
        value = json.loads(done.stdout)
        return value, {limit["limit"]: limit["then"] for limit in value["limits"]}

    def pends(reason, *argv):
        """Wait until Slurm gives the reason for a job that asks for the same."""
        job = cluster.run("sbatch", "--parsable", "--output=/dev/null", *argv, "--wrap", "sleep 600").strip()
        cluster.wait_until(lambda: reason in cluster.run("squeue", "-h", "-j", job, "-o", "%r"), reason)

    with limited(cluster):
        plain, all_fit = dry_run("--gpus", "4", "--slurm", "time=00:10:00", TZ="Asia/Tokyo")
        assert not any(all_fit.values())
        assert plain["bound_gpu_hours"] == pytest.approx(4 / 6)
        assert plain["start_estimate"]["array"]["start"].endswith("+09:00")
        assert "to start at" in plain["start_estimate"]["merge"]["said"]
        assert plain["start_estimate"]["merge"]["start"] is None
        asked = ("--slurm", "partition=brief", "--slurm", "time=00:40:00")
        _, then = dry_run("--gpus", "2", *asked)
        assert then["MaxTime of partition brief"] == "pends for ever (PartitionTimeLimit)"
        pends("PartitionTimeLimit", "-p", "brief", "-t", "40")
        _, then = dry_run("--gpus", "2", "--slurm", "partition=brief,gpu", "--slurm", "time=00:40:00")
        assert then["MaxTime of partition brief"] == "no task starts there, but in another partition"
        job = cluster.run(
            "sbatch", "--parsable", "--output=/dev/null", "-p", "brief,gpu", "-t", "40", "--wrap", "sleep 600"
        )
        cluster.wait_until(
            lambda: cluster.run("squeue", "-h", "-j", job.strip(), "-o", "%T %P") == "RUNNING gpu\n", "it"
        )
        cluster.run("scancel", job.strip())
        asked = ("--slurm", "qos=tight", "--slurm", "time=01:10:00")
        _, then = dry_run("--gpus", "4", *asked)
        assert then["MaxWall of QOS tight"] == "pends for ever (QOSMaxWallDurationPerJobLimit)"
        pends("QOSMaxWallDurationPerJobLimit", "--qos=tight", "-t", "70")
        assert then["MaxTRESPerUser of QOS tight"].endswith("others pend (QOSMaxGRESPerUser)")
        pends("QOSMaxGRESPerUser", "--qos=tight", "-t", "5", "--gpus-per-node=1", "--array=0-3")
        _, then = dry_run("--gpus", "3", "--gpus-per-task", "3", "--slurm", "qos=tight")
        assert then["MaxTRESPerJob of QOS tight"] == "pends for ever (QOSMaxGRESPerJob)"
        pends("QOSMaxGRESPerJob", "--qos=tight", "-t", "5", "--gpus-per-node=3")
        cluster.run("sacctmgr", "-i", "modify", "qos", "tight", "set", "MaxTRESMins=gres/gpu=6")
        _, then = dry_run("--gpus", "2", "--slurm", "qos=tight", "--slurm", "time=00:10:00")
        assert then["MaxTRESMins of QOS tight"] == "pends for ever (QOSMaxGRESMinutesPerJob)"
        pends("QOSMaxGRESMinutesPerJob", "--qos=tight", "-t", "10", "--gpus-per-node=1")
        with monkeypatch.context() as preferring:
            for name, value in {"SQUEUE_STATES": "RUNNING", "SQUEUE_PARTITION": "no", "SLURM_CLUSTERS": "no"}.items():
                preferring.setenv(name, value)
            assert "PartitionTimeLimit" in {job.reason for job in queue.own_jobs()}
        value, then = dry_run("--gpus", "5", "--gpus-per-task", "5", code=2)
        assert value["start_estimate"]["array"]["taken"] is False
        assert value["start_estimate"]["merge"]["taken"] is True
        assert then["GPUs of a node of partition gpu"] == "sbatch refuses it: no node has 5"
        assert "Requested node configuration is not available" in value["start_estimate"]["array"]["said"]
    assert not (folder / "run").exists()
