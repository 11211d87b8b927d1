"""Caches that grow in place hold what transformers' own hold, whatever rows come and go."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import DynamicCache, MistralConfig  # noqa: E402

from slurmgpu.llm.transformers_engine import caches  # noqa: E402
from slurmgpu.llm.transformers_engine.cache_layers import GROWTH  # noqa: E402

WINDOW = 7
KINDS = pytest.mark.parametrize("window", [None, WINDOW], ids=["full", "sliding"])


class Model:
    """All that a cache needs to know of a model: one layer."""

    def __init__(self, window: int | None) -> None:
        self.config = MistralConfig(num_hidden_layers=1, sliding_window=window)


def states(n_rows: int, n_columns: int, seed: int) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n_rows, 2, n_columns, width, generator=made) for width in (4, 3))  # type: ignore[return-value]


def read(window: int | None, n_rows: int, n_columns: int, seed: int, n_more: int = 100) -> tuple[Any, Any]:
    """A cache of ours and one of transformers' that have read the same prompts."""
    ours, theirs = caches.new_cache(Model(window), n_more), DynamicCache(config=Model(window).config)
    step(ours, theirs, n_rows, n_columns, seed)
    return ours, theirs


def step(ours: Any, theirs: Any, n_rows: int, n_columns: int, seed: int) -> None:
    """Append columns to both; what attention sees must be the same."""
    new = states(n_rows, n_columns, seed)
    for mine, other in zip(ours.update(*new, 0), theirs.update(*new, 0), strict=True):
        assert torch.equal(mine, other)
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.layers[0].get_mask_sizes(1) == theirs.layers[0].get_mask_sizes(1)


@KINDS
def test_a_cache_that_grows_in_place_holds_the_same_after_many_tokens(window: int | None) -> None:
    ours, theirs = read(window, 3, 4, seed=0)
    for seed in range(1, 2 * GROWTH + 4):
        step(ours, theirs, 3, 1, seed)


@KINDS
def test_a_token_is_written_into_room_that_was_there(window: int | None) -> None:
    ours, theirs = read(window, 3, 4, seed=0)
    before = ours.layers[0].keys.untyped_storage().data_ptr()
    for seed in range(1, GROWTH):
        step(ours, theirs, 3, 1, seed)
    assert ours.layers[0].keys.untyped_storage().data_ptr() == before


@KINDS
def test_rows_that_end_leave_the_others_as_they_were(window: int | None) -> None:
    ours, theirs = read(window, 6, 5, seed=0)
    order = caches.drop(ours, [1, 2, 5], "cpu")
    assert sorted(order) == [1, 2, 5]
    theirs.batch_select_indices(torch.tensor(order))
    for seed in range(1, 2 * WINDOW):
        step(ours, theirs, 3, 1, seed)


@KINDS
@pytest.mark.parametrize("n_columns", [3, 5, 12])
@pytest.mark.parametrize("n_dropped", [0, 2, 4])
def test_rows_that_join_have_zeros_before_them(window: int | None, n_columns: int, n_dropped: int) -> None:
    ours, theirs = read(window, 5, 5, seed=0)
    order = caches.drop(ours, [*range(n_dropped, 5)], "cpu")
    theirs.batch_select_indices(torch.tensor(order))
    others, their_others = read(window, 2, n_columns, seed=1)
    caches.join(ours, others, 5, n_columns)
    longest = max(5, n_columns)
    held = longest if window is None else min(longest, window - 1)
    layer = theirs.layers[0]
    for name in ("keys", "values"):
        rows = [getattr(each.layers[0], name) for each in (theirs, their_others)]
        padded = [torch.nn.functional.pad(each, (0, 0, held - each.shape[2], 0)) for each in rows]
        setattr(layer, name, torch.cat(padded))
    if window is not None:
        layer.cumulative_length = longest
    for seed in range(2, 2 * WINDOW):
        step(ours, theirs, 7 - n_dropped, 1, seed)


@KINDS
def test_unused_columns_are_dropped_and_the_rest_grows_on(window: int | None) -> None:
    ours, theirs = read(window, 2, 6, seed=0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    assert caches.trim(ours, mask).tolist() == mask[:, 2:].tolist()
    layer = theirs.layers[0]
    layer.keys, layer.values = layer.keys[:, :, -4:], layer.values[:, :, -4:]
    if window is not None:
        layer.cumulative_length = 4
    for seed in range(1, 2 * WINDOW):
        step(ours, theirs, 2, 1, seed)


@KINDS
def test_copies_of_a_cache_grow_apart(window: int | None) -> None:
    ours, theirs = read(window, 1, 3, seed=0)
    copies = [caches.repeat(ours, 2, n_more=9), caches.copy_rows(ours, torch.tensor([0, 0])), ours]
    for seed, each in enumerate(copies, 1):
        n_rows = len(each.layers[0].keys)
        expected = DynamicCache(config=Model(window).config)
        expected.update(*(part.expand(n_rows, -1, -1, -1) for part in states(1, 3, 0)), 0)
        step(each, expected, n_rows, 1, seed)
    step(*read(window, 1, 3, seed=0), 1, 1, 4)
    assert torch.equal(ours.layers[0].keys[:, :, :3], theirs.layers[0].keys)
