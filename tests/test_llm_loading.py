"""Checkpoints that are not whole: transformers fills what they lack with random numbers, and says so in a log."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engine import EngineOptions, Place
from slurmgpu.llm.loading import load_model
from slurmgpu.llm.models import find_model
from tests.tiny_models import make_gpt_oss, make_llama, make_qwen3, make_tokenizer

QUERY = "model.layers.1.self_attn.q_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def load(folder):
    return load_model(EngineOptions(find_model(str(folder)), precision="fp32"), Place("cpu"))


def change(folder, edit):
    """Edit the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("make", "name"),
    [(make_llama, QUERY), (make_llama, "lm_head.weight"), (make_qwen3, QUERY), (make_gpt_oss, EXPERTS)],
)
def test_a_checkpoint_that_lacks_a_weight_is_refused_with_its_name(tmp_path, make, name):
    folder = make(tmp_path / "model")
    change(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(SlurmGPUError, match=rf"does not hold every weight of a \w+ForCausalLM: it lacks {name}\. "):
        load(folder)


def test_of_many_missing_weights_the_first_and_the_number_are_named(tmp_path):
    folder = make_llama(tmp_path / "model")
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    with pytest.raises(SlurmGPUError, match=r"lacks (model\.layers\.1\.\S+,? ){3}and 6 more \(9 in all\)"):
        load(folder)


def test_a_weight_of_another_shape_is_refused_with_both(tmp_path):
    folder = make_llama(tmp_path / "model")
    change(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY][:-4].clone()}))
    with pytest.raises(SlurmGPUError, match=r"in another shape \S+ \(stored as \[60, 64\], expected \[64, 64\]\)"):
        load(folder)


def test_a_weight_that_is_tied_to_another_need_not_be_there(tmp_path):
    folder = make_qwen3(tmp_path / "model")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load(folder).model
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_an_encoder_without_a_head_is_refused_though_its_config_says_otherwise(tmp_path):
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=64)).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertLMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SlurmGPUError, match=r"lacks cls\.predictions\."):
        load(tmp_path)
