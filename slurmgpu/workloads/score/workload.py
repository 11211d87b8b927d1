"""Scores of classifiers, reward models, rerankers and process reward models: `use = "score"`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Unpack

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.llm.answers.steps import split_steps
from slurmgpu.llm.heads.engine import HeadEngine, HeadScores
from slurmgpu.llm.heads.head import (
    Activation,
    Head,
    HeadInput,
    HeadKind,
    check_head_takes_images,
    has_chat_template,
    place_head,
    read_head,
)
from slurmgpu.llm.interface.engine import Place
from slurmgpu.llm.prompts.jinja_templates import template_class
from slurmgpu.llm.prompts.templates import Last, take
from slurmgpu.llm.settings import PromptedModelSettings, prompts_of
from slurmgpu.shards.columns import Array, Column, Ragged, Text
from slurmgpu.workload import FETCH, Item, Placement, Row, Share, TaskContext
from slurmgpu.workload import Template as Proposal
from slurmgpu.workloads.grading.checkers import open_checker
from slurmgpu.workloads.item_errors import compute_good, value_or_error
from slurmgpu.workloads.language_model import LanguageModelWorkload, answer_of, good_values
from slurmgpu.workloads.progress import Progress
from slurmgpu.workloads.samples import MOST_PARTS, OF_PATHS, Samples, check_each, check_votes, flat, has_failed
from slurmgpu.workloads.score.outputs import PathScore, activated, distribution, path_score
from slurmgpu.workloads.score.parts import chat_of, check_images, check_pair, check_parts, check_settings

if TYPE_CHECKING:
    from slurmgpu.results import Merged


class Score(LanguageModelWorkload):
    """Scores of each item by a trained head: classes, a reward, how well a text answers a query, or a score by step.

    What is scored is a `prompt` over the item's fields or the chat in its field `messages`, perhaps with the
    assistant's `answer` or its `steps`; or a `pair` of texts. docs/reference/language-models.md has all settings.
    """

    texts = ("prompt", "system", "answer", "fewshot", "target")
    template = Proposal(
        Path(__file__).with_name("template.toml"),
        items=[
            {"question": "What is the capital of France?", "text": "It is Paris."},
            {"question": "What is the capital of France?", "text": "France is a country."},
        ],
        first=FETCH,
    )

    def __init__(
        self,
        *,
        model: str,
        prompt: str | None = None,
        messages: str | None = None,
        system: str | None = None,
        answer: str | None = None,
        pair: Sequence[str] = (),
        steps: str | None = None,
        step_delimiter: str = "\n",
        step_end: str | None = None,
        choices: Sequence[str] = (),
        path_by: PathScore = "min",
        positive: str | None = None,
        activation: Activation | None = None,
        labels: Sequence[str] = (),
        cut: bool = False,
        each: str | None = None,
        final: str | None = None,
        pattern: str | None = None,
        reference: str | None = None,
        keep: Sequence[str] = (),
        **settings: Unpack[PromptedModelSettings],
    ) -> None:
        check_settings(settings)
        check_parts(prompt, messages, answer, pair, steps, choices)
        check_pair(pair, cut, settings)
        if steps is not None and not (step_delimiter and step_end != ""):
            raise SlurmGPUError(
                "step_delimiter or step_end is empty; expected the text between two steps, and the text after each."
            )
        last: Last = "drop" if answer is not None or steps is not None else "continue"
        asked = pair[0] if pair else prompt
        self.prompts = prompts_of(settings, asked, messages, system, None if messages is None else last)
        make = template_class(settings.get("template_format", "f-string"))
        self._answer = None if answer is None else make(answer, "answer")
        self._second = make(pair[1], "pair") if pair else None
        self._steps, self._delimiter = steps, step_delimiter
        self._choices, self._path_by = tuple(choices), path_by
        self._chat, self._why_chat = chat_of(settings.get("chat"), messages, answer, pair, steps)
        if cut and (self._chat or steps is not None):
            raise SlurmGPUError(
                "cut removes the end of a text or of a pair's second text, and an answer without its end would be a "
                "different answer. Remove cut, or score the text with prompt alone."
            )
        if "images" in settings:
            check_images(pair, cut, steps, self._chat)
        self._cut, self._truncates = cut, "truncation_side" in settings
        self.use_model(model, settings)
        self._head = self._read_head(labels, activation)
        self._step_end = step_end or self._head.step_end
        self._positive = self._find_positive(positive)
        if path_by == "product" and self._activation == "none" and steps is not None:
            raise SlurmGPUError('path_by = "product" multiplies probabilities; set activation = "sigmoid".')
        self.kept_fields = tuple(keep)
        self.columns = self._own_columns()
        templates = [each.fields for each in (self._answer, self._second) if each is not None]
        self.fields = self.prompts.fields.union(*templates, [] if steps is None else [steps])
        check_each(each, final, reference)
        if final is not None and each is None:
            raise SlurmGPUError(
                "final is for votes among an item's texts, and each is not set. Set each to the field with the texts."
            )
        self.checker = None if final is None else open_checker(final, reference=reference or "", pattern=pattern)
        self.samples = None if each is None else self._choose_among(each, reference)

    def _choose_among(self, each: str, reference: str | None) -> Samples:
        """Score all texts in the field `each` of an item, and add columns for a choice among them."""
        if self._positive is None:
            raise SlurmGPUError(
                f"each chooses the text with the highest score, but the model has several scores: "
                f"{', '.join(self._head.labels)}. Set positive to one of them."
            )
        self.most_parts = MOST_PARTS
        samples = Samples(each, self.columns, self.checker, reference, self.is_raw)
        self.columns = samples.columns
        # A template's `text` and `steps` may come from an entry.
        self.fields = {*self.fields} - {*OF_PATHS} | {each} | {*filter(None, (reference,))}
        return samples

    def _read_head(self, labels: Sequence[str], activation: Activation | None) -> Head:
        """The head, from the plan's settings if they have it, since a merge must not need the model."""
        kind: HeadKind = "choices" if self._choices else "token" if self._steps is not None else "sequence"
        if activation is not None and (labels or self._choices):
            self._activation: Activation = activation
            return Head(kind, self._choices or tuple(labels), activation)
        head = read_head(self.options.model, steps=self._steps is not None, choices=self._choices)
        if labels and len(labels) != len(head.labels):
            raise SlurmGPUError(
                f"labels has {len(labels)} names, and the model's head has {len(head.labels)} outputs: "
                f"{', '.join(head.labels)}; expected a name for each."
            )
        self._activation = activation or head.activation
        return Head(kind, tuple(labels) or head.labels, head.activation, head.step_end)

    def _find_positive(self, positive: str | None) -> int | None:
        """The output that is the score; None if no single one is, as in a classifier with several labels."""
        labels = self._head.labels
        if positive is not None:
            if positive not in labels:
                raise SlurmGPUError(
                    f"positive is {positive!r}, which is not a label of the model.{did_you_mean(positive, labels)}"
                )
            return labels.index(positive)
        if len(labels) == 1 or self._head.kind == "choices":
            return 0
        if self._steps is None:
            return None
        if len(labels) == 2:
            return 1
        raise SlurmGPUError(
            f"the model has {len(labels)} labels for a step: {', '.join(labels)}; set positive to that of good steps."
        )

    def _own_columns(self) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        if self._steps is not None:
            columns |= {"score": Array("float32"), "step_scores": Ragged("float32")}
        else:
            if self._positive is not None:
                columns["score"] = Array("float32")
            if len(self._head.labels) > 1:
                columns |= {"label": Text(), "scores": Array("float32", (len(self._head.labels),))}
        columns["n_tokens"] = Array("int32")
        if self._truncates:
            columns["n_truncated"] = Array("int32")
        return columns | ({"is_cut": Array("bool")} if self._cut else {})

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the head's outputs."""
        return self._head.labels

    @property
    def is_raw(self) -> bool:
        """Whether scores are the head's raw outputs, which may be negative."""
        return self._activation == "none"

    @property
    def whole_fields(self) -> frozenset[str]:
        """The fields that the templates use without a key."""
        others = (each.whole_fields for each in (self._answer, self._second) if each is not None)
        return self.prompts.whole_fields.union(*others)

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """Settings that the plan fixes, including the head's labels, its activation, and the text after a step."""
        frozen: dict[str, Any] = {"activation": self._activation}
        if self._steps is not None:
            frozen["step_end"] = self._step_end
        return super().frozen_settings | frozen | ({} if self._choices else {"labels": list(self._head.labels)})

    def check_input(self, files: Sequence[Path], n_items: int) -> list[str]:
        """A line on texts of which the report cannot say which are right; SlurmGPUError for votes that mean nothing."""
        return check_votes(files, self.samples)

    def place(self, share: Share) -> Placement:
        """One process for each task, with the model's layers spread over its GPUs; SlurmGPUError if it does not fit."""
        if share.processes == "per-gpu" or share.nodes > 1:
            raise SlurmGPUError(
                "score spreads a model's layers over the GPUs of one process on one node. Remove processes, or give "
                "each task GPUs of one node only."
            )
        self._check_image_folder()
        lines = place_head(self.options, share.gpus, share.gpu_memory)
        self.check_head()
        return Placement("one", lines)

    def check_head(self) -> None:
        """Refuse a model without the needed kind of head, or without a needed chat template."""
        # Reads the head even if the plan has its labels: a model of another kind must not be queued.
        read_head(self.options.model, steps=self._steps is not None, choices=self._choices)
        if self.options.images:
            check_head_takes_images(self.options.model)
        if self._chat and has_chat_template(self.options.model) is False:
            raise self._without_template()

    def check_here(self) -> None:
        """Refuse a machine that lacks what the engine or the checker needs."""
        super().check_here()
        if self.checker is not None:
            self.checker.check_here()

    def load(self, task: TaskContext) -> None:
        """Load the model on the task's GPUs."""
        self.check_files()
        if self.checker is not None:
            self.checker.load()
        where = Place(task.device, task.gpus, task.rank, task.world_size, task.note)
        self._heads = HeadEngine(self.options, where, self._head, step_end=self._step_end, cut=self._cut)
        if self._chat and not self._heads.has_chat_template:
            raise self._without_template()
        if self._chat is None:
            self._chat = self._heads.has_chat_template
        self._told = Progress(task.tell, "texts scored")
        self.divide_by(task)

    def sort_key(self, item: Item) -> int:
        """Long texts first."""
        try:
            first = item if self.samples is None else next(self.samples.parts(item))
            return -self._input(0, first).length
        except ItemError:
            return 0

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The scores of each item, or of each of its texts, or an ItemError for one that cannot be scored."""
        return self._score(items) if self.samples is None else self.samples.compute(items, self._score)

    def _score(self, items: Sequence[Item]) -> list[Row | ItemError]:
        return compute_good(enumerate(items), lambda numbered: self._input(*numbered), self._rows)

    def _rows(self, inputs: Sequence[HeadInput]) -> list[Row | ItemError]:
        found = self._found(inputs, HeadScores, lambda some: self._told.each(self._heads.score(some)))
        return [value_or_error(self._row, found.get(each.id)) for each in inputs]

    def _input(self, number: int, item: Item) -> HeadInput:
        if has_failed(item.data, self.fields):
            raise ItemError(f"the scored item failed: {item.data['error']}")
        prompt = self.prompts.of(item.data, seed=item.seed)
        chat = bool(self._chat)
        if self._second is not None:
            return HeadInput(number, prompt, second=self._second.render(item.data))
        if self._steps is not None:
            return HeadInput(number, prompt, steps=self._steps_of(item.data), chat=chat)
        if self._answer is not None:
            return HeadInput(number, prompt, answer=self._answer.render(item.data), chat=chat)
        return HeadInput(number, prompt, chat=chat)

    def _steps_of(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        field = str(self._steps)
        value = take(data, field)
        steps = split_steps(value, self._delimiter) if isinstance(value, str) else value
        if isinstance(steps, Mapping) or not isinstance(steps, Sequence) or not all(isinstance(s, str) for s in steps):
            raise ItemError(f"field {field!r} holds {value!r:.80}; expected a list of texts, or a text")
        if not steps or not all(step.strip() for step in steps):
            raise ItemError(f"field {field!r} has {'an empty step' if steps else 'no steps'}")
        return tuple(step.removesuffix(self._step_end) for step in steps)

    def _row(self, given: HeadScores | None) -> Row:
        found = answer_of(given)
        scores = activated(found.logits, self._activation)
        if not np.isfinite(scores).all():
            raise ItemError('the scores are not finite; precision = "fp32" has a larger range')
        row: dict[str, Any] = {"n_tokens": found.n_tokens}
        if self._cut:
            row["is_cut"] = found.n_cut > 0
        if self._truncates:
            row["n_truncated"] = found.n_cut
        if self._steps is not None:
            steps = scores[:, self._positive]
            return {**row, "score": path_score(steps, self._path_by), "step_scores": steps}
        if self._positive is not None:
            row["score"] = scores[self._positive]
        if len(scores) > 1:
            row |= {"label": self._head.labels[int(scores.argmax())], "scores": scores}
        return row

    def _without_template(self) -> SlurmGPUError:
        return SlurmGPUError(
            f"the tokenizer of {self.options.model.name} has no chat template, which {self._why_chat} needs. "
            f'For a model that takes a pair of texts set pair = ["{{question}}", "{{text}}"]; for one that takes plain '
            f"text put all of it into prompt."
        )

    def summarize(self, merged: Merged, samples: Samples | None = None) -> dict[str, Any]:
        """Count labels, and describe the distribution of scores; with samples, also choices among texts.

        Another workload may pass the samples that it scored; by default they come from `each`.
        """
        samples = samples or self.samples

        def values(name: str) -> Iterator[Any]:
            return good_values(merged, name) if samples is None else flat(merged, name)

        summary: dict[str, Any] = {"n_failed": int(merged.failed.sum()), "n_tokens": sum(map(int, values("n_tokens")))}
        if samples is not None:
            summary = samples.summarize(merged) | summary
        if self._cut:
            summary["n_cut"] = sum(map(bool, values("is_cut")))
        if self._truncates:
            summary["n_truncated"] = sum(map(bool, values("n_truncated")))
        if self._steps is not None:
            summary["n_steps"] = sum(len(each) for each in values("step_scores") if each is not None)
        if "label" in self.columns:
            labels = Counter(filter(None, values("label")))
            summary["labels"] = {label: labels[label] for label in self._head.labels}
        return summary | (distribution(np.fromiter(values("score"), np.float64)) if "score" in self.columns else {})
