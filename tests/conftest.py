import functools
import os
import signal
import subprocess
import sys

import pytest

from tests.cluster.fixture import cluster, memory_limits  # noqa: F401
from tests.images import apptainer, normal_user  # noqa: F401
from tests.runs import make_project
from tests.somebody import somebody  # noqa: F401
from tests.tiny_models import adder, one_thread  # noqa: F401


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c():
    """Ctrl-C can be typed, also where these tests run in the background of a shell, which has such ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _no_site_file(tmp_path_factory):
    """A developer's own site file changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


WAITING = {"cluster", "apptainer"}
"""Fixtures of tests that wait most of their time, and take longest."""


def pytest_collection_modifyitems(items):
    """With `-n 3`, as `make test` runs them, files go side by side; those with tests that wait come first.

    So cores that they leave idle are not idle, and none of them is alone at the end. Tests that look at which images
    the machine serves go one after another.
    """
    waiting = {item.path for item in items if WAITING & set(item.fixturenames)}
    items.sort(key=lambda item: item.path not in waiting)
    for item in items:
        shared = "apptainer" if "apptainer" in item.fixturenames else item.path.name
        item.add_marker(pytest.mark.xdist_group(shared))


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="session")
def slurmgpu():
    """The command line as a user types it: `slurmgpu("submit", …)` gives the finished process."""

    def call(*argv, cwd=None, expect=None, **env):
        done = subprocess.run(
            [sys.executable, "-m", "slurmgpu", *map(str, argv)],
            cwd=cwd,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=800,
        )
        if expect is not None:
            assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call


@pytest.fixture
def project(tmp_path):
    """Makes a folder with an input, a run file and the tests' workloads: `project(n_items=100, settings={…})`."""
    yield functools.partial(make_project, tmp_path / "project")
    (tmp_path / "project" / "held").unlink(missing_ok=True)  # a test that failed leaves no item waiting
