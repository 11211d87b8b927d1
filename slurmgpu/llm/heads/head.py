"""The class of a trained head, from config.json, and its placement on GPUs; without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.heads.own_classes import PROCESS_REWARD, REWARD, STEP_ENDS
from slurmgpu.llm.interface.engine import EngineOptions, HeadMemory, Prompt
from slurmgpu.llm.models.decoders import GENERATES, check_takes_images, check_tokenizer
from slurmgpu.llm.models.sizes import ITEM_BYTES, inner_size, text_config
from slurmgpu.llm.models.source import ModelSource, read_json
from slurmgpu.llm.placement.needs import ROW_TOKENS, RUNTIME_BYTES, USABLE, look_at, row_tokens, usable
from slurmgpu.llm.placement.place import refuse_missing
from slurmgpu.util.amounts import gb

HeadKind = Literal["sequence", "token", "choices"]
Activation = Literal["none", "sigmoid", "softmax"]

CLASSES = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}
"""The end of the class name for each kind of head."""

OWN: Mapping[HeadKind, str] = {"sequence": REWARD, "token": PROCESS_REWARD}
"""Classes that transformers lacks, for each kind of head."""

HEADS_WITH_IMAGES = frozenset({"gemma3", "qwen3_5"})
"""Model types whose ForSequenceClassification takes images, in transformers 5.23; a test compares."""

STEP_END = "\n"
"""The default text after a step: the separator of TRL's PRMTrainer. A model's class may have another."""

USUAL_WIDTH = 4096
"""The assumed hidden size if config.json does not have it."""

N_GPUS = (2, 4, 8)
"""Numbers of GPUs that errors propose."""


@dataclass(frozen=True)
class Head:
    """A head's outputs.

    `kind`: one output for each text ("sequence"), one for each step ("token"), or the logits of given tokens after each
    step ("choices"). `activation` is the activation from training, and `step_end` the text after a step.
    """

    kind: HeadKind
    labels: tuple[str, ...]
    activation: Activation
    step_end: str = STEP_END


@dataclass(frozen=True)
class HeadInput:
    """A scored `prompt`, with the text that follows it.

    `answer` is the assistant's turn, `second` the second text of a pair, `steps` the steps of an answer; each may be
    None. `chat` says whether the prompt goes into the chat template.
    """

    id: int
    prompt: Prompt
    answer: str | None = None
    second: str | None = None
    steps: tuple[str, ...] | None = None
    chat: bool = False

    @property
    def length(self) -> int:
        """Its length in characters."""
        texts = (self.answer or "", self.second or "", *(self.steps or ()))
        return self.prompt.length + sum(map(len, texts))


def read_head(source: ModelSource, *, steps: bool, choices: Sequence[str] = ()) -> Head:
    """The head of a model, from its config.json; SlurmGPUError for a model without the needed kind of head."""
    config = source.config
    named = [str(name) for name in config.get("architectures") or ()]
    if choices:
        if not any(GENERATES.search(name) for name in named):
            raise SlurmGPUError(
                f"choices is set, and model {source.name!r} is a {_said(source)} by its config.json; expected a "
                f"decoder that rates each step with one of the choices as the next token. Remove choices."
            )
        return Head("choices", tuple(choices), "softmax")
    kind: HeadKind = "token" if steps else "sequence"
    if not any(_has_head(name, kind) for name in named):
        raise SlurmGPUError(f"model {source.name!r} is a {_said(source)} by its config.json{_expected(kind, named)}")
    labels = config.get("id2label")
    if REWARD in named:
        names: tuple[str, ...] = ("LABEL_0",)
    elif isinstance(labels, Mapping):
        names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    else:
        # transformers does not write its default of two labels.
        names = tuple(f"LABEL_{number}" for number in range(int(config.get("num_labels") or 2)))
    step_end = next((STEP_ENDS[name] for name in named if name in STEP_ENDS), STEP_END)
    if len(names) == 1:
        return Head(kind, names, "none", step_end)
    is_multi = config.get("problem_type") == "multi_label_classification"
    return Head(kind, names, "sigmoid" if is_multi else "softmax", step_end)


def _has_head(name: str, kind: HeadKind) -> bool:
    """Whether a model's class, by its name in config.json, has a head of this kind."""
    return name.endswith(CLASSES[kind]) or name == OWN[kind]


def check_head_takes_images(source: ModelSource) -> None:
    """Refuse a model whose class with a head takes no images, by its config.json."""
    kind = str(source.config.get("model_type"))
    if kind not in HEADS_WITH_IMAGES:
        raise SlurmGPUError(
            f"images is set, and model {source.name!r} has the type {kind}, whose heads take no images; expected a "
            f"model of type {' or '.join(sorted(HEADS_WITH_IMAGES))}. Remove images, or judge with a rubric."
        )
    check_takes_images(source)


def _said(source: ModelSource) -> str:
    return " and ".join(map(str, source.config.get("architectures") or (source.config.get("model_type"),)))


def _expected(kind: HeadKind, named: Sequence[str]) -> str:
    if kind == "sequence" and any(_has_head(name, "token") for name in named):
        return "; it scores tokens, not texts. Set steps to the field with the steps of an answer."
    if kind == "token" and any(_has_head(name, "sequence") for name in named):
        return "; it scores texts, not steps. Remove steps, and set answer to score an answer as a whole."
    if kind == "token" and any(GENERATES.search(name) for name in named):
        return (
            '. If it rates a step with the token after it, set choices to these tokens, such as ["+", "-"]; '
            "otherwise expected a model with ForTokenClassification."
        )
    return (
        f"; expected a model with a trained head ({CLASSES[kind]}): a classifier, a reward model or a reranker. "
        f"For a model that generates text, use the workloads classify or judge."
    )


def has_chat_template(source: ModelSource) -> bool | None:
    """Whether the tokenizer has a chat template; None if its files are not here yet."""
    if (source.folder / "chat_template.jinja").is_file():
        return True
    own = source.folder / "tokenizer_config.json"
    return bool(read_json(own).get("chat_template")) if own.is_file() else None


def head_memory(options: EngineOptions) -> HeadMemory:
    """The memory of a model; SlurmGPUError for a quantised variant, and if weights or the tokenizer are missing."""
    if options.model.quantization is not None:
        raise SlurmGPUError(
            f"model {options.model.name!r}: the suffix -{options.model.quantization} quantises decoders while they are "
            f"loaded, and is untested with a trained head. Remove the suffix, or name a quantised checkpoint."
        )
    model = look_at(options)
    refuse_missing(model)
    check_tokenizer(options.model)
    config = text_config(options.model.config)
    hidden = int(config.get("hidden_size") or config.get("dim") or config.get("d_model") or USUAL_WIDTH)
    # Counts a token like `batching.default_tokens`, without keys and values.
    widths = 6 * hidden + 3 * inner_size(config, hidden)
    activations = math.ceil(_n_tokens(options) * widths * ITEM_BYTES[options.precision])
    return HeadMemory(options.model.name, model.memory.weights, float(activations), model.memory.layers)


def place_head(options: EngineOptions, gpus: int, gpu_memory: int | None) -> tuple[str, ...]:
    """Lines that say how a model with a head uses a task's GPUs; SlurmGPUError if it does not fit, with numbers."""
    memory = head_memory(options)
    weights = f"{options.model.name}, {options.precision}: {gb(memory.weights)} of weights"
    batch = f"{gb(memory.batch)} for a batch of {_n_tokens(options):,} tokens"
    if gpus == 0:
        return (f"{weights}. On CPUs: each task needs about {gb(memory.on_each(1) + RUNTIME_BYTES)} of memory.",)
    how = "On one GPU" if gpus == 1 else f"Spread by layers over {gpus} GPUs"
    needed = memory.on_each(gpus)
    if gpu_memory is None:
        return (f"{weights}, and {batch}.", f"{how}: needs GPUs of {gb((needed + RUNTIME_BYTES) / USABLE)}.")
    if needed > usable(gpu_memory):
        more = [n for n in N_GPUS if n > gpus and memory.on_each(n) <= usable(gpu_memory)]
        advice = f"--gpus {more[0]} (gpus_per_task = {more[0]} with --array), or larger GPUs" if more else "larger GPUs"
        if options.batch_tokens is not None and options.batch_tokens > ROW_TOKENS:
            advice += ", or fewer batch_tokens"
        raise SlurmGPUError(
            f"{weights}, and {batch}. That does not fit {'one GPU' if gpus == 1 else f'{gpus} GPUs'} of "
            f"{gb(gpu_memory)}: on each, {gb(needed)} are needed, and {gb(usable(gpu_memory))} can "
            f"be used. What fits: {advice}."
        )
    lines = [
        f"{weights}, and {batch}.",
        f"{how} of {gb(gpu_memory)}: {gb(needed)} of the {gb(usable(gpu_memory))} that can be used on each.",
    ]
    if gpus > 1 and memory.on_each(1) <= usable(gpu_memory):
        lines.append(f"One GPU suffices: --array makes {gpus} replicas, which is faster than one copy on {gpus} GPUs.")
    return tuple(lines)


def _n_tokens(options: EngineOptions) -> int:
    """The tokens of the planned batch."""
    return options.batch_tokens or row_tokens(options)
