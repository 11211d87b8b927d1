"""Small runs of tracin: a random graph, an untrained ConvE, and a run file."""

import json
import random
from pathlib import Path

from tests.support.runs import toml

ENTITIES = [f"CHEBI:{number}" for number in range(20)]
RELATIONS = ["predicate:0", "predicate:1", "predicate:2"]
N_TRAIN, N_TESTS = 60, 12
MODEL = {"image": (3, 4), "channels": 4, "stack": "height"}


def write_graph(folder: Path, seed: int = 0) -> None:
    """Dictionaries and triples; the first two training triples are alike, the last is a loop."""
    draw = random.Random(seed)
    triples = [(draw.choice(ENTITIES), draw.choice(RELATIONS), draw.choice(ENTITIES)) for _ in range(N_TRAIN + N_TESTS)]
    triples[1] = triples[0]
    triples[N_TRAIN - 1] = ("CHEBI:3", "predicate:1", "CHEBI:3")
    write_triples(folder / "train.txt", triples[:N_TRAIN])
    write_triples(folder / "test.txt", triples[N_TRAIN:])
    for name, words in (("node_dict.txt", ENTITIES), ("rel_dict.txt", RELATIONS)):
        (folder / name).write_text("".join(f"{word}\t{number}\n" for number, word in enumerate(words)))
    names = "".join(f"substance {number}\t{number}\n" for number in range(0, len(ENTITIES), 2))
    (folder / "node_name_dict.txt").write_text(names)
    meanings = {json.dumps({"predicate": f"biolink:says_{n}"}): name for n, name in enumerate(RELATIONS[:2])}
    (folder / "edge_map.json").write_text(json.dumps(meanings))


def write_triples(path: Path, triples) -> None:
    """Lines of head, relation and tail."""
    path.write_text("".join("\t".join(triple) + "\n" for triple in triples))


def write_model(path: Path, seed: int = 0, n_relations: int = len(RELATIONS), **extra) -> None:
    """A checkpoint of a random ConvE, with values in its norms, too."""
    import torch

    from slurmgpu.workloads.tracin.kge.conve import ConvE

    torch.manual_seed(seed)
    model = ConvE(len(ENTITIES), n_relations, 12, **MODEL)
    for name, value in model.state_dict().items():
        if name.endswith("running_var"):
            value.uniform_(0.5, 1.5)
        elif value.dtype.is_floating_point:
            value.normal_(std=0.5)
    config = {"image": [3, 4], "stack": "height"}
    torch.save({"model_state_dict": model.state_dict(), "model_config": config, **extra}, path)


def make_project(folder: Path, *, top=None, resources=None, **settings) -> Path:
    """A folder with a graph, model.pt and tracin.toml."""
    folder.mkdir(exist_ok=True)
    if not (folder / "train.txt").exists():
        write_graph(folder)
        write_model(folder / "model.pt")
    write_run_file(folder, top=top, resources=resources, **settings)
    return folder


def write_run_file(folder: Path, *, top=None, resources=None, **settings) -> None:
    """tracin.toml: batches of four tests; one task, in the process that submits, where no resources are given."""
    files = {"train": "train.txt", "entities": "node_dict.txt", "relations": "rel_dict.txt", "model": "model.pt"}
    keys = {"input": "test.txt", "run_dir": "run", "shard_items": 4, "lease_s": 4.0, "margin_s": 1.0, **(top or {})}
    tables = {
        "workload": {"use": "tracin", "batch_size": 4},
        "settings": {**files, "top_k": 5, **settings},
        "resources": {"gpus": 0, "executor": "local" if resources else "debug", **(resources or {})},
    }
    text = "".join(f"{key} = {toml(value)}\n" for key, value in keys.items())
    for name, table in tables.items():
        text += f"\n[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
    (folder / "tracin.toml").write_text(text)
