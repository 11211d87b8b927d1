"""Check proponents by leaving them out: train again without them, and see what becomes of the prediction.

For each of some test triples that the model believes, the strongest proponents are removed and the model is trained
again from the same seed. Beside it, as many triples are removed that were drawn at random: of all, and of those with
the same head or tail. What the prediction loses is a difference of log-odds, log p / (1 - p).
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import proponents
import train_model

import slurmgpu

HERE = Path(__file__).parent
SEED = 0


def main(argv: Sequence[str] | None = None) -> None:
    """Print what each prediction loses, and the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predictions", type=int, default=12, help="how many to check (default: %(default)s)")
    parser.add_argument("--remove", type=int, default=10, help="triples to remove at a time (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=6, help="random draws of all triples (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=100, help="as the model was trained (default: %(default)s)")
    parser.add_argument("--merged", type=Path, default=HERE / "runs/tracin/merged.h5", metavar="FILE")
    given = parser.parse_args(argv)
    merged = slurmgpu.open(given.merged)
    believed = np.flatnonzero(merged["score"][:] > 0)
    # Spread over the file, so that nobody has picked them.
    rows = believed[np.linspace(0, len(believed) - 1, given.predictions).astype(int)]
    trained, tests = train_model.triples("train"), train_model.triples("test")[rows]
    rng = np.random.default_rng(SEED)
    removed = [merged["proponents"][row][: given.remove] for row in rows]
    removed += [rng.choice(neighbours(trained, triple), given.remove, replace=False) for triple in tests]
    removed += [rng.choice(len(trained), given.remove, replace=False) for _ in range(given.draws)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        whole, *others = pool.map(partial(log_odds, trained, tests, given.epochs), [[], *removed])
    lost = whole - np.array(others)  # (removed, prediction)
    n = len(rows)
    report([row_text(int(row)) for row in rows], whole, lost[:n].diagonal(), lost[n : 2 * n].diagonal(), lost[2 * n :])


def log_odds(trained: np.ndarray, tests: np.ndarray, epochs: int, removed: Sequence[int]) -> Any:
    """What a model that is trained without some triples gives the tests: their scores."""
    import torch

    trainer = train_model.train(np.delete(trained, removed, axis=0), epochs)
    heads, relations, tails = torch.from_numpy(tests).T
    with torch.no_grad():
        return trainer.module.scores(heads, relations).gather(1, tails[:, None])[:, 0].numpy()


def neighbours(trained: np.ndarray, triple: np.ndarray) -> np.ndarray:
    """The lines of training triples that share the head or the tail of a triple."""
    return np.flatnonzero((trained[:, 0] == triple[0]) | (trained[:, 2] == triple[2]))


def row_text(row: int) -> str:
    """A triple of test.txt, to be read."""
    return proponents.triples(HERE / "test.txt")[row]


def report(names: Sequence[str], whole: Any, own: Any, near: Any, random: Any) -> None:
    """Probabilities of each prediction, and the means of what was lost: `random` is (draw, prediction)."""
    print("probability, and that without its proponents, others of its head or tail, random triples")
    for i, name in enumerate(names):
        scores = (whole[i], whole[i] - own[i], whole[i] - near[i], whole[i] - random[:, i].mean())
        print("  ".join([*(f"{1 / (1 + math.exp(-score)):.2f}" for score in scores), name]))
    print(f"\nlog-odds lost, mean of {len(names)} predictions (least, most)")
    for what, values in (("proponents", own), ("same head or tail", near), ("random", random)):
        print(f"{what:17}  {values.mean():5.2f}  ({values.min():.2f}, {values.max():.2f})")
    print(f"proponents cost more than random triples in {100 * (own > random).mean():.0f} % of all comparisons,")
    print(f"and more than others of the same head or tail in {100 * (own > near).mean():.0f} %")


if __name__ == "__main__":
    main()
