"""Pauses between looks at files that many processes write."""

from __future__ import annotations

REST = 4
"""A pause lasts this many times as long as the look before it: listing 100,000 shards takes most of a second on NFS."""


def rest_s(took_s: float, least_s: float) -> float:
    """Seconds from a look that took `took_s` to the next one, at least `least_s`."""
    return max(least_s, REST * took_s)
