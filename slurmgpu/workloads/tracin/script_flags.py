"""The flags of the replaced TracIn scripts, and their translations: the table of `init --from-args`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """A flag's `setting`, with `value` if the flag takes none, and the line that is `said` about it.

    A flag takes one value, none, or with `many` one or more; `is_path` makes it relative to the run file.
    """

    said: str = ""
    setting: str | None = None
    value: Any = None
    parse: Callable[[str], Any] = str
    takes: bool = True
    many: bool = False
    is_path: bool = False


def _path(setting: str) -> Flag:
    return Flag(setting=setting, is_path=True)


def _switch(setting: str, value: Any, said: str = "") -> Flag:
    return Flag(said, setting, value, takes=False)


def _needless(why: str, *, takes: bool = False) -> Flag:
    return Flag(f"not needed: {why}", takes=takes)


EXPORTED = "not a setting{shape}: once the run is complete, {folder}slurmgpu export {run} --format {format} -o {path}"
SHAPE_OF_SINGLE = (
    "; the format is that of mode test, an object with results; mode single wrote a list of test_triple, "
    "test_triple_index, self_influence and influences"
)
ONE_CSV = "; it has all test triples; mode single wrote one file for each"
CHOSEN = "chooses tests"
SORTED = "; the script numbered a sorted list without duplicates, so the same numbers were other triples"
NO_LOOP = "no gradient is formed, so there is none to {0}"

FLAGS: Mapping[str, Flag] = {
    "--model-path": _path("model"),
    "--train": _path("train"),
    "--entity-to-id": _path("entities"),
    "--relation-to-id": _path("relations"),
    "--edge-map": _path("edge_map"),
    "--node-name-dict": _path("names"),
    "--learning-rate": Flag(setting="learning_rate", parse=float),
    "--top-k": Flag(setting="top_k", parse=int, said="; export writes so many for each test, by absolute value"),
    "--use-last-layers-only": _switch(
        "parameters", "last", "; it does not approximate all parameters, which cost about the same: remove it"
    ),
    "--last-layer-names": Flag(setting="parameters", many=True),
    "--num-last-layers": Flag('not carried over: parameters = "last" is the last layer; a list names others'),
    "--use-mixed-precision": _switch(
        "precision", "fp16", "; its error is measured and reported; without it results are exact"
    ),
    "--n-hops": Flag(setting="n_hops", parse=int),
    "--min-degree": Flag(setting="min_degree", parse=int),
    "--no-preserve-test-edges": _switch("preserve_test_edges", False),
    "--strict-hop-constraint": _switch("strict_hop_constraint", True),
    "--path-filtering": _switch("path_filtering", True),
    "--max-total-path-length": Flag(setting="max_total_path_length", parse=int),
    "--strict-path-filtering": _switch("strict_path_filtering", True),
    "--test": Flag("the run file's input"),
    "--test-triples": Flag("the run file's input"),
    "--mode": Flag(""),
    "--test-indices": Flag(CHOSEN, parse=int, many=True),
    "--max-test-triples": Flag(CHOSEN, parse=int),
    "--max-triples": Flag(CHOSEN, parse=int),
    "--start-index": Flag(CHOSEN, parse=int),
    "--output": Flag(EXPORTED),
    "--csv-output": Flag(EXPORTED),
    "--output-dir": Flag("not needed: a run has a directory of its own, runs/<the run file's stem>"),
    "--output-per-triple": _needless("the merged file has a row for each test triple"),
    "--device": Flag(""),
    "--enable-multi-gpu": Flag(
        "[resources] gpus = 4 with array = true: set the number that you have; it pays with thousands of tests",
        takes=False,
    ),
    "--batch-size": _needless("memory_mb bounds the memory", takes=True),
    "--embedding-dim": _needless("the checkpoint's shapes tell", takes=True),
    "--output-channels": _needless("the checkpoint's shapes tell", takes=True),
    "--use-vectorized-gradients": _needless("always so, and no gradient is formed"),
    "--disable-vectorized-gradients": _needless(NO_LOOP.format("loop over")),
    "--cache-test-gradients": _needless("always so"),
    "--disable-test-gradient-caching": _needless("a batch's test triples are computed once, within memory_mb"),
    "--use-torch-compile": _needless("nearly all of the time is in large matrix products"),
    "--use-gradient-checkpointing": _needless(NO_LOOP.format("checkpoint")),
    "--disable-memory-cleanup": _needless("memory_mb bounds the memory"),
    "--use-optimized-tracin": _needless("there is one way, and it is exact"),
    "--filter-method": _needless("there is one filter", takes=True),
    "--cache": _needless("the graph is read once by each task", takes=True),
    "--skip-filtering": Flag("no n_hops: all training triples are listed", takes=False),
    "--skip-tracin": _needless("the filter is no step of its own, but a mask on what is listed"),
    "--skip-existing": _needless("slurmgpu resubmit computes what is missing"),
}
SHORT = {"-o": "--output"}
OF_THE_BATCH_SCRIPT = {"--test-triples", "--output-dir", "--start-index", "--max-triples", "--skip-existing"}
"""The batch script filters by default; the other script never does."""

LAYERS = {"conv1": "conv", "entity_embeddings": "entity", "relation_embeddings": "relation"}
"""The names of layers here."""
