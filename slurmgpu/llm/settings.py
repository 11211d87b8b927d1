"""The settings that all workloads with a language model have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args, get_type_hints

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engine import Batching, EngineOptions, Precision, Sampling
from slurmgpu.llm.models import find_model

EngineName = Literal["transformers", "vllm"]


class ModelSettings(TypedDict, total=False):
    """Which engine computes, and how; docs/reference/language-models.md has a line for each."""

    revision: str
    trust_remote_code: bool
    engine: EngineName
    precision: Precision
    batching: Batching
    batch_tokens: int
    max_context: int
    chat: bool
    chat_options: dict[str, Any]


class SamplingSettings(ModelSettings, total=False):
    """How answers are sampled, beside which engine does it."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: list[str]


def engine_options(model: str, settings: Mapping[str, Any]) -> EngineOptions:
    """The options of the engine that settings describe; SlurmGPUError for a value that cannot be."""
    found = {name: settings[name] for name in get_type_hints(ModelSettings) if name in settings}
    _check_choice("engine", found.get("engine", "transformers"), EngineName)
    _check_choice("precision", found.get("precision", "bf16"), Precision)
    _check_choice("batching", found.get("batching", "auto"), Batching)
    for name in ("batch_tokens", "max_context"):
        _check_range(name, found.get(name, 1), 1, None)
    revision = found.pop("revision", None)
    source = find_model(model, revision=revision, trust_remote_code=found.get("trust_remote_code", False))
    return EngineOptions(source, **found)


def sampling_names() -> set[str]:
    """The names of the settings that say how answers are sampled."""
    return set(get_type_hints(SamplingSettings)) - set(get_type_hints(ModelSettings))


def sampling(settings: Mapping[str, Any], **defaults: Any) -> Sampling:
    """How settings say that answers are sampled; SlurmGPUError for a value that cannot be."""
    found = {**defaults, **{name: settings[name] for name in sampling_names() if name in settings}}
    _check_range("max_tokens", found.get("max_tokens", 1), 1, None)
    _check_range("temperature", found.get("temperature", 0), 0, None)
    _check_range("top_p", found.get("top_p", 1), 0, 1, low_is_in=False)
    _check_range("top_k", found.get("top_k", 0), 0, None)
    _check_range("min_p", found.get("min_p", 0), 0, 1)
    found["stop"] = tuple(found.get("stop", ()))
    if "" in found["stop"]:
        raise SlurmGPUError('stop holds an empty text, which would end every answer; expected texts such as "\\n".')
    return Sampling(**found)


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise SlurmGPUError(f"{name} is {value!r}; expected one of {', '.join(map(repr, get_args(choices)))}.")


def _check_range(name: str, value: float, low: float, high: float | None, *, low_is_in: bool = True) -> None:
    if value < low or (value == low and not low_is_in) or (high is not None and value > high):
        least = f"at least {low:g}" if low_is_in else f"more than {low:g}"
        raise SlurmGPUError(f"{name} is {value!r}; expected {least}{'' if high is None else f' and at most {high:g}'}.")
