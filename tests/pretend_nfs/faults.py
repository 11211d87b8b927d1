"""What goes wrong on purpose: drawn with a seed, by the kind of request, and written to a log line by line."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .protocol import Op

CHANGES = frozenset({Op.CREATE, Op.LINK, Op.RENAME, Op.RENAME2, Op.UNLINK, Op.MKDIR})
READS = frozenset({Op.LOOKUP, Op.GETATTR, Op.OPEN, Op.READ, Op.READDIR})
WRITES = frozenset({Op.WRITE, Op.FSYNC, Op.SETATTR})
KINDS: Mapping[str, frozenset[Op]] = {
    "EIO": READS | WRITES | CHANGES,
    "ESTALE": READS,
    "ETIMEDOUT": READS | WRITES | CHANGES,
    "EINTR": READS | CHANGES,
    "EDQUOT": frozenset({Op.WRITE}),
    "lost": CHANGES,
    "slow": READS | WRITES | CHANGES,
}
"""Each kind of fault, and the requests that it happens to. "lost": the server does it, and its reply is lost."""
AGAIN = {
    Op.CREATE: errno.EEXIST,
    Op.LINK: errno.EEXIST,
    Op.MKDIR: errno.EEXIST,
    Op.RENAME: errno.ENOENT,
    Op.RENAME2: errno.ENOENT,
    Op.UNLINK: errno.ENOENT,
}
"""What the server answers to a request that a client sends again, as it has not heard that the first one was done."""
SLOW_S = 0.3


class Fault(Exception):  # noqa: N818
    """A request that shall fail, with this number; `is_done` where the server has done it."""

    def __init__(self, kind: str, number: int, is_done: bool = False) -> None:
        super().__init__(kind)
        self.kind, self.number, self.is_done = kind, number, is_done


@dataclass
class Faults:
    """Draws faults for the requests of one client.

    `rates` gives each kind's share of the requests that it can happen to. `orders` is a file: while it is there, it
    says what happens to every request, "EIO" say; "silent" for no answer as long as it stays so. "EIO@17" is for the
    17th request from then on alone, "EIO*2" for the second of each kind that has to do with each file. What follows a
    "#" tells one order from the next.
    """

    node: str
    seed: int = 0
    rates: Mapping[str, float] = field(default_factory=dict)
    log: Path | None = None
    orders: Path | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed}/{self.node}")
        self._repeat: tuple[Op, int, Fault] | None = None
        self._order, self._since = "", Counter()
        self._file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) if self.log else None

    def draw(self, op: Op, node: int, path: str, *, is_exclusive: bool = True) -> Fault | None:
        """What shall happen to a request; None if nothing does. It has waited where the server was slow."""
        if self._repeat is not None and self._repeat[:2] == (op, node):
            repeated, self._repeat = self._repeat[2], None
            return repeated
        if ordered := self._ordered(op, node, path, is_exclusive):
            return ordered
        for kind, rate in self.rates.items():
            if op not in KINDS[kind] or self._random.random() >= rate:
                continue
            if kind == "lost" and op is Op.CREATE and not is_exclusive:
                continue
            self.note(op, path, kind)
            if kind == "slow":
                time.sleep(SLOW_S)
                continue
            return self._fault(kind, op, node)
        return None

    def note(self, op: Op | str, path: str, kind: str) -> None:
        """Write a fault down."""
        if self._file is None:
            return
        name = op.name.lower() if isinstance(op, Op) else op
        line = {"time": round(time.time(), 3), "node": self.node, "op": name, "path": path, "fault": kind}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def _fault(self, kind: str, op: Op, node: int) -> Fault:
        if kind == "lost":
            # A hard mount sends the request again; a soft one gives up.
            number = AGAIN[op] if self._random.random() < 0.7 else errno.ETIMEDOUT
            return Fault(kind, number, is_done=True)
        fault = Fault(kind, getattr(errno, kind))
        if kind == "ESTALE":
            self._repeat = (op, node, fault)  # the kernel asks a second time by itself
        return fault

    def _ordered(self, op: Op, node: int, path: str, is_exclusive: bool) -> Fault | None:
        if self.orders is None:
            return None
        while True:
            try:
                order = self.orders.read_text()
            except FileNotFoundError:
                return None
            if order != "silent":
                break
            time.sleep(0.05)
        if order != self._order:
            self._order, self._since = order, Counter()
        kind, how, number = re.fullmatch(r"(\w+)(?:([@*])(\d+))?(?:#.*)?", order).groups()
        if how is None:
            return Fault(kind, getattr(errno, kind))
        # Names that are drawn at random are one name.
        which = (op, re.sub(r"[0-9a-f]{12,}|\d+", "9", path)) if how == "*" else None
        self._since[which] += 1
        if self._since[which] != int(number) or op not in KINDS[kind]:
            return None
        if kind == "lost" and op is Op.CREATE and not is_exclusive:
            return None
        self.note(op, path, kind)
        return self._fault(kind, op, node)
