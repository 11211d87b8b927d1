"""Checkpoints that are not whole: transformers fills what they lack with random numbers, and says so in a log."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.engine import EngineOptions, Place
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.transformers_engine import caches
from slurmgpu.llm.transformers_engine.loading import _distributed, load_model
from tests.support.tiny_models import _save, _sizes, make_gpt_oss, make_llama, make_qwen3, make_tokenizer

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
    with pytest.raises(SlurmGPUError, match=rf"does not fit a \w+ForCausalLM: it lacks {name}\. "):
        load(folder)


def test_of_many_missing_weights_the_first_and_the_number_are_named(tmp_path):
    folder = make_llama(tmp_path / "model")
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    with pytest.raises(SlurmGPUError, match=r"lacks (model\.layers\.1\.\S+,? ){3}and 6 more"):
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


def test_a_model_with_a_cache_of_another_kind_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minimax"}))
    with pytest.raises(SlurmGPUError, match=r"has the type minimax, and the engine .* \"vllm\" may"):
        load(tmp_path)


def test_fp32_is_not_tf32_and_attention_needs_no_plan_for_each_length(tmp_path):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        load(make_llama(tmp_path))
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.set_float32_matmul_precision(before)


def make_deepseek(folder):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV3Config(
        **_sizes(num_key_value_heads=4, head_dim=8), **latent, **experts, moe_intermediate_size=32
    )
    return _save(DeepseekV3ForCausalLM(config), folder, None)


def make_gpt2(folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 48, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64}
    return _save(GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=2)), folder, None)


# Per layer: DeepSeek caches what keys and values are made of, 16 numbers, and a key's 8 that turn with its position.
@pytest.mark.parametrize(
    ("make", "n_numbers"),
    [(make_llama, 2 * 2 * 2 * 16), (make_gpt_oss, None), (make_deepseek, 2 * (16 + 8)), (make_gpt2, 3 * 2 * 32)],
)
def test_the_bytes_of_a_token_in_the_cache_are_those_that_it_takes(tmp_path, make, n_numbers):
    from transformers import DynamicCache

    loaded, n_tokens = load(make(tmp_path / "model")), 7
    with torch.inference_mode():
        cache = DynamicCache(config=loaded.model.config)
        loaded.model(torch.full((1, n_tokens), 5), **{caches.keyword_of(loaded.model): cache})
    assert loaded.kv_bytes == sum(each.keys.nbytes + each.values.nbytes for each in cache.layers) / n_tokens
    assert n_numbers is None or loaded.kv_bytes == 4 * n_numbers


def test_a_group_on_gpus_is_bound_to_them_and_waits_for_ranks_that_read_longer(tmp_path, monkeypatch):
    from transformers import AutoConfig

    begun = []

    def begin(backend, **options):
        begun.append((backend, options["device_id"], options["timeout"].total_seconds(), os.environ[mixing]))

    mixing = "NCCL_GRAPH_MIXING_SUPPORT"
    monkeypatch.setenv(mixing, "to be undone")
    monkeypatch.delenv(mixing)
    monkeypatch.setattr("torch.distributed.init_process_group", begin)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    config = AutoConfig.from_pretrained(make_llama(tmp_path))
    assert _distributed(Place("cuda:1", 1, 1, 2), config).tp_size == 2
    assert begun == [("nccl", torch.device("cuda:1"), 7200, "0")]


@pytest.mark.parametrize("make", [make_llama, make_qwen3])
def test_on_a_cpu_weights_lie_by_columns_and_are_the_same(tmp_path, make):
    folder = make(tmp_path / "model")
    model, stored = load(folder).model, load_file(folder / "model.safetensors")
    if torch.backends.mkl.is_available():
        linear = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
        assert {weight.stride(0) for weight in linear} == {1}
    for name, weight in stored.items():
        assert torch.equal(model.get_parameter(name), weight)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (make is make_qwen3)
