"""The settings of `use = "tracin"`: their types, defaults and meanings, and which cannot go together.

docs/reference/tracin.md has them as a table. Nothing here reads a file: the merge and exports build the workload, too,
when its files may be gone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slurmgpu.errors import SlurmGPUError, did_you_mean

ARCHITECTURES = ("conve", "distmult", "complex", "transe")
LOSSES = ("bce-pos", "bce-1n", "kvsall", "ce", "score")
"""And "ns:K", with K negatives."""

Direction = Literal["tail", "both"]
Inverse = Literal["interleaved", "appended", "none"]
Normalize = Literal["none", "train", "cosine"]
Precision = Literal["fp32", "fp64", "tf32", "bf16", "fp16"]
Precondition = Literal["none", "adam"]
Stack = Literal["height", "width"]

CPU_MEMORY_MB, GPU_MEMORY_MB = 200, 4096
"""Working memory where the setting memory_mb says nothing."""

FILTER = (
    *("min_degree", "preserve_test_edges", "strict_hop_constraint"),
    *("path_filtering", "max_total_path_length", "strict_path_filtering"),
)
"""The settings that refine `n_hops`."""

OWN_LOSS = ("test_loss", "image", "stack", "inverse", "norm")
"""Settings that a user's own model has no use for: its losses are its own."""


@dataclass(kw_only=True, eq=False)
class TracinSettings:
    """What `[settings]` may hold; paths are relative to the run file."""

    train: str
    entities: str
    relations: str
    model: str | list[str]
    learning_rate: float | list[float] | None = None
    architecture: str = "auto"
    image: list[int] | None = None
    stack: Stack | None = None
    inverse: Inverse | None = None
    norm: float | None = None
    loss: str = "bce-pos"
    test_loss: str | None = None
    label_smoothing: float = 0.1
    directions: Direction = "tail"
    parameters: str | list[str] = "all"
    precondition: Precondition = "none"
    normalize: Normalize = "none"
    top_k: int = 100
    full: Literal[False, "float32", "float16"] = False
    full_limit_gb: float = 16.0
    precision: Precision = "fp32"
    memory_mb: int | None = None
    keep_mb: int | None = None
    threads: int | None = None
    names: str | None = None
    edge_map: str | None = None
    n_hops: int | None = None
    min_degree: int | None = None
    preserve_test_edges: bool | None = None
    strict_hop_constraint: bool = False
    path_filtering: bool = False
    max_total_path_length: int | None = None
    strict_path_filtering: bool = False
    planned: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_model(self)
        check_losses(self)
        check_amounts(self)
        check_filter(self)

    @property
    def is_own_model(self) -> bool:
        """Whether `architecture` names a class of the user's."""
        return ":" in self.architecture

    def memory_mb_on(self, *, is_gpu: bool) -> int:
        """Working memory above the models."""
        return self.memory_mb or (GPU_MEMORY_MB if is_gpu else CPU_MEMORY_MB)

    @property
    def number_dtype(self) -> str:
        """The dtype of influences as they are stored."""
        return "float64" if self.precision == "fp64" else "float32"


def check_model(settings: TracinSettings) -> None:
    """Refuse an architecture that there is not, and what does not go with the one there is."""
    known = ("auto", *ARCHITECTURES)
    if settings.architecture not in known and not settings.is_own_model:
        raise SlurmGPUError(
            f"architecture is {settings.architecture!r}; expected one of {', '.join(known)}, or file.py:Class for a "
            f"model of your own.{did_you_mean(settings.architecture, known)}"
        )
    if settings.is_own_model:
        _check_own_model(settings)
    if settings.architecture in ARCHITECTURES[1:] and (settings.image or settings.stack):
        raise SlurmGPUError(
            f"image and stack say how ConvE lays out its embeddings, and architecture is {settings.architecture!r}; "
            f"leave them out."
        )
    if settings.norm not in (None, 1, 2):
        raise SlurmGPUError(f"norm is {settings.norm:g}; expected 1 or 2, the p of TransE's distance.")
    if settings.architecture in ("conve", "distmult", "complex") and settings.norm is not None:
        raise SlurmGPUError(
            f"norm is the p of TransE's distance, and architecture is {settings.architecture!r}; leave norm out."
        )
    if settings.image is not None and (len(settings.image) != 2 or min(settings.image) < 1):
        raise SlurmGPUError(f"image is {settings.image}; expected [height, width] of one embedding, such as [10, 20].")
    if settings.inverse == "none" and settings.directions == "both":
        raise SlurmGPUError(
            'directions = "both" asks each triple backwards, too, by its inverse relation, and inverse = "none" says '
            "that the model has none; set one of them only."
        )
    if not settings.model:
        raise SlurmGPUError("model is empty; expected the path of a checkpoint, several of them, or a glob.")


def _check_own_model(settings: TracinSettings) -> None:
    given = [name for name in OWN_LOSS if getattr(settings, name) is not None]
    if settings.loss != "bce-pos":
        given.append("loss")
    if given:
        raise SlurmGPUError(
            f"{given[0]} is set, and architecture = {settings.architecture!r} is a model of your own, whose method "
            f"losses(triples) is all that is asked; leave {given[0]} out."
        )
    if settings.directions == "both":
        raise SlurmGPUError(
            'directions = "both" is for the models that tracin knows; let the losses of your own model be of both.'
        )
    if settings.precondition != "none":
        raise SlurmGPUError(
            f"precondition = {settings.precondition!r} is for the models that tracin knows; leave it out."
        )


def check_losses(settings: TracinSettings) -> None:
    """Refuse losses that there are not."""
    for name in ("loss", "test_loss"):
        value = getattr(settings, name)
        if value is not None and value not in LOSSES and not re.fullmatch(r"ns:[1-9]\d*", value):
            raise SlurmGPUError(
                f"{name} is {value!r}; expected one of {', '.join(LOSSES)}, or ns:K with K negatives, such as ns:64."
                + (did_you_mean(value, LOSSES) if not value.startswith("ns") else "")
            )
    if not 0 <= settings.label_smoothing < 1:
        raise SlurmGPUError(f"label_smoothing is {settings.label_smoothing}; expected at least 0 and less than 1.")


def check_amounts(settings: TracinSettings) -> None:
    """Refuse numbers that mean nothing."""
    limits = {"top_k": 0, "memory_mb": 1, "keep_mb": 0, "threads": 1, "n_hops": 1, "min_degree": 0}
    for name, least in limits.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise SlurmGPUError(f"{name} is {value}; expected at least {least}.")
    if settings.top_k == 0 and settings.n_hops is not None:
        raise SlurmGPUError("n_hops says which training triples are listed, and top_k = 0 lists none; set one of them.")
    rates = settings.learning_rate if isinstance(settings.learning_rate, list) else [settings.learning_rate]
    if any(rate is not None and not rate > 0 for rate in rates):
        raise SlurmGPUError(
            f"learning_rate is {settings.learning_rate}; expected more than 0, for every checkpoint or one for each."
        )
    if not settings.parameters:
        raise SlurmGPUError('parameters is empty; expected "all", "last", or names of parameters or their groups.')


def check_filter(settings: TracinSettings) -> None:
    """Refuse parts of the filter without the filter."""
    given = [name for name in FILTER if getattr(settings, name) not in (None, False)]
    given += ["preserve_test_edges"] if settings.preserve_test_edges is False else []
    if given and settings.n_hops is None:
        raise SlurmGPUError(f"{given[0]} refines the filter, and there is none without n_hops; set n_hops = 2, say.")
    for name in ("max_total_path_length", "strict_path_filtering"):
        if getattr(settings, name) and not settings.path_filtering:
            raise SlurmGPUError(f"{name} refines path_filtering; set path_filtering = true, or leave {name} out.")


def rates_for(settings: TracinSettings, paths: Sequence[str]) -> list[float | None]:
    """The learning rate that is set for each checkpoint; None where its file is to tell."""
    rate = settings.learning_rate
    if not isinstance(rate, list):
        return [rate] * len(paths)
    if len(rate) != len(paths):
        raise SlurmGPUError(
            f"learning_rate has {len(rate)} numbers, and model names {len(paths)} checkpoints ({_some(paths)}); "
            f"expected one for each, or one number for all."
        )
    return list(rate)


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
