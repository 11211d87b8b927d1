"""`init tracin --from-args`: a run file from the command line of the replaced TracIn scripts, with a line per flag."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.util.regular_files import open_given
from slurmgpu.workload import Translated


@dataclass(frozen=True)
class Flag:
    """The `setting` for a flag, its `value` if the flag takes none, and a note about it (`said`).

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
ONE_CSV = "; the file has all test triples; mode single wrote one file for each"
CHOSEN = "chooses tests"
SORTED = "; the script numbered a sorted list without duplicates, so the same numbers were other triples"
NO_LOOP = "no gradient is materialized, so there is none to {0}"

FLAGS: Mapping[str, Flag] = {
    "--model-path": _path("model"),
    "--train": _path("train"),
    "--entity-to-id": _path("entities"),
    "--relation-to-id": _path("relations"),
    "--edge-map": _path("edge_map"),
    "--node-name-dict": _path("names"),
    "--learning-rate": Flag(setting="learning_rate", parse=float),
    "--top-k": Flag(setting="top_k", parse=int, said="; export writes this many for each test, by absolute value"),
    "--use-last-layers-only": _switch(
        "parameters", "last", "; it does not approximate all parameters, which take about as long: remove it"
    ),
    "--last-layer-names": Flag(setting="parameters", many=True),
    "--num-last-layers": Flag('not carried over: parameters = "last" is the last layer; for others list their names'),
    "--use-mixed-precision": _switch(
        "precision", "fp16", "; its error is measured and reported; without it results are exact"
    ),
    "--n-hops": Flag(setting="n_hops", parse=int),
    "--min-degree": Flag(setting="min_degree", parse=int),
    "--no-preserve-test-edges": _switch("preserve_test_edges", False),
    "--strict-hop-constraint": _needless("the first rule of the filter implies it"),
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
    "--output-dir": Flag("not needed: a run has its own directory, runs/<the run file's stem>"),
    "--output-per-triple": _needless("the merged file has a row for each test triple"),
    "--device": Flag(""),
    "--enable-multi-gpu": Flag(
        "[resources] gpus = 4 with array = true: set the number that you have; worth it for thousands of tests",
        takes=False,
    ),
    "--batch-size": _needless("memory_mb bounds the memory", takes=True),
    "--embedding-dim": _needless("read from the checkpoint", takes=True),
    "--output-channels": _needless("read from the checkpoint", takes=True),
    "--use-vectorized-gradients": _needless("always vectorized, and no gradient is materialized"),
    "--disable-vectorized-gradients": _needless(NO_LOOP.format("loop over")),
    "--cache-test-gradients": _needless("always so"),
    "--disable-test-gradient-caching": _needless("a batch's test triples are computed once, within memory_mb"),
    "--use-torch-compile": _needless("nearly all of the time is in large matrix products"),
    "--use-gradient-checkpointing": _needless(NO_LOOP.format("checkpoint")),
    "--disable-memory-cleanup": _needless("memory_mb bounds the memory"),
    "--use-optimized-tracin": _needless("there is one method, and it is exact"),
    "--filter-method": _needless("there is one filter", takes=True),
    "--cache": _needless("the graph is read once by each task", takes=True),
    "--skip-filtering": Flag("no n_hops: all training triples can be listed", takes=False),
    "--skip-tracin": _needless("the filter is not a separate step, but a mask on the lists"),
    "--skip-existing": _needless("slurmgpu resubmit computes what is missing"),
}
SHORT = {"-o": "--output"}
OF_THE_BATCH_SCRIPT = {"--test-triples", "--output-dir", "--start-index", "--max-triples", "--skip-existing"}
"""The batch script filters by default; the other script never does."""

LAYERS = {"conv1": "conv", "entity_embeddings": "entity", "relation_embeddings": "relation"}
"""The names of layers here."""

MODES = ("test", "self", "single")


def translate(text: str, folder: Path, stem: str) -> Translated:
    """Translate a command line of the replaced scripts into a run file in `folder`; SlurmGPUError for a wrong one."""
    given = parse(text)
    found = Translated(input="test.txt", resources={"gpus": 1, "array": False})
    for name, values in given.items():
        flag = FLAGS[name]
        if flag.setting is None:
            found.lines.append((name, flag.said))
            continue
        value = _value(flag, name, values, folder)
        if flag.setting == "parameters" and not flag.many and "--last-layer-names" in given:
            found.lines.append((name, "not needed: --last-layer-names names the layers"))
            continue
        found.settings[flag.setting] = value
        found.lines.append((name, f"{flag.setting} = {json.dumps(value)}{flag.said}"))
    _add_outputs(found, given, folder / "runs" / stem)
    if given.keys() & OF_THE_BATCH_SCRIPT and not given.keys() & {"--n-hops", "--skip-filtering"}:
        found.settings["n_hops"] = 2
        found.lines.append(("--n-hops", "not given: n_hops = 2, the batch script's default"))
    _add_resources(found, given)
    _choose_tests(found, given, folder, stem)
    if "--learning-rate" not in given:
        said = "not given: read from the checkpoint's optimizer; for the scripts' default set learning_rate = 0.001"
        found.lines.append(("--learning-rate", said))
    if "--top-k" not in given and found.settings.get("top_k") != 0:
        said = 'not given: the 100 strongest of either sign; with full = "float32", export writes every influence'
        found.lines.append(("--top-k", said))
    return found


def parse(text: str) -> dict[str, list[str]]:
    """The flags in a command line with their values; words before the first flag are skipped."""
    try:
        words = shlex.split(re.sub(r"\\\r?\n", "", text))  # a backslash continues a line, as in a shell
    except ValueError as error:
        raise SlurmGPUError(
            f"--from-args cannot be read as a command line: {error}. Quote it as a shell does."
        ) from error
    given: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, equals, value = word.partition("=")
            name = SHORT.get(name, name)
            if name not in FLAGS:
                raise SlurmGPUError(
                    f"--from-args: {name!r} is not a flag of the TracIn scripts.{did_you_mean(name, FLAGS)}"
                )
            given[name] = [value] if equals else []
        elif given:
            given[next(reversed(given))].append(word)
    for name, values in given.items():
        flag = FLAGS[name]
        if not values if flag.many else len(values) != flag.takes:
            expected = "one or more values" if flag.many else "one value" if flag.takes else "no value"
            raise SlurmGPUError(f"--from-args: {name} takes {expected}; found {' '.join(values) or 'none'}.")
    if not given:
        raise SlurmGPUError('--from-args has no flag; expected some, such as "--model-path m.pt --train t.txt".')
    return given


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _value(flag: Flag, name: str, values: Sequence[str], folder: Path) -> Any:
    if not flag.takes:
        return flag.value
    if flag.is_path:
        return _relative(values[0], folder)
    if name == "--last-layer-names":
        return [LAYERS.get(value, value) for value in values]
    return _parsed(name, values)[0]


def _parsed(name: str, values: Sequence[str]) -> list[Any]:
    parse_one = FLAGS[name].parse
    try:
        return [parse_one(value) for value in values]
    except ValueError as error:
        kind = "whole numbers" if parse_one is int else "numbers"
        raise SlurmGPUError(f"--from-args: {name} takes {kind}; found {' '.join(values)}.") from error


def _relative(path: str, folder: Path) -> str:
    """A path relative to the working directory, made relative to the run file's folder."""
    return path if Path(path).is_absolute() else os.path.relpath(path, folder)


def _say(found: Translated, name: str, said: str) -> None:
    found.lines = [(flag, said if flag == name else before) for flag, before in found.lines]


def _add_outputs(found: Translated, given: Mapping[str, Sequence[str]], run: Path) -> None:
    is_single = given.get("--mode") == ["single"]
    for name, file_format, shape in (("--output", "json", SHAPE_OF_SINGLE), ("--csv-output", "csv", ONE_CSV)):
        if name in given:
            path = Path(given[name][0])
            said = EXPORTED.format(
                shape=shape if is_single else "",
                folder="" if path.parent.is_dir() else f"mkdir -p {shlex.quote(str(path.parent))} && ",
                run=shlex.quote(str(run)),
                format=file_format,
                path=shlex.quote(str(path)),
            )
            _say(found, name, said)


def _add_resources(found: Translated, given: Mapping[str, Sequence[str]]) -> None:
    if "--enable-multi-gpu" in given:
        found.resources = {"gpus": 4, "array": True}
    if "--device" in given:
        [device] = given["--device"]
        if device not in ("cpu", "cuda"):
            raise SlurmGPUError(f"--from-args: --device is {device!r}; expected cpu or cuda.")
        if device == "cpu":
            found.resources = {"gpus": 0, "array": False}
            _say(found, "--enable-multi-gpu", "not carried over: --device cpu uses no GPU")
        _say(found, "--device", f"[resources] gpus = {found.resources['gpus']}")


def _choose_tests(found: Translated, given: Mapping[str, Sequence[str]], folder: Path, stem: str) -> None:
    """Set the input: the test triples, a new file with those chosen, or the training triples."""
    [mode] = given.get("--mode", ["test"])
    if mode not in MODES:
        raise SlurmGPUError(f"--from-args: --mode is {mode!r}; expected {', '.join(MODES)}.{did_you_mean(mode, MODES)}")
    file = next((given[name][0] for name in ("--test", "--test-triples") if name in given), None)
    if mode == "self":
        found.settings["top_k"] = 0
        found.input = found.settings.get("train", "train.txt")
        _say(found, "--mode", "the input is the training triples, and top_k = 0: only their self-influence")
        _say(found, "--top-k", "not carried over: mode self lists nothing, so top_k = 0")
        _say(found, "--csv-output", "not carried over: mode self never wrote it; export --format csv has all columns")
        return
    _say(found, "--mode", "the run file's input has the triples")
    if file is None:
        return
    found.input = _relative(file, folder)
    chosen = _chosen(given, mode)
    if chosen is None:
        return
    found.items = _items(Path(file), chosen)
    found.input = f"{stem}.tests.jsonl"
    for name, said in found.lines:
        if said == CHOSEN:
            counted = SORTED if name in ("--test-indices", "--max-test-triples") else ""
            _say(found, name, f"{found.input} has the chosen triples: numbers are lines of {file}, from 0{counted}")


def _chosen(given: Mapping[str, Sequence[str]], mode: str) -> Sequence[int] | slice | None:
    if mode == "single" or "--test-indices" in given:
        return _parsed("--test-indices", given.get("--test-indices", ["0"]))
    start = _parsed("--start-index", given.get("--start-index", ["0"]))[0]
    counts = [_parsed(name, given[name])[0] for name in ("--max-test-triples", "--max-triples") if name in given]
    return slice(start, start + min(counts) if counts else None) if start or counts else None


def _items(file: Path, chosen: Sequence[int] | slice) -> list[dict[str, Any]]:
    try:
        with open_given(file) as opened:
            lines = opened.read().decode().removesuffix("\n").split("\n")  # as inputs are split
    except (OSError, ValueError) as error:
        raise SlurmGPUError(f"--from-args: cannot read the test triples in {file}: {error}.") from error
    numbers = range(len(lines))[chosen] if isinstance(chosen, slice) else chosen
    items = []
    for number in numbers:
        if not 0 <= number < len(lines):
            raise SlurmGPUError(f"--from-args: there is no triple {number} in {file}: it has {len(lines)}, from 0 on.")
        fields = lines[number].split("\t")
        if len(fields) != 3:
            raise SlurmGPUError(f"{file}, line {number + 1}: expected head, relation and tail, with tabs between them.")
        items.append({"head": fields[0], "relation": fields[1], "tail": fields[2], "line": number})
    return items
