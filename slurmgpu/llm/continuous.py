"""Continuous batching: a request that ends makes room for the next at once, and prefixes of prompts are shared.

Transformers' manager does it in a thread of its own. It never raises: what fails comes back as an output that says so,
or not at all, so every output is looked at, and what is missing at the end is computed in static batches.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slurmgpu.llm import continuous_sampling
from slurmgpu.llm.answers import Codec, Encoded, Finished
from slurmgpu.llm.attention import flash_attention
from slurmgpu.llm.batching import free_memory
from slurmgpu.llm.continuous_settings import MOST_REQUESTS, Needs, is_8bit, settings
from slurmgpu.llm.engine import EngineOptions, Place
from slurmgpu.llm.selfcheck import agree, difference, probes

if TYPE_CHECKING:
    from slurmgpu.llm.loading import Loaded

log = logging.getLogger(__name__)

Static = Callable[[Sequence[Encoded]], Iterator[Finished]]

PATIENCE_S, STOP_S = 1.0, 5.0
"""How often to look whether the manager's thread still lives, and how long to wait for its end after a failure."""


class _FailedError(Exception):
    """The manager failed; `cause` is its exception, if it left one, and `common` whether all ranks have failed so."""

    def __init__(self, message: str, cause: BaseException | None = None, *, common: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.common = common


def available(loaded: Loaded, place: Place) -> str | None:
    """Why this model cannot be served by continuous batching; None if it can."""
    model = loaded.model
    if not hasattr(model, "init_continuous_batching"):
        return f"{type(model).__name__} has no continuous batching"
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"its layers are spread over {len(devices)} devices, and the cache is on one"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if strange := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of another kind than attention: {', '.join(strange)}"
    return None


def advisable(loaded: Loaded, place: Place) -> str | None:
    """Why static batches are likely the faster way for this model here; None if continuous batching is."""
    if reason := available(loaded, place):
        return reason
    if loaded.model.device.type != "cuda":
        return "it computes on the CPU"
    if is_8bit(loaded.model):
        return "8-bit weights of bitsandbytes cannot be captured in CUDA graphs, without which it is slow"
    # Without flash attention a mask over all tokens of all requests is built: 2.3 times slower on long prompts.
    if flash_attention(loaded.model) is None:
        return "flash attention is not installed here, or the model cannot use it"
    return None


class Continuous:
    """Generates by continuous batching; what that cannot do or fails to do, by `static`, which gives the same."""

    def __init__(self, loaded: Loaded, options: EngineOptions, place: Place, codec: Codec, static: Static) -> None:
        self._loaded = loaded
        self._options = options
        self._place = place
        self._codec = codec
        self._static = static
        self._attention = loaded.model.config._attn_implementation
        self._flash = flash_attention(loaded.model)
        if self._flash is not None:
            log.info("continuous batches have %s", self._flash)
        self._manager: Any = None
        # Of all requests so far: a manager for more than a batch needs is cheaper than another one.
        self._needs, self._longest = Needs(), 0
        self._made_for: tuple[Needs, float] = (Needs(), 0)
        self._names = itertools.count()
        self._checked: set[bool] = set()
        self._given_up = False

    def generate(self, requests: Sequence[Encoded]) -> Iterator[Finished]:
        """Each request's answer, in the order in which they finish."""
        ours = [each for each in requests if self._can_do(each)]
        given_up = self._given_up
        if ours:
            self._needs |= Needs.of(ours)
            self._longest = max(self._longest, *map(_length, ours))
        self._check(ours)
        left = {id(each): each for each in requests}
        if ours and not self._given_up:
            try:
                for finished in self._serve(ours):
                    del left[id(finished.encoded)]
                    yield finished
            except _FailedError as failure:
                self._give_up(failure, len(left))
        if self._given_up and not given_up:
            free_memory()  # only here has the failure's traceback let go of the cache
        if left:
            self.release()  # the cache holds most of the memory
            yield from self._static(list(left.values()))

    def release(self) -> None:
        """Give back the cache's memory and the thread; the next call makes them again."""
        manager, self._manager = self._manager, None
        model = self._loaded.model
        model.__dict__.pop("_cached_continuous_batching_manager", None)
        if manager is not None:
            gc.unfreeze()
            if manager.is_running():
                manager.stop(block=True, timeout=STOP_S, hard_stop=True)
            if manager.is_running():
                log.error("the thread of continuous batching does not end; it may wait for a rank that has failed")
            else:
                manager.destroy()
                del manager
                free_memory()  # what waits for the collector too
        self._switch(self._attention)

    close = release

    def _switch(self, attention: str) -> None:
        """Let the model compute with this attention; a manager that has failed leaves it with that of its own."""
        if self._loaded.model.config._attn_implementation != attention:
            self._loaded.model.set_attn_implementation(attention)

    def _can_do(self, encoded: Encoded) -> bool:
        # The manager's log-probabilities are those of the scores after our noise: right for greedy requests alone.
        sampling = encoded.request.sampling
        return not (sampling.logprobs and sampling.temperature > 0)

    def _check(self, requests: Sequence[Encoded]) -> None:
        """Compare with static batches what comes first of its kind, greedy or sampled; on a difference give up."""
        kinds = {_is_sampled(each) for each in requests} - self._checked
        if not kinds or self._given_up:
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
        """Raise if what was found is not as good as what was expected."""
        if agree(expected, found):
            return
        self.release()  # to compare is to compute, and the cache has left no memory for that
        try:
            reason = difference(self._loaded.model, expected, found, self._options.precision)
        except Exception as error:
            raise _FailedError(f"it could not be compared: {type(error).__name__}: {error}", error) from error
        if reason is not None:
            # The ranks have the same tokens, and come to the same conclusion.
            raise _FailedError(f"it disagrees with static batches: {reason}", common=True)

    def _give_up(self, failure: _FailedError, n_left: int) -> None:
        self._given_up = True
        if self._place.world_size > 1 and not failure.common:
            # The other ranks may still wait for this one. If they do not, the batch is computed again, statically.
            self.release()
            raise failure.cause or RuntimeError(f"continuous batching failed: {failure}")
        log.warning("continuous batching is given up, %d requests go on in static batches: %s", n_left, failure)
        self._place.note("static_batches", 1)
        self.release()

    def _serve(self, requests: Sequence[Encoded]) -> Iterator[Finished]:
        """Answers by the manager, which runs only meanwhile: between calls the model is free for others."""
        try:
            manager = self._start()
        except Exception as error:
            self.release()
            # What a model, a version or an image cannot do, it can on no rank.
            common = isinstance(error, ValueError | TypeError | AttributeError | NotImplementedError | ImportError)
            raise _FailedError(f"{type(error).__name__}: {error}", error, common=common) from error
        # Neighbours share their prefixes.
        waiting = deque(sorted(requests, key=lambda each: each.tokens))
        pending: dict[str, Encoded] = {}
        whole = False
        try:
            while waiting or pending:
                while waiting and len(pending) < 2 * MOST_REQUESTS:
                    self._add(manager, waiting.popleft(), pending)
                output = manager.get_result(timeout=PATIENCE_S)
                if output is None:
                    _look_after(manager)
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
                del manager  # so that nothing holds the cache
                self.release()

    def _add(self, manager: Any, encoded: Encoded, pending: dict[str, Encoded]) -> None:
        name = str(next(self._names))
        added = manager.add_request(
            list(encoded.tokens),
            request_id=name,
            max_new_tokens=encoded.request.sampling.max_tokens,
            streaming=bool(encoded.request.sampling.stop),
            eos_token_id=[*self._loaded.eos_ids] or [-1],
            **continuous_sampling.arguments(encoded),
        )
        # Under tensor parallelism rank 0 adds for all, and each rank gets all outputs, in the same order.
        if added is None and manager.is_tp_driver:
            _look_after(manager)
            raise _FailedError("it took no more requests")
        pending[name] = encoded

    def _read(self, manager: Any, output: Any, encoded: Encoded) -> Finished | None:
        """The answer, if the output ends it."""
        if output.error is not None:
            raise _FailedError(str(output.error), manager.background_thread_status.fatal_error)
        tokens = tuple(output.generated_tokens)
        sampling = encoded.request.sampling
        logprobs = tuple(output.logprobs) if sampling.logprobs else None
        ended = bool(tokens) and tokens[-1] in self._loaded.eos_ids
        if sampling.stop and not ended and self._codec.has_stopped(tokens, sampling.stop):
            if not output.is_finished():
                manager.cancel_request(output.request_id)
            return Finished(encoded, tokens, "stop", logprobs)
        if not output.is_finished():
            return None
        if not ended and len(tokens) != sampling.max_tokens:
            raise _FailedError(f"an answer of {len(tokens)} tokens has no end")
        return Finished(encoded, tokens, "stop" if ended else "length", logprobs)

    def _start(self) -> Any:
        needs, longest = self._needs, self._longest
        if self._manager is not None and (needs != self._made_for[0] or longest > self._made_for[1]):
            self.release()
        self._switch(self._flash or self._attention)
        if self._manager is None:
            self._manager = self._make(needs, longest)
            self._made_for = (needs, math.inf if self._loaded.model.device.type == "cuda" else longest)
        else:
            # The manager that is kept on the model; it may have to switch the model's attention again.
            self._manager = self._loaded.model.init_continuous_batching()
        self._manager.start()
        return self._manager

    def _make(self, needs: Needs, longest: int) -> Any:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        # It has a line for each call, and a handler of its own.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
        wanted = settings(needs, longest, self._loaded, flash=self._flash is not None)
        known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        if "page_size" in known:
            wanted.pop("block_size", None)
        manager = self._loaded.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known}),
        )
        if needs.sampled:
            manager.logit_processor = continuous_sampling.sampler(narrows=needs.narrows)
        manager.warmup()
        # Each stop of the manager collects garbage; among what is loaded by now there is none to be found.
        gc.collect()
        gc.freeze()
        return manager


def _is_sampled(encoded: Encoded) -> bool:
    return encoded.request.sampling.temperature > 0


def _length(encoded: Encoded) -> int:
    return len(encoded.tokens) + encoded.request.sampling.max_tokens


def _look_after(manager: Any) -> None:
    """Raise if no more outputs will come."""
    error = manager.background_thread_status.fatal_error
    if error is not None or not manager.is_running():
        reason = f"{type(error).__name__}: {error}" if error else "its thread ended before all answers had come"
        raise _FailedError(reason, error)
