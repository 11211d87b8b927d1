"""Score given answers by reading prompts once, and then each choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from slurmgpu.llm.interface.batching import MOST_ROWS, Budget, Load, n_that_fit
from slurmgpu.llm.interface.engine import Question, Scores, Tokens
from slurmgpu.llm.interface.sampling import log_probabilities
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import PromptError
from slurmgpu.llm.prompts.questions import Asked, ask, failed, scores_of
from slurmgpu.llm.transformers_engine import caches
from slurmgpu.llm.transformers_engine.packing import Text
from slurmgpu.llm.transformers_engine.prefill import Prefill, Prefilled
from slurmgpu.util.out_of_memory import free_memory

if TYPE_CHECKING:
    from torch import Tensor

MOST_LOGITS = 200_000_000
"""The most logits for choices that are read together: rows times tokens times vocabulary, about 10 bytes each."""


class Scorer:
    """Scores choices in batches within the budget."""

    def __init__(self, codec: Codec, budget: Budget, prefill: Prefill) -> None:
        self._codec = codec
        self._budget = budget
        self._prefill = prefill
        self._n_rows = 0  # rows of choices in the last forward pass

    def score(self, questions: Sequence[Question]) -> Iterator[Scores]:
        """Each question's scores or error, long prompts first."""
        asked: list[Asked] = []
        for question in questions:
            try:
                asked.append(ask(question, self._codec))
            except PromptError as refusal:
                yield failed(question, str(refusal))
        lengths = self._prefill.lengths
        crossing = [each for each in asked if lengths.crosses(*each.n_read)]
        others = [each for each in asked if not lengths.crosses(*each.n_read)]
        for group in itertools.chain(lengths.groups(others, lambda each: each.n_read), ([each] for each in crossing)):
            yield from self._score_group(group)

    def _score_group(self, asked: list[Asked]) -> Iterator[Scores]:
        """The scores of questions that may be read together, or of one."""
        asked = sorted(asked, key=lambda each: (-len(each.prompt), each.prompt))
        shared = self._prefill.share([each.prompt for each in asked])
        while asked:
            behind = [sum(map(len, each.branches)) for each in asked]
            alike = asked[: self._prefill.n_together([each.prompt for each in asked], shared, behind)]
            n_taken, load = n_that_fit(Load(), [_lengths(each) for each in alike], self._budget.tokens)
            batch = asked[:n_taken]
            found = self._budget.attempt(self._score, batch, load, shared)
            if found is None:
                self._prefill.forget()
                free_memory()
            if found is None and (n_taken > 1 or self._n_rows > 1):
                # For a single question, read fewer choices together.
                self._budget.reduce(load.tokens if n_taken > 1 else self._n_rows * (load.columns + load.more))
                continue
            asked = asked[n_taken:]
            if found is None:
                error = f"out of memory for this prompt alone, which has {batch[0].n_prompt_tokens} tokens"
                yield failed(batch[0].question, error)
            else:
                self._budget.succeed()
                yield from found

    def _score(self, batch: Sequence[Asked], load: Load, shared: Tokens) -> list[Scores]:
        import torch

        self._n_rows = 0
        with torch.inference_mode():
            if self._prefill.lengths.crosses(*batch[0].n_read):
                return [self._score_apart(*batch)]
            texts = _texts_of(batch)
            if self._packs(texts, len(shared)):
                self._n_rows = sum(len(text.branches) for text in texts)
                return self._score_pack(batch, texts, shared)
            return self._score_rows(batch, load, shared)

    def _score_rows(self, batch: Sequence[Asked], load: Load, shared: Tokens) -> list[Scores]:
        """Read the prompts as rows, which score the choices' first tokens, then as many longer choices as fit."""
        read = self._prefill.read([each.prompt for each in batch], load.columns + load.more, shared)
        first = read.logits.float()
        first -= first.logsumexp(-1, keepdim=True)
        found = [
            first[row, [choice[0] for choice in asked.choices]].double().cpu().numpy()
            for row, asked in enumerate(batch)
        ]
        longer = [
            (row, place, choice)
            for row, asked in enumerate(batch)
            for place, choice in enumerate(asked.choices)
            if len(choice) > 1
        ]
        longer.sort(key=lambda each: -len(each[2]))
        while longer:
            longest = len(longer[0][2])
            some = longer[: self._n_together(longest, load, first.shape[-1])]
            if not self._prefill.takes_padding:
                some = [each for each in some if len(each[2]) == longest]
            longer, self._n_rows = longer[len(some) :], len(some)
            rows, places, choices = zip(*some, strict=True)
            if self._prefill.has_rows:
                sums = self._go_on(read, rows, choices)
            else:
                sums = self._reread([batch[row].prompt for row in rows], choices)
            for row, place, logprob in zip(rows, places, sums, strict=True):
                found[row][place] += logprob
        return [scores_of(asked, logprobs) for asked, logprobs in zip(batch, found, strict=True)]

    def _packs(self, texts: Sequence[Text], n_shared: int) -> bool:
        """Whether prompts and choices are read at once, each choice as a branch of its prompt."""
        n_behind = sum(len(branch) for text in texts for branch in text.branches)
        n_tokens = n_shared + n_behind + sum(len(text.tokens) - n_shared for text in texts)
        longest = max((text.tokens + max(text.branches, key=len, default=()) for text in texts), key=len)
        has_room = n_tokens <= self._budget.tokens and (len(texts) + n_behind) * self._prefill.width <= MOST_LOGITS
        return has_room and self._prefill.packs(longest)

    def _score_pack(self, batch: Sequence[Asked], texts: Sequence[Text], shared: Tokens) -> list[Scores]:
        import torch

        pack = self._prefill.pack(texts, shared)
        logits = self._prefill.forward_pack(pack, [*pack.ends, *pack.branches]).float()
        # The row of logits after each prefix of an answer.
        rows: dict[tuple[Tokens, Tokens], int] = {(text.tokens, ()): row for row, text in enumerate(texts)}
        n_rows = len(texts)
        for text in texts:
            for branch in text.branches:
                rows |= {(text.tokens, branch[:end]): n_rows + end - 1 for end in range(1, len(branch) + 1)}
                n_rows += len(branch)
        steps = [
            [(rows[asked.prompt, choice[:place]], token) for place, token in enumerate(choice)]
            for asked in batch
            for choice in asked.choices
        ]
        which, tokens = torch.tensor([step for each in steps for step in each], device=logits.device).T
        logprobs = (logits[which, tokens] - logits.logsumexp(-1)[which]).double().cpu().numpy()
        sums = iter(np.add.reduceat(logprobs, np.cumsum([0, *map(len, steps[:-1])])))
        return [scores_of(asked, np.array([next(sums) for _ in asked.choices])) for asked in batch]

    def _score_apart(self, asked: Asked) -> Scores:
        """The scores of a question whose choices change the prompt's values: each is read with the prompt, alone."""
        import torch

        sums = []
        for choice in asked.choices:
            ids, _ = self._prefill.pad([asked.prompt + choice[:-1]])
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            logits = self._prefill.forward(ids, None, positions, self._prefill.new_cache(), len(choice))
            following, is_token = self._prefill.pad([choice])
            sums += _sums(logits, following, is_token)
        return scores_of(asked, np.array(sums))

    def _n_together(self, longest: int, load: Load, vocabulary: int) -> int:
        """How many choices of at most `longest` tokens are read at once."""
        columns = load.columns + load.more
        has_few_logits = self._prefill.has_rows or self._prefill.can_keep_few
        n_logits = (longest - 1 if has_few_logits else columns) * vocabulary
        return max(1, min(MOST_ROWS, self._budget.tokens // columns, MOST_LOGITS // n_logits))

    def _go_on(self, read: Prefilled, rows: Sequence[int], choices: Sequence[Tokens]) -> list[float]:
        """Log-probabilities of choices after their first tokens, each on its prompt's row."""
        import torch

        device = read.mask.device
        which = torch.tensor(rows, device=device)
        cache = caches.copy_rows(read.cache, which)
        ids, is_token = self._prefill.pad([choice[:-1] for choice in choices], left=False)
        following, _ = self._prefill.pad([choice[1:] for choice in choices], left=False)
        mask = read.mask[which]
        positions = mask.sum(1, keepdim=True) + torch.arange(ids.shape[1], device=device)
        logits = self._prefill.forward(ids, torch.cat([mask, is_token], 1), positions, cache, n_logits=0)
        return _sums(logits, following, is_token)

    def _reread(self, prompts: Sequence[Tokens], choices: Sequence[Tokens]) -> list[float]:
        """Like `_go_on`, for models whose cache has no rows to copy: prompts are read again."""
        ids, mask = self._prefill.pad(
            [(*prompt, *choice[:-1]) for prompt, choice in zip(prompts, choices, strict=True)]
        )
        following, is_token = self._prefill.pad([choice[1:] for choice in choices])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._prefill.forward(ids, mask, positions, self._prefill.new_cache(), following.shape[1])
        return _sums(logits, following, is_token)


def _texts_of(batch: Sequence[Asked]) -> list[Text]:
    """Each prompt once, with the branches of all its questions."""
    branches: dict[Tokens, dict[Tokens, None]] = {}
    for asked in batch:
        branches.setdefault(asked.prompt, {}).update(dict.fromkeys(asked.branches))
    return [Text(prompt, tuple(each)) for prompt, each in branches.items()]


def _sums(logits: Tensor, following: Tensor, is_token: Tensor) -> list[float]:
    taken = log_probabilities(logits, following)
    sums: list[float] = (taken.double() * is_token).sum(1).tolist()
    return sums


def _lengths(asked: Asked) -> tuple[int, int]:
    return len(asked.prompt), asked.longest
