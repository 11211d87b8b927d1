"""The private Slurm does what the other tests rely on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster import Cluster, missing, processes
from tests.cluster import cluster as cluster_module
from tests.cluster.fixture import leave_out, memory_limits  # noqa: F401

WAIT_FOREVER = "exec sleep 1000000"


def submit(cluster: Cluster, script: str, *options: str) -> str:
    """The new job's id."""
    return cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script).strip()


def states(cluster: Cluster, job: str) -> list[str]:
    """The accounted state of each of a job's tasks and of each of their lives."""
    shown = cluster.run("sacct", "-X", "-D", "-n", "-P", "-o", "State", "-j", job)
    return [line.split()[0] for line in shown.splitlines()]  # "CANCELLED by 0"


def wait_for_states(cluster: Cluster, job: str, *wanted: str) -> None:
    cluster.wait_until(lambda: states(cluster, job) == list(wanted), f"sacct showed {wanted} for job {job}")


def wait_for_file(cluster: Cluster, path: Path) -> str:
    """What a job has written."""
    cluster.wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"a job had written {path}")
    return path.read_text().strip()


def is_alive(pid: str) -> bool:
    return int(pid) in [living for living, _ in processes.living()]


STARTS_ONE = """
import signal, sys
from pathlib import Path
from tests.cluster import processes
from tests.cluster.config import Settings
from tests.cluster.fixture import stopped_in_any_case

folder, private = map(Path, sys.argv[1:])
settings = Settings(str(folder), str(private), False, 1, 0, "", {})
with stopped_in_any_case(folder):
    settings.save()
    processes.start(["sleep", "1000003"], mark=f"{private.name}/slurmctld", output=folder / "out", env={})
    print("started", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_session_that_is_killed_leaves_no_cluster(tmp_path: Path, signum: int) -> None:
    folder, private = tmp_path / "cluster", Path(tempfile.mkdtemp(prefix="slurm-test-"))
    folder.mkdir()
    root = Path(__file__).parents[2]
    session = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, folder, private], cwd=root, stdout=subprocess.PIPE, text=True
    )
    try:
        assert session.stdout is not None
        assert session.stdout.readline() == "started\n"
        assert processes.find(private.name)
        session.send_signal(signum)
        session.communicate()
        processes.wait_for(lambda: not private.exists(), "the cluster was stopped", 60)
        assert not processes.find(private.name)
    finally:
        session.kill()
        processes.kill(private.name)


@pytest.mark.slurm
@pytest.mark.nightly
def test_an_array_of_four_gets_four_different_gpus(cluster: Cluster, tmp_path: Path) -> None:
    script = (
        f"echo $CUDA_VISIBLE_DEVICES > {tmp_path}/$SLURM_ARRAY_TASK_ID; "
        f"until [ $(ls {tmp_path} | wc -l) = 4 ]; do sleep 0.05; done"  # all four hold their GPU at once
    )
    job = submit(cluster, script, "--array=0-3", "--gpus=1", "--nodelist=gpu1")
    wait_for_states(cluster, job, *["COMPLETED"] * 4)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["0\n", "1\n", "2\n", "3\n"]


@pytest.mark.slurm
@pytest.mark.nightly
@pytest.mark.usefixtures("memory_limits")
def test_a_job_above_its_memory_is_out_of_memory(cluster: Cluster) -> None:
    hungry = f"exec {sys.executable} -c 'bytearray(300 << 20)'"
    job = submit(cluster, hungry, "--mem=100")
    wait_for_states(cluster, job, "OUT_OF_MEMORY")
    job = submit(cluster, hungry, "--mem=500")
    wait_for_states(cluster, job, "COMPLETED")


@pytest.mark.slurm
@pytest.mark.nightly
def test_qos_high_preempts_and_requeues(cluster: Cluster, tmp_path: Path) -> None:
    started = tmp_path / "started"
    low = submit(cluster, f"echo yes > {started}; {WAIT_FOREVER}", "--gpus=4", "--nodelist=gpu1", "--requeue")
    wait_for_file(cluster, started)
    high = submit(cluster, "true", "--gpus=4", "--nodelist=gpu1", "--qos=high")
    wait_for_states(cluster, high, "COMPLETED")
    wait_for_states(cluster, low, "PREEMPTED", "PENDING")
    assert "Restarts=1 " in cluster.run("scontrol", "show", "job", low)
    cluster.run("scancel", low)


@pytest.mark.slurm
@pytest.mark.nightly
def test_a_killed_node_fails_its_job_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    # setsid: out of slurmstepd's process tree, as a daemon would be
    script = f"setsid sleep 1000001 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/job; wait; {WAIT_FOREVER}"
    job = submit(cluster, script, "--nodelist=gpu2", "--no-requeue")
    pids = [wait_for_file(cluster, tmp_path / name) for name in ("child", "job")]
    assert all(is_alive(pid) for pid in pids)

    cluster.kill_node("gpu2")
    assert not any(is_alive(pid) for pid in pids)
    wait_for_states(cluster, job, "NODE_FAIL")
    assert cluster.run("sinfo", "-h", "-n", "gpu2", "-p", "gpu", "-o", "%T").strip() == "down*"

    cluster.start_node("gpu2")
    wait_for_states(cluster, submit(cluster, "true", "--nodelist=gpu2"), "COMPLETED")


@pytest.mark.slurm
@pytest.mark.nightly
def test_accounting_breaks_and_catches_up(cluster: Cluster, tmp_path: Path) -> None:
    cluster.break_accounting()
    job = submit(cluster, f"echo yes > {tmp_path}/done")
    wait_for_file(cluster, tmp_path / "done")
    assert cluster.run("sacct", "-n", "-j", job, check=False) == ""
    cluster.mend_accounting()
    wait_for_states(cluster, job, "COMPLETED")


@pytest.mark.slurm
@pytest.mark.nightly
def test_a_second_cluster_runs_beside_and_stop_leaves_nothing_behind(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "second"
    # Started by a process that ends, as a crashed test session would leave it.
    command = [sys.executable, "-m", "tests.cluster"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    exports = subprocess.run([*command, "start", folder], check=True, capture_output=True, text=True, env=environment)
    assert exports.stdout == f"export SLURM_CONF={folder}/etc/slurm.conf\n"

    second = Cluster.open(folder)
    try:
        job = submit(second, f"setsid sleep 1000002 & echo $! > {tmp_path}/child; {WAIT_FOREVER}", "--job-name=second")
        child = wait_for_file(second, tmp_path / "child")
        assert second.run("squeue", "-h", "-o", "%i %t").strip() == f"{job} R"
        assert cluster.run("squeue", "-h", "--name=second") == ""
        private = Path(re.findall(r"^SlurmdSpoolDir=(.*)/spool/%n$", (folder / "etc/slurm.conf").read_text(), re.M)[0])
        # A server that starts removes the temporary tables of every server that keeps them in the same folder.
        ask = ["mariadb", "--no-defaults", f"--socket={private}/mariadb.socket", "-N", "-e", "SELECT @@tmpdir"]
        assert subprocess.check_output(ask, text=True).strip() == f"{private}/mariadb"
        found = leftovers(private)
        assert int(child) in found
        assert private in found
        assert (len(found) > 8) or not second.has_cgroups

        # By the private directory: the folder may be gone by then, as pytest keeps three runs' only.
        subprocess.run([*command, "stop", private], check=True, env=environment)
        assert leftovers(private) == []
        assert not is_alive(child)
        assert sorted(path.name for path in folder.iterdir()) == ["etc", "log"]
        cluster.wait_until(lambda: "idle" in cluster.run("sinfo", "-h", "-o", "%T"), "the first one went on")
    finally:
        second.stop()


def leftovers(private: Path) -> list[int | Path]:
    """Processes, cgroups and files of the cluster whose private directory is given."""
    cgroups = Path("/sys/fs/cgroup").glob(f"*/{private.name}")
    return [*processes.find(private.name), *cgroups, *([private] if private.exists() else [])]


def test_what_is_missing_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster_module, "PATH", str(tmp_path))
    reason = missing()
    assert reason is not None
    assert ("install.sh" in reason) if os.geteuid() == 0 else ("needs root" in reason)


def test_leaving_out_is_failing_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no root"):
        leave_out("no root")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no root"):
        leave_out("no root")
