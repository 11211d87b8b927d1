"""The interface of engines, which complete prompts and score given answers.

No torch here: settings are also checked on login nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from slurmgpu.llm.models.adapters import Adapters

if TYPE_CHECKING:
    from slurmgpu.llm.models.source import ModelSource

Precision = Literal["bf16", "fp16", "fp32"]
Batching = Literal["auto", "static", "continuous"]
CudaGraphs = bool | Literal["auto"]
FinishReason = Literal["stop", "length", "error"]
TruncationSide = Literal["left", "right"]
StructureKind = Literal["schema", "choices", "regex", "grammar"]

Tokens = tuple[int, ...]
Message = Mapping[str, str]
"""A turn of a chat: its `role` and its `content`."""

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The precisions' names in PyTorch."""

STRUCTURE_ENGINES: dict[str, tuple[StructureKind, ...]] = {
    "transformers": ("schema", "choices", "regex", "grammar"),
    "vllm": ("schema", "choices", "regex", "grammar"),
    "server": ("schema", "choices", "regex"),
}
"""The engines that can constrain answers to a `Structure`, and the kinds that each supports."""


class Composed(str):
    """Text from a template; `quoted` has the (start, stop) of the parts that come from the item."""

    quoted: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, quoted: tuple[tuple[int, int], ...] = ()) -> Composed:
        """The text."""
        made = super().__new__(cls, text)
        made.quoted = quoted
        return made

    @classmethod
    def joined(cls, parts: Iterable[str]) -> Composed:
        """The joined parts, with their quotes; a part that is not a `Composed` comes from the item."""
        quoted: list[tuple[int, int]] = []
        length = 0
        for part in (parts := [*parts]):
            quoted += [(start + length, stop + length) for start, stop in quoted_in(part)]
            length += len(part)
        return cls("".join(parts), tuple(quoted))


def quoted_in(text: str) -> tuple[tuple[int, int], ...]:
    """The (start, stop) of the parts of a text that come from an item: the whole text, unless it is a `Composed`."""
    return text.quoted if isinstance(text, Composed) else ((0, len(text)),)


@dataclass(frozen=True)
class Generated:
    """The tokens of an answer that a model generated: its `thoughts`, with the marks around them, then its `answer`.

    `mark` is a special token in the answer that its text does not show.
    """

    thoughts: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    mark: str = ""

    @property
    def hidden(self) -> tuple[int, ...]:
        """Tokens that may differ between answers with the same text, and that change how the model continues."""
        return (*self.thoughts, *self.answer) if self.mark else self.thoughts


NOTHING_GENERATED = Generated()


@dataclass(frozen=True)
class Prompt:
    """Chat `messages`, or plain `text`, and perhaps the beginning of the `answer`.

    If that beginning is given, the model continues from it without reasoning; so it does if it `continues` the last of
    `messages`, a turn of the assistant. It continues its own answer, including its reasoning, if the answer's tokens
    are given as `generated`; `so_far` is the part of that answer's text to keep.
    `adapter` is the name of one of the model's adapters; "" is its only adapter, or the model itself if it has several.

    `shots` are examples before a plain text, each a question and its answer: turns of a chat if the model has a chat
    template, else texts with `between` after each. With a `truncation_side`, a prompt that is too long is truncated on
    that side, within the text from the item.

    `images` are paths or bytes of files. They come before the text of a plain prompt or of a chat's first user turn,
    and need a chat template.

    The engine applies the chat template and tokenises; it strips nothing. `system` goes with a plain text: as a system
    message if the model has a chat template, else before the text and a blank line. Special tokens count as plain text
    everywhere except in the unquoted parts of a `Composed`.
    """

    text: str = ""
    system: str = ""
    messages: tuple[Message, ...] = ()
    continues: bool = False
    answer: str = ""
    so_far: str = ""
    generated: Generated | None = None
    adapter: str = ""
    shots: tuple[tuple[str, str], ...] = ()
    between: str = "\n\n"
    truncation_side: TruncationSide | None = None
    images: tuple[str | bytes, ...] = ()

    @property
    def turns(self) -> tuple[Message, ...]:
        """The turns of the chat before the answer: the messages, or else the system text, the examples and the text."""
        if self.messages:
            return self.messages
        system = [("system", self.system)] if self.system else []
        shots = [turn for asked, said in self.shots for turn in (("user", asked), ("assistant", said))]
        return tuple({"role": role, "content": text} for role, text in (*system, *shots, ("user", self.text)))

    @property
    def plain(self) -> Composed:
        """The system text, the examples and the text as one, for a model without a chat template."""
        system = [self.system, Composed("\n\n")] if self.system else []
        shots = [part for asked, said in self.shots for part in (asked, said, Composed(self.between))]
        return Composed.joined([*system, *shots, self.text])

    @property
    def length(self) -> int:
        """The length in characters, to sort by."""
        return sum(len(turn["content"]) for turn in self.turns) + len(self.answer)


@dataclass(frozen=True)
class Structure:
    """The form that an answer must have, without its reasoning: JSON of a schema, a choice, a regex or a grammar.

    `text` is the schema or the list of choices as JSON, else the regex or the grammar itself. `STRUCTURE_ENGINES` lists
    the engines that support structures.
    """

    kind: StructureKind
    text: str


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 exclude no token.

    A text of `stop` ends an answer and is not part of it. `logprobs` asks for each token's log-probability. If the
    context has no room for the answer, that is an error; with `fit` the answer is cut instead. With a `structure`, only
    allowed tokens are sampled; log-probabilities are still the model's own over all tokens.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    fit: bool = False
    structure: Structure | None = None


@dataclass(frozen=True)
class Request:
    """A request for a completion. `id` is the caller's number; random numbers depend only on `key` (63 bits)."""

    id: int
    prompt: Prompt
    sampling: Sampling
    key: int = 0


@dataclass(frozen=True)
class Output:
    """A completion: `text` is the answer, `reasoning` the text before it if the model marks its reasoning.

    `generated` has the tokens of both, after those given in the prompt, to continue from a prefix of the answer.
    `tokens` (int32) are all generated tokens with the end-of-sequence token. `logprobs` (float32, one for each token)
    are the model's own, before temperature and filters; None unless requested. `finish_reason` is "stop" (the model
    ended, or a stop text came), "length", or "error" with a sentence in `error`. An engine that does not know the
    tokens sets `count`. `n_truncated` is the number of truncated prompt tokens.
    """

    id: int
    text: str = ""
    reasoning: str = ""
    generated: Generated = NOTHING_GENERATED
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: npt.NDArray[np.float32] | None = None
    n_prompt_tokens: int = 0
    finish_reason: FinishReason = "stop"
    error: str | None = None
    count: int | None = None
    n_truncated: int = 0

    @property
    def n_tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) if self.count is None else self.count


@dataclass(frozen=True)
class Question:
    """A prompt with the possible answers.

    Each group of `n_ways` choices are spellings of one answer. Choices for different answers must not have the same
    tokens; spellings of one answer may.
    """

    id: int
    prompt: Prompt
    choices: tuple[str, ...]
    n_ways: int = 1


@dataclass(frozen=True)
class Scores:
    """log p(choice | prompt) (natural logarithm) and the token count of each choice of a question.

    The choices exclude each other: an answer that continues as a longer choice counts only for the longer one, so "1"
    means 1 but not 10. A spelling with the same tokens as an earlier one gets -inf.
    """

    id: int
    logprobs: npt.NDArray[np.float64]
    n_tokens: npt.NDArray[np.int64]
    error: str | None = None
    n_truncated: int = 0


@dataclass(frozen=True)
class Passage:
    """A request for the probabilities of a text's tokens: of the prompt's `answer` after the prompt.

    Without an answer it is the prompt's plain `text`, without a chat template. A text longer than the model's context
    is read in windows; each window after the first scores `stride` tokens, None for as many as a window has.
    """

    id: int
    prompt: Prompt
    stride: int | None = None


@dataclass(frozen=True)
class Likelihood:
    """ln p of each token of a passage, given all tokens before it in its window (float32), and the tokens (int32)."""

    id: int
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    error: str | None = None


class Engine(Protocol):
    """A loaded model. A failed request or question has an `error`; an exception concerns all of them.

    Only one thread calls it, but that thread may start a call before it has consumed all results of another.
    """

    def generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Each request's output, in the order in which they finish."""

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """Each question's scores, in any order."""

    def likelihoods(self, passages: Sequence[Passage]) -> Iterator[Likelihood]:
        """The log-probabilities of each passage's tokens, in any order."""

    def close(self) -> None:
        """End threads and free memory."""


@dataclass(frozen=True)
class HeadMemory:
    """The memory of a model with a head: bytes of its weights, its number of layers, bytes of a batch's activations."""

    name: str
    weights: float
    batch: float
    layers: int

    def on_each(self, n_gpus: int) -> float:
        """Bytes on the fullest of `n_gpus` with its layers spread over them; a batch is on one GPU at a time."""
        share = 1.0 if n_gpus < 2 else min(1.0, 1 / n_gpus + 1 / max(1, self.layers))
        return self.weights * share + self.batch


@dataclass(frozen=True)
class EngineOptions:
    """The model and the settings of an engine.

    `batch_tokens` is the most tokens (prompt and answer) of a static batch; None lets the engine choose. `max_context`
    reduces the model's context. `cuda_graphs` says whether steps use CUDA graphs: False never, True if a self-check
    passes, "auto" if they are also faster; with `compile` steps are compiled first. `chat` says whether plain prompts
    go into the chat template; None: if there is one. `chat_options` go to the template: enable_thinking,
    reasoning_effort … `date` is the day, as YYYY-MM-DD, for templates that write today's date; None: the clock's.

    With `images` the model takes images with text. `beside` is another model in the same process.

    For the engine "server", either `serve` is the command that starts a server, or `url` is the address of a running
    one; `concurrency` is the most requests at a time.
    """

    model: ModelSource
    engine: str = "transformers"
    precision: Precision = "bf16"
    batching: Batching = "auto"
    batch_tokens: int | None = None
    max_context: int | None = None
    cuda_graphs: CudaGraphs = "auto"
    compile: bool = False
    chat: bool | None = None
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    trust_remote_code: bool = False
    adapters: Adapters = field(default_factory=Adapters)
    serve: tuple[str, ...] = ()
    url: str = ""
    concurrency: int = 128
    images: bool = False
    beside: HeadMemory | None = None


@dataclass(frozen=True)
class Place:
    """The PyTorch `device` of an engine, the GPUs that this process sees, and its rank in a group.

    `note(name, value)` records changes of batching in the shard.
    """

    device: str
    gpus: int = 0
    rank: int = 0
    world_size: int = 1
    note: Callable[[str, int], None] = lambda name, value: None
