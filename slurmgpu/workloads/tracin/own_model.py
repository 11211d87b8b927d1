"""A model of the user's own class, for tracin: built, loaded from its checkpoint, tested. Imports torch at the top."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurmgpu import workload
from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence.layered import of_module
from slurmgpu.influence.models import Differentiable
from slurmgpu.workloads.tracin.kge.checkpoints import expect_finite, read_content
from slurmgpu.workloads.tracin.kge.graph import Graph
from slurmgpu.workloads.tracin.kge.naming import group_of, unwrapped
from slurmgpu.workloads.tracin.kge.peeking import state_of
from slurmgpu.workloads.user_code import located

N_TRIED = 2
"""Training triples for the test of `losses`; with one triple a mean would pass."""

ADVICE = (
    "Expected a class that is built with n_entities and n_relations, and whose losses(triples) takes integers (n, 3) "
    "and returns (n,)."
)


@dataclass(frozen=True)
class Place:
    """A device, the dtype, and the training triples on the device."""

    device: str
    dtype: torch.dtype
    train: Tensor


def own_model(architecture: str, path: str, known: Graph, place: Place) -> Differentiable:
    """The model of `architecture`, "file.py:Class", loaded from the checkpoint at `path`, on its device."""
    file = Path(architecture.rpartition(":")[0]).expanduser().resolve()
    cls = _class_in(file, architecture)
    with located(f"{cls.__name__}(n_entities=…, n_relations=…)", str(file), ADVICE):
        module: nn.Module = cls(n_entities=known.entities.size, n_relations=known.relations.size)
    state = state_of(read_content(path), path)
    module = module.to(place.dtype)  # before loading: weights may be float64
    try:
        module.load_state_dict({name: state[key] for name, key in unwrapped(state).items()})
    except RuntimeError as error:
        raise SlurmGPUError(f"{path} does not fit {architecture}: {error}") from error
    for name, values in module.named_parameters():  # a buffer may be a mask of infinities
        expect_finite(values, name, path)
    module = module.to(place.device).eval()
    _try_losses(module, file, place.train)
    with located(f"the method losses of {cls.__name__}", str(file), ADVICE):
        model = of_module(module, place.train)
    # As at planning, which sees only names in the checkpoint.
    model.groups = {parameter: group_of(parameter) for parameter in model.parameters_by_name()}
    return model


def _class_in(file: Path, architecture: str) -> Any:
    name = architecture.rpartition(":")[2]
    with located(f"the import of {file.name}", str(file), ADVICE):
        cls = getattr(workload.import_file(file), name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and callable(getattr(cls, "losses", None))):
        raise SlurmGPUError(
            f"architecture = {architecture!r}: expected a class {name} in {file} that is a torch.nn.Module with a "
            f"method losses(triples), which returns a loss for each row of head, relation and tail."
        )
    return cls


def _try_losses(module: nn.Module, file: Path, train: Tensor) -> None:
    triples = train[torch.arange(N_TRIED, device=train.device) % len(train)]
    what = f"the method losses of {type(module).__name__}"
    with torch.no_grad(), located(what, str(file), ADVICE):
        losses = module.losses(triples)
    found = f"a tensor {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
    if not isinstance(losses, Tensor) or losses.shape != (len(triples),):
        raise SlurmGPUError(
            f"{file}: {what} returns {found} for {len(triples)} triples; expected a tensor ({len(triples)},), a loss "
            f"for each triple, without a mean or a sum."
        )
