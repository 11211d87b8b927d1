"""Load a run's models on a device, for influences. Imports torch at the top."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence.gradcheck import check_gradients
from slurmgpu.influence.gradients import Differentiable, Side
from slurmgpu.influence.influences import Checkpoint, Influences, Options
from slurmgpu.influence.layered import of_module
from slurmgpu.workloads.tracin.kge.checkpoints import adam_weights, expect_finite, load_checkpoint, read_content
from slurmgpu.workloads.tracin.kge.conve import ConvE
from slurmgpu.workloads.tracin.kge.differentiable import differentiable
from slurmgpu.workloads.tracin.kge.graph import Graph
from slurmgpu.workloads.tracin.kge.layouts import Layout
from slurmgpu.workloads.tracin.kge.losses import Loss, find_loss
from slurmgpu.workloads.tracin.kge.parameter_names import group_of, unwrapped
from slurmgpu.workloads.tracin.kge.queries import Known, rows_of, with_rows
from slurmgpu.workloads.tracin.kge.shallow import ComplEx, DistMult, TransE
from slurmgpu.workloads.tracin.kge.torch_archive import state_of
from slurmgpu.workloads.tracin.own_class import ADVICE, class_of
from slurmgpu.workloads.tracin.planning import Planned, layout_of, rates_line, wanted_parameters
from slurmgpu.workloads.tracin.settings import TracinSettings
from slurmgpu.workloads.user_code import located

log = logging.getLogger(__name__)

MODELS: Mapping[str, Any] = {"conve": ConvE, "distmult": DistMult, "complex": ComplEx, "transe": TransE}

N_TRIED = 2
"""The number of training triples for the test of `losses`; with one triple a mean would pass."""


@dataclass(frozen=True)
class Place:
    """A device, the dtype, and the training triples on the device."""

    device: str
    dtype: torch.dtype
    train: Tensor


def open_influences(settings: TracinSettings, planned: Planned, known: Graph, device: str) -> Influences:
    """The influences of a run's training triples, with all checkpoints on the device and probed."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    dtype = torch.float64 if settings.precision == "fp64" else torch.float32
    place = Place(device, dtype, torch.from_numpy(known.train).to(device))
    checkpoints, wanted = [], []
    for path, rate in zip(planned.checkpoints, planned.learning_rates, strict=True):
        weights: dict[str, Tensor] | None = None
        if settings.is_own_model:
            model = own_model(settings.architecture, path, known, place)
        else:
            layout = layout_of(settings, path, known)
            model = known_model(settings, layout, path, known, place)
            if settings.precondition == "adam":
                weights = {name: w.to(device, dtype) for name, w in adam_weights(path, layout).items()}
        wanted = wanted_parameters(settings.parameters, planned.architecture, list(model.parameters_by_name()))
        weights = weights and {name: weights[name] for name in wanted}
        check_gradients(model, place.train, wanted, weights)
        checkpoints.append(Checkpoint(model, rate, weights))
    parameters = checkpoints[-1].model.parameters_by_name()
    n_wanted, n_all = (sum(parameters[name].numel() for name in names) for names in (wanted, parameters))
    log.info("%s", rates_line(planned))
    log.info("gradients by %s of the model's %s parameters: %s", f"{n_wanted:,}", f"{n_all:,}", ", ".join(wanted))
    influences = Influences(checkpoints, place.train, _options(settings, wanted, len(known.train), device))
    if set(influences.groups) - set(planned.groups):
        raise SlurmGPUError(
            f"The model has the parameter groups {', '.join(influences.groups)}, but the run was planned with "
            f"{', '.join(planned.groups)}. Plan a new run."
        )
    log.info("%d training triples, %d chunks of up to %d", len(known.train), influences.n_chunks, influences.chunk_size)
    return influences


def known_model(settings: TracinSettings, layout: Layout, path: str, known: Graph, place: Place) -> Differentiable:
    """A model of a known architecture, with the losses from the settings, on its device."""
    module = MODELS[layout.architecture].from_layout(layout).to(place.dtype)  # before loading: weights may be float64
    unmatched = module.load_state_dict(load_checkpoint(path, layout), strict=False)
    assert all(name.endswith("num_batches_tracked") for name in unmatched.missing_keys), unmatched
    module = module.to(place.device).eval()
    rows, inverse_rows = rows_of(layout.inverse, known.relations.size)
    rows = rows.to(place.device)
    inverse_rows = inverse_rows.to(place.device) if settings.directions == "both" and inverse_rows is not None else None

    def find(name: str) -> Loss:
        return find_loss(
            name,
            n_entities=layout.n_entities,
            known=lambda: Known(with_rows(place.train, rows, inverse_rows), layout.n_relations),
            label_smoothing=settings.label_smoothing,
            seed=0,
        )

    losses: Mapping[Side, Loss] = {"train": find(settings.loss), "test": find(settings.test_loss or settings.loss)}
    return differentiable(module, losses, rows, inverse_rows, place.train[0])


def _options(settings: TracinSettings, wanted: Sequence[str], n_train: int, device: str) -> Options:
    is_gpu = torch.device(device).type == "cuda"
    free_bytes = torch.cuda.mem_get_info(device)[0] if is_gpu else 0
    keep_bytes = free_bytes // 2 if settings.keep_mb is None else settings.keep_mb * 10**6
    return Options(
        tuple(wanted),
        min(settings.top_k, n_train),
        settings.normalize,
        settings.precision,
        settings.memory_mb_on(is_gpu=is_gpu) * 10**6,
        keep_bytes,
        settings.full,
    )


def own_model(architecture: str, path: str, known: Graph, place: Place) -> Differentiable:
    """The model of `architecture`, "file.py:Class", loaded from the checkpoint at `path`, on its device."""
    cls, file = class_of(architecture)
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
    # The same groups as at planning, which does not read a class's own groups.
    model.groups = {parameter: group_of(parameter) for parameter in model.parameters_by_name()}
    return model


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
