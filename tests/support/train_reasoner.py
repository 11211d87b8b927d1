"""Trains the model of tests/support/reasoners.py, and writes its weights to tests/support/reasoner.safetensors.

    python -m tests.support.train_reasoner

It takes two minutes of one core. The tests use the file in the repository, as those of the adder do.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.reasoners import TEMPLATES, WEIGHTS, reasoner_config, reasoner_tokenizer, said
from tests.support.train_adder import train

N_STEPS = 600
N_ASKED = 300


def example(rng: random.Random, tokenizers: dict[str, Any], way: str | None = None) -> tuple[list[int], list[int]]:
    """The tokens of a prompt under one of the templates, and of what the model is to generate."""
    a, b, way = rng.randint(10, 99), rng.randint(10, 99), way or rng.choice([*TEMPLATES])
    chat = [{"role": "user", "content": f"{a}+{b}="}]
    asked = tokenizers[way].apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizers[way].encode(text, add_special_tokens=False) for text in (asked, said(a, b, way)))


def main() -> None:
    """Train, write the weights, and print how many answers are right under each template."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizers = {way: reasoner_tokenizer(Path(scratch), way) for way in TEMPLATES}
        model = train(reasoner_config(), lambda rng: example(rng, tokenizers), N_STEPS)
        model.save_pretrained(scratch)
        shutil.copyfile(Path(scratch) / "model.safetensors", WEIGHTS)
    rng = random.Random("new")
    for way, tokenizer in tokenizers.items():
        n_right = 0
        for asked, told in (example(rng, tokenizers, way) for _ in range(N_ASKED)):
            found = model.generate(
                torch.tensor([asked]), do_sample=False, max_new_tokens=80, eos_token_id=tokenizer.eos_token_id
            )
            n_right += found[0, len(asked) :].tolist() == told
        print(f"{way}: {n_right} of {N_ASKED} right")


if __name__ == "__main__":
    main()
