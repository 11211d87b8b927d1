"""Examples before a prompt: questions with their answers, the same for all items, or drawn for each by its seed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.sampling import mix
from slurmgpu.util.amounts import count_of

MOST_BYTES = 1 << 20
"""The largest size of the examples, which are stored in the plan."""


_EXPECTED = (
    'a list of examples, an example in each line, as in "file:examples.jsonl", or CSV with their fields in its first '
    "line."
)


@dataclass(frozen=True)
class Fewshot:
    """The settings of examples: `number` are drawn for each item; None uses all, in order.

    `target` is the template of an example's answer; `delimiter` separates examples if there is no chat template.
    """

    examples: tuple[Mapping[str, Any], ...]
    target: str
    number: int | None = None
    delimiter: str = "\n\n"


def fewshot_of(
    fewshot: str | Sequence[Mapping[str, Any]] | None,
    num_fewshot: int | None,
    target: str | None,
    fewshot_delimiter: str,
) -> Fewshot | None:
    """The examples in the settings; None without any. SlurmGPUError for a wrong setting."""
    if fewshot is None:
        for name, value in (("num_fewshot", num_fewshot), ("target", target)):
            if value is not None:
                raise SlurmGPUError(f"{name} needs fewshot, which is not set. Remove {name}, or set fewshot.")
        return None
    if target is None:
        raise SlurmGPUError(
            'fewshot is set, and target is not. Set it to the template of an example\'s answer, such as " {answer}".'
        )
    examples = _read(fewshot) if isinstance(fewshot, str) else tuple(fewshot)
    if not examples:
        raise SlurmGPUError("fewshot has no examples; expected at least one.")
    if num_fewshot is not None and not 1 <= num_fewshot <= len(examples):
        raise SlurmGPUError(
            f"num_fewshot is {num_fewshot}, and fewshot has {len(examples)} examples; expected 1 to {len(examples)}, "
            f"or no num_fewshot, to use all of them in order."
        )
    return Fewshot(examples, target, num_fewshot, fewshot_delimiter)


def shuffled(n_examples: int, seed: int) -> list[int]:
    """The indices of all examples in random order, by an item's seed."""
    return sorted(range(n_examples), key=lambda place: (mix(seed, place), place))


def _read(text: str) -> tuple[Mapping[str, Any], ...]:
    if len(text) > MOST_BYTES:
        raise SlurmGPUError(
            f"fewshot has {len(text):,} characters, which are stored in the plan; expected at most {MOST_BYTES:,}. Use "
            f"fewer examples."
        )
    first = text.lstrip()
    if first.startswith("["):
        return _of_list(text)
    if "\n" in first.rstrip() and not first.startswith("{") and not _is_json(first.partition("\n")[0]):
        return _of_csv(first)
    found: list[Mapping[str, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SlurmGPUError(
                f"fewshot: line {number} is {line!r:.60}, which is not JSON ({error}); expected {_EXPECTED}"
            ) from error
        if not isinstance(value, dict):
            raise SlurmGPUError(
                f"fewshot: line {number} is {line!r:.60}; expected the fields of an example, as in an item."
            )
        found.append(value)
    return tuple(found)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _of_csv(text: str) -> tuple[Mapping[str, Any], ...]:
    try:
        header, *records = [record for record in csv.reader(io.StringIO(text, newline=""), strict=True) if record]
    except csv.Error as error:
        raise SlurmGPUError(f"fewshot is neither JSON nor CSV ({error}); expected {_EXPECTED}") from error
    for number, record in enumerate(records, 1):
        if len(record) != len(header):
            raise SlurmGPUError(
                f"fewshot: record {number} has {count_of(len(record), 'field')}, and the first line has {len(header)}; "
                f"expected {_EXPECTED}"
            )
    return tuple(dict(zip(header, record, strict=True)) for record in records)


def _of_list(text: str) -> tuple[Mapping[str, Any], ...]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SlurmGPUError(
            f'fewshot begins with [ and is not JSON ({error}); expected a list of examples, as in "file:examples.json".'
        ) from error
    for number, value in enumerate(found, 1):
        if not isinstance(value, dict):
            raise SlurmGPUError(
                f"fewshot: element {number} is {json.dumps(value):.60}; expected the fields of an example, as in an "
                f"item."
            )
    return tuple(found)
