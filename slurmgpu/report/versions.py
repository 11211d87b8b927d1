"""The versions of Python and of packages with which the attempts of a run computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from slurmgpu.run.records import Record
from slurmgpu.util.amounts import count_of
from slurmgpu.util.env_info import Surroundings


def computed_with(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Versions of Python and of imported packages, each with the number of attempts that computed shards with it."""
    found: dict[str, Counter[str]] = {}
    for record in records:
        around: Surroundings = record["surroundings"] if record["published"] else {}
        used = around.get("used")
        versions = {"python": around.get("python"), **(used if isinstance(used, dict) else {})}
        for name, version in versions.items():
            if isinstance(version, str):
                found.setdefault(name, Counter())[version] += 1
    return {name: dict(sorted(counts.items())) for name, counts in found.items()}


def versions_in_words(computed: Mapping[str, Mapping[str, int]], *, leaving_out: Sequence[str] = ()) -> str:
    """The result of `computed_with` as `torch 2.11.0 (3 attempts), torch 2.13.0 (1 attempt), transformers 5.19.0`."""
    return ", ".join(
        f"{name} {version}" + (f" ({count_of(n, 'attempt')})" if len(counts) > 1 else "")
        for name, counts in computed.items()
        if name not in leaving_out
        for version, n in counts.items()
    )
