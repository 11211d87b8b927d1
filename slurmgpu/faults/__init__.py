"""Faults on demand: parse and check the argument of `submit --inject`.

`injection` makes them happen, in the same way as real ones; `verdicts` compares the results with what is promised;
`gpu_trial` tests GPUs with a run of real CUDA faults. The worker imports this: standard library only.

May import: report, results, run, shards, util, loader and workload.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.run.frozen_plan import Plan


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    It `takes` the number of an "item", of a "shard", or none. A fault that strikes `once` does so in only one of all
    tasks and restarts. One that `kills` ends the process that computes, which is the user's own with the executor
    debug. `row` is the failure class in the item's row, "" if the item gets a good row; `end` is that of the attempt.
    """

    takes: str | None
    once: bool = False
    kills: bool = False
    row: str = ""
    end: str = ""


KINDS = {
    "kill": Kind("item", once=True, kills=True),
    "preempt": Kind("item", once=True, kills=True, end="preempted"),
    "timeout": Kind(None, once=True, end="timeout"),
    "oom": Kind("item"),
    "cuda_oom": Kind("item", row="cuda_oom"),
    "error": Kind("item", row="item_error"),
    "crash": Kind("item", kills=True, row="crash"),
    "damage": Kind("shard", once=True),
}
"""The kinds by name, in the order in which they strike if a call has several: after a crash no other can strike."""


@dataclass(frozen=True)
class Fault:
    """One fault: "crash@17" is of kind "crash" `at` item 17."""

    kind: str
    at: int | None = None

    def __str__(self) -> str:
        return self.kind if self.at is None else f"{self.kind}@{self.at}"


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    """The faults in texts such as "crash@17,timeout", without duplicates, in the order in which they strike."""
    words = [word.strip() for text in texts for word in text.split(",")]
    if "" in words:
        raise SlurmGPUError(
            f"--inject is empty. Name one or more faults, separated by commas, like crash@17,oom@40,timeout. "
            f"The faults are {', '.join(map(_example, KINDS))}."
        )
    faults = dict.fromkeys(map(_parse, words))
    return tuple(sorted(faults, key=lambda fault: list(KINDS).index(fault.kind)))


def _parse(word: str) -> Fault:
    name, at, number = word.partition("@")
    kind = KINDS.get(name)
    if kind is None:
        raise SlurmGPUError(
            f"--inject {word}: there is no fault {name!r}.{did_you_mean(name, KINDS)} "
            f"The faults are {', '.join(map(_example, KINDS))}."
        )
    if kind.takes is None and at:
        raise SlurmGPUError(f"--inject {word}: {name} takes no number. Write {name} alone.")
    if kind.takes and re.fullmatch(r"[0-9]+", number) is None:
        raise SlurmGPUError(
            f"--inject {word}: {name} needs the number of one {kind.takes}, counted from 0, such as {_example(name)}."
        )
    return Fault(name, int(number) if kind.takes else None)


def _example(name: str) -> str:
    takes = KINDS[name].takes
    return name if takes is None else f"{name}@{17 if takes == 'item' else 2}"


def check_faults(faults: Sequence[Fault], plan: Plan) -> None:
    """Raise SlurmGPUError for faults that cannot happen in a run of this plan."""
    at_items: dict[int | None, Fault] = {}
    for fault in faults:
        _check(fault, plan)
        if KINDS[fault.kind].takes == "item" and (other := at_items.setdefault(fault.at, fault)) != fault:
            raise SlurmGPUError(
                f"--inject {other},{fault}: an item can have only one fault. Name another item for one of them."
            )


def _check(fault: Fault, plan: Plan) -> None:
    kind = KINDS[fault.kind]
    n = {"item": plan.n_items, "shard": plan.n_shards, None: 0}[kind.takes]
    if kind.takes == "item" and plan.look and plan.place(fault.at or 0) is None:
        raise SlurmGPUError(f"--inject {fault}: this look does not include item {fault.at}.")
    if fault.at is not None and fault.at >= n and not (kind.takes == "item" and plan.look):
        raise SlurmGPUError(
            f"--inject {fault}: this run has no {kind.takes} {fault.at}. Its {kind.takes}s are 0 to {n - 1:,}."
        )
    if fault.kind == "oom" and fault.at is not None:
        start, stop = plan.bounds(plan.shard_of(fault.at))
        if min(plan.batch_size, stop - start) == 1:
            raise SlurmGPUError(
                f"--inject {fault} needs a batch of several items, but item {fault.at} is alone in its batch. "
                f"For an item that never fits into memory, use cuda_oom@{fault.at}."
            )
