"""Write glosses.jsonl: the definitions of the 4,000 meanings that are the most common in WordNet's counts.

With Debian's package wordnet-base installed, or unpacked by `dpkg-deb -x` and its folder given:

    python make_glosses.py [usr/share/wordnet]

The formats are those of the manual pages wndb(5WN), cntlist(5WN) and senseidx(5WN).
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

N_GLOSSES = 4000
FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
TYPE_NUMBERS = {"n": 1, "v": 2, "a": 3, "r": 4, "s": 5}  # in data files, and in sense keys


def main(wordnet: Path) -> None:
    """Write the glosses beside this file, sorted by word: of a meaning's words the one used most."""
    definitions, senses = read_synsets(wordnet)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in read_lines(wordnet / "cntlist.rev"):
        key, _, count = line.split()
        sense = ":".join(key.split(":")[:3])
        if sense in senses:  # The counts are older than the data: some of their senses are gone.
            word, synset = senses[sense]
            counts[synset][word] += int(count)
    # Ties are broken by name, so that the choice does not depend on the order of a file.
    common = sorted(counts, key=lambda synset: (-counts[synset].total(), synset))[:N_GLOSSES]
    chosen = sorted((counts[synset].most_common(1)[0][0], synset) for synset in common)
    records = [{"word": word, "text": definitions[synset], "synset": synset} for word, synset in chosen]
    text = "".join(json.dumps(record) + "\n" for record in records)
    Path(__file__).with_name("glosses.jsonl").write_text(text, encoding="utf-8")


def read_synsets(wordnet: Path) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """The definition of each synset, by a name such as 02084071-n; and word and synset of each sense.

    A sense is named by its sense key up to lex_id, as in dog%1:05:00.
    """
    definitions, senses = {}, {}
    for line in [line for name in FILES for line in read_lines(wordnet / name)]:
        data, _, gloss = line.partition(" | ")
        offset, file_number, kind, n_words, *fields = data.split()
        synset = f"{offset}-{kind}"
        definitions[synset] = gloss.partition('; "')[0].strip()  # without the examples, which are in quotes
        for i in range(0, 2 * int(n_words, 16), 2):
            word = fields[i].partition("(")[0]  # An adjective may carry its place: "afraid(p)".
            sense = f"{word.lower()}%{TYPE_NUMBERS[kind]}:{file_number}:{int(fields[i + 1], 16):02}"
            senses[sense] = word.replace("_", " "), synset
    return definitions, senses


def read_lines(path: Path) -> list[str]:
    """The lines of a file of WordNet's without those of its licence, which begin with a blank."""
    return [line for line in path.read_text(encoding="ascii").splitlines() if not line.startswith(" ")]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "/usr/share/wordnet"))
