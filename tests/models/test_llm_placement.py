"""Where models go: their memory, from headers and config.json alone, and what is decided before anything is queued."""

import importlib.util
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.batching import CPU_CACHE, CPU_TOKENS, MOST_CPU_TOKENS, cpu_tokens
from slurmgpu.llm.interface.engine import EngineOptions
from slurmgpu.llm.models.sizes import DEFAULTS, NAMES, cache_sizes, heads_of, weights_of, with_defaults
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.placement.choice import CARDS
from slurmgpu.llm.placement.needs import look_at
from slurmgpu.llm.placement.parallelism import EXPERT_PARALLEL, TENSOR_PARALLEL, obstacle_to
from slurmgpu.llm.placement.place import check_fits, place
from slurmgpu.llm.transformers_engine import caches
from slurmgpu.plan.placement import GPU_MEMORY_GB, gpu_memory_of
from slurmgpu.plan.planner import draft_run
from slurmgpu.plan.run_file import parse_resources, size_bytes
from slurmgpu.util import packages
from slurmgpu.workload import Share
from tests.support.big_models import LLAMA_70B, llama_tensors, write_model
from tests.support.tiny_adapters import make_adapter
from tests.support.tiny_models import make_llama
from tests.support.tiny_vision_models import make_llava

PARAMETERS_70B = 70_553_706_496
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "70b-judge.md"


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory):
    """Llama-3.1-70B's files, without their content."""
    folder = tmp_path_factory.mktemp("models") / "llama-70b"
    return write_model(folder, LLAMA_70B, llama_tensors(LLAMA_70B))


def options(folder, suffix="", **more):
    return EngineOptions(find_model(f"{folder}{suffix}"), **more)


def config_only(folder, **config):
    """A model of which only config.json is here, and a file that stands for its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "pytorch_model.bin").touch()
    return folder


def share(gpus, gigabytes, **more):
    return Share(gpus, gpu_memory=gigabytes and gigabytes * 10**9, **more)


# Numbers.


def test_the_numbers_of_a_70b_are_those_of_transformers_on_the_meta_device(llama_70b):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_70B))
    source = find_model(str(llama_70b))
    counted = weights_of(source)
    assert counted.parameters == sum(each.numel() for each in model.parameters()) == PARAMETERS_70B
    linear = [each for name, each in model.named_modules() if type(each) is torch.nn.Linear and name != "lm_head"]
    assert counted.numbers["linear"] == sum(each.weight.numel() for each in linear)
    assert sum(counted.stored_bytes.values()) == 2 * PARAMETERS_70B
    assert cache_sizes(source, "bf16").a_token == 327_680


def test_a_config_alone_gives_the_same_numbers(llama_70b, tmp_path):
    exact = weights_of(find_model(str(llama_70b)))
    guessed = weights_of(find_model(str(config_only(tmp_path / "m", **LLAMA_70B))))
    assert guessed.is_estimate
    assert not guessed.missing
    with open(tmp_path / "m" / "pytorch_model.bin", "wb") as file:
        file.truncate(10**9)
    assert weights_of(find_model(str(tmp_path / "m"))).parameters == pytest.approx(5e8)
    assert (guessed.numbers, guessed.stored_bytes) == (exact.numbers, exact.stored_bytes)


@pytest.mark.parametrize(
    ("suffix", "precision", "gigabytes"),
    [
        ("", "bf16", 141.1),
        ("", "fp32", 282.2),
        ("-8bit", "bf16", 72.7),
        ("-4bit", "bf16", 39.5),
        ("-fp8", "fp16", 72.7),
    ],
)
def test_quantising_shrinks_the_linear_layers_and_nothing_else(llama_70b, suffix, precision, gigabytes):
    memory = look_at(options(llama_70b, suffix, precision=precision)).memory
    assert round(memory.weights / 1e9, 1) == gigabytes
    assert memory.cache == 8 * 4096 * 327_680 * (2 if precision == "fp32" else 1)


MIXTURE = {"model_type": "gpt_oss", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 16}
MIXTURE |= {"num_key_value_heads": 2, "vocab_size": 100, "num_local_experts": 8, "sliding_window": 128}
MIXTURE |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 2048}


def test_sliding_layers_keep_no_more_than_their_window(tmp_path):
    source = find_model(str(config_only(tmp_path / "m", **MIXTURE)))
    sizes = cache_sizes(source, "bf16")
    layer = 2 * 2 * 16 * 2
    assert (sizes.full, sizes.sliding, sizes.window) == (2 * layer, 2 * layer, 128)
    assert sizes.of(tokens=4000, row_tokens=1000) == 2 * layer * 4000 + 2 * layer * 4 * 128
    # 8 rows of all that fits the context.
    assert look_at(EngineOptions(source)).memory.cache == 2 * layer * 8 * 2048 + 2 * layer * 8 * 128


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"text_config": {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}}, 3 * 2 * 64 * 2),
        ({"n_layer": 2, "n_head": 4, "n_embd": 32}, 2 * 2 * 32 * 2),
        ({"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "hidden_size": 8}, 32),
        ({"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "multi_query": True}, 2 * 16 * 2),
        (
            {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64, "kv_lora_rank": 8}
            | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 4, "v_head_dim": 12},
            (8 + 4) * 2,
        ),
    ],
)
def test_the_cache_is_computed_for_other_kinds_of_model(tmp_path, config, expected):
    source = find_model(str(config_only(tmp_path / "m", model_type="x", **config)))
    assert cache_sizes(source, "bf16").a_token == expected


@pytest.mark.model
def test_latent_attention_costs_what_transformers_caches(tmp_path):
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2}
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    config = DeepseekV3Config(**sizes, **latent)
    cache = DynamicCache(config=config)
    model = DeepseekV3ForCausalLM(config)
    model(input_ids=torch.zeros(1, 5, dtype=torch.long), **{caches.keyword_of(model): cache})
    held = sum(each.numel() for layer in cache.layers for each in (layer.keys, layer.values))
    config.save_pretrained(tmp_path)
    assert cache_sizes(find_model(str(tmp_path)), "fp32").a_token == held * 4 / 5


def test_a_quantised_checkpoint_counts_as_it_is_stored(tmp_path):
    small = {**LLAMA_70B, "num_hidden_layers": 2, "quantization_config": {"quant_method": "fp8"}}
    folder = write_model(tmp_path / "m", small, llama_tensors(small, "F8_E4M3"))
    memory = look_at(options(folder)).memory
    assert memory.weights == weights_of(find_model(str(folder))).parameters
    assert "as stored (fp8): 3.8 GB of weights" in place(options(folder), share(1, 40))[1][0]


@pytest.mark.parametrize(
    ("damage", "sentence"), [(b"", "no safetensors header"), (b"\xff" * 20, "no safetensors header"), (None, "its")]
)
def test_a_damaged_file_is_named(tmp_path, damage, sentence):
    small = {**LLAMA_70B, "num_hidden_layers": 1}
    folder = write_model(tmp_path / "m", small, llama_tensors(small))
    file = folder / "model-00002-of-00004.safetensors"
    if damage is None:
        with open(file, "r+b") as out:
            out.truncate(file.stat().st_size - 1)
    else:
        file.write_bytes(damage)
    with pytest.raises(SlurmGPUError, match=rf"model-00002-of-00004.safetensors .*{sentence}.* Download it again"):
        weights_of(find_model(str(folder)))


# Decisions.


@pytest.mark.parametrize(
    ("suffix", "gpus", "gigabytes", "more", "processes", "said"),
    [
        (
            "",
            4,
            80,
            {},
            "per-gpu",
            "Split over 4 GPUs of 80.0 GB: 36.9 GB of weights and 2.7 GB of cache of the 72.1 GB",
        ),
        ("", 4, 80, {"processes": "one"}, "one", "Spread over 4 GPUs of 80.0 GB: 37.0 GB"),
        ("", 8, 40, {}, "per-gpu", "Split over 8 GPUs"),
        ("", 16, 80, {"nodes": 2, "processes": "per-gpu"}, None, "64 heads and 8 key-value heads do not divide by 16"),
        ("", 8, 80, {"nodes": 2}, "per-gpu", "Split over 8 GPUs"),
        ("", 8, 80, {"nodes": 2, "processes": "one"}, None, "one process sees only the GPUs of its own node"),
        ("-8bit", 2, 80, {}, "per-gpu", "Split over 2 GPUs of 80.0 GB: 37.4 GB of weights and 5.4 GB of cache"),
        ("-4bit", 1, 80, {}, "one", "On one GPU of 80.0 GB: 39.5 GB of weights and 10.7 GB of cache"),
        (
            "-4bit",
            4,
            40,
            {},
            "one",
            "one GPU computes at a time; the model cannot be split: weights quantised by bits",
        ),
        (
            "",
            4,
            40,
            {"processes": "one"},
            None,
            "does not fit 4 GPUs of 40.0 GB: on each, 37.0 GB of weights and 2.8 GB",
        ),
        ("-4bit", 4, 40, {"processes": "per-gpu"}, None, "bitsandbytes cannot be split. Remove processes"),
        ("-4bit", 4, 80, {}, "one", "One GPU suffices: --array makes 4 replicas"),
        ("", 3, 80, {}, "one", "its 64 heads and 8 key-value heads do not divide by 3"),
        (
            "",
            4,
            None,
            {},
            "per-gpu",
            "Split over 4 GPUs: needs GPUs of at least 44.6 GB. To check that before tasks start",
        ),
        ("-4bit", 2, None, {}, "one", "Spread over 2 GPUs: needs GPUs of at least"),
        ("", 0, 80, {}, "one", "On CPUs: each task needs about 145.3 GB of memory."),
        ("", 0, None, {"processes": "per-gpu"}, "per-gpu", "On CPUs"),
        (
            "",
            4,
            40,
            {},
            None,
            "does not fit 4 GPUs of 40.0 GB: on each, 36.9 GB of weights and 2.7 GB of cache, and 35.3",
        ),
        (
            "",
            4,
            40,
            {},
            None,
            "What fits: --gpus 8 (gpus_per_task = 8 with --array); or model = .*-8bit.*; or GPUs of 48 GB",
        ),
        ("", 2, 80, {}, None, "or batch_tokens = 2048 instead of 32768"),
        ("-4bit", 1, 48, {}, "one", "for a batch of 9,216 tokens.*fewer than 8 rows, which is slow"),
    ],
)
def test_a_70b_goes_where_it_fits(llama_70b, suffix, gpus, gigabytes, more, processes, said):
    if processes is None:
        with pytest.raises(SlurmGPUError) as raised:
            place(options(llama_70b, suffix), share(gpus, gigabytes, **more))
        text = str(raised.value)
    else:
        found, lines = place(options(llama_70b, suffix), share(gpus, gigabytes, **more))
        assert found == processes
        assert "70.6 billion parameters" in lines[0]
        text = "\n".join(lines)
    assert re.search(said.replace("(", r"\(").replace(")", r"\)"), text, re.DOTALL), text


def test_a_70b_in_bf16_is_planned_on_four_a100_of_40_gb_with_fewer_rows(llama_70b):
    [memory, _] = gpu_memory_of(parse_resources({"gpu_type": "a100_40gb"}))
    offer = replace(share(4, None), gpu_memory=memory)
    processes, lines = place(replace(options(llama_70b), max_context=2048), offer)
    assert processes == "per-gpu"
    assert "for a batch of 7,168 tokens" in lines[0]
    assert "Split over 4 GPUs of 42.4 GB: 36.9 GB of weights" in lines[1]
    assert "fewer than 8 rows, which is slow" in lines[-1]
    with pytest.raises(SlurmGPUError, match="or batch_tokens = 7168 instead of 32768"):
        place(replace(options(llama_70b), batch_tokens=32768), offer)  # what the user set is not made smaller


SMALL = {**LLAMA_70B, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32001}
SMALL |= {"num_attention_heads": 32, "num_key_value_heads": 4}
SUGGESTIONS = {
    "gpus": r"--gpus (\d+)",
    "processes": "no processes",
    "suffix": r"-(.bit)\" on the same",
    "card": r"GPUs of (\d+) GB[;.]",
    "tokens": r"batch_tokens = (\d+) instead of (\d+)",
}


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("config", [LLAMA_70B, SMALL, {**MIXTURE, "hidden_size": 2880, "num_hidden_layers": 24}])
def test_what_is_said_to_fit_fits(tmp_path, config, engine):
    wanted = options(config_only(tmp_path / "m", **config), engine=engine)
    n_tried, kinds = 0, set()
    cases = itertools.product((1, 2, 3, 4, 8), (1, 2), (4, 16, 40, 80), (None, "one", "per-gpu"), (None, 500, 131072))
    for gpus, nodes, gigabytes, processes, batch_tokens in cases:
        asked = replace(wanted, batch_tokens=batch_tokens)
        offer = share(gpus, gigabytes, nodes=nodes, processes=processes)
        said = refusal(asked, offer)
        if said is None or "What fits: " not in said:
            continue
        said = said.split("What fits: ")[1]
        for kind, pattern in SUGGESTIONS.items():
            if not (found := re.search(pattern, said)):
                continue
            again, other = asked, offer
            match kind:
                case "gpus":
                    other = replace(offer, gpus=int(found[1]))
                    assert gpus < other.gpus <= 8 * nodes
                case "processes":
                    other = replace(offer, processes=None)
                case "suffix":
                    again = replace(asked, model=replace(asked.model, quantization=found[1]))
                case "card":
                    other = replace(offer, gpu_memory=int(CARDS[int(found[1])]))
                case "tokens":
                    again = replace(asked, batch_tokens=int(found[1]))
                    assert int(found[1]) < int(found[2])
                    assert refusal(replace(asked, batch_tokens=int(found[1]) + 1024), offer)  # the largest
            assert refusal(again, other) is None, (kind, offer, said)
            n_tried, kinds = n_tried + 1, {*kinds, kind}
    assert n_tried > 20
    assert {"gpus", "card"} <= kinds


def refusal(wanted, offer):
    try:
        place(wanted, offer)
    except SlurmGPUError as error:
        return str(error)
    return None


def test_vllm_starts_its_own_processes(llama_70b):
    wanted = options(llama_70b, engine="vllm")
    assert place(wanted, share(4, 80))[0] == "one"
    with pytest.raises(SlurmGPUError, match="the engine vllm starts its processes itself"):
        place(wanted, share(4, 80, processes="per-gpu"))
    assert place(wanted, share(4, 80))[1][1].startswith("Split over 4 GPUs of 80.0 GB, by vLLM: 36.9 GB of weights")
    assert place(wanted, share(4, None))[1][1].startswith("Split over 4 GPUs, by vLLM: needs GPUs of at least")


@pytest.mark.parametrize(
    ("suffix", "gpus", "sentence"),
    [
        ("", 3, "64 heads and 8 key-value heads do not divide by 3. Give each task 1 or 2 or 4 or 8 of them."),
        ("-4bit", 1, "vLLM cannot quantise to 4bit while loading. Use a suffix -fp8 or -8bit"),
    ],
)
def test_what_vllm_would_refuse_is_refused_before_anything_is_queued(llama_70b, suffix, gpus, sentence):
    assert sentence in refusal(options(llama_70b, suffix, engine="vllm"), share(gpus, 80))


def test_key_value_heads_that_are_fewer_than_gpus_are_held_twice_by_vllm(tmp_path):
    wanted = options(config_only(tmp_path / "m", **SMALL), engine="vllm")
    memory = look_at(wanted).memory
    assert memory.on_each(8, tensor_parallel=True)[1] == memory.cache / 4


def test_a_vocabulary_that_does_not_divide_is_spoken_of(tmp_path):
    wanted = options(config_only(tmp_path / "m", **SMALL))
    assert "vocabulary of 32,001 does not divide by 4" in place(wanted, share(4, 8))[1][2]
    assert len(place(replace(wanted, batch_tokens=1024), share(1, 40))[1]) == 2


# What a config does not say.


@pytest.mark.parametrize("kind", sorted(DEFAULTS))
def test_what_a_config_leaves_out_is_what_transformers_takes_for_granted(kind):
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("a kind of model of another transformers")
    for said in ({}, {"num_attention_heads": 8, "hidden_size": 1024, "num_hidden_layers": 13}):
        theirs, ours = transformers.CONFIG_MAPPING[kind](**said), with_defaults({"model_type": kind, **said})
        n_heads = theirs.num_attention_heads
        assert heads_of(ours) == (
            n_heads,
            theirs.num_key_value_heads,
            getattr(theirs, "head_dim", None) or theirs.hidden_size // n_heads,
        )
        names = set(NAMES) - {"num_key_value_heads", "head_dim", "every"}
        assert {name: ours[name] for name in names & ours.keys()} == {
            name: getattr(theirs, name) for name in names & ours.keys()
        }
        if "every" in DEFAULTS[kind]:
            assert ours["layer_types"] == theirs.layer_types


def test_a_gemma_3_is_measured_by_what_its_kind_takes_for_granted(tmp_path):
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "text_config": {**inner, "sliding_window": 1024}}
    wanted = options(config_only(tmp_path / "m", **config))
    sizes = cache_sizes(wanted.model, "bf16")
    layer = 2 * 4 * 256 * 2
    assert (sizes.full, sizes.sliding, sizes.window) == (5 * layer, 29 * layer, 1024)
    assert weights_of(wanted.model).parameters == pytest.approx(3.88e9, rel=0.01)
    assert place(wanted, share(2, 10))[0] == "per-gpu"


def test_a_cache_that_the_config_does_not_tell_is_no_reason_to_refuse(tmp_path):
    folder = config_only(tmp_path / "m", model_type="starfish")
    with open(folder / "pytorch_model.bin", "wb") as file:
        file.truncate(16 * 10**9)
    lines = place(options(folder, precision="fp16"), share(1, 24))[1]
    assert lines[0].endswith(
        "about 8.0 billion parameters, about 16.0 GB of weights, without the KV cache: config.json does not "
        "give its size."
    )
    assert "That does not fit one GPU" in refusal(options(folder), share(1, 16))
    assert place(options(folder), share(4, 16))[0] == "one"


def test_a_mixture_of_experts_is_split_by_experts(tmp_path):
    wanted = options(config_only(tmp_path / "m", **MIXTURE))
    memory = look_at(wanted).memory
    assert memory.split == 4 * 8 * 3 * 64 * 256 * 2
    assert memory.on_each(4, tensor_parallel=True) == (memory.split / 4 + memory.whole, memory.cache)
    assert obstacle_to(wanted, 4) is None
    assert obstacle_to(wanted, 3) == "its 8 experts do not divide by 3"


@pytest.mark.parametrize(("suffix", "saved"), [("-8bit", "918.6 MB"), ("-4bit", "1.4 GB"), ("-fp8", "918.6 MB")])
def test_a_variant_that_leaves_the_experts_is_refused_with_what_it_would_save(tmp_path, suffix, saved):
    """Qwen3-30B-A3B: 29.0 of its 30.5 billion weights are experts."""
    sizes = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
    sizes |= {"head_dim": 128, "num_key_value_heads": 4, "vocab_size": 151_936, "num_experts": 128}
    sizes |= {"moe_intermediate_size": 768, "tie_word_embeddings": False, "max_position_embeddings": 40_960}
    folder = config_only(tmp_path / "m", **sizes, auto_map={"AutoModelForCausalLM": "its_own.Model"})
    said = refusal(options(folder, suffix), share(1, 80))
    assert said.startswith(f"{folder}{suffix} would save ")
    assert f"save {saved} of 61.1 GB of weights (2%): 95% of them are experts" in said
    assert "Use a checkpoint that is stored quantised" in said
    assert "-8bit" not in refusal(options(folder), share(1, 24))
    assert place(options(folder), share(1, 80))[0] == "one"
    assert place(options(folder, "-fp8", engine="vllm"), share(1, 80))[0] == "one"
    assert place(options(folder, suffix, trust_remote_code=True), share(1, 80))[0] == "one"


def test_mxfp4_is_said_to_become_bf16_in_images_that_cannot_compute_with_it(tmp_path):
    config = {**MIXTURE, "quantization_config": {"quant_method": "mxfp4"}}
    experts = {"model.layers.0.mlp.experts.down_proj_blocks": ("U8", (8, 1000, 1000, 16))}
    experts |= {"model.layers.0.mlp.experts.down_proj_scales": ("U8", (8, 1000, 1000))}
    wanted = options(write_model(tmp_path / "m", config, experts, n_files=1))
    lines = place(wanted, share(2, 24))[1]
    assert "as stored (mxfp4): 136.0 MB of weights" in lines[0]
    assert lines[-1].endswith("MXFP4 weights become bf16: 512.0 MB of weights.")
    assert place(replace(wanted, engine="vllm"), share(1, 24))[1][-1].startswith("On one GPU")


@pytest.mark.parametrize(
    ("config", "obstacle"),
    [
        ({"model_type": "starfish"}, "has no known tensor-parallel plan for models of type starfish"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights stored as awq are not known to split"),
    ],
)
def test_what_is_not_known_to_split_is_spread_unless_asked(tmp_path, config, obstacle):
    wanted = options(config_only(tmp_path / "m", **{**LLAMA_70B, **config}))
    assert place(wanted, share(4, 80))[0] == "one"
    assert place(wanted, share(4, 80, processes="per-gpu"))[0] == "per-gpu"
    assert re.search(obstacle, obstacle_to(wanted, 4))


def test_a_task_checks_the_memory_that_there_is(llama_70b):
    check_fits(options(llama_70b), 80 * 10**9, 4, tensor_parallel=True)
    with pytest.raises(SlurmGPUError, match=r"does not fit 4 GPUs of 40\.0 GB"):
        check_fits(options(llama_70b), 40 * 10**9, 4, tensor_parallel=False)


def test_models_that_are_split_have_a_plan_in_transformers():
    transformers = pytest.importorskip("transformers")
    for kind in sorted(TENSOR_PARALLEL | EXPERT_PARALLEL):
        if kind not in transformers.CONFIG_MAPPING:
            continue  # of a later transformers
        plans = transformers.CONFIG_MAPPING[kind]
        if kind in EXPERT_PARALLEL:
            assert any("experts" in name for name in plans.base_model_ep_plan), kind
        else:
            assert any(re.search("q_proj|qkv|query_key_value", name) for name in plans.base_model_tp_plan), kind


def test_the_table_of_the_70b_page_is_what_is_computed(llama_70b):
    rows = ["| `model` | 4 × 40 GB | 4 × 80 GB | 2 × 80 GB |", "| --- | --- | --- | --- |"]
    for suffix, name in (("", "bf16"), ("-8bit", "`-8bit`"), ("-4bit", "`-4bit`")):
        rows.append(" | ".join([f"| {name}", *(cell(options(llama_70b, suffix), *gpus) for gpus in GPUS)]) + " |")
    table = "\n".join(rows)
    assert table in HOW_TO.read_text(), f"docs/how-to/70b-judge.md should have:\n{table}"


GPUS = ((4, 42.4), (4, 85), (2, 85))


def cell(wanted, gpus, gigabytes):
    splits = obstacle_to(wanted, gpus) is None
    lines = place(wanted, share(gpus, gigabytes))[1]
    tokens = re.search(r"for a batch of ([\d,]+) tokens", lines[0])[1]
    model = look_at(wanted).with_batch(int(tokens.replace(",", "")))
    weights, cache = model.memory.on_each(gpus, tensor_parallel=splits)
    text = f"{weights / 1e9:.1f} + {cache / 1e9:.1f} GB, {'split' if splits else 'spread'}"
    text += f", for {tokens} tokens" if "fewer than 8 rows" in lines[-1] else ""
    return f"{text}; one suffices" if "One GPU suffices" in lines[-1] else text


def test_weights_that_are_not_all_there_are_refused(llama_70b, tmp_path, monkeypatch):
    def without_a_shard(folder):
        folder.mkdir(parents=True)
        for path in llama_70b.iterdir():
            if "00003-of" not in path.name:
                (folder / path.name).symlink_to(path)
        return folder

    missing = options(without_a_shard(tmp_path / "m"))
    with pytest.raises(SlurmGPUError, match=r"model-00003-of-00004\.safetensors is missing\. Copy"):
        place(missing, share(4, 80))
    with pytest.raises(SlurmGPUError, match="does not fit one GPU"):  # no reason to download it
        place(missing, share(1, 80))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    without_a_shard(tmp_path / "hub" / "models--lab--llama" / "snapshots" / "main")
    with pytest.raises(
        SlurmGPUError, match=r"model-00003\S+ of about 141\.1 GB of weights, is not in the hub's cache, .*check --fetch"
    ):
        place(options("lab/llama"), share(4, 80))


# In a plan.


@pytest.mark.parametrize(
    ("resources", "gigabytes"),
    [
        ({}, None),
        ({"gpu_type": "gpu"}, None),
        ({"gpu_type": "a100"}, (42.4, 85)),
        ({"gpu_type": "A100-SXM4-80GB"}, 85),
        ({"gpu_type": "A100-SXM4-40GB"}, 42.4),
        ({"gpu_type": "a100_3g.20gb"}, 20),
        ({"gpu_type": "nvidia_h100_nvl"}, 100),
        ({"gpu_type": "h100"}, 85),
        ({"gpu_type": "h200"}, 150),
        ({"gpu_type": "l40s"}, 48.3),
        ({"gpu_type": "l4"}, 24),
        ({"gpu_type": "rtx_a6000"}, 48.3),
        ({"gpu_type": "rtx2080ti"}, 11.5),
        ({"gpu_type": "v100", "gpu_memory": "32G"}, 34),
        ({"gpu_memory": "40G"}, 42.4),
        ({"gpu_memory": "80G"}, 85),
        ({"gpu_memory": "24G"}, 23.8),
        ({"gpu_memory": "24G", "gpu_type": "rtx3090"}, 25.2),
        ({"gpu_memory": "42.4G", "gpu_type": "a100"}, 42.4),
        ({"gpu_memory": "33G"}, 33),
        ({"gpu_memory": "37.5GiB"}, 37.5 * 1.073741824),
    ],
)
def test_a_gpus_memory_is_told_by_the_run_file_or_its_name(resources, gigabytes):
    sizes = gigabytes if isinstance(gigabytes, tuple) else gigabytes and (gigabytes, gigabytes)
    assert gpu_memory_of(parse_resources(resources)) == (sizes and tuple(int(size * 1e9) for size in sizes))


def test_the_reference_lists_what_each_gpu_type_is_taken_for():
    text = (HOW_TO.parent.parent / "reference" / "run-file.md").read_text()
    section = text.partition("### What a gpu_type is taken for\n")[2].partition("\n## ")[0]
    found = {}
    for name, sizes in re.findall(r"`(\w+)` ((?:\d+ \([\d.]+\)(?: or )?)+)", section):
        found[name] = {int(sold): float(real) for sold, real in re.findall(r"(\d+) \(([\d.]+)\)", sizes)}
    assert found == GPU_MEMORY_GB


def test_sizes_are_those_of_data_sheets_unless_binary_is_said():
    assert [size_bytes(text) for text in ("80G", "80 GB", "79.5GiB", "40000M")] == [80 * 10**9] * 2 + [
        int(79.5 * 2**30),
        40 * 10**9,
    ]
    with pytest.raises(SlurmGPUError, match=r"gpu_memory: should be a size such as \"80G\".*found 'much'"):
        parse_resources({"gpu_memory": "much"})


@pytest.fixture
def judging(tmp_path, llama_70b):
    """A run file that asks a 70B."""

    def write(**resources):
        (tmp_path / "items.jsonl").write_text('{"prompt": "a"}\n' * 3)
        lines = [f"{name} = {json.dumps(value)}" for name, value in resources.items()]
        text = f'input = "items.jsonl"\n[workload]\nuse = "generate"\n[settings]\nmodel = "{llama_70b}"\n'
        text += 'prompt = "{prompt}"\n[resources]\n' + "\n".join(lines) + "\n"
        (tmp_path / "slurmgpu.toml").write_text(text)
        return tmp_path

    return write


def test_a_plan_holds_where_its_model_goes(judging, slurmgpu, llama_70b):
    folder = judging(gpus=4, gpu_memory="80G")
    with draft_run(folder / "slurmgpu.toml") as draft:
        plan = draft.plan
    assert plan.processes == "per-gpu"
    assert [line[:20] for line in plan.placement] == [f"{llama_70b}"[:20], "Split over 4 GPUs of"]
    assert plan.paths == (str(llama_70b),)
    assert plan.environ == {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    shown = slurmgpu("submit", "--dry-run", "--executor", "local", cwd=folder, expect=0)
    assert "Split over 4 GPUs of 85.0 GB" in shown.stdout
    shown = slurmgpu("check", cwd=folder)
    assert "✓ placement  Split over 4 GPUs of 85.0 GB" in shown.stdout


def test_a_model_that_does_not_fit_is_refused_at_submission(judging, slurmgpu):
    folder = judging(gpus=4, gpu_type="v100")
    said = slurmgpu("submit", "--executor", "local", cwd=folder, expect=2).stderr
    assert "does not fit 4 GPUs of 34.0 GB" in said
    assert '"v100" is assumed to have 34.0 GB, the most that is sold under that name; set gpu_memory in' in said
    assert not (folder / "runs").exists()


def test_a_model_that_fits_the_larger_gpu_of_a_name_is_planned_with_a_warning(judging):
    def lines(**resources):
        with draft_run(judging(**resources) / "slurmgpu.toml") as draft:
            return draft.plan.placement

    assert "Split over 2 GPUs of 85.0 GB" in lines(gpu_type="a100", gpus=2)[1]
    assert (
        'gpu_type = "a100" is sold with 40 and with 80 GB, and this run fits only the larger one'
        in lines(gpu_type="a100", gpus=2)[-1]
    )
    assert not any("sold" in line for line in lines(gpu_type="a100", gpu_memory="80G", gpus=2))
    assert not any("sold" in line for line in lines(gpu_type="h100", gpus=2))
    run_file, settings = judging(gpu_type="a100") / "slurmgpu.toml", {"settings": {"max_tokens": 200_000}}
    with (
        pytest.raises(SlurmGPUError, match="prompt and answer must fit") as raised,
        draft_run(run_file, settings),
    ):
        pass
    assert "gpu_type" not in str(raised.value)


@pytest.mark.parametrize("resources", [{"gpus": 0}, {"gpus": 1, "device": "cpu"}])
def test_vllm_is_planned_for_cpus_as_one_process(judging, monkeypatch, resources):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    folder = judging(**resources)
    with draft_run(folder / "slurmgpu.toml", {"settings": {"engine": "vllm"}}) as draft:
        assert draft.plan.processes == "one"
        assert "On CPUs" in draft.plan.placement[1]


def test_an_engine_that_this_python_cannot_import_is_refused_where_tasks_run_in_it(judging, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    folder = judging(gpus=0)
    refused = r'engine = "vllm" needs the package vllm, which .* cannot import: install it, or set image in'
    with (
        pytest.raises(SlurmGPUError, match=refused),
        draft_run(folder / "slurmgpu.toml", {"settings": {"engine": "vllm"}}),
    ):
        pass
    for name in ("torch", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    refused = (
        r'engine = "transformers" needs PyTorch and transformers, which .*: pip install \'slurmgpu\[llm\]\', or set'
    )
    with pytest.raises(SlurmGPUError, match=refused), draft_run(folder / "slurmgpu.toml"):
        pass


@pytest.mark.parametrize(
    ("missing", "suffix", "settings", "refused"),
    [
        (("accelerate",), "", {}, r'engine = "transformers" needs accelerate, .*\[llm\]'),
        (("peft",), "", {"adapter": "adapter"}, r"adapter needs peft, .*\[lora\]"),
        (("bitsandbytes",), "-4bit", {}, r"The 4bit variant of a model needs bitsandbytes, .*\[quantized\]"),
        (("bitsandbytes", "torchao"), "-8bit", {}, r"The 8bit variant .* bitsandbytes, .*\[quantized\]"),
        (("torchao",), "-fp8", {}, r"The fp8 variant of a model needs torchao, .*\[quantized\]"),
        (("PIL",), "", {"images": "prompt"}, r"images needs Pillow, .*\[images\]"),
    ],
)
def test_a_setting_whose_package_is_missing_is_refused_with_its_extra_before_anything_is_queued(
    judging, monkeypatch, missing, suffix, settings, refused
):
    folder = judging(gpus=0)
    model = (make_llava if "images" in settings else make_llama)(folder / "model")
    if "adapter" in settings:
        make_adapter(folder / "adapter", model, seed=1)
    given = {"settings": {"model": f"model{suffix}", "max_tokens": 4, **settings}}
    with draft_run(folder / "slurmgpu.toml", given):  # nothing is missing
        pass
    for name in missing:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.util.find_spec
    for module in (importlib.util, packages):
        monkeypatch.setattr(module, "find_spec", lambda name, *of: None if name in missing else found(name, *of))
    with pytest.raises(SlurmGPUError, match=refused), draft_run(folder / "slurmgpu.toml", given):
        pass


def test_a_task_that_computes_on_cpus_is_not_measured_by_gpus(judging):
    folder = judging(gpus=2, gpu_type="a100", device="cpu", processes="per-gpu")
    with draft_run(folder / "slurmgpu.toml") as draft:
        assert draft.plan.processes == "per-gpu"
        assert "On CPUs" in draft.plan.placement[1]
        assert f"for a batch of {CPU_TOKENS:,} tokens" in draft.plan.placement[0]


def test_a_batch_on_cpus_is_larger_where_its_cache_is_small():
    assert cpu_tokens(1) == cpu_tokens(CPU_CACHE // MOST_CPU_TOKENS) == MOST_CPU_TOKENS
    assert cpu_tokens(CPU_CACHE // 10_000) == 10_000
    assert cpu_tokens(CPU_CACHE) == CPU_TOKENS
