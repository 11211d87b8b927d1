"""How the allocated hours were used: each second of an attempt is useful, loading, overhead, idle, lost or repeated.

docs/reference/report.md defines the six; they are computed in whole milliseconds, so that they add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

from slurmgpu.run.records import BriefRecord, Computed, Usage

Kind = Literal["useful", "loading", "overhead", "idle", "lost", "repeated"]
_Amount = Literal["allocated", "useful", "loading", "overhead", "idle", "lost", "repeated"]
KINDS: tuple[Kind, ...] = ("useful", "loading", "overhead", "idle", "lost", "repeated")

Counting = Mapping[int, Set[tuple[str, float]]]
"""For each shard the computations that count, one per revision: attempt and start."""

UNITS = ((1.0, "hours", 1), (0.05, "minutes", 60), (0.0, "seconds", 3600))
"""The least hours for each unit, its name, and how many of it make an hour."""


class Charged(TypedDict):
    """The values of an attempt that a ledger sums up."""

    n_gpus: int
    n_nodes: int
    usage: Usage
    spent: Mapping[Kind, float]


class Ledger(TypedDict):
    """The use of the hours of all attempts, as in report.json."""

    unit: str
    allocated: float
    useful: float
    loading: float
    overhead: float
    idle: float
    lost: float
    repeated: float
    energy_kwh: float | None


@dataclass(frozen=True)
class Amounts:
    """A ledger as texts: amounts in `unit`, and the shares of the kinds."""

    unit: str
    texts: Mapping[_Amount, str]
    shares: Mapping[Kind, str]


def counting(records: Iterable[Computed], published: Set[int]) -> Counting:
    """The computations that count: for each published shard and each revision, the last one."""
    found: dict[tuple[int, ...], tuple[tuple[int, float], tuple[str, float]]] = {}
    for record in records:
        for shard, started, seconds, won, *revision in record["published"]:
            # Nodes' clocks may differ, so the submission's number decides first.
            when, which = (record["submission"], started + seconds), (shard, *revision)
            if shard in published and won and (which not in found or when > found[which][0]):
                found[which] = (when, (record["attempt"], started))
    counts: dict[int, set[tuple[str, float]]] = {}
    for (shard, *_), (_, computation) in found.items():
        counts.setdefault(shard, set()).add(computation)
    return counts


def kind_of(shard: int, attempt: str, started: float, counts: Counting) -> Kind:
    """The kind of a shard's computation: useful, repeated, or lost if the shard is no longer there."""
    if shard not in counts:
        return "lost"
    return "useful" if (attempt, started) in counts[shard] else "repeated"


def spent(record: BriefRecord, seconds: float, failure: str | None, counts: Counting) -> dict[Kind, float]:
    """The `seconds` of an attempt by kind; `failure` is its failure class."""
    total = _ms(seconds)
    if failure is not None and not record["published"] and record["load_s"] is None:
        return _in_seconds(total, {"lost": total})
    done = _computed(record, counts)
    done["useful"] += _ms(record["kept_s"])
    done["lost"] += _ms(record["lost_s"])
    if record["ended"] is None:
        done["lost"] += _in_hand(record)
    done["loading"] = _loading(record)
    span = _ms(last_sign(record) - record["started"])
    done["overhead"] = max(0, span - sum(done.values()) - _ms(record["idle_s"]))
    if record["ended"] is None:
        done["lost"] += total - span
    return _in_seconds(total, done)


def last_sign(record: BriefRecord) -> float:
    """The last sign of life of an attempt: it may have published after its last record."""
    if record["ended"] is not None:
        return float(record["ended"])
    return float(max([record["updated"], *(started + seconds for _, started, seconds, *_ in record["published"])]))


def spent_unrecorded(seconds: float) -> dict[Kind, float]:
    """The same for an attempt without a record: all is lost."""
    return _in_seconds(_ms(seconds), {"lost": _ms(seconds)})


def ledger(attempts: Sequence[Charged]) -> Ledger:
    """The sums over attempts in GPU-hours, or in task-hours if none had GPUs; and the energy."""
    has_gpus = any(attempt["n_gpus"] for attempt in attempts)
    sums = dict.fromkeys(KINDS, 0)
    for attempt in attempts:
        weight = attempt["n_gpus"] * attempt["n_nodes"] if has_gpus else 1
        for kind in KINDS:
            sums[kind] += weight * _ms(attempt["spent"][kind])
    energies = [energy for a in attempts if (energy := a["usage"].get("energy_j")) is not None]
    found: dict[str, Any] = {
        "unit": "GPU-hours" if has_gpus else "task-hours",
        "allocated": sum(sums.values()) / 3_600_000,
        **{kind: ms / 3_600_000 for kind, ms in sums.items()},
        "energy_kwh": round(sum(energies) / 3.6e6, 6) if energies else None,
    }
    return cast(Ledger, found)


def in_words(ledger: Ledger) -> Amounts:
    """A ledger as texts: in hours, or in minutes or seconds for a short run. Amounts and shares add up."""
    word, factor = unit_of(ledger["allocated"])
    amounts = {kind: ledger[kind] for kind in KINDS}
    hundredths = round(100 * factor * ledger["allocated"])
    texts: dict[_Amount, str] = {
        kind: f"{count / 100:,.2f}" for kind, count in _apportioned(amounts, hundredths).items()
    }
    shares = {kind: f"{tenths / 10:.1f}%" for kind, tenths in _apportioned(amounts, 1000).items()}
    return Amounts(
        unit=ledger["unit"].replace("hours", word),
        texts=texts | {"allocated": f"{hundredths / 100:,.2f}"},
        shares=shares if any(amounts.values()) else dict.fromkeys(amounts, "–"),
    )


def unit_of(hours: float) -> tuple[str, int]:
    """The unit for a number of hours, and how many of it make an hour."""
    return next((word, factor) for least, word, factor in UNITS if hours >= least)


def energy_in_words(kwh: float) -> tuple[str, str]:
    """An energy and its unit, kWh or Wh."""
    return (f"{kwh:,.2f}", "kWh") if kwh >= 1 else (f"{1000 * kwh:,.2f}", "Wh")


def _apportioned(amounts: Mapping[Kind, float], n: int) -> dict[Kind, int]:
    """Whole numbers in proportion to the amounts, which add up to `n`: those with the largest remainders are raised."""
    total = sum(amounts.values())
    exact = {name: n * amount / total if total else 0.0 for name, amount in amounts.items()}
    whole = {name: int(share) for name, share in exact.items()}
    n_short = n - sum(whole.values()) if total else 0
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[:n_short]:
        whole[name] += 1
    return whole


def _computed(record: BriefRecord, counts: Counting) -> dict[Kind, int]:
    """Milliseconds of the shards that an attempt published, by kind."""
    found: dict[Kind, int] = {"useful": 0, "repeated": 0, "lost": 0}
    entries = sorted((started, shard, seconds) for shard, started, seconds, *_ in record["published"])
    # Times are rounded, so an end may be after the next start.
    nexts = [started for started, _, _ in entries[1:]] + [float("inf")]
    for (started, shard, seconds), end in zip(entries, nexts, strict=False):
        found[kind_of(shard, record["attempt"], started, counts)] += _ms(min(seconds, end - started))
    return found


def _in_hand(record: BriefRecord) -> int:
    """Milliseconds of the current shard of an attempt without an end, since its start or last saved progress."""
    since = record["shard_kept"] or record["shard_started"]
    is_done = record["shard"] in {shard for shard, *_ in record["published"]}
    return 0 if since is None or is_done else _ms(record["updated"] - since)


def _loading(record: BriefRecord) -> int:
    """Milliseconds of loading, of all workers."""
    ends = [at for at, _ in record["phases"][1:]] + [record["ended"] or record["updated"]]
    phases = zip(record["phases"], ends, strict=True)
    return sum(_ms(end - at) for (at, state), end in phases if state == "loading")


def _in_seconds(total: int, wanted: Mapping[Kind, int]) -> dict[Kind, float]:
    """Seconds by kind: each gets what it wants while some is left; the rest is idle."""
    left, found = total, dict.fromkeys(KINDS, 0)
    order: tuple[Kind, ...] = ("useful", "repeated", "lost", "loading", "overhead")
    for kind in order:
        found[kind] = min(wanted.get(kind, 0), left)
        left -= found[kind]
    return {kind: ms / 1000 for kind, ms in {**found, "idle": left}.items()}


def _ms(seconds: float) -> int:
    """Whole milliseconds; 0 if a clock was set back."""
    return max(0, round(1000 * seconds))
