"""How fast a training is, and what it waits for: how-to in docs/how-to/measure-training.md."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slurmgpu.training.flops import peak_flops


@dataclass(frozen=True)
class Rates:
    """How fast a training was, in all attempts and without their first steps. NaN is unknown.

    The seconds are means over the processes, the counts and the rates are of all processes together, where
    `summary(together=True)` was asked; else all are of this process.
    """

    steps: int
    samples: int
    tokens: int
    """0 where none were counted."""
    wall_s: float
    """From the end of the first steps to that of the last one, without what was spent in `pause()`."""
    data_s: float
    """Waiting for batches, as far as that held up the device."""
    compute_s: float
    """In steps, without data_s, and without communication_s where that is known."""
    communication_s: float
    """In which DDP waited for gradients of other processes after its own were computed; NaN for FSDP."""
    samples_per_s: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float
    """Model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B): flops_per_s over what the GPUs could do."""


def throughput(
    model: nn.Module | None = None,
    *,
    device: torch.device | str | None = None,
    precision: str = "fp32",
    warmup: int = 1,
) -> Throughput:
    """A meter for a loop that trains `model`; the loop marks its parts with `data()` and `step()`.

    A `model` that is a DistributedDataParallel tells what it waits for. `device` is the model's if not given.
    `precision` is "fp32", "tf32", "bf16" or "fp16", for `mfu`. The first `warmup` steps are left out: they compile,
    choose kernels and allocate.
    """
    parameter = next(model.parameters(), None) if model is not None else None
    found = torch.device(device or (parameter.device if parameter is not None else "cpu"))
    name = torch.cuda.get_device_name(found) if found.type == "cuda" else ""
    return Throughput(found, peak_flops(name, precision), _waits_of(model), warmup)


class Throughput:
    """A meter of steps, made by `throughput()`; it costs microseconds a step and does not wait for the GPU.

    On GPUs it marks the device's own timeline with events and reads them when they have passed.
    """

    def __init__(self, device: torch.device, peak: float | None, waits: _Waits | None, warmup: int) -> None:
        self._device, self._peak, self._waits = device, peak, waits
        self._warmup = warmup
        self._carried = _Totals()
        self._own = _Totals()
        self._since: float | None = None
        self._in_step = False
        self._pause = _Pause(self)
        self._step, self._before, self._within = (_Part(device.type == "cuda") for _ in range(3))
        self._marked = _Step(self)

    def data(self) -> AbstractContextManager[object]:
        """Around the reading of a batch, before a step or in it; also around its copy to the device."""
        self._start()
        return self._within if self._in_step else self._before

    def step(self, *, samples: int = 0, tokens: int = 0, flops: float = 0.0) -> AbstractContextManager[object]:
        """Around a step of the optimizer, with what this process (not all) computes in it.

        `flops` are of forward and backward, without what gradient checkpointing computes a second time.
        """
        self._start()
        self.count(samples=samples, tokens=tokens, flops=flops)
        return self._marked

    def count(self, *, samples: int = 0, tokens: int = 0, flops: float = 0.0) -> None:
        """Add to what the present step computes what is known only within it."""
        self._own.samples += samples
        self._own.tokens += tokens
        self._own.flops += flops

    def pause(self) -> AbstractContextManager[object]:
        """Around what is no training, such as an evaluation or a checkpoint; it waits for the GPU once."""
        return self._pause

    def summary(self, *, together: bool = False) -> Rates:
        """The rates so far; of all processes if `together`, and all of them have to call it then."""
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
        """What is kept with a checkpoint, for `load`; of all processes if `together`, as in `summary`."""
        total = self._total(together)
        return {field.name: getattr(total, field.name) for field in fields(total)}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on counting from a `state`; if that was of all processes, `summary` has to be `together` as well."""
        self._carried = _Totals(**state)

    def _start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def _lap(self) -> None:
        """Add the time since the last lap."""
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
        """Forget what was measured so far, once the GPU has ended it."""
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
        own = _Totals() if self._warmup else self._measured()
        values = [getattr(own, field.name) for field in fields(own)]
        if together and distributed.is_available() and distributed.is_initialized():
            world_size = distributed.get_world_size()
            summed = torch.tensor(values, dtype=torch.float64, device=self._device)
            distributed.all_reduce(summed)
            sums = zip(fields(own), summed.tolist(), strict=True)
            values = [each / world_size if field.name in _MEANS else each for field, each in sums]
        before = [getattr(self._carried, field.name) for field in fields(own)]
        return _Totals(*(a + b for a, b in zip(before, values, strict=True)))

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
    """The steps of which waited_s is known."""
    capacity: float = 0.0
    """FLOPs that the GPUs could have done; NaN where that is unknown."""


_MEANS = ("steps", "wall_s", "data_s", "step_s", "waited_s", "n_waited")


def _ratio(count: float, of: float) -> float:
    return count / of if count and of else math.nan


class _Part:
    """A context in which seconds are counted: of this process, or between two events of the GPU's stream."""

    def __init__(self, on_gpu: bool) -> None:
        self.seconds = 0.0
        self._on_gpu = on_gpu
        self._began: Any = None
        self._passing: deque[tuple[Any, Any]] = deque()

    def __enter__(self) -> None:
        self._began = self._mark()

    def __exit__(self, *_: object) -> None:
        if self._on_gpu:
            self._passing.append((self._began, self._mark()))
            self.read()
        else:
            self.seconds += time.perf_counter() - self._began

    def read(self) -> None:
        """Add the seconds between events that the GPU has passed."""
        while self._passing and self._passing[0][1].query():
            began, ended = self._passing.popleft()
            self.seconds += began.elapsed_time(ended) / 1e3

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Step:
    def __init__(self, meter: Throughput) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._meter._in_step = True
        self._meter._step.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._meter._step.__exit__()
        self._meter._end_step(whole=kind is None)


class _Pause:
    def __init__(self, meter: Throughput) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._meter._settle()
        self._meter._lap()

    def __exit__(self, *_: object) -> None:
        if self._meter._since is not None:
            self._meter._since = time.perf_counter()


class _Waits:
    """What DDP waits for in the steps that it times itself: the first ten, then one in a hundred.

    From the end of the backward pass to that of the last bucket's all-reduce (torch/csrc/distributed/c10d/logger.cpp).
    PyTorch calls the interface a prototype: where it is gone, nothing is known.
    """

    def __init__(self, logged: Callable[[], Mapping[str, Any]]) -> None:
        self.seconds, self.n_steps = 0.0, 0
        self._logged = logged
        self._iteration = 0
        self._n_looks = 0

    def look(self, *, last: bool = False) -> None:
        """Take in the newest step that was timed, if it is a new one."""
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
        """Forget what was seen; the step before is told only in the one that comes next."""
        self.seconds, self.n_steps, self._n_looks = 0.0, 0, 0
        self._iteration = self._logged().get("iteration", 0) + 1


def _waits_of(model: nn.Module | None) -> _Waits | None:
    """None where no DDP is."""
    model = getattr(model, "_orig_mod", model)  # as torch.compile wraps it
    logged = getattr(model, "_get_ddp_logging_data", None)
    return _Waits(logged) if isinstance(model, DistributedDataParallel) and logged is not None else None
