"""Trains the adder of tests/support/tiny_models.py, and writes its weights to tests/support/adder.safetensors.

    python -m tests.support.train_adder

It takes a minute of one core. What comes out depends on the CPU and on PyTorch, so the tests do not train it: they
use the file in the repository. Change the file only together with this script or with what tiny_models.py teaches.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support.tiny_models import (
    ADDER_WEIGHTS,
    adder_config,
    check_steps,
    claim,
    make_tokenizer,
    sentence,
    sum_steps,
)

N_STEPS = 500  # three times as many leave it too sure of itself to be wrong at a temperature of 1.6
N_ASKED = 1000


def example(rng: random.Random) -> tuple[str, str]:
    """A prompt, and the right answer to it."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    match rng.choice(["sum", "sum", "judge", "judge", "judge", "label"]):
        case "sum":
            return f"{a}+{b}=", sum_steps(a, b)
        case "judge":
            said = claim(rng, a + b)
            return f"{a}+{b}?{said}", check_steps(a, b, said)
    text, label = sentence(rng)
    return f":{text}", label


def encoded(rng: random.Random, tokenizer: AutoTokenizer) -> tuple[list[int], list[int]]:
    """The tokens of an example, with that which ends the answer."""
    prompt, answer = example(rng)
    told = tokenizer.encode(answer, add_special_tokens=False)
    return tokenizer.encode(prompt), [*told, tokenizer.eos_token_id]


def train(
    config: LlamaConfig, examples: Callable[[random.Random], tuple[list[int], list[int]]], n_steps: int
) -> LlamaForCausalLM:
    """A Llama trained on pairs of prompts and answers, as tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    model = LlamaForCausalLM(config)
    # Muon needs less than half of the time that AdamW alone does.
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=6e-3, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(each, rate, n_steps, pct_start=0.1, cycle_momentum=False)
        for each, rate in zip(optimizers, (0.02, 6e-3), strict=True)
    ]
    for step in range(n_steps):
        rows, labels = [], []
        for asked, told in (examples(rng) for _ in range(32)):
            rows.append([*asked, *told])
            labels.append([-100] * len(asked) + told)
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        wanted = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
        loss = model(input_ids=ids, labels=wanted).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        if step % 100 == 99:
            print(f"step {step + 1} of {n_steps}: loss {loss.item():.4f}", flush=True)
    return model


def n_right(model: LlamaForCausalLM, tokenizer: AutoTokenizer) -> dict[str, int]:
    """The number of new prompts of each kind that it answers correctly, and the number of prompts."""
    rng = random.Random("new")
    counts: dict[str, int] = {}
    for _ in range(N_ASKED):
        prompt, answer = example(rng)
        kind = "sentences" if prompt[0] == ":" else "claims" if "?" in prompt else "sums"
        ids = torch.tensor([tokenizer.encode(prompt)])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48)
        is_right = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True) == answer
        counts[f"{kind} right"] = counts.get(f"{kind} right", 0) + is_right
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def main() -> None:
    """Train, write the weights, and print how many answers are right."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = make_tokenizer(Path(scratch))
        model = train(adder_config(), lambda rng: encoded(rng, tokenizer), N_STEPS)
        model.save_pretrained(scratch)
        shutil.copyfile(Path(scratch) / "model.safetensors", ADDER_WEIGHTS)
        print(n_right(model.eval(), tokenizer))


if __name__ == "__main__":
    main()
