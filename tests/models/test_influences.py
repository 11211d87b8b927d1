"""The engine equals the dense matrix of dot products, whatever the chunks, blocks, checkpoints and options."""

import weakref

import numpy as np
import pytest
import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.influence.influences import Checkpoint, Influences, Options
from slurmgpu.influence.layered import of_module
from slurmgpu.influence.results import as_float16
from tests.support.influences import Little, all_of, checkpoint, dense, examples, gradient_rows, influences

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN, TESTS = examples(60, 1), examples(7, 2)


def close(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def in_chunks(of, train=TRAIN, **options):
    """Memory for chunks of some `of` examples and a few tests."""
    work = checkpoint().model.bytes_of_work("train")
    return influences(train, memory_bytes=2 * of * work + 1, **options)


def test_influences_are_the_dot_products_of_gradients():
    found = influences(TRAIN).of(TESTS)
    close(found.full, dense(Little(), TESTS, TRAIN))
    close(found.self_influence, np.diag(dense(Little(), TESTS, TESTS)))
    close(found.loss, Little().losses(TESTS).detach())
    close(found.score, Little().scores(TESTS).detach())
    assert found.problems == {}


@pytest.mark.parametrize("size", [1, 25])
def test_chunks_and_blocks_of_tests_change_nothing_beyond_rounding(size):
    chunked, whole = in_chunks(size, top_k=9), influences(TRAIN, top_k=9)
    assert chunked.chunk_size <= size
    assert chunked.n_chunks > 1
    assert whole.n_chunks == 1
    a, b = chunked.of(TESTS), whole.of(TESTS)
    close(a.full, b.full)
    for mine, theirs in ((a.proponents, b.proponents), (a.opponents, b.opponents)):
        close(mine.values, theirs.values)
        close(np.where(mine.lines < 0, 0, np.take_along_axis(b.full, mine.lines, 1)), theirs.values)
    for name in ("sum", "abs_sum", "std", "positive_share", "n_counted", "self_influence"):
        close(getattr(a, name), getattr(b, name))


def test_more_tests_than_the_memory_holds_stream_past_in_blocks():
    few = in_chunks(2, top_k=3)
    assert few.tests_at_once < len(TESTS)
    found = few.of(TESTS, allowed=lambda lines: (lines % 2 == 0)[None].expand(len(TESTS), -1))
    close(found.full, dense(Little(), TESTS, TRAIN))
    assert (found.proponents.lines % 2 == 0).all()


def test_the_grid_depends_on_the_memory_and_on_no_test():
    model = in_chunks(7)
    before = model.chunk_size
    model.of(TESTS)
    model.of(TESTS[:1])
    assert model.chunk_size == before


@pytest.mark.parametrize(("normalize", "keep_bytes"), [("none", 10**9), ("cosine", 20_000)])
def test_what_is_kept_gives_the_same_bits(normalize, keep_bytes):
    keeping, not_keeping = (in_chunks(7, keep_bytes=n, normalize=normalize) for n in (keep_bytes, 0))
    for tests in (TESTS[:3], TESTS):
        a, b = keeping.of(tests), not_keeping.of(tests)
        assert a.full.tobytes() == b.full.tobytes()
        assert a.proponents.lines.tobytes() == b.proponents.lines.tobytes()


def test_chunks_that_are_kept_are_not_computed_again():
    one = checkpoint()
    keeping = in_chunks(7, checkpoints=[one], keep_bytes=10**9)
    sides = sides_computed(one)
    keeping.of(TESTS[:3])
    assert sides.count("train") == keeping.n_chunks
    keeping.of(TESTS[:3])
    assert sides.count("train") == keeping.n_chunks


def test_the_gradients_of_a_checkpoint_are_let_go_of_before_the_next_are_computed():
    points, alive = [checkpoint(Little(seed)) for seed in range(3)], weakref.WeakSet()

    def watch(compute):
        def gradients(examples, side, wanted):
            assert side == "test" or not alive
            found = compute(examples, side, wanted)
            if side == "train":
                alive.add(found.losses)
            return found

        return gradients

    for one in points:
        one.model.gradients = watch(one.model.gradients)
    assert in_chunks(7, checkpoints=points, normalize="train").of(TESTS).problems == {}


def sides_computed(one):
    """A list that grows with each call of the model."""
    sides, compute = [], one.model.gradients
    one.model.gradients = lambda examples, side, wanted: sides.append(side) or compute(examples, side, wanted)
    return sides


def test_two_threads_compute_the_same():
    alone = in_chunks(7).of(TESTS)
    torch.set_num_threads(2)
    try:
        together = in_chunks(7).of(TESTS)
    finally:
        torch.set_num_threads(1)
    close(together.full, alone.full)
    np.testing.assert_array_equal(together.proponents.lines, alone.proponents.lines)


def test_a_permuted_training_file_permutes_the_columns():
    order = torch.randperm(len(TRAIN), generator=torch.Generator().manual_seed(3))
    found = in_chunks(7, TRAIN[order]).of(TESTS)
    close(found.full, influences(TRAIN).of(TESTS).full[:, order])


def test_checkpoints_are_summed_with_their_learning_rates_before_anything_is_listed():
    modules, rates = [Little(seed) for seed in range(3)], [0.5, 1e-3, 2.0]
    found = influences(TRAIN, [checkpoint(m, r) for m, r in zip(modules, rates, strict=True)], top_k=4).of(TESTS)
    expected = sum(r * dense(m, TESTS, TRAIN) for m, r in zip(modules, rates, strict=True)).numpy()
    close(found.full, expected)
    close(found.proponents.values, -np.sort(-expected)[:, :4])
    close(found.self_influence, sum(r * dense(m, TESTS, TESTS).diag() for m, r in zip(modules, rates, strict=True)))
    close(found.loss, modules[-1].losses(TESTS).detach())


@pytest.mark.parametrize("normalize", ["train", "cosine"])
def test_normalisations_divide_the_sum_of_the_checkpoints(normalize):
    modules, rates = [Little(seed) for seed in range(2)], [0.5, 2.0]
    points = [checkpoint(m, r) for m, r in zip(modules, rates, strict=True)]
    found = influences(TRAIN, points, normalize=normalize, top_k=60, memory_bytes=100_000).of(TESTS)

    def summed(a, b):
        return sum(r * dense(m, a, b) for m, r in zip(modules, rates, strict=True))

    expected = summed(TESTS, TRAIN) / summed(TRAIN, TRAIN).diag().sqrt()
    if normalize == "cosine":
        expected = expected / summed(TESTS, TESTS).diag().sqrt()[:, None]
        assert expected.abs().max() <= 1 + 1e-9
    close(found.full, expected)
    close(found.proponents.shares.sum(2), found.proponents.values)


class Faint(Little):
    """A model that is sure of its examples: their gradients are 10⁻³⁰ to 1, and the same ones in each precision."""

    def losses(self, examples):
        return super().losses(examples) * 10.0 ** (-5 * (examples[:, 0] % 7)).to(self.fc.weight.dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("normalize", ["train", "cosine"])
def test_normalised_influences_in_single_precision_are_right_for_gradients_of_any_length(normalize, weighted):
    found = []
    for dtype in (torch.float32, torch.float64):
        modules = [Faint(seed).to(dtype) for seed in range(2)]
        weights = {name: torch.full_like(value.detach(), 3.0) for name, value in modules[0].named_parameters()}
        points = [Checkpoint(of_module(m, TRAIN), 1e-4, weights if weighted else None) for m in modules]
        wanted, full = all_of(modules[0]), str(dtype).removeprefix("torch.")
        found.append(Influences(points, TRAIN, Options(wanted, 5, normalize, full=full)).of(TESTS))
    single, double = found
    assert single.problems == {}
    lengths = np.linalg.norm(double.full, axis=1)
    assert lengths.min() > 0
    assert (np.linalg.norm(single.full - double.full, axis=1) / lengths).max() < 1e-4
    assert single.self_influence.dtype == np.float32


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_the_error_of_a_reduced_precision_is_that_of_faint_gradients_too(precision):
    points = [Checkpoint(of_module(Faint().float(), TRAIN), 1e-4)]
    found = Influences(points, TRAIN, Options(all_of(Faint()), 5, precision=precision)).of(TESTS)
    faint = np.array([10.0 ** (-5 * (int(test[0]) % 7)) < 1e-20 for test in TESTS])
    assert faint.any()
    assert found.precision_error[faint].min() > 0


def test_what_has_no_gradient_has_no_influence():
    class Sometimes(Little):
        def losses(self, examples):
            return super().losses(examples) * (examples[:, 0] > 3)

    found = influences(TRAIN, [checkpoint(Sometimes())], normalize="cosine").of(examples(20, 5))
    expected = (examples(20, 5)[:, :1] > 3) & (TRAIN[:, 0] > 3)[None]
    np.testing.assert_array_equal(found.full != 0, expected)


def test_weights_are_between_the_two_gradients():
    module = Little()
    weights = {name: torch.rand_like(value.detach()) for name, value in module.named_parameters()}
    found = influences(TRAIN, [checkpoint(module, 1.0, weights)]).of(TESTS)
    diagonal = torch.cat([weights[name].flatten() for name in all_of(module)])
    mine, theirs = (gradient_rows(module, rows) for rows in (TESTS, TRAIN))
    close(found.full, (mine * diagonal) @ theirs.T)
    close(found.self_influence, (mine.square() * diagonal).sum(1))


def test_shares_are_those_of_the_parameter_groups():
    module = Little()
    found = in_chunks(7, top_k=5).of(TESTS)
    assert found.groups == ("entity", "norm", "fc")
    for group, share in zip(found.groups, np.moveaxis(found.proponents.shares, 2, 0), strict=True):
        wanted = [name for name in all_of(module) if name.startswith(group)]
        expected = dense(module, TESTS, TRAIN, wanted).numpy()
        close(share, np.take_along_axis(expected, found.proponents.lines, 1))
    close(found.opponents.shares.sum(2), found.opponents.values)


def test_only_the_wanted_parameters_count():
    found = influences(TRAIN, wanted=("fc.bias", "norm.weight")).of(TESTS)
    assert found.groups == ("fc", "norm")
    close(found.full, dense(Little(), TESTS, TRAIN, ["fc.bias", "norm.weight"]))


def test_what_is_not_allowed_is_neither_listed_nor_counted_and_changes_no_value():
    mask = torch.rand(len(TESTS), len(TRAIN), generator=torch.Generator().manual_seed(4)) < 0.3
    mask[2] = False
    found = in_chunks(7, top_k=60).of(TESTS, allowed=lambda lines: mask[:, lines])
    close(found.full, dense(Little(), TESTS, TRAIN))
    for row in range(len(TESTS)):
        listed = np.concatenate([found.proponents.lines[row], found.opponents.lines[row]])
        assert set(listed[listed >= 0]) == set(np.flatnonzero(mask[row]))
    kept = np.where(mask, found.full, np.nan)
    np.testing.assert_array_equal(found.n_counted, mask.sum(1))
    close(found.sum, np.nansum(kept, 1))
    assert np.isnan(found.std[2])
    close(found.std[3], np.nanstd(kept[3]))


def test_statistics_are_those_of_the_row():
    found = in_chunks(7).of(TESTS)
    close(found.sum, found.full.sum(1))
    close(found.abs_sum, abs(found.full).sum(1))
    close(found.std, found.full.std(1))
    close(found.positive_share, (found.full > 0).mean(1))


@pytest.mark.parametrize("top_k", [1, 5, 100])
def test_lists_are_the_sorted_row_and_filled_up(top_k):
    found = in_chunks(7, torch.cat([TRAIN, TRAIN[:9]]), top_k=top_k).of(TESTS)
    for row in range(len(TESTS)):
        check_lists(found, row, top_k)


def check_lists(found, row, top_k):
    values = found.full[row]
    for listed, sign in ((found.proponents, 1), (found.opponents, -1)):
        order = np.lexsort([np.arange(len(values)), -sign * values])
        expected = order[sign * values[order] > 0][:top_k]
        assert listed.lines.shape == (len(found.loss), top_k)
        np.testing.assert_array_equal(
            listed.lines[row], np.pad(expected, (0, top_k - len(expected)), constant_values=-1)
        )
        np.testing.assert_array_equal(listed.values[row], np.pad(values[expected], (0, top_k - len(expected))))
        assert (listed.shares[row, len(expected) :] == 0).all()


def test_a_row_without_a_proponent_lists_none():
    class Both(Little):
        """Examples with a 1 in the middle have the loss turned round, and so the opposite gradient."""

        def losses(self, examples):
            sign = 1 - 2 * (examples[:, 1] == 1).double()
            return sign * self.fc.bias.sum()

    train = TRAIN.clone()
    train[:, 1] = 1
    found = influences(train, [checkpoint(Both())], top_k=3).of(torch.tensor([[0, 0, 0]]))
    assert (found.full == -5).all()
    assert found.proponents.lines.tolist() == [[-1, -1, -1]]
    assert found.proponents.values.tolist() == [[0, 0, 0]]
    assert found.opponents.lines.tolist() == [[0, 1, 2]]


def test_without_lists_and_rows_nothing_is_streamed():
    one = checkpoint()
    engine = influences(TRAIN, [one], top_k=0, full=False)
    sides = sides_computed(one)
    found = engine.of(TESTS)
    assert "train" not in sides
    close(found.self_influence, np.diag(dense(Little(), TESTS, TESTS)))
    assert found.proponents.lines.shape == (7, 0)
    assert found.proponents.shares.shape == (7, 0, 3)
    assert np.isnan(found.std).all()


def test_a_row_that_is_no_number_says_so_and_lists_nothing():
    class Holes(Little):
        def losses(self, examples):
            return super().losses(examples) * torch.where(examples[:, 1] == 100, torch.nan, 1.0)

    tests = TESTS.clone()
    tests[3, 1] = 100
    found = in_chunks(7, checkpoints=[checkpoint(Holes())], top_k=5).of(tests)
    assert found.problems == {3: "its loss is nan"}
    assert (found.proponents.lines[3] == -1).all()
    check_lists(found, 4, 5)


def test_a_training_example_that_is_no_number_is_named():
    class Holes(Little):
        def losses(self, examples):
            return super().losses(examples) * torch.where(examples[:, 1] == 100, torch.inf, 1.0)

    train = TRAIN.clone()
    train[17, 1] = 100
    found = in_chunks(7, train, checkpoints=[checkpoint(Holes())]).of(TESTS)
    assert set(found.problems) == set(range(7))
    assert "training example 17 (from 0)" in found.problems[0]


@pytest.mark.parametrize("learning_rate", [1e-30, 1.0, 1e30])
def test_full_rows_in_float16_are_scaled_into_its_range(learning_rate):
    points = [checkpoint(learning_rate=learning_rate)]
    found, exact = (in_chunks(2, checkpoints=points, full=dtype).of(TESTS) for dtype in ("float16", "float64"))
    assert found.full.dtype == np.float16
    assert np.isfinite(found.full).all()
    largest = np.abs(exact.full).max(1, keepdims=True)
    error = np.abs(found.full * found.full_scale[:, None].astype(float) - exact.full)
    assert (error <= np.maximum(np.abs(exact.full) * 2**-11, largest * 1e-11)).all()
    assert (np.frexp(found.full_scale)[0] == 0.5).all()
    assert exact.full_scale is None


def test_a_row_of_zeros_stays_one_in_float16():
    rows = np.array([[0, 0], [3, -4]], np.float32)
    halves, scales = as_float16(rows)
    np.testing.assert_array_equal(halves * scales[:, None], [[0, 0], [3, -4]])


def test_no_training_example_is_refused():
    with pytest.raises(SlurmGPUError, match="no training example"):
        influences(TRAIN[:0])
