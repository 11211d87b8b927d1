"""Workloads of the tests. Each fault is asked for by an item's data or a setting. Copied beside run files."""

import os
import signal
import time
from pathlib import Path

from slurmgpu import Array, ItemError, Ragged, Text


class Rows:
    """A row of each kind of column, from the item alone; faults where `faults` says so: {"17": "segfault"}."""

    columns = {"double": Array("float32"), "pair": Array("int64", (2,)), "shout": Text(), "lengths": Ragged("int16")}
    batch_size = 4

    def __init__(self, *, faults: dict = {}, item_s: float = 0.0, load_s: float = 0.0, marks: str = "") -> None:
        self.faults = {int(index): fault for index, fault in faults.items()}
        self.item_s, self.load_s, self.marks = item_s, load_s, marks

    def load(self, task) -> None:
        time.sleep(self.load_s)
        self.task = task

    def __call__(self, items):
        rows = []
        for item in items:
            if fault := self.faults.get(item.index):
                getattr(self, fault)(item)
            time.sleep(self.item_s)
            if self.marks:  # who computed what, and how often
                with open(Path(self.marks) / str(item.index), "a") as file:
                    file.write(f"{self.task.attempt} {os.getpid()}\n")
            text = item.data["text"]
            words = text.split()
            pair = [item.index, item.seed % 1000]
            rows.append(
                {"double": 2.0 * item.index, "pair": pair, "shout": text.upper(), "lengths": [*map(len, words)]}
            )
        return rows

    def exception(self, item):
        raise ValueError(f"cannot do item {item.index}")

    def item_error(self, item):
        raise ItemError("not this one")

    def segfault(self, item):
        os.kill(os.getpid(), signal.SIGSEGV)

    def hard_exit(self, item):
        os._exit(3)

    def memory(self, item):
        block = bytearray(900 << 20)
        block[::4096] = b"x" * len(block[::4096])

    def fill_disk(self, item):
        raise OSError(28, "No space left on device")

    def hang(self, item):
        time.sleep(600)

    def kill_once(self, item):
        """Killed from outside at the first try only."""
        mark = Path(self.marks) / f"killed{item.index}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Broken:
    """Fails the same way for every item."""

    columns = {"x": Array("float32")}
    batch_size = 4

    def load(self, task) -> None:
        pass

    def __call__(self, items):
        return [{"x": item.data["no such key"]} for item in items]


class Unloadable:
    """Fails to load."""

    columns = {"x": Array("float32")}
    batch_size = 4

    def load(self, task) -> None:
        raise ImportError("No module named 'torch'")

    def __call__(self, items):
        raise AssertionError
