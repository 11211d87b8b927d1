"""A workload of small rows that takes next to no time, and the bare loop that one would write without slurmgpu.

python small_rows.py INPUT OUTPUT        the bare loop, in one process that writes one file
"""

from __future__ import annotations

import json
import sys

from slurmgpu import Array, Text

BATCH = 32


def label(index, text):
    """A text of 4 to 20 letters: shards whose texts are of the same length in all are made in less time."""
    return text[: 4 + index % 17]


class SmallRows:
    """A number and a short text for each item, in well under a microsecond."""

    columns = {"score": Array("float32"), "label": Text()}
    batch_size = BATCH

    def load(self, task):
        pass

    def __call__(self, items):
        return [{"score": item.index * 0.5, "label": label(item.index, item.data["text"])} for item in items]


def bare_loop(source, target):
    """The same rows, without claims, shards, checks, a second process or anything that survives a kill."""
    import h5py
    import numpy as np

    scores, labels = [], []
    with open(source) as lines:
        for index, line in enumerate(lines):
            data = json.loads(line)
            scores.append(index * 0.5)
            labels.append(label(index, data["text"]))
    with h5py.File(target, "w") as file:
        file["index"] = np.arange(len(scores))
        file["score"] = np.array(scores, "float32")
        file.create_dataset("label", data=labels, dtype=h5py.string_dtype())


if __name__ == "__main__":
    bare_loop(*sys.argv[1:])
