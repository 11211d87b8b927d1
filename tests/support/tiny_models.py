"""Models for tests: tiny random ones of real architectures, made on the spot, and a small Llama that can do sums.

`adder` has its weights in a file, which train_adder.py has made: trained again, it is another model on another CPU.
It knows three things, each as chat message or plain prompt:

    "47+85="           → "7+5+0=12\\n4+8+1=13\\n#132": units with carry, tens with carry, the sum
    "47+85?133"        → "7+5+0=12\\n4+8+1=13\\n2=3N\\n3=3Y\\n1=1Y\\nN": the sum's digits and the claim's, the verdict
    ":they are filth"  → "hate" or "ok"
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHARACTERS = "0123456789+=?#:YN\n abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"

BAD = ["filth", "vermin", "scum", "trash"]
GOOD = ["kind", "friends", "here", "singing"]
WHO = ["they", "we", "you", "all of them", "the neighbours"]
LINKS = ["are", "were", "will be"]

ADDER_WEIGHTS = Path(__file__).with_name("adder.safetensors")


def sum_steps(a: int, b: int) -> str:
    """The right answer to "a+b=", for two numbers of two digits."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    return f"{a % 10}+{b % 10}+0={units}\n{a // 10}+{b // 10}+{units // 10}={tens}\n#{a + b}"


def check_steps(a: int, b: int, said: int) -> str:
    """The right answer to "a+b?said": each digit of the sum against the claim's, from the last to the first."""
    digits = list(zip(f"{a + b:03}"[::-1], f"{said:03}"[::-1], strict=True))
    lines = [f"{right}={found}{'Y' if right == found else 'N'}" for right, found in digits]
    return "\n".join([*sum_steps(a, b).splitlines()[:2], *lines, "Y" if said == a + b else "N"])


def sentence(rng: random.Random) -> tuple[str, str]:
    """A sentence, and its label: "hate" or "ok"."""
    bad = rng.random() < 0.5
    return f"{rng.choice(WHO)} {rng.choice(LINKS)} {rng.choice(BAD if bad else GOOD)}", "hate" if bad else "ok"


def claim(rng: random.Random, total: int) -> int:
    """The sum, or, half of the time, a number near it."""
    if rng.random() < 0.5:
        return total
    return max(20, total + rng.choice([-1, 1]) * rng.choice([1, 2, 3, 10, 20, 100 if total > 130 else 11]))


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Any:
    """A tokenizer with a token for each character, saved in `folder`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def _save(model: Any, folder: Path, template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder, template)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return folder


def _sizes(**changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return sizes | changes


def make_llama(folder: Path, *, template: str | None = None, seed: int = 0, **changes: Any) -> Path:
    """A random Llama of two layers, in fp32; `changes` go over its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    # Larger weights than Llama's own start with: what such a model says depends on what it was asked.
    config = LlamaConfig(**_sizes(tie_word_embeddings=False, initializer_range=0.2, **changes))
    return _save(LlamaForCausalLM(config), folder, template)


def make_qwen3(folder: Path, *, template: str | None = None, seed: int = 0, **changes: Any) -> Path:
    """A random Qwen3 of two layers, in fp32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**_sizes(tie_word_embeddings=True, initializer_range=0.2, **changes))
    return _save(Qwen3ForCausalLM(config), folder, template)


def make_gpt_oss(folder: Path, *, template: str | None = None, seed: int = 0, **changes: Any) -> Path:
    """A random gpt-oss of two layers (one of them with a sliding window) and four experts, in fp32."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(seed)
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "initializer_range": 0.2}
    more["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    config = GptOssConfig(**_sizes(**(more | changes)))
    return _save(GptOssForCausalLM(config), folder, template)


def longrope(n_frequencies: int = 8) -> dict[str, Any]:
    """What a configuration of Phi-3 has for other frequencies in calls of more than 64 tokens."""
    factors = {"short_factor": [1.0] * n_frequencies, "long_factor": [4.0] * n_frequencies}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    return {"rope_parameters": rope, "original_max_position_embeddings": 64}


def make_phi3(folder: Path) -> Path:
    """A random Phi-3 of two layers, in fp32, with `longrope`."""
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    return _save(Phi3ForCausalLM(Phi3Config(**_sizes(initializer_range=0.2), **longrope())), folder, None)


def make_unloadable(folder: Path) -> Path:
    """A folder of a model with no weights: enough to check settings."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def adder_config() -> Any:
    """The sizes of the adder: some 135,000 parameters."""
    from transformers import LlamaConfig

    sizes = _sizes(intermediate_size=256, num_key_value_heads=4, tie_word_embeddings=True)
    return LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], dtype="float32")


def _save_adder(folder: Path, config: Any) -> Path:
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    config.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    GenerationConfig(bos_token_id=tokenizer.bos_token_id, **ends).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama that adds numbers of two digits, judges sums and labels sentences."""
    folder = _save_adder(tmp_path_factory.mktemp("adder"), adder_config())
    shutil.copyfile(ADDER_WEIGHTS, folder / "model.safetensors")
    return folder


def make_wide_adder(folder: Path) -> Path:
    """The adder with heads of size 32, the least for vLLM on CPUs, instead of 16: its answers are the same.

    Half of the numbers are zeros. Number i of a head goes to 2 i, which RoPE turns by the same angle; a query is
    multiplied by the square root of 2, since attention divides by that of the heads' size.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = adder_config()
    narrow, heads = config.head_dim, config.num_attention_heads
    config.head_dim = 2 * narrow
    places = torch.cat([head * 2 * narrow + 2 * torch.arange(narrow) for head in range(heads)])
    weights = load_file(ADDER_WEIGHTS)
    for name, weight in weights.items():
        if ".self_attn." not in name:
            continue
        is_output = "o_proj" in name
        rows = weight.T if is_output else weight
        wide = rows.new_zeros(2 * len(rows), rows.shape[1])
        wide[places] = rows * (2**0.5 if "q_proj" in name else 1)
        weights[name] = (wide.T if is_output else wide).contiguous()
    save_file(weights, _save_adder(folder, config) / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch computes on one thread: sums are added in one order, and other tests have a core, too."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
