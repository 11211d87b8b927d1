"""The forward pass of a step with torch.compile, compared with the eager one in each size before it is used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.transformers_engine.selfcheck import miss
from slurmgpu.llm.transformers_engine.slots import Forward, Frame
from slurmgpu.util import compiled_code
from slurmgpu.util.exceptions import described

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

LIMIT_S = 300.0
"""The total seconds of compiling after which no further step sizes are compiled."""


class Compiled:
    """A forward pass, compiled as a whole and for all step sizes at once, except one row.

    `bound` is how far scores may be from those of the eager pass, as a share of their range.
    """

    def __init__(self, forward: Forward, bound: float, backend: str | Callable[..., Any] = "inductor") -> None:
        self.reason = compiled_code.take_folder()
        """Why it is no longer used; None if it is."""
        self._function, self._bound = forward, bound
        if self.reason is not None:
            log.warning("steps are not compiled: %s", self.reason)
        else:
            import torch

            # Constant sizes would be compiled one by one, for minutes each.
            self._function = torch.compile(forward, fullgraph=True, dynamic=True, backend=backend)
        self.seconds = 0.0

    def instead_of(self, forward: Forward, frame: Frame, expected: Tensor) -> Forward:
        """The compiled pass, or `forward` if compiling fails for this frame; `expected` are the scores of `forward`."""
        if self.reason is not None:
            return forward
        started = time.monotonic()
        self.reason = self._try(frame, expected)
        self.seconds += time.monotonic() - started
        if self.reason is not None:
            log.warning("not compiling steps: %s", self.reason)
            return forward
        if self.seconds > LIMIT_S:
            self.reason = f"compiling has taken {self.seconds:.0f} s"
            log.warning("not compiling further step sizes: %s", self.reason)
        return self._function

    def _try(self, frame: Frame, expected: Tensor) -> str | None:
        import torch._dynamo.config as dynamo

        try:
            # With dynamic sizes PyTorch also turns constants of the model into inputs, such as the epsilon of a norm.
            # If the backend needs one as a number, PyTorch starts again, and everything is compiled twice.
            with dynamo.patch(specialize_float=True):
                off = miss(expected, self._function(*frame.inputs)[:, -1])
        except Exception as error:  # any error, from the compiler, Triton or a C compiler
            return described(error).partition("\n")[0]
        if off > self._bound:
            return f"with {frame.size[0]} rows scores are off by {off:.2g} of their range"
        return None
