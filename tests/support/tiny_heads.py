"""Tiny random models with trained heads' classes: classifiers, reward models, rerankers, process reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_models import make_tokenizer

CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] | trim }}</s>"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
"""A template that trims turns, and begins another answer only where one is wanted."""

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
}


def make_head(folder: Path, kind: str = "llama", task: str = "SequenceClassification", **changes: Any) -> Path:
    """A model of transformers with a random head, and a tokenizer of characters, as `save_pretrained` writes them.

    `changes` go over its configuration; `template` is the tokenizer's, none unless set.
    """
    import torch
    import transformers

    template, added = changes.pop("template", None), changes.pop("added", ())
    tokenizer = make_tokenizer(folder, template)
    if added:
        tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
        tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | changes
    sizes["vocab_size"] = max(sizes["vocab_size"], len(tokenizer))
    if kind == "xlnet":
        del sizes["max_position_embeddings"]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.startswith(("score", "classifier")):
            torch.nn.init.normal_(parameter, std=1.0)
    model.save_pretrained(folder)
    return folder
