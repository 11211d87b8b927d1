"""Print the meanings that are nearest to each meaning of some words."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import slurmgpu

HERE = Path(__file__).parent
WORDS = ("bank", "doctor", "soldier", "winter")
N_NEIGHBOURS = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Read the glosses and their embeddings, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=WORDS, metavar="WORD")
    parser.add_argument("--merged", type=Path, default=HERE / "runs/glosses/merged.h5", metavar="FILE")
    arguments = parser.parse_args(argv)
    merged = slurmgpu.open(arguments.merged)
    lines = (HERE / "glosses.jsonl").read_text(encoding="utf-8").splitlines()
    glosses = [json.loads(lines[index]) for index in merged["index"][:]]
    embeddings = merged["embedding"][:]
    for word in arguments.words:
        print(table(word, glosses, embeddings))


def table(word: str, glosses: Sequence[dict[str, str]], embeddings: npt.NDArray[Any]) -> str:
    """For each meaning of `word` a block of lines: the meaning, and those nearest to it with their cosines.

    `embeddings` are of length 1: (gloss, hidden).
    """
    blocks = []
    for meaning in [i for i, gloss in enumerate(glosses) if gloss["word"] == word]:
        # In float32: half precision would lose digits in the sums.
        cosines = embeddings.astype("float32") @ embeddings[meaning].astype("float32")
        cosines[meaning] = -1
        nearest = np.argsort(-cosines)[:N_NEIGHBOURS]
        lines = [row("", glosses[meaning]), *(row(f"{cosines[i]:.2f}", glosses[i]) for i in nearest)]
        blocks.append("".join(lines))
    return "\n".join(blocks) or f"{word!r} is not among the glosses.\n"


def row(cosine: str, gloss: dict[str, str]) -> str:
    """One line: the cosine, the word, and the beginning of its definition."""
    return f"{cosine:4}  {gloss['word']:14}  {textwrap.shorten(gloss['text'], 72, placeholder=' ...')}\n"


if __name__ == "__main__":
    main()
