"""Train knowledge-graph models epoch by epoch, and compute filtered ranks of true tails (Bordes et al. 2013)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.workloads.tracin.kge.conve import ConvE
from slurmgpu.workloads.tracin.kge.differentiable import Model
from slurmgpu.workloads.tracin.kge.losses import Loss, find_loss
from slurmgpu.workloads.tracin.kge.parameter_names import Architecture, Inverse, Stack
from slurmgpu.workloads.tracin.kge.queries import Known, Queries, rows_of, with_rows
from slurmgpu.workloads.tracin.kge.shallow import ComplEx, DistMult, TransE

LOSSES = r"kvsall|bce-1n|ce|ns:[1-9]\d*"
"""Losses for training; the others have no false triples."""

RANKED = 256
"""The number of triples that are ranked at a time."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a training."""

    model: Architecture = "conve"
    dim: int = 200
    epochs: int = 100
    loss: str = "kvsall"
    label_smoothing: float = 0.1
    inverse: Inverse = "appended"
    """Where the table has the inverse relations, which are then trained, too; or "none"."""
    batch_size: int = 128
    """Queries per step: different pairs of a head and a relation, with all their tails."""
    learning_rate: float = 1e-3
    dropouts: tuple[float, ...] = (0.2, 0.2, 0.3)
    """For ConvE's input, feature maps and linear layer output. Other models use the first, for the query."""
    image: tuple[int, int] | None = None
    """ConvE: height and width of an embedding's image; None for the image closest to a square."""
    stack: Stack = "height"
    channels: int = 32
    kernel: tuple[int, int] = (3, 3)
    norm: float = 1
    """TransE: the p of the distance."""
    seed: int = 0
    device: str = "cpu"

    def check(self) -> None:
        """SlurmGPUError for a recipe that cannot be trained."""
        if self.model not in BUILDERS:
            raise SlurmGPUError(f"model is {self.model!r}.{did_you_mean(self.model, BUILDERS)}")
        if not re.fullmatch(LOSSES, self.loss):
            expected = "'kvsall', 'bce-1n', 'ce', or 'ns:K' with K negatives"
            raise SlurmGPUError(f"loss is {self.loss!r}; expected a loss with false triples: {expected}.")
        if self.inverse not in ("appended", "interleaved", "none"):
            raise SlurmGPUError(f"inverse is {self.inverse!r}; expected 'appended', 'interleaved' or 'none'.")
        for name in ("dim", "epochs", "batch_size", "learning_rate", "channels"):
            if getattr(self, name) <= 0:
                raise SlurmGPUError(f"{name} is {getattr(self, name)}; expected more than 0.")
        if not (0 <= self.label_smoothing < 1 and all(0 <= share < 1 for share in self.dropouts)):
            found = f"{self.label_smoothing} and {', '.join(map(str, self.dropouts))}"
            raise SlurmGPUError(f"expected label smoothing and dropouts from 0 to less than 1, found {found}.")
        if self.norm < 1:
            raise SlurmGPUError(f"norm is {self.norm}; expected at least 1.")
        if self.model == "conve":
            self._check_images()
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise SlurmGPUError(f"device is {self.device!r}, which PyTorch cannot use: {error}") from error

    def _check_images(self) -> None:
        (height, width), (high, wide) = self.image_size, self.kernel
        if height * width != self.dim:
            raise SlurmGPUError(
                f"image is {height} x {width}; expected a product of {self.dim}, the size of an embedding."
            )
        height, width = (2 * height, width) if self.stack == "height" else (height, 2 * width)
        if high > height or wide > width:
            raise SlurmGPUError(f"kernel is {high} x {wide}; expected at most {height} x {width}, the stacked images.")
        if len(self.dropouts) != 3:
            raise SlurmGPUError(f"dropouts has {len(self.dropouts)} numbers; expected three for ConvE.")

    @property
    def image_size(self) -> tuple[int, int]:
        """The image's height and width; by default closest to a square."""
        if self.image is not None:
            return self.image
        height = max(h for h in range(1, self.dim + 1) if h * h <= self.dim and self.dim % h == 0)
        return height, self.dim // height


class Trainer:
    """Trains a model on `triples` (n, 3), each counted once.

    `dictionaries` are digests of the files of "entities" and "relations", for the checkpoint.
    """

    def __init__(
        self,
        triples: Tensor,
        n_entities: int,
        n_relations: int,
        recipe: Recipe,
        dictionaries: Mapping[str, str] | None = None,
    ) -> None:
        recipe.check()
        self.dictionaries = dict(dictionaries or {})
        self.recipe, self.n_entities, self.epoch = recipe, n_entities, 0
        self.rows, self.inverse_rows = rows_of(recipe.inverse, n_relations)
        self.n_rows = n_relations if self.inverse_rows is None else 2 * n_relations
        self._examples = torch.unique(self._examples_of(triples), dim=0)
        _, self._of, self._counts = torch.unique(self._examples[:, :2], dim=0, return_inverse=True, return_counts=True)
        if len(self._counts) < 2:
            raise SlurmGPUError("The training triples have only one pair of head and relation; expected at least two.")
        self._known = self._tails_of(self._examples)
        with self._seeded():
            self.module = BUILDERS[recipe.model](n_entities, self.n_rows, recipe).to(recipe.device)
        self._optimizer = torch.optim.Adam(self.module.parameters(), lr=recipe.learning_rate)

    def train_epoch(self) -> float:
        """Train one epoch and return its mean loss; leaves the model in evaluation mode."""
        self.epoch += 1
        self.module.train()
        with self._seeded():
            loss = self._loss()
            losses = [self._step(loss, examples) for examples in self._batches()]
        self.module.eval()
        return sum(losses) / len(losses)

    def checkpoint(self) -> dict[str, Any]:
        """The content of a checkpoint file."""
        return {
            "epoch": self.epoch,
            "model_state_dict": self.module.state_dict(),
            "optimizer_state_dict": self._optimizer.state_dict(),
            "model_config": self._config(),
        }

    def ranks(self, triples: Tensor, known: Tensor) -> dict[str, Tensor]:
        """The filtered ranks of the tails of `triples` (n, 3), and of their heads if inverses are trained.

        `known` (m, 3) are true triples besides the training triples.
        """
        everything = torch.cat([self._examples, self._examples_of(known)])
        tails_of = self._tails_of(everything)
        examples = self._examples_of(triples).split(len(triples))
        found = (filtered_ranks(cast(Model, self.module.eval()), tails_of, part, self.n_rows) for part in examples)
        return dict(zip(("tails", "heads"), found, strict=False))

    def _examples_of(self, triples: Tensor) -> Tensor:
        return with_rows(triples, self.rows, self.inverse_rows).to(self.recipe.device)

    def _tails_of(self, examples: Tensor) -> Known:
        return Known(examples, self.n_rows)

    def _step(self, loss: Loss, examples: Tensor) -> float:
        heads, relations, tails = examples.T
        queries = Queries.of_examples(heads, relations, tails, self.n_rows)
        scores = cast(Model, self.module).scores(queries.heads, queries.relations)[queries.of]
        losses = loss.plain(scores, *loss.targets(queries, self.n_entities))
        # With kvsall all triples of a query share its loss.
        mean = losses.sum() / (len(queries.heads) if self.recipe.loss == "kvsall" else len(queries))
        self._optimizer.zero_grad()
        mean.backward()
        self._optimizer.step()
        return float(mean.detach())

    def _batches(self) -> Iterator[Tensor]:
        """All examples of some queries at a time, in a new order."""
        # Drawn on the CPU, so that every device gets the same order.
        order = torch.randperm(len(self._counts)).to(self._of.device)
        place = torch.argsort(order)
        examples = self._examples[torch.argsort(place[self._of], stable=True)]
        # Batches of even size: batch norm cannot train on a last batch of one query.
        n_batches = max(1, min(math.ceil(len(order) / self.recipe.batch_size), len(order) // 2))
        sizes = [int(counts.sum()) for counts in self._counts[order].tensor_split(n_batches)]
        yield from examples.split(sizes)

    def _loss(self) -> Loss:
        return find_loss(
            self.recipe.loss,
            n_entities=self.n_entities,
            known=lambda: self._known,
            label_smoothing=self.recipe.label_smoothing,
            seed=self._epoch_seed,
        )

    @property
    def _epoch_seed(self) -> int:
        return self.recipe.seed * 1_000_003 + self.epoch

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Seed random numbers by the seed and the epoch; restores the caller's state."""
        device = torch.device(self.recipe.device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self._epoch_seed)
            yield

    def _config(self) -> dict[str, Any]:
        """The `model_config` of a checkpoint: facts that tensors lack, with the keys of existing checkpoints."""
        recipe = self.recipe
        config: dict[str, Any] = {
            "architecture": recipe.model,
            "num_entities": self.n_entities,
            "num_relations": self.n_rows,
            "embedding_dim": recipe.dim,
            "inverse": recipe.inverse,
            "loss": recipe.loss,
            "label_smoothing": recipe.label_smoothing,
            "dropouts": list(recipe.dropouts),
            "seed": recipe.seed,
        }
        if self.dictionaries:
            config["dictionaries"] = self.dictionaries
        if recipe.model == "conve":
            config |= {"image": list(recipe.image_size), "stack": recipe.stack}
            config |= {"output_channels": recipe.channels, "kernel": list(recipe.kernel)}
        return config | {"norm": recipe.norm} if recipe.model == "transe" else config


def _conve(n_entities: int, n_rows: int, recipe: Recipe) -> nn.Module:
    first, maps, last = recipe.dropouts
    return ConvE(
        n_entities,
        n_rows,
        recipe.dim,
        image=recipe.image_size,
        stack=recipe.stack,
        channels=recipe.channels,
        kernel=recipe.kernel,
        dropouts=(first, maps, last),
    )


BUILDERS: Mapping[str, Callable[[int, int, Recipe], nn.Module]] = {
    "conve": _conve,
    "distmult": lambda n_entities, n_rows, recipe: DistMult(n_entities, n_rows, recipe.dim, recipe.dropouts[0]),
    "complex": lambda n_entities, n_rows, recipe: ComplEx(n_entities, n_rows, recipe.dim, recipe.dropouts[0]),
    "transe": lambda n_entities, n_rows, recipe: TransE(
        n_entities, n_rows, recipe.dim, recipe.norm, recipe.dropouts[0]
    ),
}


def filtered_ranks(model: Model, known: Known, triples: Tensor, n_relations: int) -> Tensor:
    """The rank (n,) of each tail of `triples` (n, 3) among all entities except the other `known` tails of its query.

    Relations are rows of the model's table, which has `n_relations`. Among equal scores the rank is the mean of the
    best and the worst rank, so that a model with equal scores for all entities gets chance ranks. The model must be in
    evaluation mode.
    """
    with torch.no_grad():
        batches = (batch.unbind(1) for batch in triples.split(RANKED))
        queries = (Queries.of_examples(heads, rows, tails, n_relations) for heads, rows, tails in batches)
        return torch.cat([_ranks(model, known, some) for some in queries])


def _ranks(model: Model, known: Known, queries: Queries) -> Tensor:
    tails = queries.tails[:, None]
    scores = model.scores(queries.heads, queries.relations)
    others = torch.ones_like(scores, dtype=torch.bool)
    others[known.tails(queries)] = False
    scores, others = scores[queries.of], others[queries.of]
    others.scatter_(1, tails, False)
    own = scores.gather(1, tails)
    better, equal = ((scores > own) & others).sum(1), ((scores == own) & others).sum(1)
    # A model with NaN scores ranks last, not first.
    worst = torch.full_like(better, scores.shape[1])
    return torch.where(own[:, 0].isnan(), worst, 1 + better + equal / 2)


def summary(ranks: Tensor) -> dict[str, float]:
    """The mean reciprocal of ranks (n,), and the shares of ranks up to 1, 3 and 10."""
    found = {"mrr": float((1 / ranks.double()).mean())}
    return found | {f"hits@{k}": float((ranks <= k).double().mean()) for k in (1, 3, 10)}
