"""A container image for tests, of 40 kB: empty folders, in which the tests' own Python runs through binds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fixture import leave_out

FOLDERS = ("usr", "etc", "tmp", "var/tmp", "proc", "sys", "dev", "home", "opt", "mnt")
LINKS = ("bin", "lib", "lib32", "lib64", "sbin")
FILES = ("resolv.conf", "hosts", "localtime", "passwd", "group")
NOBODY = 65534
"""A normal user that every machine has; Apptainer refuses a user that is not in passwd."""


@dataclass(frozen=True)
class Apptainer:
    """A runtime that works, and the image, packed and unpacked.

    With `binds`, `python`, the tests' own, runs in it.
    """

    sif: Path
    sandbox: Path
    binds: list[str]
    python: str

    def table(self, **changes: Any) -> dict[str, Any]:
        """The [container] table of a run file whose workers run in the image."""
        return {"image": str(self.sif), "python": self.python, "binds": self.binds, **changes}


@pytest.fixture(scope="session")
def apptainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apptainer]:
    """The session's image. The variables that the runtime needs in os.environ are restored at the end."""
    if shutil.which("apptainer") is None:
        leave_out("apptainer is not on PATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("APPTAINER_BIND", raising=False)
        # Not below pytest's own folder, which other users may not enter.
        folder = Path(tempfile.mkdtemp(prefix="slurmgpu-test-image-", dir="/tmp"))
        folder.chmod(0o755)
        try:
            made = make_images(folder)
            done = _true(made)
            if "Requesting capability set" in done.stderr:
                patch.setenv("APPTAINER_DROP_CAPS", "CAP_SYS_RESOURCE")  # root in a container has not all of them
                done = _true(made)
            if done.returncode != 0:
                leave_out(f"apptainer does not run here: {done.stderr.strip()}")
            yield made
        finally:
            shutil.rmtree(folder)


@pytest.fixture
def normal_user(apptainer: Apptainer) -> dict[str, Any]:
    """Arguments of `subprocess.run` that run a process as a normal user."""
    if os.geteuid() != 0:
        return {}
    fuse = Path("/dev/fuse")
    if fuse.exists() and fuse.stat().st_mode & 0o006 != 0o006:
        fuse.chmod(0o666)  # as udev has it; a bare container gives it to root alone
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def fork(work: Callable[[], object]) -> int:
    """Fork this process, because others may be unable to start its Python; return the child's PID.

    It exits with 0 when `work` returns, and with 1 after a traceback: a child must never go on with the tests.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def make_images(folder: Path) -> Apptainer:
    """The image in `folder`, packed and unpacked."""
    tree, sif = folder / "tree", folder / "image.sif"
    for name in FOLDERS:
        (tree / name).mkdir(parents=True)
    for name in LINKS:
        (tree / name).symlink_to(f"usr/{name}")
    for name in FILES:
        (tree / "etc" / name).touch()
    done = subprocess.run(
        ["apptainer", "--quiet", "build", sif, tree], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        leave_out(f"`apptainer build` does not work here: {done.stderr.strip()}")
    sandbox = folder / "sandbox"
    # `apptainer build --sandbox` of a SIF needs all capabilities of root.
    done = subprocess.run(["apptainer", "--quiet", "build", "--sandbox", sandbox, tree], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Apptainer(sif, sandbox, _python_binds(), sys.executable)


def _python_binds() -> list[str]:
    """The folders of this Python: its environment, its installation, and libraries elsewhere."""
    # RUNPATH counts inside as well, but what LD_LIBRARY_PATH finds here does not.
    linked = subprocess.run(["ldd", os.path.realpath(sys.executable)], capture_output=True, text=True).stdout
    libraries = {str(Path(path).parent) for path in re.findall(r"=> (/\S+)", linked)}
    paths = {"/usr", sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), *libraries}
    outside = {path for path in paths if not path.startswith(("/lib", "/usr/"))}
    return [f"{path}:{path}:ro" for path in sorted(outside)]


def _true(made: Apptainer) -> subprocess.CompletedProcess[str]:
    argv = ["apptainer", "--quiet", "exec", "--mount", "type=bind,src=/usr,dst=/usr,ro", made.sif, "true"]
    return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
