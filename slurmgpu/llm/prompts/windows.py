"""The windows for reading a passage: one, or several for a text longer than the model's context.

A window has as many tokens as fit, and scores its last ones. With `stride` = the context, these are the windows of
lm-eval's rolling log-likelihoods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slurmgpu.llm.interface.batching import n_common
from slurmgpu.llm.interface.engine import Likelihood, Passage, Tokens
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import PromptError


@dataclass(frozen=True)
class Window:
    """The tokens of a window. The last `n_scored` are scored; the very last token is not read."""

    tokens: Tokens
    n_scored: int
    adapter: str = ""


@dataclass(frozen=True)
class Read:
    """The log-probabilities of a window's scored tokens, or an error."""

    logprobs: npt.NDArray[np.float32]
    error: str | None = None


def likelihoods(
    passages: Sequence[Passage],
    codec: Codec,
    context: int,
    read: Callable[[Sequence[Window]], Iterator[tuple[int, Read]]],
) -> Iterator[Likelihood]:
    """The likelihoods of passages, from the results of `read` for each window, with its index and in any order."""
    windows: list[Window] = []
    owners: list[_Asked] = []
    for passage in passages:
        try:
            whole, n_before = tokens_of(passage, codec, context)
        except PromptError as error:
            yield Likelihood(passage.id, error=str(error))
            continue
        spans = windows_of(len(whole), n_before, context, passage.stride)
        asked = _Asked(passage.id, whole, n_before, range(len(windows), len(windows) + len(spans)))
        owners += [asked] * len(spans)
        windows += [Window(whole[start:stop], stop - first, passage.prompt.adapter) for start, first, stop in spans]
    for number, found in read(windows):
        asked = owners[number]
        asked.read[number] = found
        if len(asked.read) == len(asked.numbers):
            yield asked.joined()


@dataclass
class _Asked:
    """A passage's tokens, of which the first `n_before` are not scored, and the results of its windows by number."""

    id: int
    tokens: Tokens
    n_before: int
    numbers: range
    read: dict[int, Read] = field(default_factory=dict)

    def joined(self) -> Likelihood:
        parts = [self.read[number] for number in self.numbers]
        problem = next((each.error for each in parts if each.error is not None), None)
        logprobs = np.concatenate([each.logprobs for each in parts])
        tokens = np.array(self.tokens[self.n_before :], np.int32)
        if problem is None and len(logprobs) != len(tokens):
            raise RuntimeError(f"{len(logprobs)} of {len(tokens)} tokens have a log-probability")
        return Likelihood(self.id, logprobs, tokens, problem)


def tokens_of(passage: Passage, codec: Codec, context: int) -> tuple[Tokens, int]:
    """All tokens, and how many of them are not scored; PromptError if prompt and answer are too long."""
    prompt = passage.prompt
    if not prompt.answer:
        before, own = codec.begin(prompt.text)
        return _some_scored((*before, *own), max(1, len(before)))
    rendered, is_whole = codec.render(prompt, answers_at_once=True)
    whole = codec.tokens_of(rendered, is_whole=is_whole)
    asked = codec.tokens_of(rendered.removesuffix(codec.cut(prompt.answer)), is_whole=is_whole)
    if len(whole) - 1 > context:
        raise PromptError(f"prompt and text have {len(whole)} tokens, more than the context of {context} tokens")
    # If the prompt's last token merges with the text, the merged token is scored.
    n_before = n_common([asked, whole])
    if n_before < 1:
        raise PromptError(
            "the prompt's only token merges with the text, so no token is before it; expected a longer prompt"
        )
    return _some_scored(whole, n_before)


def _some_scored(tokens: Tokens, n_before: int) -> tuple[Tokens, int]:
    if len(tokens) <= n_before:
        raise PromptError("the text has no token with another token before it, so none can be scored")
    return tokens, n_before


def windows_of(n_tokens: int, n_before: int, context: int, stride: int | None) -> list[tuple[int, int, int]]:
    """The windows of a text as (start, first, stop): `first` to `stop` is scored, and all but the last token is read.

    Each token from `n_before` on is scored once.
    """
    stop, step = min(n_tokens, context + 1), min(stride or context, context)
    found = [(0, n_before, stop)]
    while stop < n_tokens:
        first, stop = stop, min(n_tokens, stop + step)
        found.append((max(0, stop - 1 - context), first, stop))
    return found
