"""LoRA adapters: answers and scores as peft has them alone, by a field of the item, and what is refused."""

import json
import shutil

import numpy as np
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.models.source import find_model
from slurmgpu.workload import Item, Share
from slurmgpu.workloads.classify.workload import Classify
from slurmgpu.workloads.generate.workload import Generate
from tests.support.engines import load_on_cpu
from tests.support.tiny_adapters import make_adapter
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["47+85=", "they are kind", "a", "we were singing", "who is here?", "12+34="]
PREFIX = "we are here and they are singing to all of you: "
"""Long enough to be computed once for all prompts of a batch."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and two adapters of it."""
    folder = tmp_path_factory.mktemp("lora")
    model = make_llama(folder / "model")
    return model, {name: make_adapter(folder / name, model, seed) for seed, name in enumerate(("de", "fr"), 1)}


@pytest.fixture(scope="module")
def expected(folders):
    """By adapter and text, the greedy answer that peft and transformers give to it alone, and two labels' logits."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, adapters = folders
    tokenizer = AutoTokenizer.from_pretrained(model)
    labels = tokenizer.convert_tokens_to_ids(["y", "n"])
    found = {}
    for name in ("", *adapters):
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        loaded = PeftModel.from_pretrained(loaded, adapters[name]) if name else loaded
        loaded.eval()
        for text in TEXTS:
            ids = torch.tensor([tokenizer(PREFIX + text)["input_ids"]])
            with torch.inference_mode():
                answer = loaded.generate(input_ids=ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
                logits = loaded(input_ids=ids).logits[0, -1, labels].double().numpy()
            found[name, text] = tokenizer.decode(answer, skip_special_tokens=True), logits
    assert len({found[name, TEXTS[0]][0] for name in ("", *adapters)}) == 3
    return found


def test_with_an_adapter_answers_are_those_of_peft(folders, expected):
    model, adapters = folders
    settings = {"model": str(model), "prompt": PREFIX + "{text}", "max_tokens": 8, "precision": "fp32"}
    workload = load_on_cpu(Generate(**settings, adapter=str(adapters["de"])))
    rows = workload([Item(number, {"text": text}) for number, text in enumerate(TEXTS)])
    assert [row["text"] for row in rows] == [expected["de", text][0] for text in TEXTS]


def test_each_item_has_the_adapter_that_its_field_names_whatever_is_in_the_batch(folders, expected):
    model, adapters = folders
    table = {name: str(folder) for name, folder in adapters.items()}
    settings = {"model": str(model), "prompt": PREFIX + "{text}", "precision": "fp32", "adapters": table}
    asked = [(name, text) for text in TEXTS for name in ("fr", None, "de", "")]
    items = [Item(number, {"text": text, "lang": name}) for number, (name, text) in enumerate(asked)]
    generate = load_on_cpu(Generate(**settings, adapter="{lang}", max_tokens=8))
    assert generate.fields >= {"text", "lang"}
    rows = generate([*items, Item(99, {"text": "a", "lang": "es"}), Item(100, {"text": "a"})])
    assert [row["text"] for row in rows[:-2]] == [expected[name or "", text][0] for name, text in asked]
    assert [str(row) for row in rows[-2:]] == [
        "field 'lang' holds 'es'; expected a name in adapters: de, fr",
        "no field 'lang', which names the adapter. Known: text.",
    ]
    again = generate(items[::-1])
    assert [row["text"] for row in again[::-1]] == [row["text"] for row in rows[:-2]]
    keys = [generate.sort_key(item) for item in items]
    assert [name for name, _ in sorted(keys)] == sorted(str(name) for name, _ in asked)

    classify = load_on_cpu(Classify(**settings, adapter="{lang}", labels=["y", "n"], choices=["y", "n"]))
    for row, (name, text) in zip(classify(items), asked, strict=True):
        logits = expected[name or "", text][1]
        np.testing.assert_allclose(row["scores"], np.exp(logits) / np.exp(logits).sum(), atol=1e-4)


# What is refused, and what the plan keeps.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapter": "{lang}"}, "a field of items, and adapters is not set"),
        ({"adapters": {"de": "x"}}, "adapters has 1 names, and adapter is None"),
        ({"adapter": "{lang}", "adapters": {"de": "x"}, "batching": "continuous"}, "Remove batching"),
    ],
)
def test_settings_that_do_not_belong_together_are_named(folders, settings, said):
    with pytest.raises(SlurmGPUError) as raised:
        Generate(model=str(folders[0]), prompt="{text}", **settings)
    assert said in str(raised.value)


def test_labels_are_not_calibrated_by_a_model_that_no_item_has(folders):
    settings = {"model": str(folders[0]), "prompt": "{text}", "labels": ["y", "n"], "calibrate": True}
    with pytest.raises(SlurmGPUError, match="a field of each item chooses the adapter"):
        Classify(**settings, adapter="{lang}", adapters={"de": str(folders[1]["de"])})


def test_what_is_no_lora_adapter_is_refused_when_it_is_planned(folders, tmp_path):
    model, adapters = folders
    prefix = shutil.copytree(adapters["de"], tmp_path / "prefix")
    config = json.loads((prefix / "adapter_config.json").read_text())
    (prefix / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "PREFIX_TUNING"}))
    bare = shutil.copytree(adapters["de"], tmp_path / "bare")
    (bare / "adapter_model.safetensors").unlink()
    for adapter, said in (
        (tmp_path / "nowhere", "there is no folder"),
        (model, "it is a whole model: set model to it, without adapter"),
        (prefix, "has the type PREFIX_TUNING; expected LORA"),
        (bare, "lacks adapter_model.safetensors"),
    ):
        with pytest.raises(SlurmGPUError) as raised:
            Generate(model=str(model), prompt="{text}", adapter=str(adapter)).place(Share(0))
        assert said in str(raised.value)


def test_an_adapters_folder_that_is_given_as_model_is_explained(folders):
    model, adapters = folders
    with pytest.raises(SlurmGPUError) as raised:
        find_model(str(adapters["de"]))
    assert f"is a LoRA adapter, not a whole model; expected model = '{model}' and adapter" in str(raised.value)


def test_an_adapter_of_another_model_is_refused_with_the_one_that_it_was_trained_on(folders, tmp_path):
    model, adapters = folders
    deeper = make_llama(tmp_path / "deeper", num_hidden_layers=3)
    wider = make_llama(tmp_path / "wider", hidden_size=32)
    for other, said in ((deeper, "it lacks base_model.model.model.layers.2"), (wider, "size mismatch")):
        with pytest.raises(SlurmGPUError) as raised:
            load_on_cpu(Generate(model=str(other), prompt="{text}", max_tokens=4, adapter=str(adapters["de"])))
        assert said in str(raised.value)
        assert f"It was trained on {model}." in str(raised.value)


def test_an_adapted_model_is_in_one_process_and_not_quantised(folders):
    model, adapters = folders
    adapted = Generate(model=str(model), prompt="{text}", max_tokens=4, adapter=str(adapters["de"]))
    with pytest.raises(SlurmGPUError, match="a model with adapters runs in one process"):
        adapted.place(Share(2, processes="per-gpu"))
    quantised = Generate(model=f"{model}-8bit", prompt="{text}", max_tokens=4, adapter=str(adapters["de"]))
    with pytest.raises(SlurmGPUError, match=r"is quantised; expected a model in bf16"):
        quantised.place(Share(0))


def test_the_plan_has_an_adapters_digest_and_a_task_refuses_another_one(folders, tmp_path):
    model, adapters = folders
    own = shutil.copytree(adapters["de"], tmp_path / "own")
    settings = {"model": str(model), "prompt": "{text}", "max_tokens": 4, "adapter": str(own)}
    workload = Generate(**settings)
    frozen = workload.frozen_settings
    assert frozen["adapter_files"][""].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert own in workload.paths
    shutil.copyfile(adapters["fr"] / "adapter_model.safetensors", own / "adapter_model.safetensors")
    with pytest.raises(SlurmGPUError, match=r"has changed since .* adapter_model.safetensors is changed"):
        load_on_cpu(Generate(**{**settings, **frozen}))


def test_an_adapter_of_the_hub_is_pinned_at_its_commit(folders, tmp_path, monkeypatch):
    model, adapters = folders
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--lab--de"
    shutil.copytree(adapters["de"], repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for asked in ("lab/de", "lab/de@main", f"lab/de@{commit}"):
        workload = Generate(model=str(model), prompt="{text}", max_tokens=4, adapter=asked)
        assert workload.frozen_settings["adapter"] == f"lab/de@{commit}"
        assert workload.environ["HF_HUB_CACHE"] == str(tmp_path)
    assert not isinstance(load_on_cpu(workload)([Item(0, {"text": "a"})])[0], ItemError)
    (repository / "snapshots" / commit / "adapter_model.safetensors").unlink()
    with pytest.raises(SlurmGPUError, match="its weights are not in the hub's cache"):
        Generate(model=str(model), prompt="{text}", max_tokens=4, adapter="lab/de").place(Share(0))
