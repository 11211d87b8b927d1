"""A normal user without access to root's home and pytest's folders, with a Python, slurmgpu and a folder."""

from __future__ import annotations

import importlib.metadata
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import slurmgpu
from tests.cluster.fixture import leave_out
from tests.support.images import Apptainer

USER = pwd.getpwnam("games")
"""Of every Debian and Ubuntu. Not nobody: Slurm 26.05 takes that uid for a user whom it does not know."""

NOT_NEEDED = shutil.ignore_patterns("site-packages", "test", "idlelib", "ensurepip", "tkinter", "lib2to3", "config-*")


@dataclass(frozen=True)
class Somebody:
    """`folder` is his; `env` makes his `python` run, outside an image and inside."""

    folder: Path
    python: str
    env: dict[str, str]
    image: Path

    def container(self) -> dict[str, object]:
        """The [container] table of a run file of his."""
        world = str(self.folder.parent)
        inside = {name: value for name, value in self.env.items() if name in ("LD_LIBRARY_PATH", "PYTHONPATH")}
        binds = [f"{path}:{path}:ro" for path in ("/usr", world + "/python", world + "/packages")]
        return {"image": str(self.image), "python": self.python, "binds": binds, "env": inside, "home": "private"}

    def slurmgpu(self, *argv: str, cwd: Path, expect: int) -> str:
        """What the command line prints when he types it."""
        done = subprocess.run(
            [self.python, "-m", "slurmgpu", *argv],
            cwd=cwd,
            env={**os.environ, **self.env},
            user=USER.pw_uid,
            group=USER.pw_gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture
def somebody(apptainer: Apptainer, normal_user: dict[str, object]) -> Iterator[Somebody]:
    """Made under /tmp, since pytest's folders are root's alone; only root can be somebody else."""
    if not normal_user:
        leave_out("only root can be somebody else")
    world = Path(tempfile.mkdtemp(prefix="slurmgpu-test-user-", dir="/tmp"))
    world.chmod(0o755)
    try:
        python, env = _python(world)
        folder = world / "home"
        folder.mkdir()
        os.chown(folder, USER.pw_uid, USER.pw_gid)
        env |= {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        yield Somebody(folder, python, env, apptainer.sif)
    finally:
        shutil.rmtree(world)


def _python(world: Path) -> tuple[str, dict[str, str]]:
    """A copy of this Python, its standard library, and of what slurmgpu needs, by links: nobody writes into it."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    copy = world / "python"
    (copy / "bin").mkdir(parents=True)
    _link(os.path.realpath(sys.executable), copy / "bin" / version)
    shutil.copytree(sysconfig.get_paths()["stdlib"], copy / "lib" / version, ignore=NOT_NEEDED, copy_function=_link)
    for library in Path(sys.base_prefix, "lib").glob("libpython3*"):
        _link(library, copy / "lib" / library.name)
    packages = world / "packages"
    packages.mkdir()
    for distribution in _needed("slurmgpu", {}).values():
        for file in distribution.files or ():
            if not {"..", "tests"} & set(file.parts) and file.locate().exists():
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():  # requirements spell names of distributions in several ways
                    _link(file.locate(), target)
    source = Path(slurmgpu.__file__).parent
    shutil.copytree(source, packages / "slurmgpu", ignore=NOT_NEEDED, dirs_exist_ok=True, copy_function=_link)
    env = {"LD_LIBRARY_PATH": str(copy / "lib"), "PYTHONPATH": str(packages)}
    return str(copy / "bin" / version), env


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it to another file system with its time, by which Python knows what it has compiled."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


def _needed(name: str, found: dict[str, importlib.metadata.Distribution]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that one needs, itself among them; not for its extras."""
    distribution = found[name] = importlib.metadata.distribution(name)
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if requirement.name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            _needed(requirement.name, found)
    return found
