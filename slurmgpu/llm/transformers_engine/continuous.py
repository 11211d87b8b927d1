"""Continuous batching: a finished request makes room for the next at once, and prompts share prefixes.

transformers' manager runs in its own thread and never raises: a failed request has an output with an error, or no
output. So every output is checked, and requests without an output are computed in static batches.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.interface.engine import EngineOptions, Place
from slurmgpu.llm.interface.sampling import prepare_kernels
from slurmgpu.llm.interface.sampling_rules import Kinds
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import Encoded, Finished
from slurmgpu.llm.transformers_engine import continuous_sampling
from slurmgpu.llm.transformers_engine.call_lengths import CallLengths
from slurmgpu.llm.transformers_engine.continuous_support import flash_attention
from slurmgpu.llm.transformers_engine.grammars import Grammars
from slurmgpu.llm.transformers_engine.quantization import is_int8
from slurmgpu.llm.transformers_engine.selfcheck import agree, difference, probes
from slurmgpu.util.exceptions import described
from slurmgpu.util.out_of_memory import free_memory

if TYPE_CHECKING:
    from slurmgpu.llm.transformers_engine.loading import Loaded

log = logging.getLogger(__name__)

Static = Callable[[Sequence[Encoded]], Iterator[Finished]]

KEPT = "_cached_continuous_batching_manager"
"""The model's attribute for the manager that a call leaves to the next call."""
PATIENCE_S, STOP_S = 1.0, 5.0
"""The interval of checks on the manager's thread, and the wait for its end after a failure."""

MOST_REQUESTS = 256
"""The most requests in one batch; each has several rows of scores over the vocabulary."""
CPU_PAGE, CPU_TOKENS, CPU_BATCH_TOKENS = 32, 8192, 1024
"""On a CPU: the tokens of a page, of the cache, and of a batch.

The manager would take 60 % of the memory for the cache. Without flash attention the mask has cache times batch numbers.
"""
PAGE, MOST_PAGED = 256, 131072
"""On a GPU the tokens of a page, and the most tokens of a request for fast decoding."""
SAMPLING_SHARE = 0.8
"""The cache's share of the free memory for sampled tokens: the manager's default for samplers, which it gets later."""


@dataclass(frozen=True)
class Needs:
    """The features that a manager needs."""

    kinds: Kinds = field(default_factory=Kinds)
    stops: bool = False
    logprobs: bool = False
    structured: bool = False

    @classmethod
    def of(cls, requests: Sequence[Encoded]) -> Needs:
        """The needs of these requests."""
        all_sampling = [each.request.sampling for each in requests]
        kinds = Kinds.of(all_sampling)
        if kinds.sampled:
            # Rows that pad a batch are greedy, and another manager would cost more than the unneeded features.
            kinds |= Kinds(greedy=True, free=True, scaled=True)
        return cls(
            kinds,
            stops=any(each.stop for each in all_sampling),
            logprobs=any(each.logprobs for each in all_sampling),
            structured=any(each.structure is not None for each in all_sampling),
        )

    def __or__(self, other: Needs) -> Needs:
        """The needs of both."""
        return Needs(
            self.kinds | other.kinds,
            stops=self.stops or other.stops,
            logprobs=self.logprobs or other.logprobs,
            structured=self.structured or other.structured,
        )

    @property
    def changes(self) -> bool:
        """Whether anything other than the model's own scores affects the choice of tokens."""
        return self.kinds.sampled or self.structured


def settings(needs: Needs, longest: int, loaded: Loaded, *, flash: bool, graphs: bool = True) -> dict[str, Any]:
    """The manager's settings for requests of at most `longest` tokens, with the names of all versions.

    Without `graphs`, CUDA graphs are switched off.
    """
    wanted: dict[str, Any] = {
        "max_requests_per_batch": MOST_REQUESTS,
        "return_logprobs": needs.logprobs,
        "auto_switch_to_flash": False,  # already chosen
        "seed": 0,
    }
    if needs.stops or needs.structured:
        # In 5.23 cancelling a request while a second batch is in flight corrupts the cache; and a structure's next
        # tokens depend on the last token.
        wanted["use_async_batching"] = False
    if loaded.model.device.type == "cpu":
        wanted["page_size"] = wanted["block_size"] = CPU_PAGE
        wanted["num_blocks"] = -(-max(CPU_TOKENS, 4 * longest) // CPU_PAGE)
        wanted["max_batch_tokens"] = CPU_BATCH_TOKENS
        return wanted
    if needs.changes:
        wanted["max_memory_percent"] = SAMPLING_SHARE
    if flash:
        wanted["max_blocks_per_request"] = -(-min(loaded.context, MOST_PAGED) // PAGE) + 1
    if is_int8(loaded.model) or not graphs:
        wanted["use_cuda_graph"] = False
    return wanted


class _FailedError(Exception):
    """The manager failed; `cause` is its exception, if any, and `common` means that all ranks failed equally."""

    def __init__(self, message: str, cause: BaseException | None = None, *, common: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.common = common


class Continuous:
    """Generates with continuous batching, or with `static`, with the same results, if that is impossible or fails."""

    def __init__(
        self,
        loaded: Loaded,
        options: EngineOptions,
        place: Place,
        codec: Codec,
        grammars: Grammars,
        static: Static,
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._place = place
        self._codec = codec
        self._grammars = grammars
        self._static = static
        self._lengths = CallLengths.of(loaded.model.config.get_text_config())
        self._attention = loaded.model.config._attn_implementation
        self._flash = flash_attention(loaded.model)
        if self._flash is not None:
            log.info("continuous batches use %s", self._flash)
        self._manager: Any = None
        # The needs of all requests so far: a manager with more features is cheaper than another manager.
        self._needs, self._longest = Needs(), 0
        self._made_for: tuple[Needs, float] = (Needs(), 0)
        self._names = itertools.count()
        self._checked: set[bool] = set()
        self.given_up = False
        """Whether all requests are now computed in static batches."""

    def generate(self, requests: Sequence[Encoded]) -> Iterator[Finished]:
        """Each request's answer, in the order in which they finish."""
        # The manager's log-probabilities include our noise and masks: they are right only for free greedy requests.
        ours = [each for each in requests if not (each.request.sampling.logprobs and _is_changed(each))]
        # A batch has requests of all lengths, and may compute one token more than a request needs.
        ours = [each for each in ours if _length(each) < self._lengths.border]
        given_up = self.given_up
        if ours:
            self._needs |= Needs.of(ours)
            self._longest = max(self._longest, *map(_length, ours))
        self._check(ours)
        left = {id(each): each for each in requests}
        if ours and not self.given_up:
            try:
                for finished in self._serve(ours):
                    del left[id(finished.encoded)]
                    yield finished
            except _FailedError as failure:
                self._give_up(failure, len(left))
        if self.given_up and not given_up:
            free_memory()  # no traceback refers to the cache any more
        if left:
            self.release()  # the cache uses most of the memory
            yield from self._static(list(left.values()))

    def release(self) -> None:
        """End the thread and free the cache; the next call makes new ones."""
        manager, self._manager = self._manager, None
        model = self._loaded.model
        model.__dict__.pop(KEPT, None)
        if manager is not None:
            gc.unfreeze()
            if manager.is_running():
                manager.stop(block=True, timeout=STOP_S, hard_stop=True)
            if manager.is_running():
                log.error("the thread of continuous batching does not end; it may wait for a failed rank")
            else:
                manager.destroy()
                del manager
                free_memory()
        self._switch(self._attention)

    def _switch(self, attention: str) -> None:
        """Set the model's attention, which a failed manager does not restore."""
        if self._loaded.model.config._attn_implementation != attention:
            self._loaded.model.set_attn_implementation(attention)

    def _check(self, requests: Sequence[Encoded]) -> None:
        """Compare the first greedy and sampled requests with static batches; give up if they differ."""
        kinds = {_is_sampled(each) for each in requests} - self._checked
        if not kinds or self.given_up:
            return
        self._checked |= kinds
        asked = probes([each for each in requests if _is_sampled(each) in kinds])
        self.release()
        expected = list(self._static(asked))
        try:
            self._compare(expected, list(self._serve(asked)))
        except _FailedError as failure:
            self._give_up(failure, len(requests))

    def _compare(self, expected: Sequence[Finished], found: Sequence[Finished]) -> None:
        if agree(expected, found):
            return
        self.release()  # the comparison needs the cache's memory
        try:
            reason = difference(self._loaded.model, self._grammars, expected, found, self._options.precision)
        except Exception as error:
            raise _FailedError(f"the comparison with static batches failed: {described(error)}", error) from error
        if reason is not None:
            # All ranks have the same tokens, and so the same result.
            raise _FailedError(f"it disagrees with static batches: {reason}", common=True)

    def _give_up(self, failure: _FailedError, n_left: int) -> None:
        self.given_up = True
        if self._place.world_size > 1 and not failure.common:
            # The other ranks may still wait for this one; after an error the batch is computed again, statically.
            self.release()
            raise failure.cause or RuntimeError(f"continuous batching failed: {failure}")
        log.warning("continuous batching failed; %d requests continue in static batches: %s", n_left, failure)
        self._place.note("static_batches", 1)
        self.release()

    def _serve(self, requests: Sequence[Encoded]) -> Iterator[Finished]:
        """Answers from the manager, which stops afterwards, so that the model is free between calls."""
        try:
            manager = self._start()
        except Exception as error:
            self.release()
            # Errors of the model, the version or the image are the same on all ranks.
            common = isinstance(error, ValueError | TypeError | AttributeError | NotImplementedError | ImportError)
            raise _FailedError(described(error), error, common=common) from error
        # Sorted, so that neighbours share prefixes.
        waiting = deque(sorted(requests, key=lambda each: each.tokens))
        pending: dict[str, Encoded] = {}
        whole = False
        try:
            while waiting or pending:
                while waiting and len(pending) < 2 * MOST_REQUESTS:
                    self._add(manager, waiting.popleft(), pending)
                output = manager.get_result(timeout=PATIENCE_S)
                if output is None:
                    _check_running(manager)
                elif output.request_id in pending:
                    finished = self._read(manager, output, pending[output.request_id])
                    if finished is not None:
                        del pending[output.request_id]
                        yield finished
            whole = True
        finally:
            if whole:
                manager.stop(block=True, keep_for_next_session=True)
                self._switch(self._attention)
            else:
                del manager  # the last reference to the cache
                self.release()

    def _add(self, manager: Any, encoded: Encoded, pending: dict[str, Encoded]) -> None:
        name = str(next(self._names))
        added = manager.add_request(
            list(encoded.tokens),
            request_id=name,
            max_new_tokens=encoded.request.sampling.max_tokens,
            streaming=bool(encoded.request.sampling.stop),
            eos_token_id=[*self._loaded.eos_ids] or [-1],
            **continuous_sampling.arguments(encoded, self._grammars),
        )
        # With tensor parallelism rank 0 adds requests for all ranks, and each gets all outputs, in the same order.
        if added is None and manager.is_tp_driver:
            _check_running(manager)
            raise _FailedError("the manager took no more requests")
        pending[name] = encoded

    def _read(self, manager: Any, output: Any, encoded: Encoded) -> Finished | None:
        """The answer if it is finished."""
        if output.error is not None:
            raise _FailedError(str(output.error), manager.background_thread_status.fatal_error)
        tokens = tuple(output.generated_tokens)
        if output.is_finished() and (problem := self._problem(encoded, tokens)) is not None:
            return Finished(encoded, tokens, "error", error=problem)
        sampling = encoded.request.sampling
        logprobs = tuple(output.logprobs) if sampling.logprobs else None
        ended = bool(tokens) and tokens[-1] in self._loaded.eos_ids
        if sampling.stop and not ended and self._codec.decoder.has_stopped(tokens, sampling.stop):
            if not output.is_finished():
                manager.cancel_request(output.request_id)
            return Finished(encoded, tokens, "stop", logprobs)
        if not output.is_finished():
            return None
        if not ended and len(tokens) != sampling.max_tokens:
            raise _FailedError(f"an answer of {len(tokens)} tokens has no end token")
        return Finished(encoded, tokens, "stop" if ended else "length", logprobs)

    def _problem(self, encoded: Encoded, tokens: Sequence[int]) -> str | None:
        """Why llguidance could not follow the answer to its end; None if it could."""
        matcher = self._grammars.start(encoded)
        if matcher is None:
            return None
        for token in tokens:
            matcher.take(token)
        return matcher.error

    def _start(self) -> Any:
        needs, longest = self._needs, self._longest
        # The model keeps the manager between calls; if it is missing, another call is still using it.
        is_free = hasattr(self._loaded.model, KEPT)
        if self._manager is not None and (not is_free or needs != self._made_for[0] or longest > self._made_for[1]):
            self.release()
        self._switch(self._flash or self._attention)
        if self._manager is None:
            self._manager = self._make(needs, longest)
            self._made_for = (needs, math.inf if self._loaded.model.device.type == "cuda" else longest)
        else:
            # Returns the manager kept in the model, after switching the model's attention if needed.
            self._manager = self._loaded.model.init_continuous_batching()
        self._manager.start()
        return self._manager

    def _make(self, needs: Needs, longest: int) -> Any:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        # It logs each call with its own handler.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
        graphs = self._options.cuda_graphs is not False
        wanted = settings(needs, longest, self._loaded, flash=self._flash is not None, graphs=graphs)
        known = {each.name for each in dataclasses.fields(ContinuousBatchingConfig)}
        if "page_size" in known:
            wanted.pop("block_size", None)
        manager = self._loaded.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known}),
        )
        if needs.changes:
            grammars = self._grammars if needs.structured else None
            prepare_kernels(self._loaded.model.device)
            manager.logit_processor = continuous_sampling.sampler(grammars, MOST_REQUESTS, needs.kinds)
        manager.warmup()
        # Each stop of the manager collects garbage; frozen objects are skipped.
        gc.collect()
        gc.freeze()
        return manager


def _is_sampled(encoded: Encoded) -> bool:
    return encoded.request.sampling.temperature > 0


def _is_changed(encoded: Encoded) -> bool:
    """Whether anything other than the model's own scores affects the choice of tokens."""
    return _is_sampled(encoded) or encoded.request.sampling.structure is not None


def _length(encoded: Encoded) -> int:
    return len(encoded.tokens) + encoded.request.sampling.max_tokens


def _check_running(manager: Any) -> None:
    """_FailedError if the manager's thread has ended."""
    error = manager.background_thread_status.fatal_error
    if error is not None or not manager.is_running():
        reason = described(error) if error else "the manager's thread ended before all answers were finished"
        raise _FailedError(reason, error)
