"""Steps as CUDA graphs: one launch for all kernels of a forward pass, which read and write the same memory each time.

Each size of a step is captured when it is first needed, and compared with what it was captured from before it is used.
All graphs share one memory pool, as none runs beside another and what they compute is in the slots.
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
"""Runs before a capture, in which libraries choose kernels and allocate what they keep."""
MOST_GRAPHS = 128
LEAST_REPLAYS = 8
"""By so many replays a graph has gained what its capture takes."""
_failed: list[Any] = []
"""Graphs whose capture failed: the allocators' filters of a capture refer to its graph, and some stay until the end."""


def obstacle_to(loaded: Loaded, place: Place, *, has_other: bool = False) -> str | None:
    """Why steps of this model cannot be CUDA graphs here; None if they may be, which only a try shows.

    `has_other` says that another model computes on the same GPU.
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
        return "another model computes beside it, and needs the memory that they keep"
    if loaded.switch is not None:
        return "its adapters change from item to item"
    if is_int8(model):
        return "8-bit weights of bitsandbytes wait for the GPU in each layer"
    attention = str(getattr(model.config, "_attn_implementation", None))
    if "flash" in attention:
        return f"its attention ({attention}) takes no padding of a fixed size"
    if model.config.model_type in caches.COLUMN_WINDOWS:
        return "some of its layers look back by columns, and a cache of a fixed size has some behind the last token"
    others = {type(layer).__name__ for layer in caches.new_cache(model).layers if type(layer) is not GrowingLayer}
    if others:
        return f"its cache has other layers than those of full attention: {', '.join(sorted(others))}"
    return None


class GraphRunner:
    """Captures the forward pass of each frame in a CUDA graph, and replays it.

    `bound` is how far a replay's scores may be from those of the pass itself, as a share of their range, where the
    pass done again gives the same, and `most` how far any replay may be. With `compiled` the pass is compiled before,
    where that is right.
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
        """The memory that the graphs hold beside the slots, and the time that captures have taken so far."""

    @property
    def n_graphs(self) -> int:
        """The graphs that are held."""
        return len(self._graphs)

    def run(self, frame: Frame, forward: Forward) -> None:
        """Replay the frame's graph, which is captured before if there is none."""
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
        """A graph whose replay has set the frame's logits."""
        import torch

        self._warm_up(frame, forward)
        if self._compiled is not None:
            compiled = self._compiled.instead_of(forward, frame, frame.logits.clone())
            if compiled is not forward:
                self._warm_up(frame, compiled)
            forward = compiled
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        self._record(graph, lambda: frame.compute(forward))
        self.held_bytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        found = compare_replay(frame, forward, graph.replay, self._bound)
        if found.steady > bound_of(found.noise, self._bound) or found.most > self._most:
            raise ArithmeticError(
                f"the graph of {frame.size[0]} rows misses the scores by {found.steady:.2g} of their range, at times "
                f"by {found.most:.2g}, and these are off by {found.noise:.2g} where they are computed again"
            )
        return graph

    def _warm_up(self, frame: Frame, forward: Forward) -> None:
        """Run a pass on the stream of captures; RuntimeError if the last run waits for the GPU, which none may.

        A capture in which it does fails as well, and CUDA and the allocator with it.
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
                    f"the model waits for the GPU in {place.name} ({place.filename}, line {place.lineno}): {error}"
                ) from error
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        here.wait_stream(self._stream)

    def _record(self, graph: Any, work: Callable[[], None]) -> None:
        """Capture the work; where that fails, raise the work's own error, and leave CUDA as it was."""
        import torch

        here, cause = torch.cuda.current_stream(self._device), None
        try:
            # Calls of other threads, such as a library's, may go on.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    work()
                except Exception as error:
                    cause = error  # the end of the capture raises another one
                    raise
        except Exception:
            # A capture that fails to end leaves this thread on its stream, and the allocator in its pool.
            torch.cuda.set_stream(here)
            _failed.append(graph)
            self._leave_pool()
            if cause is not None:
                raise cause from None
            raise

    def _leave_pool(self) -> None:
        """After a failed capture: have new memory from the allocator's usual blocks, and the pool's freed.

        Until PyTorch 2.13 `CUDAGraph.capture_end` does neither where CUDA refuses the graph.
        """
        import torch

        index = self._stream.device.index
        try:
            torch._C._cuda_endAllocateToPool(index, self._pool)
        except RuntimeError as error:
            if "not currently recording" not in str(error):
                log.warning("after a failed capture: %s", error)
            return
        torch._C._cuda_releasePool(index, self._pool)

    def _forget(self) -> None:
        """Free all graphs, and begin with another pool; RuntimeError if they were captured for too few replays."""
        import torch

        held = f"{self.n_graphs} CUDA graphs hold {self.held_bytes / 1e6:.0f} MB"
        if self._n_replays < LEAST_REPLAYS * self.n_graphs:
            raise RuntimeError(f"{held}, and were replayed only {self._n_replays} times before others need the memory")
        log.info("%s; they are captured again as needed", held)
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self.held_bytes, self._n_replays = 0, 0
