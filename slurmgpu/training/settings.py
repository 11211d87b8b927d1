"""The settings of a training: their types, defaults and meanings, and which cannot go together.

docs/reference/training.md has them as a table. Checked on login nodes, so nothing here imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Strategy = Literal["auto", "ddp", "fsdp"]
Schedule = Literal["constant", "linear", "cosine"]
Optimizer = Literal["adamw", "adam", "sgd"]
Goal = Literal["min", "max"]
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a model is trained; names and defaults are PyTorch's where it has them. One of `epochs` and `steps` is given.

    A step is one of the optimizer: of `global_batch_size` samples, or batch_size × processes × accumulation.
    """

    epochs: int | None = None
    steps: int | None = None

    # The batch
    batch_size: int | Literal["auto"] = 32
    """Samples of a forward pass of one process; "auto": as many as fit, of those that divide its share of a step."""
    global_batch_size: int | None = None
    """Samples of a step, on however many processes; takes the place of accumulation."""
    accumulation: int = 1
    drop_last: bool = False
    """Leave out the samples at an epoch's end that make no whole step."""

    # The optimizer; a class with a method `optimizer` or `scheduler` has its own
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
    """The share of the training in which the learning rate rises from 0."""
    min_lr: float = 0.0
    """Where a linear or cosine schedule ends."""
    clip: float | None = None
    """The gradient's largest norm."""

    # How it is computed
    precision: Precision = "fp32"
    compile: bool = False
    strategy: Strategy = "auto"
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
    """By what epochs and configurations are ranked: "val_loss", "val_accuracy"; None: val_loss, else train_loss."""
    goal: Goal | None = None
    """None: "min" for a loss, an error, a perplexity, by the name's last word (`LESS`); "max" for others."""
    patience: int | None = None
    """Evaluations without a better metric after which training stops."""
    min_delta: float = 0.0
    eval_steps: int | None = None
    """None: the evaluation is at each epoch's end."""
    log_steps: int | None = None
    """The steps of a point of the learning curve; None: so many that there are at most 500 points."""

    # The loader
    num_workers: int = 0
    pin_memory: bool | None = None
    """None: for GPUs."""
    prefetch_factor: int | None = None

    seed: int | None = None
    """None: the item's own, of the run's seed and its index."""
    checkpoint_s: float | None = None
    """None: 600 s, or as seldom as keeps the cost of checkpoints at 1 %; given, it is taken as it is. At the ends of
    epochs, if that costs 0.5 %."""
    keep_checkpoints: int = 2
    keep_best: bool = True
    """Keep the weights of the best evaluation beside the last ones; they are held in the memory of rank 0's host."""


LESS = re.compile(r".*loss|error|err|perplexity|ppl|mse|rmse|mae|mape|nll|ce|kl|wer|cer|eer|fid|bpb|bpc")
"""The last word of what a metric is called of which less is better."""


def goal_of(metric: str, goal: Goal | None = None) -> Goal:
    """Whether less or more of a metric is better: as it is set, else by the metric's name."""
    last = metric.lower().rpartition("_")[2]
    return goal or ("min" if LESS.fullmatch(last) else "max")
