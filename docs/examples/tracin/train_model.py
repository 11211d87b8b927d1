"""Train ConvE on train.txt: 100 epochs, and a checkpoint after each 20 of them in runs/model."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

HERE = Path(__file__).parent
MODEL = HERE / "runs/model"
N_CHECKPOINTS = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print how well the model ranks what it has not seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    epochs = parser.parse_args(argv).epochs
    import torch

    from slurmgpu.workloads.tracin.kge.trainer import summary

    shutil.rmtree(MODEL, ignore_errors=True)
    trainer = train(triples("train"), epochs, folder=MODEL)
    test = torch.from_numpy(triples("test"))
    known = torch.from_numpy(np.concatenate([triples(part) for part in ("train", "valid", "test")]))
    for ranks in trainer.ranks(test, known).values():
        told = ", ".join(f"{name} {value:.2f}" for name, value in summary(ranks).items())
        print(f"{len(triples('train')):,} triples learnt; tails of {len(test)} others, filtered: {told}")


def train(trained: NDArray[np.int64], epochs: int, folder: Path | None = None) -> Any:
    """The trained model: a `Trainer`. On one thread, so that the same triples give the same model."""
    import torch

    from slurmgpu.workloads.tracin.kge import train as trainer
    from slurmgpu.workloads.tracin.kge.trainer import Recipe

    torch.set_num_threads(1)
    recipe = Recipe(dim=64, channels=16, epochs=epochs, batch_size=64, learning_rate=3e-3, inverse="none")
    files = {"entities": HERE / "node_dict.txt", "relations": HERE / "rel_dict.txt"}
    n_entities, n_relations = (len(lines(path)) for path in files.values())
    every = max(1, epochs // N_CHECKPOINTS)
    return trainer.train(trained, n_entities, n_relations, recipe, folder, every=every, dictionaries=files)


def triples(part: str) -> NDArray[np.int64]:
    """The triples (n, 3) of train.txt, valid.txt or test.txt."""
    from slurmgpu.workloads.tracin.kge.graph import read_dictionary, read_triples

    entities, relations = (read_dictionary(HERE / name) for name in ("node_dict.txt", "rel_dict.txt"))
    return read_triples(HERE / f"{part}.txt", entities, relations)


def lines(path: Path) -> list[str]:
    """A file's lines."""
    return path.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    main()
