"""The engine on vLLM, with the same prompts and answers as the engine on transformers.

It needs its own image, since vLLM pins PyTorch and transformers. tests/vllm runs it on vLLM's build for CPUs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slurmgpu.errors import WorkerBrokenError
from slurmgpu.llm.interface.engine import (
    EngineOptions,
    Likelihood,
    Output,
    Passage,
    Place,
    Prompt,
    Question,
    Request,
    Scores,
    Tokens,
)
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import Encoded, Finished, PromptError
from slurmgpu.llm.prompts.image_prompts import ImagePrompts, load_processor, marks_of
from slurmgpu.llm.prompts.images import open_image
from slurmgpu.llm.prompts.questions import Asked, ask, check_room, failed, following, scores_by_token
from slurmgpu.llm.prompts.structures import lark_of
from slurmgpu.llm.prompts.windows import Read, Window, likelihoods
from slurmgpu.llm.vllm_engine.limits import vllm_refuses
from slurmgpu.llm.vllm_engine.node import NodePlace
from slurmgpu.llm.vllm_engine.start import llm_arguments, load_tokenizer, lora_requests, make_llm, prepare_environment
from slurmgpu.util.exceptions import described

MOST_LOGPROB_TOKENS = 128
"""vLLM's limit on the length of `SamplingParams.logprob_token_ids`."""

Images = list[Any]
"""The images of a prompt, as Pillow images."""


class VllmEngine:
    """A model in vLLM, on all GPUs of a task with one process."""

    def __init__(self, options: EngineOptions, place: Place) -> None:
        arguments = llm_arguments(options, place)
        self._node = NodePlace()
        try:
            prepare_environment(self._node)
            self._llm: Any = make_llm(arguments, options, place, self._node)
            tokenizer, self._stop_ids = load_tokenizer(options)
            processor = load_processor(options) if options.images else None
        except BaseException:
            self._node.close()
            raise
        marks = frozenset[str]() if processor is None else marks_of(processor)
        tokenizer = tokenizer if processor is None else processor.tokenizer
        self._codec = Codec(tokenizer, options, int(self._llm.model_config.max_model_len), marks)
        self._prompts = None if processor is None else ImagePrompts(processor, self._codec)
        self._adapters = lora_requests(options)

    def generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Each request's output, all at the end."""
        encoded: list[Encoded] = []
        shown: list[Images] = []
        known: dict[int, tuple[Images, int]] = {}
        for request in requests:
            try:
                if (problem := vllm_refuses(request.sampling.temperature)) is not None:
                    raise PromptError(problem)
                one = self._codec.encode(request)
                at = id(request.prompt)  # samples of an item have the same prompt
                known[at] = images, n_prompt = known.get(at) or self._images_of(request.prompt)
                if n_prompt:
                    self._codec.fit(request, (0,) * n_prompt)
                shown.append(images)
                encoded.append(one)
            except PromptError as error:
                yield error.output(request)
        outputs = self._outputs(
            [each.tokens for each in encoded],
            [self._sampling_arguments(each) for each in encoded],
            [each.request.prompt.adapter for each in encoded],
            shown,
        )
        for one, output in zip(encoded, outputs, strict=True):
            # vLLM has replaced each image token by the image's own tokens.
            whole = replace(one, tokens=tuple(output.prompt_token_ids)) if one.request.prompt.images else one
            yield self._codec.decoder.decode(_finished(whole, _answer(output)))

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """Each question's scores."""
        asked: list[Asked] = []
        shown: list[Images] = []
        for question in questions:
            try:
                one = ask(question, self._codec)
                images, n_prompt = self._images_of(question.prompt)
                check_room(self._codec, n_prompt, n_prompt + one.longest)
                shown.append(images)
                asked.append(one)
            except PromptError as error:
                yield failed(question, str(error))
        # One request for each position where choices differ; vLLM's prefix cache reads the prompt once.
        places = [(number, prefix, ids) for number, each in enumerate(asked) for prefix, ids in _forks(each.choices)]
        prompts = [asked[number].prompt + prefix for number, prefix, _ in places]
        outputs = self._outputs(
            prompts,
            [
                {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "logprob_token_ids": ids}
                for _, _, ids in places
            ],
            [asked[number].question.prompt.adapter for number, _, _ in places],
            [shown[number] for number, _, _ in places],
        )
        known: list[dict[tuple[Tokens, int], float]] = [{} for _ in asked]
        problems: dict[int, str] = {}
        for (number, prefix, ids), answer in zip(places, map(_answer, outputs), strict=True):
            if (problem := _problem(answer)) is not None:
                problems[number] = problem
                continue
            found = answer.logprobs[0]
            known[number].update({(prefix, token): found[token].logprob for token in ids})
        for number, each in enumerate(asked):
            if number in problems:
                yield failed(each.question, problems[number])
            else:
                yield scores_by_token(each, known[number])

    def likelihoods(self, passages: Sequence[Passage]) -> Iterator[Likelihood]:
        """The log-probabilities of each passage's tokens.

        Windows are two tokens shorter than in the other engine: vLLM reads the last token, and generates another.
        """
        return likelihoods(passages, self._codec, self._codec.context - 2, self._read)

    def _read(self, windows: Sequence[Window]) -> Iterator[tuple[int, Read]]:
        arguments = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "prompt_logprobs": 0}
        tokens, adapters = [each.tokens for each in windows], [each.adapter for each in windows]
        outputs = self._outputs(tokens, [arguments] * len(windows), adapters)
        for place, (window, output) in enumerate(zip(windows, outputs, strict=True)):
            if (problem := _problem(_answer(output))) is not None:
                yield place, Read(np.empty(0, np.float32), problem)
                continue
            scored = zip(window.tokens[-window.n_scored :], output.prompt_logprobs[-window.n_scored :], strict=True)
            yield place, Read(np.array([found[token].logprob for token, found in scored], np.float32))

    def close(self) -> None:
        """End vLLM's processes, and remove its shared memory."""
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()  # the last reference frees some of its memory
        self._node.close()

    def _sampling_arguments(self, encoded: Encoded) -> dict[str, Any]:
        sampling = encoded.request.sampling
        arguments: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            # vLLM itself only knows the tokenizer's, and searches a text without special tokens for stop texts.
            "stop_token_ids": [*self._stop_ids, *self._codec.decoder.stop_ids_of(sampling.stop)],
            "detokenize": bool(sampling.stop),  # vLLM needs text only to find stop texts
        }
        if sampling.temperature > 0:
            arguments["seed"] = encoded.request.key
        if sampling.logprobs:
            arguments["logprobs"] = 0  # of the chosen token only
        if sampling.structure is not None:
            from vllm.sampling_params import StructuredOutputsParams

            lark = lark_of(sampling.structure, self._codec.decoder.reasoning_of(encoded), self._stop_ids)
            arguments["structured_outputs"] = StructuredOutputsParams(grammar=lark)
        return arguments

    def _images_of(self, prompt: Prompt) -> tuple[Images, int]:
        """The prompt's images, and the number of tokens with the images'; nothing and 0 without images.

        PromptError if the model cannot take them. The model's processor counts the tokens here, since vLLM 0.32 rejects
        all prompts of a call if one is too long, and then hangs.
        """
        if self._prompts is None or not prompt.images:
            return [], 0
        [found] = self._prompts.show([prompt])
        if isinstance(found, PromptError):
            raise found
        return [open_image(source) for source in prompt.images], len(found.tokens)

    def _outputs(
        self,
        prompts: Sequence[Tokens],
        arguments: Sequence[dict[str, Any]],
        adapters: Sequence[str],
        images: Sequence[Images] = (),
    ) -> list[Any]:
        """The output of vLLM for each prompt."""
        if not prompts:
            return []
        from vllm import SamplingParams

        inputs: list[dict[str, Any]] = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        if any(images):
            for each, some in zip(inputs, images, strict=True):
                each["multi_modal_data"] = {"image": some}
            return self._generate(inputs, [SamplingParams(**each) for each in arguments])
        found: list[Any] = [None] * len(prompts)
        for is_adapted in (True, False):
            # Separately, since vLLM 0.32 used their neighbours' adapter for requests without one, at least on CPUs.
            some = [number for number, name in enumerate(adapters) if (name in self._adapters) == is_adapted]
            if not some:
                continue
            outputs = self._generate(
                [inputs[number] for number in some],
                [SamplingParams(**arguments[number]) for number in some],
                lora_request=[self._adapters[adapters[number]] for number in some] if is_adapted else None,
            )
            if len(outputs) != len(some):
                raise RuntimeError(f"vLLM answered {len(outputs)} of {len(some)} requests")
            for number, each in zip(some, outputs, strict=True):
                found[number] = each
        return found

    def _generate(self, inputs: list[dict[str, Any]], sampling: list[Any], **more: Any) -> list[Any]:
        """The outputs of vLLM; WorkerBrokenError if it failed during the computation.

        After a failure vLLM 0.32 keeps the requests, and the next call never ends, or also fails if one of its
        processes has died. Rejected requests are forgotten.
        """
        try:
            return list(self._llm.generate(inputs, sampling, use_tqdm=False, **more))
        except Exception as error:
            if not self._llm.llm_engine.has_unfinished_requests():
                raise
            raise WorkerBrokenError(f"vLLM failed, and cannot continue: {described(error)}") from error


def _answer(output: Any) -> Any:
    """The answer in an output; None without one."""
    return output.outputs[0] if output.outputs else None


def _problem(answer: Any) -> str | None:
    if answer is not None and answer.finish_reason in ("stop", "length"):
        return None
    return f"vLLM ended the request with: {answer.finish_reason if answer is not None else 'no answer'}"


def _finished(encoded: Encoded, answer: Any) -> Finished:
    if (problem := _problem(answer)) is not None:
        return Finished(encoded, (), "error", error=problem)
    tokens = tuple(int(token) for token in answer.token_ids)
    logprobs = None
    if encoded.request.sampling.logprobs:
        places = zip(tokens, answer.logprobs, strict=True)
        logprobs = tuple(float(found[token].logprob) for token, found in places)
    return Finished(encoded, tokens, answer.finish_reason, logprobs)


def _forks(choices: Sequence[Tokens]) -> Iterator[tuple[Tokens, list[int]]]:
    """Each common prefix of choices, with the tokens that follow it."""
    for prefix, ids in following(choices).items():
        for start in range(0, len(ids), MOST_LOGPROB_TOKENS):
            yield prefix, ids[start : start + MOST_LOGPROB_TOKENS]
