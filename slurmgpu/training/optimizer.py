"""The optimizer and its learning rate at each step, with loss scaling and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.batches import Position, StepPlan
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.user_methods import optional_method


class Stepper:
    """The optimizer of a training, and how it steps.

    The learning rate depends on the finished share of the training, so it is right for any number of processes.
    `user.scheduler(optimizer, n_steps)` replaces it: it counts steps of the size in `first`, the plan of the first
    attempt, and is stepped once for each such step. Warm-up steps have that size, too.
    """

    def __init__(
        self,
        user: Any,
        model: nn.Module,
        settings: TrainingSettings,
        step_plan: StepPlan,
        first: StepPlan,
    ) -> None:
        device = next(model.parameters()).device.type
        self.optimizer = make_optimizer(user, model, settings)
        self._settings = settings
        self._step_plan, self._first = step_plan, first
        self._n_scheduled = 0
        make_scheduler = optional_method(user, "scheduler")
        self._scheduler: Any = make_scheduler(self.optimizer, self._first.n_steps()) if make_scheduler else None
        if make_scheduler and not (hasattr(self._scheduler, "step") and hasattr(self._scheduler, "state_dict")):
            raise SlurmGPUError(
                f"{type(user).__name__}.scheduler(optimizer, n_steps) gave a {type(self._scheduler).__name__}; "
                "expected one of torch.optim.lr_scheduler. For a constant learning rate, leave the method out."
            )
        self._waits = isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._initial = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(device, enabled=settings.precision == "fp16")
        self._parameters = [each for group in self.optimizer.param_groups for each in group["params"]]

    def prepare(self, at: Position, done: int) -> None:
        """Set the learning rates of the step at a position, after `done` steps."""
        settings = self._settings
        self._n_scheduled = self._first.n_done(at, done)
        is_constant = settings.schedule == "constant" and not (settings.warmup_steps or settings.warmup_ratio)
        if self._scheduler is None and not is_constant:
            for group, initial in zip(self.optimizer.param_groups, self._initial, strict=True):
                group["lr"] = initial * lr_factor(settings, self._step_plan, at, done, initial, self._first)

    def step(self, at: Position, done: int) -> None:
        """Apply and clear the gradients of the step that `prepare` began; `at` and `done` are those after it."""
        if self._settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None and not self._waits:
            for _ in range(self._first.n_done(at, done) - self._n_scheduled):
                self._scheduler.step()

    def evaluated(self, value: float) -> None:
        """Pass the metric of an evaluation to ReduceLROnPlateau."""
        if self._waits:
            self._scheduler.step(value)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"scaler": self.scaler.state_dict(), "scheduler": self._scheduler and self._scheduler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state`."""
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if state["scheduler"] is not None and self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])


def make_optimizer(user: Any, model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """`user.optimizer(model)`, else the settings' optimizer of all parameters that require gradients."""
    if make := optional_method(user, "optimizer"):
        made = make(model)
        if not isinstance(made, torch.optim.Optimizer):
            raise SlurmGPUError(
                f"{type(user).__name__}.optimizer(model) gave a {type(made).__name__}; expected a "
                "torch.optim.Optimizer."
            )
        own = {id(each) for each in model.parameters() if each.requires_grad}
        given = [each for group in made.param_groups for each in group["params"]]
        # Otherwise they may be copies that it writes back, as torchao's CPUOffloadOptimizer does.
        are_of_a_model = all(isinstance(each, nn.Parameter) for each in given)
        if are_of_a_model and own.isdisjoint(map(id, given)):
            raise SlurmGPUError(
                f"{type(user).__name__}.optimizer(model) gave an optimizer without a trainable parameter of the model, "
                "so nothing would be learned. Give it those of its argument model."
            )
        return made
    parameters = [each for each in model.parameters() if each.requires_grad]
    fused = parameters[0].is_cuda and can_be_fused(model) if settings.fused is None else settings.fused
    arguments: dict[str, Any] = {"lr": settings.lr, "fused": fused or None}
    if settings.weight_decay is not None:
        arguments["weight_decay"] = settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, **arguments)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[settings.optimizer]
    return kind(parameters, betas=settings.betas, **arguments)


def can_be_fused(model: nn.Module) -> bool:
    """Whether a fused optimizer supports the model: PyTorch's support no complex parameters and no sparse gradients."""
    has_sparse = any(isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse for each in model.modules())
    return not has_sparse and all(each.is_floating_point() for each in model.parameters() if each.requires_grad)


def lr_factor(
    settings: TrainingSettings,
    step_plan: StepPlan,
    at: Position,
    done: int,
    largest: float,
    first: StepPlan,
) -> float:
    """The learning rate at a position as a share of `largest`.

    It rises during warm-up, from 0 one step before the first, then falls to min_lr at the end. Warm-up steps have the
    size of those in `first`.
    """
    share, step = step_plan.share_done(at, done), first.share_of(1)
    warmup = first.share_of(settings.warmup_steps) if settings.warmup_steps else settings.warmup_ratio
    if share < warmup:
        return (share + step) / (warmup + step)
    if settings.schedule == "constant":
        return 1.0
    rest = min(1.0, (share - warmup) / (1 - warmup)) if warmup < 1 else 1.0
    falling = 1 - rest if settings.schedule == "linear" else (1 + math.cos(math.pi * rest)) / 2
    least = min(1.0, settings.min_lr / largest) if largest else 0.0
    return least + (1 - least) * falling


def check_trainable(user: Any, model: Any) -> None:
    """Refuse other objects than modules, and modules without trainable parameters."""
    if not isinstance(model, nn.Module):
        raise SlurmGPUError(f"{type(user).__name__}.model() gave a {type(model).__name__}; expected a torch.nn.Module.")
    if not any(each.requires_grad for each in model.parameters()):
        raise SlurmGPUError(f"{type(user).__name__}.model() has no parameter that requires gradients.")


def n_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """The number of values in the parameters."""
    return sum(each.numel() for each in parameters)
