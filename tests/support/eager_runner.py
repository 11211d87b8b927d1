"""A runner of steps for machines without CUDA graphs."""

from typing import Any


class EagerRunner:
    """Computes each step by a call of the forward pass."""

    def run(self, frame: Any, forward: Any) -> None:
        """Set the frame's logits."""
        frame.compute(forward)
