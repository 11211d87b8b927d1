"""The settings of a training, without torch: they are checked on login nodes. Table: docs/reference/training.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
StrategyName = Literal["auto", "ddp", "fsdp"]
Schedule = Literal["constant", "linear", "cosine"]
Optimizer = Literal["adamw", "adam", "sgd"]
Goal = Literal["min", "max"]
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How to train a model, with PyTorch's names and defaults where it has them. One of `epochs` and `steps` is given.

    A step of the optimizer takes `global_batch_size` samples, or batch_size × processes × accumulation.
    """

    epochs: int | None = None
    steps: int | None = None

    # The batch
    batch_size: int | Literal["auto"] = 32
    """Samples per forward pass of one process; "auto": the largest number that fits and divides its share of a step."""
    global_batch_size: int | None = None
    """Samples per step over all processes; replaces accumulation."""
    accumulation: int = 1
    drop_last: bool = False
    """Drop samples at an epoch's end that do not fill a step."""

    # The optimizer; replaced by the class's own methods `optimizer` and `scheduler`
    optimizer: Optimizer = "adamw"
    lr: float = 1e-3
    weight_decay: float | None = None
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    fused: bool | None = None
    """PyTorch's fused optimizer; None: on GPUs."""
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    """The share of the training during which the learning rate rises from 0."""
    min_lr: float = 0.0
    """The final learning rate of a linear or cosine schedule."""
    clip: float | None = None
    """The largest norm of the gradient."""

    # How it is computed
    precision: Precision = "fp32"
    compile: bool = False
    strategy: StrategyName = "auto"
    gradient_checkpointing: bool = False
    sync_batchnorm: bool = False
    bucket_cap_mb: float | None = None
    static_graph: bool = False
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    deterministic: bool = False
    threads: int | None = None

    # What is watched
    metric: str | None = None
    """Ranks epochs and configurations: "val_loss", "val_accuracy"; None: val_loss, else train_loss."""
    goal: Goal | None = None
    """None: "min" if the last word of the metric's name, before a final `rate`, is in `LESS`, else "max"."""
    patience: int | None = None
    """Evaluations without improvement after which training stops."""
    min_delta: float = 0.0
    eval_steps: int | None = None
    """None: evaluate at each epoch's end."""
    log_steps: int | None = None
    """Steps per point of the learning curve; None: at most 500 points."""

    # The loader
    num_workers: int = 0
    pin_memory: bool | None = None
    """None: on GPUs."""
    prefetch_factor: int | None = None

    seed: int | None = None
    """None: derived from the run's seed and the item's index."""
    checkpoint_s: float | None = None
    """Seconds between checkpoints; None: 600 s or more, so that they cost at most 1 %. At an epoch's end one is saved
    if that costs at most 0.5 %."""
    keep_checkpoints: int = 2
    keep_best: bool = True
    """Keep the best weights besides the last ones; they need memory on rank 0's host."""


LESS = re.compile(r".*loss|error|err|perplexity|ppl|mse|rmse|mae|mape|nll|ce|kl|wer|cer|eer|fid|bpb|bpc")
"""Last words of names of metrics that should be small."""


def goal_of(metric: str, goal: Goal | None = None) -> Goal:
    """The given goal, else that of the metric's name."""
    last = metric.lower().removesuffix("_rate").rpartition("_")[2]
    return goal or ("min" if LESS.fullmatch(last) else "max")
