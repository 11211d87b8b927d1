"""The optimizer, its learning rate at each step, and the step itself: unscaled, clipped, skipped if fp16 overflows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.batches import Cutting, Position
from slurmgpu.training.settings import TrainingSettings


class Stepper:
    """The optimizer of a training with all that goes with a step of it.

    The learning rate is a function of the share of the training that is done, so that it is right on another number of
    processes too; `user.scheduler(optimizer, n_steps)` takes its place.
    """

    def __init__(self, user: Any, model: nn.Module, settings: TrainingSettings, cutting: Cutting) -> None:
        device = next(model.parameters()).device.type
        self.optimizer = make_optimizer(user, model, settings)
        self._settings = settings
        self._cutting = cutting
        make_scheduler = getattr(user, "scheduler", None)
        self._scheduler: Any = make_scheduler(self.optimizer, cutting.n_steps()) if make_scheduler else None
        if make_scheduler and not (hasattr(self._scheduler, "step") and hasattr(self._scheduler, "state_dict")):
            raise SlurmGPUError(
                f"{type(user).__name__}.scheduler(optimizer, n_steps) gave a {type(self._scheduler).__name__}; it "
                "shall be one of torch.optim.lr_scheduler. For a constant learning rate leave the method out."
            )
        self._waits = isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._initial = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(device, enabled=settings.precision == "fp16")
        self._parameters = [each for group in self.optimizer.param_groups for each in group["params"]]

    def prepare(self, at: Position, done: int) -> None:
        """Set the learning rates of the step that begins at a position, with `done` steps before it."""
        if self._scheduler is None and (self._settings.schedule != "constant" or self._warms_up):
            for group, initial in zip(self.optimizer.param_groups, self._initial, strict=True):
                group["lr"] = initial * lr_factor(self._settings, self._cutting, at, done, initial)

    def step(self) -> None:
        """Apply the gradients, and forget them."""
        if self._settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None and not self._waits:
            self._scheduler.step()

    def evaluated(self, value: float) -> None:
        """Tell a scheduler that waits for it, ReduceLROnPlateau, the metric of an evaluation."""
        if self._waits:
            self._scheduler.step(value)

    def state(self) -> dict[str, Any]:
        """What is kept with a checkpoint beside the optimizer's own state."""
        return {"scaler": self.scaler.state_dict(), "scheduler": self._scheduler and self._scheduler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Put a `state` back."""
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if state["scheduler"] is not None and self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])

    @property
    def _warms_up(self) -> bool:
        return bool(self._settings.warmup_steps or self._settings.warmup_ratio)


def make_optimizer(user: Any, model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """`user.optimizer(model)`, else the one of the settings over the parameters that require gradients."""
    if make := getattr(user, "optimizer", None):
        made = make(model)
        if not isinstance(made, torch.optim.Optimizer):
            raise SlurmGPUError(
                f"{type(user).__name__}.optimizer(model) gave a {type(made).__name__}; it shall be a "
                "torch.optim.Optimizer."
            )
        return made
    parameters = [each for each in model.parameters() if each.requires_grad]
    fused = parameters[0].is_cuda if settings.fused is None else settings.fused
    arguments: dict[str, Any] = {"lr": settings.lr, "fused": fused or None}
    if settings.weight_decay is not None:
        arguments["weight_decay"] = settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, **arguments)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[settings.optimizer]
    return kind(parameters, betas=settings.betas, **arguments)


def lr_factor(
    settings: TrainingSettings, cutting: Cutting, at: Position, done: int, largest: float | None = None
) -> float:
    """The learning rate of the step at a position, over the `largest`, which is the settings' if not given.

    It rises in the warm-up, as if from 0 one step before the first, and falls over the rest, to min_lr at the end.
    """
    share, step = cutting.share_done(at, done), cutting.share_of_step
    warmup = cutting.share_of(settings.warmup_steps) if settings.warmup_steps else settings.warmup_ratio
    if share < warmup:
        return (share + step) / (warmup + step)
    if settings.schedule == "constant":
        return 1.0
    rest = min(1.0, (share - warmup) / (1 - warmup)) if warmup < 1 else 1.0
    falling = 1 - rest if settings.schedule == "linear" else (1 + math.cos(math.pi * rest)) / 2
    largest = settings.lr if largest is None else largest
    least = min(1.0, settings.min_lr / largest) if largest else 0.0
    return least + (1 - least) * falling


def check_trainable(user: Any, model: Any) -> None:
    """Refuse what is no model, or has nothing to train."""
    if not isinstance(model, nn.Module):
        raise SlurmGPUError(
            f"{type(user).__name__}.model() gave a {type(model).__name__}; it shall be a torch.nn.Module."
        )
    if not any(each.requires_grad for each in model.parameters()):
        raise SlurmGPUError(f"{type(user).__name__}.model() has no parameter that requires gradients.")


def n_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers they are."""
    return sum(each.numel() for each in parameters)
