"""Under which names programs keep the parameters of knowledge-graph models, and what a program's names imply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Stack = Literal["height", "width"]
Inverse = Literal["interleaved", "appended", "none"]

NORMS = ("bn0", "bn1", "bn2")
LAYERS = ("bn0", "conv", "bn1", "fc", "bn2")
"""ConvE's, in the order in which they are computed; each has a weight and a bias."""

WRAPPERS = ("_orig_mod.", "module.")
"""What torch.compile and DistributedDataParallel put before each name."""

NO_PARAMETERS = (".num_batches_tracked", ".regularizer.weight", ".regularizer.regularization_term")
"""Endings of names that no score depends on."""


@dataclass(frozen=True)
class Naming:
    """A program's names: of the tables, of each tail's bias, and of ConvE's layers.

    `stack` and `inverse` are how the program lays out ConvE's images and the relation table, None if it may do either;
    `complex_as` how it lays out complex numbers: real and imaginary parts in turn, or all real ones first.
    """

    program: str
    entity: str
    relation: str
    bias: str
    layers: Mapping[str, str]
    stack: Stack | None = None
    inverse: Inverse | None = None
    complex_as: Literal["pairs", "halves"] | None = None

    def is_of(self, keys: Iterable[str]) -> bool:
        """Whether a state dict has these names: the tables', and that of a layer that tells it from a like one."""
        keys = set(keys)
        return {self.entity, self.relation} <= keys and (
            self is not CONVERTED or f"{self.layers['bn2']}.running_mean" in keys
        )

    def conve(self) -> dict[str, str]:
        """The key of each of ConvE's tensors by its canonical name, but for the bias."""
        names = {"entity": self.entity, "relation": self.relation}
        for layer in LAYERS:
            kinds = ("weight", "bias", "running_mean", "running_var") if layer in NORMS else ("weight", "bias")
            names |= {f"{layer}.{kind}": f"{self.layers[layer]}.{kind}" for kind in kinds}
        return names


OWN = Naming("slurmgpu", "entity", "relation", "bias", {layer: layer for layer in LAYERS}, complex_as="halves")
_PYKEEN_LAYERS = {
    "bn0": "interaction.hr2d.0",
    "conv": "interaction.hr2d.2",
    "bn1": "interaction.hr2d.3",
    "fc": "interaction.hr1d.0",
    "bn2": "interaction.hr1d.2",
}
PYKEEN = Naming(
    "PyKEEN",
    "entity_representations.0._embeddings.weight",
    "relation_representations.0._embeddings.weight",
    "entity_representations.1._embeddings.weight",
    _PYKEEN_LAYERS,
    stack="height",
    inverse="interleaved",
    complex_as="pairs",
)
ORIGINAL = Naming(
    "train_pytorch.py",
    "entity_embeddings.weight",
    "relation_embeddings.weight",
    "bias",
    {**{layer: layer for layer in LAYERS}, "conv": "conv1"},
    stack="width",
    inverse="appended",
)
CONVERTED = Naming(
    "convert_checkpoint.py",  # the same model under PyKEEN's names, but for one
    PYKEEN.entity,
    PYKEEN.relation,
    PYKEEN.bias,
    {**_PYKEEN_LAYERS, "bn2": "interaction.hr1d.1"},
    stack="width",
    inverse="appended",
)
DETTMERS = Naming(
    "TimDettmers/ConvE",  # whose relations have their inverse among the names of the dictionary
    "emb_e.weight",
    "emb_rel.weight",
    "b",
    {**{layer: layer for layer in LAYERS}, "conv": "conv1"},
    stack="height",
)
NAMINGS = (OWN, CONVERTED, PYKEEN, ORIGINAL, DETTMERS)


def unwrapped(keys: Iterable[str]) -> dict[str, str]:
    """The key of each name without what wrappers put before it."""
    found = {}
    for key in keys:
        name = key
        while name.startswith(WRAPPERS):
            name = name.removeprefix(WRAPPERS[0]).removeprefix(WRAPPERS[1])
        found[name] = key
    return found
