"""Workloads of the tests. An item's data or a setting triggers each fault. Copied next to run files."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from slurmgpu import Array, Interrupted, ItemError, Ragged, Text


class Rows:
    """A row of each kind of column, from the item alone; faults where `faults` says so: {"17": "segfault"}."""

    columns = {"double": Array("float32"), "pair": Array("int64", (2,)), "shout": Text(), "lengths": Ragged("int16")}
    batch_size = 4

    def __init__(
        self,
        *,
        faults: dict = {},
        item_s: float = 0.0,
        load_s: float = 0.0,
        marks: str = "",
        held: str = "",
        held_from: int = 0,
    ) -> None:
        self.faults = {int(index): fault for index, fault in faults.items()}
        self.item_s, self.load_s, self.marks = item_s, load_s, marks
        self.held, self.held_from = held, held_from  # items from this one on wait until the file is gone

    def load(self, task) -> None:
        time.sleep(self.load_s)
        self.task = task

    def __call__(self, items):
        rows = []
        for item in items:
            if fault := self.faults.get(item.index):
                getattr(self, fault)(item)
            time.sleep(self.item_s)
            while self.held and item.index >= self.held_from and Path(self.held).exists():
                time.sleep(0.05)
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

    def hungry_child(self, item):
        code = "open('/proc/self/oom_score_adj', 'w').write('1000'); b = b'x' * (900 << 20)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL

    def fill_disk(self, item):
        raise OSError(28, "No space left on device")

    def hang(self, item):
        time.sleep(600)

    def kill_once(self, item):
        """Killed from outside, at the first try only."""
        mark = Path(self.marks) / f"killed{item.index}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def killed_soon(self, item, pid=None):
        """Killed from outside at some moment after the first try has begun."""
        mark = Path(self.marks) / f"killed{item.index}"
        if not mark.exists():
            mark.touch()
            threading.Timer(random.uniform(0, 0.2), os.kill, (pid or os.getpid(), signal.SIGKILL)).start()

    def task_killed_soon(self, item):
        self.killed_soon(item, os.getppid())


class LoadsLong(Rows):
    """Keeps loading until a file exists."""

    def __init__(self, *, until: str) -> None:
        super().__init__()
        self.until = until

    def load(self, task) -> None:
        while not Path(self.until).exists():
            time.sleep(0.05)
        super().load(task)


class Ranks(Rows):
    """The rows of Rows, each computed by one rank and summed over all; faults are `fault_rank`'s, or all ranks'.

    If one rank has faults, the others compute later.
    """

    def __init__(
        self, *, faults: dict = {}, item_s: float = 0.0, fault_rank: int = -1, max_batch: int = 99, child: bool = False
    ) -> None:
        super().__init__(faults=faults, item_s=item_s)
        self.fault_rank, self.max_batch, self.child = fault_rank, max_batch, child

    def load(self, task) -> None:
        from slurmgpu.worker import groups

        super().load(task)
        if self.fault_rank == task.rank:
            groups.PEER_PATIENCE_S = 1.0  # nobody will come
        elif self.fault_rank >= 0:
            self.faults = {}
        if task.world_size > 1:
            import torch.distributed

            self.torch = torch
            torch.distributed.init_process_group("gloo")
        if "load" in self.faults.values():
            raise RuntimeError("no such model")
        if self.child:
            # Named so that the tests find it by the run directory.
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "child", str(task.run_dir)])

    def sort_key(self, item):
        if self.fault_rank not in (-1, self.task.rank):
            time.sleep(0.05)
        return item.index

    def __call__(self, items):
        if len(items) > self.max_batch:
            raise MemoryError("simulated")
        rows = super().__call__(items)
        if self.task.world_size == 1:
            return rows
        double = self.torch.zeros(len(items))
        for place in range(self.task.rank, len(items), self.task.world_size):
            double[place] = rows[place]["double"]
        self.torch.distributed.all_reduce(double)
        if self.task.rank > 0:
            return None
        return [row | {"double": value.item()} for row, value in zip(rows, double, strict=True)]


class Long:
    """Counts to `n` for each item, with its progress in a file, and a line in `counts/INDEX` for each number.

    At the `deadly` numbers it kills its worker, once it has told of its progress, which is kept if it `tells` so. Each
    number of the second half goes to the file `also` as well, if there is one. To keep what there is takes `keeping_s`.
    """

    columns = {"double": Array("float32"), "shout": Text(), "counted": Array("int64")}
    batch_size = 1
    takes_one = True
    resumes = True

    def __init__(
        self,
        *,
        n: int = 20,
        step_s: float = 0.0,
        deadly: list = [],
        tells: bool = True,
        quits: bool = False,
        also: str = "",
        keeping_s: float = 0.0,
    ) -> None:
        self.n, self.step_s, self.deadly, self.tells, self.quits, self.also = n, step_s, deadly, tells, quits, also
        self.keeping_s = keeping_s

    def load(self, task) -> None:
        self.task = task
        self.folder = task.run_dir / "counts"
        self.folder.mkdir(exist_ok=True)
        if task.world_size > 1:
            import torch.distributed

            self.torch = torch
            torch.distributed.init_process_group("gloo")

    def __call__(self, items):
        [item] = items
        path = self.folder / str(item.index)
        count = path.read_text().count("\n") if path.exists() else 0
        if self.task.world_size > 1:
            count = self.of_rank_0(count)
        while count < self.n:
            if self.of_rank_0(self.task.stopping() or (self.quits and count == 3)):
                time.sleep(self.keeping_s)
                path.with_suffix(".kept").touch()
                raise Interrupted
            time.sleep(self.step_s)
            count += 1
            if self.also and count > self.n // 2:
                Path(self.also).write_text(str(count))
            if self.task.rank == 0:
                with open(path, "a") as file:
                    file.write(f"{count} {self.task.attempt}\n")
            (self.task.progress if self.tells else self.task.tell)(f"{count}\tof {self.n} \ud800")
            if count in self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
        return [{"double": 2.0 * item.index, "shout": item.data["text"].upper(), "counted": count}]

    def of_rank_0(self, value):
        if self.task.world_size == 1:
            return value
        told = self.torch.tensor([value], dtype=self.torch.int64)
        self.torch.distributed.broadcast(told, 0)
        return told.item()


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
