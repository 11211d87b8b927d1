"""What an engine is: it completes prompts, and says how likely given answers are. Workloads know nothing else of one.

No torch in here: settings are also checked on login nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from slurmgpu.llm.models import ModelSource

Precision = Literal["bf16", "fp16", "fp32"]
Batching = Literal["auto", "static", "continuous"]
FinishReason = Literal["stop", "length", "error"]

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What PyTorch calls each precision."""


class Composed(str):
    """A text that a template made: `quoted` are the (start, stop) of what comes from the item, the rest is ours."""

    quoted: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, quoted: tuple[tuple[int, int], ...] = ()) -> Composed:
        """The text."""
        made = super().__new__(cls, text)
        made.quoted = quoted
        return made


@dataclass(frozen=True)
class Prompt:
    """What a model is asked: chat `messages`, or plain `text`; and `answer`, how its answer begins, if that is given.

    The engine applies the chat template and tokenises; neither text nor answer is stripped. `system` belongs to a plain
    text: a system message where the model has a chat template, else what comes before the text and a blank line.
    What looks like a special token is text in all of these, but for what a `Composed` one does not quote.
    """

    text: str = ""
    system: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    answer: str = ""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 leave no token out.

    A text of `stop` ends an answer and is not part of it. `logprobs` asks for each token's log-probability.
    An answer for which the context has no room is an error, unless it is to `fit`: then it is cut there.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    fit: bool = False


@dataclass(frozen=True)
class Request:
    """One completion that is wanted. `id` is the caller's; `key` (63 bits) is all that its random numbers depend on."""

    id: int
    prompt: Prompt
    sampling: Sampling
    key: int = 0


@dataclass(frozen=True)
class Output:
    """One completion: `text` is the answer; `reasoning` what came before it, of models that mark that.

    `tokens` (int32) are all that were generated, an end-of-sequence token included. `logprobs` (float32, one for each
    token) are those of the model itself, before temperature and its like; None unless asked for. `finish_reason` is
    "stop" (the model ended, or a stop text came), "length", or "error", when `error` is a sentence.
    """

    id: int
    text: str = ""
    reasoning: str = ""
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: npt.NDArray[np.float32] | None = None
    n_prompt_tokens: int = 0
    finish_reason: FinishReason = "stop"
    error: str | None = None


@dataclass(frozen=True)
class Question:
    """A prompt with the answers to choose from.

    Each `n_ways` choices that follow one another are ways to write the same answer. Choices of different answers that
    are the same tokens are an error; those of one answer may be.
    """

    id: int
    prompt: Prompt
    choices: tuple[str, ...]
    n_ways: int = 1


@dataclass(frozen=True)
class Scores:
    """Of one question: log p(choice | prompt), natural logarithm, for each choice, and each choice's token count.

    The choices exclude each other: what goes on as a longer choice counts for that one alone, so that "1" is what
    begins with 1 and not with 10. A way to write an answer whose tokens an earlier way has is impossible (-inf).
    """

    id: int
    logprobs: npt.NDArray[np.float64]
    n_tokens: npt.NDArray[np.int64]
    n_prompt_tokens: int = 0
    error: str | None = None


class Engine(Protocol):
    """A loaded model. What fails for one request or question is its `error`; an exception concerns them all."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Each request's output, in the order in which they finish."""

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """Each question's scores, in any order."""

    def close(self) -> None:
        """Give back threads and memory."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made of: the model, how it computes, and how it makes batches.

    `batch_tokens` is the most tokens (prompt and answer) that a static batch may come to; None lets the engine choose.
    `max_context` cuts what the model itself allows. `chat` says whether plain prompts are put into a chat template;
    None: if the tokenizer has one. `chat_options` go to the template: enable_thinking, reasoning_effort …
    """

    model: ModelSource
    engine: str = "transformers"
    precision: Precision = "bf16"
    batching: Batching = "auto"
    batch_tokens: int | None = None
    max_context: int | None = None
    chat: bool | None = None
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Place:
    """Where an engine computes: PyTorch's `device` name, the GPUs that this process sees, and torchrun's ranks.

    `note(name, value)` records in the shard what changed its batches.
    """

    device: str
    gpus: int = 0
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    note: Callable[[str, int], None] = lambda name, value: None
