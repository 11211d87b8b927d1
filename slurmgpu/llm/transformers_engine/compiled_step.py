"""The forward pass of a step by torch.compile, compared with the plain one in each size before it is used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.transformers_engine.selfcheck import miss
from slurmgpu.llm.transformers_engine.slots import Forward, Frame
from slurmgpu.util.exceptions import described

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

LIMIT_S = 300.0
"""The seconds of compiling, after which further sizes of steps are not compiled."""


class Compiled:
    """A forward pass, compiled as a whole and for all sizes of a step at once, but that of one row.

    Inductor keeps what it compiles in the folder TORCHINDUCTOR_CACHE_DIR, by default one of the user below TMPDIR.
    `bound` is how far scores may be from those of the plain pass, as a share of their range.
    """

    def __init__(self, forward: Forward, bound: float, backend: str | Callable[..., Any] = "inductor") -> None:
        import torch

        # Sizes that are numbers in the code would be compiled one by one, for minutes each.
        self._function: Forward = torch.compile(forward, fullgraph=True, dynamic=True, backend=backend)
        self._bound = bound
        self.reason: str | None = None
        """Why it is used no more."""
        self.seconds = 0.0

    def instead_of(self, forward: Forward, frame: Frame, expected: Tensor) -> Forward:
        """The compiled pass, or `forward` where that fails in this frame; `expected` are the scores of `forward`."""
        if self.reason is not None:
            return forward
        started = time.monotonic()
        self.reason = self._try(frame, expected)
        self.seconds += time.monotonic() - started
        if self.reason is not None:
            log.warning("steps are not compiled: %s", self.reason)
            return forward
        if self.seconds > LIMIT_S:
            self.reason = f"compiling has taken {self.seconds:.0f} s"
            log.warning("steps of further sizes are not compiled: %s", self.reason)
        return self._function

    def _try(self, frame: Frame, expected: Tensor) -> str | None:
        import torch._dynamo.config as dynamo

        try:
            # With dynamic sizes PyTorch makes inputs of the model's constants, too, such as the epsilon of a norm. It
            # begins again once the backend needs one as a number: all was compiled twice.
            with dynamo.patch(specialize_float=True):
                off = miss(expected, self._function(*frame.inputs)[:, -1])
        except Exception as error:  # the compiler's, Triton's or a C compiler's: of any kind
            return described(error).partition("\n")[0]
        if off > self._bound:
            return f"with {frame.size[0]} rows scores are off by {off:.2g} of their range"
        return None
