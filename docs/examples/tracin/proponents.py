"""Print, for some triples of test.txt, the training triples that spoke most for them and most against."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import slurmgpu

HERE = Path(__file__).parent
LINES = (225, 299, 410, 3)
N_SHOWN = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Read the merged file and the graph's triples, and print a block for each line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", nargs="*", type=int, default=LINES, metavar="LINE", help="of test.txt, from 0")
    parser.add_argument("--merged", type=Path, default=HERE / "runs/tracin/merged.h5", metavar="FILE")
    arguments = parser.parse_args(argv)
    merged = slurmgpu.open(arguments.merged)
    train, test = (triples(HERE / f"{part}.txt") for part in ("train", "test"))
    beyond = [line for line in arguments.lines if not 0 <= line < len(test)]
    if beyond:
        parser.error(f"test.txt has no line {beyond[0]}: it has {len(test)}, from 0 on")
    print("\n".join(block(test[line], line, merged, train) for line in arguments.lines))


def block(triple: str, row: int, merged: Any, train: Sequence[str]) -> str:
    """A prediction, its probability, and what made it so: influences, as multiples of the mean absolute one."""
    probability = 1 / (1 + math.exp(-merged["score"][row]))
    mean = merged["influence_abs_sum"][row] / len(train)
    lines = [f"{triple}, {probability:.2f}"]
    for name in ("proponent", "opponent"):
        listed = zip(merged[f"{name}_values"][row], merged[f"{name}s"][row], strict=True)
        for value, line in [(value, line) for value, line in listed if line >= 0][:N_SHOWN]:
            lines.append(f"{value / mean:+5.0f}  {train[line]}")
    return "".join(f"{line}\n" for line in lines)


def triples(path: Path) -> list[str]:
    """The triples of a file, to be read."""
    return [line.replace("_", " ").replace("\t", " | ") for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
