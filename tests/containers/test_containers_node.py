"""A container on its node: it is prepared and runs, or it is refused in a sentence."""

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slurmgpu.containers.command import exec_command
from slurmgpu.containers.folders import leave_task_folders, task_folder
from slurmgpu.containers.images import identify
from slurmgpu.containers.node import prepare
from slurmgpu.containers.settings import Bind, Container, ContainerError
from tests.cluster.fixture import leave_out
from tests.support.images import fork
from tests.support.runs import check_rows, records, start, wait_until


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    leave_task_folders()


@pytest.fixture
def container(apptainer, tmp_path):
    """Makes containers of the tests' image, with scratch in the test's folder."""

    def make(**settings):
        given = {"python": "/bin/sh", "binds": (Bind("/usr", "/usr", True),), "scratch": str(tmp_path), **settings}
        return Container(str(apptainer.sif), identity=identify(apptainer.sif), **given)

    return make


def runtime(folder, name, words, code=0):
    """A stand-in for a runtime of another version; the environment that has it on PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{words}'\nexit {code}\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_prepared_container_runs(container, tmp_path):
    settings = container(binds=(Bind("/usr", "/usr", True), Bind("$DATA", "/mnt/data")))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("seen\n")
    environ = {**os.environ, "DATA": str(tmp_path / "data")}
    ready = prepare(settings, [Bind(str(tmp_path), str(tmp_path))], environ)
    assert ready.runtime_version.startswith("apptainer version 1.")
    assert ready.image == Path(settings.image)
    argv, env = exec_command(
        settings,
        ("-c", 'cat /mnt/data/file; mkdir -p "$TRITON_CACHE_DIR"; pwd'),
        image=ready.image,
        binds=ready.binds,
        gpus=False,
        folder=tmp_path,
        environ=environ,
        extra_env={},
        scratch=ready.scratch,
    )
    done = subprocess.run(argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.stdout, done.stderr) == (f"seen\n{tmp_path}\n", "")
    assert (ready.scratch / "caches" / "triton").is_dir()


def test_a_normal_user_prepares_and_runs_too(apptainer, normal_user):
    folder = Path(tempfile.mkdtemp(dir=apptainer.sif.parent))
    folder.chmod(0o777)

    def as_a_normal_user():
        os.chdir("/")  # he may not be allowed into the folder that the tests are run in
        if normal_user:
            os.setgroups([])
            os.setresuid(normal_user["user"], normal_user["user"], normal_user["user"])
        environ = {**os.environ, "HOME": "/nonexistent", "XDG_CACHE_HOME": str(folder)}
        environ.pop("APPTAINER_DROP_CAPS", None)
        usr = Bind("/usr", "/usr", True)
        settings = Container(str(apptainer.sif), python="/bin/sh", scratch=str(folder), binds=(usr,), home="private")
        settings = Container.from_json({**settings.to_json(), "identity": identify(apptainer.sif)})
        ready = prepare(settings, [], environ)
        argv, env = exec_command(
            settings,
            ("-c", "touch ~/x $MPLCONFIGDIR/../x"),
            image=ready.image,
            binds=ready.binds,
            gpus=False,
            folder=Path("/tmp"),
            environ=environ,
            extra_env={"MPLCONFIGDIR": str(ready.scratch / "caches" / ".")},
            scratch=ready.scratch,
        )
        os.execvpe(argv[0], argv, env)

    assert os.waitpid(fork(as_a_normal_user), 0)[1] == 0


@pytest.mark.parametrize("name", ["apptainer", "singularity"])
def test_a_node_without_the_runtime_is_told_to_load_its_module(container, tmp_path, name):
    (tmp_path / "bin").mkdir()
    with pytest.raises(ContainerError, match=f"module load {name}") as caught:
        prepare(container(runtime=name), [], {"PATH": str(tmp_path / "bin")})
    assert caught.value.node_at_fault


@pytest.mark.parametrize(
    ("name", "words", "accepted"),
    [
        ("apptainer", "apptainer version 1.0.3", False),
        ("apptainer", "apptainer version 1.1.0-1.el8", True),
        ("apptainer", "apptainer version 1.10.2", True),
        ("singularity", "singularity version 3.8.7", False),
        ("singularity", "singularity-ce version 3.9.9", False),
        ("singularity", "singularity-ce version 3.10.0-jammy", True),
        ("singularity", "singularity-ce version 4.1.2", True),
        ("singularity", "apptainer version 1.3.1", True),
        ("apptainer", "error while loading shared libraries", False),
    ],
)
def test_a_runtime_that_is_too_old_is_refused(container, tmp_path, name, words, accepted):
    environ = runtime(tmp_path / "bin", name, words)
    if accepted:
        assert prepare(container(runtime=name), [], environ).runtime_version in words
        return
    with pytest.raises(ContainerError, match=r"newer|does not work") as caught:
        prepare(container(runtime=name), [], environ)
    assert caught.value.node_at_fault


def test_a_runtime_that_fails_is_refused(container, tmp_path):
    environ = runtime(tmp_path / "bin", "apptainer", "apptainer version 1.4.5", code=1)
    with pytest.raises(ContainerError, match="does not work on this node"):
        prepare(container(), [], environ)


def test_a_bind_whose_source_this_node_lacks_is_found(container, tmp_path):
    for binds in ((Bind(f"{tmp_path}/none", "/x"),), (Bind("$NOWHERE/x", "/x"),)):
        with pytest.raises(ContainerError, match="on this node") as caught:
            prepare(container(binds=binds), [], os.environ)
        assert caught.value.node_at_fault


def test_two_sources_for_one_place_are_refused(container, tmp_path):
    with pytest.raises(ContainerError, match="have the same destination, /mnt"):
        prepare(container(binds=(Bind("/usr", "/mnt"),)), [Bind(str(tmp_path), "/mnt")], os.environ)


def test_a_variable_that_is_to_be_handed_on_must_be_there(container):
    with pytest.raises(ContainerError, match="NO_SUCH_TOKEN, which is not set"):
        prepare(container(env={"NO_SUCH_TOKEN": True}), [], os.environ)


def test_another_image_than_the_planned_one_is_refused(container, apptainer):
    settings = container()
    settings = Container.from_json({**settings.to_json(), "identity": {**settings.identity, "uuid": "other"}})
    with pytest.raises(ContainerError, match="planned with"):
        prepare(settings, [], os.environ)


def test_folders_that_variables_name_are_bound(container, tmp_path):
    models, temporary = tmp_path / "models", tmp_path / "tmp"
    for folder in (models, temporary):
        folder.mkdir()
    environ = {**os.environ, "HF_HOME": str(models), "TMPDIR": str(temporary), "TORCH_HOME": str(tmp_path / "none")}
    ready = prepare(container(env={"WANDB_DIR": str(tmp_path)}), [], environ)
    assert Bind(str(tmp_path), str(tmp_path)) in ready.binds  # and with it the other two
    ready = prepare(container(), [], environ)
    assert {Bind(str(models), str(models)), Bind(str(temporary), str(temporary))} <= set(ready.binds)


def test_scratch_is_a_folder_of_the_users_own(container, tmp_path):
    ready = prepare(container(), [], os.environ)
    assert ready.scratch == tmp_path / f"slurmgpu-{os.getuid()}"
    assert stat.S_IMODE(ready.scratch.stat().st_mode) == 0o700
    ready.scratch.chmod(0o777)
    prepare(container(), [], os.environ)
    assert stat.S_IMODE(ready.scratch.stat().st_mode) == 0o700
    environ = {**os.environ, "TMPDIR": str(tmp_path / "t")}
    (tmp_path / "t").mkdir()
    assert prepare(container(scratch=None), [], environ).scratch.parent == tmp_path / "t"
    assert prepare(container(scratch="$TMPDIR"), [], environ).scratch.parent == tmp_path / "t"


def test_scratch_that_is_somebody_elses_or_a_link_is_refused(container, tmp_path):
    mine = tmp_path / f"slurmgpu-{os.getuid()}"
    mine.symlink_to("/tmp")
    with pytest.raises(ContainerError, match="another user") as caught:
        prepare(container(), [], os.environ)
    assert caught.value.node_at_fault
    mine.unlink()
    if os.geteuid() != 0:
        return
    mine.mkdir()
    os.chown(mine, 65534, 65534)
    with pytest.raises(ContainerError, match="another user"):
        prepare(container(), [], os.environ)


def test_scratch_that_cannot_be_used_is_the_nodes_fault(container, tmp_path):
    (tmp_path / "file").touch()
    for scratch in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ContainerError, match=r"with \[container\] scratch") as caught:
            prepare(container(scratch=str(scratch)), [], os.environ)
        assert caught.value.node_at_fault


def test_a_colon_in_scratch_is_refused_where_the_runtime_takes_none(container, tmp_path):
    scratch = tmp_path / "a:b"
    scratch.mkdir()
    with pytest.raises(ContainerError, match=r"takes no scratch folder \S*/a:b/slurmgpu-\d+ with a colon in its path"):
        prepare(container(scratch=str(scratch), home="private"), [], os.environ)
    for given in ({"home": "private", "strict": True}, {"home": "none"}, {}):
        prepare(container(scratch=str(scratch), **given), [], os.environ)


def test_scratch_with_a_variable_that_is_not_set_is_said_of_scratch(container):
    with pytest.raises(ContainerError, match=r"\[container\] scratch \$NOWHERE/x names the variable NOWHERE"):
        prepare(container(scratch="$NOWHERE/x"), [], os.environ)


TAKES = """
import sys
from pathlib import Path
from slurmgpu.containers.folders import take_task_folder
print(take_task_folder(Path(sys.argv[1])).name, flush=True)
sys.stdin.read()
"""
"""A task that has a folder of its own until it is told to end, and then dies without a word."""


@contextlib.contextmanager
def living(scratch, *before):
    """Such a task, living; its folder."""
    argv = [*before, sys.executable, "-c", TAKES, scratch]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        name = process.stdout.readline().strip()
        if not name:
            leave_out(f"{before} does not work here")
        yield scratch / "tasks" / name


def test_what_dead_tasks_left_in_scratch_goes_and_what_living_ones_have_stays(container):
    scratch = prepare(container(), [], os.environ).scratch
    mine = task_folder(scratch)
    (mine / "home" / "old").touch()
    of_another_node = scratch / "tasks" / "another-node-1-0123abcd"
    of_another_node.mkdir()
    (of_another_node / "lock").touch()
    with living(scratch) as dead:
        (dead / "home" / "closed").mkdir(mode=0)
        assert dead.exists()
    with living(scratch) as lives:
        assert not dead.exists()
        half_removed = scratch / "tasks" / f"{os.uname().nodename}-1-0123abcd"
        (half_removed / "home").mkdir(parents=True)
        prepare(container(), [], os.environ)
        assert set((scratch / "tasks").iterdir()) == {mine, lives, of_another_node}
    assert list((mine / "home").iterdir()) == []


def test_a_task_in_another_pid_namespace_keeps_its_home_and_shares_it_with_nobody(container):
    scratch = prepare(container(), [], os.environ).scratch
    mine = task_folder(scratch)
    space = ("unshare", *(() if os.geteuid() == 0 else ("-Ur",)), "--pid", "--fork", "--mount-proc")
    with living(scratch, *space) as first, living(scratch, *space) as second:
        prepare(container(), [], os.environ)
        assert len({mine, first, second}) == 3
        assert all((folder / "home").is_dir() for folder in (mine, first, second))


def test_a_task_that_ends_takes_its_folder_with_it_also_when_it_could_not_start(container, tmp_path):
    scratch = prepare(container(), [], os.environ).scratch
    (task_folder(scratch) / "home" / "cache").mkdir()
    os.waitpid(fork(leave_task_folders), 0)  # a fork is not the task
    assert task_folder(scratch).exists()
    leave_task_folders()
    leave_task_folders()
    with pytest.raises(ContainerError):
        prepare(container(binds=(Bind(f"{tmp_path}/none", "/x"),)), [], os.environ)
    leave_task_folders()
    assert list((scratch / "tasks").iterdir()) == []


def test_a_tmpdir_that_a_node_lacks_is_not_used_unless_scratch_names_it(container, tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path / "of-a-job")}
    assert prepare(container(scratch=None), [], environ).scratch.parent == Path("/tmp")
    with pytest.raises(ContainerError, match=r"with \[container\] scratch"):
        prepare(container(scratch="$TMPDIR"), [], environ)


def test_a_task_that_waits_for_the_image_ends_at_a_signal_and_takes_its_home_with_it(
    project, slurmgpu, apptainer, tmp_path
):
    folder = project(40, container=apptainer.table(stage="unpack", home="private", scratch=str(tmp_path)))
    scratch = tmp_path / f"slurmgpu-{os.getuid()}"
    (scratch / "images").mkdir(parents=True)
    lock = scratch / "images" / f"{identify(apptainer.sif)['sha256']}.lock"
    with open(lock, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        process = start("submit", "--executor", "local", "--gpus", "0", cwd=folder)
        wait_until(lambda: any(opens(record["pid"], lock) for record in records(folder)), "the wait for the copy")
        [record] = records(folder)
        assert len(list((scratch / "tasks").iterdir())) == 1
        os.kill(record["pid"], signal.SIGTERM)
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 3, output
    [record] = records(folder)
    assert (record["state"], record["failure"]) == ("ended", "preempted")
    assert list((scratch / "tasks").iterdir()) == []
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_rows(folder, 40)
    assert list((scratch / "tasks").iterdir()) == []


def opens(pid, path):
    try:
        return any(file.samefile(path) for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has just closed one, or has ended
        return False


def test_an_image_is_staged_when_that_is_asked_for(container, tmp_path):
    ready = prepare(container(stage="unpack"), [], os.environ)
    assert ready.image.parent == ready.scratch / "images"
    assert (ready.image / ".singularity.d").is_dir()


def test_a_strict_container_gets_infiniband_where_the_node_has_it(container):
    if not Path("/dev").exists() or os.geteuid() != 0:
        leave_out("only root can make a device folder")
    made = not Path("/dev/infiniband").exists()
    if made:
        Path("/dev/infiniband").mkdir()
    try:
        assert Bind("/dev/infiniband", "/dev/infiniband") in prepare(container(strict=True), [], os.environ).binds
        assert Bind("/dev/infiniband", "/dev/infiniband") not in prepare(container(), [], os.environ).binds
    finally:
        if made:
            shutil.rmtree("/dev/infiniband")
