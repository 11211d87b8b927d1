"""What a training class returns is refused in a sentence where it cannot be meant; measuring changes nothing."""

import os

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from slurmgpu.errors import ItemError, SlurmGPUError  # noqa: E402
from slurmgpu.training.batches import Position, StepPlan  # noqa: E402
from slurmgpu.training.evaluation import Evaluator, _mean  # noqa: E402
from slurmgpu.training.loop import Training  # noqa: E402
from slurmgpu.training.loss_weights import LossWeights  # noqa: E402
from slurmgpu.training.optimizer import Stepper, make_optimizer  # noqa: E402
from slurmgpu.training.ranks import Place  # noqa: E402
from slurmgpu.training.settings import TrainingSettings, goal_of  # noqa: E402
from slurmgpu.training.splits import read_split  # noqa: E402
from slurmgpu.training.strategy import Strategy, init_process_group  # noqa: E402
from slurmgpu.training.torch_settings import torch_settings  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


class Line:
    """A training class: a line through a few points."""

    n = 8

    def model(self):
        return nn.Linear(2, 1)

    def data(self, split):
        if split == "test":
            return None
        inputs = torch.arange(2.0 * self.n).reshape(self.n, 2) / self.n
        return TensorDataset(inputs, inputs.sum(1))

    def loss(self, model, batch):
        return (model(batch[0])[:, 0] - batch[1]).square().mean()


def like(**methods):
    """A Line with other methods."""
    return type("Other", (Line,), methods)()


def train(user, folder, **given):
    settings = TrainingSettings(**{"epochs": 2, "batch_size": 4, "threads": 1, "seed": 3} | given)
    return Training(user, settings, Place(), folder).run()


def only_train(self, split):
    return Line.data(self, split) if split == "train" else None


WRONG = {
    "loss is a dict": ({"loss": lambda *_: {"a": 1}}, {}, r"^loss\(model, batch\) gave a dict"),
    "loss is nothing": ({"loss": lambda *_: None}, {}, r"^loss\(model, batch\) gave a NoneType"),
    "loss for each": ({"loss": lambda *_: torch.ones(4)}, {}, r"^loss\(model, batch\) gave a tensor of shape \(4,\)"),
    "metrics is a number": ({"metrics": lambda *_: 0.5}, {}, r"^metrics\(model, batch\) gave a float; .* dict"),
    "metrics is nothing": ({"metrics": lambda *_: None}, {}, r"^metrics\(model, batch\) gave a NoneType"),
    "metrics has loss": ({"metrics": lambda *_: {"loss": 0.5}}, {}, r"gave 'loss', the name that .* rename it"),
    "scheduler is nothing": ({"scheduler": lambda *_: None}, {}, r"scheduler\(optimizer, n_steps\) gave a NoneType"),
    "no such metric": ({}, {"metric": "val_mae"}, r"no metric 'val_mae'\. .*val_loss"),
    "no split": ({"data": only_train}, {"metric": "val_mae"}, r'no metric .val_mae.\. data\("val"\) gave None\.'),
    "one sample": (
        {"n": 9, "model": lambda _: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))},
        {},
        r"cannot train on one sample\..* drop_last = true",
    ),
    "values of tokens": (
        {"metrics": lambda _, __, batch: {"hits": torch.ones(2 * len(batch[0]))}},
        {},
        r"gave 'hits' as a tensor of 8 values for a batch of 4 samples; expected one value for each sample",
    ),
    "no values": (
        {"metrics": lambda _, __, batch: {"hits": batch[1][batch[1] > 100]}},
        {},
        r"gave 'hits' as a tensor of 0 values for a batch of 4 samples",
    ),
    "names differ": (
        {"metrics": lambda _, __, batch: {"a": 1.0} | ({"recall": 1.0} if batch[1].min() > 1 else {})},
        {},
        r"gave a, recall for one batch and a for another",
    ),
}


@pytest.mark.parametrize(("methods", "given", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_a_class_cannot_mean_is_refused_in_a_sentence(tmp_path, methods, given, said):
    with pytest.raises((ItemError, SlurmGPUError), match=said):
        train(like(**methods), tmp_path, **given)


def test_a_metric_that_is_no_number_is_warned_of_once(tmp_path, caplog):
    train(like(metrics=lambda *_: {"odd": float("nan")}), tmp_path)
    assert caplog.text.count("val_odd is NaN") == 1


def test_one_number_for_a_batch_weighs_as_much_whatever_its_shape_also_in_a_batch_of_one(tmp_path):
    def measured(_, model, batch):
        mean = model(batch[0]).mean()
        return {"number": mean, "tensor": mean[None], "float": float(mean)}

    weighed = like(n=5, weight=lambda _, batch: 5.0, metrics=measured)
    final = train(weighed, tmp_path, batch_size=2).final  # an evaluation of 1, 2 and 2 samples
    assert final["val_number"] == final["val_tensor"] == final["val_float"]


def test_a_metric_that_is_not_on_the_device_is_moved_there():
    assert _mean("far", torch.tensor(0.5), torch.device("meta")).device.type == "meta"


class Odd(nn.Module):
    """A model with parameters that no fused optimizer takes."""

    def __init__(self, dtype=torch.float32, *, is_sparse=False):
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=is_sparse, device="cuda")
        self.factors = nn.Parameter(torch.ones(2, dtype=dtype, device="cuda"))


def test_on_gpus_the_optimizer_is_fused_where_pytorch_can():
    with FakeTensorMode():  # tensors without memory, on GPUs that need not be there
        made = {
            name: make_optimizer(object(), model, TrainingSettings(epochs=1, optimizer="sgd")).defaults["fused"]
            for name, model in {
                "plain": Odd(),
                "low": Odd(torch.bfloat16),
                "complex": Odd(torch.complex64),
                "sparse": Odd(is_sparse=True),
            }.items()
        }
    assert made == {"plain": True, "low": True, "complex": None, "sparse": None}


class Counting(nn.Linear):
    """Counts its forward passes in a buffer, and makes another as it goes."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        self.register_buffer("cache", inputs.detach())
        return super().forward(inputs)


def test_an_evaluation_leaves_the_models_buffers_as_they_were():
    user, settings = like(model=Counting), TrainingSettings(epochs=1)
    strategy = Strategy(user, user.model(), settings, Place())
    loss_weights = LossWeights(user, Place(), strategy.device)
    evaluator = Evaluator(strategy, read_split(user, "val"), "val", settings, 4, Place(), loss_weights)
    assert evaluator.names() == ["val_loss"]
    assert sorted(evaluator.evaluate()) == ["val_loss"]
    with strategy.without_side_effects():
        strategy.plain(user.data("val").tensors)
    assert float(strategy.model.calls) == 0


def test_activations_computed_again_do_not_count_twice_in_running_statistics(tmp_path):
    def model(_):
        return nn.Sequential(
            nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)),
            nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Tanh()),
            nn.Linear(4, 1),
        )

    found = []
    for again in (False, True):
        train(like(model=model), tmp_path / str(again), gradient_checkpointing=again)
        found.append(torch.load(tmp_path / str(again) / "last.pt", weights_only=True))
    assert found[0]["0.1.num_batches_tracked"] == 4
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
@pytest.mark.parametrize("path", ["", "cuda.matmul.", "cudnn.conv."])
def test_a_class_may_use_pytorchs_newer_interface_of_precision(path):
    module = torch.backends
    for name in filter(None, path.split(".")):
        module = getattr(module, name)
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    before = module.fp32_precision
    module.fp32_precision = "tf32"
    try:
        for precision, expected in (("fp32", "ieee"), ("tf32", "tf32")):
            with torch_settings(TrainingSettings(epochs=1, precision=precision)):
                found = [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]
                assert found == [expected] * 2
                torch.get_float32_matmul_precision()  # torch.compile asks
            assert module.fp32_precision == "tf32"
    finally:
        module.fp32_precision = before
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


def stepper(user, **given):
    model = user.model()
    step_plan = StepPlan(8, 4, 4, epochs=10)
    return Stepper(user, model, TrainingSettings(**{"epochs": 10} | given), step_plan, step_plan)


def test_a_scheduler_that_waits_for_evaluations_gets_them():
    def scheduler(_, optimizer, n_steps):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    found = stepper(like(scheduler=scheduler), lr=1.0)
    for value in (1.0, 2.0, 3.0):
        found.step(Position(1), 2)
        found.evaluated(value)
    assert found.optimizer.param_groups[0]["lr"] == 0.25
    stepper(Line()).evaluated(1.0)


def test_min_lr_is_where_each_group_of_the_users_optimizer_ends():
    def optimizer(_, model):
        return torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 1e-5}])

    found = stepper(like(optimizer=optimizer), schedule="linear", min_lr=1e-4)
    found.prepare(Position(10), 20)
    assert [group["lr"] for group in found.optimizer.param_groups] == pytest.approx([1e-4, 1e-5])


@pytest.mark.parametrize(
    "metric",
    ["val_loss", "val_focal_loss", "val_mse", "RMSE", "test_ppl", "val_top1_error", "error_rate", "val_err_rate"],
)
def test_less_is_better_of_what_is_called_so(metric):
    assert goal_of(metric) == "min"
    assert goal_of(f"{metric}_free") == "max"
    assert goal_of(metric, "max") == "max"


def test_a_training_on_a_gpu_may_be_deterministic_after_one_that_is_not(monkeypatch):
    """PyTorch decides in the first product of a process whether those of cuBLAS are, by this variable."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for value in (":16:8", ""):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
        if not value:
            monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        init_process_group(Place("cuda:0"))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (value or ":4096:8")
