"""Run steps as CUDA graphs: one launch for all kernels of a forward pass, which use the same memory each time.

Each step size is captured when it is first needed, and compared with the eager pass before it is used. All graphs share
one memory pool, as they never run at the same time, and their results are in the slots.
See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.placement.needs import GRAPHS_BYTES
from slurmgpu.llm.transformers_engine.quantization import is_int8
from slurmgpu.llm.transformers_engine.selfcheck import bound_of
from slurmgpu.llm.transformers_engine.slots import Forward, Frame, compare_replay

if TYPE_CHECKING:
    from slurmgpu.llm.interface.engine import Place
    from slurmgpu.llm.transformers_engine.compiled_step import Compiled
    from slurmgpu.llm.transformers_engine.loading import Loaded

log = logging.getLogger(__name__)

N_WARM_UPS = 2
"""Warm-up runs before a capture, in which libraries choose kernels and allocate lasting memory."""
MOST_GRAPHS = 128
DRIVER_BYTES = 16e6
"""The most that the driver itself keeps for a graph; what is missing beyond that, other processes of the GPU took."""
LEAST_REPLAYS = 8
"""After this many replays a graph has saved the time of its capture."""
_failed: list[Any] = []
"""Graphs whose capture never ended: the allocator's filters for a capture refer to its graph, and some stay until exit.
"""
RESET_FREES = (2, 14)
"""The first PyTorch whose `CUDAGraph.reset` frees what a capture took that did not end."""


def obstacle_to(loaded: Loaded, place: Place, *, has_other: bool = False) -> str | None:
    """Why steps of this model cannot be CUDA graphs here; None if trying may succeed.

    `has_other` means that another model computes on the same GPU.
    """
    from slurmgpu.llm.transformers_engine import caches
    from slurmgpu.llm.transformers_engine.cache_layers import GrowingLayer

    model = loaded.model
    if loaded.device.type != "cuda":
        return "the model is on the CPU"
    if place.world_size > 1:
        return f"it is split over {place.world_size} processes"
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"its layers are on {len(devices)} devices"
    if has_other:
        return "another model on the same GPU needs the memory that graphs keep"
    if loaded.switch is not None:
        return "its adapters change from item to item"
    if is_int8(model):
        return "8-bit weights of bitsandbytes synchronise with the GPU in each layer"
    attention = str(getattr(model.config, "_attn_implementation", None))
    if "flash" in attention:
        return f"its attention ({attention}) does not support padding to a fixed size"
    if model.config.model_type in caches.COLUMN_WINDOWS:
        return "some of its layers look back by columns, and a cache of fixed size has columns after the last token"
    others = {type(layer).__name__ for layer in caches.new_cache(model).layers if type(layer) is not GrowingLayer}
    if others:
        return f"its cache has layers other than full attention: {', '.join(sorted(others))}"
    return None


class GraphRunner:
    """Captures the forward pass of each frame in a CUDA graph, and replays it.

    `bound` is how far a replay's scores may be from those of the eager pass, as a share of their range, if the pass
    reproduces its own scores; `most` is how far any replay may be. With `compiled` the pass is compiled first, if the
    compiled scores are right.
    """

    def __init__(self, device: Any, bound: float, most: float, compiled: Compiled | None = None) -> None:
        import torch

        self._device = device
        self._bound, self._most = bound, most
        self._compiled = compiled
        self._stream = torch.cuda.Stream(device)
        self._graphs: dict[tuple[int, int], Any] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._n_replays = 0
        self.held_bytes = 0
        self.seconds = 0.0
        """The memory that the graphs hold in addition to the slots, and the time that captures have taken so far."""

    @property
    def n_graphs(self) -> int:
        """The number of captured graphs."""
        return len(self._graphs)

    def run(self, frame: Frame, forward: Forward) -> None:
        """Replay the frame's graph, after capturing it if there is none."""
        graph = self._graphs.get(frame.size)
        if graph is not None:
            graph.replay()
            self._n_replays += 1
            return
        if self.held_bytes > GRAPHS_BYTES or len(self._graphs) >= MOST_GRAPHS:
            self._forget()
        started = time.monotonic()
        self._graphs[frame.size] = self._capture(frame, forward)
        self.seconds += time.monotonic() - started

    def _capture(self, frame: Frame, forward: Forward) -> Any:
        """Capture a graph, and set the frame's logits with a replay of it."""
        import torch

        self._warm_up(frame, forward)
        if self._compiled is not None:
            compiled = self._compiled.instead_of(forward, frame, frame.logits.clone())
            if compiled is not forward:
                self._warm_up(frame, compiled)
            forward = compiled
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, own = torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        self._record(graph, lambda: frame.compute(forward))
        own = torch.cuda.memory_reserved(self._device) - own
        taken = free - torch.cuda.mem_get_info(self._device)[0]
        self.held_bytes += int(max(0, min(taken, own + DRIVER_BYTES)))
        found = compare_replay(frame, forward, graph.replay, self._bound)
        if found.steady > bound_of(found.noise, self._bound) or found.most > self._most:
            raise ArithmeticError(
                f"the graph of {frame.size[0]} rows is off by {found.steady:.2g} of the range of scores, at most by "
                f"{found.most:.2g}; eager scores differ by {found.noise:.2g} when computed again"
            )
        return graph

    def _warm_up(self, frame: Frame, forward: Forward) -> None:
        """Run a pass on the stream for captures; RuntimeError if the last run synchronises with the GPU.

        Synchronising during a capture would fail, and would break CUDA and the allocator.
        """
        import torch

        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(N_WARM_UPS - 1):
                frame.compute(forward)
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                frame.compute(forward)
            except RuntimeError as error:
                if "synchronizing" not in str(error):
                    raise
                place = traceback.extract_tb(error.__traceback__)[-1]
                raise RuntimeError(
                    f"the model synchronises with the GPU in {place.name} ({place.filename}, line {place.lineno}): "
                    f"{error}"
                ) from error
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        here.wait_stream(self._stream)

    def _record(self, graph: Any, work: Callable[[], None]) -> None:
        """Capture the work; if that fails, raise the work's own error, and restore CUDA's state."""
        import torch

        here, cause = torch.cuda.current_stream(self._device), None
        try:
            # Other threads, such as a library's, may continue to call CUDA.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    work()
                except Exception as error:
                    cause = error  # ending the capture raises another error
                    raise
        except Exception:
            # If ending the capture fails, this thread is still on its stream, and the allocator in its pool.
            torch.cuda.set_stream(here)
            self._abandon(graph)
            if cause is not None:
                raise cause from None
            raise

    def _abandon(self, graph: Any) -> None:
        """After a failed capture: let the allocator use its usual blocks again, and free the graph's pool.

        If CUDA rejects the graph, `CUDAGraph.capture_end` does the first since PyTorch 2.13, and `reset` the second
        since 2.14. If only the work failed, the capture ended as usual, and the graph holds the pool until `reset`.
        """
        import torch

        index = self._stream.device.index
        try:
            try:
                torch._C._cuda_endAllocateToPool(index, self._pool)
                _failed.append(graph)
            except RuntimeError as error:
                if "not currently recording" not in str(error):
                    raise
            if not _has_ended(graph) and _version_of(torch) < RESET_FREES:
                torch._C._cuda_releasePool(index, self._pool)
            graph.reset()
        except RuntimeError as error:
            log.warning("after a failed capture: %s", error)

    def _forget(self) -> None:
        """Free all graphs, and start a new pool; RuntimeError if they were replayed too few times to be worth it."""
        import torch

        held = f"{self.n_graphs} CUDA graphs hold {self.held_bytes / 1e6:.0f} MB"
        if self._n_replays < LEAST_REPLAYS * self.n_graphs:
            raise RuntimeError(
                f"{held}, and were replayed only {self._n_replays} times before others needed the memory"
            )
        log.info("%s; freeing them, to capture them again when needed", held)
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self.held_bytes, self._n_replays = 0, 0


def _has_ended(graph: Any) -> bool:
    """Whether the capture of a graph ended as usual."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _version_of(torch: Any) -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))
