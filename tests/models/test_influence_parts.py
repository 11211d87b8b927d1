"""Every part's dot products are those of the gradients that it stands for."""

import pytest
import torch

from slurmgpu.influence import table_parts
from slurmgpu.influence.parts import Dense, Outer
from slurmgpu.influence.precision import multiply_for
from slurmgpu.influence.table_parts import Rows, Spread
from slurmgpu.influence.top_k import TopK

pytestmark = pytest.mark.usefixtures("one_thread")

N_ROWS, WIDTH, N_QUERIES = 8, 5, 4


class Random:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def values(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def whole(self, top, *shape, bottom=0):
        return torch.randint(bottom, top, shape, generator=self.generator)

    def dense(self, n):
        return Dense(self.values(n, N_ROWS * WIDTH))

    def outer(self, n):
        return Outer(self.values(n, N_ROWS), self.values(N_QUERIES, WIDTH), self.whole(N_QUERIES, n))

    def rows(self, n, n_slots=3, n_rows=N_ROWS):
        index = self.whole(n_rows, n, n_slots, bottom=-1)
        index[0] = index[0, 0].clamp(min=0)  # a row named by every slot
        values = self.values(n, n_slots, WIDTH).masked_fill(index[:, :, None] < 0, 0)
        return Rows(index, values)

    def spread(self, n, scaled=True):
        found = self.rows(n)
        of = self.whole(N_QUERIES, n)
        spread = Spread(
            self.values(N_QUERIES, N_ROWS), self.values(N_QUERIES, WIDTH), of, self.values(n) if scaled else None
        )
        return Rows(found.index, found.values, spread)

    def spread_unscaled(self, n):
        return self.spread(n, scaled=False)


PAIRS = [
    ("dense", "dense"),
    ("outer", "outer"),
    ("rows", "rows"),
    ("rows", "spread"),
    ("spread", "rows"),
    ("spread", "spread"),
    ("spread_unscaled", "spread"),
]
SHAPE = torch.Size([N_ROWS, WIDTH])


@pytest.mark.parametrize("match_cost", [0, 50, 10**9], ids=["by matches", "as it is", "by products"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_products_are_those_of_the_gradients(mine, theirs, weighted, match_cost, monkeypatch):
    monkeypatch.setattr(table_parts, "MATCH_COST", match_cost)
    random = Random(0)
    a, b = getattr(random, mine)(6), getattr(random, theirs)(9)
    weights = random.values(*SHAPE).abs() if weighted else None
    out = random.values(6, 9)
    expected = out + 0.7 * torch.einsum(
        "nab,mab->nm", a.dense(SHAPE) * (1 if weights is None else weights), b.dense(SHAPE)
    )
    a.add_products(b, out, scale=0.7, weights=weights)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_products_of_like_positions_are_the_diagonal(mine, theirs, weighted):
    random = Random(1)
    a, b = getattr(random, mine)(7), getattr(random, theirs)(7)
    weights = random.values(*SHAPE).abs() if weighted else None
    out = torch.zeros(7, 7, dtype=torch.float64)
    a.add_products(b, out, weights=weights)
    torch.testing.assert_close(a.dots(b, weights), out.diag(), rtol=1e-12, atol=1e-12)


KINDS = ("dense", "outer", "rows", "spread", "spread_unscaled")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_squares_in_single_precision_hold_gradients_of_any_length(kind, weighted):
    exact = getattr(Random(5), kind)(30)
    exponents = torch.arange(30) * -4  # lengths of 1 to 1e-35
    single = of_dtype(exact, torch.float32).scaled(exponents)
    weights = Random(6).values(*SHAPE).abs() if weighted else None
    expected = exact.dots(exact, weights) * torch.exp2(2 * exponents.double())
    found = single.dots(single, None if weights is None else weights.float())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_scaled_by_powers_of_two_beyond_its_dtypes_range(kind):
    exact = getattr(Random(7), kind)(30)
    exponents = Random(8).whole(30, 30, bottom=-90)
    single = of_dtype(exact, torch.float32)
    scaled = single.scaled(exponents)
    expected = exact.dense(SHAPE) * torch.exp2(exponents.double())[:, None, None]
    torch.testing.assert_close(scaled.dense(SHAPE).double(), expected, rtol=1e-4, atol=1e-30)
    out, expected = torch.zeros(30, 30), torch.zeros(30, 30)
    scaled.scaled(-exponents).add_products(single, out)
    single.add_products(single, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def of_dtype(part, dtype):
    """The part, with its real factors in another dtype."""

    def cast(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    changed = {name: cast(value) for name, value in vars(part).items()}
    if changed.get("spread") is not None:
        changed["spread"] = of_dtype(changed["spread"], dtype)
    return type(part)(**changed)


@pytest.mark.parametrize("n_rows", [2, 5, 300])
def test_rows_are_matched_alike_both_ways(n_rows, monkeypatch):
    a, b = Random(2).rows(40, n_rows=n_rows), Random(3).rows(50, n_rows=n_rows)
    monkeypatch.setattr(table_parts, "MATCHES_AT_ONCE", {"cpu": 7})
    monkeypatch.setattr(table_parts, "MATCHES_FOUND", 30)
    found = []
    for cost in (0, 10**9):
        monkeypatch.setattr(table_parts, "MATCH_COST", cost)
        found.append(torch.zeros(40, 50, dtype=torch.float64))
        a.add_products(b, found[-1])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    same = a.index[:, None, :, None] == b.index[None, :, None, :]
    assert torch.equal(found[0] != 0, (same & (a.index >= 0)[:, None, :, None]).any(3).any(2))


def test_matches_are_written_down_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(table_parts, "MATCHES_FOUND", 100)
    counts = torch.tensor([0, 60, 40, 1, 0, 250, 0, 99, 1, 0])
    pieces = list(table_parts._pieces(counts, int(counts.sum())))
    assert [list(range(len(counts)))[piece] for piece in pieces] == [[0, 1, 2], [3, 4], [5], [6, 7, 8, 9]]
    assert max(int(counts[piece].sum()) for piece in pieces) == 250  # a row's own are not divided


@pytest.mark.parametrize("kind", ["dense", "outer", "rows", "spread"])
def test_bytes_are_those_of_the_factors(kind):
    part = getattr(Random(4), kind)(6)
    tensors = [value for value in _tensors(part) if value is not None]
    assert part.n_bytes == sum(value.numel() * value.element_size() for value in tensors)


def _tensors(part):
    for value in vars(part).values():
        if isinstance(value, Spread):
            yield from vars(value).values()
        else:
            yield value


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_fewer_bits_err_by_their_last_one_at_any_size(precision, size):
    a, b = (Random(seed).values(20, 100).float() * size for seed in (5, 6))
    a[3] = 0
    exact = a.double() @ b.double().T
    error = (multiply_for(precision)(a, b) - exact).norm() / exact.norm()
    eps = {"tf32": 2**-11, "bf16": 2**-8, "fp16": 2**-11}[precision]
    assert 0 < error < 2 * eps


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_fewer_bits_hold_a_sum_of_many(precision):
    ones = torch.ones(1, 70_000)
    assert multiply_for(precision)(ones, ones).item() == pytest.approx(70_000, rel=0.004)


def test_extremes_are_those_of_sorting():
    for seed in range(40):
        random = Random(seed)
        n, b, k = (int(random.whole(top, 1, bottom=1)[0]) for top in (5, 60, 12))
        # Few different values: many are equal, within pieces and across them.
        values = random.whole(5, n, b, bottom=-4).double() / 3
        shares = torch.stack([values * 0.25, values * 0.75])
        found = [TopK(n, k, b, 2, sign, values) for sign in (1, -1)]
        order = torch.randperm(b, generator=random.generator)
        for part in order.split(int(random.whole(20, 1, bottom=1)[0])):
            lines = part.sort().values
            for first in range(0, n, 2):
                rows = slice(first, first + 2)
                for one in found:
                    one.offer(first, values[rows, lines], lines, shares[:, rows][:, :, lines])
        for one, sign in zip(found, (1, -1), strict=True):
            lines, values_found, shares_found = one.found()
            for row in range(n):
                expected = sorted((-sign * v, j) for j, v in enumerate(values[row].tolist()) if sign * v > 0)[:k]
                pad = [-1] * (k - len(expected))
                assert lines[row].tolist() == [j for _, j in expected] + pad
                assert values_found[row].tolist() == [-sign * v for v, _ in expected] + [0] * len(pad)
            torch.testing.assert_close(shares_found.sum(2), values_found)
