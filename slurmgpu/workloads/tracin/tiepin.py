"""Exports in the formats of TiePin, the system that tracin replaces: its JSON, and its CSV with the exact header.

Both list the training triples of each test triple by absolute influence, the largest first, without failed test
triples. Rows are streamed; the training triples are in memory. Each writer returns a description of what it wrote.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.amounts import count_of
from slurmgpu.workloads.tracin.kge.graph import Graph, label_of, read_edge_map, read_names
from slurmgpu.workloads.tracin.planning import PlannedSettings

if TYPE_CHECKING:
    from slurmgpu.results import Merged

HEADER = (
    *("TestHead", "TestHead_label", "TestRel", "TestRel_label", "TestTail", "TestTail_label"),
    *("TrainHead", "TrainHead_label", "TrainRel", "TrainRel_label", "TrainTail", "TrainTail_label"),
    *("TracInScore", "SelfInfluence"),
)
BLOCK_BYTES = 4 << 20
PARTS = ("head", "relation", "tail")


@dataclass(frozen=True)
class Labels:
    """The names and labels of entities and relations, by id."""

    entities: Mapping[int, str]
    relations: Mapping[int, str]
    entity_labels: Mapping[int, str]
    relation_labels: Mapping[int, str]

    def cells(self, triple: NDArray[np.int64]) -> list[str]:
        """The six cells of the CSV for a triple (3,): name and label of head, relation and tail."""
        head, relation, tail = triple.tolist()
        said = self.relation_labels.get(relation) or label_of(self.relations[relation])
        return [*self._entity(head), self.relations[relation], said, *self._entity(tail)]

    def _entity(self, number: int) -> tuple[str, str]:
        name = self.entities[number]
        return name, self.entity_labels.get(number, name)

    def fields(self, triple: NDArray[np.int64], prefix: str) -> dict[str, Any]:
        """The fields of the JSON: ids, names ("label"), and labels ("name") if there are any."""
        keys = [f"{prefix}_{part}" for part in PARTS]
        cells = self.cells(triple)
        found: dict[str, Any] = dict(zip(keys, triple.tolist(), strict=True))
        found |= {f"{key}_label": name for key, name in zip(keys, cells[::2], strict=True)}
        has_label = (bool(self.entity_labels), bool(self.relation_labels), bool(self.entity_labels))
        named = zip(keys, cells[1::2], has_label, strict=True)
        return found | {f"{key}_name": label for key, label, there in named if there}


def write_csv(settings: PlannedSettings, merged: Merged, file: IO[bytes]) -> str:
    """Write a record for each pair of a test triple and a listed training triple."""
    graph, labels = _read(settings)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow(HEADER)
    n_tests = n_lines = 0
    for test in _tests(settings, merged):
        n_tests, n_lines = n_tests + 1, n_lines + len(test.lines)
        before = labels.cells(test.triple)
        for line, value in zip(test.lines.tolist(), test.values.tolist(), strict=True):
            writer.writerow([*before, *labels.cells(graph.train[line]), value, test.self_influence])
    text.detach()
    return f"{count_of(n_tests, 'test triple')}, {count_of(n_lines, 'line')} below the header"


def write_json(settings: PlannedSettings, merged: Merged, file: IO[bytes]) -> str:
    """Write one object, with a result for each test triple."""
    graph, labels = _read(settings)
    rates = settings.facts.learning_rates
    head = {
        "num_test_triples": int((~merged.failed).sum()),
        "num_training_triples": len(graph.train),
        "top_k": None if _is_whole(settings) else settings.top_k,
        "learning_rate": rates[0] if len(rates) == 1 else rates,
    }
    file.write(json.dumps(head)[:-1].encode() + b', "results": [')
    separator = b"\n"
    n_tests = n_listed = 0
    for test in _tests(settings, merged):
        result = {"test_index": test.line, **labels.fields(test.triple, "test"), "self_influence": test.self_influence}
        result["top_influences"] = [
            {**labels.fields(graph.train[line], "train"), "influence": value}
            for line, value in zip(test.lines.tolist(), test.values.tolist(), strict=True)
        ]
        file.write(separator + json.dumps(result, ensure_ascii=False).encode())
        separator = b",\n"
        n_tests, n_listed = n_tests + 1, n_listed + len(test.lines)
    file.write(b"\n]}\n")
    return f"{count_of(n_tests, 'test triple')}, {count_of(n_listed, 'influence')}"


def write_self_influences(merged: Merged, file: IO[bytes]) -> str:
    """Write a list of triples with their influence on themselves, the largest first."""
    good = np.flatnonzero(~merged.failed)
    own = merged["self_influence"][:]
    order = good[np.argsort(-own[good], kind="stable")]
    file.write(b"[")
    separator = b"\n"
    for row in order.tolist():
        triple = dict(zip(PARTS, merged["triple"][row].tolist(), strict=True))
        file.write(separator + json.dumps({**triple, "self_influence": float(own[row])}).encode())
        separator = b",\n"
    file.write(b"\n]\n")
    return count_of(len(order), "triple")


@dataclass(frozen=True)
class _Test:
    line: int
    triple: NDArray[np.int64]
    self_influence: float
    lines: NDArray[np.int64]
    values: NDArray[Any]


def _tests(settings: PlannedSettings, merged: Merged) -> Iterator[_Test]:
    names = ["proponents", "proponent_values", "opponents", "opponent_values"]
    if _is_whole(settings):
        names += ["influence", *(["influence_scale"] if settings.full == "float16" else [])]
    row_bytes = sum(merged[name][:1].nbytes for name in names)
    n_rows = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, len(merged), n_rows):
        rows = slice(start, start + n_rows)
        listed = [merged[name][rows] for name in names]
        own = zip(merged["line"][rows], merged["triple"][rows], merged["self_influence"][rows], strict=True)
        for row, ((line, triple, self_influence), failed) in enumerate(zip(own, merged.failed[rows], strict=True)):
            if not failed:
                lines, values = _by_size([column[row] for column in listed], settings.top_k)
                yield _Test(int(line), triple, float(self_influence), lines, values)


def _by_size(columns: list[NDArray[Any]], top_k: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Lines and values, the largest absolute value first; among equals the lowest line.

    If the file has all influences, the others follow the listed ones, whose values are never rounded to float16.
    """
    lines, values = np.concatenate(columns[:4:2]), np.concatenate(columns[1:4:2])
    lines, values = lines[lines >= 0], values[lines >= 0]
    order = np.lexsort((lines, -np.abs(values)))[:top_k]
    lines, values = lines[order], values[order]
    if len(columns) == 4:
        return lines, values
    others = columns[4].astype(values.dtype) * (columns[5] if len(columns) > 5 else 1)
    rest = np.argsort(-np.abs(others), kind="stable")
    rest = rest[~np.isin(rest, lines)]
    return np.concatenate([lines, rest]), np.concatenate([values, others[rest]])


def _is_whole(settings: PlannedSettings) -> bool:
    return bool(settings.full) and settings.n_hops is None


def _read(settings: PlannedSettings) -> tuple[Graph, Labels]:
    """The graph, and its labels: from the dictionaries, and from `names` and `edge_map` if they are set.

    SlurmGPUError, with advice for exports, for a file that has changed since planning read it.
    """
    try:
        graph = settings.read_graph()
        meanings = {} if settings.edge_map is None else read_edge_map(settings.edge_map)
        labels = {} if settings.names is None else read_names(settings.names)
    except SlurmGPUError as error:
        found = re.sub(r" [A-Z][^.]*\.$", "", str(error))
        again = "An export reads names from the plan's files. Restore the former file, and export again."
        raise SlurmGPUError(f"{found} {again}") from error
    entities, relations = graph.entities.names, graph.relations.names
    by_relation = {number: meanings[name] for number, name in relations.items() if name in meanings}
    return graph, Labels(entities, relations, labels, by_relation)
