"""A small Llama that reasons before it answers, with either of the two kinds of marks that models use.

It adds two numbers in its reasoning, and copies what that found into its answer of two steps:

    "47+85="  →  "<think>\\n7+5+0=12\\n4+8+1=13\\n</think>\\n\\n13\\n#132"

or the same in harmony, `<|channel|>analysis<|message|>…<|channel|>final<|message|>…`. Without its reasoning it cannot
add. Its weights are in a file, which train_reasoner.py has made, as those of the adder in tiny_models.py are.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import CHARACTERS, SPECIAL, adder_config, make_tokenizer, sum_steps

WEIGHTS = Path(__file__).with_name("reasoner.safetensors")
THOUGHTS = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")

CHAT = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
TEMPLATES = {
    "thinks": CHAT,  # as Qwen3, which writes <think> itself
    "is told to think": CHAT + "{{ '<think>\n' }}",  # as DeepSeek-R1
    "harmony": CHAT + "<|start|>assistant",  # as gpt-oss
}


def said(a: int, b: int, way: str) -> str:
    """What the model generates for "a+b=" under one of the templates, with the token that ends it."""
    reasoning, answer = reasoning_and_answer(a, b)
    if way == "harmony":
        analysis = f"<|channel|>analysis<|message|>{reasoning}<|end|>"
        return f"{analysis}<|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
    opened = "" if way == "is told to think" else "<think>\n"
    return f"{opened}{reasoning}\n</think>\n\n{answer}</s>"


def reasoning_and_answer(a: int, b: int) -> tuple[str, str]:
    """The steps of the sum; and the tens with the hundreds, then the sum."""
    *steps, total = sum_steps(a, b).splitlines()
    return "\n".join(steps), f"{(a + b) // 10}\n{total}"


def reasoner_config() -> Any:
    """The sizes of the model: those of the adder, with tokens for the marks."""
    config = adder_config()
    config.vocab_size = len(SPECIAL) + len(CHARACTERS) + len(THOUGHTS) + len(HARMONY)
    return config


def reasoner_tokenizer(folder: Path, way: str) -> Any:
    """The tokenizer with one of the templates, saved in `folder`; harmony's marks are special, and <think> is not.

    Harmony's have other texts where a template does not use them: by their names slurmgpu knows the format.
    """
    tokenizer = make_tokenizer(folder, TEMPLATES[way])
    tokenizer.add_tokens([*THOUGHTS])
    if way == "harmony":
        tokenizer.add_tokens([*HARMONY], special_tokens=True)
        tokenizer.eos_token = "<|return|>"
    else:
        tokenizer.add_tokens([f"<unused{number}>" for number in range(len(HARMONY))])
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="session")
def reasoners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the model under each of the templates."""
    from transformers import GenerationConfig

    folders = {way: tmp_path_factory.mktemp(way.replace(" ", "_")) for way in TEMPLATES}
    for way, folder in folders.items():
        tokenizer = reasoner_tokenizer(folder, way)
        reasoner_config().save_pretrained(folder)
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        GenerationConfig(bos_token_id=tokenizer.bos_token_id, **ends).save_pretrained(folder)
        shutil.copyfile(WEIGHTS, folder / "model.safetensors")
    return folders
