"""Checks of the settings of `use = "train"`, from `[settings]` or items: types of values, and conflicts.

The settings are those of `slurmgpu.training.settings.TrainingSettings`. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.loader.settings import in_our_words
from slurmgpu.training.settings import TrainingSettings

HINTS: Mapping[str, Any] = typing.get_type_hints(TrainingSettings)

OF_DDP = ("bucket_cap_mb", "static_graph", "find_unused_parameters", "gradient_as_bucket_view")

LEAST = {
    **dict.fromkeys(("epochs", "steps", "batch_size", "global_batch_size", "accumulation", "threads"), 1),
    **dict.fromkeys(("patience", "eval_steps", "log_steps", "prefetch_factor", "keep_checkpoints"), 1),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "min_lr", "min_delta", "num_workers", "seed"), 0),
    **dict.fromkeys(("lr", "weight_decay", "momentum", "checkpoint_s"), 0),
}
"""The smallest value of each numeric setting."""

ELSEWHERE = {
    "lr": "learning_rate lrate",
    "batch_size": "per_device_train_batch_size per_gpu_batch_size micro_batch_size train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size total_batch_size effective_batch_size",
    "accumulation": "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accumulation",
    "epochs": "num_epochs num_train_epochs n_epochs max_epochs",
    "steps": "max_steps num_steps n_steps total_steps num_train_steps max_iters",
    "clip": "max_grad_norm clip_grad_norm clip_grad gradient_clip_val gradient_clip gradient_clipping grad_clip",
    "weight_decay": "wd decay l2",
    "optimizer": "optim",
    "betas": "beta adam_betas adam_beta1 adam_beta2",
    "schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule",
    "warmup_steps": "warmup num_warmup_steps",
    "precision": "amp dtype autocast mixed_precision torch_dtype bf16 fp16 tf32",
    "compile": "torch_compile",
    "gradient_checkpointing": "activation_checkpointing grad_checkpointing checkpointing",
    "strategy": "ddp fsdp distributed parallel",
    "sync_batchnorm": "sync_bn",
    "num_workers": "workers n_workers dataloader_num_workers",
    "pin_memory": "dataloader_pin_memory",
    "metric": "monitor metric_for_best_model",
    "goal": "mode greater_is_better",
    "patience": "early_stopping early_stopping_patience",
    "eval_steps": "eval_every eval_interval val_check_interval",
    "log_steps": "logging_steps log_every log_every_n_steps",
    "checkpoint_s": "save_steps save_every checkpoint_every checkpoint_steps",
    "keep_checkpoints": "save_total_limit",
    "threads": "num_threads n_threads",
    "seed": "random_seed random_state manual_seed",
}
"""The names of settings in other frameworks."""

_OF_OPTIMIZER = ("optimizer", "lr", "weight_decay", "momentum", "betas", "fused")
_OF_SCHEDULER = ("schedule", "warmup_steps", "warmup_ratio", "min_lr")
TAKEN_OVER: Mapping[str, str] = {
    **dict.fromkeys(_OF_OPTIMIZER, "optimizer"),
    **dict.fromkeys(_OF_SCHEDULER, "scheduler"),
}
"""The settings that have no effect if the class has the method named here."""

_NUMBERS = {int: "a whole number", float: "a number"}


def typed(name: str, value: Any) -> Any:
    """A setting's value in the right type, converted if it is a text from a CSV file."""
    hint = HINTS[name]
    kinds = _kinds(hint)
    for candidate in (value, _out_of_text(value)):
        for kind in kinds:
            found, fits = _as_kind(candidate, kind)
            if fits:
                return found
    raise SlurmGPUError(f"{name} is {json.dumps(value, default=str)}; expected {_described(kinds)}.{several(value)}")


def several(value: Any) -> str:
    """The advice for a list or a distribution where one value is expected."""
    return " To train once for each value, put them into [sweep]." if isinstance(value, list | Mapping) else ""


def takes_none(name: str) -> bool:
    """Whether a setting may be None."""
    return type(None) in _kinds(HINTS[name])


def check_each(given: Mapping[str, Any]) -> None:
    """Refuse numbers out of range, independently of other settings."""
    if problem := next(_wrong_numbers(TrainingSettings(**given)), None):
        raise SlurmGPUError(problem)


def check(given: Mapping[str, Any]) -> TrainingSettings:
    """The settings of one training; SlurmGPUError for conflicts."""
    settings = TrainingSettings(**given)
    if problem := next(chain(_wrong_numbers(settings), _conflicts(settings, given)), None):
        raise SlurmGPUError(problem)
    return settings


def _wrong_numbers(settings: TrainingSettings) -> Iterator[str]:
    for name, least in LEAST.items():
        value = getattr(settings, name)
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= least):
            yield f"{name} is {value}; expected at least {least}."
    for name in ("clip", "bucket_cap_mb"):
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            yield f"{name} is {value}; expected more than 0, or remove it."
    if settings.warmup_ratio > 1:
        yield f"warmup_ratio is {settings.warmup_ratio}; expected a share of the training, 0 to 1."
    if not all(0 <= beta < 1 for beta in settings.betas):
        yield f"betas are {list(settings.betas)}; expected two numbers of at least 0 and less than 1."


def _conflicts(settings: TrainingSettings, given: Mapping[str, Any]) -> Iterator[str]:
    if settings.epochs is None and settings.steps is None:
        yield "The length of the training is missing; set epochs or steps, for example epochs = 10."
    if settings.epochs is not None and settings.steps is not None:
        yield f"epochs = {settings.epochs} and steps = {settings.steps} both set the training's length; remove one."
    if settings.global_batch_size is not None and settings.accumulation > 1:
        yield f"global_batch_size determines accumulation; remove accumulation = {settings.accumulation}."
    yield from _conflicts_of_optimizer(settings, given)
    if settings.static_graph and settings.find_unused_parameters:
        yield "static_graph finds unused parameters once, find_unused_parameters at every step; remove one."
    if settings.strategy == "fsdp" and settings.precision == "fp16":
        yield 'precision = "fp16" needs loss scaling, which strategy = "fsdp" does not have; set precision = "bf16".'
    for name in OF_DDP if settings.strategy == "fsdp" else ():
        if given.get(name):
            yield f'{name} is a setting of DDP, and strategy is "fsdp"; remove {name}.'
    if settings.prefetch_factor is not None and settings.num_workers == 0:
        yield "prefetch_factor needs data loader workers; set num_workers, or remove prefetch_factor."


def _conflicts_of_optimizer(settings: TrainingSettings, given: Mapping[str, Any]) -> Iterator[str]:
    if settings.optimizer == "sgd" and "betas" in given:
        yield 'betas are settings of Adam, and optimizer = "sgd" has momentum; remove betas.'
    if settings.optimizer != "sgd" and settings.momentum:
        yield f'momentum needs optimizer = "sgd", and "{settings.optimizer}" has betas instead; remove momentum.'
    if settings.min_lr and settings.schedule == "constant":
        yield 'min_lr needs a schedule, and schedule is "constant"; set schedule = "cosine", or remove min_lr.'
    if settings.min_lr > settings.lr:
        yield f"min_lr = {settings.min_lr:g} is more than lr = {settings.lr:g}; expected less."
    if settings.warmup_steps and settings.warmup_ratio:
        yield "warmup_steps and warmup_ratio both set the length of the warmup; remove one."


def meant(name: str, arguments: Iterable[str]) -> str:
    """Advice for a name that is neither a setting nor an argument of the class."""
    plain = name.lower().replace("-", "_").rpartition("arguments.")[2]
    arguments = [*arguments]
    if plain != name and (plain in HINTS or plain in arguments):
        return f" Write {plain} instead."
    if (ours := in_our_words(plain, ELSEWHERE, HINTS)) is not None:
        return f" Here it is called {ours!r}."
    if (found := did_you_mean(name, [*HINTS, *arguments])).startswith(" Did"):  # not the list of all fifty names
        return found
    takes = f"The class takes {', '.join(arguments)}; the" if arguments else "The"
    return f" {takes} settings are in docs/reference/training.md."


def _kinds(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(kind for part in typing.get_args(hint) for kind in _kinds(part))
    return (hint,)


def _as_kind(value: Any, kind: Any) -> tuple[Any, bool]:
    if kind is type(None):
        return None, value is None
    if typing.get_origin(kind) is typing.Literal:
        return value, isinstance(value, str) and value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(kind)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            return value, False
        found = [_as_kind(each, part) for each, part in zip(value, parts, strict=True)]
        return tuple(each for each, _ in found), all(fits for _, fits in found)
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number else value, is_number
    if kind is int and isinstance(value, float) and value.is_integer():  # Parquet: integers with missing values
        return int(value), True
    return value, isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _out_of_text(value: Any) -> Any:
    """A text parsed as JSON, or as True or False; else the text itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads({"True": "true", "False": "false"}.get(value.strip(), value))
    except (ValueError, RecursionError):
        return value


def _described(kinds: tuple[Any, ...]) -> str:
    words = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            words += [json.dumps(each) for each in typing.get_args(kind)]
        elif typing.get_origin(kind) is tuple:
            words.append(f"{len(typing.get_args(kind))} numbers, as [0.9, 0.999]")
        elif kind is bool:
            words.append("true or false")
        elif kind is str:
            words.append("a text")
        elif kind is not type(None):
            words.append(_NUMBERS[kind])
    return " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
