"""The workload of the trials, copied beside their run files: rows by the item's index, each noted when computed."""

import os
import time
from pathlib import Path

from slurmgpu import Array, ItemError, Ragged, Text

EDITED = 0
FAILING_EVERY = 23


class Counted:
    """A row of each kind of column. `marks` is a file of the node's own disk, with a line for each item computed.

    While there is a file `failing`, some items fail.
    """

    columns = {"double": Array("float64"), "pair": Array("int64", (2,)), "shout": Text(), "lengths": Ragged("int16")}
    batch_size = 4

    def __init__(self, *, marks: str = "", item_s: float = 0.0, failing: str = "") -> None:
        self.marks, self.item_s, self.failing = marks, item_s, failing

    def load(self, task) -> None:
        self.file = os.open(self.marks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) if self.marks else None
        self.attempt = task.attempt

    def __call__(self, items):
        rows = []
        for item in items:
            time.sleep(self.item_s)
            if self.file is not None:
                os.write(self.file, f"{item.index} {self.attempt}\n".encode())
            if item.index % FAILING_EVERY == 0 and self.failing and Path(self.failing).exists():
                rows.append(ItemError("not yet"))
                continue
            text = item.data["text"]
            words = [len(word) for word in text.split()]
            double, pair = 2.0 * item.index + EDITED, [item.index, item.seed % 1000]
            rows.append({"double": double, "pair": pair, "shout": text.upper(), "lengths": words})
        return rows
