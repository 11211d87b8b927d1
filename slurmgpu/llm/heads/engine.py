"""Outputs of a trained head for texts, in batches of similar length."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.heads.head import Head, HeadInput
from slurmgpu.llm.heads.inputs import EncodedInput, HeadCodec
from slurmgpu.llm.heads.own_classes import own_class
from slurmgpu.llm.interface.batching import CPU_PADDING, GPU_PADDING, budget_of, of_like_length
from slurmgpu.llm.interface.engine import EngineOptions, Place
from slurmgpu.llm.prompts.encoded import PromptError
from slurmgpu.llm.prompts.image_prompts import ImagePrompts, Shown, load_processor, marks_of, moved
from slurmgpu.llm.prompts.images import open_image
from slurmgpu.llm.transformers_engine.call_lengths import CallLengths
from slurmgpu.llm.transformers_engine.loading import Loaded, load_whole, log_loaded, prepare
from slurmgpu.llm.transformers_engine.selfcheck import EXACT, ROUNDED
from slurmgpu.util.out_of_memory import free_memory

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

PROBES = ("It was not so at all, they said, and went on.", "It is so.")
"""Texts of two lengths, whose outputs alone and in one batch are compared when a model is loaded."""


@dataclass(frozen=True)
class HeadScores:
    """The head's outputs for an input, float64: (label,), or (step, label) for an answer in steps."""

    id: int
    logits: npt.NDArray[np.float64]
    n_tokens: int = 0
    n_cut: int = 0
    error: str | None = None


class HeadEngine:
    """A loaded model with a head; `step_end` and `cut` are passed to `HeadCodec`."""

    def __init__(
        self, options: EngineOptions, place: Place, head: Head, *, step_end: str = "\n", cut: bool = False
    ) -> None:
        self._loaded, self._head = load_head(options, place, head), head
        processor = load_processor(options) if options.images else None
        tokenizer = self._loaded.tokenizer if processor is None else processor.tokenizer
        self.has_chat_template = bool(tokenizer.chat_template)
        marks = () if processor is None else marks_of(processor)
        n_known = self._loaded.n_known
        self._codec = HeadCodec(
            tokenizer, options, self._loaded.context, cut=cut, step_end=step_end, marks=marks, n_known=n_known
        )
        self._shows = None if processor is None else ImagePrompts(processor, self._codec.codec)
        self._choices = self._choice_tokens() if head.kind == "choices" else []
        self._config = self._loaded.model.config.get_text_config()
        self._pad_id: int | None = self._config.pad_token_id
        self._lengths = CallLengths.of(self._config)
        self._budget = budget_of(options, self._loaded, place)
        self._padding = CPU_PADDING if self._loaded.device.type == "cpu" else GPU_PADDING
        if not self._takes_padding(EXACT if options.precision == "fp32" else ROUNDED):
            self._padding = 0
        log.info("batches of at most %d tokens%s", self._budget.tokens, "" if self._padding else ", without padding")

    def score(self, inputs: Sequence[HeadInput]) -> Iterator[HeadScores]:
        """Each input's outputs or error, long inputs first; inputs with images one by one."""
        encoded: list[EncodedInput] = []
        for asked in inputs:
            if self._shows is not None:
                yield self._score_shown(asked, self._shows)
                continue
            try:
                encoded.append(self._codec.encode(asked))
            except PromptError as error:
                yield HeadScores(asked.id, np.empty(0), error=str(error))
        encoded.sort(key=lambda each: each.tokens)  # among equal lengths, common prefixes are neighbours
        for batch, found in self._budget.batches(
            encoded, lambda each: (len(each.tokens), 0), self._read, self._n_alike
        ):
            if found is None:
                n_tokens = len(batch[0].tokens)
                problem = f"out of memory for this text alone, which has {n_tokens} tokens"
                yield HeadScores(batch[0].id, np.empty(0), n_tokens, error=problem)
                continue
            for each, logits in zip(batch, found, strict=True):
                yield HeadScores(each.id, logits, len(each.tokens), each.n_cut)

    def _n_alike(self, encoded: Sequence[EncodedInput]) -> int:
        """How many of these inputs, the longest first, may be read together."""
        rows = [each.tokens for each in encoded]
        return of_like_length(rows[: self._lengths.n_alike([*map(len, rows)])], self._padding)

    def _score_shown(self, asked: HeadInput, shows: ImagePrompts) -> HeadScores:
        """The outputs for a chat with images."""
        try:
            shown = shows.read(self._codec.parts(asked), [open_image(source) for source in asked.prompt.images])
        except (ItemError, PromptError) as error:
            return HeadScores(asked.id, np.empty(0), error=str(error))
        n_tokens = len(shown.tokens)
        if n_tokens > self._loaded.context:
            said = f"the text has {n_tokens} tokens with its images; the model takes at most {self._loaded.context}"
            return HeadScores(asked.id, np.empty(0), n_tokens, error=said)
        found = self._budget.attempt(self._read_shown, shown)
        if found is None:
            free_memory()
            said = f"out of memory for this text and its images alone, which have {n_tokens} tokens"
            return HeadScores(asked.id, np.empty(0), n_tokens, error=said)
        return HeadScores(asked.id, found, n_tokens)

    def _read_shown(self, shown: Shown) -> npt.NDArray[np.float64]:
        import torch

        model, device = self._loaded.model, self._loaded.device
        ids = torch.tensor([shown.tokens], device=device)
        more = moved({**shown.images, **shown.types}, model.dtype, device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits
        found: npt.NDArray[np.float64] = logits[0].double().cpu().numpy()
        return found

    def _read(self, batch: Sequence[EncodedInput]) -> list[npt.NDArray[np.float64]]:
        import torch

        with torch.inference_mode():
            ids, mask, types = self._pad(batch)
            more = {} if types is None else {"token_type_ids": types}
            if self._head.kind == "sequence":
                logits = self._loaded.model(input_ids=ids, attention_mask=mask, **more).logits
                return list(logits.double().cpu().numpy())
            # A decoder computes only columns that end a step in some row: logits over the vocabulary are large.
            columns = sorted({end for each in batch for end in each.ends})
            if self._head.kind == "choices":
                # On the CPU, since hidden states and tokens may be on different GPUs.
                more["logits_to_keep"] = torch.tensor(columns)
            logits = self._loaded.model(input_ids=ids, attention_mask=mask, **more).logits
            logits = logits[..., self._choices] if self._head.kind == "choices" else logits[:, columns]
            found, places = logits.double().cpu().numpy(), {column: place for place, column in enumerate(columns)}
            return [found[row, [places[end] for end in each.ends]] for row, each in enumerate(batch)]

    def _pad(self, batch: Sequence[EncodedInput]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Token ids padded on the right, their mask, and the segments of pairs if there are any.

        A classifier finds the end of a text by the padding token. If the model has none, a token is used that no text
        of the batch has.
        """
        import torch

        longest = max(len(each.tokens) for each in batch)
        pad = self._pad_id
        if pad is None:
            used = {token for each in batch for token in each.tokens}
            pad = self._config.pad_token_id = next(number for number in itertools.count() if number not in used)
        fill = [longest - len(each.tokens) for each in batch]
        device = self._loaded.device
        ids = torch.tensor([[*each.tokens, *[pad] * n] for each, n in zip(batch, fill, strict=True)], device=device)
        mask = torch.tensor([[1] * (longest - n) + [0] * n for n in fill], device=device)
        if not any(each.types for each in batch):
            return ids, mask, None
        types = [[*(each.types or [0] * len(each.tokens)), *[0] * n] for each, n in zip(batch, fill, strict=True)]
        return ids, mask, torch.tensor(types, device=device)

    def _takes_padding(self, tolerance: float) -> bool:
        """Whether the model's outputs in a batch with padding are the same as alone, except for rounding."""
        tokenizer, context = self._loaded.tokenizer, self._loaded.context
        rows = [tuple(tokenizer(text)["input_ids"][:context]) for text in PROBES]
        probes = [EncodedInput(number, row, ends=(len(row) - 1,)) for number, row in enumerate(rows) if row]
        if len({len(each.tokens) for each in probes}) < len(PROBES):
            return False
        together = self._read(probes)
        for probe, found in zip(probes, together, strict=True):
            [alone] = self._read([probe])
            if np.abs(found - alone).max() > tolerance * max(1.0, float(np.abs(alone).max())):
                log.warning(
                    "%s: padding a text to the length of a longer one changes its outputs; batches only have texts of "
                    "equal length, which is slower",
                    type(self._loaded.model).__name__,
                )
                return False
        return True

    def _choice_tokens(self) -> list[int]:
        """The token of each choice; SlurmGPUError for a choice of several tokens."""
        found = []
        for choice in self._head.labels:
            tokens = self._loaded.tokenizer(choice, add_special_tokens=False)["input_ids"]
            # Some tokenizers put a mark for the beginning of a word before a text, perhaps as a separate token.
            known = self._loaded.tokenizer.convert_tokens_to_ids(choice)
            one = tokens[0] if len(tokens) == 1 else known
            if one is None or one == self._loaded.tokenizer.unk_token_id:
                raise SlurmGPUError(
                    f"choices has {choice!r}, which is {len(tokens)} tokens of the model; expected one token."
                )
            found.append(int(one))
        return found


def load_head(options: EngineOptions, place: Place, head: Head) -> Loaded:
    """Load a model with its head, and its tokenizer, on the device or the GPUs of `place`."""
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    started = time.monotonic()
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(options.model.folder)}
    own = next(filter(None, map(own_class, options.model.config.get("architectures") or ())), None)
    # Our own classes take transformers' configuration.
    is_trusted = options.trust_remote_code and own is None
    source |= {"revision": options.model.revision, "trust_remote_code": is_trusted}
    config = AutoConfig.from_pretrained(**source)
    prepare(options, place)
    # Pad on the right: absolute positions are counted from the left.
    tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="right")
    kinds = {
        "sequence": transformers.AutoModelForSequenceClassification,
        "token": transformers.AutoModelForTokenClassification,
        "choices": transformers.AutoModelForCausalLM,
    }
    advice = "a model without a trained head cannot score texts"
    model = load_whole(options, place, {**source, "config": config}, own or kinds[head.kind], advice)
    model.eval()
    model.config.use_cache = False
    context = min(options.max_context or sys.maxsize, n_positions(model), tokenizer.model_max_length)
    loaded = Loaded(model, tokenizer, frozenset(), context, 0, model.device)
    log_loaded(loaded, place, options, time.monotonic() - started)
    return loaded


def n_positions(model: Any) -> int:
    """The number of tokens that a model has positions for; sys.maxsize if unlimited."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not found or found < 0:  # -1 in XLNet
        return sys.maxsize
    # RoBERTa, MPNet and similar models count from after the padding index: 514 positions hold 512 tokens.
    base = getattr(model, "base_model", model)
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    padding_idx = getattr(table, "padding_idx", None)
    return int(found) if padding_idx is None else int(found) - padding_idx - 1
