"""The settings of [container]: binds, variables, and their way through run.json."""

from pathlib import Path

import pytest

from slurmgpu.containers.settings import Bind, Container, ContainerError, check_env
from slurmgpu.errors import SlurmGPUError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/data", Bind("/data", "/data")),
        ("/data:/mnt", Bind("/data", "/mnt")),
        ("/data:/mnt:ro", Bind("/data", "/mnt", read_only=True)),
        ("/data:/mnt:rw", Bind("/data", "/mnt")),
        ("$SCRATCH/x:/x", Bind("$SCRATCH/x", "/x")),
        ("models", Bind("/runs/models", "/runs/models")),
        ("../models:/models", Bind("/models", "/models")),
        ("/a,b c", Bind("/a,b c", "/a,b c")),
        ({"src": "/a:b"}, Bind("/a:b", "/a:b")),
        ({"src": "/a:b", "dst": "/c", "ro": True}, Bind("/a:b", "/c", read_only=True)),
    ],
)
def test_binds_are_written_as_for_apptainer_or_as_tables(value, expected):
    assert Bind.parse(value, Path("/runs")) == expected


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("/a:/b,/c:/d", "Write one text per bind"),
        ("/a:/b:rx", "SRC:DST:ro"),
        ("/a:/b:ro:/c", "SRC:DST:ro"),
        ("/a:ro", "/a:/a:ro"),
        ("/a:b", "must be absolute"),
        ("", "no source"),
        (":/a", "no source"),
        ({"src": "/a", "dst": "b"}, "must be absolute"),
    ],
)
def test_a_wrong_bind_is_refused_with_what_to_write_instead(value, word):
    with pytest.raises(SlurmGPUError, match=word):
        Bind.parse(value, Path("/runs"))


def test_variables_in_binds_are_those_of_the_node():
    environ = {"HOME": "/home/me", "USER": "me", "SLURM_JOB_ID": "7"}
    assert Bind("$HOME/a", "/b").expanded(environ) == Bind("/home/me/a", "/b")
    assert Bind("/scratch/${USER}/$SLURM_JOB_ID", "~/s").expanded(environ) == Bind("/scratch/me/7", "/home/me/s")
    with pytest.raises(ContainerError, match="SCRATCH, which is not set on this node") as caught:
        Bind("$SCRATCH", "$SCRATCH").expanded(environ)
    assert caught.value.node_at_fault
    with pytest.raises(ContainerError, match="expected an absolute path"):
        Bind("$USER", "/b").expanded(environ)


def test_a_container_is_the_same_after_its_way_through_run_json():
    container = Container(
        "/i.sif",
        binds=(Bind("/a", "/b", True),),
        env={"A": True, "B": "x"},
        identity={"kind": "sif"},
        packages=(("p", "/p"),),
    )
    assert Container.from_json(container.to_json()) == container


@pytest.mark.parametrize("name", ["bad-name", "1A", "", "A B", "Ä", "A=B", "A\n", "HOME"])
def test_a_wrong_name_of_a_variable_is_refused(name):
    with pytest.raises(SlurmGPUError, match="env"):
        check_env({"GOOD": "1", name: "2"})


def test_any_value_but_one_with_nul_may_be_given_to_a_variable():
    check_env({"A": "$(date) a,b\n\"'\\", "_b1": True, "C": False})
    with pytest.raises(SlurmGPUError, match="NUL"):
        check_env({"A": "\0"})
