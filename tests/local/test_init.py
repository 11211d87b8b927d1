"""What `init` writes runs as it stands; tests/models/test_templates.py has the templates that need PyTorch."""

import contextlib
import json
import resource

import pytest

from slurmgpu import results
from slurmgpu.cli import templates
from slurmgpu.slurm.survey import Survey
from slurmgpu.workload import Translated

NO_SLURM = {"PATH": "/nowhere"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("argv", "column", "expected"),
    [
        ([], "n_words", [3, 6, 1]),
        (["-o", "sub/x.toml", 'my "own"-2.py'], "shout", ["A CAT SLEEPS", "THE BANK LENDS MONEY TO FARMERS", "HELLO"]),
        (["command"], "score", [3, 2, 6]),
    ],
)
def test_a_template_runs_as_it_stands(slurmgpu, tmp_path, argv, column, expected):
    (tmp_path / "sub").mkdir()
    done = slurmgpu("init", *argv, cwd=tmp_path, expect=0, **NO_SLURM)
    typed = done.stdout.strip().splitlines()[-1].split()
    assert typed[:2] == ["slurmgpu", "submit"]
    slurmgpu("submit", *typed[2:], cwd=tmp_path, expect=0, **NO_GPU)
    [merged] = tmp_path.rglob("merged.h5")
    with results.open(merged) as found:
        assert list(found[column]) == expected
    assert json.loads((merged.parent / "run.json").read_text())["resources"]["executor"] == "local"


def test_nothing_is_overwritten_and_a_class_that_is_there_is_named(slurmgpu, tmp_path):
    (tmp_path / "mine.py").write_text("class Base: ...\n\nclass Mine(Base):\n    columns: dict = {}\n")
    (tmp_path / "items.jsonl").write_text('{"x": 1}\n')
    done = slurmgpu("init", "mine.py", cwd=tmp_path, expect=0, **NO_SLURM)
    assert "unchanged: mine.py, items.jsonl." in done.stdout
    assert 'use = "mine.py:Mine"' in (tmp_path / "slurmgpu.toml").read_text()
    assert (tmp_path / "items.jsonl").read_text() == '{"x": 1}\n'
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert "slurmgpu.toml exists" in slurmgpu("init", "command", cwd=tmp_path, expect=2).stderr
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "no class with `columns`" in slurmgpu("init", "empty.py", "-o", "a.toml", cwd=tmp_path, expect=2).stderr
    assert "is no name for a class" in slurmgpu("init", "7.py", "-o", "a.toml", cwd=tmp_path, expect=2).stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != "empty.py"} == before


def test_on_a_cluster_the_executor_is_slurm_unless_the_site_file_says(slurmgpu, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho slurm 26.05.0\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    cluster = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "XDG_CONFIG_HOME": str(tmp_path)}
    slurmgpu("init", "command", cwd=tmp_path, expect=0, **cluster)
    text = (tmp_path / "slurmgpu.toml").read_text()
    assert 'executor = "slurm" ' in text
    assert "\ngpus = 4 " in text
    (tmp_path / "slurmgpu").mkdir()
    (tmp_path / "slurmgpu" / "site.toml").write_text('[resources]\nexecutor = "local"\n')
    slurmgpu("init", "command", "-o", "b.toml", cwd=tmp_path, expect=0, **cluster)
    assert '\n# executor = "slurm" ' in (tmp_path / "b.toml").read_text()


def test_an_sbatch_that_finds_no_cluster_leads_to_this_machine(slurmgpu, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "scontrol"):
        (tmp_path / "bin" / name).write_text(
            f"#!/bin/sh\necho '{name}: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' >&2\n"
            f"echo '{name}: fatal: Could not establish a configuration source' >&2\nexit 1\n"
        )
        (tmp_path / "bin" / name).chmod(0o755)
    broken = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    slurmgpu("init", cwd=tmp_path, expect=0, **broken)
    assert 'executor = "local" ' in (tmp_path / "slurmgpu.toml").read_text()
    (tmp_path / "slurmgpu.toml").write_text(
        (tmp_path / "slurmgpu.toml").read_text().replace('"local" ', '"slurm" ').replace('"all" ', "1 ")
    )
    for argv, code in (
        (("submit", "--run-dir", "x"), 2),
        (("check",), 2),
        (("submit", "--dry-run", "--run-dir", "x"), 0),
    ):
        done = slurmgpu(*argv, cwd=tmp_path, expect=code, **broken)
        said = " ".join((done.stdout + done.stderr).split())
        assert "is installed here but finds no cluster" in said
        assert "--executor local" in said
        assert "res_nsearch" not in said


@contextlib.contextmanager
def room_for(n_bytes):
    """A disk on which a file may have so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_file(folder, monkeypatch):
    templates.write_run_file("command", folder / "slurmgpu.toml")


def run_file_and_its_items(folder, monkeypatch):
    found = Translated({"k": "x" * 10}, items=[{"text": "x" * 4000}], lines=[("--k", "k")])
    monkeypatch.setattr(templates, "translator_of", lambda use, folder: lambda *given: found)
    templates.write_translated("tracin", "--k", folder / "slurmgpu.toml")


def site_file(folder, monkeypatch):
    monkeypatch.setattr(templates, "survey", lambda: Survey("c", [], [], [], "/tmp"))
    templates.write_site_file(folder / "slurmgpu.toml")


@pytest.mark.parametrize("write", [run_file, run_file_and_its_items, site_file])
def test_a_disk_that_gets_full_leaves_no_half_of_a_file_for_the_next_init(tmp_path, monkeypatch, write):
    write(tmp_path, monkeypatch)
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert tmp_path / "slurmgpu.toml" in whole
    for path in whole:
        path.unlink()
    longest = max(whole, key=lambda path: len(whole[path]))
    for n_bytes in (0, len(whole[longest]) - 1):
        with room_for(n_bytes), pytest.raises(OSError, match="too large") as caught:
            write(tmp_path, monkeypatch)
        assert caught.value.filename in map(str, whole)
        assert list(tmp_path.iterdir()) == []
    assert caught.value.filename == str(longest)
    write(tmp_path, monkeypatch)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == whole
