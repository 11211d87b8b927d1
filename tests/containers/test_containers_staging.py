"""Images that tasks copy to their node, or unpack there."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from slurmgpu.containers import staging, unpacking
from slurmgpu.containers.images import identify
from slurmgpu.containers.settings import ContainerError
from slurmgpu.containers.staging import stage
from slurmgpu.plan.planner import draft_run
from slurmgpu.task.preflight import check_here
from slurmgpu.task.worker_process import StoppedError, StopSignals
from tests.support.images import fork
from tests.support.shard_files import small_disk  # noqa: F401

DAYS_AGO = time.time() - 20 * 86400


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def far(apptainer, tmp_path):
    """An image on another file system than tmp_path's: one in memory."""
    folder = Path(tempfile.mkdtemp(prefix="slurmgpu-test-", dir="/dev/shm"))
    try:
        if folder.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("the tests' folder is in memory itself")
        yield Path(shutil.copyfile(apptainer.sif, folder / "image.sif"))
    finally:
        shutil.rmtree(folder)


def left_of(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix not in (".lock", ".json"))


def stopping(seconds):
    raise StoppedError(signal.SIGTERM)


@pytest.fixture(params=["node", "unpack"])
def staged(request, far, tmp_path):
    """A staged image, and what stages it again."""

    def again(**options):
        return stage(far, identify(far), tmp_path / "images", request.param, **options)

    return again(), again


@pytest.mark.parametrize("how", ["node", "unpack"])
def test_ten_tasks_of_a_node_that_stage_an_image_at_once_copy_it_once(far, tmp_path, monkeypatch, how):
    identity, folder, copies = identify(far), tmp_path / "images", tmp_path / "copies"
    name = {"node": "_copy", "unpack": "unpack"}[how]
    original = getattr(staging, name)

    def spied(*args):
        with open(copies, "a") as file:
            file.write("x")
        original(*args)

    monkeypatch.setattr(staging, name, spied)
    start_read, start_write = os.pipe()

    def as_a_task():
        os.close(start_write)
        os.read(start_read, 1)  # until the pipe is closed: all at once
        assert stage(far, identity, folder, how).exists()

    pids = [fork(as_a_task) for _ in range(10)]
    os.close(start_write)
    os.close(start_read)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 10
    assert copies.read_text() == "x"
    staged = stage(far, identity, folder, how)
    assert left_of(folder) == [staged.name]
    if how == "node":
        assert staged.read_bytes() == far.read_bytes()


def test_an_unpacked_image_runs_as_any_user_without_fuse(apptainer, far, normal_user):
    folder = apptainer.sif.parent / "unpacked"
    code = "import os, sys; os.umask(0o077)\nfrom tests.containers.test_containers_staging import *\n"
    code += "print(stage(Path(sys.argv[1]), identify(Path(sys.argv[1])), Path(sys.argv[2]), 'unpack'))"
    done = subprocess.run([sys.executable, "-c", code, far, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder.chmod(0o755)
    for user in (normal_user, {}):
        argv = ["apptainer", "--quiet", "exec", "--mount", "type=bind,src=/usr,dst=/usr,ro", done.stdout.strip()]
        ran = subprocess.run([*argv, "cat", "/proc/mounts"], capture_output=True, text=True, cwd="/", **user)
        assert ran.returncode == 0, ran.stderr
        assert "squashfuse" not in ran.stdout


def test_an_image_that_lies_on_the_same_disk_already_is_used_where_it_is(apptainer, tmp_path):
    image = Path(shutil.copyfile(apptainer.sif, tmp_path / "image.sif"))
    assert stage(image, identify(image), tmp_path / "images", "node") == image
    assert stage(image, identify(image), tmp_path / "images", "none") == image
    assert left_of(tmp_path / "images") == []


@pytest.mark.parametrize("how", ["none", "node", "unpack"])
def test_a_sandbox_is_used_where_it_is(apptainer, tmp_path, how):
    assert stage(apptainer.sandbox, identify(apptainer.sandbox), tmp_path / "images", how) == apptainer.sandbox


def test_a_copy_that_differs_is_refused_and_not_left(far, tmp_path):
    identity = identify(far)
    with open(far, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    with pytest.raises(ContainerError, match="is not the image that this run was planned with"):
        stage(far, identity, tmp_path / "images", "node")
    assert left_of(tmp_path / "images") == []


@pytest.mark.parametrize("how", ["node", "unpack"])
def test_too_little_room_is_found_before_the_copy(far, tmp_path, how):
    with pytest.raises(ContainerError, match="no room for the image on this node") as caught:
        stage(far, {**identify(far), "size_bytes": 1 << 60}, tmp_path / "images", how)
    assert (caught.value.kind, caught.value.node_at_fault) == ("disk_full", True)
    assert left_of(tmp_path / "images") == []


@pytest.mark.parametrize("how", ["node", "unpack"])
def test_a_task_that_was_killed_while_it_copied_holds_nobody_up(far, tmp_path, monkeypatch, how):
    identity, folder = identify(far), tmp_path / "images"
    told_read, told_write = os.pipe()

    def half(*args):
        part = args[-2]
        if how == "node":
            part.write_bytes(far.read_bytes()[:1000])
        else:
            (part / "sub").mkdir(parents=True)
            (part / "sub").chmod(0o555)
        os.write(told_write, b"x")
        signal.pause()

    def as_a_task_that_dies():
        staging._copy = staging.unpack = half
        stage(far, identity, folder, how)

    pid = fork(as_a_task_that_dies)
    os.read(told_read, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    staged = stage(far, identity, folder, how)
    assert left_of(folder) == [staged.name]
    os.close(told_read)
    os.close(told_write)


def test_a_node_that_cannot_unpack_says_what_it_lacks(far, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if shutil.which("unsquashfs", path="/usr/sbin:/sbin"):
        pytest.skip("this machine has unsquashfs where it is always looked for")
    with pytest.raises(ContainerError, match="needs unsquashfs") as caught:
        stage(far, identify(far), tmp_path / "images", "unpack")
    assert caught.value.node_at_fault


def test_a_folder_that_cannot_be_made_is_the_nodes_fault(far, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ContainerError, match="cannot be staged to") as caught:
        stage(far, identify(far), tmp_path / "file" / "images", "node")
    assert caught.value.node_at_fault


def empty(image):
    os.truncate(image, 0)


def cut(image):
    os.truncate(image, image.stat().st_size - 1)


def put_another(image):
    with open(image, "r+b") as file:
        file.seek(48)  # its UUID
        file.write(bytes(16))


@pytest.mark.parametrize("damage", [empty, cut, put_another])
def test_a_damaged_copy_is_made_again(far, tmp_path, damage):
    staged = stage(far, identify(far), tmp_path / "images", "node")
    damage(staged)
    assert stage(far, identify(far), tmp_path / "images", "node") == staged
    assert staged.read_bytes() == far.read_bytes()


def listing(folder):
    return sorted(
        (path.relative_to(folder), path.lstat().st_size if path.is_file() else 0) for path in folder.rglob("*")
    )


@pytest.mark.parametrize("gone", ["var", "etc/hosts", "var/tmp", ".singularity.d/env", "../{name}.json"])
def test_an_unpacked_image_of_which_something_is_gone_is_unpacked_again(far, tmp_path, gone):
    staged = stage(far, identify(far), tmp_path / "images", "unpack")
    before = listing(staged)
    path = staged / gone.format(name=staged.name)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert stage(far, identify(far), tmp_path / "images", "unpack") == staged
    assert listing(staged) == before
    assert path.exists()


def test_what_is_deep_in_an_unpacked_image_is_looked_at_once_a_day(far, tmp_path):
    staged = stage(far, identify(far), tmp_path / "images", "unpack")
    before = listing(staged)
    (staged / ".singularity.d" / "labels.json").write_text("")
    os.utime(staged.with_name(f"{staged.name}.json"), (DAYS_AGO, DAYS_AGO))
    stage(far, identify(far), tmp_path / "images", "unpack")
    assert listing(staged) == before


def test_a_staged_image_that_is_used_looks_used_to_what_cleans_by_age(staged, monkeypatch):
    image, again = staged
    paths = [image, *image.rglob("*")]
    for path in (*paths, *image.parent.glob("*.json")):
        os.utime(path, (DAYS_AGO, DAYS_AGO), follow_symlinks=False)
    monkeypatch.setattr(staging, "_make", None)  # it is not made again
    assert again() == image
    assert all(path.lstat().st_atime > DAYS_AGO + 86400 for path in paths)
    # By these Python knows its compiled files.
    assert [path for path in paths[1:] if path.lstat().st_mtime != pytest.approx(DAYS_AGO)] == []


def test_an_unpacked_image_is_still_whole_after_it_ran(far, tmp_path):
    staged = stage(far, identify(far), tmp_path / "images", "unpack")
    argv = ["apptainer", "--quiet", "exec", "--mount", "type=bind,src=/usr,dst=/usr,ro"]
    subprocess.run([*argv, "--mount", f"type=bind,src={far.parent},dst=/data/new", staged, "true"], check=True)
    os.utime(staged.with_name(f"{staged.name}.json"), (DAYS_AGO, DAYS_AGO))
    assert unpacking.is_whole(staged, time.sleep)


@pytest.mark.parametrize("how", ["node", "unpack"])
def test_a_disk_that_fills_up_meanwhile_is_a_full_disk_and_nothing_is_left(far, small_disk, monkeypatch, how):  # noqa: F811
    disk = small_disk(16 << 10)
    monkeypatch.setattr(staging, "_check_room", lambda folder, needed: None)  # others wrote after it had looked
    with pytest.raises(ContainerError, match="No space left on device") as caught:
        stage(far, identify(far), disk / "images", how)
    assert (caught.value.kind, caught.value.node_at_fault) == ("disk_full", True)
    assert left_of(disk / "images") == []


@pytest.mark.parametrize("how", ["node", "unpack"])
def test_a_task_that_waits_for_the_copy_of_another_can_be_stopped(far, tmp_path, how):
    folder = tmp_path / "images"
    folder.mkdir()
    with open(folder / f"{identify(far)['sha256']}.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoppedError):
            stage(far, identify(far), folder, how, stopping)
    assert left_of(folder) == []


@pytest.mark.parametrize("how", ["node", "unpack"])
def test_a_signal_ends_a_copy_that_has_begun_and_nothing_is_left(far, tmp_path, how):
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedError):
            stage(far, identify(far), tmp_path / "images", how, signals.pause)
    assert left_of(tmp_path / "images") == []


@pytest.mark.parametrize("does", ["exec sleep 600", "kill -TERM $$"])
def test_unpacking_can_be_stopped_also_by_a_signal_to_the_whole_job(far, tmp_path, monkeypatch, does):
    program = tmp_path / "bin" / "unsquashfs"
    program.parent.mkdir()
    # It stands for one of a large image.
    program.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\n{does}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    pid = tmp_path / "pid"

    def pause(seconds):
        if pid.exists() and pid.read_text().endswith("\n"):
            stopping(seconds)

    with pytest.raises(StoppedError):
        stage(far, identify(far), tmp_path / "images", "unpack", pause)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert left_of(tmp_path / "images") == []


@pytest.mark.parametrize("is_bad", ["the copy", "the image"])
def test_a_copy_that_is_damaged_as_it_lies_is_named_and_replaced(far, project, apptainer, tmp_path, is_bad):
    (tmp_path / "scratch").mkdir()
    how = "node" if is_bad == "the copy" else "none"
    table = apptainer.table(image=str(far), scratch=str(tmp_path / "scratch"), stage=how)
    with draft_run(project(4, container=table) / "slurmgpu.toml") as draft:
        plan = draft.plan
    assert check_here(plan, 0, "cpu").problems == []
    copies = list((tmp_path / "scratch").glob("*/images/*.sif"))
    for image in copies or [far]:
        content, times = bytearray(image.read_bytes()), image.stat()
        content[-3000:] = bytes(3000)
        image.write_bytes(content)
        os.utime(image, ns=(times.st_atime_ns, times.st_mtime_ns))
    [problem] = check_here(plan, 0, "cpu").problems
    if is_bad == "the image":
        assert problem.startswith("the image is damaged or truncated; copy it again, or build it again")
        assert far.exists()
        return
    assert problem.startswith(f"this node's copy of the image, {copies[0]}, was damaged and has been removed")
    assert not copies[0].exists()
    assert check_here(plan, 0, "cpu").problems == []
    assert copies[0].read_bytes() == far.read_bytes()
