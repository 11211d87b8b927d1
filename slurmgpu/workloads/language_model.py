"""The base of workloads with a language model: settings, placement, the engine, and summaries of answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.metrics import ratio
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface import exchange
from slurmgpu.llm.interface.engine import Engine, EngineOptions, Output, Place, Question, Request, Sampling, Scores
from slurmgpu.llm.models.adapters import choice_of, pinned, refuse_missing_adapters
from slurmgpu.llm.models.decoders import (
    check_decoder,
    check_not_encoder_decoder,
    check_takes_images,
    check_takes_text_alone,
    check_tokenizer,
)
from slurmgpu.llm.models.source import cache_of, check_unchanged, digests_of, fetch, files_of
from slurmgpu.llm.placement.place import place
from slurmgpu.llm.prompts.structures import check_structure
from slurmgpu.llm.prompts.template_dates import asks_for_date, today
from slurmgpu.llm.prompts.templates import Prompts
from slurmgpu.llm.server_engine.settings import describe, refuse_beyond
from slurmgpu.llm.settings import check_engine, check_max_tokens, engine_options
from slurmgpu.llm.transformers_engine.quantization import check_package
from slurmgpu.util.packages import check_imports, check_transformers
from slurmgpu.util.users import expanded
from slurmgpu.workload import Item, Placement, Share, TaskContext
from slurmgpu.workloads.item_errors import value_or_error
from slurmgpu.workloads.kept_answers import KeptAnswers
from slurmgpu.workloads.progress import Progress

if TYPE_CHECKING:
    from slurmgpu.results import Merged

BLOCK_ROWS = 1 << 16
"""The number of rows of a merged file that a summary reads at once."""

IMAGE_ITEMS = 32
"""The most items of a call if they have images: a task holds the preprocessed images in memory."""

CUT_RATE = 0.1
"""The share of answers cut by max_tokens above which a summary has a hint."""


class Numbered(Protocol):
    """A request to an engine with the caller's number."""

    @property
    def id(self) -> int:
        """The caller's number."""


class Answered(Numbered, Protocol):
    """The output for a request, with its number."""

    @property
    def error(self) -> str | None:
        """Why there is no output; None if there is."""


AskedT = TypeVar("AskedT", bound=Numbered)
FoundT = TypeVar("FoundT", bound=Answered)
Divide = Callable[[Sequence[Any], Callable[[Sequence[Any]], Sequence[Any]]], Sequence[Any]]

SCORES_NOTHING = "it does not return the probabilities of given answers."


class LanguageModelWorkload:
    """The base class of these workloads; `engine` exists once the model is loaded."""

    engine: Engine
    prompts: Prompts
    sampling = Sampling()
    fields: Collection[str] = ()
    _told_answers = _told_scores = Progress(lambda said: None, "things")  # until a task loads the model
    _divide: Divide | None = None
    _kept_answers: KeptAnswers | None = None
    batch_size = 128
    texts: tuple[str, ...] = ("prompt", "system")

    def use_model(
        self, model: str, settings: Mapping[str, Any], *, max_tokens: int = 0, beyond: Iterable[str] = ()
    ) -> None:
        """Check the settings of the engine; `max_tokens` is the length of an answer, 0 if none is generated.

        `beyond` has sentences on what the workload needs and a server does not give. The model itself is looked up
        later, since the merge may run when the model is gone.
        """
        check_engine(settings)
        refuse_beyond(settings, beyond)
        self._model, self._settings, self._max_tokens = model, dict(settings), max_tokens
        if "images" in settings:
            self.batch_size = min(self.batch_size, IMAGE_ITEMS)
        if (choice := choice_of(settings)) is not None:
            self.prompts.choice = choice
            self.fields = {*self.fields, choice.field}

    @functools.cached_property
    def options(self) -> EngineOptions:
        """The model and the engine's settings; SlurmGPUError if there is no such model."""
        return engine_options(self._model, self._settings)

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """Settings that the plan fixes: the commit of a hub model, or digests of a folder's files; adapters, the date.

        The date is fixed only if the chat template writes it into prompts.
        """
        if self.options.url:
            return {}
        model = self.options.model
        others = self._frozen_adapters | self._frozen_date
        if model.repository is not None:
            return {"revision": model.revision, **others}
        files = digests_of(model)
        return others if files is None else {"model_files": files, **others}

    @property
    def _frozen_date(self) -> dict[str, str]:
        options = self.options
        is_open = options.engine != "server" and options.date is None
        return {"date": today()} if is_open and asks_for_date(options.model, options.chat_options) else {}

    @property
    def _frozen_adapters(self) -> dict[str, Any]:
        """The adapter settings, with commits in the names of hub adapters, and digests of the files of local ones."""
        adapters = self.options.adapters
        names = {name: pinned(source) for name, source in adapters.sources.items()}
        digests = {name: digests_of(source) for name, source in adapters.sources.items()}
        found: dict[str, Any] = {"adapters": names} if adapters.choice is not None else {}
        found |= {"adapter": names[""]} if "" in names else {}
        files = {name: each for name, each in digests.items() if each is not None}
        return found | ({"adapter_files": files} if files else {})

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables of workers: the hub's cache in which planning found the model, and no network."""
        sources = [self.options.model, *self.options.adapters.sources.values()]
        cache = next((cache for cache in map(cache_of, sources) if cache is not None), None)
        found = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return found if cache is None else {**found, "HF_HUB_CACHE": str(cache)}

    @property
    def paths(self) -> list[Path]:
        """The model's files, which a task reads besides the input."""
        if self.options.url:
            return self._image_folders
        adapters = self.options.adapters.sources.values()
        found = [path for source in (self.options.model, *adapters) for path in files_of(source)]
        return [*found, *self._image_folders]

    def check_here(self) -> None:
        """Refuse a machine without the packages of the engine and the settings, if tasks run in this Python."""
        if self.options.engine == "transformers":
            check_transformers('engine = "transformers" needs')
            check_imports('engine = "transformers" needs', {"accelerate": "accelerate"}, "pip install 'slurmgpu[llm]'")
            if self.options.model.quantization is not None:
                check_package(self.options.model.quantization)
            if self.options.adapters.sources:
                check_imports("adapter needs", {"peft": "peft"}, "pip install 'slurmgpu[lora]'")
        elif self.options.engine == "vllm":
            check_imports('engine = "vllm" needs', {"vllm": "the package vllm"}, "install it")
        if self.options.images and self.options.engine != "vllm":
            check_imports("images needs", {"PIL": "Pillow"}, "pip install 'slurmgpu[images]'")

    @property
    def _image_folders(self) -> list[Path]:
        """The folder for relative paths of images, if it is set."""
        folder = self._settings.get("image_folder")
        return [] if folder is None else [expanded(folder).absolute()]

    def place(self, share: Share) -> Placement:
        """The model's placement on a task's GPUs; SlurmGPUError, with numbers, if it does not fit.

        SlurmGPUError also if the engine cannot constrain answers to their structure.
        """
        if self.sampling.structure is not None:
            check_structure(self.sampling.structure, self.options.engine, self.sampling.stop)
        self._check_image_folder()
        if self.options.engine == "server":
            if share.processes == "per-gpu":
                raise SlurmGPUError(
                    'engine = "server" starts one server for each task, on all of its GPUs: {gpus} in serve is their '
                    'number. Remove processes = "per-gpu".'
                )
            return Placement("one", (describe(self.options, share.gpus),))
        check_decoder(self.options.model)
        if self.options.engine == "transformers":
            check_not_encoder_decoder(self.options.model.name, self.options.model.config)
        if self.options.images:
            check_takes_images(self.options.model)
        elif self.options.engine == "transformers":
            check_takes_text_alone(self.options.model)
        check_max_tokens(self._max_tokens, self.options)
        found = Placement(*place(self.options, share))
        refuse_missing_adapters(self.options.adapters)
        check_tokenizer(self.options.model)  # after the weights, with which the hub's tokenizer is downloaded
        return found

    def _check_image_folder(self) -> None:
        for folder in self._image_folders:
            if not folder.is_dir():
                raise SlurmGPUError(
                    f"image_folder: there is no folder {folder}; expected the folder that the items' paths start from."
                )

    def fetch(self) -> str:
        """Download the model to where the tasks will look for it."""
        if self.options.url:
            return f"the model is on the server at {self.options.url}: nothing to download"
        adapters = self.options.adapters.sources.values()
        return "; ".join(map(fetch, (self.options.model, *adapters)))

    def sort_key(self, item: Item) -> int | tuple[str, int]:
        """Long prompts first; if items choose an adapter, grouped by adapter."""
        length = -self.prompts.length(item.data)
        return length if self.prompts.choice is None else (str(item.data.get(self.prompts.choice.field)), length)

    def load(self, task: TaskContext) -> None:
        """Load the model on the task's GPUs; SlurmGPUError if its files changed since the run was planned."""
        self.check_files()
        where = Place(task.device, task.gpus, task.rank, task.world_size, task.note)
        self.engine = open_engine(self.options, where)
        self._told_answers, self._told_scores = Progress(task.tell, "answers"), Progress(task.tell, "prompts scored")
        if self.options.engine == "server":  # other engines break together with their process
            self._kept_answers = KeptAnswers(task.run_dir / "parts" / f"{task.attempt}.answers")
        self.divide_by(task)

    def divide_by(self, task: TaskContext) -> None:
        """Let other tasks compute parts of an item's requests, if the plan has parts."""
        self._divide = task.divide if task.parts > 1 else None

    def check_files(self) -> None:
        """SlurmGPUError if the model's files changed since the run was planned."""
        if planned := self._settings.get("model_files"):
            check_unchanged(self.options.model, planned)
        for name, planned in self._settings.get("adapter_files", {}).items():
            check_unchanged(self.options.adapters.sources[name], planned)

    def _answers(self, requests: Sequence[Request]) -> list[Output | ItemError]:
        """The engine's output for each request, in order, or the error."""
        found = self._found(requests, Output, lambda some: self._told_answers.each(self._generated(some)))
        return [value_or_error(answer_of, found.get(request.id)) for request in requests]

    def _generated(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Each request's output, from the engine or from an earlier worker whose engine broke."""
        if self._kept_answers is None:
            return self.engine.generate(requests)
        return self._kept_answers.each(requests, self.engine.generate)

    def _scores(self, questions: Sequence[Question]) -> list[Scores | ItemError]:
        """The engine's scores for each question, in order, or the error."""
        found = self._found(questions, Scores, lambda some: self._told_scores.each(self.engine.score(some)))
        return [value_or_error(answer_of, found.get(question.id)) for question in questions]

    def _found(
        self, asked: Sequence[AskedT], kind: type[FoundT], compute: Callable[[Sequence[AskedT]], Iterable[FoundT]]
    ) -> dict[int, FoundT]:
        """The outputs for an engine's requests, by id; other tasks may compute parts of them."""
        if not asked:
            return {}
        if self._divide is None:
            return {one.id: one for one in compute(asked)}

        def values_of(some: Sequence[AskedT]) -> list[dict[str, Any]]:
            found = {one.id: exchange.to_json(one) for one in compute(some)}
            return [{"asked": exchange.digest_of_request(each), "found": found.get(each.id)} for each in some]

        values = self._divide(asked, values_of)
        for each, value in zip(asked, values, strict=True):
            if value["asked"] != exchange.digest_of_request(each):
                raise ItemError(
                    "another task made different requests to the model for this item. A checker's result must depend "
                    "only on the text and the item; shard_items = 1 computes each item in one task."
                )
        found = (exchange.from_json(kind, value["found"]) for value in values if value["found"] is not None)
        return {one.id: one for one in found}


def answer_of(found: FoundT | None) -> FoundT:
    """An engine's output; ItemError if it is missing or an error."""
    if found is None:
        raise ItemError("the engine gave no answer")
    if found.error is not None:
        raise ItemError(found.error)
    return found


def good_blocks(merged: Merged, name: str) -> Iterator[Any]:
    """A column's values for the items that did not fail, some rows at a time: arrays of numbers, or lists."""
    for start in range(0, len(merged), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        values, good = merged[name][rows], ~merged.failed[rows]
        yield values[good] if isinstance(values, np.ndarray) else [*compress(values, good.tolist())]


def good_values(merged: Merged, name: str) -> Iterator[Any]:
    """A column's values for the items that did not fail."""
    return chain.from_iterable(good_blocks(merged, name))


def total(merged: Merged, name: str) -> int:
    """The sum of a column of whole numbers or booleans, over the items that did not fail."""
    return sum(int(each.sum(dtype=np.int64)) for each in good_blocks(merged, name))


def n_truncated(merged: Merged) -> int:
    """The number of rows with a truncated prompt in a merged file."""
    return sum(int((each > 0).sum()) for each in good_blocks(merged, "n_truncated"))


def ends_summary(reasons: Mapping[str, int], max_tokens: int) -> dict[str, Any]:
    """Part of a summary: why answers ended, the share cut by max_tokens, and a hint if the share is large."""
    n_answers, n_cut = sum(reasons.values()), reasons.get("length", 0)
    summary: dict[str, Any] = {"finish_reasons": dict(sorted(reasons.items())), "cut_rate": ratio(n_cut, n_answers)}
    return summary | cut_hint(n_cut, n_answers, max_tokens, "answers")


def cut_hint(n_cut: int, n_all: int, max_tokens: int, what: str) -> dict[str, str]:
    """Part of a summary: a hint if a large share of answers, or of other outputs named `what`, was cut."""
    if n_cut <= CUT_RATE * n_all:
        return {}
    return {
        "hint": f"{n_cut:,} of {n_all:,} {what} were cut at max_tokens = {max_tokens}, and lack their end. Raise "
        f"max_tokens, or set a stop text."
    }
