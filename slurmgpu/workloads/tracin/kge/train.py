"""A small trainer for knowledge-graph models; tracin reads its checkpoints.

    python -m slurmgpu.workloads.tracin.kge.train train.txt --valid valid.txt --test test.txt --dim 200 -o model

writes model/checkpoint-100.pt, and prints how well the model ranks valid.txt and test.txt. Without --entities and
--relations it also writes model/node_dict.txt and model/rel_dict.txt. Triples in none of the files count as false:
without valid.txt, ranks of test.txt are worse. A folder with checkpoints is an error. On a CPU the same seed and the
same number of threads give the same checkpoints.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.globs import matches
from slurmgpu.util.hashing import digest_of
from slurmgpu.workloads.tracin.kge.graph import Dictionary, read_dictionary, read_lines, read_triples
from slurmgpu.workloads.tracin.kge.trainer import Recipe, Trainer, summary

log = logging.getLogger(__name__)

DEFAULT = Recipe()


def train(
    triples: NDArray[np.int64],
    n_entities: int,
    n_relations: int,
    recipe: Recipe = DEFAULT,
    folder: str | Path | None = None,
    every: int = 0,
    dictionaries: Mapping[str, str | Path] | None = None,
) -> Trainer:
    """Train a model on `triples` (n, 3); returns its trainer, with the model in evaluation mode.

    Writes `checkpoint-{epoch}.pt` into `folder` for the last epoch, and every `every` epochs. Checkpoints have digests
    of `dictionaries`, the files of "entities" and "relations", so that tracin refuses others.
    """
    digests = {name: digest_of(Path(path)) for name, path in (dictionaries or {}).items()}
    trainer = Trainer(torch.from_numpy(triples), n_entities, n_relations, recipe, digests)
    if folder is not None:
        refuse_to_mix(Path(folder))
        Path(folder).mkdir(parents=True, exist_ok=True)
    for epoch in range(1, recipe.epochs + 1):
        loss = trainer.train_epoch()
        # About twenty lines, however long training takes.
        if epoch % max(1, recipe.epochs // 20) == 0:
            log.info("epoch %d of %d: loss %.5f", epoch, recipe.epochs, loss)
        if folder is not None and (epoch == recipe.epochs or (every and epoch % every == 0)):
            path = Path(folder) / f"checkpoint-{epoch}.pt"
            save(trainer, path)
            log.info("wrote %s", path)
    return trainer


def refuse_to_mix(folder: Path) -> None:
    """SlurmGPUError for a folder with checkpoints: a glob would match checkpoints of two trainings."""
    try:
        there = sorted(Path(path).name for path in matches("checkpoint-*.pt", folder))
    except OSError as error:
        raise SlurmGPUError(
            f"{folder} cannot be listed: {error.strerror}, and may have checkpoints of another training. Make it "
            f"readable, or choose another folder with -o."
        ) from error
    if there:
        raise SlurmGPUError(
            f"{folder} has {there[0]} from another training; influences are summed over one training's checkpoints. "
            f"Remove {'it' if len(there) == 1 else f'these {len(there)} files'}, or choose another folder with -o."
        )


def save(trainer: Trainer, path: Path) -> None:
    """Write a checkpoint to `path` atomically."""
    content = io.BytesIO()
    torch.save(trainer.checkpoint(), content)
    write_bytes(path, content.getvalue())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for an error that the user can fix."""
    given = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        _run(given)
    except (SlurmGPUError, OSError) as error:
        said = error if isinstance(error, SlurmGPUError) else f"{error.filename}: {error.strerror}. Correct the path."
        sys.stderr.write(f"error: {said}\n")
        return 2
    return 0


def _run(given: argparse.Namespace) -> None:
    recipe = _recipe(given)
    files = [given.train, *(path for path in (given.valid, given.test) if path)]
    for path in files:
        if not path.is_file():
            raise SlurmGPUError(f"There is no file {path}; expected triples. Correct the path.")
    refuse_to_mix(given.output)
    given.output.mkdir(parents=True, exist_ok=True)
    entities = _dictionary(given.entities or given.output / "node_dict.txt", files, (0, 2))
    relations = _dictionary(given.relations or given.output / "rel_dict.txt", files, (1,))
    triples = {path: read_triples(path, entities, relations) for path in files}
    trained = triples[given.train]
    if not len(trained):
        raise SlurmGPUError(f"{given.train} has no triple; expected lines of head, relation and tail.")
    dictionaries = {"entities": entities.path, "relations": relations.path}
    trainer = train(trained, entities.size, relations.size, recipe, given.output, given.every, dictionaries)
    known = torch.from_numpy(np.concatenate(list(triples.values())))
    for path in files[1:]:
        if len(triples[path]):
            for side, ranks in trainer.ranks(torch.from_numpy(triples[path]), known).items():
                said = ", ".join(f"{name} {value:.3f}" for name, value in summary(ranks).items())
                sys.stdout.write(f"{path}: {side} of {len(ranks):,} triples, filtered: {said}\n")


def _recipe(given: argparse.Namespace) -> Recipe:
    names = [field.name for field in dataclasses.fields(Recipe) if field.name not in ("image", "kernel", "device")]
    options: dict[str, Any] = {name: getattr(given, name) for name in names}
    options["image"], options["kernel"] = given.image and tuple(given.image), tuple(given.kernel)
    options["device"] = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
    recipe = Recipe(**options)
    recipe.check()
    return recipe


def _dictionary(path: Path, files: Sequence[Path], fields: Sequence[int]) -> Dictionary:
    """The dictionary in a file; a missing file is made of the triples' sorted names."""
    if not path.exists():
        names = {name for file in files for name in _names(file, fields)}
        write_bytes(path, "".join(f"{name}\t{i}\n" for i, name in enumerate(sorted(names))).encode())
        log.info("wrote %s: %s names", path, f"{len(names):,}")
    return read_dictionary(path)


def _names(path: Path, fields: Sequence[int]) -> set[str]:
    """The names in some fields of a file of triples; skips wrong lines, which `read_triples` refuses later."""
    triples = [line.split("\t") for line in read_lines(path)]
    return {triple[field] for triple in triples if len(triple) == 3 for field in fields}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slurmgpu.workloads.tracin.kge.train",
        description="Train a knowledge-graph embedding, and write checkpoints that tracin reads.",
        epilog="example: %(prog)s train.txt --valid valid.txt --test test.txt --dim 200 --every 50 -o model",
    )
    add = parser.add_argument
    add("train", type=Path, help="training triples: lines of head, relation and tail, separated by tabs")
    add("-o", "--output", type=Path, required=True, help="the folder for checkpoint-EPOCH.pt")
    add("--entities", type=Path, help="node_dict.txt, made if missing (default: in the output folder)")
    add("--relations", type=Path, help="rel_dict.txt, likewise")
    add("--valid", type=Path, help="true triples to rank at the end; filtered when others are ranked")
    add("--test", type=Path, help="likewise")
    add("--model", default=DEFAULT.model, help="conve, distmult, complex or transe (default: %(default)s)")
    add("--dim", type=int, default=DEFAULT.dim, help="size of an embedding (default: %(default)s)")
    add("--epochs", type=int, default=DEFAULT.epochs, help="(default: %(default)s)")
    add("--every", type=int, default=0, help="epochs between checkpoints; 0: the last one only")
    add("--loss", default=DEFAULT.loss, help="kvsall, bce-1n, ce or ns:K, as in tracin (default: %(default)s)")
    add("--label-smoothing", type=float, default=DEFAULT.label_smoothing, help="(default: %(default)s)")
    add("--inverse", default=DEFAULT.inverse, help="appended, interleaved or none (default: %(default)s)")
    add("--batch-size", type=int, default=DEFAULT.batch_size, help="queries per step (default: %(default)s)")
    add("--learning-rate", type=float, default=DEFAULT.learning_rate, help="Adam's (default: %(default)s)")
    add("--dropouts", type=float, nargs="+", default=DEFAULT.dropouts, help="ConvE: three (default: %(default)s)")
    add("--image", type=int, nargs=2, metavar=("H", "W"), help="ConvE: an embedding's image (default: most square)")
    add("--stack", choices=("height", "width"), default=DEFAULT.stack, help="ConvE: how the two images are stacked")
    add("--channels", type=int, default=DEFAULT.channels, help="ConvE (default: %(default)s)")
    add("--kernel", type=int, nargs=2, metavar=("H", "W"), default=DEFAULT.kernel, help="ConvE (default: 3 3)")
    add("--norm", type=float, default=DEFAULT.norm, help="TransE: p of the distance (default: %(default)s)")
    add("--seed", type=int, default=DEFAULT.seed, help="(default: %(default)s)")
    add("--device", default="auto", help="cpu, cuda or auto (default)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
