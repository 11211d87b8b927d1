"""Values over a run file: `-s KEY=VALUE` for any key, options of their own, and profiles of the site file."""

import json
from pathlib import Path

import pytest

import slurmgpu
from slurmgpu.api import overrides_of
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.merged_tables import merge_tables
from slurmgpu.plan.overrides import Overrides
from slurmgpu.plan.planner import draft_run
from slurmgpu.plan.site_file import GivenRunFile, origins, put_profile, read_run_file
from slurmgpu.run.frozen_plan import NO_RUN_FILE


def given(*texts):
    overrides = Overrides()
    for text in texts:
        overrides.assign_text(text)
    return overrides


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("resources.gpus=4", {"resources": {"gpus": 4}}),
        ("resources.array=true", {"resources": {"array": True}}),
        ("slurm.partition=a100", {"slurm": {"partition": "a100"}}),
        ("slurm.mem-per-gpu=4G", {"slurm": {"mem_per_gpu": "4G"}}),
        ("slurm.time=04:00:00", {"slurm": {"time": "04:00:00"}}),
        ("merge.setup=['a', 'b']", {"merge": {"setup": ["a", "b"]}}),
        ("input=other.jsonl", {"input": "other.jsonl"}),
        ('input=["a.txt", "b.txt"]', {"input": ["a.txt", "b.txt"]}),
        (".seed=3", {"seed": 3}),
        ("settings.lr=1e-4", {"settings": {"lr": 1e-4}}),
        ("lr=1e-4", {"settings": {"lr": 1e-4}}),
        ("opts.depth=2", {"settings": {"opts": {"depth": 2}}}),
        ('settings."a.b"=2', {"settings": {"a.b": 2}}),
        ("container.env.A=b", {"container": {"env": {"A": "b"}}}),
        ("track.to=tensorboard:tb", {"track": {"to": "tensorboard:tb"}}),
        ("sweep.lr={uniform = [0.1, 1]}", {"sweep": {"lr": {"uniform": [0.1, 1]}}}),
        # The value is what follows the first "=", whole.
        ("model=a=b|c", {"settings": {"model": "a=b|c"}}),
        ("note=5 # five", {"settings": {"note": "5 # five"}}),
        ("note=5\nother = 6", {"settings": {"note": "5\nother = 6"}}),
        ("note=1, other = 2", {"settings": {"note": "1, other = 2"}}),
        ("note={unclosed", {"settings": {"note": "{unclosed"}}),
        ("note=", {"settings": {"note": ""}}),
        ("day=2026-01-31", {"settings": {"day": "2026-01-31"}}),
        # A number, where a key takes text only.
        ("run_dir=2026", {"run_dir": "2026"}),
        ("resources.gpu_type=4090", {"resources": {"gpu_type": "4090"}}),
        ("workload.batch_size=8", {"workload": {"batch_size": 8}}),
        ("on_end=true", {"on_end": "true"}),
    ],
)
def test_a_key_and_its_value_are_read(text, tables):
    assert given(text) == tables


def test_a_key_within_a_table_leaves_its_other_keys():
    below = {"settings": {"opts": {"a": 1, "b": {"c": 2}}}}
    overrides = given("opts.b.d=3", "opts.a=4", "opts.b.c=5")
    assert merge_tables(below, overrides)["settings"] == {"opts": {"a": 4, "b": {"c": 5, "d": 3}}}
    assert merge_tables(below, given("opts={e = 6}", "opts.f=7"))["settings"] == {"opts": {"e": 6, "f": 7}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "not of the form KEY=VALUE"),
        ("=3", "not of the form KEY=VALUE"),
        ("resorces.gpus=3", "a run file has no table 'resorces'. Did you mean 'resources'?"),
        ("resources.gpsu=3", "unknown key [resources] gpsu. Did you mean 'gpus'?"),
        ("resources.gpus=four", "with the options over it: [resources] gpus: should be a valid integer; found 'four'"),
        ("slurm.array=3", "'array' cannot be set here"),
        ("track.too=tensorboard:tb", "unknown key [track] too. Did you mean 'to'?"),
        (".sed=3", "unknown key sed. Did you mean 'seed'?"),
        ("gpus=3", "set it there, or with -s resources.gpus=…."),
        ("image=a.sif", "image is a key of [container] in the run file: set it there, or with -s container.image=…."),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_the_way_to_write_it(project, text, said):
    with pytest.raises(SlurmGPUError) as caught, draft_run(project() / "slurmgpu.toml", given(text)):
        pass
    assert said in str(caught.value)


def test_a_name_that_a_setting_and_a_key_at_the_top_have_is_refused(project):
    folder = project()
    source = folder / "workloads.py"
    source.write_text(source.read_text().replace("item_s: float = 0.0", "item_s: float = 0.0, seed: int = 0"))
    with pytest.raises(SlurmGPUError, match=r"Write -s \.seed=… .* or -s settings\.seed=…"):
        draft_run(folder / "slurmgpu.toml", given("seed=3")).__enter__()
    with draft_run(folder / "slurmgpu.toml", given(".seed=3", "settings.seed=4")) as draft:
        assert (draft.plan.seed, draft.plan.settings["seed"]) == (3, 4)


def test_a_key_that_takes_a_list_takes_one_value_or_texts_with_commas():
    for text, value in (("id", ["id"]), ("id, text", ["id", "text"]), ('["a,b"]', ["a,b"])):
        overrides = Overrides()
        overrides.assign_text(f"keep={text}")
        overrides.assign_text("input=a,b.jsonl")
        assert overrides == {"keep": value, "input": "a,b.jsonl"}


def test_what_is_wrong_without_a_run_file_is_said_of_the_options():
    with pytest.raises(SlurmGPUError, match=r"^the options of slurmgpu run: \[resources\] executor: should be"):
        read_run_file(Path(NO_RUN_FILE), given("workload.use=command", "resources.executor=slrum"))


def test_a_text_with_a_comma_is_no_value_of_a_sweep_unless_it_is_quoted():
    with pytest.raises(SlurmGPUError, match=r"For several values write -s 'sweep.lr=\[0.1, 0.4\]'"):
        given("sweep.lr=(0.1, 0.4)")
    with pytest.raises(SlurmGPUError, match=r"""write -s 'sweep.o=\["adam", 1\]'; for .*, -s 'sweep.o=\["adam,1"\]'"""):
        given("sweep.o=adam,1")
    assert given('sweep.o="adam,1"', "sweep.p=one") == {"sweep": {"o": "adam,1", "p": "one"}}


def test_an_option_and_s_for_the_same_key_are_refused():
    overrides = Overrides()
    overrides.put({"resources": {"gpus": 4, "tasks": None}})
    overrides.assign_text("resources.tasks=2")
    with pytest.raises(SlurmGPUError, match=r"--gpus and -s resources\.gpus set the same key"):
        overrides.assign_text("resources.gpus=8")


def test_values_from_python_are_taken_as_a_mapping_for_a_run_file_takes_them():
    overrides = Overrides()
    overrides.assign_keys(
        {"input": Path("a.jsonl"), "key": None, "slurm": {"nice": 3}, "opts": {"files": (Path("b"),)}}
    )
    assert overrides == {"input": "a.jsonl", "slurm": {"nice": 3}, "settings": {"opts": {"files": ["b"]}}}
    for odd, where in (({3: 4}, "overrides: the key 3"), ({"slurm": {1: 2}}, "overrides, slurm: the key 1")):
        with pytest.raises(SlurmGPUError, match=rf"^{where} is of type int; expected text, as in a run file\.$"):
            Overrides().assign_keys(odd)
    with pytest.raises(SlurmGPUError, match=r"^the given run file, slurm: the key 1 is of type int"):
        read_run_file(GivenRunFile({"slurm": {1: 2}}, Path("/")))


@pytest.mark.parametrize("given", [5, None, ["slurmgpu.toml"]])
def test_what_is_no_path_and_no_mapping_is_no_run_file(given):
    with pytest.raises(SlurmGPUError, match=f"run_file has the type {type(given).__name__}; expected the path of a"):
        slurmgpu.submit(given)


def test_a_profile_goes_over_the_run_file_and_options_over_the_profile(project, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    site = tmp_path / "slurmgpu" / "site.toml"
    site.parent.mkdir()
    site.write_text(
        '[slurm]\naccount = "site"\npartition = "site"\n'
        '[profiles.debug.slurm]\npartition = "debug"\ntime = "00:10:00"\nmem = "1G"\n'
        '[profiles.debug.resources]\ngpus = 1\n[profiles.debug.container]\nimage = "a.sif"\n'
        "[profiles.odd.slurm]\narray = 3\n"
    )
    path = project(slurm={"partition": "file", "time": "04:00:00", "nice": 5}, resources={"gpus": 8}) / "slurmgpu.toml"
    monkeypatch.setenv("SLURMGPU_PROFILE", "debug")
    overrides = Overrides()
    put_profile(overrides, None)
    overrides.assign_text("slurm.mem=2G")
    config = read_run_file(path, overrides)
    slurm = {"account": "site", "partition": "debug", "time": "00:10:00", "nice": 5, "mem": "2G"}
    assert (config.slurm, config.resources.gpus) == (slurm, 1)
    assert config.container.image == str(site.parent / "a.sif")
    found = {key: entry["from"] for key, entry in origins(path, overrides)["slurm"].items()}
    debug = "site.toml, profile debug"
    assert found == {"account": "site.toml", "partition": debug, "time": debug, "nice": "slurmgpu.toml", "mem": "--set"}
    assert read_run_file(path).slurm["partition"] == "file"
    with pytest.raises(SlurmGPUError, match=r"no profile 'debgu'. Did you mean 'debug'\?"):
        put_profile(Overrides(), "debgu")
    with pytest.raises(SlurmGPUError, match=r"profile odd: slurm: 'array' cannot be set here"):
        put_profile(Overrides(), "odd")


def test_values_of_a_container_that_is_not_used_are_not_kept(project):
    with draft_run(project() / "slurmgpu.toml", given("container.env.HF_TOKEN=abc")) as draft:
        assert "abc" not in json.dumps(draft.plan.provenance)


def test_a_run_directory_is_given_once_in_python_too():
    with pytest.raises(SlurmGPUError, match="--run-dir and -s run_dir set the same key"):
        overrides_of(None, None, {}, {"run_dir": "b"}, None, "a")
    assert "run_dir" not in overrides_of(None, None, {}, None, None, "a")
