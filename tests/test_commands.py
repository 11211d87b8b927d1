"""What Slurm's commands are asked, and told: what we mean, whatever the user prefers, and whatever they answer."""

import pytest

from slurmgpu.executors import commands

PREFERRED = {
    "SQUEUE_STATES": "RUNNING",
    "SQUEUE_FORMAT": "%j",
    "SINFO_PARTITION": "cpu",
    "SACCT_FORMAT": "User",
    "SCANCEL_INTERACTIVE": "1",
    "SLURM_CLUSTERS": "other",
    "SLURM_TIME_FORMAT": "relative",
}


@pytest.fixture
def pretending(tmp_path, monkeypatch):
    """`pretending("squeue", "echo something")`: a command that is a line of shell."""

    def pretend(name, line):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return pretend


def test_what_a_user_prefers_to_see_does_not_change_what_is_asked(pretending, monkeypatch):
    for name, value in {**PREFERRED, "SLURM_CONF": "/here/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    pretending("squeue", "env")
    told = dict(line.partition("=")[::2] for line in commands.run("squeue").splitlines())
    assert {name: told[name] for name in (*PREFERRED, "SLURM_CONF") if name in told} == {
        "SLURM_CONF": "/here/slurm.conf",
        "SLURM_TIME_FORMAT": "standard",
    }


def test_what_sbatch_says_of_a_script_may_be_any_bytes(pretending):
    pretending("sbatch", r"printf 'sbatch: error: no account \351tude\n' >&2; exit 1")
    assert commands.try_script("x.sbatch")[1] == "error: no account \N{REPLACEMENT CHARACTER}tude"
