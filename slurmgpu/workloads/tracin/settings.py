"""The settings of `use = "tracin"`: types, defaults, and refused combinations.

docs/reference/tracin.md has a table of them. Nothing here reads a file: the merge and exports also build the workload,
and its files may be gone by then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.workloads.tracin.kge.parameter_names import Architecture, Inverse, Stack

ARCHITECTURES = get_args(Architecture)
LOSSES = ("bce-pos", "bce-1n", "kvsall", "ce", "score")
"""And "ns:K", with K negatives."""

Direction = Literal["tail", "both"]
Normalize = Literal["none", "train", "cosine"]
Precision = Literal["fp32", "fp64", "tf32", "bf16", "fp16"]
Precondition = Literal["none", "adam"]

CPU_MEMORY_MB, GPU_MEMORY_MB = 200, 4096
"""Working memory if memory_mb is not set."""

FILTER = "min_degree", "preserve_test_edges", "path_filtering", "max_total_path_length", "strict_path_filtering"
"""The settings that refine `n_hops`."""

OWN_LOSS = ("test_loss", "image", "stack", "inverse", "norm")
"""Settings that do not apply to a user's own model."""


@dataclass(kw_only=True, eq=False)
class TracinSettings:
    """The keys of `[settings]`; paths are relative to the run file."""

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
    path_filtering: bool = False
    max_total_path_length: int | None = None
    strict_path_filtering: bool = False
    planned: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if problem := next(_problems(self), None):
            raise SlurmGPUError(problem)

    @property
    def is_own_model(self) -> bool:
        """Whether `architecture` names a user's class."""
        return ":" in self.architecture

    def memory_mb_on(self, *, is_gpu: bool) -> int:
        """Working memory in addition to the models, in MB."""
        return self.memory_mb or (GPU_MEMORY_MB if is_gpu else CPU_MEMORY_MB)

    @property
    def is_reduced(self) -> bool:
        """Whether the precision is reduced; its errors are then measured."""
        return self.precision in ("tf32", "bf16", "fp16") and bool(self.top_k or self.full)

    @property
    def number_dtype(self) -> str:
        """The dtype of stored influences."""
        return "float64" if self.precision == "fp64" else "float32"


def _problems(settings: TracinSettings) -> Iterator[str]:
    yield from _problems_of_architecture(settings)
    if not settings.model:
        yield "model is empty; expected the path of a checkpoint, a list of paths, or a glob."
    for name in ("loss", "test_loss"):
        value = getattr(settings, name)
        if value is not None and value not in LOSSES and not re.fullmatch(r"ns:[1-9]\d*", value):
            expected = f"expected one of {', '.join(LOSSES)}, or ns:K with K negatives, such as ns:64."
            yield f"{name} is {value!r}; {expected}{'' if value.startswith('ns') else did_you_mean(value, LOSSES)}"
    if not 0 <= settings.label_smoothing < 1:
        yield f"label_smoothing is {settings.label_smoothing}; expected at least 0 and less than 1."
    yield from _wrong_amounts(settings)


def _problems_of_architecture(settings: TracinSettings) -> Iterator[str]:
    known, architecture = ("auto", *ARCHITECTURES), settings.architecture
    if settings.is_own_model:
        yield from _problems_of_own_model(settings)
    elif architecture not in known:
        expected = f"expected one of {', '.join(known)}, or file.py:Class for your own model."
        yield f"architecture is {architecture!r}; {expected}{did_you_mean(architecture, known)}"
    if architecture in ARCHITECTURES[1:] and (settings.image or settings.stack):
        yield f"image and stack are settings for ConvE, and architecture is {architecture!r}; remove them."
    if settings.norm not in (None, 1, 2):
        yield f"norm is {settings.norm:g}; expected 1 or 2, the p of TransE's distance."
    if architecture in ("conve", "distmult", "complex") and settings.norm is not None:
        yield f"norm is a setting for TransE, and architecture is {architecture!r}; remove norm."
    if settings.image is not None and (len(settings.image) != 2 or min(settings.image) < 1):
        yield f"image is {settings.image}; expected [height, width] of one embedding, such as [10, 20]."
    if settings.inverse == "none" and settings.directions == "both":
        yield 'directions = "both" needs inverse relations, and inverse is "none"; set only one of them.'


def _problems_of_own_model(settings: TracinSettings) -> Iterator[str]:
    given = [name for name in OWN_LOSS if getattr(settings, name) is not None]
    for name in [*given, *(["loss"] if settings.loss != "bce-pos" else [])]:
        yield f"{name} is set, but your own model's method losses(triples) defines the loss; remove {name}."
    if settings.directions == "both":
        yield 'directions = "both" works only with known architectures; let your own model\'s losses include both.'
    if settings.precondition != "none":
        yield f"precondition = {settings.precondition!r} works only with known architectures; remove it."


def _wrong_amounts(settings: TracinSettings) -> Iterator[str]:
    limits = {"top_k": 0, "memory_mb": 1, "keep_mb": 0, "threads": 1}
    limits |= {"n_hops": 1, "min_degree": 0, "max_total_path_length": 0}
    for name, least in limits.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            yield f"{name} is {value}; expected at least {least}."
    if settings.top_k == 0 and settings.n_hops is not None:
        yield "n_hops filters the listed training triples, and top_k = 0 lists none; set one of them."
    rates = settings.learning_rate if isinstance(settings.learning_rate, list) else [settings.learning_rate]
    numbers = [rate for rate in rates if rate is not None]
    if numbers and not (all(0 <= rate < math.inf for rate in numbers) and any(numbers)):
        expected = "expected more than 0, or a number for each checkpoint: none below 0, and at least one above 0"
        yield f"learning_rate is {settings.learning_rate}; {expected}."
    if not settings.parameters:
        yield 'parameters is empty; expected "all", "last", or names of parameters or their groups.'
    given = [name for name in FILTER if getattr(settings, name) not in (None, False)]
    given += ["preserve_test_edges"] if settings.preserve_test_edges is False else []
    if given and settings.n_hops is None:
        yield f"{given[0]} needs n_hops, which turns the filter on; set it, for example n_hops = 2."
    for name in ("max_total_path_length", "strict_path_filtering"):
        if getattr(settings, name) and not settings.path_filtering:
            yield f"{name} needs path_filtering = true; set that, or remove {name}."


def rates_for(settings: TracinSettings, paths: Sequence[str]) -> list[float | None]:
    """The learning rate from the settings for each checkpoint; None to read it from the file."""
    rate = settings.learning_rate
    if not isinstance(rate, list):
        return [rate] * len(paths)
    if len(rate) != len(paths):
        raise SlurmGPUError(
            f"learning_rate has {len(rate)} numbers, and model names {len(paths)} checkpoints "
            f"({', '.join(paths[:3])}{', …' if len(paths) > 3 else ''}); expected one for each, or one number for all."
        )
    return list(rate)
