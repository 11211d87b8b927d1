"""A training says the same on 1, 2 and 4 processes, and does what its settings say."""

import contextlib
import itertools
import math
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from slurmgpu.errors import Interrupted, ItemError, SlurmGPUError  # noqa: E402
from slurmgpu.training import progress, sync_schedule  # noqa: E402
from slurmgpu.training.batch_counter import flops_per_sample  # noqa: E402
from slurmgpu.training.batch_size import fit_batch_size  # noqa: E402
from slurmgpu.training.batches import Position, StepPlan  # noqa: E402
from slurmgpu.training.blocks import find_blocks  # noqa: E402
from slurmgpu.training.checkpoints import Checkpoints  # noqa: E402
from slurmgpu.training.loop import Training  # noqa: E402
from slurmgpu.training.metric_monitor import MetricMonitor  # noqa: E402
from slurmgpu.training.optimizer import lr_factor, make_optimizer  # noqa: E402
from slurmgpu.training.ranks import Place  # noqa: E402
from slurmgpu.training.resumption import UNKNOWN, Version  # noqa: E402
from slurmgpu.training.settings import TrainingSettings  # noqa: E402
from slurmgpu.training.splits import read_split  # noqa: E402
from slurmgpu.training.states import own_buffers, restored_buffers, share_buffers  # noqa: E402
from slurmgpu.training.strategy import Strategy  # noqa: E402
from slurmgpu.training.sync_schedule import SyncSchedule  # noqa: E402
from slurmgpu.training.user_methods import counting_method  # noqa: E402
from tests.support.nightly import by_night  # noqa: E402
from tests.support.training_ranks import (  # noqa: E402
    BASE,
    BY_FOUR,
    BY_NIGHT,
    CASES,
    N_TEST,
    N_TRAIN,
    N_VAL,
    Exact,
    Padded,
    Plain,
    Recording,
    Weightless,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ALONE = Place()
BY_DAY = [case for case in CASES if case not in BY_NIGHT]


def chosen(*cases):
    return [by_night(case) if case in BY_NIGHT else case for case in cases]


EXACT = chosen(*(name for name, (user, _) in CASES.items() if not issubclass(user, (Plain, Weightless))))


def sizes(case):
    return (2, 4) if case in BY_FOUR else (2,)


@pytest.fixture(scope="module")
def found(tmp_path_factory, slurmgpu):
    """What came of a case on a number of processes."""
    folder = tmp_path_factory.mktemp("ranks")

    def load(case, world_size):
        if not (folder / f"{case}-1.pt").exists():
            slurmgpu.module("tests.support.training_ranks", folder, *(BY_NIGHT if case in BY_NIGHT else BY_DAY))
        return torch.load(folder / f"{case}-{world_size}.pt", weights_only=False) | {
            "folder": folder / f"{case}-{world_size}"
        }

    return load


@pytest.fixture
def train(tmp_path):
    """Trains in a folder of the test's own: `train(user, epochs=2)` gives the outcome."""

    def call(user, place=ALONE, folder="training", version=UNKNOWN, **settings):
        return Training(user, TrainingSettings(**BASE | settings), place, tmp_path / folder, version).run()

    return call


# On several processes


@pytest.mark.parametrize("case", EXACT)
def test_gradients_of_several_processes_are_those_of_one(found, case):
    alone = found(case, 1)["gradients"]
    assert len(alone) == found(case, 1)["outcome"]["steps"]
    for world_size in sizes(case):
        together = found(case, world_size)["gradients"]
        for one, other in zip(alone, together, strict=True):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", EXACT)
def test_several_processes_reach_the_same_losses_and_metrics(found, case):
    alone = found(case, 1)["outcome"]
    for world_size in sizes(case):
        together = found(case, world_size)["outcome"]
        for name in ("steps", "samples", "epochs", "curve_steps", "eval_steps", "best_step", "ended"):
            assert together[name] == alone[name]
        for name in ("curve", "eval_curve", "final", "best"):
            assert together[name] == pytest.approx(alone[name], abs=1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_metrics_are_means_over_the_samples_however_they_are_spread(found, world_size):
    result = found("gradients", world_size)
    user = Exact()
    model = user.model()
    model.load_state_dict(result["weights"])
    for split, n in (("val", N_VAL), ("test", N_TEST)):
        batch = user.data(split).tensors
        assert len(batch[0]) == n
        with torch.no_grad():
            measured = {"loss": user.loss(model, batch), **user.metrics(model, batch)}
        measured["accuracy"] = measured["accuracy"].double().mean()
        for name, value in measured.items():
            assert result["outcome"]["final"][f"{split}_{name}"] == pytest.approx(float(value), abs=1e-12)


@pytest.mark.parametrize("case", chosen("early", "sharded early"))
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_training_stops_when_it_gets_no_better_and_its_best_weights_are_tested(found, case, world_size):
    result = found(case, world_size)
    outcome = result["outcome"]
    assert outcome["ended"] == "early"
    scores = outcome["eval_curve"]
    assert len(scores) == scores.index(max(scores)) + 1 + 2
    assert outcome["score"] == max(scores)
    assert outcome["best_step"] == outcome["eval_steps"][scores.index(max(scores))]
    user = Plain()
    for name, measured in (("best.pt", outcome["best"]), ("last.pt", outcome["final"])):
        model = user.model()
        model.load_state_dict(torch.load(result["folder"] / name, weights_only=True))
        for split in ("val", "test"):
            loss = user.loss(model, user.data(split).tensors).item()
            assert measured[f"{split}_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("goal", ["min", "max"])
def test_gains_that_are_together_above_min_delta_keep_a_training_from_stopping(goal):
    sign = 1 if goal == "min" else -1
    settings = TrainingSettings(epochs=1, metric="score", goal=goal, patience=3, min_delta=0.1)
    monitor, stops = MetricMonitor(settings), []
    for step, score in enumerate((1.0, 0.95, 0.89, 0.85, 0.82, 0.8)):
        assert monitor.update(step, {"score": sign * score})  # each is the best so far
        stops.append(monitor.should_stop)
    assert stops == 5 * [False] + [True]


@pytest.mark.parametrize("case", chosen("bf16", "fp16", "sharded bf16"))
def test_low_precision_ends_near_where_full_precision_does(found, train, case):
    full = train(Plain(), clip=CASES[case][1].get("clip")).final["val_loss"]
    for world_size in (1, 2):
        assert found(case, world_size)["outcome"]["final"]["val_loss"] == pytest.approx(full, abs=0.02)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_loss_that_is_no_number_ends_the_configuration(found, world_size):
    assert "the loss is nan at step" in found("not a number", world_size)["error"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_weighed_evaluation_is_that_of_a_single_batch(found, world_size):
    result = found("weighed", world_size)
    user = Padded()
    model = user.model()
    model.load_state_dict(result["weights"])
    for split in ("val", "test"):
        batch = user.collate(user.data(split))
        measured = {"loss": user.loss(model, batch), **user.metrics(model, batch)}
        for name, value in measured.items():
            expected = value.detach().double().mean()
            assert result["outcome"]["final"][f"{split}_{name}"] == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_weight_of_nothing_ends_the_configuration_in_a_sentence(found, world_size):
    told = found("weightless", world_size)["error"]
    assert "weight(batch) gave 0; expected a positive finite number: the number of tokens" in told


@pytest.mark.parametrize("given", [-1.0, math.nan, math.inf, torch.ones(2), "many", None])
def test_what_is_no_weight_is_refused_in_a_sentence(train, given):
    class Odd(Padded):
        def weight(self, batch):
            return given

    with pytest.raises(ItemError, match=r"weight\(batch\) gave .*positive finite number"):
        train(Odd(), epochs=1)


def test_an_attribute_that_is_called_weight_is_none(train):
    class Attributed(Exact):
        weight = torch.ones(3)

    assert train(Attributed(), epochs=1).final == train(Exact(), epochs=1, folder="without").final


def test_a_metric_of_some_batches_only_ends_the_configuration_on_all_processes(found):
    for world_size in (1, 2):
        assert "expected the same names for each batch" in found("sometimes", world_size)["error"]


def test_batch_normalisation_trains_on_the_few_samples_of_a_last_step(found):
    assert found("normed", 4)["outcome"]["steps"] == 9


def test_an_automatic_batch_size_divides_a_process_share_of_the_step(found):
    assert [found("auto", world_size)["outcome"]["batch_size"] for world_size in (1, 2)] == [24, 12]


def test_sync_batchnorm_on_cpus_is_refused_in_a_sentence(found):
    assert "only on GPUs" in found("sync_batchnorm", 2)["error"]


def test_other_data_on_another_process_is_refused_in_a_sentence(found):
    told = found("different", 2)["error"]
    assert r"Different.data('val') has 7 samples on rank 0 and 8 samples on rank 1" in told


# The data


class Split(Plain):
    """Cuts one data set into two at random."""

    n = N_TRAIN + N_VAL

    def data(self, split):
        samples = TensorDataset(torch.arange(5.0 * self.n).view(-1, 5) / 5 / self.n, torch.arange(self.n) % 3)
        parts = torch.utils.data.random_split(samples, [N_TRAIN, self.n - N_TRAIN])
        self.indices = getattr(self, "indices", {})
        found = {"train": parts[0], "val": parts[1]}.get(split)
        self.indices[split] = list(found.indices) if found else []
        return found


def test_data_that_is_split_at_random_is_split_alike_whenever_it_is_asked_for(train):
    first, second, other = Split(), Split(), Split()
    train(first, folder="first", epochs=1)
    train(second, folder="second", epochs=1)
    train(other, folder="other", epochs=1, seed=6)
    assert not set(first.indices["train"]) & set(first.indices["val"])
    assert first.indices == second.indices != other.indices


def test_a_training_is_not_taken_up_with_other_data(train):
    train(Split(), checkpoint_s=0.0)
    more = Split()
    more.n += 1
    with pytest.raises(SlurmGPUError, match=r"had 7 samples then, and has 8 samples now. Restore it"):
        train(more)


class Wider(Plain):
    """The class after a change of its model."""

    def model(self):
        return nn.Sequential(*super().model(), nn.Linear(3, 3))


def test_what_replaces_a_failed_training_begins_from_the_start_once_the_code_has_changed(train, tmp_path, caplog):
    caplog.set_level("INFO")
    before, after = Version("aaaa", is_again=True), Version("bbbb", is_again=True)
    train(Plain(), version=before, checkpoint_s=0.0)
    assert train(Plain(), version=before).resumed == 1
    (tmp_path / "training" / "best-0000099999.pt").touch()  # what a later best of the lost attempt would have left
    assert train(Wider(), version=after).resumed == 0
    assert not list((tmp_path / "training").glob("best-*"))
    assert "training from the start: the checkpoint was made by code aaaa, the code is bbbb now" in caplog.text


def test_what_was_interrupted_goes_on_with_changed_code_if_it_fits_and_says_so(train, caplog):
    train(Plain(), version=Version("aaaa"), checkpoint_s=0.0)
    assert train(Plain(), version=Version("bbbb")).resumed == 1
    assert "continuing with changed code: the checkpoint was made by code aaaa, the code is bbbb now" in caplog.text
    said = "continue with that code: `slurmgpu resubmit --failed --code aaaa`. To train from the start with the changed"
    with pytest.raises(SlurmGPUError, match=said):
        train(Wider(), version=Version("bbbb"))
    with pytest.raises(SlurmGPUError, match="Submit the changed class as a new run"):
        train(Wider(), version=Version("aaaa"))


# The step


def test_a_model_that_comes_in_the_mode_for_evaluations_is_trained_in_the_other(train):
    modes = {True: [], False: []}

    class Loaded(Plain):
        def model(self):
            return super().model().eval()

        def loss(self, model, batch):
            modes[torch.is_grad_enabled()].append(model.training)
            return super().loss(model, batch)

    train(Loaded(), epochs=1)
    assert (set(modes[True]), set(modes[False])) == ({True}, {False})


def test_accumulation_is_a_larger_batch(train):
    gradients = []
    for size in ({"batch_size": 12}, {"batch_size": 3, "accumulation": 4}, {"batch_size": 5, "global_batch_size": 12}):
        train(Exact(), folder=str(size), **{"global_batch_size": None} | size)
        gradients.append([torch.cat([each.flatten() for each in step]) for step in Recording.gradients])
    for others in gradients[1:]:
        for one, other in zip(gradients[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_accumulated_micro_batches_weigh_what_they_hold(train):
    """Lines of uneven lengths: a step's gradients are those of its samples in one padded batch."""

    class Weightless(Padded):
        weight = None

    steps = {}
    for user in (Padded, Weightless):
        for size in ({"batch_size": 12}, {"batch_size": 2, "accumulation": 6}, {"batch_size": 5}):
            given = {} if "accumulation" in size else {"global_batch_size": 12}
            outcome = train(user(), folder=f"{user}{size}", **{"global_batch_size": None} | given | size)
            gradients = [torch.cat([each.flatten() for each in step]) for step in Recording.gradients]
            steps.setdefault(user, []).append((gradients, outcome.curve, outcome.final))
    for gradients, curve, final in steps[Padded][1:]:
        for one, other in zip(steps[Padded][0][0], gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert curve == pytest.approx(steps[Padded][0][1], abs=1e-12)
        assert final == pytest.approx(steps[Padded][0][2], abs=1e-12)
    one, other = (steps[Weightless][number][0][0] for number in (0, 1))
    assert (one - other).norm() > 0.05 * one.norm()  # which is what the method is for


def test_gradients_are_clipped_by_their_norm(train):
    def norms():
        return [float(torch.cat([each.flatten() for each in step]).norm()) for step in Recording.gradients]

    train(Exact(), epochs=1, folder="free")
    free = norms()
    train(Exact(), epochs=1, folder="clipped", clip=0.1)
    assert min(free) > 0.1
    assert norms() == pytest.approx([0.1] * 3, rel=1e-5)


def test_compiled_code_is_kept_where_no_other_user_may_have_left_any(train, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "temporary" / f"slurmgpu-inductor-{os.getuid()}"
    folder.parent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    for mode in (0o700, 0o777):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        train(Plain(), folder=f"compiled {mode}", compile=True, epochs=1)
        kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert (kept == folder) == (mode == 0o700)
        assert kept.stat().st_mode & 0o777 == 0o700
        assert (f"another user may write {folder}" in caplog.text) == (mode == 0o777)
        folder.chmod(0o777)


def test_a_compiled_model_trains_as_it_was_written(train):
    compiled = train(Plain(), folder="compiled", compile=True, epochs=1, drop_last=True)
    assert compiled.final == pytest.approx(train(Plain(), epochs=1, drop_last=True).final, abs=1e-5)


def test_computing_settings_hold_for_one_training_only(train):
    seen = []

    class Looking(Plain):
        def loss(self, model, batch):
            seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
            return super().loss(model, batch)

    train(Looking(), threads=2, deterministic=True, precision="tf32", epochs=1)
    assert set(seen) == {(2, True)}
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (1, False)
    assert torch.get_float32_matmul_precision() == "highest"


# The optimizer and its learning rate


@pytest.mark.parametrize(
    ("name", "kind", "given"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        ("adam", torch.optim.Adam, {"weight_decay": 0.3}),
        ("sgd", torch.optim.SGD, {"momentum": 0.7}),
    ],
)
def test_optimizers_have_pytorchs_defaults_for_what_is_not_given(name, kind, given):
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    made = make_optimizer(object(), model, TrainingSettings(epochs=1, optimizer=name, lr=0.5, **given))
    expected = kind([model.weight], lr=0.5, **given)
    assert type(made) is kind
    assert made.defaults == expected.defaults
    assert made.param_groups[0]["params"] == [model.weight]


SCHEDULES = [
    ("constant", {}, [1, 1, 1, 1, 1, 1, 1, 1]),
    ("constant", {"warmup_steps": 3}, [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 1]),
    ("linear", {}, [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    ("linear", {"warmup_ratio": 0.25, "min_lr": 0.1}, [1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
    ("cosine", {"warmup_steps": 2}, [1 / 3, 2 / 3, *((1 + math.cos(math.pi * k / 6)) / 2 for k in range(6))]),
]


@pytest.mark.parametrize("ends", [{"epochs": 2}, {"steps": 8}])
@pytest.mark.parametrize(("schedule", "given", "factors"), SCHEDULES)
def test_the_learning_rate_rises_in_the_warm_up_and_falls_to_its_least(schedule, given, factors, ends):
    settings = TrainingSettings(**ends, lr=0.2, schedule=schedule, **given)
    step_plan = StepPlan(40, 10, 10, **ends)
    least = settings.min_lr / settings.lr
    expected = [least + (1 - least) * f if number > 2 and least else f for number, f in enumerate(factors)]
    position, found = Position(), []
    for done, step in enumerate(step_plan.remaining()):
        found.append(lr_factor(settings, step_plan, position, done, settings.lr, step_plan))
        position = step.after
    assert found == pytest.approx(expected)


def test_the_learning_rate_is_that_of_the_position_whatever_a_step_is():
    settings = TrainingSettings(epochs=4, schedule="cosine")
    plans = [StepPlan(40, size, 5, epochs=4) for size in (5, 10, 20)]
    factors = [lr_factor(settings, plan, Position(2, 20), 7, settings.lr, plan) for plan in plans]
    assert len(set(factors)) == 1


def test_a_warm_up_of_steps_is_of_those_that_the_training_began_with():
    settings, first = TrainingSettings(epochs=4, schedule="linear", warmup_steps=8), StepPlan(40, 10, 5, epochs=4)
    plans = {size: StepPlan(40, size, 5, epochs=4) for size in (5, 10, 20)}
    at = Position(1, 20)
    factors = [lr_factor(settings, plan, at, 60 // size, settings.lr, first) for size, plan in plans.items()]
    assert factors == pytest.approx(3 * [7 / 9])


def test_groups_of_the_users_optimizer_keep_their_proportions(train):
    seen = []

    class Groups(Plain):
        def optimizer(self, model):
            first, *others = model.parameters()

            class Looking(torch.optim.SGD):
                def step(self, closure=None):
                    seen.append([group["lr"] for group in self.param_groups])
                    return super().step(closure)

            return Looking([{"params": [first], "lr": 0.1}, {"params": others}], lr=0.4)

    train(Groups(), schedule="linear", epochs=1)
    assert seen == [pytest.approx([0.1 * f, 0.4 * f]) for f in (1, 17 / 29, 5 / 29)]


class OfCopies(torch.optim.SGD):
    """Steps copies of the parameters, which it writes back, as torchao's CPUOffloadOptimizer does on a GPU."""

    def __init__(self, parameters):
        self.own = [*parameters]
        super().__init__([each.detach().clone() for each in self.own], lr=0.1)

    def step(self, closure=None):
        copies = self.param_groups[0]["params"]
        for own, copy in zip(self.own, copies, strict=True):
            copy.grad = own.grad
        super().step(closure)
        for own, copy in zip(self.own, copies, strict=True):
            own.data.copy_(copy)

    def zero_grad(self, set_to_none=True):
        for own in self.own:
            own.grad = None


def test_an_optimizer_may_step_copies_and_write_them_back(train):
    found = []
    for number, make in enumerate((OfCopies, lambda parameters: torch.optim.SGD(parameters, lr=0.1))):
        user = wrong(optimizer=lambda self, model, make=make: found.append([*model.parameters()]) or make(found[-1]))
        train(user, folder=f"training-{number}", epochs=1)
    assert all(map(torch.equal, *found))


def test_the_users_scheduler_takes_a_step_with_each_of_the_optimizer(train):
    class Scheduled(Exact):
        def scheduler(self, optimizer, n_steps):
            self.n_steps, self.optimizer_ = n_steps, optimizer
            return torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.1)

    user = Scheduled()
    train(user, schedule="cosine")
    assert user.n_steps == 9
    assert user.optimizer_.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1**2)


def test_a_scheduler_that_waits_for_the_metric_is_told_it_after_each_evaluation(train):
    class Waiting(Exact):
        def scheduler(self, optimizer, n_steps):
            self.optimizer_ = optimizer
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    user = Waiting()
    assert train(user, eval_steps=1, metric="val_half", epochs=1).best_step == 1
    assert user.optimizer_.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1**2)


# What is measured


def test_points_of_the_curve_are_means_over_samples_and_cost_nothing_else(train):
    each = train(Exact(), folder="each", log_steps=1)
    some = train(Exact(), folder="some", log_steps=2)
    assert each.curve_steps == list(range(1, 10))
    assert some.curve_steps == [2, 4, 6, 8, 9]
    weights = [12, 12, 5] * 3
    pairs = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9)]
    for (start, end), value in zip(pairs, some.curve, strict=True):
        total = sum(w * v for w, v in zip(weights[start:end], each.curve[start:end], strict=True))
        assert value == pytest.approx(total / sum(weights[start:end]))
    last = sum(w * v for w, v in zip(weights[6:], each.curve[6:], strict=True)) / N_TRAIN
    assert each.final["train_loss"] == pytest.approx(last)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [3, 6, 9]),
        ({"eval_steps": 4}, [4, 8, 9]),
        ({"epochs": None, "steps": 7}, [3, 6, 7]),
        ({"epochs": None, "steps": 7, "eval_steps": 100}, [7]),
    ],
)
def test_evaluations_are_at_epoch_ends_or_as_often_as_asked_and_at_the_end(train, given, expected):
    outcome = train(Plain(), **given)
    assert outcome.eval_steps == expected
    assert outcome.metric == "val_loss"


def test_without_a_validation_split_the_training_loss_is_what_ranks(train):
    class Alone(Plain):
        metrics = None

        def data(self, split):
            return super().data(split) if split == "train" else None

    outcome = train(Alone())
    assert (outcome.metric, set(outcome.final)) == ("train_loss", {"train_loss"})
    assert outcome.best_step == 9
    assert outcome.score == pytest.approx(min(outcome.eval_curve))


def test_an_evaluation_changes_neither_the_model_nor_random_numbers(train):
    class Drawing(Plain):
        def model(self):
            return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3))

        def metrics(self, model, batch):
            assert not model.training
            return {"drawn": torch.rand(len(batch[0]))}

    often = train(Drawing(), folder="often", eval_steps=1)
    seldom = train(Drawing(), folder="seldom", eval_steps=9)
    assert often.curve == seldom.curve


def test_what_the_users_class_counts_becomes_rates(train):
    class Counting(Plain):
        def tokens(self, batch):
            return 7 * len(batch[0])

        def flops(self, batch):
            return 1e6

    outcome = train(Counting())
    assert outcome.tokens_per_s == pytest.approx(7 * outcome.samples_per_s)
    assert math.isnan(outcome.mfu)  # of a CPU
    assert math.isnan(train(Plain(), folder="plain").tokens_per_s)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (
            lambda text: text["words"],
            r"tokens\(batch\) raised TypeError: .*\. The training loop calls a method of this name",
        ),
        (lambda batch: batch[0], r"tokens\(batch\) gave a Tensor; expected a number\. The training loop calls"),
    ],
)
def test_a_method_of_this_name_that_counts_no_tokens_is_a_sentence(train, own, sentence):
    class Reading(Plain):
        def tokens(self, batch):
            return own(batch)

    with pytest.raises(SlurmGPUError, match=rf"^Reading\.{sentence}"):
        train(Reading())


@pytest.mark.parametrize("is_read_late", [False, True])
def test_a_lost_gpu_is_told_as_itself_where_tokens_are_counted(is_read_late):
    """A kernel's failure comes where its result is read: in the method, or as its tensor becomes a number."""
    lost = RuntimeError("CUDA error: uncorrectable ECC error encountered")

    class Late:
        def __float__(self):
            raise lost

    class Reading:
        def tokens(self, batch):
            return Late() if is_read_late else float(Late())

    with pytest.raises(RuntimeError, match="uncorrectable ECC") as caught:
        counting_method(Reading(), "tokens", "tokens_per_s")(None)
    assert caught.value is lost


def test_attributes_that_cannot_be_called_are_the_users(train):
    class Named(Plain):
        tokens, optimizer, scheduler, collate, metrics, blocks = 5, "adam", "none", ("a",), {}, 3

    assert train(Named()).curve == train(Plain(), folder="plain").curve


def test_blocks_that_are_no_modules_are_a_sentence(train):
    class Cut(Plain):
        def blocks(self, model):
            return 3

    with pytest.raises(SlurmGPUError, match=r"^Cut\.blocks\(model\) gave 3; expected a list of modules of the model"):
        train(Cut(), gradient_checkpointing=True)


def test_operations_are_counted_in_a_rehearsal_that_leaves_nothing():
    user, settings = CASES["normed"][0](), TrainingSettings(epochs=1)
    strategy = Strategy(user, user.model(), settings, Place())
    batch = tuple(each[:6] for each in user.data("train").tensors)
    before = {name: value.clone() for name, value in strategy.model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    # Forward, and the backward pass of the weights and, but for the first layer, of the inputs: 2 for each product.
    assert flops_per_sample(strategy, batch, 6) == 2 * (2 * 5 * 8 + 3 * 8 * 3)
    assert all(torch.equal(value, before[name]) for name, value in strategy.model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(each.grad is None for each in strategy.model.parameters())


def test_looking_for_a_batch_size_leaves_the_model_as_it_was():
    user, settings = CASES["normed"][0](), TrainingSettings(epochs=1, batch_size="auto")

    class Short(type(user)):
        def loss(self, model, batch):
            if len(batch[0]) > 20:
                raise MemoryError
            # Models keep what they compute for the longest input so far, such as positions.
            model.register_buffer("positions", torch.arange(len(batch[0])), persistent=False)
            return super().loss(model, batch)

    user = Short()
    strategy = Strategy(user, user.model(), settings, Place())
    before = {name: value.clone() for name, value in strategy.model.state_dict().items()}
    assert 16 <= fit_batch_size(user, strategy, read_split(user, "train"), settings, Place()) <= 20
    assert all(torch.equal(value, before[name]) for name, value in strategy.model.state_dict().items())


def test_a_try_without_room_for_its_backward_pass_leaves_no_gradients_to_the_next():
    user, settings = CASES["normed"][0](), TrainingSettings(epochs=1, batch_size="auto")
    n_failed = []

    def fail(gradient):
        n_failed.append(len(gradient))
        raise MemoryError

    class Short(type(user)):
        def loss(self, model, batch):
            assert all(each.grad is None for each in model.parameters())
            inputs = batch[0].clone().requires_grad_()
            if len(inputs) > 20:
                inputs.register_hook(fail)  # its gradient is the last one
            return super().loss(model, (inputs, *batch[1:]))

    user = Short()
    strategy = Strategy(user, user.model(), settings, Place())
    assert 16 <= fit_batch_size(user, strategy, read_split(user, "train"), settings, Place()) <= 20
    assert n_failed
    assert all(each.grad is None for each in strategy.model.parameters())


def test_seconds_are_told_apart_and_are_those_of_all_attempts(train):
    user = Stopped("train", 12)
    with pytest.raises(Interrupted):
        train(user, Place(stopping=lambda: user.stops), checkpoint_s=0.0)
    outcome = train(Stopped(), checkpoint_s=0.0)
    parts = {name: getattr(outcome, f"{name}_s") for name in ("start", "data", "compute", "evaluation", "checkpoint")}
    assert min(parts.values()) > 0
    assert outcome.communication_s == 0
    assert sum(parts.values()) < outcome.wall_s


# What is refused


def wrong(**methods):
    return type("Wrong", (Plain,), methods)()


@pytest.mark.parametrize(
    ("user", "settings", "found"),
    [
        (wrong(model=lambda self: "a net"), {}, r"Wrong.model\(\) gave a str"),
        (wrong(model=lambda self: nn.Identity()), {}, "no parameter that requires gradients"),
        (wrong(loss=lambda self, model, batch: 1.0), {}, r"loss\(model, batch\) gave a float"),
        (wrong(loss=lambda self, model, batch: model(batch[0])), {}, r"a tensor of shape \(\d, 3\)"),
        (wrong(loss=lambda self, model, batch: torch.tensor(1.0)), {}, "a tensor that depends on no parameter"),
        (wrong(optimizer=lambda self, model: "sgd"), {}, "expected a torch.optim.Optimizer"),
        (wrong(optimizer=lambda self, _: torch.optim.SGD(self.model().parameters())), {}, "nothing would be learned"),
        (wrong(metrics=lambda self, model, batch: {"words": "many"}), {}, "gave 'words' as a str"),
        (wrong(), {"metric": "val_acuracy"}, "no metric 'val_acuracy'. Did you mean 'val_accuracy'"),
        (wrong(), {"drop_last": True, "global_batch_size": 30}, "29 training samples do not fill a step of 30"),
        (wrong(model=lambda self: nn.Linear(5, 3)), {"gradient_checkpointing": True}, "a method blocks"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_step(train, user, settings, found):
    with pytest.raises((SlurmGPUError, ItemError), match=found):
        train(user, place=Place(progress=lambda text: pytest.fail("it went on")), checkpoint_s=0, **settings)


# Blocks


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])) for _ in "ab"])


def test_blocks_are_the_users_or_the_outermost_lists_or_sequences():
    class User:
        def blocks(self, model):
            return iter([model.head])

    model = Blocks()
    assert find_blocks(object(), model) == list(model.layers)
    assert find_blocks(User(), model) == [model.head]
    assert find_blocks(object(), model.head) == [model.head[0]]


def test_a_model_that_can_compute_its_activations_again_does_it_itself(train):
    asked = []

    class Own(Plain):
        def model(self):
            model = super().model()
            model.gradient_checkpointing_enable = lambda **options: asked.append(options)
            return model

    train(Own(), gradient_checkpointing=True, epochs=1)
    assert asked == [{"gradient_checkpointing_kwargs": {"use_reentrant": False}}]


# Stopping, and what is told


def test_progress_is_told_with_each_checkpoint_that_is_further_than_all_before(train):
    told = []
    place = Place(progress=told.append)
    train(Plain(), place, checkpoint_s=0.0)
    assert [text.partition(", loss")[0] for text in told] == [
        f"epoch {(step - 1) // 3 + 1} of 3, step {step}" for step in range(1, 10)
    ]
    assert ", loss 1." in told[0]
    told.clear()
    assert train(Plain(), place, checkpoint_s=0.0).resumed == 1
    assert told == []


def test_evaluations_and_resumptions_are_lines_of_the_log(train, caplog):
    caplog.set_level("INFO", logger="slurmgpu")
    found = train(Plain(), checkpoint_s=0.0).final
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [f"epoch {each} of 3, step {3 * each}" for each in (1, 2, 3)]
    assert f": train_loss {found['train_loss']:.4g}, val_" in lines[-1]
    assert f", val_loss {found['val_loss']:.4g}" in lines[-1]
    caplog.clear()
    train(Plain(), checkpoint_s=0.0)
    assert caplog.records[0].getMessage() == "resumed from step 9"


def test_every_few_seconds_is_told_where_a_training_is(train, monkeypatch):
    told = []
    monkeypatch.setattr(progress, "REPORT_S", 1e6)
    train(Plain(), Place(tell=told.append), folder="seldom", checkpoint_s=0.0)
    assert told == []
    monkeypatch.setattr(progress, "REPORT_S", 0.0)
    train(Plain(), Place(tell=told.append), checkpoint_s=0.0)
    assert [text.partition(", loss")[0] for text in told[:2]] == ["epoch 1 of 3, step 1", "epoch 1 of 3, step 2"]
    assert told[0].endswith(" samples/s")


class Stopped(Plain):
    """Asks to be stopped at the n-th batch of a split."""

    def __init__(self, split="", n=0):
        super().__init__()
        self.split, self.n = split, n
        self.stops = False
        self.seen = {"train": 0, "val": 0, "test": 0}

    def data(self, split):
        inputs, targets = super().data(split).tensors
        return TensorDataset(inputs, targets, torch.full_like(targets, list(self.seen).index(split)))

    def loss(self, model, batch):
        split = list(self.seen)[int(batch[2][0])]
        self.seen[split] += 1
        self.stops = self.stops or (split == self.split and self.seen[split] == self.n)
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("split", "n", "step", "where"),
    [
        ("train", 5, 2, "after step 2"),
        ("val", 5, 6, "in the evaluation after step 6"),
        ("test", 1, 9, "in the evaluation after step 9"),
        ("test", 2, 9, "in the evaluation after step 9"),  # of the best weights
    ],
)
def test_a_stopped_training_leaves_a_checkpoint_from_which_it_ends_as_if_nothing_had_been(
    train, tmp_path, split, n, step, where
):
    given = {"lr": 1.0, "eval_steps": 3, "batch_size": 4}
    user = Stopped(split, n)
    place = Place(stopping=lambda: user.stops)
    with pytest.raises(Interrupted, match=where):
        train(user, place, checkpoint_s=0.0, **given)
    assert Checkpoints(tmp_path / "training", place).steps()[-1] == step
    again = train(Stopped(), checkpoint_s=0.0, **given)
    alone = train(Stopped(), folder="alone", **given)
    assert again.resumed == 1
    for name in ("curve", "eval_curve", "final", "best", "best_step", "epochs"):
        assert getattr(again, name) == getattr(alone, name)
    assert alone.best_step < alone.steps
    for name in ("last.pt", "best.pt"):
        one, other = (torch.load(tmp_path / folder / name, weights_only=True) for folder in ("training", "alone"))
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_what_interrupts_an_evaluation_does_not_throw_away_the_one_before(train):
    """The checkpoint of the step was left before the first of them."""
    seen = []
    for split, n in (("val", 8), ("test", 1), ("", 0)):
        user = Stopped(split, n)
        with contextlib.suppress(Interrupted):
            train(user, Place(stopping=lambda user=user: user.stops), checkpoint_s=0.0)
        seen.append(user.seen["val"])
    assert seen == [8, 4, 1]  # each once to find out the names


BUFFERS = {
    "coo": lambda: torch.eye(5).to_sparse(),
    "csr": lambda: torch.eye(5).to_sparse_csr(),
    "bsc": lambda: torch.eye(6).to_sparse_bsc((2, 2)),
    "expanded": lambda: torch.arange(5.0).expand(3, 5),
    "empty and expanded": lambda: torch.zeros(1, 0).expand(3, 0),
}


class Buffered(Stopped):
    """A model with buffers of a kind, one of which belongs to its state, and is in two of its modules."""

    def __init__(self, kind, n=0):
        super().__init__("train" if n else "", n)
        self.kind = kind

    def model(self):
        model, kept = super().model(), BUFFERS[self.kind]()
        model.register_buffer("graph", BUFFERS[self.kind](), persistent=False)
        model.register_buffer("kept", kept)
        model[0].register_buffer("kept", kept)
        return model


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_training_with_odd_buffers_goes_on_as_if_nothing_had_been(train, tmp_path, kind):
    given = {"checkpoint_s": 0.0, "batch_size": 12, "epochs": 2}
    user = Buffered(kind, 4)
    with pytest.raises(Interrupted, match="after step"):
        train(user, Place(stopping=lambda: user.stops), **given)
    again = train(Buffered(kind), **given)
    assert again.resumed == 1
    assert again.curve == train(Buffered(kind), folder="alone", **given).curve
    for name in ("kept", "0.kept"):
        found = torch.load(tmp_path / "training" / "best.pt", weights_only=True)[name]
        assert found.layout == BUFFERS[kind]().layout
        assert torch.equal(found.to_dense(), BUFFERS[kind]().to_dense())


def test_a_buffer_that_a_model_expands_as_it_computes_is_restored():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 2).expand(3, 2))
    with restored_buffers(model):
        model.mask = torch.zeros(1, 2).expand(3, 2)
    assert model.mask.tolist() == 3 * [[1, 1]]


def test_buffers_are_shared_by_their_values_however_they_lie_in_memory(monkeypatch):
    def broadcast(tensor, source):
        assert tensor.is_contiguous()  # gloo takes as much memory from its first value on
        tensor.add_(100)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    model, table = nn.Linear(2, 2), torch.arange(6.0)
    model.register_buffer("every_other", table[::2])
    model.register_buffer("turned", torch.arange(4.0).reshape(2, 2).T)
    model.register_buffer("expanded", torch.ones(1, 2).expand(3, 2))
    share_buffers(model)
    assert table.tolist() == [100, 1, 102, 3, 104, 5]
    assert model.turned.tolist() == [[100, 102], [101, 103]]
    assert model.expanded.tolist() == 3 * [[101, 101]]


def test_a_buffer_of_two_names_that_is_expanded_stays_one():
    model = nn.Linear(2, 2)
    model.register_buffer("one", torch.ones(1, 2).expand(3, 2))
    model.register_buffer("other", model.one)
    own_buffers(model)
    assert model.one is model.other
    assert model.one.is_contiguous()


def test_sparse_buffers_are_refused_on_several_processes(tmp_path):
    with pytest.raises(SlurmGPUError, match=r"the model's buffer 'graph' is sparse.*train on one process"):
        Strategy(Plain(), Buffered("csr").model(), TrainingSettings(**BASE), Place(world_size=2))


class Scheduled(Stopped):
    """Has a scheduler of PyTorch's by name, and notes the learning rate before each step."""

    def __init__(self, kind, n=0):
        super().__init__("train" if n else "", n)
        self.kind, self.n_steps, self.rates = kind, 0, []

    def optimizer(self, model):
        self.made = torch.optim.SGD(model.parameters(), lr=0.1)
        self.made.register_step_pre_hook(lambda made, *_: self.rates.append(made.param_groups[0]["lr"]))
        return self.made

    def scheduler(self, optimizer, n_steps):
        self.n_steps = n_steps
        schedulers = torch.optim.lr_scheduler
        if self.kind == "LambdaLR":
            return schedulers.LambdaLR(optimizer, lambda step: 1 - step / n_steps)
        if self.kind == "OneCycleLR":  # raises after its last step
            return schedulers.OneCycleLR(optimizer, 0.1, total_steps=n_steps)
        return schedulers.CosineAnnealingLR(optimizer, n_steps)


@pytest.mark.parametrize("kind", ["OneCycleLR", "CosineAnnealingLR", "LambdaLR"])
@pytest.mark.parametrize(("size", "later"), [(12, 4), (4, 12)])
def test_a_scheduler_of_the_class_keeps_its_place_when_the_size_of_a_step_changes(train, kind, size, later):
    given = {"checkpoint_s": 0.0, "batch_size": 4, "epochs": 4}
    whole = Scheduled(kind)
    train(whole, folder="whole", global_batch_size=size, **given)
    first = Scheduled(kind, 2 * -(-N_TRAIN // 4))  # two epochs of batches
    with pytest.raises(Interrupted, match="after step"):
        train(first, Place(stopping=lambda: first.stops), global_batch_size=size, **given)
    rest = Scheduled(kind)
    assert train(rest, global_batch_size=later, **given).epochs == 4
    assert rest.n_steps == whole.n_steps == 4 * -(-N_TRAIN // size)
    per_epoch = -(-N_TRAIN // size)
    expected = [
        whole.rates[epoch * per_epoch + per_epoch - -(-(N_TRAIN - sample) // size)]
        for epoch in (2, 3)
        for sample in range(0, N_TRAIN, later)
    ]
    assert rest.rates == pytest.approx(expected)


class KilledError(Exception):
    """A training that ends without a word."""


class Improving(Plain):
    """Gets better and better, and is killed after an evaluation."""

    def __init__(self, last=None, score=1.0):
        super().__init__()
        self.last, self.score = last, score

    def metrics(self, model, batch):
        self.n = getattr(self, "n", 0) + 1
        if self.n == self.last:
            raise KilledError
        return {"score": self.score * self.n}


@pytest.fixture
def _one_at_an_epochs_end(monkeypatch):
    """Of the ends of epochs only the first is worth a checkpoint, however long the others take."""
    monkeypatch.setattr(sync_schedule, "SHARE_AT_EPOCH_ENDS", 1e-9)
    monkeypatch.setattr(sync_schedule, "PARAMETER_BYTES", 0)


def weights_of(path):
    return torch.cat([each.flatten() for each in torch.load(path, weights_only=True).values()])


@pytest.mark.usefixtures("_one_at_an_epochs_end")
def test_the_best_weights_are_those_that_the_outcome_says_whatever_an_attempt_has_left(train, tmp_path):
    given = {"metric": "val_score", "global_batch_size": 29, "batch_size": 29, "epochs": 4}
    alone = train(Improving(score=-1.0), folder="alone", **given)
    assert alone.best_step == 1
    # The only checkpoint is that of the first epoch; the second is still better.
    with pytest.raises(KilledError):
        train(Improving(last=4), **given, checkpoint_s=1e6)
    kept = {path.name for path in (tmp_path / "training").iterdir()}
    assert kept == {"best-0000000001.pt", "step-0000000001"}
    again = train(Improving(score=-1.0), **given, checkpoint_s=1e6)
    assert (again.best_step, again.resumed) == (1, 1)
    assert torch.equal(weights_of(tmp_path / "training/best.pt"), weights_of(tmp_path / "alone/best.pt"))
    assert not list((tmp_path / "training").glob("best-*"))
    # As if it had been killed before it was known that it had ended.
    assert train(Improving(score=-1.0), **given).best_step == 1
    assert torch.equal(weights_of(tmp_path / "training/best.pt"), weights_of(tmp_path / "alone/best.pt"))


@pytest.mark.usefixtures("_one_at_an_epochs_end")
def test_a_damaged_file_of_the_best_weights_costs_these_alone(train, tmp_path, caplog):
    given = {"metric": "val_score", "global_batch_size": 29, "batch_size": 29, "checkpoint_s": 1e6}
    with pytest.raises(KilledError):
        train(Improving(last=4), **given)
    path = tmp_path / "training/best-0000000001.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    outcome = train(Improving(score=-1.0), **given)
    assert (outcome.steps, outcome.best_step) == (3, 1)
    assert "test_loss" in outcome.final
    assert "test_loss" not in outcome.best
    assert "best-0000000001.pt is damaged" in caplog.text
    assert not list((tmp_path / "training").glob("best*"))


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(sync_schedule.time, "monotonic", lambda: self.now)


def walk(schedule, clock, step_s, n):
    """The steps at which there were meetings, and what was decided."""
    found = {}
    for step in range(1, n + 1):
        clock.now += step_s
        if schedule.due():
            found[step] = schedule.decide(list)
    return found


def test_processes_meet_about_every_half_second(monkeypatch):
    clock = Clock(monkeypatch)
    schedule = SyncSchedule(TrainingSettings(epochs=1), Place(), 0)
    steps = list(walk(schedule, clock, 0.01, 300))
    assert steps[:6] == [1, 3, 7, 15, 31, 63]
    assert {b - a for a, b in itertools.pairwise(steps[6:])} <= {49, 50}
    assert list(walk(schedule, clock, 2.0, 100))[-3:] == [98, 99, 100]


def test_a_stop_is_heard_as_soon_after_evaluations_as_before(monkeypatch):
    clock = Clock(monkeypatch)
    schedule = SyncSchedule(TrainingSettings(epochs=1), Place(), 0)
    for _ in range(5):
        walk(schedule, clock, 0.1, 30)
        schedule.restart_clock()
        for _ in range(400):  # their batches are quick
            clock.now += 0.001
            if schedule.due(evaluating=True):
                schedule.decide(list, evaluating=True)
        schedule.restart_clock()
        schedule.due()
        schedule.decide(list, epoch_ends=True)
    assert max(b - a for a, b in itertools.pairwise(walk(schedule, clock, 0.1, 30))) <= 5


@pytest.mark.parametrize(
    ("checkpoint_s", "cost_s", "interval_s"), [(None, 1.0, 600), (None, 30.0, 3000), (5.0, 1.0, 5.0), (0.0, 1.0, 1.0)]
)
def test_checkpoints_are_so_seldom_that_they_cost_a_hundredth_unless_told_otherwise(
    monkeypatch, checkpoint_s, cost_s, interval_s
):
    clock = Clock(monkeypatch)
    schedule = SyncSchedule(TrainingSettings(epochs=1, checkpoint_s=checkpoint_s), Place(), 0)
    schedule.saved(cost_s)
    wanted = [step for step, decision in walk(schedule, clock, 1.0, 4000).items() if decision.checkpoint]
    assert wanted[0] == interval_s


def test_an_epochs_end_is_worth_a_checkpoint_if_it_costs_half_a_hundredth(monkeypatch):
    clock = Clock(monkeypatch)
    schedule = SyncSchedule(TrainingSettings(epochs=1), Place(), 0)
    clock.now = 0.1
    assert schedule.decide(list, epoch_ends=True).checkpoint
    schedule.saved(1.0)
    clock.now = 150.0
    assert not schedule.decide(list, epoch_ends=True).checkpoint
    clock.now = 201.0
    assert not schedule.decide(list).checkpoint
    assert schedule.decide(list, epoch_ends=True).checkpoint


@pytest.mark.parametrize(("n_parameters", "first_s"), [(86_000_000, 420.0), (7_000_000_000, 600.0)])
def test_what_the_first_checkpoint_costs_at_an_epochs_end_is_expected_by_the_parameters(
    monkeypatch, n_parameters, first_s
):
    """86 million take 2 s as expected; a large model's first one comes after ten minutes, whatever is expected."""
    clock = Clock(monkeypatch)
    schedule = SyncSchedule(TrainingSettings(epochs=1), Place(), n_parameters)
    clock.now = first_s - 20.0
    assert not schedule.decide(list, epoch_ends=True).checkpoint
    clock.now = first_s
    assert schedule.decide(list, epoch_ends=True).checkpoint
