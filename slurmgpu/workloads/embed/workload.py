"""Sentence embeddings with any transformers encoder: `use = "embed"`, as in docs/examples/embed.

Only `load` imports torch and transformers: settings are also checked on login nodes, which may lack them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.llm.heads.engine import n_positions
from slurmgpu.llm.interface.engine import TORCH_NAMES
from slurmgpu.llm.interface.host_copies import HostCopies
from slurmgpu.llm.models.kernels import choose_kernels
from slurmgpu.llm.models.source import fetch_files, locate, read_json
from slurmgpu.shards.columns import Array
from slurmgpu.util.packages import check_transformers
from slurmgpu.workload import FETCH, Item, Placement, Row, Share, TaskContext, Template
from slurmgpu.workloads.embed.masks import masked_ahead, takes_masks
from slurmgpu.workloads.embed.tokens import Tokens
from slurmgpu.workloads.progress import Progress

log = logging.getLogger(__name__)

Dtype = Literal["float16", "float32"]
Pooling = Literal["mean", "cls", "lasttoken"]
Precision = Literal["fp32", "bf16", "fp16"]

HIDDEN_SIZE_KEYS = ("hidden_size", "dim", "d_model", "n_embd")  # BERT's, DistilBERT's, XLNet's, GPT-2's
LIMITS_OF = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
MIN_TOKENS = 4  # with the special tokens at a text's ends

Vectors = tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]
"""The vectors of texts, and whether all numbers of each are finite."""


@dataclass(frozen=True)
class Prepared:
    """The texts of a call, with an ItemError for each missing one, and the function that returns the vectors."""

    texts: Sequence[str | ItemError]
    vectors: Callable[[], Vectors]


class Embed:
    """One vector for each item's text, in the column `embedding`.

    `model` is a name on the Hugging Face hub (pin its `revision`), a folder, or "package:NAME" for the model in an
    installed Python package. `field` names the text in an item; `prefix` is put before it, as E5 models need. `pooling`
    makes one vector of a text's tokens: their "mean", the first, "cls", or the "lasttoken". `max_tokens` cuts a text.
    The defaults of these three are those of a sentence-transformers model (of `prefix`, its default prompt), else no
    prefix, "mean", and as many tokens as tokenizer and model allow. Where such a model's pooling leaves its prompt out,
    the tokens of `prefix` are left out, too.
    `normalize` scales vectors to length 1, so that a dot product is a cosine. `precision` is that of the computation:
    "fp32", "bf16" or "fp16"; `dtype` is that of the column: "float16" or "float32".
    """

    batch_size = 64
    template = Template(
        Path(__file__).with_name("template.toml"),
        items=[{"text": text} for text in ("a cat sleeps", "a kitten naps", "the bank lends money")],
        first=FETCH,
    )

    def __init__(
        self,
        *,
        model: str,
        field: str = "text",
        dtype: Dtype = "float16",
        pooling: Pooling | None = None,
        normalize: bool = True,
        max_tokens: int | None = None,
        precision: Precision = "fp32",
        prefix: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        # Planning checks types and choices by the annotations above.
        try:
            folder, repository = locate(model, revision)
        except SlurmGPUError as error:
            raise SlurmGPUError(f"embed: {error}") from error
        self._source, self._found = repository or str(folder), (folder, repository, revision)
        config = read_json(folder / "config.json")
        hidden_size = next((config[key] for key in HIDDEN_SIZE_KEYS if key in config), None)
        if hidden_size is None:
            raise SlurmGPUError(
                f"embed: {folder}/config.json is missing or has none of {', '.join(HIDDEN_SIZE_KEYS)};"
                " expected the folder of a transformers encoder."
            )
        longest = config.get("max_position_embeddings")
        if max_tokens is not None and not MIN_TOKENS <= max_tokens <= (longest or max_tokens):
            raise SlurmGPUError(
                f"embed: max_tokens is {max_tokens}; expected at least {MIN_TOKENS}"
                + (f", and at most the model's {longest} positions." if longest else ".")
            )

        said = read_json(folder / "config_sentence_transformers.json")
        width = min(hidden_size, said.get("truncate_dim") or hidden_size)
        self.columns = {"embedding": Array(dtype, (width,))}
        self.pooling = pooling or _own_pooling(folder) or "mean"
        told = _own_limits(folder)
        self.max_tokens = max_tokens or told.get("max_seq_length")
        self._lowers = bool(told.get("do_lower_case"))
        prompts = _own_prompts(folder, is_needed=prefix is None)
        self.prefix = prompts.default if prefix is None else prefix
        self._has_own_prefix = prefix is None and bool(prompts.default)
        self._pools_prefix = prompts.are_pooled
        self.field, self.normalize = field, normalize
        self.dtype, self.precision = dtype, precision
        self._options = {"revision": revision, "trust_remote_code": trust_remote_code}

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """The model's default prompt, where no prefix is set."""
        return {"prefix": self.prefix} if self._has_own_prefix else {}

    def place(self, share: Share) -> Placement:
        """As many processes as the run file says, else one; a line tells of the model's own prompt."""
        line = f'embed: the model\'s default prompt {self.prefix!r} is put before each text; prefix = "" removes it.'
        return Placement(share.processes or "one", (line,) if self._has_own_prefix else ())

    def check_here(self) -> None:
        """Refuse a machine without PyTorch and transformers, where tasks run in this Python."""
        check_transformers("embed needs")

    def fetch(self) -> str:
        """Download the model to the hub's cache."""
        return fetch_files(*self._found)

    def load(self, task: TaskContext) -> None:
        """Load tokenizer and model on the task's device."""
        import torch
        from transformers import (
            MODEL_FOR_TEXT_ENCODING_MAPPING,
            AutoConfig,
            AutoModel,
            AutoModelForTextEncoding,
            AutoTokenizer,
        )

        from slurmgpu.llm.transformers_engine.loading import check_whole, from_pretrained

        if task.gpus > 1:
            log.warning("embed computes on one GPU, and this task has %d: submit with --array.", task.gpus)
        # Padding on the right: "cls" is the first position, from which absolute positions are counted.
        tokenizer = AutoTokenizer.from_pretrained(self._source, padding_side="right", **self._options)
        choose_kernels(self.precision)
        precision = getattr(torch, TORCH_NAMES[self.precision])
        arguments = {"pretrained_model_name_or_path": self._source, **self._options}
        config: Any = AutoConfig.from_pretrained(**arguments)
        arguments |= {"config": config, "dtype": precision}
        # As sentence-transformers does: of T5 and its kin the encoder alone. A checkpoint that was saved without the
        # decoder has is_encoder_decoder = false, so the kind of model says it.
        is_two = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING and type(config)().is_encoder_decoder
        model, report = from_pretrained(arguments, AutoModelForTextEncoding if is_two else AutoModel)
        # A pooler makes no difference to the hidden states, and many encoders are saved without one.
        check_whole(model, report, self._source, "vectors of random weights would mean nothing", unused="pooler")
        self._model = model.to(task.device)
        limit = min(self.max_tokens or tokenizer.model_max_length, n_positions(model))
        self._tokens = Tokens(tokenizer, limit)
        self._n_left_out = (
            0 if self._pools_prefix or not self.prefix else self._tokens.n_before(self._in_case(self.prefix))
        )
        if self._n_left_out >= limit:
            raise SlurmGPUError(
                f"embed: prefix has {self._n_left_out} tokens, texts are cut at {limit}, and the model's pooling "
                f"leaves the prefix out, so that nothing is left. Set a shorter prefix, or raise max_tokens."
            )
        if model.config.is_encoder_decoder and not is_two:
            self._try()
        self._makes_masks = False
        if self._model.device.type != "cpu":
            with torch.inference_mode():
                self._makes_masks = takes_masks(self._model, self._tokens.of)
        self._telling = Progress(task.tell, "texts embedded")
        log.info("%s: %s pooling, texts cut at %d tokens", self._source, self.pooling, limit)

    def _try(self) -> None:
        """Refuse a model of an encoder and a decoder that computes nothing of a text alone."""
        import torch

        try:
            with torch.inference_mode():
                self._model(**{name: each.to(self._model.device) for name, each in self._tokens.of(["a"]).items()})
        except (TypeError, ValueError) as error:
            raise SlurmGPUError(
                f"embed: {self._source} is an encoder with a decoder, a {type(self._model).__name__}, which computes "
                f"nothing of a text alone: {error}. Choose an encoder, or a T5 model, of which embed takes the encoder."
            ) from error

    def sort_key(self, item: Item) -> int:
        """Long texts first: similar lengths share a batch, and a batch too large for the GPU fails at once."""
        text = item.data.get(self.field)
        return -len(text) if isinstance(text, str) else 0

    def prepare(self, items: Sequence[Item]) -> Prepared:
        """The items' texts as tokens; a GPU starts to compute their vectors after those of the previous call."""
        texts = [self._text(item) for item in items]
        good = {number: text for number, text in enumerate(texts) if isinstance(text, str)}
        batch = self._tokens.of([*good.values()]) if good else None
        if batch is not None and not (has_tokens := batch["attention_mask"][:, self._n_left_out :].any(1)).all():
            # Only with a tokenizer that adds no token at a text's ends; such a text would make other texts' call fail.
            for number in np.array([*good])[~has_tokens.numpy()]:
                texts[number] = ItemError(f"field {self.field!r} holds a text without tokens; expected a longer one")
            batch = {name: each[has_tokens] for name, each in batch.items()} if has_tokens.any() else None
        if batch is None or self._model.device.type == "cpu":
            return Prepared(texts, partial(self._computed, batch))
        return Prepared(texts, self._begun(batch))

    def __call__(self, items: Sequence[Item], prepared: Prepared | None = None) -> list[Row | ItemError]:
        """The embedding of each item, or an ItemError for one without a text."""
        made = self.prepare(items) if prepared is None else prepared
        vectors, are_finite = made.vectors()
        self._telling.add(len(vectors))
        if are_finite.all() and len(vectors) == len(made.texts):
            return [{"embedding": vector} for vector in vectors]
        rows = iter([_row(*each) for each in zip(vectors, are_finite.tolist(), strict=True)])
        return [next(rows) if isinstance(text, str) else text for text in made.texts]

    def _text(self, item: Item) -> str | ItemError:
        if self.field not in item.data:
            return ItemError(f"no field {self.field!r}.{did_you_mean(self.field, item.data)}")
        text = item.data[self.field]
        if not isinstance(text, str):
            return ItemError(f"field {self.field!r} holds {text!r:.80}; expected a string")
        return self._in_case(self.prefix + text)

    def _in_case(self, text: str) -> str:
        """The text, in lower case if the model was trained so."""
        return text.lower() if self._lowers else text

    def _computed(self, batch: Mapping[str, Any] | None) -> Vectors:
        if batch is None:
            return np.empty((0, *self.columns["embedding"].shape), self.dtype), np.empty(0, bool)
        vectors, are_finite = self._embed(batch, batch)
        return vectors.numpy(), are_finite.numpy()

    def _begun(self, batch: Mapping[str, Any]) -> Callable[[], Vectors]:
        """Start to compute vectors on a GPU; returns a function that waits for them.

        Batches run one after the other on the GPU, so that each reuses the memory of the one before.
        """
        import torch

        device = self._model.device
        with torch.inference_mode():
            inputs = {name: each.pin_memory().to(device, non_blocking=True) for name, each in batch.items()}
            is_padded = self._makes_masks and not bool(batch["attention_mask"].all())
            given = masked_ahead(inputs, is_padded=is_padded) if self._makes_masks else inputs
            found = self._embed(inputs, given)
            copies = HostCopies(*found)

        def wait() -> Vectors:
            vectors, are_finite = (each.numpy() for each in copies.wait())
            return vectors, are_finite

        return wait

    def _embed(self, batch: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Any, Any]:
        """Tensors of the vectors (text, hidden) and of whether they are finite (text), on the model's device.

        The model gets `given`: the batch, perhaps with another form of its mask.
        """
        import torch

        with torch.inference_mode():
            tokens = self._model(**given).last_hidden_state.float()  # (text, token, hidden)
            first = self._n_left_out  # every text has more tokens
            if self.pooling == "cls":
                vectors = tokens[:, first]
            elif self.pooling == "lasttoken":
                last = batch["attention_mask"].sum(1) - 1  # padding is on the right
                vectors = tokens[torch.arange(len(tokens), device=tokens.device), last]
            else:
                mask = batch["attention_mask"][:, first:].unsqueeze(-1)
                vectors = (tokens[:, first:] * mask).sum(1) / mask.sum(1)
            vectors = vectors[:, : self.columns["embedding"].shape[0]]
            if self.normalize:
                vectors = torch.nn.functional.normalize(vectors)
            vectors = vectors.to(getattr(torch, self.dtype))
            return vectors, torch.isfinite(vectors).all(1)


def _row(vector: npt.NDArray[Any], is_finite: bool) -> Row | ItemError:
    if is_finite:
        return {"embedding": vector}
    return ItemError('the embedding is not finite; precision = "fp32" and dtype = "float32" have a larger range')


def _own_limits(folder: Path) -> Mapping[str, Any]:
    """`max_seq_length` and `do_lower_case` of a sentence-transformers model, if its folder says them.

    Its early versions named the file for the encoder, and version 6 still reads these names, in this order.
    """
    files = (folder / f"sentence_{family}_config.json" for family in LIMITS_OF)
    return next(filter(None, map(read_json, files)), {})


def _own_pooling(folder: Path) -> str | None:
    """The pooling of a sentence-transformers model, from its folder; None if the folder does not say."""
    pooling = None
    for module in read_json(folder / "modules.json"):
        step = module["type"].rpartition(".")[2]
        if step == "Pooling":
            step = pooling = _pooling_mode(read_json(folder / module["path"] / "config.json"))
        if step not in ("Transformer", "Normalize", *get_args(Pooling)):
            raise SlurmGPUError(
                f"embed: the model in {folder} has a step {step!r}, which embed does not compute;"
                ' set pooling to "mean", "cls" or "lasttoken" to skip it.'
            )
    return pooling


@dataclass(frozen=True)
class Prompts:
    """The prompts of a sentence-transformers model: the default one, and whether their tokens are pooled."""

    default: str = ""
    are_pooled: bool = True


def _own_prompts(folder: Path, *, is_needed: bool) -> Prompts:
    """The prompts of the model in a folder, as sentence-transformers 3 to 6 apply them.

    SlurmGPUError for a default prompt that is missing, if it `is_needed`.
    """
    modules = read_json(folder / "modules.json")
    poolings = [module["path"] for module in modules if module["type"].endswith(".Pooling")]
    are_pooled = all(read_json(folder / path / "config.json").get("include_prompt", True) for path in poolings)
    config = read_json(folder / "config_sentence_transformers.json")
    name = config.get("default_prompt_name")
    if not modules or name is None or config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        return Prompts("", are_pooled)
    # These two exist without being named, as empty ones.
    prompts = {"query": "", "document": "", **(config.get("prompts") or {})}
    if name not in prompts and is_needed:
        raise SlurmGPUError(
            f"embed: {folder}/config_sentence_transformers.json has the default prompt {name!r}, which is not one of "
            f'its prompts ({", ".join(prompts)}). Set prefix to the text to put before each text, or to "".'
        )
    return Prompts(prompts.get(name) or "", are_pooled)


def _pooling_mode(said: Mapping[str, Any]) -> str:
    # sentence-transformers 6 names one mode or several; earlier versions have flags such as pooling_mode_mean_tokens.
    flags = [flag for flag, is_on in said.items() if flag.startswith("pooling_mode_") and is_on]
    modes = [flag.removeprefix("pooling_mode_").removesuffix("s").removesuffix("_token") for flag in flags]
    named = said.get("pooling_mode", modes)
    return named if isinstance(named, str) else "+".join(named) or "mean"
