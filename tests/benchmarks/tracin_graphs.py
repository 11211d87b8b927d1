"""The knowledge graphs of bench_tracin: real small ones, a large synthetic one, and a ConvE of PyKEEN's for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

DIMENSION = 200
FB15K_237 = (14_541, 237, 272_115)
"""Entities, relations and training triples of FB15k-237."""
N_SYNTHETIC_TESTS = 1_000


def write_real(name: str, folder: Path, n_epochs: int) -> None:
    """UMLS or Kinships as PyKEEN carries them, and a ConvE that has been trained on it for a little while."""
    import pykeen.datasets

    folder.mkdir(parents=True)
    source = Path(pykeen.datasets.__file__).parent / name
    for part in ("train", "test"):
        (folder / f"{part}.txt").write_bytes((source / f"{part}.txt").read_bytes())
    lines = [line.split("\t") for line in (folder / "train.txt").read_text().splitlines()]
    write_dictionary(folder / "node_dict.txt", sorted({line[i] for line in lines for i in (0, 2)}))
    write_dictionary(folder / "rel_dict.txt", sorted({line[1] for line in lines}))
    train, _ = read(folder)
    n_entities, n_relations = n_lines(folder / "node_dict.txt"), n_lines(folder / "rel_dict.txt")
    model = new_model(n_entities, n_relations)
    teach(model, train, n_entities, n_epochs)
    torch.save(model.state_dict(), folder / "model.pt")


def write_synthetic(folder: Path, sizes: tuple[int, int, int] = FB15K_237) -> None:
    """Random triples of a real graph's size and skew, and a random ConvE: good for times, and for nothing else.

    Heads, relations and tails are drawn by Zipf's law, and queries again, so that triples share queries as they do in
    FB15k-237: there are 0.34 different ones for each triple.
    """
    folder.mkdir(parents=True)
    n_entities, n_relations, n_train = sizes
    rng = np.random.default_rng(0)
    n_queries = int(0.5 * n_train)
    heads, relations = zipf(rng, n_entities, n_queries, 0.6), zipf(rng, n_relations, n_queries, 0.9)
    of = zipf(rng, n_queries, n_train + N_SYNTHETIC_TESTS, 0.3)
    tails = zipf(rng, n_entities, len(of), 0.8)
    lines = [f"e{h}\tr{r}\te{t}\n" for h, r, t in zip(heads[of], relations[of], tails, strict=True)]
    (folder / "train.txt").write_text("".join(lines[:n_train]))
    (folder / "test.txt").write_text("".join(lines[n_train:]))
    write_dictionary(folder / "node_dict.txt", [f"e{i}" for i in range(n_entities)])
    write_dictionary(folder / "rel_dict.txt", [f"r{i}" for i in range(n_relations)])
    torch.save(new_model(n_entities, n_relations).state_dict(), folder / "model.pt")


def zipf(rng: np.random.Generator, n: int, size: int, exponent: float) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Numbers below n, of which the i-th most common is drawn in proportion to i ** -exponent."""
    weights = np.arange(1, n + 1) ** -exponent
    return rng.permutation(n)[rng.choice(n, size, p=weights / weights.sum())]


def write_dictionary(path: Path, names: list[str]) -> None:
    """`name`, tab, `index`."""
    path.write_text("".join(f"{name}\t{i}\n" for i, name in enumerate(names)))


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """Training and test triples (n, 3), in line order."""
    entities, relations = (
        {name: int(i) for name, i in (line.split("\t") for line in (folder / file).read_text().splitlines())}
        for file in ("node_dict.txt", "rel_dict.txt")
    )
    found = []
    for part in ("train", "test"):
        lines = [line.split("\t") for line in (folder / f"{part}.txt").read_text().splitlines()]
        found.append(torch.tensor([[entities[h], relations[r], entities[t]] for h, r, t in lines]))
    return found[0], found[1]


def n_lines(path: Path) -> int:
    """How many lines a file has."""
    with path.open() as lines:
        return sum(1 for _ in lines)


def new_model(n_entities: int, n_relations: int) -> Any:
    """PyKEEN's ConvE with its defaults, d = 200: images of 10 × 20, 32 channels, 2.1 million parameters and more."""
    from pykeen.models import ConvE
    from pykeen.triples import CoreTriplesFactory

    none = torch.zeros(1, 3, dtype=torch.int64)
    factory = CoreTriplesFactory(none, num_entities=n_entities, num_relations=n_relations)
    return ConvE(triples_factory=factory, embedding_dim=DIMENSION, random_seed=0).eval()


def load(folder: Path) -> Any:
    """The folder's model, in evaluation mode."""
    model = new_model(n_lines(folder / "node_dict.txt"), n_lines(folder / "rel_dict.txt"))
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model.eval()


def teach(model: Any, train: Tensor, n_entities: int, n_epochs: int) -> None:
    """Train with 1-N scoring and label smoothing."""
    torch.manual_seed(0)
    queries, of = torch.unique(train[:, :2], dim=0, return_inverse=True)
    labels = torch.zeros(len(queries), n_entities)
    labels[of, train[:, 2]] = 1
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(n_epochs):
        for batch in torch.randperm(len(queries)).split(128):
            optimizer.zero_grad()
            targets = 0.9 * labels[batch] + 0.1 / n_entities
            functional.binary_cross_entropy_with_logits(model.score_t(queries[batch]), targets).backward()
            optimizer.step()
    model.eval()
