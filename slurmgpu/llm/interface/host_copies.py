"""Copy tensors to the CPU without waiting for work that the device starts later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class HostCopies:
    """Starts to copy tensors from a device to the CPU; CPU tensors are used as they are."""

    def __init__(self, *tensors: Tensor) -> None:
        import torch

        self._copies = [*tensors]
        self._are_there: Any = None
        device = tensors[0].device
        if device.type == "cuda":
            # A copy into pageable memory would wait for the GPU.
            self._copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
            for target, each in zip(self._copies, tensors, strict=True):
                target.copy_(each, non_blocking=True)
            self._are_there = torch.cuda.Event()
            self._are_there.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """Wait for the copies and return them."""
        if self._are_there is not None:
            self._are_there.synchronize()
        return self._copies
