"""The record of a GPU model, `results/GPU-NAME.md`: what held and what did not, with figures and package versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmgpu.util import gpus
from tests.gpu.findings import HELD, NOT_HELD, NOT_MEASURED

VERDICTS = (HELD, NOT_HELD, NOT_MEASURED)
PACKAGES = ("torch", "transformers", "triton", "h5py", "numpy", "accelerate", "torchao", "bitsandbytes", "vllm")


@dataclass(frozen=True)
class Row:
    """The result of a finding."""

    part: str
    claim: str
    verdict: str
    figures: str
    seconds: float
    trace: str = ""


def count(verdicts: Sequence[str], words: dict[str, str]) -> str:
    """How many findings have each verdict; `words` replaces a verdict's text."""
    n = Counter(verdicts)
    return ", ".join(f"{n[each]} {words.get(each, each)}" for each in VERDICTS)


def write(results: Path, found: Sequence[gpus.GPU], rows: Sequence[Row], claims: Collection[str]) -> Path:
    """Write the record of this GPU model into the folder, and return its path.

    Rows of an earlier record with the same versions stay if their claim is still one of `claims`, unless `rows` has a
    new measurement of it. A finding that could not be measured now, for want of time for example, keeps its old row.
    The head counts the claims without a row. OSError if the file cannot be written; an earlier one stays then.
    """
    gpu = found[0]
    cards = Counter(f"{each.name}, {each.memory_bytes / 1e9:.1f} GB" for each in found)
    path = results / (re.sub(r"[^A-Za-z0-9]+", "-", gpu.name).strip("-") + ".md")
    facts = [
        f"- {', '.join(f'{n} × {card}' for card, n in cards.items())}, driver {gpu.driver}, for CUDA {gpu.cuda}",
        f"- {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {', '.join(versions())}",
    ]
    parts: dict[str, dict[str, list[str]]] = {}  # per part: each claim, with its other cells
    earlier = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {_cell(claim) for claim in claims}
    if all(fact in earlier for fact in facts):
        part = ""
        for line in earlier:
            if line.startswith("## "):
                part = line.removeprefix("## ")
            elif len(cells := _cells(line)) == 4 and cells[0] in known:
                parts.setdefault(part, {})[cells[0]] = cells[1:]
    for row in rows:
        measured = [row.verdict, _cell(row.figures), f"{time.strftime('%F')}, {row.seconds:.0f} s"]
        measured_of = parts.setdefault(row.part, {})
        if row.verdict == NOT_MEASURED:
            measured_of.setdefault(_cell(row.claim), measured)
        else:
            measured_of[_cell(row.claim)] = measured
    verdicts = [cells[0] for measured_of in parts.values() for cells in measured_of.values()]
    n_untried = len(known.difference(*parts.values()))
    untried = f", {n_untried} not tried" if n_untried else ""
    lines = [f"# {gpu.name}", "", "`python -m tests.gpu`", "", *facts, f"- {count(verdicts, {})}{untried}"]
    for part, measured_of in parts.items():
        lines += ["", f"## {part}", "", "| what must hold | | figures | measured |", "| --- | --- | --- | --- |"]
        lines += [f"| {' | '.join([claim, *cells])} |" for claim, cells in measured_of.items()]
    results.mkdir(exist_ok=True)
    beside = path.with_suffix(".new")  # a proof may be stopped at any moment
    beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    beside.replace(path)
    return path


def versions() -> Iterator[str]:
    """The installed packages of PACKAGES, with their versions."""
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def _cells(line: str) -> list[str]:
    """The cells of a line of a table, as they are written."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
