"""What a training knows of itself: how far it is, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmgpu.training.batches import Position


@dataclass(frozen=True)
class Outcome:
    """What came of a training. NaN is unknown. Evaluations have names as "val_loss", "val_accuracy", "test_loss"."""

    steps: int
    epochs: float
    samples: int
    final: Mapping[str, float]
    """The last evaluation of each split, and "train_loss", the mean of the learning curve's last point."""
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
    """Mean training loss of the steps up to each of `curve_steps`."""
    eval_steps: Sequence[int]
    eval_curve: Sequence[float]
    """`metric` at each evaluation."""
    wall_s: float
    """Of all attempts together, without what was lost and computed again; so are the others."""
    start_s: float
    """Before the first step: for the data, the model, the optimizer, and what a checkpoint brought back."""
    data_s: float
    """Waiting for batches; this one and the next two are those of all steps but each attempt's first."""
    compute_s: float
    communication_s: float
    evaluation_s: float
    checkpoint_s: float
    """For checkpoints and weights."""
    samples_per_s: float
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: int
    """The largest of all processes: of the GPU; of a CPU the resident set, since the process began, in which other
    configurations may have been trained before."""
    world_size: int
    batch_size: int
    resumed: int
    """How often it was taken up again."""
    n_parameters: int


@dataclass
class Standing:
    """How far a training is, and what that has taken."""

    step: int = 0
    epoch: int = 0
    sample: int = 0
    """Of the epoch."""
    samples: int = 0
    evaluated: int = 0
    """The step of the last evaluation."""
    early: bool = False
    final: dict[str, float] = field(default_factory=dict)
    """That evaluation."""
    wall_s: float = 0.0
    start_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    peak_memory_bytes: int = 0
    resumed: int = 0

    @property
    def position(self) -> Position:
        """Where the next step begins."""
        return Position(self.epoch, self.sample)

    def tell(self, n_epochs: int | None) -> str:
        """How far it is: "epoch 3 of 10, step 1,200"."""
        number = self.epoch + (self.sample > 0 or self.epoch == 0)
        of = f" of {n_epochs}" if n_epochs else ""
        return f"epoch {number}{of}, step {self.step:,}"
