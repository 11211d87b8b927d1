"""Influences of training triples on test triples: `use = "tracin"`, as in docs/how-to/trace-influence.md.

An item is a test triple. Only `load` imports torch: settings are also checked on login nodes, which may lack it.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.inputs.formats import recognised
from slurmgpu.shards.columns import Array, Column
from slurmgpu.util.packages import check_torch
from slurmgpu.util.users import expanded
from slurmgpu.workload import Item, Placement, Row, Share, TaskContext, Template, Translated
from slurmgpu.workloads.progress import Progress
from slurmgpu.workloads.tracin import planning, tiepin
from slurmgpu.workloads.tracin.from_args import translate
from slurmgpu.workloads.tracin.kge.graph import Dictionary, Graph, parse_triple, read_dictionary, read_graph, triple_of
from slurmgpu.workloads.tracin.kge.hop_filter import HopFilter, HopFilterOptions
from slurmgpu.workloads.tracin.planning import PlannedSettings, own_files, rates_line, zero_rates_line
from slurmgpu.workloads.tracin.settings import FILTER
from slurmgpu.workloads.tracin.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurmgpu.influence.influences import Influences
    from slurmgpu.influence.results import Results
    from slurmgpu.results import Merged

log = logging.getLogger(__name__)

FIELDS = ("head", "relation", "tail")
"""The fields of an item with columns, which is not a line of text."""
LOOKED_AT = 100
"""The number of first items of which at least one must be a triple."""

STATISTICS = {
    "n_counted": "n_counted",
    "influence_sum": "sum",
    "influence_abs_sum": "abs_sum",
    "influence_std": "std",
    "positive_share": "positive_share",
}
"""Columns that describe the whole row of influences, with their names in `Results`."""


class Tracin(PlannedSettings):
    """The training triples with the largest influences, of either sign, on a model's prediction of each test triple.

    `train`, `entities` and `relations` are the graph's files; `model` is one or several checkpoints of one training.
    docs/reference/tracin.md has all settings.
    """

    batch_size = 256
    # One GPU computes hundreds of test triples.
    template = Template(
        Path(__file__).with_name("template.toml"),
        "test.txt",
        gpus=1,
        array=False,
        files={name: Path(__file__).with_name("example") / name for name in ("train.txt", "test.txt")},
        first="python3 -m slurmgpu.workloads.tracin.kge.train train.txt --dim 16 --epochs 100 -o model",
    )

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """Settings that the plan fixes: the checkpoints, their learning rates, and the facts about the files."""
        facts = self.facts
        return {"model": facts.checkpoints, "learning_rate": facts.learning_rates, "planned": asdict(facts)}

    @functools.cached_property
    def columns(self) -> dict[str, Column]:
        """The columns; lists need top_k, `influence` needs full."""
        number, k = Array(self.number_dtype), self.n_listed
        columns: dict[str, Column] = {"triple": Array("int64", (3,)), "line": Array("int64")}
        for side in ("proponent", "opponent") if k else ():
            columns[f"{side}s"] = Array("int64", (k,))
            columns[f"{side}_values"] = Array(self.number_dtype, (k,))
            columns[f"{side}_shares"] = Array(self.number_dtype, (k, len(self.facts.groups)))
        columns |= {"self_influence": number, "loss": number}
        columns["score"] = Array(self.number_dtype, nan_is_unknown=self.is_own_model)
        if k or self.full:
            columns |= {name: Array("int64" if name == "n_counted" else "float64") for name in STATISTICS}
            columns |= {name: Array("float64", nan_is_unknown=True) for name in ("influence_std", "positive_share")}
        if self.full:
            columns["influence"] = Array(self.full, (self.facts.n_train,))
        if self.full == "float16":
            columns["influence_scale"] = Array("float32")
        if self.is_reduced:
            columns |= {"precision_error": Array("float32"), "top10_overlap": Array("float32")}
        return columns

    @property
    def list_bytes(self) -> int:
        """The bytes of both lists of a test triple."""
        return 2 * self.n_listed * (8 + np.dtype(self.number_dtype).itemsize * (1 + len(self.facts.groups)))

    @property
    def paths(self) -> list[Path]:
        """Files that a task reads besides the input."""
        names = [self.train, self.entities, self.relations, *self.facts.checkpoints, *own_files(self)]
        return [expanded(name) for name in (*names, *filter(None, (self.names, self.edge_map)))]

    def place(self, share: Share) -> Placement:
        """One process on one GPU; the lines describe the models and the memory."""
        if share.processes == "per-gpu":
            raise SlurmGPUError(
                'tracin computes in one process on one GPU, and [resources] has processes = "per-gpu". Remove it. To '
                "use several GPUs, submit with --array, which spreads the test triples."
            )
        facts = self.facts
        numbers = f"{facts.n_parameters:,} numbers in {len(facts.groups)} groups"
        lines = [
            f"tracin: {Path(facts.architecture).name}, {rates_line(facts)}",
            f"{facts.n_train:,} training triples, {numbers}: {', '.join(facts.groups)}; "
            f"{self.memory_mb_on(is_gpu=share.gpus > 0):,} MB of working memory",
        ]
        if line := zero_rates_line(facts):
            lines.append(line)
        if facts.not_built is not None:
            lines.append(
                f"{Path(facts.architecture).name} could not be built for planning ({facts.not_built}): all tensors of "
                f"the checkpoint count as parameters, and groups of buffers and frozen parameters get shares of 0."
            )
        lines += self._about_lists(self.memory_mb_on(is_gpu=share.gpus > 0))
        if facts.training_loss not in (None, self.loss):
            lines.append(
                f"The checkpoint was trained with {facts.training_loss}; influences are computed with {self.loss}."
            )
        if self.parameters == "last":
            lines.append(
                'parameters = "last" does not approximate all parameters: in measurements it found 2 % to 83 % of the '
                "ten strongest training triples, and was hardly faster."
            )
        if share.gpus > 1:
            lines.append(f"A task uses only one of its {share.gpus} GPUs: submit with --array, one GPU for each task.")
        return Placement("one", tuple(lines))

    def _about_lists(self, memory_mb: int) -> list[str]:
        lines = []
        if self.n_listed < self.top_k:
            lines.append(
                f"top_k is {self.top_k:,}, and there are only {self.n_listed:,} training triples, which is the lists' "
                f"length."
            )
        if self.list_bytes * self.batch_size > memory_mb * 10**6:
            lines.append(
                f"The lists of a test triple need {self.list_bytes / 1e6:,.1f} MB, and a batch keeps the lists of all "
                f"its items in addition to memory_mb: a smaller batch_size or top_k needs less."
            )
        return lines

    def check_here(self) -> None:
        """Refuse a machine without PyTorch."""
        check_torch("tracin needs")

    def check_input(self, files: Sequence[Path], n_items: int) -> None:
        """Refuse an input without triples, and results of more than `full_limit_gb`."""
        full = n_items * self.facts.n_train * np.dtype(self.full).itemsize if self.full else 0
        listed = n_items * self.list_bytes
        if full + listed > self.full_limit_gb * 1e9:
            kept = [f"full keeps {n_items:,} × {self.facts.n_train:,} influences, {full / 1e9:,.1f} GB"] if full else []
            if listed:
                kept.append(f"lists of top_k = {self.top_k:,} for {n_items:,} test triples need {listed / 1e9:,.1f} GB")
            advice = ' Or remove full: top_k keeps the strongest; full = "float16" halves the size.' if full else ""
            raise SlurmGPUError(
                f"{', '.join(kept)}, but full_limit_gb is {self.full_limit_gb:g}. Raise it, lower top_k, or use fewer "
                f"test triples.{advice}"
            )
        found = [path for path in files if path.exists()]  # none if another run has yet to write the input
        if found:
            entities, relations = read_dictionary(self.entities), read_dictionary(self.relations)
            for path in found:
                _check_items(path, entities, relations)

    @staticmethod
    def from_args(text: str, folder: Path, stem: str) -> Translated:
        """Translate a command line of the replaced scripts: `init tracin --from-args`."""
        return translate(text, folder, stem)

    def load(self, task: TaskContext) -> None:
        """Read the graph, and load all checkpoints on the task's device; SlurmGPUError if a file has changed."""
        from slurmgpu.workloads.tracin.models import open_influences

        if task.gpus > 1:
            log.warning("tracin computes on one GPU, and this task has %d: submit with --array.", task.gpus)
        planning.check_there(self.facts)
        self.graph: Graph = read_graph(self.train, self.entities, self.relations)
        others = planning.file_digests([*self.facts.checkpoints, *own_files(self)])
        planning.check_unchanged(self.facts, {**self.graph.digests, **others})
        self._influences: Influences = open_influences(self, self.facts, self.graph, task.device)
        self._telling = Progress(task.tell, "test triples traced")
        self._hop_filter = None
        if self.n_hops is not None:
            given = {name: getattr(self, name) for name in FILTER if getattr(self, name) is not None}
            options = HopFilterOptions(n_hops=self.n_hops, **given)
            self._hop_filter = HopFilter(self.graph.train, self.graph.entities.size, options)

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The influences on each test triple, or an ItemError for an item that is not a triple."""
        rows: list[Any] = [self._triple(item) for item in items]
        good = [number for number, triple in enumerate(rows) if not isinstance(triple, ItemError)]
        found = self._rows(np.array([rows[number] for number in good], np.int64)) if good else []
        for number, row in zip(good, found, strict=True):
            rows[number] = row if isinstance(row, ItemError) else {**row, "line": _line_of(items[number])}
        self._telling.add(len(good))
        return rows

    def _triple(self, item: Item) -> tuple[int, int, int] | ItemError:
        try:
            return _triple_in(item.data, self.graph.entities, self.graph.relations)
        except ItemError as error:
            place = f"line {_line_of(item) + 1} of the input: " if {"text", "line"} & item.data.keys() else ""
            return ItemError(f"{place}{error}")

    def _rows(self, tests: NDArray[np.int64]) -> list[Row | ItemError]:
        import torch

        found = self._influences.of(torch.from_numpy(tests), self._allowed(tests))
        values = self._values(found)
        sides = {"proponent": found.proponents, "opponent": found.opponents} if self.top_k else {}
        order = [self.facts.groups.index(name) for name in found.groups]
        rows: list[Row | ItemError] = []
        for number, triple in enumerate(tests):
            if number in found.problems:
                rows.append(ItemError(found.problems[number]))
                continue
            row = {name: column[number] for name, column in values.items()}
            for side, listed in sides.items():
                shares = np.zeros((len(listed.lines[number]), len(self.facts.groups)), listed.shares.dtype)
                shares[:, order] = listed.shares[number]
                row |= {f"{side}s": listed.lines[number], f"{side}_values": listed.values[number]}
                row[f"{side}_shares"] = shares
            rows.append({"triple": triple, **row})
        return rows

    def _allowed(self, tests: NDArray[np.int64]) -> Callable[[Any], Any] | None:
        import torch

        if self._hop_filter is None:
            return None
        mask = self._hop_filter.mask(tests)
        return lambda lines: torch.from_numpy(mask(lines.cpu().numpy())).to(lines.device)

    def _values(self, found: Results) -> dict[str, Any]:
        values: dict[str, Any] = {"self_influence": found.self_influence, "loss": found.loss, "score": found.score}
        if self.top_k or self.full:
            values |= {name: getattr(found, source) for name, source in STATISTICS.items()}
        if self.full:
            values["influence"] = found.full
        if self.full == "float16":
            values["influence_scale"] = found.full_scale
        if self.is_reduced:
            values |= {"precision_error": found.precision_error, "top10_overlap": found.top10_overlap}
        return values

    def summarize(self, merged: Merged) -> dict[str, Any]:
        """The groups' shares of influence, and the training triples that are listed most often."""
        return summarize(self, merged)

    @property
    def exports(self) -> Mapping[str, Callable[[Merged, IO[bytes]], str]]:
        """The formats of the system that this workload replaces."""
        if not self.top_k:
            return {"json": tiepin.write_self_influences}
        writers = {"csv": tiepin.write_csv, "json": tiepin.write_json}
        return {name: functools.partial(write, self) for name, write in writers.items()}


def _triple_in(data: Mapping[str, Any], entities: Dictionary, relations: Dictionary) -> tuple[int, int, int]:
    """The ids of an item's head, relation and tail; ItemError if it has none."""
    if "text" in data and not set(FIELDS) <= data.keys():
        return parse_triple(str(data["text"]), entities, relations)
    for name in FIELDS:
        if name not in data:
            raise ItemError(f"no field {name!r}.{did_you_mean(name, data)}")
    head, relation, tail = (str(data[name]) for name in FIELDS)
    return triple_of(head, relation, tail, entities, relations)


def _line_of(item: Item) -> int:
    """The line number of a test triple, from 0: its field `line`, else its index over all input files."""
    line = item.data.get("line", item.index)
    try:
        return int(line)
    except (TypeError, ValueError):
        return item.index


def _check_items(path: Path, entities: Dictionary, relations: Dictionary) -> None:
    """Refuse a file without a triple among its first items: the file or the dictionaries are wrong."""
    first: ItemError | None = None
    n_seen = 0
    for data in itertools.islice(_items(path), LOOKED_AT):
        n_seen += 1
        try:
            _triple_in(data, entities, relations)
            return
        except ItemError as error:
            first = first or error
    if first is not None:
        these = f"the first {n_seen} items" if n_seen == LOOKED_AT else f"its {n_seen} items" if n_seen > 1 else ""
        none = f"None of {these} is a" if these else "Its only item is no"
        where = {".csv": "line 2", ".txt": "line 1", ".jsonl": "line 1"}.get(path.suffix, "first item")
        raise SlurmGPUError(
            f"{path}, {where}: {first} {none} triple of {entities.path} and "
            f"{relations.path}. Correct the input, or the dictionaries in [settings]."
        )


def _items(path: Path) -> Iterator[Mapping[str, Any]]:
    if (its_format := recognised(path)) is not None:
        yield from (data for data in its_format.items(path) if not isinstance(data, ItemError))
