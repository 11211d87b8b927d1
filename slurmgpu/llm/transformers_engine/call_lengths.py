"""Decide which texts a model may read in one call, if its values depend on the longest text of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

TWO_ROPES = {"longrope", "su"}
"""RoPE types with two sets of frequencies, by both of their names."""
LENGTH_ROPES = {"dynamic", *TWO_ROPES}
"""RoPE types that choose frequencies by the greatest position of a call."""
LENGTH_MASKS = {"doge"}
"""Model types that attend to a fixed number of columns, including padding."""


@dataclass(frozen=True)
class CallLengths:
    """Which texts a model may read in one call without computing any of them differently.

    Up to `border` tokens all lengths are alike. Beyond it they are alike again if the model `has_two` sets of
    frequencies, such as longrope: a row that crosses the border is read again. Otherwise a longer text is computed
    alone.
    """

    border: int = sys.maxsize
    has_two: bool = True

    @classmethod
    def of(cls, config: Any) -> CallLengths:
        """The rules for a model, from its text config."""
        if config.model_type in LENGTH_MASKS:
            # A row has at most twice as many columns as tokens: columns of ended rows are dropped by then.
            return cls(int(config.keep_window_size) // 2, has_two=False)
        # Dynamic RoPE frequencies only change beyond max_position_embeddings, and no more than that is read.
        own = [getattr(config, name, None) for name in ("original_max_position_embeddings", "max_position_embeddings")]
        borders = {
            int(each.get("original_max_position_embeddings") or own[0] or own[1] or 0)
            for each in _ropes(config)
            if _type_of(each) in TWO_ROPES
        }
        return cls(min(borders), has_two=len(borders) == 1) if borders else cls()

    def groups(self, items: Sequence[T], lengths_of: Callable[[T], tuple[int, int]]) -> Iterator[list[T]]:
        """Groups of items for the same calls, by the tokens that are read first, and the tokens after them."""
        near: list[T] = []
        far: list[T] = []
        for item in items:
            n_first, n_more = lengths_of(item)
            is_near = n_first <= self.border if self.has_two else n_first + n_more <= self.border
            (near if is_near else far).append(item)
        yield from [near] if near else []
        yield from ([far] if far else []) if self.has_two else ([each] for each in far)

    def n_alike(self, lengths: Sequence[int]) -> int:
        """How many texts of these lengths, the longest first, may be read with the first."""
        if lengths[0] <= self.border:
            return len(lengths)
        return sum(1 for length in lengths if (length > self.border if self.has_two else length == lengths[0]))

    def limit(self, longest: int) -> int:
        """The most tokens that rows may reach if they were read together with one of `longest`."""
        return self.border if self.has_two and longest <= self.border else sys.maxsize

    def crosses(self, n_first: int, n_more: int) -> bool:
        """Whether the tokens after a text change how the text is computed."""
        return self.limit(n_first) < n_first + n_more or (not self.has_two and n_first + n_more > self.border)


def depends_on_length(config: Any) -> bool:
    """Whether a text's values depend on the number of columns of a call, from its neighbours and padding."""
    types = map(_type_of, _ropes(config))
    return config.model_type in LENGTH_MASKS or not LENGTH_ROPES.isdisjoint(types)


def _type_of(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type", parameters.get("type", "")))


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters of all layers, or of each kind of layer; models with their own code use the older name."""
    for name in ("rope_parameters", "rope_scaling"):
        yield from _mappings(getattr(config, name, None))


def _mappings(found: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(found, Mapping):
        yield found
        for each in found.values():
            yield from _mappings(each)
