"""The engine on vLLM, with the prompts and answers of the other engine.

Written for vLLM 0.33, by its source; it needs its own image, since it pins PyTorch and transformers.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.answers import Codec, Encoded, Finished, PromptError
from slurmgpu.llm.engine import TORCH_NAMES, EngineOptions, Output, Place, Question, Request, Scores
from slurmgpu.llm.scoring import Asked, ask, scores_of
from slurmgpu.llm.splitting import QUANTIZATIONS, check_vllm

log = logging.getLogger(__name__)

GREATEST_TEMPERATURE = 2.0
MOST_LOGPROB_TOKENS = 128
"""vLLM's own limits: `SamplingParams.temperature`, and the length of its `logprob_token_ids`."""

Tokens = tuple[int, ...]


class VllmEngine:
    """A model in vLLM, on all GPUs of a task of one process."""

    def __init__(self, options: EngineOptions, place: Place) -> None:
        arguments = llm_arguments(options, place)
        _prepare_environment()
        try:
            from vllm import LLM
        except ImportError as error:
            raise SlurmGPUError(
                f'engine = "vllm" needs the package vllm, which cannot be imported here ({error}). Use an image of '
                '`slurmgpu image build --vllm`, or engine = "transformers".'
            ) from error
        from transformers import AutoTokenizer

        self._llm: Any = LLM(**arguments)
        self._context = int(self._llm.model_config.max_model_len)
        tokenizer = AutoTokenizer.from_pretrained(
            str(options.model.folder), revision=options.model.revision, trust_remote_code=options.trust_remote_code
        )
        self._codec = Codec(tokenizer, options, self._context)

    def generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Each request's output, all at the end."""
        encoded: list[Encoded] = []
        for request in requests:
            try:
                _check(request)
                encoded.append(self._codec.encode(request))
            except PromptError as error:
                yield error.output(request)
        answers = self._run([each.tokens for each in encoded], [_sampling_arguments(each) for each in encoded])
        for one, answer in zip(encoded, answers, strict=True):
            yield self._codec.decode(_finished(one, answer))

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """Each question's scores."""
        asked: list[Asked] = []
        for question in questions:
            try:
                asked.append(ask(question, self._codec, self._context))
            except PromptError as error:
                yield Scores(question.id, np.empty(0), np.empty(0, np.int64), error=str(error))
        # One request for each place where choices differ; vLLM's prefix cache reads the prompt once.
        places = [(number, prefix, ids) for number, each in enumerate(asked) for prefix, ids in _forks(each.choices)]
        prompts = [asked[number].prompt + prefix for number, prefix, _ in places]
        answers = self._run(
            prompts,
            [
                {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "logprob_token_ids": ids}
                for _, _, ids in places
            ],
        )
        known: list[dict[tuple[Tokens, int], float]] = [{} for _ in asked]
        problems: dict[int, str] = {}
        for (number, prefix, ids), answer in zip(places, answers, strict=True):
            if (problem := _problem(answer)) is not None:
                problems[number] = problem
                continue
            found = answer.logprobs[0]
            known[number].update({(prefix, token): found[token].logprob for token in ids})
        for number, each in enumerate(asked):
            yield _scores(each, known[number], problems.get(number))

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm = None
        gc.collect()  # they end with the last reference to the engine

    def _run(self, prompts: Sequence[Tokens], arguments: Sequence[dict[str, Any]]) -> list[Any]:
        if not prompts:
            return []
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": list(each)} for each in prompts],
            [SamplingParams(**each) for each in arguments],
            use_tqdm=False,
        )
        if len(outputs) != len(prompts):
            raise RuntimeError(f"vLLM answered {len(outputs)} of {len(prompts)} requests")
        return [each.outputs[0] if each.outputs else None for each in outputs]


def llm_arguments(options: EngineOptions, place: Place) -> dict[str, Any]:
    """The arguments of `vllm.LLM`; SlurmGPUError for impossible options."""
    model = options.model
    if place.world_size > 1:
        raise SlurmGPUError(
            'engine = "vllm" starts its own processes for several GPUs; set [resources] processes = "one", '
            f"not one process for each of {place.world_size} GPUs."
        )
    if place.gpus == 0:
        raise SlurmGPUError('engine = "vllm" needs a GPU; on a CPU use engine = "transformers".')
    check_vllm(options, place.gpus, is_asked=True)
    arguments = {
        "model": str(model.folder),
        "revision": model.revision,
        "trust_remote_code": options.trust_remote_code,
        "tensor_parallel_size": place.gpus,
        "dtype": TORCH_NAMES[options.precision],
        "quantization": None if model.quantization is None else QUANTIZATIONS[model.quantization],
        "seed": 0,
        "enable_prefix_caching": True,
        # Not the checkpoint's generation config.
        "generation_config": "vllm",
    }
    if options.max_context is not None:
        arguments["max_model_len"] = options.max_context
    return arguments


def _prepare_environment() -> None:
    # With a launcher's variables it would act as one rank of several.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith("VLLM_DP_")]:
        del os.environ[name]
    # A fork of a process with threads or CUDA may hang.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _check(request: Request) -> None:
    if request.sampling.temperature > GREATEST_TEMPERATURE:
        raise PromptError(
            f"temperature is {request.sampling.temperature:g}; vLLM allows at most {GREATEST_TEMPERATURE:g}"
        )


def _sampling_arguments(encoded: Encoded) -> dict[str, Any]:
    sampling = encoded.request.sampling
    arguments: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "detokenize": bool(sampling.stop),  # vLLM needs text only to find stop texts
    }
    if sampling.temperature > 0:
        arguments["seed"] = encoded.request.key
    if sampling.logprobs:
        arguments["logprobs"] = 0  # of the chosen token only
    return arguments


def _problem(answer: Any) -> str | None:
    if answer is not None and answer.finish_reason in ("stop", "length"):
        return None
    return f"vLLM ended the request: {answer.finish_reason if answer is not None else 'no answer'}"


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
    following: dict[Tokens, dict[int, None]] = {}
    for choice in choices:
        for place, token in enumerate(choice):
            following.setdefault(choice[:place], {})[token] = None
    for prefix, tokens in following.items():
        ids = list(tokens)
        for start in range(0, len(ids), MOST_LOGPROB_TOKENS):
            yield prefix, ids[start : start + MOST_LOGPROB_TOKENS]


def _scores(asked: Asked, known: dict[tuple[Tokens, int], float], problem: str | None) -> Scores:
    if problem is not None:
        return Scores(asked.question.id, np.empty(0), np.empty(0, np.int64), asked.n_prompt_tokens, problem)
    sums = [sum(known[choice[:place], token] for place, token in enumerate(choice)) for choice in asked.choices]
    return scores_of(asked, np.array(sums, np.float64))
