"""The largest batch that fits into memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.data_loader import BatchIndices, SeededDataset, to_device
from slurmgpu.training.optimizer import make_optimizer
from slurmgpu.training.ranks import Place
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.training.states import random_state, set_random_state
from slurmgpu.training.strategy import Strategy
from slurmgpu.util.cgroups import memory_left
from slurmgpu.util.exceptions import message_of
from slurmgpu.util.out_of_memory import OutOfMemoryError, is_out_of_memory

log = logging.getLogger(__name__)

LIMIT = 2**16
"""The largest size to try by default."""


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
    """The largest batch size at which `fn(batch_size)` fits into memory and leaves the share `margin` free.

    `fn` computes a whole step: forward, backward and the optimizer's, whose state needs memory as well. It is tried
    with `start`, twice that, and so on up to `limit` (default 65,536). After a failure it tries the middle between the
    last two sizes, then the middle of one half, so that at most a fifth is lost. With `sizes` it tries only those:
    doubling in the same way, then by bisection.

    `device` defaults to the current GPU, if there is one. On a CPU, allocations beyond the available memory fail while
    `fn` runs, so that Linux kills nothing. Random number generators are restored; PyTorch's peak memory statistics of
    the GPU are reset.

    If several processes search together, `agree(fitted)` returns whether all of them fitted.

    Raises MemoryError if the smallest size does not fit; if only the margin is missing, that size is returned, with a
    warning. ValueError if there is no size to try. Other exceptions of `fn` pass through.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    allowed: Sequence[int] = range(1, (LIMIT if limit is None else limit) + 1)
    if sizes is not None:
        allowed = sorted({size for size in sizes if limit is None or size <= limit})
    if start < 1 or not allowed or allowed[0] < 1:
        raise ValueError(f"start = {start}, limit = {limit}, sizes = {allowed}: expected sizes of at least 1 to try.")
    tries = _Tries(fn, allowed, margin, where, agree or bool)
    state = random_state(where)
    try:
        return tries.search(start)
    finally:
        set_random_state(state, where)


def fit_batch_size(
    user: Any, strategy: Strategy, samples: SeededDataset, settings: TrainingSettings, place: Place
) -> int:
    """The largest batch size at which a step fits on all processes; with a global batch, a divisor of their share.

    Tries the first samples; model and random numbers stay unchanged.
    """
    if strategy.sharded or (settings.sync_batchnorm and place.world_size > 1):
        # A rank that runs out of memory between two collectives would block the others.
        what = 'strategy = "fsdp"' if strategy.sharded else "sync_batchnorm"
        raise SlurmGPUError(f'batch_size = "auto" does not work with {what} on several processes; give a number.')
    parameters = [*strategy.model.parameters()]
    kept = [each.detach().to("cpu", copy=True) for each in parameters]
    optimizer = make_optimizer(user, strategy.model, settings)

    def attempt(n: int) -> None:
        batch = samples.__getitems__(BatchIndices(0, [number % len(samples) for number in range(n)]))
        optimizer.zero_grad(set_to_none=True)  # of a try that ran out of memory in its backward pass, too
        strategy.plain(to_device(batch, strategy.device)).backward()
        optimizer.step()

    def agree(fits: bool) -> bool:
        if place.world_size == 1:
            return fits
        told = torch.tensor(int(fits), device=strategy.device)
        distributed.all_reduce(told, distributed.ReduceOp.MIN)
        return bool(told)

    try:
        with strategy.without_side_effects():
            found = find_batch_size(attempt, device=strategy.device, agree=agree, **_sizes(samples, settings, place))
    finally:
        with torch.no_grad():
            for each, before in zip(parameters, kept, strict=True):
                each.copy_(before)
    if place.is_rank_zero:
        log.info("batch_size: %d", found)
    return found


@dataclass
class _Tries:
    fn: Callable[[int], object]
    sizes: Sequence[int]
    margin: float
    device: torch.device
    agree: Callable[[bool], bool]
    error: str = ""
    """The message of the last failure."""

    def search(self, start: int) -> int:
        _free(self.device)
        low, high = self._ends(self._at_most(start))
        if isinstance(self.sizes, range):
            between = sorted({low + (high - low) * n // 4 for n in (1, 2, 3)} - {low, high})
        else:
            between = [size for size in self.sizes if low < size < high]
        while between:
            middle = len(between) // 2
            if self._fits(between[middle]):
                low, between = between[middle], between[middle + 1 :]
            else:
                between = between[:middle]
        return low

    def _at_most(self, size: int) -> int:
        """The largest allowed size up to `size`, else the smallest."""
        return self.sizes[max(0, bisect_right(self.sizes, size) - 1)]

    def _ends(self, size: int) -> tuple[int, int]:
        """A size that fits, and the next one that does not; the same one twice if there is no such pair."""
        if self._fits(size):
            while size < self.sizes[-1]:
                larger = max(self._at_most(2 * size), self.sizes[bisect_right(self.sizes, size)])
                if not self._fits(larger):
                    return size, larger
                size = larger
            return size, size
        while size > self.sizes[0]:
            smaller = self._at_most(size // 2)
            if self._fits(smaller):
                return smaller, size
            size = smaller
        if self.agree(not self.error):
            log.warning("A batch size of %d leaves less than %.0f %% of the memory free.", size, 100 * self.margin)
            return size, size
        raise (OutOfMemoryError if self.device.type == "cuda" else MemoryError)(
            f"No batch size fits: out of memory at the smallest, {size}: {self.error or 'in another process'}"
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
            self.error = message_of(error).strip().partition("\n")[0] or type(error).__name__
            return False
        finally:
            # The traceback, which holds the tensors, is gone only here.
            _free(self.device)

    def _try_on_gpu(self, size: int) -> bool:
        torch.cuda.reset_peak_memory_stats()
        free, total = torch.cuda.mem_get_info()
        available = min(free + torch.cuda.memory_reserved(), int(_fraction() * total))
        self.fn(size)
        return bool(torch.cuda.max_memory_reserved() <= (1 - self.margin) * available)


def _fraction() -> float:
    """The share of the GPU's memory that PyTorch may take: `torch.cuda.set_per_process_memory_fraction`."""
    found: Callable[[], float] | None = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if found is None else found()  # PyTorch 2.5 does not tell it


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _memory_kept(margin: float) -> Iterator[None]:
    """Make allocations beyond this process's share of the memory fail: Linux overcommits, and kills later."""
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
        # Since Linux 4.7 this counts all private writable memory: getrlimit(2).
        resource.setrlimit(resource.RLIMIT_DATA, (used + int(max(0, min(rooms)) * (1 - margin)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _size_of(name: str) -> int | None:
    """Bytes of a field in /proc/self/status; None without this file."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _n_neighbours() -> int:
    if (local := os.environ.get("LOCAL_WORLD_SIZE")) is not None:
        return int(local)
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1


def _sizes(samples: SeededDataset, settings: TrainingSettings, place: Place) -> dict[str, Any]:
    """The arguments of the search. It starts at 2 if possible: batch normalisation cannot train on one sample."""
    if settings.global_batch_size is None:
        return {"start": 2, "limit": max(1, len(samples) // (place.world_size * settings.accumulation))}
    share = -(-settings.global_batch_size // place.world_size)
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    return {"start": sizes[min(1, len(sizes) - 1)], "sizes": sizes}
