"""Another container runtime is one class of another package: nothing of slurmgpu names it, or any other."""

import ast
import json
import os
import sys
from pathlib import Path

import pytest

import slurmgpu
from slurmgpu.containers.folders import leave_task_folders
from slurmgpu.containers.node import prepare
from slurmgpu.containers.runtime import RUNTIMES, runtime_named
from slurmgpu.containers.settings import Bind, Container, ContainerError
from slurmgpu.errors import SlurmGPUError
from tests.support.packages import install
from tests.support.runs import check_rows, datasets, records, report

PACKAGE = Path(__file__).parents[2] / "slurmgpu"

BARE = '''
import hashlib, json, os
from pathlib import Path

from slurmgpu.containers import INSIDE
from slurmgpu.containers.runtime import Runtime
from slurmgpu.errors import SlurmGPUError


class Bare(Runtime):
    """Runs the program by env, where it is: an image is a file that says BARE."""

    name = title = "bare"
    program = "env"

    def read_version(self, said):
        return said.splitlines()[0]

    def identify(self, path):
        if not path.is_file() or path.read_text() != "BARE":
            raise SlurmGPUError(f"{path} does not say BARE.")
        status = path.stat()
        known = {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "labels": {}}
        unknown = dict.fromkeys(("partition_sha256", "uuid", "arch", "created"))
        return {"kind": "bare", "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), **known, **unknown}

    def command(self, start, environ):
        places = {bind.dst: bind.src for bind in start.binds}
        own = str(Path(places[f"{INSIDE}/slurmgpu"]).parent)
        inside = {**start.environ, "PYTHONPATH": own, "HOME": start.home, "PATH": environ["PATH"]}
        return [self.program, "--chdir", str(start.folder), *start.argv], inside
'''


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """An installed package that brings the runtime `bare`; an image of it."""
    site = install(tmp_path / "site", "bare_runtime", BARE, "slurmgpu.runtimes", "bare = bare_runtime:Bare\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    image = tmp_path / "image.bare"
    image.write_text("BARE")
    yield image
    runtime_named.cache_clear()
    sys.modules.pop("bare_runtime", None)


LOCAL = ("submit", "--executor", "local", "--gpus", "0")


def test_a_run_works_in_a_runtime_of_another_package(project, slurmgpu, bare):
    table = {"runtime": "bare", "image": str(bare), "python": sys.executable}
    folder = project(24, container=table, settings={"faults": {"17": "exception"}})
    slurmgpu(*LOCAL, cwd=folder, expect=0)
    check_rows(folder, 24, errors={17})
    assert datasets(folder)
    [record] = [record for record in records(folder) if record["published"]]
    assert record["image"] == str(bare)
    assert record["surroundings"]["image"] == bare.name
    frozen = json.loads((folder / "run" / "run.json").read_text())["container"]
    assert (frozen["runtime"], frozen["identity"]["kind"]) == ("bare", "bare")
    assert report(folder)["image"]["sha256"] == frozen["identity"]["sha256"]

    bare.write_text("OTHER")
    done = slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=2)
    assert "does not say BARE" in done.stderr


def test_check_looks_into_an_image_of_another_package(project, slurmgpu, bare):
    table = {"runtime": "bare", "image": str(bare), "python": sys.executable}
    folder = project(8, container=table, resources={"gpus": 0, "executor": "local"})
    assert f"✓ image      {bare}: " in slurmgpu("check", cwd=folder, expect=0).stdout
    assert f" in {bare.name} (numpy " in slurmgpu("check", "--here", cwd=folder, expect=0).stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strict": True}, "bare does not support [container] strict = true"),
        ({"home": "private"}, 'bare does not support [container] home = "private"; expected "host".'),
        ({"stage": "unpack"}, 'bare does not support [container] stage = "unpack"; expected "none".'),
    ],
)
def test_what_a_runtime_cannot_do_is_refused_when_the_run_is_planned(bare, change, said):
    with pytest.raises(SlurmGPUError) as caught:
        runtime_named("bare").check(Container(str(bare), "bare", **change))
    assert said in str(caught.value)


def test_what_is_no_runtime_is_a_sentence(project, slurmgpu, bare, monkeypatch):
    folder = project(8, container={"runtime": "bear", "image": str(bare)})
    done = slurmgpu(*LOCAL, cwd=folder, expect=2)
    said = "[container] runtime: should be 'apptainer', 'singularity', 'bare' or 'none'; found 'bear'."
    assert said in done.stderr
    entries = next(Path(bare.parent).glob("site/*.dist-info")) / "entry_points.txt"
    for broken, reason in (("bare_runtime:Bear", "cannot be loaded"), ("builtins:dict", "expected a subclass of")):
        entries.write_text(f"[slurmgpu.runtimes]\nbare = {broken}\n")
        runtime_named.cache_clear()
        with pytest.raises(SlurmGPUError, match=reason):
            runtime_named("bare")
    with pytest.raises(SlurmGPUError, match="No container runtime 'bear' is installed"):
        runtime_named("bear")


def test_a_node_that_lacks_the_runtimes_package_ends_a_task_by_a_sentence(tmp_path):
    container = Container("/image.bear", "bear", scratch=str(tmp_path))
    try:
        with pytest.raises(ContainerError, match="No container runtime 'bear' is installed"):
            prepare(container, [], os.environ)
    finally:
        leave_task_folders()


def test_a_function_by_value_is_mapped_in_an_image_of_the_same_python_and_refused_in_another(bare, tmp_path):
    (tmp_path / "other-python").write_text(
        f"""#!/bin/sh
{sys.executable} "$@" | sed 's/"python": "[^"]*"/"python": "3.8.1"/'
"""
    )
    (tmp_path / "other-python").chmod(0o755)
    tables = {"container.runtime": "bare", "container.image": str(bare), "html": False}

    def mapped(name, python):
        overrides = {**tables, "container.python": python}
        place = {"run_dir": tmp_path / name, "executor": "local", "gpus": 0}
        return slurmgpu.map(lambda item: os.environ["HOME"] and item + 1, [1, 2], overrides=overrides, **place)

    assert mapped("same", sys.executable)["result"][:].tolist() == [2, 3]
    with pytest.raises(SlurmGPUError, match=r"The image has Python 3\.8\.1, but this is Python 3"):
        mapped("other", str(tmp_path / "other-python"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", RUNTIMES.built_in)
def test_a_built_in_runtime_has_the_name_that_it_is_found_by(name):
    runtime = runtime_named(name)
    assert runtime.name == name
    runtime.check(Container("/i.sif", name, binds=(Bind("/a", "/b"),), home="none", stage="unpack", strict=True))


WORDS = ("apptainer", "singularity", "squashfuse")


def test_nothing_outside_containers_names_a_runtime_in_its_code():
    """Docstrings may: they are for people."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "containers"):
            continue
        text = path.read_text("utf-8")
        if not any(word in text.lower() for word in WORDS):
            continue
        tree = ast.parse(text)
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                text = f"{node.module} {[alias.name for alias in node.names]}"
            elif isinstance(node, ast.Constant):
                text = node.value if isinstance(node.value, str) and id(node) not in prose else ""
            else:
                text = getattr(node, "id", "") or getattr(node, "attr", "")
            if any(word in text.lower() for word in WORDS):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {text[:60]}")
    assert found == []
