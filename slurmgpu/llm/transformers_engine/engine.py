"""The engine on transformers, with two ways to batch requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.batching import budget_of
from slurmgpu.llm.interface.engine import EngineOptions, Likelihood, Output, Passage, Place, Question, Request, Scores
from slurmgpu.llm.interface.sampling import prepare_kernels
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import Encoded, PromptError
from slurmgpu.llm.prompts.windows import likelihoods
from slurmgpu.llm.transformers_engine.decoding_choice import DecodingChoice
from slurmgpu.llm.transformers_engine.grammars import Grammars
from slurmgpu.llm.transformers_engine.loading import Loaded, load_model
from slurmgpu.llm.transformers_engine.prefill import PADDING, Prefill
from slurmgpu.llm.transformers_engine.rows import Chooser
from slurmgpu.llm.transformers_engine.scoring import Scorer
from slurmgpu.llm.transformers_engine.static import StaticBatches
from slurmgpu.llm.transformers_engine.token_scoring import TokenScorer
from slurmgpu.util.out_of_memory import free_memory

if TYPE_CHECKING:
    from slurmgpu.llm.transformers_engine.continuous import Continuous

log = logging.getLogger(__name__)

T = TypeVar("T", Request, Question, Passage)


class TransformersEngine:
    """A model in transformers, with static batches, or continuous batches if they are faster."""

    def __init__(self, options: EngineOptions, place: Place) -> None:
        loaded = load_model(options, place)
        self._codec = Codec(loaded.tokenizer, options, loaded.context, n_known=loaded.n_known)
        budget = budget_of(options, loaded, place)
        self._prefill = Prefill(loaded, place)
        if place.world_size > 1:  # a single process prepares them at its first draw
            prepare_kernels(loaded.device, self._prefill.is_so_on_all)
        width = loaded.model.config.get_text_config().vocab_size
        self._grammars = Grammars(loaded.tokenizer, self._codec, loaded.eos_ids, width)
        chooser = Chooser(self._codec, self._grammars, loaded.eos_ids)
        self._decodings = DecodingChoice(loaded, options, place, self._prefill, budget)
        self._static = StaticBatches(chooser, budget, self._prefill, self._decodings)
        self._scorer = Scorer(self._codec, budget, self._prefill)
        self._token_scorer = TokenScorer(budget, self._prefill, loaded.model.config.get_text_config())
        self._continuous = self._open_continuous(loaded, options, place)
        self._loaded = loaded
        way = "" if self._continuous is None else "continuous batches; if impossible, "
        log.info("%sstatic batches of at most %d tokens", way, budget.tokens)

    def generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Each request's output, in the order in which they finish, grouped by adapter."""
        for some in self._by_adapter(requests):
            yield from self._generate(some)

    def _generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        encoded: list[Encoded] = []
        for request in requests:
            try:
                encoded.append(self._codec.encode(request))
            except PromptError as error:
                yield error.output(request)
        if self._continuous is None or self._continuous.given_up:
            self._decodings.decide()
        batches = self._continuous or self._static
        for finished in batches.generate(encoded):
            yield self._codec.decoder.decode(finished)

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """Each question's scores, in any order, grouped by adapter."""
        self._release()
        for some in self._by_adapter(questions):
            yield from self._scorer.score(some)

    def likelihoods(self, passages: Sequence[Passage]) -> Iterator[Likelihood]:
        """The log-probabilities of each passage's tokens, in any order, grouped by adapter."""
        self._release()
        for some in self._by_adapter(passages):
            yield from likelihoods(some, self._codec, self._loaded.context, self._token_scorer.read)

    def _by_adapter(self, asked: Sequence[T]) -> Iterator[list[T]]:
        """Group requests by adapter; the model uses a group's adapter until the next group is taken."""
        switch = self._loaded.switch
        groups: dict[str, list[T]] = {}
        for each in asked:
            groups.setdefault(each.prompt.adapter, []).append(each)
        for name in sorted(groups):
            if switch is not None and switch.use(name):
                self._prefill.forget()  # each adapter computes a shared prefix differently
            yield groups[name]

    def _release(self) -> None:
        """Free the memory that generation keeps from one call to the next."""
        if self._continuous is not None:
            self._continuous.release()
        self._decodings.release()

    def close(self) -> None:
        """End threads and free memory."""
        self._release()
        self._prefill.forget()
        free_memory()

    def _open_continuous(self, loaded: Loaded, options: EngineOptions, place: Place) -> Continuous | None:
        if options.batching == "static" or loaded.switch is not None:
            return None
        if options.beside is not None:
            log.info("no continuous batching: its cache would take the memory that %s needs", options.beside.name)
            return None
        from slurmgpu.llm.transformers_engine.continuous import Continuous
        from slurmgpu.llm.transformers_engine.continuous_support import advisable, available

        obstacle = None if self._prefill.takes_padding else PADDING
        if options.batching == "continuous":
            if (reason := available(loaded) or obstacle) is not None:
                raise SlurmGPUError(f'batching = "continuous" is impossible for {options.model.name}: {reason}.')
        elif (reason := advisable(loaded) or obstacle) is not None:
            log.info("no continuous batching: %s", reason)
            return None
        return Continuous(loaded, options, place, self._codec, self._grammars, self._static.generate)
