"""The site file: what goes over what, key by key, and what `init --site` proposes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurmgpu.cli import templates
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.overrides import Overrides
from slurmgpu.plan.run_file import parse_slurm_options, parse_table
from slurmgpu.plan.site_file import (
    SiteFile,
    origins,
    profile_names,
    put_profile,
    read_run_file,
    read_site,
    substitutions,
)
from slurmgpu.slurm.survey import Partition, Survey
from tests.support.runs import published


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Writes the site file: `site("[slurm]…")`; its folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "slurmgpu"
    folder.mkdir(parents=True)

    def write(text):
        (folder / "site.toml").write_text(text)
        return folder

    return write


def test_flags_go_over_the_run_file_and_it_over_the_site_file_key_by_key(project, site):
    site(
        '[slurm]\npartition = "site"\naccount = "site"\ncpus-per-task = 2\nqos = "site"\n'
        '[merge]\npartition = "cpu"\n[resources]\ngpu_type = "a100"\ndevice = "cpu"\n[container]\nhome = "private"\n'
    )
    slurm = {"partition": "file", "cpus-per-task": 4, "qos": "file"}
    path = project(8, slurm=slurm, resources={"gpus": 2, "gpu_type": "h100"}) / "slurmgpu.toml"
    overrides = {"slurm": {"qos": "flag"}, "resources": {"gpus": 3, "tasks": None}}
    config = read_run_file(path, overrides)
    assert config.slurm == {"partition": "file", "account": "site", "cpus_per_task": 4, "qos": "flag"}
    assert config.merge == {"partition": "cpu"}
    assert (config.resources.gpus, config.resources.gpu_type, config.resources.device) == (3, "h100", "cpu")
    assert config.container.home == "private"
    assert origins(path, overrides) == {
        "resources": {
            "gpu_type": {"value": "h100", "from": "slurmgpu.toml"},
            "device": {"value": "cpu", "from": "site.toml"},
            "gpus": {"value": 3, "from": "--gpus"},
        },
        "container": {"home": {"value": "private", "from": "site.toml"}},
        "slurm": {
            "partition": {"value": "file", "from": "slurmgpu.toml"},
            "account": {"value": "site", "from": "site.toml"},
            "cpus_per_task": {"value": 4, "from": "slurmgpu.toml"},
            "qos": {"value": "flag", "from": "--slurm"},
        },
        "merge": {"partition": {"value": "cpu", "from": "site.toml"}},
    }


@pytest.mark.parametrize("written", ["cpus-per-task", "cpus_per_task", "--cpus-per-task"])
def test_a_flag_goes_over_an_option_however_either_file_writes_it(project, site, written):
    site("[slurm]\ncpus_per_task = 1\n")
    path = project(8, slurm={"partition": "x"}) / "slurmgpu.toml"
    path.write_text(path.read_text() + f'"{written}" = 2\n')
    assert read_run_file(path).slurm["cpus_per_task"] == 2
    assert read_run_file(path, {"slurm": {"cpus_per_task": 3}}).slurm["cpus_per_task"] == 3


def test_paths_of_a_site_file_are_relative_to_it(site):
    folder = site(
        '[container]\nimage = "images/a.sif"\nscratch = "$TMPDIR/x"\n'
        'binds = ["data:/data:ro", "/abs", "~/home", "$WORK", {src = "a:b", dst = "/c"}]\n'
    )
    table = read_site()["container"]
    assert table["image"] == str(folder / "images" / "a.sif")
    assert table["scratch"] == "$TMPDIR/x"
    assert table["binds"][:4] == [f"{folder}/data:/data:ro", "/abs", "~/home", "$WORK"]
    assert table["binds"][4]["src"] == f"{folder}/a:b"


def test_variables_are_told_of_by_the_file_that_decides(project, site, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("A", "x")
    group = tmp_path / "etc" / "slurmgpu" / "site.toml"
    group.parent.mkdir(parents=True)
    group.write_text('[slurm]\naccount = "${A}1"\npartition = "${A}2"\nqos = "${A}3"\n')
    site('[slurm]\naccount = "mine"\nqos = "${A}4"\n')
    assert substitutions(project(8, settings={"names": ["${A}5", "${A}6"]}) / "slurmgpu.toml") == [
        f'slurm.partition is "x2", from "${{A}}2" in {group}',
        'slurm.qos is "x4", from "${A}4" in site.toml',
        'settings.names is "x5", from "${A}5" in slurmgpu.toml',
        'settings.names is "x6", from "${A}6" in slurmgpu.toml',
    ]


def test_a_group_has_a_site_file_in_its_environment_which_the_users_overrides(project, site, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    group = tmp_path / "env" / "etc" / "slurmgpu" / "site.toml"
    group.parent.mkdir(parents=True)
    group.write_text(
        '[slurm]\naccount = "group"\npartition = "gpu"\n[container]\nimage = "a.sif"\n'
        "[profiles.short.slurm]\ntime = 10\n[profiles.long.slurm]\ntime = 600\n"
    )
    path = project(8) / "slurmgpu.toml"
    assert read_run_file(path).slurm == {"account": "group", "partition": "gpu"}
    site('[slurm]\naccount = "mine"\n[profiles.short.slurm]\ntime = 5\n')
    found = read_run_file(path)
    assert found.slurm == {"account": "mine", "partition": "gpu"}
    assert found.container.image == str(group.parent / "a.sif")
    assert origins(path, {})["slurm"] == {
        "account": {"value": "mine", "from": "site.toml"},
        "partition": {"value": "gpu", "from": str(group)},
    }
    assert profile_names() == ["short", "long"]
    with pytest.raises(SlurmGPUError, match=f"{group} or .*site.toml has no profile 'shrt'"):
        put_profile(Overrides(), "shrt")
    for name, minutes, source in (("short", 5, "site.toml"), ("long", 600, str(group))):
        overrides = Overrides()
        put_profile(overrides, name)
        assert read_run_file(path, overrides).slurm["time"] == minutes
        assert origins(path, overrides)["slurm"]["time"]["from"] == f"{source}, profile {name}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[slurm]\npartition = [1]\n", "'partition' is a list"),
        ("[slurm]\narray = 1\n", "'array' cannot be set here"),
        ("[container]\nimages = 'x'\n", "unknown key [container] images. Did you mean 'image'?"),
        ("[resources]\ngpus = 4\n", "unknown key [resources] gpus."),
        ("input = 'x'\n", "unknown key input. Known: container, merge, profiles, resources, slurm."),
        ("[slurm\n", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_site_file_is_said_of_it(project, site, slurmgpu, text, said):
    site(text)
    done = slurmgpu("submit", "--executor", "debug", cwd=project(8), expect=2)
    assert "slurmgpu/site.toml" in done.stderr
    assert said in done.stderr


def test_what_is_wrong_in_the_run_file_is_not_said_of_the_site_file(project, site, slurmgpu):
    site('[slurm]\naccount = "a"\n')
    done = slurmgpu("submit", cwd=project(8, slurm={"array": 3}), expect=2)
    assert "project/slurmgpu.toml: slurm: 'array' cannot be set here" in done.stderr


def test_a_dry_run_shows_every_value_that_was_set_and_where(project, site, slurmgpu):
    site('[resources]\nexecutor = "local"\n[slurm]\naccount = "physics"\n')
    folder = project(8, slurm={"time": "01:00:00"})
    argv = ("submit", "--gpus", "0", "--slurm", "mem=2G", "--dry-run")
    text = slurmgpu(*argv, cwd=folder, expect=0).stdout
    shown = {tuple(line.split("  # ")) for line in text.splitlines() if "  # " in line}
    assert {(value.strip(), source) for value, source in shown} == {
        ("gpus = 0", "--gpus"),
        ('executor = "local"', "site.toml"),
        ('account = "physics"', "site.toml"),
        ('time = "01:00:00"', "slurmgpu.toml"),
        ('mem = "2G"', "--slurm"),
    }
    values = json.loads(slurmgpu(*argv, "--json", cwd=folder, expect=0).stdout)["origins"]
    assert values["slurm"]["account"] == {"value": "physics", "from": "site.toml"}
    assert not (folder / "run").exists()


def test_a_run_keeps_what_the_site_file_said_when_it_was_made(project, site, slurmgpu):
    folder = site('[resources]\nexecutor = "debug"\n')
    here = project(8)
    slurmgpu("submit", "--gpus", "0", cwd=here, expect=0)
    (folder / "site.toml").write_text("[resources]\nnonsense = 1\n")
    (here / "run" / "shards" / "00000.h5").unlink()
    slurmgpu("resubmit", "run", cwd=here, expect=0)
    assert published(here) == ["00000.h5"]


def test_an_image_on_the_command_line_is_relative_to_the_working_directory(project, slurmgpu):
    folder = project(8)
    (folder / "elsewhere").mkdir()
    done = slurmgpu("submit", "../slurmgpu.toml", "--image", "no.sif", "--dry-run", cwd=folder / "elsewhere", expect=2)
    assert f"{folder}/elsewhere/no.sif" in done.stderr


def test_what_sbatch_reads_in_the_environment_is_below_all_files(project, site, monkeypatch):
    path = project(8, slurm={"partition": "file"}) / "slurmgpu.toml"
    site('[slurm]\nqos = "site"\n')
    told = {"ACCOUNT": "own", "PARTITION": "own", "QOS": "own", "RESERVATION": "", "TIMELIMIT": "5"}
    for name, value in told.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    assert read_run_file(path).slurm == {"account": "own", "partition": "file", "qos": "site"}
    assert origins(path, {})["slurm"] == {
        "account": {"value": "own", "from": "SBATCH_ACCOUNT"},
        "partition": {"value": "file", "from": "slurmgpu.toml"},
        "qos": {"value": "site", "from": "site.toml"},
    }


@pytest.mark.slurm
def test_the_account_in_the_environment_is_the_one_that_slurm_is_asked_for(cluster, project, slurmgpu):
    folder = project(8)
    done = slurmgpu("submit", "--device", "cpu", cwd=folder, expect=2, SBATCH_ACCOUNT="nobodys")
    assert "Invalid account" in done.stderr
    assert not (folder / "run").exists()


@pytest.mark.slurm
def test_init_site_writes_what_slurm_says_and_never_overwrites(cluster, slurmgpu, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "slurmgpu" / "site.toml"
    assert str(path) in slurmgpu("init", "--site", expect=0).stdout
    text = path.read_text()
    assert 'partition = "gpu"                  # 2 nodes with a100:4, time limit infinite' in text
    assert '# partition = "cpu"' in text
    assert '# gpu_type = "a100"' in text
    assert 'account = "test"' in text
    assert '# qos = "high"' in text
    assert read_site()["slurm"] == {"partition": "gpu", "account": "test"}
    assert "exists" in slurmgpu("init", "--site", expect=2).stderr
    assert path.read_text() == text
    uncommented = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines()[3:])
    assert parse_table(SiteFile, _last_of_each_key(uncommented), "all that it proposes")


@pytest.mark.parametrize(("place", "shown"), [("env/etc/slurmgpu", "# account = "), ("elsewhere", "account = ")])
def test_a_groups_site_file_proposes_no_account_for_all(tmp_path, monkeypatch, place, shown):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    partition = Partition("gpu", is_default=True, time_limit="2:00:00", n_nodes=2, gpus={"a100": 4})
    found = Survey("main", [partition], accounts=["admins"], qos=[], scratch="/tmp")
    monkeypatch.setattr(templates, "survey", lambda: found)
    text = templates.write_site_file(tmp_path / place / "site.toml").read_text()
    assert next(line for line in text.splitlines() if "admins" in line).startswith(f'{shown}"admins"')
    assert ("who share this Python environment" in text.splitlines()[0]) == (place != "elsewhere")


def _last_of_each_key(text):
    """The tables of a TOML in which a key may come again."""
    tables, current = {}, {}
    for line in text.splitlines():
        if found := re.match(r"\[(\w+)\]", line):
            current = tables.setdefault(found[1], {})
        elif found := re.match(r'(\w+) = ("[^"]*"|\[.*?\])', line):
            current[found[1]] = json.loads(found[2])
    return tables


@pytest.mark.parametrize("place", ["absent", "not executable"])
def test_init_site_without_slurm_says_so(slurmgpu, tmp_path, place):
    if place == "not executable":  # as is what lies in a folder of PATH that only others may search
        (tmp_path / place).mkdir()
        (tmp_path / place / "sinfo").touch(0o644)
    done = slurmgpu("init", "--site", "-o", tmp_path / "site.toml", expect=2, PATH=str(tmp_path / place))
    assert "This machine has no sinfo" in done.stderr
    assert "--executor" not in done.stderr  # which init lacks
    assert not (tmp_path / "site.toml").exists()


def test_a_site_file_is_for_all_workloads(slurmgpu):
    assert "for all workloads" in slurmgpu("init", "embed", "--site", expect=2).stderr


def test_the_scripts_are_shell_that_bash_accepts(request):
    for path in (request.config.rootpath / "sbatch").glob("*.sbatch"):
        subprocess.run(["bash", "-n", path], check=True)


def test_a_fresh_run_file_leaves_to_the_site_file_what_that_says(site, slurmgpu, tmp_path):
    site('[slurm]\npartition = "site"\ntime = "1:00:00"\n')
    slurmgpu("init", cwd=tmp_path, expect=0)
    assert read_run_file(tmp_path / "slurmgpu.toml").slurm == {"partition": "site", "time": "1:00:00"}


def test_true_and_false_of_slurm_options_mean_what_they_do_in_the_run_file():
    given = parse_slurm_options(["exclusive=true", "no-requeue", "mem=false", "exclude=", "time=5"])
    assert given == {"exclusive": True, "no_requeue": True, "mem": False, "exclude": "", "time": "5"}


def test_a_run_file_of_an_unknown_place_is_named():
    with pytest.raises(SlurmGPUError, match=r"no run file /nowhere.toml"):
        read_run_file(Path("/nowhere.toml"))
