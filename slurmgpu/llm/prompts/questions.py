"""Questions as tokens, and their scores from the log-probabilities of their choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmgpu.llm.interface.batching import n_common
from slurmgpu.llm.interface.engine import Prompt, Question, Scores, Tokens
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import PromptError
from slurmgpu.llm.prompts.truncation import shorten

ROUNDING = 2.0**-24
"""The error of a probability near 1 in float32, the models' precision for logits."""


@dataclass(frozen=True)
class Asked:
    """A question as tokens: its prompt, and the rest of each choice."""

    question: Question
    prompt: Tokens
    choices: tuple[Tokens, ...]
    n_prompt_tokens: int
    n_truncated: int = 0

    @property
    def longest(self) -> int:
        """The tokens of the longest choice."""
        return max(map(len, self.choices))

    @property
    def n_read(self) -> tuple[int, int]:
        """The number of tokens that are read from the prompt, and from the longest choice after it."""
        return len(self.prompt), self.longest - 1

    @property
    def branches(self) -> tuple[Tokens, ...]:
        """The tokens to read after the prompt: the distinct choices without their last tokens."""
        return tuple(dict.fromkeys(choice[:-1] for choice in self.choices if len(choice) > 1))


def ask(question: Question, codec: Codec) -> Asked:
    """The question's tokens. Choices are tokenised with the prompt, since tokens depend on the text before them."""
    if not question.choices or "" in question.choices:
        raise PromptError("a question needs choices, and none of them may be empty")

    def read(asked: Prompt) -> tuple[Tokens, list[Tokens]]:
        text, is_whole = codec.render(asked, answers_at_once=True)
        texts = [text, *(text + each for each in question.choices)]
        prompt, *whole = codec.tokens_of_each(texts, is_whole=is_whole)
        return prompt, whole

    def fits(asked: Prompt) -> bool:
        return max(map(len, read(asked)[1])) <= codec.context

    prompt, whole = read(question.prompt)
    n_whole = len(prompt)
    if max(map(len, whole)) > codec.context and question.prompt.truncation_side is not None:
        prompt, whole = read(shorten(question.prompt, fits))
    # If the prompt's last token merges with a choice, all choices are compared from before that token.
    n_same = min(n_common([prompt, *whole]), min(map(len, whole)) - 1)
    if n_same < 1:
        raise PromptError(
            "the prompt's only token merges with a choice, so no token is before it; expected a longer prompt"
        )
    check_room(codec, len(prompt), max(map(len, whole)))
    rests = tuple(tokens[n_same:] for tokens in whole)
    asked = Asked(question, prompt[:n_same], rests, len(prompt), n_whole - len(prompt))
    _refuse_same(asked)
    return asked


def check_room(codec: Codec, n_prompt: int, n_whole: int) -> None:
    """Refuse a prompt that is too long together with its longest choice."""
    if n_whole > codec.context:
        raise PromptError(
            f"the prompt has {n_prompt} tokens, and with its choices exceeds the context of {codec.context} tokens"
        )


def following(choices: Iterable[Tokens]) -> dict[Tokens, list[int]]:
    """Each prefix of choices, with the tokens that follow it."""
    found: dict[Tokens, dict[int, None]] = {}
    for choice in choices:
        for place, token in enumerate(choice):
            found.setdefault(choice[:place], {})[token] = None
    return {begun: list(tokens) for begun, tokens in found.items()}


def scores_by_token(asked: Asked, known: Mapping[tuple[Tokens, int], float]) -> Scores:
    """The scores of a question, from the log-probability of each token after a prefix of its choices."""
    sums = [sum(known[choice[:place], token] for place, token in enumerate(choice)) for choice in asked.choices]
    return scores_of(asked, np.array(sums, np.float64))


def scores_of(asked: Asked, logprobs: npt.NDArray[np.float64]) -> Scores:
    """The scores of a question, from the log-probabilities (choice,) that an answer begins with a choice's tokens."""
    n_tokens = np.array([len(choice) for choice in asked.choices], np.int64)
    found = exclusive(asked.choices, logprobs)
    return Scores(asked.question.id, found, n_tokens, n_truncated=asked.n_truncated)


def exclusive(choices: Sequence[Tokens], logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Log-probabilities (choice,) of mutually exclusive choices: each without the choices that continue it.

    Among choices with the same tokens the first one gets all of the probability.
    """
    taken, found = np.zeros(len(choices)), logprobs.copy()
    begun: list[int] = []  # choices that are prefixes of the current one, shortest first
    for place in sorted(range(len(choices)), key=lambda place: choices[place]):
        tokens = choices[place]
        while begun and tokens[: len(choices[begun[-1]])] != choices[begun[-1]]:
            begun.pop()
        if begun and tokens == choices[begun[-1]]:
            found[place] = -np.inf
            continue
        if begun and np.isfinite(logprobs[place]) and np.isfinite(logprobs[begun[-1]]):
            taken[begun[-1]] += np.exp(min(logprobs[place] - logprobs[begun[-1]], 0.0))
        begun.append(place)
    # Rounding must not make a choice that is always continued impossible.
    result: npt.NDArray[np.float64] = found + np.log1p(-np.minimum(taken, 1 - ROUNDING))
    return result


def _refuse_same(asked: Asked) -> None:
    seen: dict[Tokens, int] = {}
    for place, tokens in enumerate(asked.choices):
        earlier = seen.setdefault(tokens, place)
        if earlier // asked.question.n_ways != place // asked.question.n_ways:
            one, other = asked.question.choices[earlier], asked.question.choices[place]
            raise PromptError(f"{one!r} and {other!r} have the same tokens in this model; expected texts that differ")


def failed(question: Question, error: str) -> Scores:
    """The scores of a question with an error."""
    none = np.full(len(question.choices), np.nan)
    return Scores(question.id, none, np.zeros(len(question.choices), np.int64), error)
