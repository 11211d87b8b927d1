"""The processes of one model: one alone, DDP or FSDP (not DataParallel, which PyTorch advises against)."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.training.blocks import checkpoint_blocks, find_blocks
from slurmgpu.training.ranks import Place
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.states import COMPILED, own_buffers, random_state, restored_buffers, set_random_state
from slurmgpu.training.user_methods import optional_method
from slurmgpu.util import compiled_code

log = logging.getLogger(__name__)

COLLECTIVE_LIMIT = timedelta(hours=2)
"""How long ranks wait for each other, e.g. for a compilation; deaths are noticed otherwise."""
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Forward(nn.Module):
    """The user's loss as a module, so that DDP and FSDP wrap it while `loss` gets the user's own model."""

    def __init__(self, user: Any, model: nn.Module, settings: TrainingSettings, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._loss, self._metrics = user.loss, optional_method(user, "metrics")
        low = LOW.get(settings.precision)
        self._precision = torch.autocast(device.type, low) if low is not None else contextlib.nullcontext()

    def forward(self, batch: Any, measure: bool = False) -> Any:
        """The loss of a batch; with `measure`, {name: value} of the loss and the metrics."""
        with self._precision:
            try:
                loss = self._loss(self.model, batch)
            except ValueError as error:
                if "Expected more than 1 value per channel" not in str(error):
                    raise
                raise ItemError(
                    f"{error}: batch normalisation cannot train on one sample. If one sample is left at an epoch's "
                    "end, set drop_last = true, or change batch_size"
                ) from error
            if not (isinstance(loss, torch.Tensor) and loss.dim() == 0 and (loss.requires_grad or measure)):
                raise SlurmGPUError(
                    f"loss(model, batch) gave {_describe(loss)}; expected a 0-dimensional tensor that depends on the "
                    "model's parameters: the mean loss over the batch's samples."
                )
            if not measure:
                return loss
            metrics = self._metrics(self.model, batch) if self._metrics else {}
        if not isinstance(metrics, Mapping):
            raise ItemError(f"metrics(model, batch) gave {_describe(metrics)}; expected a dict")
        if "loss" in metrics:
            raise ItemError(
                "metrics(model, batch) gave 'loss', the name that loss(model, batch) has in the results: rename it"
            )
        return {"loss": loss, **metrics}


class Strategy:
    """A model over all processes: `model` is the user's own, `forward(batch)` its loss, for backward as well."""

    def __init__(self, user: Any, model: nn.Module, settings: TrainingSettings, place: Place) -> None:
        self._place = place
        self.device = device_of(place)
        self.sharded = settings.strategy == "fsdp" and place.world_size > 1
        _check(settings, place, self.sharded)
        model = model.to(self.device)
        own_buffers(model)
        _check_buffers(model, place)
        if settings.gradient_checkpointing:
            checkpoint_blocks(user, model)
        if settings.sync_batchnorm and place.world_size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model
        self.plain = Forward(user, model, settings, self.device)
        self.forward: nn.Module = self.plain
        if self.sharded:
            _shard(user, self.plain, settings, place)
        elif place.world_size > 1:
            self.forward = _ddp(self.plain, settings, self.device)
        if settings.compile:
            if why := compiled_code.take_folder():
                log.warning("compiled code is not kept for other processes: %s", why)
                compiled_code.take_new_folder()
            # Compiled inside DDP, which splits the graph where a bucket of gradients is full.
            model.compile()
        self._needs_first_pass = isinstance(self.forward, DistributedDataParallel) and (
            place.world_size > 2 or settings.static_graph
        )

    @contextlib.contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        """A context for the passes of a micro-batch; the last one of a step sums gradients over processes."""
        if isinstance(self.forward, DistributedDataParallel) and not last:
            with self.forward.no_sync():
                yield
            return
        if self.sharded:
            self.forward.set_requires_gradient_sync(last)
        yield

    def first_pass(self, batch: Any) -> None:
        """Give DDP's gradient buckets their final order, which it changes after its first backward pass.

        The sum of more than two numbers depends on the order, so a resumed training would differ in the last bits.
        """
        if self._needs_first_pass:
            self._needs_first_pass = False
            with self.without_side_effects():
                for _ in range(2):  # the second forward pass makes the buckets
                    self.forward(batch).backward()

    @contextlib.contextmanager
    def without_side_effects(self) -> Iterator[None]:
        """A context for passes that leave gradients, running statistics and random numbers unchanged."""
        random = random_state(self.device)
        try:
            with restored_buffers(self.model):
                yield
        finally:
            self.model.zero_grad(set_to_none=True)
            set_random_state(random, self.device)

    def load_weights(self, path: Path) -> None:
        """Load a file of `save_weights` into the model; called by all ranks."""
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not self.sharded:
            names = {name.replace(COMPILED, ""): name for name in self.model.state_dict()}
            self.model.load_state_dict({names[name]: value for name, value in weights.items()})
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(self.model, weights, options=StateDictOptions(full_state_dict=True))

    def reshard(self) -> None:
        """Keep only this process's part of the parameters, as after a backward pass."""
        if self.sharded:
            for module in self.forward.modules():
                if hasattr(module, "reshard"):
                    module.reshard()

    def peak_memory(self, before: int) -> int:
        """The most GPU memory, or resident memory on CPUs, of any process and of `before`; called by all ranks."""
        if self.device.type == "cuda":
            own = torch.cuda.max_memory_allocated(self.device)
        else:
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        most = torch.tensor(max(own, before), device=self.device)
        if self._place.world_size > 1:
            distributed.all_reduce(most, distributed.ReduceOp.MAX)
        return int(most)


def device_of(place: Place) -> torch.device:
    """The device of this process."""
    device = torch.device(place.device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", place.local_rank)
    return device


def init_process_group(place: Place) -> None:
    """Create the process group if needed."""
    device = device_of(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # PyTorch reads it once, at the process's first matrix product (Context::alertCuBLASConfigNotDeterministic):
        # after a training without `deterministic`, or a product in the class's __init__, it would be too late.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if place.world_size > 1 and not distributed.is_initialized():
        bound = {"device_id": device} if device.type == "cuda" else {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        # The environment has the address, as set by torchrun.
        distributed.init_process_group(
            backend, rank=place.rank, world_size=place.world_size, timeout=COLLECTIVE_LIMIT, **bound
        )


def _describe(loss: Any) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    return f"a tensor of shape {tuple(loss.shape)}" if loss.dim() else "a tensor that depends on no parameter"


def _check(settings: TrainingSettings, place: Place, sharded: bool) -> None:
    if settings.sync_batchnorm and place.world_size > 1 and torch.device(place.device).type != "cuda":
        raise SlurmGPUError("sync_batchnorm works only on GPUs in PyTorch: leave it out on CPUs.")
    if settings.strategy == "fsdp" and not sharded:
        log.info('strategy = "fsdp" has no effect on one process')


def _check_buffers(model: nn.Module, place: Place) -> None:
    """Refuse sparse buffers on several processes: PyTorch's collectives, which share buffers, do not support them."""
    for name, buffer in model.named_buffers():
        if place.world_size > 1 and buffer.layout != torch.strided:
            raise SlurmGPUError(
                f"the model's buffer {name!r} is sparse, and DDP and FSDP cannot share sparse buffers: train on one "
                "process, or keep indices and values as two buffers and build the sparse tensor in forward()."
            )


def _check_gloo(place: Place) -> None:
    """Refuse FSDP on CPUs if gloo is too old."""
    if torch.device(place.device).type != "cpu":
        return
    # Renamed in torch 2.13.
    scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
    try:
        scatter(torch.zeros(1), torch.zeros(place.world_size))
    except RuntimeError as error:
        raise SlurmGPUError(
            f'strategy = "fsdp" does not work on CPUs with torch {torch.__version__}, whose gloo lacks reduce-scatter: '
            'use strategy = "ddp", or a newer torch.'
        ) from error


def _ddp(forward: Forward, settings: TrainingSettings, device: torch.device) -> DistributedDataParallel:
    options: dict[str, Any] = {}
    if settings.bucket_cap_mb is not None:
        options["bucket_cap_mb"] = settings.bucket_cap_mb
    return DistributedDataParallel(
        forward,
        device_ids=[device] if device.type == "cuda" else None,
        static_graph=settings.static_graph,
        find_unused_parameters=settings.find_unused_parameters,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        **options,
    )


def _shard(user: Any, forward: Forward, settings: TrainingSettings, place: Place) -> None:
    """Apply FSDP2 to the blocks and the rest: each process holds its part of the parameters."""
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.device(place.device).type, (place.world_size,))
    _check_gloo(place)
    low = LOW.get(settings.precision)
    # Autocast applies too: it casts inputs of the operations that need it, and nothing else.
    policy = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
    )
    for block in find_blocks(user, forward.model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(forward, mesh=mesh, mp_policy=policy)
