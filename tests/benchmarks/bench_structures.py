"""What a JSON schema costs on one CPU thread: answers under it, and free ones of as many tokens.

    python -m tests.benchmarks.bench_structures [--quick]

The model is a random Llama of 38 million parameters in fp32. Times are CPU-seconds of this process; arms take turns,
and the best of several rounds counts.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu.llm.interface.engine import EngineOptions, Place, Prompt, Request, Sampling, Structure
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.prompts.structures import structure_of
from slurmgpu.llm.transformers_engine.engine import TransformersEngine
from tests.benchmarks import judge
from tests.benchmarks.bench_llm import N_ROUNDS, N_WORDS, show

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "glad": {"type": "boolean"},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 4},
        "color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "glad", "words", "color"],
}


def structured(folder: Path, n_layers: int, n_items: int, n_rounds: int) -> bool:
    """Answers under a schema, and free ones of as many tokens, in turns."""
    engine = TransformersEngine(
        EngineOptions(find_model(str(make_writer(folder, n_layers))), precision="fp32", batching="static"), Place("cpu")
    )
    rng = np.random.default_rng(4)
    prompts = [" ".join(map(str, rng.integers(0, 1000, n))) for n in rng.integers(8, 30, n_items)]

    def ask(limits: Sequence[int], structure: Structure | None) -> tuple[float, list[int]]:
        requests = [
            Request(i, Prompt(prompt), Sampling(max_tokens=limit, structure=structure))
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        engine._prefill.forget()
        start = time.process_time()
        found = {output.id: output for output in engine.generate(requests)}
        seconds = time.process_time() - start
        if structure is not None:
            assert all(json.loads(found[i].text).keys() == SCHEMA["properties"].keys() for i in found)
        return seconds, [len(found[i].tokens) for i in range(n_items)]

    structure = structure_of(schema=SCHEMA)
    _, lengths = ask([400] * n_items, structure)  # also compiles the grammar
    best = {"slurmgpu": float("inf"), "under a schema": float("inf")}
    for _ in range(n_rounds + 1):
        for name, form in (("slurmgpu", None), ("under a schema", structure)):
            seconds, n_tokens = ask(lengths, form)
            assert n_tokens == lengths
            best[name] = min(best[name], seconds)
    show(f"schema: {n_items} prompts, {sum(lengths)} tokens", best, sum(lengths))
    return judge("a schema costs", 100 * (1 - best["slurmgpu"] / best["under a schema"]), 5.0, " % of tokens a second")


def make_writer(folder: Path, n_layers: int) -> Path:
    """A random Llama that writes bytes and pairs of letters, and never ends by itself."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(one, other) for one in string.ascii_letters for other in string.ascii_letters]
    pieces = [*alphabet, *("".join(pair) for pair in pairs)]
    merges = [("".join(pair), one) for pair in pairs for one in string.ascii_lowercase]
    pieces += ["".join(each) for each in merges]
    pieces = pieces[: N_WORDS - 1]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<end>", eos_token="<end>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=N_WORDS,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=n_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0  # which is never the greatest of 8192 random scores
    model.save_pretrained(folder)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer items and one round")
    quick = parser.parse_args(argv).quick
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        met = structured(Path(folder), 2 if quick else 10, 16 if quick else 64, 1 if quick else N_ROUNDS)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
