"""The engine on transformers for models of AutoModelForImageTextToText, which take images with text."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.batching import budget_of
from slurmgpu.llm.interface.engine import EngineOptions, Likelihood, Output, Passage, Place, Question, Request, Scores
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import PromptError
from slurmgpu.llm.prompts.image_prompts import ImagePrompts, ShownRequest, load_processor, marks_of
from slurmgpu.llm.transformers_engine.grammars import Grammars
from slurmgpu.llm.transformers_engine.image_batches import ImageBatches, ImageModel
from slurmgpu.llm.transformers_engine.image_scoring import ImageScorer
from slurmgpu.llm.transformers_engine.loading import load_model
from slurmgpu.llm.transformers_engine.rows import Chooser
from slurmgpu.util.out_of_memory import free_memory

log = logging.getLogger(__name__)

CROSS_ATTENTION = ("mllama",)
"""Model types with cross-attention to images by a mask over tokens, which this engine does not pad."""


class ImageEngine:
    """A model in transformers that takes images, with batches by the model's own `generate`."""

    def __init__(self, options: EngineOptions, place: Place) -> None:
        from transformers import GenerationConfig

        kind = options.model.config.get("model_type")
        if kind in CROSS_ATTENTION:
            raise SlurmGPUError(
                f"{options.model.name} has the type {kind}, which uses cross-attention for images, and the engine "
                "transformers does not support that; expected a model such as Qwen2.5-VL, LLaVA or Gemma 3."
            )
        processor = load_processor(options)
        loaded = load_model(options, place)
        loaded = dataclasses.replace(loaded, tokenizer=processor.tokenizer)
        # `generate` would take unset options from the checkpoint, such as a repetition penalty.
        loaded.model.generation_config = GenerationConfig()
        self._codec = Codec(processor.tokenizer, options, loaded.context, marks_of(processor))
        self._prompts = ImagePrompts(processor, self._codec)
        budget = budget_of(options, loaded, place)
        width = loaded.model.config.get_text_config().vocab_size
        grammars = Grammars(processor.tokenizer, self._codec, loaded.eos_ids, width)
        model = ImageModel(loaded)
        self._batches = ImageBatches(model, Chooser(self._codec, grammars, loaded.eos_ids), budget)
        self._scorer = ImageScorer(model, self._codec, self._prompts, budget)
        log.info("images by %s; batches of at most %d tokens", type(processor).__name__, budget.tokens)

    def generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Each request's output, in the order in which they finish."""
        for group in self._prompts.encode(requests):
            asked: list[ShownRequest] = []
            for request, found in group:
                if isinstance(found, PromptError):
                    yield found.output(request)
                else:
                    asked.append(found)
            for finished in self._batches.generate(asked):
                yield self._codec.decoder.decode(finished)

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """Each question's scores, in any order."""
        yield from self._scorer.score(questions)

    def likelihoods(self, passages: Sequence[Passage]) -> Iterator[Likelihood]:
        """Not supported: no workload that reads texts has images."""
        raise SlurmGPUError("The probabilities of a text's tokens cannot be computed after images.")

    def close(self) -> None:
        """Free memory."""
        free_memory()
