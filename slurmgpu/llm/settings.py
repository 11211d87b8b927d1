"""The settings that all workloads with a language model share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args, get_type_hints

from typing_extensions import TypedDict

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Batching, CudaGraphs, EngineOptions, Precision, Sampling, TruncationSide
from slurmgpu.llm.models.adapters import check_adapted, choice_of, find_adapters
from slurmgpu.llm.models.sizes import context_of
from slurmgpu.llm.models.source import find_model, served_model
from slurmgpu.llm.prompts.fewshot import Fewshot, fewshot_of
from slurmgpu.llm.prompts.jinja_templates import TemplateFormat, template_class
from slurmgpu.llm.prompts.template_dates import check_date
from slurmgpu.llm.prompts.templates import NO_VALUES, Last, Prompts
from slurmgpu.llm.server_engine.settings import check_server
from slurmgpu.llm.vllm_engine.limits import check_adapters, vllm_refuses

OWN_OPTIONS = ("conversation", "messages", "tokenize", "return_dict", "continue_final_message")
"""Arguments of transformers' `apply_chat_template` that are not for the settings."""

EngineName = Literal["transformers", "vllm", "server"]


class TextSettings(TypedDict, total=False):
    """The settings of text prompts that workloads with a `prompt` share."""

    template_format: TemplateFormat
    fewshot: str | list[dict[str, Any]]
    num_fewshot: int
    target: str
    fewshot_delimiter: str
    truncation_side: TruncationSide


class PromptSettings(TextSettings, total=False):
    """The settings of prompts, including images with text."""

    images: str
    image_folder: str


class ModelSettings(TypedDict, total=False):
    """The settings of the engine; docs/reference/language-models.md describes each."""

    revision: str
    model_files: dict[str, str]
    trust_remote_code: bool
    engine: EngineName
    precision: Precision
    batching: Batching
    batch_tokens: int
    max_context: int
    cuda_graphs: CudaGraphs
    compile: bool
    chat: bool
    chat_options: dict[str, Any]
    date: str
    adapter: str
    adapters: dict[str, str]
    adapter_files: dict[str, dict[str, str]]
    serve: list[str]
    url: str
    concurrency: int


class SamplingSettings(ModelSettings, total=False):
    """The settings of the engine and of sampling."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: list[str]


class PromptedModelSettings(ModelSettings, PromptSettings, total=False):
    """The settings of the engine and of prompts."""


class PromptedSettings(SamplingSettings, PromptSettings, total=False):
    """The settings of the engine, of sampling and of prompts."""


def prompts_of(
    settings: PromptSettings,
    prompt: str | None,
    messages: str | None,
    system: str | None,
    last: Last | None,
    given: Mapping[str, Any] = NO_VALUES,
    named: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Prompts:
    """The prompts from the settings; SlurmGPUError for a wrong one.

    `given` are values for templates in addition to the items' fields; `named` renames the fields of examples like those
    of items.
    """
    fewshot = fewshot_of(
        settings.get("fewshot"),
        settings.get("num_fewshot"),
        settings.get("target"),
        settings.get("fewshot_delimiter", "\n\n"),
    )
    if fewshot is not None and named is not None:
        fewshot = replace(fewshot, examples=tuple(_named_examples(fewshot, named)))
    make = template_class(settings.get("template_format", "f-string"))
    side = settings.get("truncation_side")
    images, folder = settings.get("images"), settings.get("image_folder", "")
    return Prompts(prompt, messages, system, given, last, fewshot, make, side, images, folder)


def _named_examples(
    fewshot: Fewshot, named: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    for number, example in enumerate(fewshot.examples, 1):
        try:
            yield named(example)
        except ItemError as error:
            raise SlurmGPUError(f"fewshot: example {number}: {error}") from error


def engine_options(model: str, settings: Mapping[str, Any]) -> EngineOptions:
    """The engine's options from settings; SlurmGPUError for a wrong value, or if there is no such model."""
    check_engine(settings)
    found = {name: settings[name] for name in get_type_hints(ModelSettings) if name in settings}
    found["images"] = "images" in settings
    revision = found.pop("revision", None)
    found.pop("model_files", None)
    if "serve" in found:
        found["serve"] = tuple(found["serve"])
    if found.get("engine") == "server":
        return EngineOptions(served_model(model, revision, is_here="url" not in found), **found)
    source = find_model(model, revision=revision, trust_remote_code=found.get("trust_remote_code", False))
    found.pop("adapter_files", None)
    found.pop("adapter", None)
    found["adapters"] = find_adapters(settings)
    check_adapted(source, found["adapters"])
    if settings.get("engine") == "vllm":
        check_adapters(found["adapters"])
    return EngineOptions(source, **found)


def check_engine(settings: Mapping[str, Any]) -> None:
    """Refuse wrong settings of the engine, independently of the model."""
    check_choice("engine", settings.get("engine", "transformers"), EngineName)
    check_choice("precision", settings.get("precision", "bf16"), Precision)
    check_choice("batching", settings.get("batching", "auto"), Batching)
    if (graphs := settings.get("cuda_graphs", "auto")) != "auto" and not isinstance(graphs, bool):
        raise SlurmGPUError(f'cuda_graphs is {graphs!r}; expected true, false or "auto".')
    if settings.get("compile") and graphs is False:
        raise SlurmGPUError(
            "compile is true, which only compiles steps for CUDA graphs, and cuda_graphs is false. Remove one of them."
        )
    if choice_of(settings) is not None and settings.get("batching") == "continuous":
        raise SlurmGPUError(
            'batching is "continuous", which shares prefixes between requests, but each adapter computes a prefix '
            "differently. Remove batching."
        )
    if settings.get("adapter") is not None and settings.get("engine", "transformers") not in ("transformers", "vllm"):
        raise SlurmGPUError(
            f"adapter is set, and engine is {settings['engine']!r}; only transformers and vLLM load adapters. "
            f"Remove engine, or merge the adapter into its model with peft, and set model to the result."
        )
    check_server(settings)
    _check_images(settings)
    for name in ("batch_tokens", "max_context", "concurrency"):
        check_range(name, settings.get(name, 1), 1, None)
    check_temperature("temperature", settings.get("temperature", 0.0), settings)
    if "date" in settings:
        check_date(settings["date"])
    if wrong := [name for name in OWN_OPTIONS if name in settings.get("chat_options", {})]:
        raise SlurmGPUError(
            f"chat_options has {wrong[0]!r}, which slurmgpu sets itself; expected variables of the chat template, such "
            f"as {{enable_thinking = false}}. Remove it."
        )


def _check_images(settings: Mapping[str, Any]) -> None:
    """Refuse settings that contradict `images`."""
    if "images" not in settings:
        if "image_folder" in settings:
            raise SlurmGPUError("image_folder is set, and images is not. Set images to the item field with images.")
        return
    if not settings["images"]:
        raise SlurmGPUError('images is empty; expected the name of the item field with images, such as "path".')
    if settings.get("batching") == "continuous":
        raise SlurmGPUError('batching is "continuous", which does not support images. Remove batching.')
    if settings.get("chat") is False:
        raise SlurmGPUError(
            "chat is false, and images is set: only a chat template has a place for images. Remove chat."
        )
    if wrong := next((name for name in ("adapter", "truncation_side") if name in settings), None):
        raise SlurmGPUError(f"{wrong} is set, which is for prompts without images. Remove it, or images.")


def check_temperature(name: str, value: float, settings: Mapping[str, Any]) -> None:
    """Refuse a temperature that the engine in the settings does not support."""
    if settings.get("engine") == "vllm" and (problem := vllm_refuses(value)) is not None:
        raise SlurmGPUError(problem.replace("temperature", name, 1) + ".")


def check_max_tokens(max_tokens: int, options: EngineOptions) -> None:
    """Refuse answers that fill the model's context, if that is known."""
    context = context_of(options.model, options.max_context)
    if context is not None and max_tokens >= context:
        whose = "max_context" if options.max_context == context else "the model's context"
        raise SlurmGPUError(
            f"max_tokens is {max_tokens}, and prompt and answer must fit {whose} of {context} tokens; expected less."
        )


def sampling_names() -> set[str]:
    """The names of the settings of sampling."""
    return set(get_type_hints(SamplingSettings)) - set(get_type_hints(ModelSettings))


def check_scored(settings: SamplingSettings, others: Collection[str]) -> None:
    """Refuse settings for free answers with method = "score": sampling settings, and the set ones in `others`."""
    if wrong := [*others, *sorted(sampling_names() & settings.keys())]:
        raise SlurmGPUError(
            f"{wrong[0]} is set, and method is 'score', which generates no text; it needs method = \"parse\". Remove "
            f"it, or set method."
        )


def sampling(settings: SamplingSettings, **defaults: Any) -> Sampling:
    """The sampling from settings; SlurmGPUError for a wrong value."""
    own = {name: value for name, value in settings.items() if name in sampling_names()}
    found: dict[str, Any] = {**defaults, **own}
    check_range("max_tokens", found.get("max_tokens", 1), 1, None)
    check_range("temperature", found.get("temperature", 0), 0, None)
    check_range("top_p", found.get("top_p", 1), 0, 1, low_is_in=False)
    check_range("top_k", found.get("top_k", 0), 0, None)
    check_range("min_p", found.get("min_p", 0), 0, 1)
    found["stop"] = tuple(found.get("stop", ()))
    if "" in found["stop"]:
        raise SlurmGPUError('stop holds an empty text, which would end every answer; expected texts such as "\\n".')
    return Sampling(**found)


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Refuse a value that is not one of a Literal's."""
    if value not in get_args(choices):
        raise SlurmGPUError(f"{name} is {value!r}; expected one of {', '.join(map(repr, get_args(choices)))}.")


def check_range(name: str, value: float, low: float, high: float | None, *, low_is_in: bool = True) -> None:
    """Refuse a number out of range."""
    if (
        not math.isfinite(value)
        or value < low
        or (value == low and not low_is_in)
        or (high is not None and value > high)
    ):
        least = f"at least {low:g}" if low_is_in else f"more than {low:g}"
        raise SlurmGPUError(f"{name} is {value!r}; expected {least}{'' if high is None else f' and at most {high:g}'}.")
