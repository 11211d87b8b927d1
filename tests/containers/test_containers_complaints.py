"""Each failure is made for real where it can be made here; what the sentence says of it is checked."""

import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from slurmgpu.containers.apptainer_complaints import explain
from slurmgpu.containers.command import exec_command, package_binds
from slurmgpu.containers.settings import Bind, Container
from slurmgpu.containers.sif import DESCRIPTOR, HEADER, read_sif
from slurmgpu.task.launcher import START
from tests.cluster.fixture import leave_out

SH = "/bin/sh"


@pytest.fixture
def blame(apptainer, tmp_path):
    """Runs a command in the image, after `before` in a shell that becomes it; what `explain` makes of its end."""

    def run(
        inner=("-c", "true"), *, image=apptainer.sif, python=SH, binds=(), folder=None, before="", user=None, **env
    ):
        texts = apptainer.binds if python == apptainer.python else ["/usr:/usr:ro"]
        argv, environ = exec_command(
            Container(str(image), python=python, env=env),
            inner,
            image=Path(image),
            binds=[*map(Bind.parse, texts), *binds],
            gpus=False,
            folder=folder or Path("/tmp"),
            environ=os.environ,
            extra_env={},
            scratch=Path("/tmp"),
        )
        if before:
            argv = ["/bin/sh", "-c", f'{before}; exec "$@"', "sh", *argv]
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", **(user or {})
        )
        return explain(done.stderr, done.returncode)

    return run


@pytest.fixture
def image(apptainer):
    path = apptainer.sif.with_name("damaged.sif")
    shutil.copyfile(apptainer.sif, path)
    yield path
    path.unlink(missing_ok=True)


def as_root():
    if os.geteuid() != 0:
        leave_out("only root can make this failure")


def as_nobody(command="", prefix=""):
    """A shell's words by which it becomes a normal user, in namespaces of its own, where `command` was run by root."""
    user = f"{prefix}setpriv --reuid 65534 --regid 65534 --clear-groups env -u APPTAINER_DROP_CAPS HOME=/nonexistent"
    return f'exec unshare --mount sh -c \'{command}; exec {user} "$@"\' sh "$@"'


def check(error, words, *, node_at_fault, kind="container"):
    assert error is not None
    assert words in str(error)
    assert (error.kind, error.node_at_fault) == (kind, node_at_fault)


def test_success_and_a_programs_own_failures_are_no_complaint(blame):
    assert blame() is None
    assert blame(("-c", "echo no such file or directory >&2; exit 1")) is None
    assert blame(("-c", "kill -SEGV $$")) is None
    assert blame(("-c", "echo 'OSError: no space left on device: permission denied' >&2; exit 3")) is None


def test_a_missing_image(blame, tmp_path):
    check(blame(image=tmp_path / "no.sif"), f"the image {tmp_path}/no.sif is not on this node", node_at_fault=True)


@pytest.mark.parametrize("content", [b"", b"hello\n" * 100])
def test_a_file_that_is_no_image(blame, image, content):
    image.write_bytes(content)
    check(blame(image=image), "is not a container image", node_at_fault=False)


def overwrite(image, place, content):
    with open(image, "r+b") as file:
        file.seek(place)
        file.write(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda image: os.truncate(image, read_sif(image).root_offset + 1000),
        lambda image: os.truncate(image, 20_000),
        lambda image: overwrite(image, read_sif(image).root_offset + 4, b"\xff" * 90),
        lambda image: overwrite(image, read_sif(image).root_offset + 96, b"\xff" * 200),
    ],
    ids=["cut in the file system", "cut in the header", "superblock", "blocks"],
)
def test_a_damaged_image(blame, image, normal_user, damage):
    damage(image)
    check(blame(("-c", "exit 1"), image=image, user=normal_user), "damaged or truncated", node_at_fault=False)


def test_a_root_file_system_that_the_kernel_refuses(blame, image):
    as_root()
    overwrite(image, read_sif(image).root_offset + 200, b"\xff" * 3800)
    check(blame(image=image), "damaged or truncated", node_at_fault=False)


def test_an_image_for_another_architecture(blame, image):
    content = image.read_bytes()
    table = HEADER.unpack_from(content)[9]
    places = range(table, len(content), DESCRIPTOR.size)
    partition = next(place for place in places if content[place : place + 4] == struct.pack("<i", 0x4004))
    overwrite(image, partition + DESCRIPTOR.size - 384 + 8, b"11")
    check(blame(image=image), "built for s390x", node_at_fault=True)


def test_an_image_that_may_not_be_read(blame, image, normal_user):
    image.chmod(0)
    check(blame(image=image, user=normal_user), f"you may not read the image {image}", node_at_fault=False)


def test_a_program_that_the_image_has_not(blame):
    check(blame(python="python9"), "the image has no program python9", node_at_fault=False)
    check(blame(python="/opt/python9"), "the image has no program /opt/python9", node_at_fault=False)


def test_a_program_that_may_not_be_executed(blame):
    check(blame(python="/etc/passwd"), "may not be executed", node_at_fault=False)


def test_a_program_for_another_processor(blame, tmp_path):
    program = tmp_path / "python3"
    content = bytearray(Path("/bin/true").read_bytes())
    content[18:20] = (22).to_bytes(2, sys.byteorder)  # e_machine: s390
    program.write_bytes(content)
    program.chmod(0o755)
    binds = [Bind(str(program), str(program))]
    check(blame(python=str(program), binds=binds), "another kind of processor", node_at_fault=False)


def test_a_missing_source_of_a_bind(blame):
    error = blame(binds=[Bind("/none/such", "/mnt/x")])
    check(error, "the folder /none/such, which should be bound", node_at_fault=True)


def test_a_working_folder_that_is_not_seen_inside(blame):
    check(blame(folder=Path("/none/such")), "the working folder /none/such does not exist inside", node_at_fault=False)


def test_an_option_that_the_runtime_does_not_know(blame, monkeypatch):
    done = subprocess.run(["apptainer", "--quiet", "exec", "--no-evil", "x"], capture_output=True, text=True)
    check(explain(done.stderr, done.returncode), "does not know the option --no-evil", node_at_fault=True)


@pytest.mark.parametrize("where", ["nested user namespace", "chroot"])
def test_a_node_without_user_namespaces(blame, apptainer, where, tmp_path_factory):
    as_root()
    if where == "nested user namespace":
        before = 'exec unshare --user --map-user=65534 "$@"'
    else:
        root = apptainer.sif.parent / "root"
        root.mkdir(exist_ok=True)
        before = as_nobody(f"mount --rbind / {root}", f"chroot {root} ")
    check(blame(before=before), "forbids user namespaces", node_at_fault=True)


@pytest.mark.parametrize("how", ["denied", "absent"])
def test_a_node_without_fuse(blame, tmp_path, how):
    as_root()
    device = tmp_path / "fuse"
    if how == "denied":
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(10, 229))
        before = as_nobody(f"mount --bind {device} /dev/fuse")
    else:
        lines = [f"mount -t tmpfs none {tmp_path}"]
        for name in ("null", "zero", "random", "urandom", "tty", "full"):
            lines += [f"touch {tmp_path}/{name}", f"mount --bind /dev/{name} {tmp_path}/{name}"]
        before = as_nobody(" && ".join([*lines, f"mount --rbind {tmp_path} /dev"]))
    error = blame(before=before)
    check(error, "gives no access to /dev/fuse", node_at_fault=True)
    assert 'stage = "unpack"' in str(error)


def test_a_node_without_squashfuse_and_without_room(blame, apptainer, tmp_path):
    as_root()
    programs = [Path(shutil.which(name)) for name in ("squashfuse_ll", "squashfuse") if shutil.which(name)]
    lines = [f"mount --bind /dev/null {program}" for program in programs]
    lines += ["mount -t tmpfs -o size=8k,mode=1777 none /var/tmp", "export APPTAINER_TMPDIR=/var/tmp"]
    check(blame(before=as_nobody(" && ".join(lines))), "no squashfuse", node_at_fault=True)


def test_a_user_whom_the_node_does_not_know(blame):
    as_root()
    user = {"user": 54321, "group": 54321, "extra_groups": []}
    check(blame(user=user), "does not know the user 54321", node_at_fault=True)


def test_root_without_all_capabilities(blame):
    as_root()
    before = "unset APPTAINER_DROP_CAPS; exec setpriv --bounding-set -sys_resource --inh-caps -sys_resource"
    error = blame(before=f'{before} "$@"')
    check(error, "APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE", node_at_fault=True)


def test_a_bus_error(blame):
    check(blame(("-c", "kill -BUS $$")), "bus error", node_at_fault=True)
    assert explain("", 135) is not None


def test_a_python_that_is_too_old_for_slurmgpu(blame, apptainer):
    code = "import sys; sys.version_info = (3, 8, 1)\n" + START
    error = blame(("-c", code, "slurmgpu.worker.main"), python=apptainer.python)
    check(error, "slurmgpu needs Python 3.10 or newer, but this is 3.8", node_at_fault=False)


@pytest.mark.parametrize("library", ["numpy", "h5py"])
def test_an_image_without_a_library_that_the_worker_needs(apptainer, blame, tmp_path, library):
    site = tmp_path / "site"
    site.mkdir()
    if library == "h5py":
        for name in ("numpy", "numpy.libs"):
            (site / name).symlink_to(Path(numpy.__file__).parent.with_name(name))
    code = f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(site)!r}]\n" + START
    binds = [Bind(str(tmp_path), str(tmp_path)), *package_binds(())]
    error = blame(
        ("-c", code, "slurmgpu.worker.main", "/run", "{}"),
        python=apptainer.python,
        binds=binds,
        PYTHONPATH="/opt/slurmgpu",
    )
    check(error, f"the image has no {library}", node_at_fault=False)


def test_a_python_that_does_not_find_its_own_library(blame, apptainer):
    error = blame(python=apptainer.python, PYTHONHOME="/none")
    check(error, "PYTHONHOME", node_at_fault=False)


def test_a_python_whose_libraries_the_image_lacks(blame, apptainer):
    linked = subprocess.run(["ldd", shutil.which("ps")], capture_output=True, text=True).stdout
    library = next((word for word in linked.split() if word.startswith("libproc")), None)
    if library is None:
        pytest.skip("this ps is linked with nothing of its own")
    found = next(word for word in linked.split() if word.endswith(library) and "/" in word)
    hidden = Bind("/dev/null", f"/usr{found}" if found.startswith("/lib") else found)
    check(blame(python="/bin/ps", binds=[hidden]), f"lacks the library {library}", node_at_fault=False)


def test_what_nobody_foresaw_is_quoted():
    text = "WARNING: one\nFATAL:   something quite new happened: 17\n"
    check(explain(text, 255), "did not start: something quite new happened: 17", node_at_fault=False)
    check(explain("", 255), "said nothing", node_at_fault=False)
    assert explain(text.replace("FATAL", "the workload's FATAL"), 1) is None


@pytest.mark.parametrize(
    ("text", "words", "node_at_fault", "kind"),
    [
        (
            "\x1b[91mERROR  : Failed to create user namespace: user namespace requires to set "
            "/proc/sys/kernel/unprivileged_userns_clone to 1\n\x1b[0m",
            "forbids user namespaces",
            True,
            "container",
        ),
        (
            "ERROR  : Failed to create user namespace: maximum number of user namespaces exceeded, check "
            "/proc/sys/user/max_user_namespaces",
            "forbids user namespaces",
            True,
            "container",
        ),
        (
            "FATAL:   container creation failed: mount hook function failure: write /tmp/x: no space left on device",
            "a disk is full",
            True,
            "disk_full",
        ),
        (
            "FATAL:   while extracting /images/a.sif: root filesystem extraction failed: extract command failed",
            "no squashfuse",
            True,
            "container",
        ),
        (
            "FATAL:   container creation failed: image driver mount failure: image driver squashfuse_ll instance "
            "exited with error: squashfuse_ll exited: fuse: device /dev/fuse not found. Kernel module not loaded?",
            "gives no access to /dev/fuse",  # in the words of libfuse 3.18
            True,
            "container",
        ),
        (
            "FATAL:   container creation failed: image driver mount failure: image driver squashfuse_ll instance "
            "exited with error: squashfuse_ll exited: Something went wrong trying to read the squashfs image.",
            "damaged or truncated",
            False,
            "container",
        ),
        (
            "python3: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found (required by "
            "/.singularity.d/libs/libGLX.so.0)",
            "/.singularity.d/libs/libGLX.so.0 needs a newer C library than the image has (GLIBC_2.34)",
            False,
            "container",
        ),
        ("FATAL:   required option --passphrase or --pem-path missing", "is encrypted", False, "container"),
    ],
)
def test_texts_whose_cause_cannot_be_made_here_are_known_by_their_words(text, words, node_at_fault, kind):
    code = 1 if "ERROR" in text or "GLIBC" in text else 255
    check(explain(text, code), words, node_at_fault=node_at_fault, kind=kind)
