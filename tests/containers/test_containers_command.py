"""The argument vector of Apptainer and Singularity, from the settings of [container]."""

import os
import pwd
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slurmgpu.containers.apptainer import mount
from slurmgpu.containers.command import exec_command, needed_binds, package_binds
from slurmgpu.containers.folders import task_folder
from slurmgpu.containers.settings import Bind, Container, ContainerError
from tests.support.runs import wait_until

SCRATCH = Path("/scratch/slurmgpu-7")


def command(environ=None, inner=("-c", "1"), **settings):
    return exec_command(
        Container("/images/a.sif", **settings),
        inner,
        image=Path("/images/a.sif"),
        binds=[Bind("/runs/x", "/runs/x"), Bind("/data", "/mnt/data", read_only=True)],
        gpus=True,
        folder=Path("/runs/x"),
        environ={"HOME": "/home/me", **(environ or {})},
        extra_env={"PYTHONPATH": "/opt/slurmgpu"},
        scratch=SCRATCH,
    )


def inside(environ=None, **settings):
    """What the runtime is told to set in the container."""
    prefix = "APPTAINERENV_"
    env = command(environ, **settings)[1]
    return {name.removeprefix(prefix): value for name, value in env.items() if name.startswith(prefix)}


def test_settings_become_this_argument_vector():
    argv, _ = command()
    assert argv == [
        *("apptainer", "--quiet", "exec", "--cleanenv", "--no-eval", "--nv"),
        *("--mount", "type=bind,src=/data,dst=/mnt/data,ro"),
        *("--mount", "type=bind,src=/runs/x,dst=/runs/x"),
        *("--mount", "type=bind,src=/scratch/slurmgpu-7,dst=/scratch/slurmgpu-7"),
        *("--pwd", "/runs/x", "/images/a.sif", "python3", "-c", "1"),
    ]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"home": "host"}, []),
        ({"home": "private"}, ["--home", f"{task_folder(SCRATCH)}/home:/home/me", "--no-mount", "cwd"]),
        ({"home": "none"}, ["--no-home", "--no-mount", "cwd"]),
        ({"strict": True}, ["--containall", "--workdir", f"{task_folder(SCRATCH)}"]),
    ],
)
def test_home_and_strict_become_these_options(settings, options):
    argv, _ = command(**settings)
    assert argv[6 : argv.index("--mount")] == options


def test_singularity_gets_its_own_names():
    argv, env = command({"TZ": "UTC"}, runtime="singularity", python="/usr/bin/python3.12")
    assert argv[0] == "singularity"
    assert env["SINGULARITYENV_TZ"] == "UTC"
    assert "/usr/bin/python3.12" in argv


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/a b", "src=/a b"),
        ("/a:b=c", "src=/a:b=c"),
        ("/a,b", '"src=/a,b"'),
        ('/a"b', '"src=/a""b"'),
        ("/a\nb", '"src=/a\nb"'),
    ],
)
def test_paths_are_quoted_as_the_runtime_reads_them(path, field):
    assert mount(Bind(path, "/x")) == f"type=bind,{field},dst=/x"


def bind(text):
    return Bind.parse(text)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["/a", "/a"], ["/a"]),
        (["/a/b", "/a"], ["/a"]),
        (["/a", "/ab"], ["/a", "/ab"]),
        (["/a", "/a/b:/a/b:ro"], ["/a", "/a/b:/a/b:ro"]),
        (["/a:/a:ro", "/a/b"], ["/a:/a:ro", "/a/b"]),
        (["/a:/a:ro", "/a"], ["/a"]),
        (["/a", "/c:/a/b"], ["/a", "/c:/a/b"]),
        (["/x:/a", "/x/b:/a/b", "/x/b:/b"], ["/x:/a", "/x/b:/b"]),
        (["/a", "/a/b:/a/b:ro", "/a/b/c"], ["/a", "/a/b:/a/b:ro", "/a/b/c"]),
        (["/", "/a"], ["/"]),
    ],
)
def test_binds_that_another_brings_are_left_out_and_parents_come_first(given, kept):
    for order in (given, given[::-1]):
        assert sorted(needed_binds([bind(text) for text in order]), key=str) == sorted(
            [bind(text) for text in kept], key=str
        )
    found = [each.dst for each in needed_binds([bind(text) for text in given])]
    assert all(not above.startswith(f"{below}/") for i, below in enumerate(found) for above in found[:i])


def test_what_slurm_and_the_gpu_libraries_need_comes_in_and_nothing_else():
    allowed = "SLURM_JOB_ID CUDA_VISIBLE_DEVICES NCCL_DEBUG MASTER_ADDR RANK OMP_NUM_THREADS HF_HOME https_proxy TZ"
    allowed += " PYTORCH_CUDA_ALLOC_CONF LOCAL_RANK PMIX_RANK WANDB_MODE"
    kept_out = "PATH LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH PYTHONHOME CONDA_PREFIX CUDA_HOME NCCL_ROOT AWS_SECRET_KEY"
    kept_out += " BASH_FUNC_ml%% SLURM_bad-name APPTAINERENV_EVIL SINGULARITYENV_EVIL RANKS"
    found = inside(dict.fromkeys((allowed + " " + kept_out).split(), "host"))
    assert {name for name, value in found.items() if value == "host"} == set(allowed.split())
    assert found["PYTHONPATH"] == "/opt/slurmgpu"
    assert found["PYTHONNOUSERSITE"] == found["PYTHONUNBUFFERED"] == "1"
    assert found["LANG"] == "C.UTF-8"
    assert found["TRITON_CACHE_DIR"] == "/scratch/slurmgpu-7/caches/triton"


def test_the_runtime_itself_is_not_swayed_by_the_hosts_environment():
    dropped = "APPTAINER_BIND APPTAINER_BINDPATH SINGULARITY_BIND APPTAINER_OVERLAY APPTAINERENV_X SINGULARITYENV_X"
    dropped += " LD_PRELOAD PYTHONPATH PYTHONHOME BASH_FUNC_ml%% APPTAINER_SCRATCHDIR APPTAINER_OVERLAYIMAGE"
    dropped += " APPTAINER_NETWORK APPTAINER_UNSHARE_IPC APPTAINER_NO_NV APPTAINER_MEMORY APPTAINER_CPUSET_CPUS"
    kept = "PATH APPTAINER_TMPDIR APPTAINER_DROP_CAPS APPTAINER_CACHEDIR APPTAINER_USERNS LD_LIBRARY_PATH"
    _, env = command(dict.fromkeys((dropped + " " + kept).split(), "host"))
    assert {name for name, value in env.items() if value == "host"} == set(kept.split())


def test_the_users_variables_override_and_true_hands_one_on_and_false_keeps_one_out():
    env = {"TOKEN": True, "TZ": False, "LANG": "de_DE", "TRITON_CACHE_DIR": "/t", "PYTHONPATH": "/mine"}
    found = inside({"TOKEN": "secret", "TZ": "UTC", "TERM": "vt100"}, env=env)
    assert found["TOKEN"] == "secret"
    assert "TZ" not in found
    assert (found["LANG"], found["TRITON_CACHE_DIR"], found["TERM"]) == ("de_DE", "/t", "vt100")
    assert found["PYTHONPATH"] == "/opt/slurmgpu:/mine"
    with pytest.raises(ContainerError, match="TOKEN, which is not set"):
        inside({}, env=env)


def test_no_value_is_an_argument():
    argv, _ = command({"WANDB_API_KEY": "secret"}, env={"TOKEN": "secret"})
    assert "secret" not in " ".join(argv)


@pytest.mark.parametrize(
    ("tmpdir", "settings", "kept"),
    [
        ("/scratch/job.1", {}, False),
        ("/data/tmp", {}, False),
        ("/runs/x/tmp", {}, True),
        ("/tmp/job.1", {}, True),
        ("/tmp/job.1", {"strict": True}, False),
        ("/scratch/job.1", {"env": {"TMPDIR": "/scratch/job.1"}}, True),
    ],
)
def test_tmpdir_comes_in_only_where_it_can_be_seen_and_written(tmpdir, settings, kept):
    assert ("TMPDIR" in inside({"TMPDIR": tmpdir}, **settings)) is kept


# From here on in real containers


class Runs:
    """Runs commands in the image with settings of [container], as a task would."""

    def __init__(self, apptainer, folder, user=None):
        self.apptainer, self.folder, self.user = apptainer, folder, user or {}
        self.scratch = folder / "scratch"
        (task_folder(self.scratch) / "home").mkdir(parents=True)

    def command(self, *inner, environ=(), binds=(), gpus=False, own=(), folder=None, **settings):
        settings = {"python": "/bin/sh", **settings}
        container = Container(str(self.apptainer.sif), **settings)
        texts = self.apptainer.binds if settings["python"] == self.apptainer.python else ["/usr:/usr:ro"]
        return exec_command(
            container,
            inner,
            image=self.apptainer.sif,
            binds=[Bind(str(self.folder), str(self.folder)), *map(Bind.parse, texts), *binds],
            gpus=gpus,
            folder=folder or self.folder,
            environ={**os.environ, **dict(environ)},
            extra_env=dict(own),
            scratch=self.scratch,
        )

    def __call__(self, *inner, **settings):
        argv, env = self.command(*inner, **settings)
        if self.user:
            env = {name: value for name, value in env.items() if name != "APPTAINER_DROP_CAPS"}
        return subprocess.run(argv, env=env, input="", cwd=self.folder, capture_output=True, text=True, **self.user)

    def sh(self, script, **settings):
        done = self("-c", script, **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def root_runs(apptainer, tmp_path):
    return Runs(apptainer, tmp_path)


@pytest.fixture(params=["this user", "normal user"])
def runs(request, apptainer, tmp_path, normal_user):
    if request.param == "this user":
        return Runs(apptainer, tmp_path)
    folder = Path(tempfile.mkdtemp(dir=apptainer.sif.parent))  # pytest's own may be entered by root alone
    made = Runs(apptainer, folder, normal_user)
    if normal_user:
        subprocess.run(["chown", "-R", str(normal_user["user"]), folder], check=True)
    return made


def test_values_arrive_as_text_whatever_is_in_them(runs):
    value = "$(touch evil) `touch evil` $HOME a,b\nsecond \"line\" 'x' \\ ü"
    script = 'printf %s "$VALUE"; test ! -e evil'
    assert runs.sh(script, env={"VALUE": value}, environ={"APPTAINERENV_VALUE": "inherited"}) == value


def test_the_environment_inside_is_the_one_that_was_made(runs):
    outer = {"SLURM_JOB_ID": "7", "SECRET": "x", "SINGULARITYENV_EVIL": "1", "PYTHONHOME": "/x", "LD_PRELOAD": "/x.so"}
    text = runs.sh("env", environ=outer)
    names = {line.partition("=")[0] for line in text.splitlines()}
    assert {"SLURM_JOB_ID", "PYTHONNOUSERSITE", "TRITON_CACHE_DIR"} <= names
    assert not {"SECRET", "EVIL", "PYTHONHOME", "LD_PRELOAD"} & names


def test_a_container_has_the_network_of_its_node_whatever_the_users_variables_ask_for(root_runs):
    asked = {"APPTAINER_NETWORK": "none", "APPTAINER_SCRATCHDIR": "/there", "APPTAINER_OVERLAYIMAGE": "/gone"}
    said = root_runs.sh("readlink /proc/self/ns/net; test ! -e /there", environ=asked)
    assert said == f"{Path('/proc/self/ns/net').readlink()}\n"


def test_singularity_as_a_name_of_apptainer_gets_the_environment_too_and_does_not_complain(root_runs, tmp_path):
    link = tmp_path / "bin" / "singularity"
    link.parent.mkdir()
    link.symlink_to(subprocess.run(["which", "apptainer"], capture_output=True, text=True).stdout.strip())
    path = f"{link.parent}:{os.environ['PATH']}"
    argv, env = root_runs.command("-c", "echo $A", runtime="singularity", env={"A": "b"}, environ={"PATH": path})
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@"', "sh", *argv], env={**env, "PATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b\n", "")


@pytest.mark.parametrize("name", ["a b", "a,b", "a:b", 'a"b', "a=b", "a\\b", "-ö'$(x)"])
def test_any_path_can_be_bound(root_runs, tmp_path, name):
    folder = tmp_path / "host" / name
    folder.mkdir(parents=True)
    (folder / "file").write_text("seen")
    assert root_runs.sh('cat "/mnt/$0/file"'.replace("$0", "x"), binds=[Bind(str(folder), "/mnt/x")]) == "seen"
    same = [Bind(str(folder), str(folder))]
    assert root_runs.sh('cat "$PLACE/file"', env={"PLACE": str(folder)}, binds=same, strict=True) == "seen"


def test_a_read_only_bind_cannot_be_written_and_another_can(runs):
    read_only = Bind(str(runs.folder), "/mnt/ro", read_only=True)
    runs.sh("touch here; test -e /mnt/ro/here", binds=[read_only])
    done = runs("-c", "touch /mnt/ro/there", binds=[read_only])
    assert done.returncode != 0
    assert "Read-only file system" in done.stderr


def test_a_read_only_folder_in_a_writable_one_stays_so(root_runs, tmp_path):
    (tmp_path / "inner").mkdir()
    inner = Bind(str(tmp_path / "inner"), str(tmp_path / "inner"), read_only=True)
    root_runs.sh("touch outer && ! touch inner/x", binds=[inner])


def test_a_private_home_is_empty_writable_and_where_home_is(runs):
    here = os.environ["HOME"] if not runs.user else "/home/someone"
    (runs.folder / "below-home").mkdir(exist_ok=True)
    script = 'ls -A "$HOME"; touch "$HOME/x"; echo "$HOME"'
    environ = {"HOME": here}
    assert runs.sh(script, home="private", environ=environ, folder=Path("/tmp")) == f"{here}\n"
    assert runs.sh("ls -A ~", home="private", environ=environ, folder=Path("/tmp")) == "x\n"


def test_a_home_that_is_kept_out_is_not_seen_even_when_the_task_works_below_it(apptainer):
    with tempfile.TemporaryDirectory(dir=Path.home()) as project:
        runs = Runs(apptainer, Path(project))
        for kind in ("none", "private"):
            assert runs.sh("ls -A ~; pwd", home=kind) == f"{Path(project).name}\n{project}\n"


def test_a_strict_container_sees_nothing_of_the_node_but_its_binds(runs):
    with tempfile.NamedTemporaryFile(prefix="slurmgpu-marker-", dir="/tmp") as marker:
        Path(marker.name).chmod(0o644)
        assert "no" in runs.sh(f"test -e {marker.name} || echo no", strict=True)
        assert "yes" in runs.sh(f"test -e {marker.name} && echo yes")
    # 64 MB is what Apptainer gives to a contained /tmp, home and (one thinks) /dev/shm.
    sizes = runs.sh("for d in /tmp ~ /dev/shm; do df -P $d | tail -1; done", strict=True).splitlines()
    assert all(int(line.split()[1]) > 64 * 1024 for line in sizes)
    runs.sh('touch /tmp/x ~/x /dev/shm/x "$CACHE/x"', env={"CACHE": str(runs.scratch)}, strict=True)


def test_the_hosts_slurmgpu_and_the_workloads_package_are_found_inside(root_runs, apptainer, tmp_path):
    package = tmp_path / "elsewhere" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "work.py").write_text("X = 5\n")
    module = tmp_path / "elsewhere" / "single.py"
    module.write_text("Y = 6\n")
    code = "import slurmgpu, mine.work, single; print(slurmgpu.__file__, mine.work.X, single.Y)"
    done = root_runs(
        "-c",
        code,
        python=apptainer.python,
        binds=package_binds([("mine", str(package)), ("single.py", str(module))]),
        own={"PYTHONPATH": "/opt/slurmgpu"},
        strict=True,
    )
    assert done.stdout == "/opt/slurmgpu/slurmgpu/__init__.py 5 6\n", done.stderr


def test_packages_below_the_home_of_the_host_do_not_shadow_those_of_the_image(root_runs, apptainer, tmp_path):
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = tmp_path / "home" / ".local" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "leak.py").touch()
    # As the runtime mounts the home that passwd names, a bind puts this one in its place.
    home = Bind(str(tmp_path / "home"), pwd.getpwuid(os.getuid()).pw_dir)
    code = "import os, site; assert os.path.isdir(os.path.expanduser('~/.local')); import leak"
    python = {"python": os.path.realpath("/usr/bin/python3")}
    if not Path(python["python"]).exists():
        python = {"python": apptainer.python}
    done = root_runs("-c", code, binds=[home], **python)
    assert "No module named 'leak'" in done.stderr
    assert root_runs("-c", code, binds=[home], env={"PYTHONNOUSERSITE": ""}, **python).returncode == 0


@pytest.mark.parametrize("strict", [False, True])
def test_exit_codes_and_signals_of_the_program_come_out(runs, strict):
    assert runs("-c", "exit 7", strict=strict).returncode == 7
    # Apptainer dies by the signal itself, or ends with 128 + it where it has an init.
    assert runs("-c", "kill -KILL $$", strict=strict).returncode in (-9, 137)
    assert runs("-c", "kill -SEGV $$", strict=strict).returncode in (-11, 139)


TRAP = """
trap 'echo usr2' USR2
trap 'echo term; exit 0' TERM
echo ready
while :; do sleep 0.05; done
"""


def processes(session):
    """The command lines of a session's processes that have not ended."""
    found = subprocess.run(["ps", "-s", str(session), "-o", "args="], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "defunct" not in line]


@pytest.mark.parametrize("strict", [False, True])
def test_a_signal_reaches_the_program_once_and_nothing_is_left_behind(runs, strict):
    argv, env = runs.command("-c", TRAP, strict=strict)
    if runs.user:
        env.pop("APPTAINER_DROP_CAPS", None)
    # A normal user may not be allowed into the folder that the tests are run in.
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "cwd": "/", **runs.user}
    with subprocess.Popen(argv, env=env, **options) as run:
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGUSR2)
        assert run.stdout.readline() == "usr2\n"
        run.send_signal(signal.SIGTERM)
        assert run.stdout.read() == "term\n"  # and no second usr2
        assert run.wait() == 0
    wait_until(lambda: not processes(run.pid), "the end of all that it started")  # its squashfuse ends a moment later


def test_without_a_gpu_nv_says_nothing_at_all(root_runs):
    done = root_runs("-c", "ls /.singularity.d/libs 2>/dev/null | grep -c libcuda; ls /dev | grep -c nvidia", gpus=True)
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    # So only a probe in the container can tell whether there is a GPU.
    assert (done.stdout, done.stderr) == ("0\n0\n", "")
