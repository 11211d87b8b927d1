"""A mask of the training triples near a test triple: the replaced system's filter by hops and degree.

The training triples are undirected edges. For a test triple (h, r, t), an edge is kept if

1. each of its ends is h or t, or is within `n_hops` of both h and t; and
2. it touches h or t (`preserve_test_edges`), or one of its ends has at least `min_degree` different neighbours that
   are, like that end, within `n_hops` of h, or within `n_hops` of t; and
3. with `path_filtering`, all four distances are at most `n_hops`, and in one of the edge's two directions the distance
   from h does not fall and the distance to t does not rise. If `max_total_path_length` is set, the distances from h to
   the edge's start and from its end to t add up to at most that, without the edge itself.

`strict_path_filtering` drops rule 2. The rules are those of the replaced system's default back end; its two others
count paths and degrees differently. Its strict hop constraint, both ends within `n_hops` of h or of t, is in rule 1.

Each test triple is one bit: one pass over the edges for each hop searches 64 test triples at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]
"""(words, …): bit i of word w belongs to test triple 64w + i."""


@dataclass(frozen=True)
class HopFilterOptions:
    """The rules of the filter, by the settings' names."""

    n_hops: int = 2
    min_degree: int = 2
    preserve_test_edges: bool = True
    path_filtering: bool = False
    max_total_path_length: int | None = None
    strict_path_filtering: bool = False


class HopFilter:
    """The training graph (n, 3), ready to be searched."""

    def __init__(self, train: NDArray[np.int64], n_entities: int, options: HopFilterOptions) -> None:
        self.train, self.n_entities, self.options = train, n_entities, options
        heads, tails = train[:, 0], train[:, 2]
        edges = np.unique(np.concatenate([heads * n_entities + tails, tails * n_entities + heads]))
        self._from, self._to = np.divmod(edges, n_entities)
        self._nodes, self._starts, degrees = np.unique(self._from, return_index=True, return_counts=True)
        self._rounds = _rounds(degrees)

    def mask(self, tests: NDArray[np.int64]) -> Mask:
        """The mask for test triples (m, 3); it needs (n_hops + 2) / 4 bytes for each of them and each entity."""
        by_head, by_tail = self._hops(tests[:, 0]), self._hops(tests[:, 2])
        own = by_head[0] | by_tail[0]
        is_asked = self.options.min_degree > 0 and not self.options.strict_path_filtering
        dense = self._dense(by_head[-1], by_tail[-1]) if is_asked else None
        return Mask(self.train, len(tests), self.options, by_head, by_tail, own, dense)

    def _hops(self, sources: NDArray[np.int64]) -> list[Bits]:
        """The entities within k hops of each source, for k = 0 … n_hops: bits (words, N)."""
        number = np.arange(len(sources))
        found = np.zeros((-(-len(sources) // 64), self.n_entities), np.uint64)
        np.bitwise_or.at(found, (number // 64, sources), np.uint64(1) << (number % 64).astype(np.uint64))
        levels = [found]
        for _ in range(self.options.n_hops):
            found = found.copy()
            for word, before in zip(found, levels[-1], strict=True):
                if len(self._to):
                    word[self._nodes] |= np.bitwise_or.reduceat(before[self._to], self._starts)
            levels.append(found)
        return levels

    def _dense(self, near_head: Bits, near_tail: Bits) -> Bits:
        """The entities that have at least `min_degree` near neighbours: bits (words, N)."""
        found = np.zeros_like(near_head)
        for word, by_head, by_tail in zip(found, near_head, near_tail, strict=True):
            counted = (by_head[self._from] & by_head[self._to]) | (by_tail[self._from] & by_tail[self._to])
            word[self._nodes] = _at_least(self.options.min_degree, _counts(counted, self._rounds))
        return found


@dataclass(frozen=True)
class Mask:
    """A mask of the training triples that may influence each of `n_tests` test triples."""

    train: NDArray[np.int64]
    n_tests: int
    options: HopFilterOptions
    by_head: Sequence[Bits]
    by_tail: Sequence[Bits]
    own: Bits
    dense: Bits | None

    def __call__(self, lines: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(m, B): whether training triple `lines[j]` is kept for test i."""
        start, end = self.train[lines, 0], self.train[lines, 2]
        kept = self._is_near(start) & self._is_near(end)
        if self.dense is not None:
            important = self.dense.take(start, axis=1) | self.dense.take(end, axis=1)
            if self.options.preserve_test_edges:
                important |= self.own.take(start, axis=1) | self.own.take(end, axis=1)
            kept &= important
        if self.options.path_filtering:
            kept &= self._is_on_path(start, end) | self._is_on_path(end, start)
        by_byte = kept.astype("<u8", order="C").view(np.uint8).reshape(*kept.shape, 8).transpose(0, 2, 1)
        bits = np.unpackbits(by_byte.reshape(-1, len(lines)), axis=0, count=self.n_tests, bitorder="little")
        return bits.astype(np.bool_)

    def _is_near(self, nodes: NDArray[np.int64]) -> Bits:
        """Rule 1 for one end."""
        return (self.by_head[-1].take(nodes, axis=1) & self.by_tail[-1].take(nodes, axis=1)) | self.own.take(
            nodes, axis=1
        )

    def _is_on_path(self, start: NDArray[np.int64], end: NDArray[np.int64]) -> Bits:
        """Rule 3, for a path from the head over `start` and `end` to the tail."""
        from_head = [(level.take(start, axis=1), level.take(end, axis=1)) for level in self.by_head]
        to_tail = [(level.take(start, axis=1), level.take(end, axis=1)) for level in self.by_tail]
        found = from_head[-1][0] & from_head[-1][1] & to_tail[-1][0] & to_tail[-1][1]
        for (of_start, of_end), (start_tail, end_tail) in zip(from_head, to_tail, strict=True):
            # If the end is within k hops of the head, so is the start; if the start is near the tail, so is the end.
            found &= (of_start | ~of_end) & (end_tail | ~start_tail)
        longest = self.options.max_total_path_length
        if longest is None:
            return found
        short = np.zeros_like(found)
        for hops, (of_start, _) in enumerate(from_head[: longest + 1]):
            short |= of_start & to_tail[min(longest - hops, len(to_tail) - 1)][1]
        return found & short


Rounds = Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""For each round the indices of first and second summands; an index past the end stands for zero."""


def _rounds(sizes: NDArray[np.int64]) -> Rounds:
    """The rounds that add up consecutive segments of these sizes pairwise."""
    rounds = []
    while sizes.size and sizes.max() > 1:
        starts, halves = np.cumsum(sizes) - sizes, (sizes + 1) // 2
        within = np.arange(halves.sum()) - np.repeat(np.cumsum(halves) - halves, halves)
        first = np.repeat(starts, halves) + 2 * within
        has_second = 2 * within + 1 < np.repeat(sizes, halves)
        rounds.append((first, np.where(has_second, first + 1, sizes.sum())))
        sizes = halves
    return rounds


def _counts(bits: Bits, rounds: Rounds) -> list[Bits]:
    """The count of each bit in each segment, as binary digits, lowest first: 64 counts at once."""
    digits = [bits]
    for first, second in rounds:
        carry, sums = np.zeros(len(first), np.uint64), []
        for digit in digits:
            padded = np.append(digit, np.uint64(0))
            a, b = padded[first], padded[second]
            sums.append(a ^ b ^ carry)
            carry = (a & b) | (carry & (a ^ b))
        digits = [*sums, carry]
    return digits


def _at_least(least: int, digits: Sequence[Bits]) -> Bits:
    if least >> len(digits):
        return np.zeros_like(digits[0])
    more, same = np.zeros_like(digits[0]), ~np.zeros_like(digits[0])
    for place in reversed(range(len(digits))):
        if least >> place & 1:
            same &= digits[place]
        else:
            more |= same & digits[place]
            same &= ~digits[place]
    return more | same
