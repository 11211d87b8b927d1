"""The results of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The results of a training; NaN is unknown. Metrics have names such as "val_loss" and "test_accuracy"."""

    steps: int
    epochs: float
    samples: int
    final: Mapping[str, float]
    """The last evaluation of each split, and "train_loss", the mean of the steps since the evaluation before."""
    best: Mapping[str, float]
    """The evaluation with the best metric."""
    best_step: int
    metric: str
    score: float
    """The best value of `metric`."""
    ended: str
    """"finished" or "early"."""
    curve_steps: Sequence[int]
    curve: Sequence[float]
    """The mean training loss of the steps up to each of `curve_steps`."""
    eval_steps: Sequence[int]
    eval_curve: Sequence[float]
    """`metric` at each evaluation."""
    wall_s: float
    """Seconds of all attempts without lost and repeated work, as in the fields below."""
    start_s: float
    """Before the first step: loading data, model, optimizer and checkpoint."""
    data_s: float
    """Waiting for batches; this and the next two exclude each attempt's first step."""
    compute_s: float
    communication_s: float
    evaluation_s: float
    checkpoint_s: float
    """For checkpoints and weights."""
    samples_per_s: float
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: int
    """The maximum over processes: GPU memory, or the resident memory of a CPU process, which may have trained other
    configurations before."""
    world_size: int
    batch_size: int
    resumed: int
    """How often the training was resumed."""
    n_parameters: int
