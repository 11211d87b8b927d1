"""Score given answers to prompts with images, by leading the model's own `generate` along each choice's tokens.

Choices of one token are scored by reading their prompt once; choices of several tokens need a row for each different
prefix, which computes the images again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmgpu.llm.interface.batching import Budget
from slurmgpu.llm.interface.engine import Question, Scores, Tokens
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import PromptError
from slurmgpu.llm.prompts.image_prompts import ImagePrompts, Shown, in_groups
from slurmgpu.llm.prompts.questions import Asked, ask, check_room, failed, following, scores_by_token
from slurmgpu.llm.transformers_engine.image_batches import ImageModel, only

if TYPE_CHECKING:
    from torch import Tensor

Following = Mapping[Tokens, Sequence[int]]
"""The tokens that follow each prefix of choices."""


@dataclass(frozen=True)
class _Way:
    """A prefix that choices of a question share: the choices without their last tokens."""

    number: int
    shown: Shown
    tokens: Tokens
    following: Following

    @property
    def lengths(self) -> tuple[int, int]:
        """The tokens of the prompt, and of the longest choice with this prefix."""
        return len(self.shown.tokens), len(self.tokens) + 1


class ImageScorer:
    """Scores choices in batches within the budget."""

    def __init__(self, model: ImageModel, codec: Codec, prompts: ImagePrompts, budget: Budget) -> None:
        self._model = model
        self._codec = codec
        self._prompts = prompts
        self._budget = budget

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """Each question's scores or error, in order."""
        shown = self._prompts.show([question.prompt for question in questions], answers_at_once=True)
        for group in in_groups(zip(questions, shown, strict=True)):
            asked: list[tuple[Asked, Shown]] = []
            for question, found in group:
                try:
                    asked.append(self._ask(question, found))
                except PromptError as error:
                    yield failed(question, str(error))
            yield from self._score(asked)

    def _score(self, asked: Sequence[tuple[Asked, Shown]]) -> Iterator[Scores]:
        ways = [way for number, each in enumerate(asked) for way in _ways(number, *each)]
        known: list[dict[tuple[Tokens, int], float]] = [{} for _ in asked]
        too_large: set[int] = set()
        for some, told in self._budget.batches(ways, lambda way: way.lengths, self._read):
            if told is None:
                too_large.add(some[0].number)
                continue
            for way, logprobs in zip(some, told, strict=True):
                known[way.number].update(logprobs)
        for number, (each, _) in enumerate(asked):
            if number in too_large:
                said = f"out of memory for this prompt alone, which has {each.n_prompt_tokens} tokens"
                yield failed(each.question, said)
            else:
                yield scores_by_token(each, known[number])

    def _ask(self, question: Question, shown: Shown | PromptError) -> tuple[Asked, Shown]:
        """The question's tokens, with one for each image, and the model's inputs before the choices."""
        if isinstance(shown, PromptError):
            raise shown
        asked = ask(question, self._codec)
        n_all, n_less = len(shown.tokens), asked.n_prompt_tokens - len(asked.prompt)
        if n_less:  # the prompt's last tokens may merge with a choice
            types = {name: each[:, :-n_less] for name, each in shown.types.items()}
            shown = Shown(shown.tokens[:-n_less], shown.images, types)
        check_room(self._codec, n_all, len(shown.tokens) + asked.longest)
        return Asked(question, asked.prompt, asked.choices, n_all), shown

    def _read(self, ways: Sequence[_Way]) -> list[dict[tuple[Tokens, int], float]]:
        """The log-probability of each token that follows a prefix, for each way."""
        guide = _Guide(ways)
        self._model.run([way.shown for way in ways], max(len(way.tokens) for way in ways) + 1, guide)
        return guide.found


class _Guide:
    """Leads `generate` along the ways, and records the log-probabilities of the tokens that follow."""

    def __init__(self, ways: Sequence[_Way]) -> None:
        self._ways = ways
        self._n_read = 0
        self.found: list[dict[tuple[Tokens, int], float]] = [{} for _ in ways]

    def choose(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores of each row's next token: 0 for the token of its way, and -inf for the others."""
        import torch

        logprobs = logits.float().log_softmax(-1)
        chosen = [0] * len(self._ways)
        for row, (way, found) in enumerate(zip(self._ways, self.found, strict=True)):
            if self._n_read > len(way.tokens):
                continue
            begun = way.tokens[: self._n_read]
            tokens = way.following[begun]
            told = logprobs[row, list(tokens)].double().tolist()
            found.update({(begun, token): logprob for token, logprob in zip(tokens, told, strict=True)})
            chosen[row] = way.tokens[self._n_read] if self._n_read < len(way.tokens) else 0
        self._n_read += 1
        return only(torch.tensor(chosen, device=logits.device), logits)

    def has_ended(self, ids: Tensor, scores: Any) -> Tensor:
        """Whether each row is at the end of its way: bool (row,)."""
        import torch

        return torch.tensor([self._n_read > len(way.tokens) for way in self._ways], device=ids.device)


def _ways(number: int, asked: Asked, shown: Shown) -> list[_Way]:
    tokens = following(asked.choices)
    last = [each for each in tokens if not any(each == other[: len(each)] for other in tokens if other != each)]
    return [_Way(number, shown, each, tokens) for each in last]
