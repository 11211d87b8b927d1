"""`check`: what it says of a run file, of this machine, and of a node of the cluster."""

from pathlib import Path

import pytest

from slurmgpu.cli.commands import check
from slurmgpu.plan.planner import draft_run

LINES = ["versions", "run file", "image", "plan", "resources", "executor"]


def lines(done):
    """The lines that `check` printed, by name."""
    return {line[2:12].strip(): line[13:] for line in done.stdout.splitlines()}


def test_what_several_checks_run_into_is_said_once(project, slurmgpu):
    folder = project(8, container={"image": "none.sif"}, resources={"gpus": 3, "array": True, "gpus_per_task": 2})
    done = slurmgpu("check", cwd=folder, expect=2)
    assert (
        lines(done)["image"]
        == f"The image {folder}/none.sif is not there. [container] image in slurmgpu.toml names it."
    )
    assert done.stdout.count("is not there") == done.stdout.count("not a multiple") == 1


@pytest.mark.parametrize("way", ["run file", "site file", "flag"])
def test_a_missing_image_is_said_to_be_missing_with_where_it_is_named(project, slurmgpu, tmp_path, way):
    folder = project(8, **({"container": {"image": "../none.sif"}} if way == "run file" else {}))
    options = ("--image", "../none.sif") if way == "flag" else ()
    config = tmp_path / "config"
    if way == "site file":
        (config / "slurmgpu").mkdir(parents=True)
        (config / "slurmgpu" / "site.toml").write_text(f'[container]\nimage = "{tmp_path}/none.sif"\n')
    done = slurmgpu("submit", "--dry-run", *options, cwd=folder, XDG_CONFIG_HOME=str(config), expect=2)
    named = {"run file": "[container] image in slurmgpu.toml", "site file": "[container] image in site.toml"}
    assert f"{tmp_path}/none.sif is not there. {named.get(way, '--image')} names it." in done.stderr


@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
def test_a_check_plans_once(project, apptainer, monkeypatch, capfd):
    folder = project(8, container=apptainer.table())
    drafted = []

    def counted(*arguments, **options):
        drafted.append(arguments)
        return draft_run(*arguments, **options)

    monkeypatch.setattr(check, "draft_run", counted)
    assert check.run_checks(folder / "slurmgpu.toml", {}, (), node=False, fetch=False, gpu=False) == 0
    assert [line[2:12].strip() for line in capfd.readouterr().out.splitlines()] == LINES
    assert len(drafted) == 1


def test_a_node_of_the_local_executor_is_this_machine(project, slurmgpu):
    folder = project(8, resources={"gpus": 0, "executor": "local"})
    done = slurmgpu("check", "--node", cwd=folder, expect=0)
    assert list(lines(done)) == [*LINES, "node", "python", "/dev/shm"]


@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
def test_a_check_of_a_node_prints_its_lines_and_no_more(project, slurmgpu):
    folder = project(8, resources={"gpus": 0})
    done = slurmgpu("check", "--node", cwd=folder, expect=0)
    assert list(lines(done)) == [*LINES, "node", "python", "/dev/shm"]
    assert done.stderr == ""


@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"partition": "nope"}, "invalid partition specified: nope"),
        ({"setup": ["no-such-module load x"]}, "no-such-module: command not found"),
    ],
)
def test_a_check_of_a_node_that_does_not_start_is_a_line(project, slurmgpu, slurm, said):
    folder = project(8, resources={"gpus": 0}, slurm=slurm)
    done = slurmgpu("check", "--node", cwd=folder, expect=2)
    node = done.stdout.splitlines()[-1]
    assert node.startswith("✗ node       The check did not start on a node: ")
    assert said in node
    assert node.endswith(". Correct [slurm].")
    assert done.stderr == ""


def test_what_keeps_a_node_from_planning_is_a_line(project, slurmgpu):
    folder = project(8)
    Path(folder / "items.jsonl").unlink()
    done = slurmgpu("check", "--here", cwd=folder, expect=2)
    assert done.stdout.startswith("✗ node ")
    assert "items.jsonl" in done.stdout
