"""Choose how to keep a batch's rows: in slots for CUDA graphs, if their self-check passes, else in a growing cache."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.interface.batching import Budget, Load
from slurmgpu.llm.interface.engine import CudaGraphs, Place
from slurmgpu.llm.transformers_engine import graph_check
from slurmgpu.llm.transformers_engine.compiled_step import LIMIT_S, Compiled
from slurmgpu.llm.transformers_engine.cuda_graphs import GraphRunner, obstacle_to
from slurmgpu.llm.transformers_engine.decoding import Decoding, GrowingRows
from slurmgpu.llm.transformers_engine.graph_marks import Marks
from slurmgpu.llm.transformers_engine.prefill import PADDING, Prefill
from slurmgpu.llm.transformers_engine.selfcheck import MOST_FACTOR, ROUNDING
from slurmgpu.llm.transformers_engine.slots import READ_SHARE, Runner, SlotRows, Slots, tokens_of
from slurmgpu.util.exceptions import described
from slurmgpu.util.out_of_memory import free_memory

if TYPE_CHECKING:
    from slurmgpu.llm.interface.engine import EngineOptions
    from slurmgpu.llm.transformers_engine.loading import Loaded
    from slurmgpu.llm.transformers_engine.prefill import Prefilled
    from slurmgpu.llm.transformers_engine.rows import Waiting

log = logging.getLogger(__name__)

NOTE, COMPILED = "cuda_graphs", "compiled"
"""The shard's notes: 1 if tokens came from CUDA graphs, or from compiled ones, 0 if a self-check rejected them."""

MakeRunner = Callable[[Compiled | None], Runner]
Backend = str | Callable[..., Any]


class DecodingChoice:
    """Makes the rows of batches. A failure of the slots ends their use, without losing a row."""

    def __init__(self, loaded: Loaded, options: EngineOptions, place: Place, prefill: Prefill, budget: Budget) -> None:
        self._loaded = loaded
        self._place = place
        self._prefill = prefill
        self._budget = budget
        self._wanted: CudaGraphs = options.cuda_graphs
        self._compiles = options.compile
        self._has_other = options.beside is not None
        self._rounding = ROUNDING[options.precision]
        self._replayed = min(graph_check.REPLAYED, self._rounding)
        self._name = options.model.name
        self._make_runner: Callable[[], Runner] | None = None
        self._is_decided = False
        self.verdict: graph_check.Verdict | None = None
        """The result of the self-check; None without one."""
        self.not_compiled: str | None = None
        """Why steps are not compiled although the settings ask for it."""
        self._slots: Slots | None = None
        self._rows: weakref.ref[SlotRows] | None = None
        """The rows in the slots, while their batch is running."""

    @property
    def uses_slots(self) -> bool:
        """Whether batches are made in slots."""
        return self._make_runner is not None

    @property
    def slots(self) -> Slots | None:
        """The slots, which hold the memory for batches."""
        return self._slots

    def decide(self) -> None:
        """Before the first batch: try CUDA graphs, unless the settings or the model exclude them."""
        if self._is_decided:
            return
        self._is_decided = True
        if self._wanted is False:
            log.info("no CUDA graphs: cuda_graphs = false")
        elif (reason := self._obstacle()) is not None:
            log.log(logging.WARNING if self._wanted is True else logging.INFO, "no CUDA graphs: %s", reason)
        else:
            most = MOST_FACTOR * self._rounding
            self.use(lambda compiled: GraphRunner(self._loaded.device, self._replayed, most, compiled))

    def _obstacle(self) -> str | None:
        found = obstacle_to(self._loaded, self._place, has_other=self._has_other)
        return found if found is not None or self._prefill.takes_padding else PADDING

    def use(self, make_runner: MakeRunner, backend: Backend = "inductor") -> graph_check.Verdict:
        """Make batches in slots with this runner, if its self-check passes; returns the check's verdict.

        If the settings ask for it, the runner's steps are compiled with a backend of torch.compile.
        """
        marks = Marks(self._name, *_versions(), self._device_name())
        left = marks.found()
        if left is not None:
            verdict = graph_check.Verdict(left)
        else:
            with marks.trying():
                verdict, made = self._try(make_runner, backend)
        if verdict.reason is None:
            log.info("using CUDA graphs: %s", verdict)
            self._make_runner = made
        else:
            log.warning("no CUDA graphs, computing tokens eagerly: %s", verdict.reason)
        self._is_decided, self.verdict = True, verdict
        self._place.note(NOTE, int(verdict.reason is None))
        return verdict

    def _try(self, make_runner: MakeRunner, backend: Backend) -> tuple[graph_check.Verdict, Callable[[], Runner]]:
        """The verdict on the runner, and a function that makes it; with compiled steps if they are right and faster."""
        plain, must_gain = (lambda: make_runner(None)), self._wanted == "auto"
        verdict = self._check(plain, self._replayed, must_gain=must_gain)
        if not self._compiles or verdict.reason is not None:
            return verdict, plain
        compiled = Compiled(self._prefill.forward, verdict.bound, backend)  # other kernels
        limit_s = graph_check.LIMIT_S + LIMIT_S
        other = self._check(lambda: make_runner(compiled), verdict.bound, must_gain=must_gain, limit_s=limit_s)
        reason = other.reason or compiled.reason
        if reason is None and must_gain and other.slots_s >= verdict.slots_s:
            reason = f"they are not faster: {other.slots_s * 1e3:.2f} ms a step, {verdict.slots_s * 1e3:.2f} without"
        self.not_compiled = reason
        self._place.note(COMPILED, int(reason is None))
        if reason is not None:
            log.warning("not compiling steps for CUDA graphs: %s", reason)
            return verdict, plain
        log.info("compiling steps: %s; compiled in %.0f s", other, compiled.seconds)
        return other, lambda: make_runner(compiled)

    def _check(
        self,
        make_runner: Callable[[], Runner],
        replayed: float,
        *,
        must_gain: bool,
        limit_s: float = graph_check.LIMIT_S,
    ) -> graph_check.Verdict:
        import torch

        checked = graph_check.Checked(
            self._prefill,
            make_runner,
            n_tokens=self._budget.tokens,
            n_words=self._loaded.model.config.get_text_config().vocab_size,
            context=min(self._loaded.context, self._prefill.lengths.border),
            rounding=self._rounding,
            replayed=replayed,
            must_gain=must_gain,
            clock=self._clock,
            limit_s=limit_s,
        )
        try:
            with torch.inference_mode():
                verdict = graph_check.check(checked)
        except Exception as error:
            verdict = graph_check.Verdict(described(error).partition("\n")[0])
        if verdict.reason is not None:
            self.raise_if_lost(verdict.reason)
        free_memory()
        return verdict

    def size(self, load: Load) -> int:
        """The tokens of the cache that a new batch of this load takes."""
        return tokens_of(load) if self.uses_slots else load.tokens

    def n_read(self, waiting: Sequence[Waiting]) -> int:
        """How many of these requests, sorted with the longest first, may be read at once."""
        if not self.uses_slots:
            return len(waiting)
        return max(1, int(READ_SHARE * self._budget.tokens) // max(1, len(waiting[0].tokens)))

    def open(self, read: Prefilled, most: Sequence[int], load: Load) -> Decoding:
        """The rows of a new batch, which starts with the prompts that were read, and will reach a load.

        `most` are the most tokens of each answer.
        """
        context = min(self._loaded.context, self._prefill.lengths.limit(load.columns))
        # A caller that asks for more answers before taking the first ones has two running batches.
        is_taken = self._rows is not None and self._rows() is not None
        if self._make_runner is None or is_taken:
            return GrowingRows(read, self._prefill, context)
        if tokens_of(load) > self._budget.tokens:
            self.release()  # a cache of this size needs the memory of the slots
            return GrowingRows(read, self._prefill, context)
        if self._slots is None or self._slots.n_tokens < self._budget.tokens:
            self._slots = None  # frees their memory before new ones are made
            self._slots = Slots(read, self._budget.tokens, self._make_runner())
        found = SlotRows(self._slots, self._prefill, context)
        self._rows = weakref.ref(found)
        found.join(read, most)
        return found

    def give_up(self, reason: str) -> bool:
        """Continue without slots; returns whether there were any, in which case no other change is needed."""
        if not self.uses_slots:
            return False
        self._make_runner = None
        self.raise_if_lost(reason)  # before freeing memory, which would also fail
        self.release()
        log.warning("CUDA graphs failed, computing tokens eagerly from now on: %s", reason)
        self._place.note(NOTE, 0)
        return True

    def raise_if_lost(self, reason: str) -> None:
        """Raise CUDA's error if its context is broken, and let the next process run without graphs."""
        try:
            self._clock()
        except Exception:
            Marks(self._name, *_versions(), self._device_name()).leave(f"they broke CUDA's context: {reason}")
            raise

    def release(self) -> None:
        """Free the slots and their graphs; the next batch makes new ones."""
        if self._slots is not None:
            self._slots = None
            free_memory()

    def _clock(self) -> float:
        import torch

        if self._loaded.device.type == "cuda":
            torch.cuda.synchronize(self._loaded.device)
        return time.perf_counter()

    def _device_name(self) -> str:
        import torch

        return torch.cuda.get_device_name(self._loaded.device) if self._loaded.device.type == "cuda" else "cpu"


def _versions() -> tuple[str, str]:
    import torch
    import transformers

    return str(torch.__version__), str(transformers.__version__)
