"""`use = "train"`: what is refused before anything is queued, and what a run of it leaves."""

import csv
import json
import math
import textwrap
from dataclasses import fields

import pytest

from slurmgpu import results
from slurmgpu.errors import SlurmGPUError
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.workload import Share
from slurmgpu.workloads.train import rows, training_class
from slurmgpu.workloads.train import settings as train_settings
from slurmgpu.workloads.train import summary as train_summary
from slurmgpu.workloads.train.items import Configuration, check_items
from slurmgpu.workloads.train.workload import Train
from tests.files.test_tracking import scalars
from tests.support.runs import report

CLASS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Lines:
    def __init__(self, width: int = 4, fails: str = "", lr: float = 0.5):
        self.width, self.fails, self.lr = width, fails, lr

    def model(self):
        if self.fails == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        if self.fails == "bug":
            return self.no_such_thing
        return nn.Sequential(nn.Linear(3, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def data(self, split):
        n = {"train": 40, "val": 10}.get(split)
        if n is None:
            return None
        x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"given_lr": self.lr}
"""


def source_of(folder, text, name="C"):
    (folder / "mine.py").write_text(textwrap.dedent(text))
    return f"{folder / 'mine.py'}:{name}"


METHODS = "def model(self): ...\n    def data(self, split): ...\n    def loss(self, model, batch): ..."


@pytest.mark.parametrize(
    ("text", "arguments", "required", "takes_any"),
    [
        (f"class C:\n    {METHODS}", {}, set(), False),
        (
            "from typing import Optional\nclass C:\n"
            f"    def __init__(self, a: int | None, b: Optional[float], c: list[int], d: 'None | str' = None): ...\n"
            f"    {METHODS}",
            {"a": "int", "b": "float", "c": "", "d": "str"},
            {"a", "b", "c"},
            False,
        ),
        (
            f"class C:\n    def __init__(self, a, b: int, *, c=1.5, d: 'bool' = None, e=[]): ...\n    {METHODS}",
            {"a": "", "b": "int", "c": "float", "d": "bool", "e": ""},
            {"a", "b"},
            False,
        ),
        (f"class C:\n    def __init__(self, **others): ...\n    {METHODS}", {}, set(), True),
        (
            f"from dataclasses import dataclass\n@dataclass\nclass C:\n    a: int\n    b: str = ''\n    {METHODS}",
            {"a": "int", "b": "str"},
            {"a"},
            False,
        ),
        (
            "class B:\n    def __init__(self, a=1): ...\n    def model(self): ...\n"
            "class C(B):\n    def data(self, split): ...\n    loss = staticmethod(print)",
            {"a": "int"},
            set(),
            False,
        ),
    ],
)
def test_a_class_is_known_by_its_source_as_it_is_by_itself(tmp_path, text, arguments, required, takes_any):
    name, annotated = source_of(tmp_path, text), []
    for found in (training_class.read_class(name), training_class.class_of(training_class.load_class(name))):
        kinds = {name: argument.kind for name, argument in found.arguments.items()}
        assert (kinds, found.required, found.takes_any) == (arguments, required, takes_any)
        annotated.append({name for name, argument in found.arguments.items() if argument.is_annotated})
    assert annotated[0] == annotated[1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("class D: ...", "mine.py has no class 'C'. Known: D."),
        ("class C:\n  def model(self", "mine.py, line 2: expected Python"),
        ("class C:\n  def model(self): ...\n  def dat(self): ...", "no method 'data'; expected model(), data(split)"),
        ("import torch\nclass C(object):\n  pass", "no method 'model'"),
    ],
)
def test_what_a_source_lacks_is_a_sentence(tmp_path, text, sentence):
    with pytest.raises(SlurmGPUError, match=r"mine\.py") as caught:
        training_class.read_class(source_of(tmp_path, text))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("body", "written"),
    [
        ("def tokens(self, text, lower=False): ...", None),
        ("def tokens(self, *parts): ...", None),
        ("tokens: int = 128\n    optimizer = 'adam'\n    blocks = None", None),
        ("@staticmethod\n    def tokens(batch): ...", None),
        ("@wrapped\n    def tokens(self): ...", None),
        ("def tokens(self): ...\n    tokens = wrapped(tokens)", None),
        ("tokens = None\n    def tokens(self): ...\n    def tokens(self, batch): ...", None),
        (
            "def tokens(self): ...",
            "tokens(self), and the training loop calls it as tokens(batch). Let it take that, or",
        ),
        ("def tokens(self, text, vocabulary): ...", "tokens(self, text, vocabulary), and"),
        ("@staticmethod\n    def collate(): ...", "collate(), and"),
        (
            "def metrics(self, batch): ...",
            "metrics(self, batch), and the training loop calls it as metrics(model, batch)",
        ),
        ("def blocks(self, model, *, depth): ...", "blocks(self, model, *, depth), and"),
        ("def data(self): ...", "data(self), and the training loop calls it as data(split). Let it take that."),
    ],
)
def test_a_method_that_the_loop_cannot_call_is_refused_at_planning(tmp_path, body, written):
    wrapped = "import functools\ndef wrapped(f):\n    return functools.wraps(f)(lambda self, batch: 1)\n"
    methods = METHODS if not body.startswith("def data") else METHODS.replace("def data(self, split): ...", "")
    name = source_of(
        tmp_path,
        f"{wrapped}class B:\n    def flops(self): ...\nclass C(B):\n    {methods}\n"
        f"    def flops(self, batch): ...\n    {body}",
    )
    readers = (training_class.read_class, lambda name: training_class.class_of(training_class.load_class(name)))
    for read in readers:
        if written is None:
            assert read(name).optional == (["flops"] if ": int" in body else ["tokens", "flops"])
            continue
        with pytest.raises(SlurmGPUError, match=r"C: the class has the method ") as caught:
            read(name)
        assert written in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "    loss = None\n    def __init__(self, k='ce'):\n        self.loss, self.metrics = {'ce': self.ce}[k], []\n",
        "    def __init__(self):\n        self.loss, self.seen = self.ce, 0\n",
        "    def __init__(self, /, k=1):\n        self.loss = self.ce\n",
        "    def loss(self): ...\n    def __init__(self):\n        self.loss: object = self.ce\n",
        "    a: int = 1\n    def __post_init__(self):\n        self.loss = self.ce\n",
    ],
)
def test_a_method_may_be_set_when_the_class_is_made(tmp_path, body):
    head = "from dataclasses import dataclass\n" + "@dataclass\n" * ("__post_init__" in body)
    rest = "    def model(self): ...\n    def data(self, split): ...\n    def ce(self, model, batch): ..."
    full_name = source_of(tmp_path, f"{head}class C:\n{body}{rest}\nclass D(C): ...")
    for name in (full_name, full_name.replace(":C", ":D")):
        for found in (training_class.read_class(name), training_class.class_of(training_class.load_class(name))):
            assert "loss" in found.methods
            assert found.optional == []
    with pytest.raises(SlurmGPUError, match="no method 'loss'"):
        training_class.read_class(
            source_of(tmp_path, "class C:\n    def __init__(self):\n        self.loss = None\n" + rest)
        )


@pytest.mark.parametrize("class_line", ["@fitted\nclass C:", "class C(Base, Mine):"])
def test_methods_that_others_may_replace_are_not_refused(tmp_path, class_line):
    mine = "from x import Base, fitted\nclass Mine:\n    def tokens(self): ...\n"
    method = "def tokens(self): ..." if "@" in class_line else ""
    training_class.read_class(source_of(tmp_path, f"{mine}{class_line}\n    {METHODS}\n    {method}"))


def test_a_class_with_a_base_from_elsewhere_may_inherit_anything(tmp_path):
    for text in ("from x import Base\nclass C(Base): ...", "from x import C", "from x import *"):
        found = training_class.read_class(source_of(tmp_path, text))
        assert found.takes_any
        assert not found.is_whole


def test_the_source_of_a_module_is_read_without_importing_its_package(tmp_path, monkeypatch):
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "pack" / "inner" / "mine.py").write_text(f"class C:\n    {METHODS}")
    monkeypatch.syspath_prepend(tmp_path)
    assert training_class.read_class("pack.inner.mine:C").methods >= {"model", "data", "loss"}
    assert training_class.read_class("pack.other:C") is None
    assert training_class.read_class("no_such_package.mine:C") is None


def test_an_import_that_fails_is_a_sentence_with_the_line(tmp_path):
    name = source_of(tmp_path, "import math\nmath.no_such_thing")
    with pytest.raises(SlurmGPUError, match=r"mine\.py, line 2: the import of .* raised AttributeError"):
        training_class.load_class(name)


GOOD = {"epochs": 1}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "The length of the training is missing"),
        ({"epochs": 1, "steps": 2}, "remove one"),
        ({**GOOD, "global_batch_size": 128, "accumulation": 2}, "remove accumulation = 2"),
        ({**GOOD, "clip": 0.0}, "expected more than 0"),
        ({**GOOD, "lr": math.nan}, "lr is nan"),
        ({**GOOD, "patience": 0}, "expected at least 1"),
        ({**GOOD, "betas": (0.9, 1.0)}, "less than 1"),
        ({**GOOD, "optimizer": "sgd", "betas": (0.9, 0.99)}, "remove betas"),
        ({**GOOD, "momentum": 0.9}, "remove momentum"),
        ({**GOOD, "min_lr": 1e-5}, 'set schedule = "cosine"'),
        ({**GOOD, "min_lr": 1.0, "schedule": "cosine"}, "expected less"),
        ({**GOOD, "warmup_steps": 1, "warmup_ratio": 0.5}, "remove one"),
        ({**GOOD, "warmup_ratio": 1.5}, "0 to 1"),
        ({**GOOD, "static_graph": True, "find_unused_parameters": True}, "remove one"),
        ({**GOOD, "strategy": "fsdp", "bucket_cap_mb": 25.0}, "is a setting of DDP"),
        ({**GOOD, "strategy": "fsdp", "precision": "fp16"}, 'set precision = "bf16"'),
        ({**GOOD, "prefetch_factor": 2}, "set num_workers"),
    ],
)
def test_settings_that_cannot_go_together_are_a_sentence(settings, sentence):
    with pytest.raises(SlurmGPUError) as caught:
        train_settings.check(settings)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", 1, 1.0),
        ("lr", "3e-4", 3e-4),
        ("batch_size", "auto", "auto"),
        ("batch_size", "64", 64),
        ("batch_size", 64.0, 64),
        ("compile", "True", True),
        ("betas", [0.8, 0.9], (0.8, 0.9)),
        ("betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("precision", "bf16", "bf16"),
        ("metric", "val_f1", "val_f1"),
        ("clip", None, None),
    ],
)
def test_a_value_comes_in_the_type_of_its_setting_also_out_of_text(name, value, expected):
    found = train_settings.typed(name, value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("lr", "fast", 'lr is "fast"; expected a number.'),
        ("epochs", 1.5, "expected a whole number."),
        ("epochs", True, "expected a whole number."),
        ("compile", 1, "expected true or false."),
        ("batch_size", "all", 'expected a whole number or "auto".'),
        ("betas", [0.9], "expected 2 numbers, as [0.9, 0.999]."),
        ("schedule", "cosin", 'expected one of "constant", "linear", "cosine".'),
        (
            "lr",
            [0.1, 0.01],
            "lr is [0.1, 0.01]; expected a number. To train once for each value, put them into [sweep].",
        ),
    ],
)
def test_a_value_of_another_type_is_a_sentence(name, value, sentence):
    with pytest.raises(SlurmGPUError) as caught:
        train_settings.typed(name, value)
    assert sentence in str(caught.value)


def test_every_setting_has_a_type_that_can_be_checked_and_a_default_of_it():
    for field in fields(TrainingSettings):
        assert train_settings.typed(field.name, field.default) == field.default
        with pytest.raises(SlurmGPUError, match=field.name):
            train_settings.typed(field.name, {"no": "such"})
    assert train_settings.LEAST.keys() <= train_settings.HINTS.keys()


def over(tmp_path, name, text, **settings):
    """What the items of a file of that name are checked as."""
    cls = training_class.read_class(source_of(tmp_path, CLASS, "Lines"))
    path = tmp_path / name
    if isinstance(text, str):
        path.write_text(text)
    else:
        text(path)
    return [checked for checked, _ in check_items([path], Configuration({"epochs": 1, **settings}, {}), cls)]


def parquet(path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"lr": [0.1, None], "steps": [None, None], "width": [1, 2]}), path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("items.jsonl", '{"lr": 0.1, "width": 8}\n{"clip": null}\n{}\n'),
        ("items.csv", "lr,width,fails,compile\n0.1,8,,true\n,,x,false\n"),
        ("items.parquet", parquet),
    ],
)
def test_configurations_come_in_all_formats_that_have_names(tmp_path, name, text):
    over(tmp_path, name, text)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("items.jsonl", '{}\n{"widht": 8}\n', "item 1 (widht = 8): 'widht' is neither a setting nor an argument of"),
        ("items.jsonl", '{"learning_rate": 1}\n', "Lines. Here it is called 'lr'."),
        ("items.jsonl", '{"arguments.width": 1}\n', "Lines. Write width instead."),
        ("items.jsonl", '{"arguments": {"width": 1}}\n', "vary an argument under its own name"),
        (
            "items.jsonl",
            '{"xyzzy": 1}\n',
            "The class takes width, fails, lr; the settings are in docs/reference/training",
        ),
        ("items.jsonl", '{"width": 1.5}\n', "width is 1.5; expected what"),
        ("items.jsonl", '{"width": [1, 2]}\n', "of type int. To train once for each value, put them into [sweep]."),
        ("sweep.jsonl", '{"lr": -0.1}\n', "[sweep], configuration 0 (lr = -0.1): lr is -0.1; expected at least 0."),
        ("items.csv", "width\nwide\n", 'width is "wide"; expected what'),
        ("items.csv", "momentum\n0.5\n", "remove momentum"),
        ("items.txt", "0.1\n", "a line of text has no names"),
    ],
)
def test_an_item_that_is_no_configuration_is_named(tmp_path, name, text, sentence):
    with pytest.raises(SlurmGPUError) as caught:
        over(tmp_path, name, text)
    assert sentence in str(caught.value)


def test_a_class_is_given_the_settings_that_it_takes_and_its_arguments(tmp_path):
    cls = training_class.read_class(source_of(tmp_path, CLASS, "Lines"))
    found = Configuration({"epochs": 1}, {"width": 2}).over({"width": "8", "lr": 0.25, "clip": ""}, cls)
    settings = found.check(cls)
    assert found.for_class(cls, settings) == {"width": 8, "lr": 0.25}
    assert Configuration({"epochs": 1}, {"width": 2}).over({"width": "", "fails": ""}, cls).arguments == {
        "width": 2,  # an empty cell
        "fails": "",
    }
    assert found.shown == {"epochs": 1, "width": 8, "lr": 0.25}
    for arguments, sentence in (({"lr": 1.0}, "move it to [settings]"), ({"with": 1}, "Did you mean 'width'?")):
        with pytest.raises(SlurmGPUError) as caught:
            Configuration({"epochs": 1}, arguments).check(cls)
        assert sentence in str(caught.value)


def test_a_setting_that_nobody_gave_does_not_go_over_a_default_of_the_class(tmp_path):
    source = f"class C:\n    def __init__(self, clip, lr=0.1, weight_decay=0.05, seed=0): ...\n    {METHODS}"
    cls = training_class.read_class(source_of(tmp_path, source))
    found = Configuration({"epochs": 1, "weight_decay": 0.2}, {})
    assert found.for_class(cls, TrainingSettings(epochs=1, weight_decay=0.2, seed=3)) == {
        "clip": None,
        "weight_decay": 0.2,
        "seed": 3,
    }


def test_a_class_that_needs_an_argument_says_so(tmp_path):
    cls = training_class.read_class(source_of(tmp_path, f"class C:\n    def __init__(self, a, lr): ...\n    {METHODS}"))
    with pytest.raises(SlurmGPUError, match=r"needs the argument 'a'. Put it under \[settings.arguments\]"):
        Configuration({"epochs": 1}, {}).check(cls)
    assert Configuration({"epochs": 1}, {}).over({"a": 1}, cls).check(cls).epochs == 1


def test_a_setting_that_a_method_of_the_class_takes_over_is_not_swept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = "def optimizer(self, model): ...\n    def scheduler(self, optimizer, n_steps): ..."
    takes = "def __init__(self, momentum=0.9): ..."
    cls = training_class.read_class(source_of(tmp_path, f"class C:\n    {takes}\n    {own}\n    {METHODS}"))
    base = Configuration({"epochs": 1}, {})
    assert base.over({"momentum": 0.5, "clip": 1.0, "lr": ""}, cls).settings["momentum"] == 0.5
    for name, value, method in (("lr", 0.1, "optimizer"), ("schedule", "cosine", "scheduler")):
        with pytest.raises(SlurmGPUError, match=f"{name} has no effect: the class has its own method {method}"):
            base.over({name: value}, cls)
    lines = Train(training="mine.py:C", epochs=1, lr=0.1, momentum=0.5).place(Share(0)).lines
    assert lines[1:] == ("lr has no effect: mine.py:C has its own method optimizer.",)


def test_an_argument_of_the_class_may_stand_among_the_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source_of(tmp_path, CLASS, "Lines")
    train = Train(training="mine.py:Lines", epochs=1, width=3)
    assert train.frozen_settings == {"arguments": {"width": 3}}
    (tmp_path / "mine.py").unlink()
    Train(training="mine.py:Lines", epochs=1, width=3, **train.frozen_settings)  # a plan needs no source
    over = Train(training="mine.py:Lines", epochs=1, width=3, arguments={"width": 4})  # as --set does
    assert over.frozen_settings == {"arguments": {"width": 3}}
    source_of(tmp_path, CLASS, "Lines")
    for others, sentence in (
        ({"widht": 3}, "Did you mean 'width'?"),
        ({"per_device_train_batch_size": 3}, "Here it is called 'batch_size'."),
        ({"arguments.width": 3}, "Write width instead."),
    ):
        with pytest.raises(SlurmGPUError) as caught:
            Train(training="mine.py:Lines", epochs=1, **others)
        assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "items", "lines"),
    [
        ({}, "{}\n", ["A step has 32 × 4 = 128 samples."]),
        ({"global_batch_size": 100}, '{"lr": 0.1}\n{"lr": 0.2}\n', ["A step has 100 samples."]),
        ({"accumulation": 2}, '{"batch_size": 4}\n{}\n', ["A step has 4 × 4 × 2 = 32, 32 × 4 × 2 = 256 samples."]),
        ({"batch_size": "auto"}, "{}\n", []),
        ({"lr": 0.1}, '{"lr": 0.1}\n{"lr": 0.2}\n', ["A step has 32 × 4 = 128 samples."]),
        ({"width": "8"}, '{"width": 8}\n{"width": 4}\n', ["A step has 32 × 4 = 128 samples."]),
        (
            {"lr": 0.3, "width": 8, "batch_size": "auto"},
            '{"lr": 0.1, "width": 4}\n{"lr": 0.2, "width": 2}\n',
            [
                "lr = 0.3 of [settings] has no effect: each configuration has another.",
                "width = 8 of [settings] has no effect: each configuration has another.",
            ],
        ),
    ],
)
def test_planning_says_what_the_steps_of_the_configurations_are_and_what_none_uses(
    tmp_path, monkeypatch, settings, items, lines
):
    monkeypatch.chdir(tmp_path)
    source_of(tmp_path, CLASS, "Lines")
    (tmp_path / "items.jsonl").write_text(items)
    train = Train(training="mine.py:Lines", epochs=1, **settings)
    train.place(Share(4, slots=4))
    assert train.check_input([tmp_path / "items.jsonl"], 1) == lines


def test_names_that_tell_configurations_apart_are_shown_and_others_where_they_do_not():
    base = {"lr": 0.1}
    seeded = [base, {"lr": 0.2}, {"lr": 0.3, "seed": 7}]
    assert train_summary.telling(seeded, train_summary.differing(seeded)) == ["lr"]
    ablated = [base, {"lr": 0.2}, {**base, "clip": 1.0}]
    assert train_summary.telling(ablated, train_summary.differing(ablated)) == ["lr", "clip"]


@pytest.mark.parametrize(
    ("share", "processes", "line"),
    [
        (Share(0), "one", "one CPU process"),
        (Share(1), "per-gpu", "one GPU"),
        (Share(1, processes="one"), "one", "one GPU"),
        (Share(4, slots=4), "per-gpu", "DDP by nccl on 4 GPUs"),
        (Share(8, nodes=2, slots=8), "per-gpu", "DDP by nccl on 8 GPUs on 2 nodes"),
        (Share(0, slots=2), "per-gpu", "DDP by gloo on 2 CPU processes"),
    ],
)
def test_the_mode_is_chosen_from_what_is_allocated(tmp_path, monkeypatch, share, processes, line):
    monkeypatch.chdir(tmp_path)
    source_of(tmp_path, CLASS, "Lines")
    placement = Train(training="mine.py:Lines", epochs=1).place(share)
    assert placement.processes == processes
    assert placement.lines[0] == f"train: mine.py:Lines, with its metrics, {line}"


def test_one_process_for_several_gpus_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SlurmGPUError, match="DDP needs a process for each"):
        Train(training="mine.py:Lines", epochs=1).place(Share(4, slots=4, processes="one"))


def test_a_finished_row_comes_back_from_its_file_as_it_was(tmp_path):
    row = {name: math.nan if column == rows.NUMBER else 1 for name, column in rows.COLUMNS.items()}
    row |= {"config": {"lr": 0.1}, "final": {"x": None}, "best": {}, "curve": [0.5, math.nan]}
    row |= {"curve_steps": [1, 2], "eval_steps": [], "eval_curve": []}
    rows.write_result(tmp_path, row, "aaaa")
    assert "NaN" not in (tmp_path / "result.json").read_text()
    assert repr(rows.read_result(tmp_path, "aaaa")) == repr(rows.read_result(tmp_path, None)) == repr(row)
    assert rows.read_result(tmp_path, "bbbb") is None
    (tmp_path / "result.json").write_text("{}")
    assert rows.read_result(tmp_path, "aaaa") is None


RUN_FILE = """
run_dir = "run"
[workload]
use = "train"
[settings]
training = "mine.py:Lines"
epochs = 2
batch_size = 8
threads = 1
[settings.arguments]
width = 3
[resources]
gpus = 0
executor = "debug"
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory, slurmgpu):
    """A folder with a run over configurations of which two fail, and what its submission printed."""
    folder = tmp_path_factory.mktemp("to train")
    (folder / "mine.py").write_text(CLASS)
    items = [{"lr": 0.01}, {"lr": 0.1, "width": 8}, {"fails": "oom"}, {"fails": "bug"}, {"lr": 0.05, "seed": 7}]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "slurmgpu.toml").write_text(f'input = "items.jsonl"\n{RUN_FILE}')
    return folder, slurmgpu("submit", cwd=folder, expect=0).stdout


def test_a_row_has_the_configuration_its_curves_and_where_its_weights_are(ran):
    import torch

    folder, _ = ran
    with results.open(folder / "run" / "merged.h5") as merged:
        assert merged.failed.tolist() == [False, False, True, True, False]
        assert merged["config"][1] == {"epochs": 2, "threads": 1, "batch_size": 8, "lr": 0.1, "width": 8}
        assert merged["final"][1]["val_given_lr"] == pytest.approx(0.1)  # the class is given the setting
        assert merged["seed"][4] == 7
        assert merged["steps"][:2].tolist() == [10, 10]
        assert len(merged["curve"][0]) == len(merged["curve_steps"][0]) == 10
        assert merged["metric"][0] == "val_loss"
        assert merged["score"][0] == pytest.approx(min(merged["eval_curve"][0]))
        workload = Train(training="mine.py:Lines", epochs=1)
        assert merged["weights"][1] in workload.files_of_item(1)
        assert all((folder / "run" / name).is_file() for name in workload.files_of_item(1))
        weights = torch.load(folder / "run" / merged["weights"][1], weights_only=True)
    assert weights["0.weight"].shape == (8, 3)


def test_what_fails_one_configuration_says_what_to_do_and_leaves_the_others(ran):
    folder, _ = ran
    errors = {error["index"]: error["message"] for error in report(folder)["errors"]}
    assert errors.keys() == {2, 3}
    assert 'batch_size = 8 needs more memory than the GPU has. Set batch_size = "auto"' in errors[2]
    assert "Tried to allocate 2 GiB" in errors[2]
    assert "AttributeError" in errors[3]


def test_a_finished_configuration_leaves_its_row_and_weights_and_is_not_trained_again(ran, slurmgpu):
    folder, _ = ran
    left = sorted(path.name for path in (folder / "run" / "checkpoints" / "00000").iterdir())
    assert left == ["best.pt", "last.pt", "result.json"]
    kept = json.loads((folder / "run" / "checkpoints" / "00000" / "result.json").read_text())
    (folder / "run" / "checkpoints" / "00000" / "result.json").write_text(json.dumps({**kept, "score": -1.0}))
    (folder / "run" / "shards" / "00000.h5").unlink()
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    with results.open(folder / "run" / "merged.h5") as merged:
        assert merged["score"][0] == -1.0


def test_a_corrected_class_trains_what_failed_from_the_start_and_on_demand_what_other_code_trained(tmp_path, slurmgpu):
    failing = "if self.fails == 'late' and self.n > 2: raise ValueError('a bug')"
    former = CLASS.replace("        return {", f"        self.n += 1\n        {failing}\n        return {{")
    former = former.replace("self.lr = width", "self.lr, self.n = width").replace("fails, lr\n", "fails, lr, 0\n")
    (tmp_path / "mine.py").write_text(former)
    (tmp_path / "items.jsonl").write_text('{"lr": 0.01}\n{"fails": "late"}\n')
    checkpoints = RUN_FILE.replace("epochs = 2", "epochs = 3\ncheckpoint_s = 0.0")
    (tmp_path / "slurmgpu.toml").write_text(f'input = "items.jsonl"\n{checkpoints}')

    def found():
        with results.open(tmp_path / "run" / "merged.h5") as merged:
            given = [each and each["val_given_lr"] for each in merged["final"][:]]
            return given, merged["resumed"][:].tolist(), merged.code.tolist()

    slurmgpu("submit", cwd=tmp_path, expect=0)
    assert [*(tmp_path / "run" / "checkpoints" / "00001").glob("step-*")]  # of the code that failed
    corrected = CLASS.replace("nn.Linear(3, self.width)", "nn.Linear(3, 2 * self.width)")
    corrected = corrected.replace("nn.Linear(self.width, 1)", "nn.Linear(2 * self.width, 1)")
    (tmp_path / "mine.py").write_text(corrected.replace('"given_lr": self.lr', '"given_lr": 2 * self.lr'))
    slurmgpu("resubmit", "run", "--failed", cwd=tmp_path, expect=0)
    given, resumed, (first, second) = found()
    assert given == [pytest.approx(0.01), pytest.approx(1.0)]
    assert resumed == [0, 0]
    assert first != second
    slurmgpu("resubmit", "run", "--other-code", cwd=tmp_path, expect=0)
    assert found() == ([pytest.approx(0.02), pytest.approx(1.0)], [0, 0], [second, second])


def test_the_report_ranks_the_configurations_by_what_distinguishes_them(ran):
    folder, printed = ran
    assert "not finite" not in printed  # without a GPU mfu is unknown
    summary = report(folder)["summary"]
    scores = [line["val_loss"] for line in summary["ranking"].values()]
    assert scores == sorted(scores)
    assert set(next(iter(summary["ranking"].values()))) == {"val_loss", "lr", "width", "at_step", "wall_s"}
    assert summary["best_weights"] == f"checkpoints/{summary['best_configuration']:05d}/best.pt"
    assert (summary["n_trained"], summary["n_failed"], summary["goal"]) == (3, 2, "min")
    assert {"val_loss", "train_loss"} <= summary["evaluation_of_best_weights"].keys()
    assert f"train the failed configurations with `slurmgpu resubmit --failed '{folder}/run'`" in summary["hint"]
    assert "  ranking  val loss" in printed


def test_exports_have_a_column_for_each_setting_and_a_line_for_each_point(ran, slurmgpu):
    folder, _ = ran
    slurmgpu("export", "run", "-o", "table.csv", cwd=folder, expect=0)
    slurmgpu("export", "run", "--format", "curves", "-o", "curves.csv", cwd=folder, expect=0)
    table, curves = ([*csv.DictReader((folder / name).open())] for name in ("table.csv", "curves.csv"))
    assert [line["config.lr"] for line in table] == ["0.01", "0.1", "", "", "0.05"]
    assert table[2]["error"].startswith("cuda_oom")
    assert {"final.val_loss", "best.val_loss", "score", "weights"} <= table[0].keys()
    assert {(line["index"], line["what"]) for line in curves} == {
        (index, what) for index in "014" for what in ("train_loss", "val_loss")
    }


def test_tensorboard_has_a_run_for_each_configuration_with_its_curve_and_its_evaluations(ran, slurmgpu):
    folder, _ = ran
    slurmgpu("track", "run", "--to", "tensorboard:tb", cwd=folder, expect=0)
    found = {name[4:9]: points for name, points in scalars(folder / "tb").items()}
    with results.open(folder / "run" / "merged.h5") as merged:
        for index in (0, 1, 4):
            points = found[f"{index:05d}"]
            of = {tag: {step: value for step, each, value in points if each == tag} for _, tag, _ in points}
            curve = zip(merged["curve_steps"][index].tolist(), merged["curve"][index].tolist(), strict=True)
            assert of["loss"] == pytest.approx(dict(curve))
            evaluations = zip(merged["eval_steps"][index].tolist(), merged["eval_curve"][index].tolist(), strict=True)
            assert of["val_loss"] == pytest.approx(dict(evaluations))
            assert {"train_loss", "val_given_lr"} <= of.keys()
