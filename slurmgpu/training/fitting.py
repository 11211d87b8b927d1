"""The largest batch that fits into memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slurmgpu.training.states import random_state, set_random_state
from slurmgpu.util.cgroups import memory_left
from slurmgpu.util.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

LIMIT = 2**16
"""Where the search ends if nothing else ends it."""


def find_batch_size(
    fn: Callable[[int], object],
    *,
    start: int = 1,
    limit: int | None = None,
    sizes: Iterable[int] | None = None,
    margin: float = 0.1,
    device: torch.device | str | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> int:
    """The largest batch size at which `fn(batch_size)` does not run out of memory and leaves `margin` of it free.

    `fn` computes a whole step: forward, backward and the optimizer's, whose state needs memory as well. It is tried at
    `start`, twice that, and so on up to `limit` (65,536 if not given); where it fails, also at a half and at a quarter
    or three quarters of the way back, so that at most a fifth is given away. With `sizes` only those are tried: the
    same way up, and every one between by halves.

    `device` is PyTorch's, else the current GPU if there is one. On a CPU memory beyond what is left is refused while
    `fn` runs, so that nothing is killed for it. Random numbers are put back to where they were, and the peak that
    PyTorch keeps of the GPU's memory begins again.

    Where several processes search together, `agree(fitted)` tells each of them whether it fitted all.

    Raises MemoryError if the smallest does not fit. It is taken, with a warning, if only the margin is missing. What
    else `fn` raises goes through.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    allowed = sorted(set(sizes)) if sizes is not None else None
    if limit is not None and allowed is not None:
        allowed = [size for size in allowed if size <= limit]
    if start < 1 or (limit is not None and limit < 1) or (allowed is not None and not (allowed and allowed[0] > 0)):
        raise ValueError(f"start = {start}, limit = {limit}, sizes = {allowed}: expected sizes of at least 1 to try.")
    tries = _Tries(fn, _Sizes(allowed, limit or LIMIT), margin, where, agree or bool)
    state = random_state(where)
    try:
        return tries.search(start)
    finally:
        set_random_state(state, where)


@dataclass(frozen=True)
class _Sizes:
    """What may be tried: some sizes, or all up to a limit."""

    allowed: list[int] | None
    limit: int

    @property
    def least(self) -> int:
        return self.allowed[0] if self.allowed else 1

    @property
    def most(self) -> int:
        return self.allowed[-1] if self.allowed else self.limit

    def down(self, size: int) -> int:
        """The largest that is not above `size`, else the smallest of all."""
        if self.allowed is None:
            return max(1, min(size, self.limit))
        return max((each for each in self.allowed if each <= size), default=self.least)

    def up(self, size: int) -> int:
        """About twice `size`, and more than it."""
        found = self.down(2 * size)
        return found if found > size or self.allowed is None else min(each for each in self.allowed if each > size)

    def between(self, low: int, high: int) -> list[int]:
        """What is worth trying between what fits and what does not."""
        if self.allowed is not None:
            return [each for each in self.allowed if low < each < high]
        quarters = {low + (high - low) * n // 4 for n in (1, 2, 3)}
        return sorted(quarters - {low, high})


@dataclass
class _Tries:
    fn: Callable[[int], object]
    sizes: _Sizes
    margin: float
    device: torch.device
    agree: Callable[[bool], bool]
    error: str = ""
    """What the last size that was too large said."""

    def search(self, start: int) -> int:
        _free(self.device)
        low, high = self._ends(self.sizes.down(start))
        between = self.sizes.between(low, high) if high is not None else []
        while between:
            middle = len(between) // 2
            if self._fits(between[middle]):
                low, between = between[middle], between[middle + 1 :]
            else:
                between = between[:middle]
        return low

    def _ends(self, size: int) -> tuple[int, int | None]:
        """A size that fits, and the next one that was tried and does not; None if the largest fits."""
        if self._fits(size):
            while size < self.sizes.most:
                larger = self.sizes.up(size)
                if not self._fits(larger):
                    return size, larger
                size = larger
            return size, None
        while size > self.sizes.least:
            smaller = self.sizes.down(size // 2)
            if self._fits(smaller):
                return smaller, size
            size = smaller
        if self.agree(not self.error):
            log.warning("A batch size of %d leaves less than %.0f %% of the memory free.", size, 100 * self.margin)
            return size, None
        raise MemoryError(
            f"No batch size fits: memory was short at {size}, the smallest: {self.error or 'in another process'}"
        )

    def _fits(self, size: int) -> bool:
        fitted = self.agree(self._try(size))
        log.debug("a batch size of %d %s", size, "fits" if fitted else "does not fit")
        return fitted

    def _try(self, size: int) -> bool:
        self.error = ""
        try:
            if self.device.type != "cuda":
                with _memory_kept(self.margin):
                    self.fn(size)
                return True
            with torch.cuda.device(self.device):
                return self._try_on_gpu(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.error = str(error).strip().partition("\n")[0] or type(error).__name__
            return False
        finally:
            # Only here is the traceback gone, with the frames that hold the tensors.
            _free(self.device)

    def _try_on_gpu(self, size: int) -> bool:
        torch.cuda.reset_peak_memory_stats()
        available = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        self.fn(size)
        return bool(torch.cuda.max_memory_reserved() <= (1 - self.margin) * available)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _memory_kept(margin: float) -> Iterator[None]:
    """Let allocations fail that go beyond this process's part of the memory that is left, or its limits allow.

    Linux promises more memory than there is, and then kills.
    """
    used, mapped = _size_of("VmData:"), _size_of("VmSize:")
    if used is None or mapped is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = (soft, used), (resource.getrlimit(resource.RLIMIT_AS)[0], mapped)
    rooms = [limit - held for limit, held in limits if limit != resource.RLIM_INFINITY]
    if (left := memory_left()) is not None:
        rooms.append(left // _n_neighbours())
    if rooms:
        # Since Linux 4.7 it counts all private memory that can be written: getrlimit(2).
        resource.setrlimit(resource.RLIMIT_DATA, (used + int(max(0, min(rooms)) * (1 - margin)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _size_of(name: str) -> int | None:
    """Bytes of what this process has mapped, by its name in /proc/self/status; None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _n_neighbours() -> int:
    """Processes that may try at the same time on this machine: torchrun's number, else all of the group's."""
    if (local := os.environ.get("LOCAL_WORLD_SIZE")) is not None:
        return int(local)
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1
