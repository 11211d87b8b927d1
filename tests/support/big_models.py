"""Large models as planning reads them: config.json, and safetensors files with headers and no data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
"""The keys of Llama-3.1-70B's config.json that planning reads."""

ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}

Tensors = Mapping[str, tuple[str, Sequence[int]]]


def llama_tensors(config: Mapping[str, Any], dtype: str = "BF16") -> Tensors:
    """Name → dtype and shape of a Llama's tensors."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        beginning = f"model.layers.{layer}"
        shapes |= {f"{beginning}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{beginning}.self_attn.{name}_proj.weight": (key, hidden) for name in "kv"}
        shapes |= {f"{beginning}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{beginning}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{beginning}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    return {name: (dtype, shape) for name, shape in shapes.items()}


def write_model(folder: Path, config: Mapping[str, Any], tensors: Tensors, n_files: int = 4) -> Path:
    """A checkpoint that takes no disk space: its files have the right length, but are holes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    names = list(tensors)
    files = {f"model-{number:05}-of-{n_files:05}.safetensors": names[number::n_files] for number in range(n_files)}
    for file, held in files.items():
        header, end = {}, 0
        for name in held:
            dtype, shape = tensors[name]
            start, end = end, end + ITEM_BYTES[dtype] * _product(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _product(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
