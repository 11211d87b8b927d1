import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.fixture import cluster, memory_limits  # noqa: F401
from tests.images import apptainer, normal_user  # noqa: F401
from tests.somebody import somebody  # noqa: F401
from tests.tiny_models import adder  # noqa: F401

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def _no_site_file(tmp_path_factory):
    """A developer's own site file changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


def pytest_collection_modifyitems(items):
    """With `-n 2`, as `make test` runs them, files go side by side: many tests wait for Slurm, and leave cores idle.

    Those that look at which images the machine serves go one after another.
    """
    for item in items:
        shared = "apptainer" if "apptainer" in item.fixturenames else item.path.name
        item.add_marker(pytest.mark.xdist_group(shared))


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def slurmgpu():
    """The command line as a user types it: `slurmgpu("submit", …)` gives the finished process."""

    def call(*argv, cwd=None, expect=None, **env):
        done = subprocess.run(
            [sys.executable, "-m", "slurmgpu", *map(str, argv)],
            cwd=cwd,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=280,
        )
        if expect is not None:
            assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call


@pytest.fixture
def project(tmp_path):
    """Makes a folder with an input, a run file and the tests' workloads: `project(n_items=100, settings={…})`."""

    def make(n_items=100, workload="Rows", items=None, batch_size=4, **tables):
        folder = tmp_path / "project"
        folder.mkdir(exist_ok=True)
        lines = items if items is not None else [{"text": f"item {i} of many", "x": i} for i in range(n_items)]
        (folder / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "workloads.py").write_text((HERE / "sample_workloads.py").read_text())
        top = {"input": "items.jsonl", "shard_items": 8, "run_dir": "run", "lease_s": 4.0, "margin_s": 1.0}
        top |= {key: tables.pop(key) for key in list(tables) if not isinstance(tables[key], dict)}
        tables = {"workload": {"use": f"workloads.py:{workload}", "batch_size": batch_size}, **tables}
        text = _toml(top) + "".join(f"\n[{name}]\n{_toml(table)}" for name, table in tables.items())
        (folder / "slurmgpu.toml").write_text(text)
        return folder

    return make


def _toml(table):
    return "".join(f"{key} = {toml(value)}\n" for key, value in table.items())


def toml(value):
    """A value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)  # JSON's scalars and lists are TOML's
