"""Qwen's reward models: their checkpoints in classes of our own, and an independent forward."""

import json

import numpy as np
import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.workload import Item, Share
from slurmgpu.workloads.score.workload import Score
from tests.support.engines import load_on_cpu
from tests.support.tiny_heads import CHAT
from tests.support.tiny_models import make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

# config.json of Qwen/Qwen2.5-Math-PRM-7B but for its sizes: there are no labels, and no padding token.
CONFIG = {
    "architectures": ["Qwen2ForProcessRewardModel"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
        "AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel",
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.37.0",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
}
WIDTH, HEADS, KV_HEADS = 32, 4, 2
SIZE = WIDTH // HEADS


def make_checkpoint(folder, name, n_labels):
    """Put random weights by the names of the hub's checkpoint of that class into a folder; gives both."""
    from safetensors.numpy import save_file

    tokenizer = make_tokenizer(folder, CHAT)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_0>"]})
    tokenizer.save_pretrained(folder)
    config = {**CONFIG, "architectures": [name], "vocab_size": len(tokenizer)}
    config["auto_map"] = {**CONFIG["auto_map"], "AutoModel": f"modeling_qwen2_rm.{name}"}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(tokenizer), WIDTH), "lm_head.weight": (len(tokenizer), WIDTH)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, rows in (("q", WIDTH), ("k", KV_HEADS * SIZE), ("v", KV_HEADS * SIZE)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, WIDTH)
            shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (WIDTH, WIDTH)
        shapes |= {f"{at}mlp.{name}_proj.weight": (48, WIDTH) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (WIDTH, 48)
        shapes |= {f"{at}{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (WIDTH,)
    shapes |= {"score.0.weight": (WIDTH, WIDTH), "score.0.bias": (WIDTH,)}
    shapes |= {"score.2.weight": (n_labels, WIDTH), "score.2.bias": (n_labels,)}
    weights = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A process reward model's folder and weights."""
    return make_checkpoint(tmp_path_factory.mktemp("prm"), "Qwen2ForProcessRewardModel", 2)


@pytest.fixture(scope="module")
def reward_checkpoint(tmp_path_factory):
    """A reward model's folder and weights."""
    return make_checkpoint(tmp_path_factory.mktemp("rm"), "Qwen2ForRewardModel", 1)


def forward(weights, tokens):
    """(token, label): the logits of Qwen2 with a head of two layers, in float64, by the formulas of its paper."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[name]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def rotated(x):
        angles = np.arange(len(x))[:, None] / 10000 ** (np.arange(0, SIZE, 2) / SIZE)
        cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
        half = np.concatenate([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
        return x * cos + half * sin

    x = w["model.embed_tokens.weight"][list(tokens)]
    n = len(tokens)
    for layer in range(2):
        at = f"model.layers.{layer}."
        h = norm(x, f"{at}input_layernorm.weight")
        q = rotated(linear(h, f"{at}self_attn.q_proj").reshape(n, HEADS, SIZE))
        k = rotated(linear(h, f"{at}self_attn.k_proj").reshape(n, KV_HEADS, SIZE)).repeat(HEADS // KV_HEADS, 1)
        v = linear(h, f"{at}self_attn.v_proj").reshape(n, KV_HEADS, SIZE).repeat(HEADS // KV_HEADS, 1)
        said = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(SIZE)
        said = np.where(np.tril(np.ones((n, n), bool)), said, -np.inf)
        shares = np.exp(said - said.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + linear(np.einsum("hij,jhd->ihd", shares, v).reshape(n, WIDTH), f"{at}self_attn.o_proj")
        h = norm(x, f"{at}post_attention_layernorm.weight")
        gate = linear(h, f"{at}mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
    h = norm(x, "model.norm.weight")
    return linear(np.maximum(linear(h, "score.0"), 0), "score.2")


def test_each_step_has_the_probability_that_its_checkpoint_computes_by_an_independent_forward(checkpoint):
    from transformers import AutoTokenizer

    folder, weights = checkpoint
    workload = load_on_cpu(Score(model=str(folder), prompt="{q}", steps="s", precision="fp32"))
    data = [{"q": "47+85=", "s": ["7+5=12", "4+8=12", "132"]}, {"q": "who?", "s": ["we are kind"]}]
    rows = workload([Item(number, each) for number, each in enumerate(data)])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    [end] = tokenizer.encode("<extra_0>", add_special_tokens=False)
    for row, each in zip(rows, data, strict=True):
        answer = "<extra_0>".join(each["s"]) + "<extra_0>"
        chat = [{"role": "user", "content": each["q"]}, {"role": "assistant", "content": answer}]
        tokens = tokenizer.apply_chat_template(chat)["input_ids"]
        places = [place for place, token in enumerate(tokens) if token == end]
        logits = forward(weights, tokens)[places]
        expected = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
        assert len(places) == len(each["s"])
        np.testing.assert_allclose(row["step_scores"], expected, atol=1e-5)
        assert row["score"] == pytest.approx(expected.min(), abs=1e-5)
        assert row["n_tokens"] == len(tokens)
    assert np.ptp(np.concatenate([row["step_scores"] for row in rows])) > 0.1


def test_its_steps_end_as_it_was_trained_and_planning_needs_no_code_of_the_hub(checkpoint):
    folder, _ = checkpoint
    workload = Score(model=str(folder), prompt="{q}", steps="s")
    assert workload.frozen_settings["step_end"] == "<extra_0>"
    assert workload.place(Share(1, gpu_memory=10**10)).lines
    assert Score(model=str(folder), prompt="{q}", steps="s", step_end="\n").frozen_settings["step_end"] == "\n"
    with pytest.raises(SlurmGPUError, match=r"it scores tokens, not texts\. Set steps"):
        Score(model=str(folder), prompt="{q}")


@pytest.mark.parametrize("name", ["Qwen2ForProcessRewardModel", "Qwen2ForRewardModel"])
def test_layers_are_spread_over_gpus_with_the_head_in_one_piece(checkpoint, name):
    import torch
    from transformers import AutoConfig

    from slurmgpu.llm.heads.own_classes import own_class
    from slurmgpu.llm.transformers_engine.loading import even_device_map

    folder, _ = checkpoint
    auto = own_class(name)
    found = even_device_map(auto, AutoConfig.from_pretrained(folder), 2, torch.float32)
    assert set(found.values()) == {0, 1}


def test_a_checkpoint_without_its_head_is_refused(checkpoint, tmp_path):
    from safetensors.numpy import save_file

    folder, weights = checkpoint
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    rest = {name: value for name, value in weights.items() if not name.startswith("score.2")}
    save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
    workload = Score(model=str(tmp_path), prompt="{q}", steps="s", precision="fp32")
    with pytest.raises(SlurmGPUError, match=r"it lacks score.2.bias, score.2.weight"):
        load_on_cpu(workload)


def test_a_reward_model_says_at_the_last_token_of_a_chat_what_its_checkpoint_computes(reward_checkpoint):
    from transformers import AutoTokenizer

    folder, weights = reward_checkpoint
    workload = Score(model=str(folder), prompt="{q}", answer="{a}", system="be kind", precision="fp32")
    assert workload.frozen_settings["labels"] == ["LABEL_0"]
    load_on_cpu(workload)
    data = [{"q": "47+85=", "a": "7+5=12 and 4+8=12: 132"}, {"q": "who?", "a": "we"}, {"q": "who?", "a": "no"}]
    rows = workload([Item(number, each) for number, each in enumerate(data)])  # in one batch, with padding
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for row, each in zip(rows, data, strict=True):
        turns = {"system": "be kind", "user": each["q"], "assistant": each["a"]}
        chat = [{"role": role, "content": text} for role, text in turns.items()]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=False)["input_ids"]
        scores.append(float(forward(weights, tokens)[-1, 0]))
        assert row["score"] == pytest.approx(scores[-1], abs=1e-4)
        assert row["n_tokens"] == len(tokens)
    assert np.ptp(scores) > 0.1


def test_a_reward_model_scores_no_steps_and_needs_no_code_of_the_hub(reward_checkpoint):
    folder, _ = reward_checkpoint
    assert Score(model=str(folder), prompt="{q}", answer="{a}").place(Share(1, gpu_memory=10**10)).lines
    with pytest.raises(SlurmGPUError, match=r"Qwen2ForRewardModel .*; it scores texts, not steps\. Remove steps"):
        Score(model=str(folder), prompt="{q}", steps="s")
