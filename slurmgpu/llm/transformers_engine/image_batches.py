"""Generate for prompts with images, in padded batches, with the model's own `generate`.

Each architecture has its own positions and caches, which its `generate` handles. Tokens are sampled here, so that a
sample depends only on its key. A batch is as long as its longest answer; ended rows are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.batching import Budget
from slurmgpu.llm.interface.sampling_rules import Rules
from slurmgpu.llm.prompts.encoded import Finished
from slurmgpu.llm.prompts.image_prompts import Shown, ShownRequest, moved
from slurmgpu.llm.transformers_engine.loading import Loaded
from slurmgpu.llm.transformers_engine.rows import Chooser, Row, lengths_of, too_large

if TYPE_CHECKING:
    from torch import Tensor


class Choices(Protocol):
    """Chooses the tokens of `generate`: leaves one token for each row, and says which rows have ended."""

    def choose(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores of each row's next token: 0 for the chosen one, and -inf for the others; see `only`."""

    def has_ended(self, ids: Tensor, scores: Any) -> Tensor:
        """Whether each row has ended: bool (row,)."""


class ImageModel:
    """A model that takes images, and generates for a batch the tokens that `Choices` chooses."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    @property
    def device(self) -> Any:
        """The device of tokens and logits."""
        return self._loaded.device

    def run(self, shown: Sequence[Shown], n_more: int, choices: Choices) -> None:
        """Read the prompts as rows, and generate at most `n_more` tokens for each."""
        import torch
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        # Without the checkpoint's own sampling and end tokens: the choices handle both.
        config = GenerationConfig(
            do_sample=False, max_new_tokens=n_more, pad_token_id=self._loaded.pad_id, use_cache=True
        )
        with torch.inference_mode():
            self._loaded.model.generate(
                **self._inputs(shown),
                generation_config=config,
                logits_processor=LogitsProcessorList([choices.choose]),
                stopping_criteria=StoppingCriteriaList([choices.has_ended]),
            )

    def _inputs(self, shown: Sequence[Shown]) -> dict[str, Tensor]:
        """The model's inputs: tokens padded on the left, with mask and types, and the images of all rows."""
        import torch

        pad = torch.nn.functional.pad
        longest = max(len(each.tokens) for each in shown)
        ids = [torch.tensor([each.tokens]) for each in shown]
        found = {
            "input_ids": _left_padded(ids, longest, self._loaded.pad_id),
            "attention_mask": _left_padded([torch.ones_like(each) for each in ids], longest, 0),
        }
        for name in _names([each.types for each in shown]):
            found[name] = _left_padded([each.types[name] for each in shown], longest, 0)
        for name in _names([each.images for each in shown]):
            parts = [each.images[name] for each in shown]
            if len({part.dim() for part in parts}) > 1:
                raise SlurmGPUError(
                    f"{name!r} of the images has different shapes or types in different prompts, which cannot be one "
                    f"batch. Use images of one kind."
                )
            # Processors pad images with different sizes or numbers of tiles with zeros at the end.
            sizes = [max(part.shape[at] for part in parts) for at in range(1, parts[0].dim())]
            parts = [
                pad(part, [n for at, size in reversed([*enumerate(sizes, 1)]) for n in (0, size - part.shape[at])])
                for part in parts
            ]
            found[name] = torch.cat(parts)
        return moved(found, self._loaded.model.dtype, self._loaded.device)


class ImageBatches:
    """Generates answers in batches within the budget."""

    def __init__(self, model: ImageModel, chooser: Chooser, budget: Budget) -> None:
        self._model = model
        self._chooser = chooser
        self._budget = budget

    def generate(self, requests: Sequence[ShownRequest]) -> Iterator[Finished]:
        """Each request's answer, batch by batch, the longest prompts first."""
        for asked, finished in self._budget.batches(requests, lambda each: lengths_of(each.encoded), self._run):
            yield from [too_large(asked[0].encoded)] if finished is None else finished

    def _run(self, asked: Sequence[ShownRequest]) -> list[Finished]:
        """The answers of one batch."""
        rows = [self._chooser.start(each.encoded) for each in asked]
        sampled = _Sampled(self._chooser, rows, self._model.device)
        self._model.run([each.shown for each in asked], max(row.more for row in rows), sampled)
        return [row.finish() for row in rows]


class _Sampled:
    """Chooses tokens with each request's sampling."""

    def __init__(self, chooser: Chooser, rows: Sequence[Row], device: Any) -> None:
        import torch

        self._chooser, self._rows = chooser, rows
        requests = [row.encoded.request for row in rows]
        self._rules = Rules.of([each.sampling for each in requests], [each.key for each in requests], device)
        self._counts = torch.zeros(len(rows), dtype=torch.int64, device=device)

    def choose(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores of each row's next token: 0 for the chosen one, and -inf for the others."""
        latest = self._chooser.record(self._rows, logits, self._rules, self._counts)
        self._counts = self._counts + 1
        return only(latest, logits)

    def has_ended(self, ids: Tensor, scores: Any) -> Tensor:
        """Whether each row has ended: bool (row,)."""
        import torch

        return torch.tensor([row.ended is not None for row in self._rows], device=ids.device)


def only(tokens: Tensor, logits: Tensor) -> Tensor:
    """Scores in the shape of logits, (row, token), that leave one token for each row."""
    return logits.new_full(logits.shape, float("-inf")).scatter_(1, tokens[:, None], 0.0)


def _names(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names that all of the mappings have."""
    first = mappings[0]
    if any(each.keys() != first.keys() for each in mappings):
        raise SlurmGPUError(
            "the model's processor returns different tensors for different prompts, so they cannot be one batch."
        )
    return [*first]


def _left_padded(rows: Sequence[Tensor], longest: int, value: int) -> Tensor:
    import torch

    return torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=value) for row in rows])
