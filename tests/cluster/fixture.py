"""The pytest fixtures; tests/conftest.py imports them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from .cluster import INHERITED, Cluster, missing


def leave_out(reason: str) -> NoReturn:
    """Skip the test, saying why; in CI (CI=true) leaving out is failing."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"in CI nothing may be left out: {reason}", pytrace=False)
    pytest.skip(reason)


@contextlib.contextmanager
def stopped_in_any_case(folder: Path) -> Iterator[None]:
    """In the block, let a process stop the cluster in `folder` if this one dies of a signal."""
    command = [sys.executable, "-m", "tests.cluster", "stop", folder, "--when-input-ends"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.kill()  # forks of this process may hold its pipe


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The session's cluster. Slurm's commands find it through os.environ, which is put back at the end."""
    reason = missing()
    if reason is not None:
        leave_out(reason)
    # Jobs of other users read slurm.conf, too, and pytest's folders are root's alone. The logs go there in the end.
    folder = Path(tempfile.mkdtemp(prefix="slurmgpu-test-cluster-", dir="/tmp"))
    folder.chmod(0o755)
    with stopped_in_any_case(folder):
        running = Cluster.start(folder)
        try:
            with pytest.MonkeyPatch.context() as patch:
                for name in [name for name in os.environ if name.startswith(INHERITED)]:
                    patch.delenv(name)
                for name, value in running.env.items():
                    patch.setenv(name, value)
                yield running
        finally:
            running.stop()
    shutil.copytree(folder / "log", tmp_path_factory.mktemp("cluster") / "log")
    shutil.rmtree(folder)


@pytest.fixture
def memory_limits(cluster: Cluster) -> None:
    """For tests in which Slurm kills what exceeds its memory: this machine has cgroups that can be used."""
    if not cluster.has_cgroups:
        leave_out(cluster.cgroup_note)
