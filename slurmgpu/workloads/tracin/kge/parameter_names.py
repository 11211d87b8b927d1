"""The parameter names of knowledge-graph models in different programs, and what the names imply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Architecture = Literal["conve", "distmult", "complex", "transe"]
Stack = Literal["height", "width"]
Inverse = Literal["interleaved", "appended", "none"]

NORMS = ("bn0", "bn1", "bn2")
LAYERS = ("bn0", "conv", "bn1", "fc", "bn2")
"""ConvE's layers, in order; each has a weight and a bias."""

WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DistributedDataParallel add to each name."""

NO_PARAMETERS = (".num_batches_tracked", ".regularizer.weight", ".regularizer.regularization_term")
"""Endings of names of tensors that do not affect scores."""


@dataclass(frozen=True)
class ParameterNames:
    """A program's names for the tables, for the tails' biases, and for ConvE's layers.

    `stack` and `inverse` are the program's layouts of ConvE's images and of the relation table, None if they vary;
    `complex_as` is its layout of complex numbers: alternating real and imaginary parts, or all real parts first.
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
        """Whether a state dict has these names; CONVERTED differs from PYKEEN in one layer only."""
        keys = set(keys)
        return {self.entity, self.relation} <= keys and (
            self is not CONVERTED or f"{self.layers['bn2']}.running_mean" in keys
        )

    def conve(self) -> dict[str, str]:
        """The keys of ConvE's tensors by canonical name, without the bias."""
        names = {"entity": self.entity, "relation": self.relation}
        for layer in LAYERS:
            kinds = ("weight", "bias", "running_mean", "running_var") if layer in NORMS else ("weight", "bias")
            names |= {f"{layer}.{kind}": f"{self.layers[layer]}.{kind}" for kind in kinds}
        return names


OWN = ParameterNames("slurmgpu", "entity", "relation", "bias", {layer: layer for layer in LAYERS}, complex_as="halves")
_PYKEEN_LAYERS = {
    "bn0": "interaction.hr2d.0",
    "conv": "interaction.hr2d.2",
    "bn1": "interaction.hr2d.3",
    "fc": "interaction.hr1d.0",
    "bn2": "interaction.hr1d.2",
}
PYKEEN = ParameterNames(
    "PyKEEN",
    "entity_representations.0._embeddings.weight",
    "relation_representations.0._embeddings.weight",
    "entity_representations.1._embeddings.weight",
    _PYKEEN_LAYERS,
    stack="height",
    inverse="interleaved",
    complex_as="pairs",
)
ORIGINAL = ParameterNames(
    "train_pytorch.py",
    "entity_embeddings.weight",
    "relation_embeddings.weight",
    "bias",
    {**{layer: layer for layer in LAYERS}, "conv": "conv1"},
    stack="width",
    inverse="appended",
)
CONVERTED = ParameterNames(
    "convert_checkpoint.py",  # the same model under PyKEEN's names, except one
    PYKEEN.entity,
    PYKEEN.relation,
    PYKEEN.bias,
    {**_PYKEEN_LAYERS, "bn2": "interaction.hr1d.1"},
    stack="width",
    inverse="appended",
)
DETTMERS = ParameterNames(
    "TimDettmers/ConvE",  # its dictionary of relations includes the inverse relations
    "emb_e.weight",
    "emb_rel.weight",
    "b",
    {**{layer: layer for layer in LAYERS}, "conv": "conv1"},
    stack="height",
)
NAMINGS = (OWN, CONVERTED, PYKEEN, ORIGINAL, DETTMERS)


def unwrapped(keys: Iterable[str]) -> dict[str, str]:
    """The keys by their names without the wrappers' prefixes."""
    found = {}
    for key in keys:
        name = key
        while name.startswith(WRAPPERS):
            name = name.removeprefix(WRAPPERS[0]).removeprefix(WRAPPERS[1])
        found[name] = key
    return found


def group_of(name: str) -> str:
    """The group of a parameter: entity, relation, conv, norm, fc or bias; for a user's model its top-level module."""
    module = name.split(".")[0]
    return "norm" if module in NORMS else module
