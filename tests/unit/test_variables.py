"""`${NAME}` in run files and in the site file."""

import json

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.overrides import Overrides
from slurmgpu.plan.planner import draft_run
from slurmgpu.plan.site_file import put_profile, read_run_file
from slurmgpu.plan.variables import substitute


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in {
        "DATA": "/data",
        "EMPTY": "",
        "N": "4",
        "T": "4090",
        "HF_TOKEN": "x",
        "LEAK": "hf_" + "a" * 30,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UNSET", raising=False)


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("${DATA}/a.jsonl", "/data/a.jsonl"),
        ("${UNSET:-b}, ${EMPTY:-c}, ${EMPTY}, ${UNSET:-}", "b, c, , "),
        ("$${DATA}", "${DATA}"),
        ("$DATA $(x) ${} ${1} ${a+b} $${} cost $5", "$DATA $(x) ${} ${1} ${a+b} $${} cost $5"),
    ],
)
def test_a_variable_is_the_environments(text, becomes):
    tables, told = substitute({"settings": {"x": [{"y": text}]}}, "a.toml")
    assert tables == {"settings": {"x": [{"y": becomes}]}}
    assert told == ([] if text == becomes else [f'settings.x.y is "{becomes}", from "{text}" in a.toml'])


def test_what_a_shell_a_program_or_the_node_reads_is_left_alone():
    tables = {
        "on_end": "echo ${UNSET}",
        "settings": {"run": ["bash", "-c", "echo ${UNSET}"]},
        "slurm": {"setup": ["cd ${UNSET}"]},
        "merge": {"setup": "cd ${UNSET}"},
        "container": {"binds": ["${UNSET}"], "env": {"A": "${UNSET}"}, "scratch": "${UNSET}"},
    }
    assert substitute(tables, "a.toml") == (tables, [])
    dotted = {"slurm.setup": [["cd ${UNSET}"]], "container": {"scratch": ["${UNSET}"]}, "on_end": ["echo ${UNSET}"]}
    for sweep in (dotted, {"container.env": [{"A": "${UNSET}"}], "run": [["bash", "${UNSET}"]]}):
        swept = {"input": "a.jsonl", "sweep": sweep}
        assert substitute(swept, "a.toml") == (swept, [])


def test_what_a_sweep_varies_is_replaced_as_the_key_itself_is():
    sweep = {"resources.gpus": ["${N}", 2], "settings.path": ["${DATA}"], "seed": ["${N}"], "run": ["${N}"]}
    assert substitute({"sweep": sweep}, "a.toml") == (
        {"sweep": {"resources.gpus": [4, 2], "settings.path": ["/data"], "seed": [4], "run": ["4"]}},
        [
            'sweep.resources.gpus is "4", from "${N}" in a.toml',
            'sweep.settings.path is "/data", from "${DATA}" in a.toml',
            'sweep.seed is "4", from "${N}" in a.toml',
            'sweep.run is "4", from "${N}" in a.toml',
        ],
    )


def test_a_key_of_a_sweep_is_understood_once_whatever_number_of_values_it_has(monkeypatch):
    keys = []
    monkeypatch.setattr("slurmgpu.plan.variables.parts_of", lambda key: keys.append(key) or [key])
    tables = {"sweep": {"lr": [*range(1000)], "name": ["${N}"] * 1000}}
    assert substitute(tables, "a.toml")[0]["sweep"]["name"] == ["4"] * 1000
    assert keys == ["lr", "name"]


def test_values_are_frozen_and_told_and_those_of_options_are_left_alone(project, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "slurmgpu").mkdir()
    (tmp_path / "slurmgpu" / "site.toml").write_text(
        '[slurm]\naccount = "${N}x"\n[profiles.a.slurm]\nqos = "${UNSET}"\n[profiles.b.slurm]\nqos = "${T}"\n'
    )
    folder = project(resources={"gpus": "${N}", "gpu_type": "${T}", "executor": "local"}, settings={"marks": "${DATA}"})
    overrides = Overrides()
    overrides.assign_text("settings.held=${UNSET}")
    with draft_run(folder / "slurmgpu.toml", overrides) as draft:
        plan, notes = draft.plan, draft.notes
    assert (plan.resources["gpus"], plan.resources["gpu_type"], plan.slurm) == (4, "4090", {"account": "4x"})
    assert plan.settings == {"marks": "/data", "held": "${UNSET}"}
    assert 'settings.marks is "/data", from "${DATA}" in slurmgpu.toml' in notes
    assert 'slurm.account is "4x", from "${N}x" in site.toml' in notes
    assert "${N}" not in json.dumps(plan.to_json())
    profile = Overrides()
    put_profile(profile, "b")
    assert profile["slurm"] == {"qos": "4090"}
    with pytest.raises(
        SlurmGPUError, match=r"profile a: slurm\.qos has \$\{UNSET\}, but the variable UNSET is not set"
    ):
        put_profile(Overrides(), "a")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "${UNSET}",
            "but the variable UNSET is not set. Set it, give a default with ${UNSET:-value}, or write $${UNSET}",
        ),
        ("${HF_TOKEN}", "marks has ${HF_TOKEN}, which looks like a secret"),
        ("${LEAK}", "marks has ${LEAK}, which looks like a secret"),
    ],
)
def test_an_unset_variable_and_a_secret_are_refused(project, text, said):
    with pytest.raises(SlurmGPUError) as caught:
        read_run_file(project(settings={"marks": text}) / "slurmgpu.toml")
    assert said in str(caught.value)
    assert "hf_a" not in str(caught.value)


def test_a_number_from_a_variable_is_checked_as_one(project, monkeypatch):
    monkeypatch.setenv("N", "many")
    with pytest.raises(SlurmGPUError, match=r"\[resources\] gpus: should be a valid integer; found 'many'"):
        read_run_file(project(resources={"gpus": "${N}"}) / "slurmgpu.toml")
