"""Measure the speed of a training: docs/how-to/measure-training.md."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slurmgpu.training.flops import peak_flops


@dataclass(frozen=True)
class Rates:
    """The speed of a training over all attempts, without their first steps. NaN is unknown.

    With `summary(together=True)`, seconds are means over the processes, counts and rates are totals; else all are of
    this process.
    """

    steps: int
    samples: int
    tokens: int
    """0 if not counted."""
    wall_s: float
    """From the end of the warm-up to that of the last step, without `pause()`."""
    data_s: float
    """Waiting for batches, if it delayed the device."""
    compute_s: float
    """In steps, without data_s, and without communication_s if known."""
    communication_s: float
    """The time that DDP waits for gradients of other processes; NaN for FSDP."""
    samples_per_s: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float
    """Model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B): flops_per_s over the GPUs' peak."""


def throughput(
    model: nn.Module | None = None,
    *,
    device: torch.device | str | None = None,
    precision: str = "fp32",
    warmup: int = 1,
) -> Throughput:
    """A meter for a loop that trains `model`; the loop marks its parts with `data()` and `step()`.

    A DistributedDataParallel `model` tells how long it waits. `device` defaults to the model's. `precision` is "fp32",
    "tf32", "bf16" or "fp16", for `mfu`; SlurmGPUError for another. The first `warmup` steps, which compile, choose
    kernels and allocate, are left out.
    """
    parameter = next(model.parameters(), None) if model is not None else None
    found = torch.device(device or (parameter.device if parameter is not None else "cpu"))
    name = torch.cuda.get_device_name(found) if found.type == "cuda" else ""
    return Throughput(found, peak_flops(name, precision), _waits_of(model), warmup)


class Throughput:
    """A meter of steps, made by `throughput()`; it costs microseconds a step and does not wait for the GPU.

    On GPUs it records events and reads them once they have passed.
    """

    def __init__(self, device: torch.device, peak: float | None, waits: _Waits | None, warmup: int) -> None:
        self._device, self._peak, self._waits = device, peak, waits
        self._warmup = warmup
        self._carried = _Totals()
        self._own = _Totals()
        self._since: float | None = None
        self._in_step = False
        self._step, self._before, self._within = (_Part(device) for _ in range(3))

    def data(self) -> AbstractContextManager[object]:
        """A context for reading a batch, before or within a step, and for its copy to the device."""
        self._start()
        return self._within if self._in_step else self._before

    @contextmanager
    def step(self, *, samples: int = 0, tokens: int = 0, flops: float = 0.0) -> Iterator[None]:
        """A context for an optimizer step, with this process's counts; `flops` excludes recomputed activations."""
        self._start()
        self.count(samples=samples, tokens=tokens, flops=flops)
        self._in_step, whole = True, False
        try:
            with self._step:
                yield
            whole = True
        finally:
            self._end_step(whole=whole)

    def count(self, *, samples: int = 0, tokens: int = 0, flops: float = 0.0) -> None:
        """Add to the counts of the current step."""
        self._own.samples += samples
        self._own.tokens += tokens
        self._own.flops += flops

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context for other work, such as an evaluation or a checkpoint; waits for the GPU once."""
        self._settle()
        self._lap()
        try:
            yield
        finally:
            if self._since is not None:
                self._since = time.perf_counter()

    def summary(self, *, together: bool = False) -> Rates:
        """The rates so far, of this process; with `together`, of all processes, which all must call it."""
        total = self._total(together)
        waited = total.waited_s / total.n_waited * total.steps if total.n_waited else math.nan
        return Rates(
            int(total.steps),
            int(total.samples),
            int(total.tokens),
            total.wall_s,
            total.data_s,
            max(0.0, total.step_s - (0.0 if math.isnan(waited) else waited)),
            waited,
            _ratio(total.samples, total.wall_s),
            _ratio(total.tokens, total.wall_s),
            _ratio(total.flops, total.wall_s),
            _ratio(total.flops, total.capacity),
        )

    def state(self, *, together: bool = False) -> dict[str, float]:
        """The state for a checkpoint, of this process; with `together`, of all processes, as in `summary`."""
        return dict(vars(self._total(together)))

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from a `state`; if it was of all processes, call `summary` with `together` as well."""
        self._carried = _Totals(**state)

    def _start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def _lap(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self._own.wall_s += now - self._since
            self._since = now

    def _end_step(self, *, whole: bool) -> None:
        self._in_step = False
        self._lap()
        self._own.steps += whole
        if self._warmup and whole:
            self._warmup -= 1
            if not self._warmup:
                self._restart()
        elif self._waits is not None:
            self._waits.look()

    def _restart(self) -> None:
        """Reset all measurements, after the GPU has finished them."""
        self._settle()
        self._own = _Totals()
        for part in (self._step, self._before, self._within):
            part.seconds = 0.0
        if self._waits is not None:
            self._waits.restart()
        self._since = time.perf_counter()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._lap()
            for part in (self._step, self._before, self._within):
                part.read()

    def _total(self, together: bool) -> _Totals:
        own = vars(_Totals() if self._warmup else self._measured())
        if together and distributed.is_available() and distributed.is_initialized():
            world_size = distributed.get_world_size()
            summed = torch.tensor(list(own.values()), dtype=torch.float64, device=self._device)
            distributed.all_reduce(summed)
            sums = zip(own, summed.tolist(), strict=True)
            own = {name: value / world_size if name in _MEANS else value for name, value in sums}
        return _Totals(**{name: value + own[name] for name, value in vars(self._carried).items()})

    def _measured(self) -> _Totals:
        self._settle()
        own = self._own
        own.data_s = self._before.seconds + self._within.seconds
        own.step_s = self._step.seconds - self._within.seconds
        own.capacity = own.wall_s * (self._peak or math.nan)
        if self._waits is not None:
            self._waits.look(last=True)
            own.waited_s, own.n_waited = self._waits.seconds, self._waits.n_steps
        elif not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            own.waited_s, own.n_waited = 0.0, own.steps
        return own


@dataclass
class _Totals:
    steps: float = 0
    samples: float = 0
    tokens: float = 0
    flops: float = 0.0
    wall_s: float = 0.0
    data_s: float = 0.0
    step_s: float = 0.0
    waited_s: float = 0.0
    n_waited: float = 0
    """The number of steps with known waited_s."""
    capacity: float = 0.0
    """FLOPs that the GPUs could have done; NaN if unknown."""


_MEANS = ("steps", "wall_s", "data_s", "step_s", "waited_s", "n_waited")


def _ratio(count: float, of: float) -> float:
    return count / of if count and of else math.nan


class _Part:
    """A context that measures seconds, by this process's clock or between events in the GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._device = device
        self._began: Any = None
        self._passing: deque[tuple[Any, Any]] = deque()

    def __enter__(self) -> None:
        self._began = self._mark()

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self._passing.append((self._began, self._mark()))
            self.read()
        else:
            self.seconds += time.perf_counter() - self._began

    def read(self) -> None:
        while self._passing and self._passing[0][1].query():
            began, ended = self._passing.popleft()
            self.seconds += began.elapsed_time(ended) / 1e3

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # the current GPU may be another one
        return event


class _Waits:
    """The time that DDP waits, in the steps that it times itself: the first ten, then one in a hundred.

    From the end of the backward pass to that of the last all-reduce (torch/csrc/distributed/c10d/logger.cpp). PyTorch
    calls the interface a prototype; without it, nothing is known.
    """

    def __init__(self, logged: Callable[[], Mapping[str, Any]]) -> None:
        self.seconds, self.n_steps = 0.0, 0
        self._logged = logged
        self._iteration = 0
        self._n_looks = 0

    def look(self, *, last: bool = False) -> None:
        """Read the newest timed step, if it is new."""
        self._n_looks += not last
        if self._n_looks > 10 and self._n_looks % 100 and not last:
            return
        logged = self._logged()
        iteration = logged.get("iteration", 0)
        names = "backward_comm_time", "backward_compute_comm_overlap_time"
        if iteration > self._iteration and all(name in logged for name in names):
            self._iteration = iteration
            communicated, overlap = (logged[name] for name in names)
            self.seconds += max(0, communicated - overlap) / 1e9
            self.n_steps += 1

    def restart(self) -> None:
        """Reset; the previous step's times only appear in the next one."""
        self.seconds, self.n_steps, self._n_looks = 0.0, 0, 0
        self._iteration = self._logged().get("iteration", 0) + 1


def _waits_of(model: nn.Module | None) -> _Waits | None:
    model = getattr(model, "_orig_mod", model)  # as torch.compile wraps it
    logged = getattr(model, "_get_ddp_logging_data", None)
    return _Waits(logged) if isinstance(model, DistributedDataParallel) and logged is not None else None
