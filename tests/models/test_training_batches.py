"""Each sample of an epoch is computed once, in the same step on any number of processes; and it is read alike."""

import os
import random
import signal
import subprocess

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate  # noqa: E402

from slurmgpu.errors import SlurmGPUError  # noqa: E402
from slurmgpu.training import data_loader  # noqa: E402
from slurmgpu.training.batches import START, StepPlan, own_pieces, permutation  # noqa: E402
from slurmgpu.training.data_loader import (  # noqa: E402
    BatchIndices,
    BatchLoader,
    EvalBatchSampler,
    SeededDataset,
    TrainBatchSampler,
    to_device,
)
from slurmgpu.training.settings import TrainingSettings  # noqa: E402
from slurmgpu.training.splits import read_split  # noqa: E402

SIZES = st.integers(1, 40)
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CPU = torch.device("cpu")


def span(micro_batch):
    return range(micro_batch.first, micro_batch.first + micro_batch.size)


def on_all_ranks(world_size, at=START, **options):
    """By step, what all ranks compute together: sample, the sum of its gradients' weights as DDP averages them."""
    ranks = [list(StepPlan(rank=rank, world_size=world_size, **options).remaining(at)) for rank in range(world_size)]
    found = []
    for steps in zip(*ranks, strict=True):
        assert len({len(step.micro_batches) for step in steps}) == 1, "a rank waits for the others"
        assert len({(step.n, step.after) for step in steps}) == 1
        weights = {}
        for step in steps:
            for each in step.micro_batches:
                assert 1 <= each.size <= options["batch_size"]
                for index in span(each) if each.weight else ():
                    assert index not in weights
                    weights[index] = each.weight / each.size / world_size
        found.append((steps[0], weights))
    return found


@UNHURRIED
@given(SIZES, SIZES, SIZES, st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_each_step_is_the_mean_over_the_same_samples_on_any_number_of_processes(
    n, step_size, batch_size, world_size, epochs, drop_last
):
    options = {"n_samples": n, "step_size": step_size, "batch_size": batch_size, "epochs": epochs}
    steps = on_all_ranks(world_size, drop_last=drop_last, **options)
    alone = on_all_ranks(1, drop_last=drop_last, **options)
    assert [sorted(weights) for _, weights in steps] == [sorted(weights) for _, weights in alone]
    for step, weights in steps:
        assert len(weights) == step.n
        assert all(weight == pytest.approx(1 / step.n) for weight in weights.values())
    used = n - n % step_size if drop_last else n
    for epoch in range(epochs):
        of_epoch = [index for step, weights in steps if step.epoch == epoch for index in weights]
        assert sorted(of_epoch) == list(range(used))
    assert len(steps) == StepPlan(drop_last=drop_last, **options).n_steps()


@UNHURRIED
@given(SIZES, SIZES, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), SIZES, SIZES, st.data())
def test_a_training_goes_on_at_its_sample_with_other_processes_and_another_step(
    n, step_size, epochs, before, after, other_size, batch_size, data
):
    options = {"n_samples": n, "batch_size": batch_size, "epochs": epochs}
    first = on_all_ranks(before, step_size=step_size, **options)
    done = data.draw(st.integers(1, len(first)))
    at = first[done - 1][0].after
    rest = on_all_ranks(after, at, step_size=other_size, **options)
    for epoch in range(epochs):
        seen = [index for step, weights in [*first[:done], *rest] if step.epoch == epoch for index in weights]
        assert sorted(seen) == list(range(n))
    step_plan = StepPlan(step_size=other_size, **options)
    assert len(rest) == step_plan.n_steps(at, done)
    shares = [step_plan.share_done(step.after, 0) for step, _ in rest]
    assert shares == sorted(shares)
    assert not rest or shares[-1] == 1


def test_a_training_of_steps_takes_as_many_epochs_as_it_needs():
    step_plan = StepPlan(10, 4, 4, steps=8)
    steps = list(step_plan.remaining())
    assert [step.epoch for step in steps] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [step.n for step in steps] == [4, 4, 2, 4, 4, 2, 4, 4]
    assert step_plan.n_steps(steps[2].after, 3) == 5
    assert [step.n for step in step_plan.remaining(steps[6].after, 7)] == [4]


def test_a_step_of_fewer_samples_leaves_no_process_with_one_alone_unless_it_must():
    """Batch normalisation cannot be trained on one sample."""
    assert [list(own_pieces(5, 8, rank, 4)) for rank in range(4)] == [
        [(0, 2, True)],
        [(2, 3, True)],
        [(0, 2, False)],
        [(0, 2, False)],
    ]
    assert [size for rank in range(2) for _, size, _ in own_pieces(5, 2, rank, 2)] == [1, 2, 2, 1]


def test_epochs_are_shuffled_differently_and_by_the_seed():
    orders = [tuple(permutation(20, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] == tuple(permutation(20, 1, 0))


class Noisy:
    """Samples with random numbers of all generators in them."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), np.random.randn(), float(torch.rand(()))])


def read(at=START, done=0, **settings):
    step_plan = StepPlan(23, 6, 3, epochs=2)
    loader = BatchLoader(
        SeededDataset(Noisy(), torch.stack),
        TrainBatchSampler(step_plan, 4, at, done),
        TrainingSettings(**settings),
        CPU,
    )
    try:
        return list(loader.read())
    finally:
        loader.close()


def test_batches_are_read_alike_with_any_number_of_workers_and_after_a_resumption():
    whole = read()
    assert len({float(each[0, 1]) for each in whole}) == len(whole)
    with_workers = read(num_workers=2, prefetch_factor=3)
    steps = list(StepPlan(23, 6, 3, epochs=2).remaining())
    rest = read(steps[4].after, 5)
    n_before = sum(len(step.micro_batches) for step in steps[:5])
    assert len(rest) == len(whole) - n_before
    for found, expected in ((with_workers, whole), (rest, whole[n_before:])):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_processes_that_read_outlive_a_signal_that_all_processes_of_a_job_get(monkeypatch):
    watch = data_loader._outlive_signals

    def hit_at_once(worker):
        os.kill(os.getpid(), signal.SIGTERM)
        watch(worker)

    monkeypatch.setattr(data_loader, "_outlive_signals", hit_at_once)
    step_plan = StepPlan(23, 6, 3, epochs=2)
    two = TrainingSettings(num_workers=2, prefetch_factor=1)
    loader = BatchLoader(SeededDataset(Noisy()), TrainBatchSampler(step_plan, 4, START, 0), two, CPU)
    batches = loader.read()
    next(batches)
    workers = loader._loader._iterator._workers
    subprocess.run(["kill", "-TERM", *[str(worker.pid) for worker in workers]], check=True)
    assert len(list(batches)) == 15
    loader.close()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_reading_leaves_the_random_numbers_of_the_training_as_they_were(one_thread):
    def draw():
        return [random.random(), random.gauss(0, 1), np.random.rand(), float(torch.rand(())), float(torch.randn(()))]

    def seeded():
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        return draw()

    undisturbed = [*seeded(), *draw()]
    before = seeded()
    read()
    assert [*before, *draw()] == undisturbed


def test_a_data_sets_own_way_to_read_many_and_the_users_collate_are_taken():
    class Many(Noisy):
        def __getitems__(self, indices):
            assert all(type(index) is int for index in indices)
            return [index * 10 for index in indices]

    class User:
        def data(self, split):
            return Many()

        def collate(self, samples):
            return {"sum": sum(samples)}

    assert read_split(User(), "train").__getitems__(BatchIndices(0, [1, 2])) == {"sum": 30}


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        (None, r"User.data\('train'\) is None"),
        (Endless(), "is a Endless.*must be numbered"),
        (DataLoader(Noisy()), "is a DataLoader.*Return its data set"),
        (torch.zeros(3, 2), "is a Tensor.*TensorDataset"),
        ((torch.zeros(3), torch.zeros(3)), "is a tuple.*TensorDataset"),
        ({"train": [1], "test": [2]}, r"is a dict.*one of its values \(train, test\)"),
        (iter([1]), "is a list_iterator.*two methods"),
        ([], "has no samples"),
    ],
)
def test_what_is_no_data_set_is_refused_with_what_to_do(samples, found):
    class User:
        def data(self, split):
            return samples

    with pytest.raises(SlurmGPUError, match=found):
        read_split(User(), "train")


def test_tensors_are_read_as_torch_reads_them():
    samples = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6), torch.rand(6, 2, 2))
    batch = SeededDataset(samples).__getitems__(BatchIndices(0, [4, 1, 3]))
    expected = default_collate([samples[index] for index in (4, 1, 3)])
    assert type(batch) is type(expected)
    assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))


def test_a_split_may_be_missing_and_a_list_will_do():
    class User:
        def data(self, split):
            return [1.0, 2.0] if split == "train" else None

    assert read_split(User(), "val") is None
    assert read_split(User(), "train").__getitems__(BatchIndices(0, [1])).tolist() == [2.0]


def test_an_evaluation_has_each_sample_once_and_as_many_batches_on_each_rank():
    for n, world_size in [(7, 2), (3, 4), (1, 3), (16, 2), (17, 4)]:
        ranks = [EvalBatchSampler(n, 2, "val", 0, rank, world_size) for rank in range(world_size)]
        assert len({len(list(each)) for each in ranks}) == 1
        counted = [
            index
            for each in ranks
            for reading, count in zip(each, each.counts(), strict=True)
            for index in list(reading.indices)[:count]
        ]
        assert sorted(counted) == list(range(n))


def test_tensors_anywhere_in_a_batch_are_moved():
    from collections import namedtuple
    from dataclasses import dataclass

    Pair = namedtuple("Pair", "a b")

    @dataclass
    class Both:
        x: torch.Tensor
        name: str

    batch = {"list": [torch.ones(2), "text"], "pair": Pair(torch.ones(1), 3), "both": Both(torch.ones(3), "n")}
    moved = to_device(batch, torch.device("meta"))
    assert moved["list"][0].is_meta
    assert moved["pair"].a.is_meta
    assert moved["both"].x.is_meta
    assert (moved["list"][1], moved["pair"].b, moved["both"].name) == ("text", 3, "n")
    assert to_device(batch, CPU) is batch


@pytest.mark.parametrize(("n_samples", "step_size"), [(29, 64), (33, 32), (64, 32)])
def test_the_share_of_the_first_steps_is_that_which_lies_before_the_next(n_samples, step_size):
    step_plan = StepPlan(n_samples, step_size, step_size, epochs=3)
    for n, step in enumerate(step_plan.remaining(), 1):
        assert step_plan.share_of(n) == pytest.approx(step_plan.share_done(step.after, n))
    assert StepPlan(n_samples, step_size, step_size, steps=10).share_of(4) == 0.4
