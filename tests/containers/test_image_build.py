"""Images: the definition files build, offline and for real; what a build that fails and a check say."""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from slurmgpu.containers.apptainer import SQUASHFS, Apptainer
from slurmgpu.containers.apptainer_complaints import why_build_failed
from slurmgpu.containers.image_build import definition, find_runtime
from slurmgpu.containers.images import identify
from slurmgpu.containers.settings import Bind
from slurmgpu.errors import SlurmGPUError
from tests.cluster.fixture import leave_out
from tests.support.images import NOBODY

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workshop(apptainer):
    """A folder that every user may enter, with an unpacked base image and wheels of NumPy and h5py."""
    if importlib.util.find_spec("pip") is None:
        leave_out("the tests' Python has no pip")
    with (
        tempfile.TemporaryDirectory(prefix="slurmgpu-test-build-", dir="/tmp") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("APPTAINER_MKSQUASHFS_ARGS", f"{SQUASHFS} -Xcompression-level 1")  # quick
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(apptainer.sandbox, folder / "base", symlinks=True)
        for bind in binds_of(apptainer):
            # While building, what is bound must have a place in the image.
            (folder / "base" / bind.dst.lstrip("/")).mkdir(parents=True, exist_ok=True)
        certificates = Path("/etc/ssl/certs/ca-certificates.crt")
        if certificates.exists():  # the pip of Debian 13 reads them, also where it goes to no network
            (folder / "base" / "etc/ssl/certs").mkdir(parents=True)
            shutil.copy(certificates, folder / "base" / "etc/ssl/certs")
        (folder / "wheels").mkdir()
        for package in ("numpy", "h5py"):
            pack_wheel(package, folder / "wheels")
        yield folder


def binds_of(apptainer):
    return [Bind.parse(text) for text in apptainer.binds]


def pack_wheel(name, folder):
    """The wheel that an installed package came from, near enough: nothing is downloaded."""
    found = importlib.metadata.distribution(name)
    [tag, *_] = re.findall(r"^Tag: (.*)$", found.read_text("WHEEL"), re.M)
    with zipfile.ZipFile(folder / f"{name}-{found.version}-{tag}.whl", "w") as wheel:
        for file in found.files:
            if not {"..", "tests"} & set(file.parts) and file.suffix != ".pyc":
                wheel.write(file.locate(), file)


@pytest.fixture(scope="module")
def built(workshop, apptainer):
    """The CPU image, built by the command line as this user; and what it said."""
    image = workshop / "cpu.sif"
    binds = [part for text in apptainer.binds for part in ("--bind", text)]
    command = ["image", "build", "--cpu", "-o", image, "--base", "base", *binds, "--bind", "wheels:/mnt:ro"]
    command += ["--build-arg", f"PYTHON={apptainer.python}", "--build-arg", "REVISION=abc"]
    done = subprocess.run(
        [sys.executable, "-m", "slurmgpu", *map(str, command)],
        cwd=workshop,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return image, done


def test_the_cpu_definition_builds_offline_and_is_checked(built):
    image, done = built
    assert sorted(path.name for path in image.parent.iterdir()) == ["base", "cpu.sif", "wheels"]
    assert "Running testscript" in done.stderr
    assert f"✓ image      {image}: " in done.stdout
    assert re.search(r"✓ python +3\.\d+\.\d+ in cpu\.sif \(numpy [\d.]+, h5py [\d.]+, slurmgpu", done.stdout)
    assert "✗" not in done.stdout


def test_the_test_of_an_image_runs_on_its_own(built, apptainer):
    image, _ = built
    command = ["apptainer", "--quiet", "test", *(part for text in apptainer.binds for part in ("--bind", text)), image]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"Python 3\.\d+\.\d+, numpy [\d.]+, h5py [\d.]+$", done.stdout.strip())


def test_an_image_says_what_it_was_made_from(built):
    labels = identify(built[0])["labels"]
    assert labels["org.opencontainers.image.title"] == "slurmgpu-cpu"
    assert labels["org.opencontainers.image.base.name"].endswith("/base")
    assert labels["org.opencontainers.image.revision"] == "abc"


def test_a_normal_user_builds_the_same_image(workshop, apptainer, normal_user):
    if not normal_user:
        pytest.skip("the tests run as a normal user: the others have shown it")
    base, out = workshop / "base.sif", workshop / "out"
    subprocess.run(["apptainer", "--quiet", "build", base, workshop / "base"], check=True, capture_output=True)
    out.mkdir()
    os.chown(out, NOBODY, NOBODY)
    # This Python may lie where only root may look (/root); it is shown to the user in another place, for the build.
    aliases, shown = [], [Bind(str(workshop / "wheels"), "/mnt", True)]
    for number, bind in enumerate(binds_of(apptainer)):
        alias = out / f"bind{number}"
        alias.mkdir()
        aliases += [bind.src, str(alias)]
        shown.append(Bind(str(alias), bind.dst, True))
    command = Apptainer().build_command(
        out / "cpu.sif",
        Path(shutil.copy(definition("cpu"), out)),
        base=str(base),
        arguments={"PYTHON": apptainer.python},
        binds=shown,
    )
    script = 'while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift; exec setpriv --reuid "$@"'
    user = [str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    done = subprocess.run(
        ["unshare", "-m", "bash", "-ec", script, "bash", *aliases, "--", *user, *command],
        cwd=out,
        env={**os.environ, "HOME": str(out)},
        capture_output=True,
        text=True,
    )
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert (out / "cpu.sif").stat().st_uid == NOBODY
    finally:
        shutil.rmtree(out)
        base.unlink()


def test_nothing_is_overwritten(built, slurmgpu):
    image, _ = built
    before = image.read_bytes()
    done = slurmgpu("image", "build", "--cpu", "-o", image, expect=2)
    assert "already exists" in done.stderr
    assert image.read_bytes() == before


def test_a_build_that_fails_leaves_its_log_alone_and_follows_no_link(workshop, slurmgpu, tmp_path):
    other, tmp_path = tmp_path / "other", tmp_path / "images"
    tmp_path.mkdir()
    other.write_text("somebody's")
    (tmp_path / "cpu.sif.log").symlink_to(other)  # as others may lay in a shared folder
    image = tmp_path / "cpu.sif"
    arguments = ["--base", workshop / "base", "--bind", "/usr:/usr:ro", "--build-arg", "PYTHON=/missing/python"]
    done = slurmgpu("image", "build", "--cpu", "-o", image, *arguments, expect=2)
    assert re.search(r"The build failed: .*: /missing/python: No such file or directory\. Its output is", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.sif.log"]
    assert "/missing/python: No such file" in (tmp_path / "cpu.sif.log").read_text()
    assert other.read_text() == "somebody's"


def test_binds_that_can_be_written_and_others_go_together_in_a_build(workshop, apptainer, tmp_path):
    (tmp_path / "made").mkdir()
    recipe = tmp_path / "x.def"
    recipe.write_text(
        f"Bootstrap: localimage\nFrom: {apptainer.sandbox}\n"
        "%labels\n    v {{ VERSION }}\n%post\n    touch /mnt/here\n    ! touch /usr/bin/there\n"
    )
    binds = [Bind("/usr", "/usr", True), Bind(str(tmp_path / "made"), "/mnt")]
    command = Apptainer().build_command(tmp_path / "x.sif", recipe, base=None, arguments={}, binds=binds)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made" / "here").exists()


@pytest.mark.parametrize(
    ("bind", "said"),
    [
        ("none:/mnt:ro", "--bind names {here}/none, which does not exist"),
        ("$NO_SUCH_THING:/mnt", "NO_SUCH_THING, which is not set"),
    ],
)
def test_a_bind_that_is_not_there_is_refused_before_a_build(slurmgpu, tmp_path, bind, said):
    done = slurmgpu("image", "build", "--cpu", "-o", "cpu.sif", "--bind", bind, cwd=tmp_path, PATH="", expect=2)
    assert said.format(here=tmp_path) in done.stderr
    assert not list(tmp_path.iterdir())


PROGRESS = """
from slurmgpu.cli.commands.image import _progress
from slurmgpu.containers.apptainer import Apptainer
with _progress() as show:
    for line in ("INFO:    To see mksquashfs output with progress bar enable verbose logging", "[b] " + 100 * "long "):
        if shown := Apptainer().read_build_line(line):
            show(*shown)
"""


def test_on_a_terminal_the_progress_of_a_build_is_a_line_and_says_nothing_needless():
    terminal, theirs = os.openpty()
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", PROGRESS], stderr=theirs, env=env, check=True)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # the other end is closed, and there is no more
        while part := os.read(terminal, 65536):
            written += part
    os.close(terminal)
    said = written.decode()
    assert "mksquashfs" not in said
    assert "[b] long long" in said
    assert said.count("\x1b[1A") == 1, "it took a second line"  # the cursor goes up once, to clear it


def test_one_build_makes_one_image(slurmgpu, tmp_path):
    done = slurmgpu("image", "build", "--cpu", "--vllm", "-o", tmp_path / "x.sif", expect=2)
    assert "--cpu and --vllm name two images" in done.stderr


def test_without_a_runtime_a_build_is_a_sentence(slurmgpu, tmp_path):
    done = slurmgpu("image", "build", "-o", tmp_path / "gpu.sif", PATH=str(tmp_path), expect=2)
    assert "Neither apptainer nor singularity is on PATH" in done.stderr


def test_an_older_runtime_is_taken_where_there_is_no_apptainer(monkeypatch, tmp_path):
    (tmp_path / "singularity").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_runtime().name == "singularity"


WRAPPER = "FATAL:   While performing build: while running engine: while running %post section: exit status 1"


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("FATAL:   While performing build: conveyor failed: no space left on device", "APPTAINER_TMPDIR"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "has its own authority"),
        ("FATAL: dial tcp: lookup registry-1.docker.io: no such host", "wheels with --bind WHEELS:/mnt"),
        ("reading manifest sha256:00 in docker.io/x/y: manifest unknown", "name another with --base"),
        ("ERROR: No matching distribution found for h5py>=3.11", "pip finds no package h5py>=3.11"),
        ("set_attributes: failed to change uid and gids on /tmp/x/bin", "--mksquashfs-args -all-root"),
        ("FATAL:   newuidmap was not found in PATH (/usr/sbin)", "package uidmap"),
        ('Error for command "build": unknown flag: --build-arg', "it does not know --build-arg; Apptainer 1.2"),
        ("INFO: all well\nFATAL:   something new\n", "something new"),
        (f"ERROR: pip is at a loss\n{WRAPPER}", "pip is at a loss"),
        (
            f"+ python9\n/.post.script: line 3: python9: command not found\n{WRAPPER}",
            "line 3: python9: command not found",
        ),
        (f"INFO:    Running post scriptlet\n+ false\n{WRAPPER}", "while running %post section: exit status 1"),
        ("", None),
    ],
)
def test_what_a_build_complains_of_is_said_in_words(said, meaning):
    why = why_build_failed(said)
    assert why is None if meaning is None else meaning in why


@pytest.mark.parametrize(
    ("base", "bootstrap", "name"),
    [
        ("pytorch/pytorch@sha256:abc", "docker", "pytorch/pytorch@sha256:abc"),
        ("docker://nvcr.io/nvidia/pytorch:26.01-py3", "docker", "nvcr.io/nvidia/pytorch:26.01-py3"),
        ("elsewhere/base.sif", "localimage", "{here}/elsewhere/base.sif"),
        ("unpacked", "localimage", "{here}/unpacked"),
    ],
)
def test_a_base_is_a_registrys_name_or_an_image_on_this_machine(base, bootstrap, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unpacked").mkdir()
    command = Apptainer().build_command(Path("x.sif"), Path("x.def"), base=base, arguments={}, binds=[])
    assert f"BOOTSTRAP={bootstrap}" in command
    assert f"BASE={name.format(here=tmp_path)}" in command


def test_what_the_user_says_goes_over_what_slurmgpu_says(monkeypatch):
    monkeypatch.setenv("APPTAINER_MKSQUASHFS_ARGS", "-comp gzip")
    command = Apptainer().build_command(Path("x.sif"), Path("x.def"), base=None, arguments={"VERSION": "9"}, binds=[])
    assert command == ["apptainer", "build", "--build-arg", "VERSION=9", "x.sif", "x.def"]


@pytest.mark.parametrize("name", ["cpu", "gpu", "vllm"])
def test_every_argument_of_a_definition_has_a_default_and_its_scripts_are_shell(name):
    text = definition(name).read_text()
    used = set(re.findall(r"\{\{ (\w+) \}\}", text))
    given = set(re.findall(r"^    (\w+)=", text.partition("%arguments")[2].partition("%labels")[0], re.M))
    assert used == given
    for part in ("%post -c /bin/bash", "%test"):
        script = re.split(r"^%\w+.*$", text.partition(f"\n{part}\n")[2], flags=re.M)[0]
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), part
        assert script.strip()


def test_an_installation_without_definitions_says_so():
    with pytest.raises(SlurmGPUError, match=r"lacks slurmgpu-tpu\.def"):
        definition("tpu")


# Checks


def test_a_check_of_what_is_no_image_says_so(slurmgpu, tmp_path):
    (tmp_path / "notes.sif").write_text("to do: build it")
    done = slurmgpu("image", "check", tmp_path / "notes.sif", expect=2)
    assert done.stdout.startswith("✗ image")


def test_a_check_of_an_image_that_is_not_there_speaks_of_nothing_else(slurmgpu, tmp_path):
    done = slurmgpu("image", "check", tmp_path / "none.sif", expect=2)
    assert done.stdout == f"✗ image      The image {tmp_path}/none.sif is not there.\n"


def test_a_check_finds_what_the_image_lacks(apptainer, slurmgpu):
    done = slurmgpu("image", "check", apptainer.sif, "--bind", "/usr:/usr:ro", "--python", "python9", expect=2)
    assert "✓ image" in done.stdout
    assert "✗ inside     the image has no program python9" in done.stdout


def test_a_check_with_gpus_fails_where_there_are_none(apptainer, slurmgpu):
    binds = [part for text in apptainer.binds for part in ("--bind", text)]
    arguments = ["--gpu", "--python", apptainer.python, *binds]
    done = slurmgpu("image", "check", apptainer.sif, *arguments, CUDA_VISIBLE_DEVICES="", expect=2)
    assert "✓ python" in done.stdout
    assert "✗ inside" in done.stdout
