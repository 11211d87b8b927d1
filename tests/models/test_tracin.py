"""The built-in workload `tracin`: a whole run over a small graph, its rows, report and exports; and what it refuses."""

import csv
import io
import json

import numpy as np
import pytest

import slurmgpu
from slurmgpu.errors import SlurmGPUError
from slurmgpu.workload import Item, Share, TaskContext
from slurmgpu.workloads.tracin import own_parameters, planning
from slurmgpu.workloads.tracin.planning import group_of
from slurmgpu.workloads.tracin.settings import LOSSES
from slurmgpu.workloads.tracin.summary import KEYS
from slurmgpu.workloads.tracin.workload import Tracin
from tests.support.runs import datasets, report
from tests.support.tracin_projects import (
    ENTITIES,
    N_TESTS,
    N_TRAIN,
    RELATIONS,
    make_project,
    write_graph,
    write_model,
    write_run_file,
    write_triples,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
NAMED = {"names": "node_name_dict.txt", "edge_map": "edge_map.json", "threads": 1}
FILES = {"train": "train.txt", "entities": "node_dict.txt", "relations": "rel_dict.txt", "model": "model.pt"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, slurmgpu):
    """A run by one task, with full rows, names and labels."""
    folder = make_project(
        tmp_path_factory.mktemp("whole") / "project",
        full="float32",
        **NAMED,
    )
    slurmgpu("submit", "tracin.toml", cwd=folder, expect=0)
    return folder


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a graph and a model, to work in."""
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    # In this process: another one takes seconds to import PyTorch. Two tests below have it.
    monkeypatch.setattr(planning, "own_parameters", own_parameters.built)
    return tmp_path


def rows_of(tell=lambda text: None, **settings):
    """The rows of all tests, of a workload that is loaded here."""
    workload = Tracin(**{**FILES, "top_k": 5, **settings})
    workload.load(TaskContext("cpu", 0, None, tell=tell))
    with open("test.txt") as file:
        return workload([Item(number, {"text": line}) for number, line in enumerate(file.read().splitlines())])


# A run


def test_every_influence_is_the_dot_product_of_two_gradients(whole):
    import torch

    from slurmgpu.workloads.tracin.kge.conve import ConvE
    from tests.support.tracin_projects import MODEL

    model = ConvE(len(ENTITIES), len(RELATIONS), 12, **MODEL).eval().double()
    model.load_state_dict(torch.load(whole / "model.pt")["model_state_dict"])

    def gradient(line):
        head, relation, tail = line.split("\t")
        query = torch.tensor([ENTITIES.index(head)]), torch.tensor([RELATIONS.index(relation)])
        loss = -torch.nn.functional.logsigmoid(model.scores(*query)[0, ENTITIES.index(tail)])
        return torch.cat([found.flatten() for found in torch.autograd.grad(loss, list(model.parameters()))])

    train, tests = ((whole / name).read_text().splitlines() for name in ("train.txt", "test.txt"))
    expected = 1e-3 * torch.stack([*map(gradient, tests)]) @ torch.stack([*map(gradient, train)]).T
    with slurmgpu.open(whole / "run" / "merged.h5") as merged:
        np.testing.assert_allclose(merged["influence"][:], expected.numpy(), rtol=1e-3, atol=1e-8)


def test_the_lists_are_the_ends_of_the_sorted_row_and_their_shares_add_up(whole):
    with slurmgpu.open(whole / "run" / "merged.h5") as merged:
        for row in merged.rows():
            values = row["influence"]
            order = np.lexsort((np.arange(N_TRAIN), -values))
            assert row["proponents"].tolist() == order[:5].tolist()
            np.testing.assert_array_equal(row["proponent_values"], values[row["proponents"]])
            np.testing.assert_array_equal(row["opponent_values"], np.sort(values)[:5])
            for side in ("proponent", "opponent"):
                np.testing.assert_allclose(row[f"{side}_shares"].sum(1), row[f"{side}_values"], rtol=1e-4, atol=1e-9)
            assert row["n_counted"] == N_TRAIN
            assert row["influence_sum"] == pytest.approx(values.sum(dtype=float), rel=1e-4)
            assert row["influence_std"] == pytest.approx(values.std(dtype=float), rel=1e-3)
            assert row["positive_share"] == pytest.approx((values > 0).mean())


def test_a_test_triple_is_known_by_its_numbers_and_its_line(whole):
    lines = [line.split("\t") for line in (whole / "test.txt").read_text().splitlines()]
    with slurmgpu.open(whole / "run" / "merged.h5") as merged:
        assert merged["line"][:].tolist() == list(range(N_TESTS))
        for (head, relation, tail), triple in zip(lines, merged["triple"][:].tolist(), strict=True):
            assert triple == [ENTITIES.index(head), RELATIONS.index(relation), ENTITIES.index(tail)]


def test_the_plan_names_the_groups_of_the_shares_and_the_report_what_they_hold(whole, slurmgpu):
    groups = json.loads((whole / "run" / "run.json").read_text())["settings"]["planned"]["groups"]
    summary = report(whole)["summary"]
    assert set(groups) == {"entity", "relation", "conv", "norm", "fc", "bias"}
    assert summary.keys() <= set(KEYS)
    assert list(summary["group_share"]) == groups
    assert sum(summary["group_share"].values()) == pytest.approx(1)
    assert (summary["n_tests"], summary["n_training_triples"], summary["n_failed"]) == (N_TESTS, N_TRAIN, 0)
    first, cells = next(iter(summary["listed_most_often"].items()))
    line = int(first.split("]")[0].removeprefix("train["))
    assert first == f"train[{line}]: " + (whole / "train.txt").read_text().splitlines()[line].replace("\t", " ")
    assert cells["n_tests"] == cells["as_proponent"] + cells["as_opponent"]
    assert "group share: entity" in slurmgpu("report", "run", cwd=whole, expect=0).stdout


@pytest.mark.nightly
def test_one_task_three_tasks_and_killed_workers_give_the_same_bytes(whole, tmp_path, slurmgpu):
    """With `threads` set: tasks that share a machine's cores have fewer each, and other last digits without it."""
    expected = datasets(whole)
    assert expected
    folder = make_project(tmp_path / "project", resources={"tasks": 3}, top={"shard_items": 4}, full="float32", **NAMED)
    slurmgpu("submit", "tracin.toml", "--inject", "kill@1,kill@6", cwd=folder, expect=0)
    assert datasets(folder) == expected


@pytest.mark.slurm
@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_an_array_of_tasks_on_slurm_gives_the_bytes_of_one_task(whole, tmp_path, slurmgpu):
    folder = make_project(tmp_path / "project", full="float32", **NAMED)
    submit = ("submit", "tracin.toml", "--executor", "slurm", "--gpus", "3", "--array", "--device", "cpu", "--wait")
    slurmgpu(*submit, cwd=folder, expect=0)
    assert datasets(folder) == datasets(whole)


# Exports


def test_csv_has_the_exact_header_and_names_by_absolute_value(whole, slurmgpu):
    out = slurmgpu("export", "run", "--format", "csv", "-o", "-", cwd=whole, expect=0).stdout
    header, *records = csv.reader(io.StringIO(out, newline=""))
    assert ",".join(header) == (
        "TestHead,TestHead_label,TestRel,TestRel_label,TestTail,TestTail_label,TrainHead,TrainHead_label,TrainRel,"
        "TrainRel_label,TrainTail,TrainTail_label,TracInScore,SelfInfluence"
    )
    assert len(records) == N_TESTS * N_TRAIN  # full: all of them
    first = records[:N_TRAIN]
    sizes = [abs(float(record[12])) for record in first]
    assert sizes == sorted(sizes, reverse=True)
    assert [record[0] for record in first] == [(whole / "test.txt").read_text().split("\t")[0]] * N_TRAIN
    by_name = {record[6]: record[7] for record in records} | {record[10]: record[11] for record in records}
    assert by_name["CHEBI:4"] == "substance 4"
    assert by_name["CHEBI:3"] == "CHEBI:3"  # it has no name
    assert {(record[8], record[9]) for record in records} == {
        ("predicate:0", "biolink:says_0"),
        ("predicate:1", "biolink:says_1"),
        ("predicate:2", "predicate:2"),
    }
    with slurmgpu_open(whole) as merged:
        assert {float(record[13]) for record in first} == {float(merged["self_influence"][0])}


def test_json_has_a_result_for_each_test_triple(whole, tmp_path, slurmgpu):
    slurmgpu("export", "run", "-o", tmp_path / "o.json", cwd=whole, expect=0)
    found = json.loads((tmp_path / "o.json").read_text())
    assert {**found, "results": len(found["results"])} == {
        "num_test_triples": N_TESTS,
        "num_training_triples": N_TRAIN,
        "top_k": None,
        "learning_rate": 1e-3,
        "results": N_TESTS,
    }
    result, influence = found["results"][3], found["results"][3]["top_influences"][0]
    with slurmgpu_open(whole) as merged:
        row = merged.row(3)
    assert [result[f"test_{part}"] for part in ("head", "relation", "tail")] == row["triple"].tolist()
    assert abs(influence["influence"]) == np.abs(row["influence"]).max()
    assert influence["train_head_label"] == ENTITIES[influence["train_head"]]
    assert {key for key in influence if key.endswith("_name")} == {
        "train_head_name",
        "train_relation_name",
        "train_tail_name",
    }


def test_without_full_rows_an_export_has_the_k_strongest_of_both_signs(files, slurmgpu):
    write_triples(files / "test.txt", [("CHEBI:1", "predicate:0", "CHEBI:2"), ("CHEBI:1", "predicate:0", "nobody")])
    slurmgpu("submit", "tracin.toml", "--executor", "debug", cwd=files, expect=0, **ONE_THREAD)
    found = json.loads(slurmgpu("export", "run", "--format", "json", "-o", "-", cwd=files, expect=0).stdout)
    assert (found["top_k"], found["num_test_triples"], len(found["results"])) == (5, 1, 1)
    with slurmgpu_open(files) as merged:
        row = merged.row(0)
        assert "'nobody'" in merged.errors[1]
    both = np.concatenate([row["proponent_values"], row["opponent_values"]])
    listed = [one["influence"] for one in found["results"][0]["top_influences"]]
    assert np.abs(listed).tolist() == np.sort(np.abs(both))[::-1][:5].tolist()
    assert "test_head_name" not in found["results"][0]
    jsonl = slurmgpu("export", "run", "--format", "jsonl", "-o", "-", cwd=files, expect=0).stdout.splitlines()
    assert "proponent_shares" in json.loads(jsonl[0])


def test_full_rows_of_float16_are_right_at_any_size(files, slurmgpu):
    """A learning rate of 1e-12 makes influences that float16 alone would have as 0."""
    options = {"learning_rate": 1e-12, "top_k": 3}
    exact, rounded = (rows_of(full=dtype, **options) for dtype in ("float32", "float16"))
    for one, other in zip(exact, rounded, strict=True):
        values = other["influence"].astype(np.float32) * other["influence_scale"]
        assert other["influence"].dtype == np.float16
        np.testing.assert_allclose(values, one["influence"], rtol=1e-3, atol=1e-9 * np.abs(one["influence"]).max())
    make_project(files, full="float16", **options)
    slurmgpu("submit", "tracin.toml", "--executor", "debug", cwd=files, expect=0, **ONE_THREAD)
    found = json.loads(slurmgpu("export", "run", "--format", "json", "-o", "-", cwd=files, expect=0).stdout)
    for result, row in zip(found["results"], exact, strict=True):
        listed = [one["influence"] for one in result["top_influences"]]
        expected = np.sort(np.abs(row["influence"]))[::-1]
        np.testing.assert_allclose(np.abs(listed[:3]), expected[:3], rtol=1e-6)
        np.testing.assert_allclose(np.abs(listed), expected, rtol=1e-3, atol=1e-9 * expected[0])


def test_an_export_of_another_train_file_is_refused(files, slurmgpu):
    slurmgpu("submit", "tracin.toml", "--executor", "debug", cwd=files, expect=0, **ONE_THREAD)
    write_graph(files, seed=1)
    done = slurmgpu("export", "run", "--format", "csv", "-o", "o.csv", cwd=files, expect=2)
    assert "train.txt changed since this run was planned" in done.stderr
    assert not (files / "o.csv").exists()


WITH_EXPORTS = """
from slurmgpu import Text

class Loud:
    columns = {"shout": Text()}
    batch_size = 4

    def __init__(self, mark="!"):
        self.exports = {"loud": lambda merged, file: file.write("".join(merged["shout"][:]).encode() + mark.encode())}

    def load(self, task):
        pass

    def __call__(self, items):
        return [{"shout": item.data["text"].upper()} for item in items]
"""


def test_any_workload_may_export_formats_of_its_own(tmp_path, slurmgpu):
    (tmp_path / "loud.py").write_text(WITH_EXPORTS)
    (tmp_path / "a.txt").write_text("a\nb\n")
    (tmp_path / "loud.toml").write_text(
        'input = "a.txt"\nrun_dir = "run"\nworkload.use = "loud.py:Loud"\nsettings.mark = "?"\n'
        'resources = {gpus = 0, executor = "debug"}\n'
    )
    slurmgpu("submit", "loud.toml", cwd=tmp_path, expect=0)
    assert slurmgpu("export", "run", "--format", "loud", "-o", "-", cwd=tmp_path, expect=0).stdout == "AB?"
    slurmgpu("export", "run", "-o", "a.csv", cwd=tmp_path, expect=0)
    assert (tmp_path / "a.csv").read_text().startswith("index,shout,error")
    done = slurmgpu("export", "run", "--format", "json", "-o", "-", cwd=tmp_path, expect=2)
    assert "--format takes jsonl, csv, tsv, parquet, hf, pt, loud" in done.stderr


def slurmgpu_open(folder):
    return slurmgpu.open(folder / "run" / "merged.h5")


# Options


def test_checkpoints_are_summed_with_their_learning_rates(files):
    write_model(files / "other-2.pt", seed=1)
    write_model(files / "other-10.pt", seed=2)
    one, two = (rows_of(model=f"other-{n}.pt", learning_rate=1.0, full="float32") for n in (2, 10))
    both = rows_of(model="other-*.pt", learning_rate=[0.5, 2.0], full="float32", precision="fp64")
    for row, first, second in zip(both, one, two, strict=True):
        np.testing.assert_allclose(
            row["influence"], 0.5 * first["influence"] + 2 * second["influence"], rtol=2e-3, atol=1e-6
        )


def test_an_optimizer_tells_its_learning_rate(files):
    import torch

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    write_model(files / "model.pt", optimizer_state_dict=optimizer.state_dict())
    assert Tracin(**FILES).frozen_settings["learning_rate"] == [0.25]
    assert Tracin(**FILES, learning_rate=0.5).frozen_settings["learning_rate"] == [0.5]


def write_rates(folder, *rates, model="model.pt", **content):
    """A checkpoint whose optimizer has groups of these learning rates."""
    import torch

    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    write_model(folder / model, optimizer_state_dict=torch.optim.SGD(groups, lr=1.0).state_dict(), **content)


@pytest.mark.parametrize("dtype", [None, "float64", "float32", "bfloat16", "int64"])
def test_a_learning_rate_may_be_an_integer_or_a_tensor(files, dtype):
    import torch

    rate = 3 if dtype is None else torch.tensor([7, 3], dtype=getattr(torch, dtype))[1]
    write_rates(files, rate, rate)
    assert Tracin(**FILES).facts.learning_rates == [3.0]


def test_planning_reads_a_tensors_learning_rate_without_torch(files, slurmgpu):
    import torch

    write_rates(files, torch.tensor(0.25))
    (files / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    done = slurmgpu("submit", "tracin.toml", "--dry-run", cwd=files, expect=0, PYTHONPATH=str(files))
    assert "learning rate 0.25" in done.stdout


@pytest.mark.parametrize(
    ("rates", "config", "sentence"),
    [
        ((0.1, 0.001), {"learning_rate": 1.0}, "found 0.1 and 0.001 in its optimizer's 2 parameter groups. Set"),
        (([1.0, 1.0],), {}, "found a tensor (2,) of float32 in its optimizer. Set learning_rate."),
        ((), {"learning_rate": "1e-3"}, "found '1e-3' in its config. Set learning_rate."),
        ((), {"learning_rate": True}, "found True in its config. Set learning_rate."),
        ((float("nan"),), {}, "The learning rate in model.pt is nan; expected more than 0. Set learning_rate."),
        ((-0.5,), {}, "The learning rate in model.pt is -0.5; expected more than 0."),
        ((0.0,), {}, "The learning rate in model.pt is 0, as at the end of a schedule, so every influence"),
    ],
)
def test_a_checkpoint_that_tells_no_one_rate_is_refused_with_what_it_tells(files, rates, config, sentence):
    import torch

    if rates:
        write_rates(files, *(torch.tensor(rate) if isinstance(rate, list) else rate for rate in rates), config=config)
    else:
        write_model(files / "model.pt", config=config)
    with pytest.raises(SlurmGPUError) as raised:
        Tracin(**FILES).facts  # noqa: B018 - planning reads the files for them
    assert sentence in str(raised.value)
    assert Tracin(**FILES, learning_rate=0.5).facts.learning_rates == [0.5]


def test_no_rate_is_assumed_beside_a_known_one(files):
    write_rates(files, 0.25, model="other.pt")
    with pytest.raises(SlurmGPUError, match=r"model\.pt has no learning rate, and other\.pt has 0\.25.* Set learning_"):
        Tracin(**{**FILES, "model": ["other.pt", "model.pt"]}).facts  # noqa: B018
    write_model(files / "other.pt", seed=1)
    assert Tracin(**{**FILES, "model": ["other.pt", "model.pt"]}).facts.learning_rates == [0.001, 0.001]


def test_a_checkpoint_at_the_end_of_a_schedule_adds_nothing_and_is_planned(files):
    write_rates(files, 0.5, model="early.pt", seed=1)
    write_rates(files, 0, model="end.pt")
    model = ["early.pt", "end.pt"]
    lines = Tracin(**{**FILES, "model": model}).place(Share(gpus=0)).lines
    said = (
        "The learning rate of end.pt is 0, which adds nothing to influences; losses and scores are still from end.pt."
    )
    assert said in lines
    planned = Tracin(**{**FILES, "model": model}).frozen_settings
    assert planned["learning_rate"] == [0.5, 0.0]
    alone, both = (rows_of(full="float32", **settings) for settings in ({"model": "early.pt"}, planned))
    for one, other in zip(alone, both, strict=True):
        np.testing.assert_array_equal(one["influence"], other["influence"])
        assert one["loss"] != other["loss"]


def test_preconditioning_weighs_each_number_by_adams_second_moment(files):
    import torch

    from slurmgpu.workloads.tracin.kge.conve import ConvE
    from tests.support.tracin_projects import MODEL

    torch.manual_seed(0)
    model = ConvE(len(ENTITIES), len(RELATIONS), 12, **MODEL)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.scores(torch.arange(9), torch.arange(9) % 3).square().sum().backward()
    optimizer.step()
    config = {"image": [3, 4], "stack": "height"}
    content = {"model_state_dict": model.state_dict(), "model_config": config}
    torch.save({**content, "optimizer_state_dict": optimizer.state_dict()}, files / "model.pt")
    plain, weighted = rows_of(), rows_of(precondition="adam")
    assert all(row["self_influence"] != other["self_influence"] for row, other in zip(plain, weighted, strict=True))


def test_some_parameters_are_a_part_of_all(files):
    told = []
    every = rows_of(told.append)
    assert told == [f"{len(every)} test triples traced"]
    part = rows_of(parameters=["conv", "fc.weight"], full="float32")
    assert Tracin(**FILES, parameters=["conv", "fc.weight"]).facts.groups == ["conv", "fc"]
    names = Tracin(**FILES).facts.groups
    for row, whole in zip(part, every, strict=True):
        at = int(whole["proponents"][0])
        share = whole["proponent_shares"][0][names.index("conv")]
        assert row["proponent_shares"].shape == (5, 2)
        assert row["influence"][at] == pytest.approx(share + _fc_weight(whole, at, names), rel=1e-3, abs=1e-8)


def _fc_weight(whole, at, names):
    """The share of fc.weight, from that of fc and of its bias."""
    [bias] = [
        row["influence"][at]
        for row in rows_of(parameters=["fc.bias"], full="float32")
        if row["triple"].tolist() == whole["triple"].tolist()
    ][:1]
    return whole["proponent_shares"][0][names.index("fc")] - bias


def test_with_top_k_0_there_is_self_influence_alone(files):
    workload = Tracin(**FILES, top_k=0)
    assert list(workload.columns) == ["triple", "line", "self_influence", "loss", "score"]
    assert workload.exports.keys() == {"json"}
    rows, listed = rows_of(top_k=0), rows_of()
    assert [row["self_influence"] for row in rows] == [row["self_influence"] for row in listed]
    assert rows[0].keys() == workload.columns.keys()


def test_a_reduced_precision_says_how_far_it_is_off(files):
    rows = rows_of(precision="bf16")
    assert all(0 < row["precision_error"] < 0.1 and 0 <= row["top10_overlap"] <= 1 for row in rows)


def test_the_filter_changes_what_is_listed_and_no_value(files):
    every, near = rows_of(full="float32"), rows_of(full="float32", n_hops=1, min_degree=1)
    assert any(row["n_counted"] < N_TRAIN for row in near)
    for row, whole in zip(near, every, strict=True):
        np.testing.assert_array_equal(row["influence"], whole["influence"])
        assert row["n_counted"] >= (row["proponents"] >= 0).sum()


@pytest.mark.parametrize("loss", [*LOSSES, "ns:3"])
def test_every_loss_has_rows(files, loss):
    rows = rows_of(loss=loss, test_loss="bce-pos")
    assert [row["line"] for row in rows] == list(range(N_TESTS))
    assert all(np.isfinite(row["proponent_values"]).all() for row in rows)


def test_both_directions_take_inverse_relations(files):
    write_model(files / "model.pt", n_relations=6)
    rows = rows_of(directions="both", inverse="appended")
    assert all(row["self_influence"] > 0 for row in rows)


OWN = """
import torch

class Dot(torch.nn.Module):
    def __init__(self, n_entities, n_relations):
        super().__init__()
        self.entity = torch.nn.Embedding(n_entities, 4)
        self.relation = torch.nn.Embedding(n_relations, 4)

    def losses(self, triples):
        head, relation, tail = triples[:, 0], triples[:, 1], triples[:, 2]
        product = self.entity(head) * self.relation(relation) * self.entity(tail)
        return torch.nn.functional.softplus(-product.sum(-1))
"""


def test_a_model_of_ones_own_needs_only_losses(files):
    settings = own_model(files)
    rows = rows_of(**settings)
    workload = Tracin(**{**FILES, **settings})
    assert workload.facts.groups == ["entity", "relation"]
    assert workload.columns["score"].nan_is_unknown
    assert np.isnan(rows[0]["score"])
    assert rows[0]["proponent_shares"].shape == (5, 2)
    assert all(row["proponent_values"][0] > 0 for row in rows)


def own_model(folder, source=OWN, **content):
    """The settings of a model of one's own, of which both files are written; `content` lies beside its state."""
    import torch

    (folder / "dot.py").write_text(source)
    state = {"entity.weight": torch.randn(len(ENTITIES), 4), "relation.weight": torch.randn(len(RELATIONS), 4)}
    torch.save({"model_state_dict": state, **content} if content else state, folder / "dot.pt")
    return {"model": "dot.pt", "architecture": "dot.py:Dot"}


MIXED = """
import torch
from torch import nn

print("a line of the user's")

class Mixed(nn.Module):
    def __init__(self, n_entities, n_relations):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.tensor(0))
        self.entity, self.relation = nn.Embedding(n_entities, 4), nn.Embedding(n_relations, 4)
        self.decoder = nn.Linear(4, n_entities)
        self.decoder.weight = self.entity.weight
        self.head = nn.Linear(4, 4).requires_grad_(False)

    def losses(self, triples):
        hidden = self.head(self.entity(triples[:, 0]) + self.relation(triples[:, 1])) - self.mean
        return nn.functional.cross_entropy(self.decoder(hidden), triples[:, 2], reduction="none")
"""


def mixed_model(folder):
    """A model of one's own with buffers, a frozen layer and a shared matrix; its settings."""
    import torch

    (folder / "mixed.py").write_text(MIXED)
    module = {}
    exec(MIXED, module)
    torch.save(module["Mixed"](len(ENTITIES), len(RELATIONS)).state_dict(), folder / "mixed.pt")
    return {"model": "mixed.pt", "architecture": "mixed.py:Mixed"}


def test_what_is_planned_of_a_model_of_ones_own_is_what_is_computed(files):
    own = mixed_model(files)
    facts = Tracin(**{**FILES, **own}).facts
    assert (facts.groups, facts.not_built) == (["entity", "relation", "decoder"], None)
    assert facts.n_parameters == 4 * (len(ENTITIES) + len(RELATIONS)) + len(ENTITIES)
    assert Tracin(**{**FILES, **own}, parameters="last").facts.groups == ["decoder"]  # the head is frozen
    for parameters in ("all", "last"):
        rows = rows_of(**own, parameters=parameters)
        assert all((np.abs(row["proponent_shares"]).sum(0) > 0).all() for row in rows)


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("mean", "mean is a buffer."),
        ("head", "head.weight is frozen: its requires_grad is False."),
        ("decoder.weight", "decoder.weight is the same tensor as entity.weight. Groups: entity, relation, decoder;"),
    ],
)
def test_parameters_that_are_not_computed_are_refused_at_planning(files, word, what):
    with pytest.raises(SlurmGPUError) as raised:
        Tracin(**{**FILES, **mixed_model(files)}, parameters=[word]).facts  # noqa: B018
    assert what in str(raised.value)


# A library's message in Latin-1, a print, and a process that outlives the class's.
AT_IMPORT = """import os, subprocess
os.write(2, b"caf\\xe9")
print("{}")
subprocess.Popen(["sleep", "1000"])
"""


def test_a_model_of_ones_own_is_built_in_another_process(files, monkeypatch):
    architecture = mixed_model(files)["architecture"]
    expected = own_parameters.built(architecture, 5, 2, {})
    (files / "mixed.py").write_text(AT_IMPORT + (files / "mixed.py").read_text())
    assert own_parameters.own_parameters(architecture, 5, 2, {}) == expected
    (files / "mixed.py").write_text("import no_such_module\n")
    found = own_parameters.own_parameters(architecture, 5, 2, {})
    assert "mixed.py raised ModuleNotFoundError: No module named 'no_such_module'" in found
    (files / "mixed.py").write_text("import os\nos.write(2, b'no caf\\xe9 here')\nos._exit(3)\n")
    assert own_parameters.own_parameters(architecture, 5, 2, {}) == "no caf\N{REPLACEMENT CHARACTER} here"
    monkeypatch.setattr("sys.executable", str(files / "no-python"))
    assert "no-python" in str(own_parameters.own_parameters(architecture, 5, 2, {}))


def test_a_class_that_is_no_model_of_triples_is_refused_when_the_run_is_planned(files):
    own = mixed_model(files)
    source = (files / "mixed.py").read_text()
    (files / "mixed.py").write_text(source.replace("def losses(", "def loss("))
    with pytest.raises(SlurmGPUError, match=r"with a method losses\(triples\)"):
        Tracin(**{**FILES, **own}).facts  # noqa: B018
    (files / "renamed.py").write_text(source.replace("n_relations", "n_rel"))
    with pytest.raises(
        SlurmGPUError, match=r"cannot be built from n_entities and n_relations: .*n_rel.* with the arguments"
    ):
        Tracin(**{**FILES, **own, "architecture": "renamed.py:Mixed"}).facts  # noqa: B018


def test_a_checkpoint_that_does_not_fit_the_class_is_refused_when_the_run_is_planned(files, monkeypatch):
    import torch

    settings = own_model(files, config={"seed": 1})
    content = torch.load(files / "dot.pt")
    state = content["model_state_dict"]
    wrapped = {f"module.{name}": value.double() for name, value in state.items()}
    torch.save({**content, "model_state_dict": wrapped}, files / "first.pt")
    settings["model"] = ["first.pt", "dot.pt"]
    assert Tracin(**{**FILES, **settings}).facts.groups == ["entity", "relation"]
    torch.save({**content, "model_state_dict": {**state, "bias": torch.zeros(3)}}, files / "dot.pt")
    with pytest.raises(SlurmGPUError, match=r'(?s)dot\.pt does not fit dot\.py:Dot: .*Unexpected key.*"bias"'):
        Tracin(**{**FILES, **settings}).facts  # noqa: B018
    torch.save({**content, "model_state_dict": {**state, "relation.weight": torch.zeros(2, 5)}}, files / "dot.pt")
    monkeypatch.setattr(planning, "own_parameters", own_parameters.own_parameters)  # in another process
    with pytest.raises(SlurmGPUError, match=r"(?s)dot\.pt does not fit dot\.py:Dot: .*relation\.weight.*\[2, 5\]"):
        Tracin(**{**FILES, **settings}).facts  # noqa: B018


HOOK = """
    def _load_from_state_dict(self, state, *others):
        if "table" in state:
            assert {asserted}
            state["entity.weight"] = state.pop("table")
        super()._load_from_state_dict(state, *others)
"""


@pytest.mark.parametrize("asserted", ["len(state['table']) == {n}", "state['table'][0, 0].item() != 0"])
def test_a_class_may_change_its_checkpoint_as_it_loads_it(files, asserted):
    """One that looks at values can be tried only in a task."""
    import torch

    settings = own_model(files, OWN + HOOK.format(asserted=asserted.format(n=len(ENTITIES))))
    state = torch.load(files / "dot.pt")
    state["table"] = state.pop("entity.weight")
    torch.save(state, files / "dot.pt")
    assert all(row["self_influence"] > 0 for row in rows_of(**settings))


def test_a_class_that_is_defined_only_beside_a_package_that_is_missing_here_is_left_to_the_tasks(files):
    own = mixed_model(files)
    source = (files / "mixed.py").read_text()
    (files / "mixed.py").write_text(f"{source}\ntry:\n    import not_here.parts\nexcept ImportError:\n    del Mixed\n")
    facts = Tracin(**{**FILES, **own}).facts
    assert facts.not_built == "not_here is not installed, and without it mixed.py:Mixed is no model"


def test_without_torch_a_model_of_ones_own_is_planned_by_its_checkpoint_and_the_plan_says_so(files, slurmgpu):
    write_run_file(files, **mixed_model(files))
    (files / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    done = slurmgpu("submit", "tracin.toml", "--dry-run", cwd=files, expect=0, PYTHONPATH=str(files))
    assert "mean, entity, relation, decoder, head" in done.stdout
    assert "could not be built for planning (ImportError: there is no torch here)" in done.stdout


def test_an_optimizer_tells_the_learning_rate_of_a_model_of_ones_own_too(files):
    import torch

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    facts = Tracin(**{**FILES, **own_model(files, optimizer_state_dict=optimizer.state_dict())}).facts
    assert (facts.learning_rates, facts.unknown_rate) == ([0.25], False)
    facts = Tracin(**{**FILES, **own_model(files, config={"learning_rate": 0.125})}).facts
    assert (facts.learning_rates, facts.unknown_rate) == ([0.125], False)


LOSS = "return torch.nn.functional.softplus(-product.sum(-1))"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (LOSS, f"{LOSS}.mean()", r"losses of Dot returns a tensor \(\) for 2 triples; expected a tensor \(2,\)"),
        (LOSS, f"{LOSS}[:, None]", r"returns a tensor \(2, 1\) for 2 triples"),
        (LOSS, f"{LOSS}.tolist()", "returns a list for 2 triples"),
        (
            LOSS,
            "return product.nothing",
            r"dot\.py, line 13: the method losses of Dot raised AttributeError: .*nothing",
        ),
        (LOSS, LOSS.replace("return", "l =") + "; return l - l.mean()", "it depends on the others"),
        (
            "self, n_entities, n_relations",
            "self, n_nodes",
            "Dot cannot be built from n_entities and n_relations: .*n_nodes",
        ),
        (
            "super().__init__()",
            "super().__init__(1)",
            r"Dot\(n_entities=…, n_relations=…\) raised TypeError",
        ),
        (
            "import torch",
            "import torch, no_such_module",
            r"dot\.py, line 2: the import of dot\.py raised ModuleNotFound",
        ),
        ("import torch", "import torch(", r"dot\.py, line 2: the import of dot\.py raised SyntaxError"),
        ("class Dot", "class Dots", "expected a class Dot in"),
        ("n_entities, 4", "n_entities, 5", "dot.pt does not fit dot.py:Dot"),
    ],
)
def test_a_class_that_is_not_as_it_should_be_is_a_sentence(files, old, new, sentence):
    with pytest.raises(SlurmGPUError, match=sentence):
        rows_of(**own_model(files, OWN.replace(old, new)))


def test_weights_of_ones_own_model_that_are_no_numbers_are_refused(files):
    import torch

    settings = own_model(files)
    state = torch.load(files / "dot.pt")
    state["relation.weight"][0, 1] = torch.nan
    torch.save(state, files / "dot.pt")
    with pytest.raises(SlurmGPUError, match=r"relation\.weight has values that are not finite"):
        rows_of(**settings)


@pytest.mark.parametrize("is_own", [False, True])
def test_float64_weights_are_not_rounded_on_their_way_to_float64(files, is_own):
    import torch

    settings = own_model(files) if is_own else {}
    path = files / ("dot.pt" if is_own else "model.pt")
    content = torch.load(path)
    state = content.get("model_state_dict", content)
    rounded = {name: value.clone() for name, value in state.items()}
    state.update({name: value.double() * (1 + 1e-9) for name, value in state.items() if value.is_floating_point()})
    found = []
    for values in (state, rounded):
        torch.save({**content, "model_state_dict": values}, path)
        found.append(rows_of(**settings, precision="fp64")[0]["loss"])
    assert found[0] != found[1]


def test_nothing_of_the_checkpoint_of_ones_own_model_is_run(files):
    import torch

    settings = own_model(files)
    torch.save(torch.nn.Embedding(3, 3), files / "dot.pt")
    with pytest.raises(SlurmGPUError, match="loading that could run code from the file"):
        rows_of(**settings)


def test_lists_are_no_longer_than_the_training_triples(files):
    workload = Tracin(**FILES, top_k=1000)
    assert workload.columns["proponents"].shape == (N_TRAIN,)
    assert (
        "top_k is 1,000, and there are only 60 training triples, which is the lists' length."
        in workload.place(Share(0)).lines
    )
    rows = rows_of(top_k=1000, full="float32")
    for row in rows:
        listed = [*row["proponents"], *row["opponents"]]
        assert sorted(line for line in listed if line >= 0) == np.flatnonzero(row["influence"]).tolist()
        assert row["proponent_shares"].shape == (N_TRAIN, 6)


def test_the_plan_says_when_lists_take_more_than_the_memory_that_is_set(files):
    lines = Tracin(**FILES, top_k=60, memory_mb=1).place(Share(0)).lines
    assert any(line.startswith("The lists of a test triple need 0.0 MB") for line in lines)
    assert len(Tracin(**FILES, top_k=60).place(Share(0)).lines) == 2


def test_one_group_of_parameters_needs_no_list(files):
    assert Tracin(**FILES, parameters="conv").facts.groups == ["conv"]


def test_a_filter_that_leaves_nothing_leaves_empty_lists_and_no_shares(files):
    for row in rows_of(n_hops=1, min_degree=1000, preserve_test_edges=False):
        assert (row["n_counted"], row["influence_sum"], row["influence_abs_sum"]) == (0, 0, 0)
        assert np.isnan([row["influence_std"], row["positive_share"]]).all()
        for side in ("proponent", "opponent"):
            assert (row[f"{side}s"] == -1).all()
            assert not row[f"{side}_values"].any()
            assert not row[f"{side}_shares"].any()
        assert row["self_influence"] > 0


def test_items_may_have_fields_in_place_of_a_line(files):
    workload = Tracin(**FILES, top_k=2)
    workload.load(TaskContext("cpu", 0, None))
    head, relation, tail = (files / "test.txt").read_text().splitlines()[7].split("\t")
    data = {"head": head, "relation": relation, "tail": tail, "line": 7}
    named, plain, lacking = workload(
        [Item(0, data), Item(7, {"text": f"{head}\t{relation}\t{tail}"}), Item(2, {"head": head, "rel": relation})]
    )
    assert named["line"] == plain["line"] == 7
    assert named["proponents"].tolist() == plain["proponents"].tolist()
    assert str(lacking) == "no field 'relation'. Known: head, rel."


def test_lines_count_on_from_one_input_file_to_the_next(files, slurmgpu):
    lines = (files / "test.txt").read_text().splitlines(keepends=True)
    (files / "one.txt").write_text("".join(lines[:3]))
    (files / "two.txt").write_text("".join(lines[3:5]) + "a\tb\tc\n")
    write_run_file(files, top={"input": ["one.txt", "two.txt"]})
    slurmgpu("submit", "tracin.toml", "--executor", "debug", cwd=files, **ONE_THREAD)
    with slurmgpu_open(files) as merged:
        assert merged["line"][:5].tolist() == [0, 1, 2, 3, 4]
        assert "line 6 of the input: expected one of the 20 names" in merged.errors[5]
    (files / "two.txt").write_text("a\tb\tc\n")
    done = slurmgpu("submit", "tracin.toml", "--run-dir", "other", cwd=files, expect=2)
    assert "two.txt, line 1: expected one of" in done.stderr
    assert "Its only item is no triple of node_dict.txt" in done.stderr


# What is refused, before anything is queued


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss": "bce"}, "loss is 'bce'; expected one of bce-pos"),
        ({"loss": "ns:0"}, "ns:K with K negatives"),
        ({"architecture": "convee"}, "Did you mean 'conve'?"),
        ({"architecture": "distmult"}, "holds a ConvE"),
        ({"architecture": "nowhere.py:Model"}, "There is no file"),
        ({"train": "nowhere.txt"}, "Cannot read nowhere.txt"),
        ({"model": "nowhere.pt"}, "there is no file"),
        ({"model": "no-*.pt"}, "no file matches"),
        ({"model": ["model.pt", "model.pt"]}, "names model.pt twice"),
        ({"learning_rate": [1.0, 2.0]}, "learning_rate has 2 numbers, and model names 1 checkpoints"),
        ({"learning_rate": 0.0}, "expected more than 0"),
        ({"learning_rate": float("inf")}, "expected more than 0"),
        ({"learning_rate": [0.0, float("nan")]}, "none below 0, and at least one above 0"),
        ({"parameters": ["convolution"]}, "Groups: entity, relation, norm, conv, fc, bias;"),
        ({"parameters": "convolution"}, "parameters: entity, relation, bn0.weight, bn0.bias,"),
        ({"norm": 3.0}, "norm is 3; expected 1 or 2"),
        ({"norm": 1.0}, "norm is the p of TransE's distance, and model.pt is read as conve"),
        ({"norm": 1.0, "architecture": "complex"}, "and architecture is 'complex'; remove norm"),
        ({"inverse": "appended"}, 'the model has no inverse relations, but inverse is "appended"'),
        ({"parameters": []}, "parameters is empty"),
        ({"precondition": "adam"}, "has no optimizer_state_dict"),
        ({"directions": "both"}, "has none: it has 3 relation rows"),
        ({"directions": "both", "inverse": "none"}, "set only one of them"),
        ({"image": [1, 12]}, "12"),
        ({"image": [2]}, "expected [height, width]"),
        ({"min_degree": 3}, "min_degree needs n_hops, which turns the filter on"),
        ({"preserve_test_edges": False}, "preserve_test_edges needs n_hops"),
        ({"n_hops": 2, "max_total_path_length": 3}, "needs path_filtering"),
        ({"top_k": -1}, "top_k is -1; expected at least 0"),
        ({"n_hops": 0}, "n_hops is 0; expected at least 1"),
        ({"n_hops": 2, "path_filtering": True, "max_total_path_length": -1}, "max_total_path_length is -1"),
        ({"top_k": 0, "n_hops": 2}, "top_k = 0 lists none"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"names": "nowhere.txt"}, "There is no file"),
        ({"names": "train.txt"}, "train.txt, line 1: expected a label, a tab and an id"),
        ({"edge_map": "train.txt"}, "train.txt: expected a JSON object"),
        ({"architecture": "x.py:Y", "loss": "ce"}, "your own model's method losses(triples)"),
        ({"architecture": "x.py:Y", "precondition": "adam"}, "works only with known architectures"),
    ],
)
def test_what_cannot_work_is_a_sentence(files, settings, sentence):
    with pytest.raises(SlurmGPUError) as raised:
        Tracin(**{**FILES, **settings}).columns  # noqa: B018 - planning reads the files for them
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("train.txt", "CHEBI:1\tpredicate:0\n", "train.txt, line 1: expected head, relation and tail"),
        ("train.txt", "CHEBI:1\tpredicate:0\tCHEBI:99\n", "train.txt, line 1: expected one of the 20 names"),
        (
            "test.txt",
            "a\tb\tc\n",
            "test.txt, line 1: expected one of the 20 names of node_dict.txt as head, found 'a'.",
        ),
        ("test.txt", "a\tb\tc\n" * 20, "None of its 20 items is a triple of node_dict.txt"),
        ("test.txt", "a\tb\tc\n" * 120, "None of the first 100 items is a triple of node_dict.txt"),
        ("test.jsonl", '{"head": "CHEBI:1", "rel": "predicate:0"}\n', "test.jsonl, line 1: no field 'relation'."),
        ("test.json", '[{"head": "CHEBI:1", "rel": "predicate:0"}]', "test.json, first item: no field 'relation'."),
        ("test.csv", "head,relation,tail\nCHEBI:1,predicate:0,x\n", "test.csv, line 2: expected one of the 20 names"),
        ("node_dict.txt", "CHEBI:1\n", "node_dict.txt, line 1: expected a name, a tab and an id"),
        (
            "rel_dict.txt",
            "predicate:0\t0\npredicate:1\t1\npredicate:2\t2\npredicate:3\t3\n",
            "rel_dict.txt has ids for 4",
        ),
        ("model.pt", "no model", "model.pt is not a complete PyTorch checkpoint"),
    ],
)
def test_a_wrong_file_is_refused_at_planning_with_its_line(files, slurmgpu, file, text, sentence):
    (files / file).write_text(text)
    if file.startswith("test"):
        write_run_file(files, top={"input": file})
    done = slurmgpu("submit", "tracin.toml", cwd=files, expect=2)
    assert sentence in done.stderr
    assert not (files / "run").exists()


def test_full_rows_that_would_fill_a_disk_are_refused(files, slurmgpu):
    write_run_file(files, full="float32", full_limit_gb=1e-6)
    done = slurmgpu("submit", "tracin.toml", cwd=files, expect=2)
    assert "full keeps 12 × 60 influences" in done.stderr
    write_run_file(files, full_limit_gb=1e-6)
    done = slurmgpu("submit", "tracin.toml", cwd=files, expect=2)
    assert "lists of top_k = 5 for 12 test triples need 0.0 GB, but full_limit_gb is 1e-06" in done.stderr


def test_a_checkpoint_that_changed_since_planning_is_not_used(files):
    planned = Tracin(**FILES, top_k=2)
    frozen = {**FILES, "top_k": 2, **planned.frozen_settings}
    write_model(files / "model.pt", seed=5)
    workload = Tracin(**frozen)
    assert workload.columns == planned.columns
    with pytest.raises(SlurmGPUError, match=r"model\.pt changed since this run was planned"):
        workload.load(TaskContext("cpu", 0, None))


@pytest.mark.parametrize("name", [*FILES.values(), "dot.py"])
def test_a_file_that_is_gone_since_planning_is_a_sentence(files, name):
    settings = {**FILES, "top_k": 2, **(own_model(files) if name == "dot.py" else {})}
    workload = Tracin(**{**settings, **Tracin(**settings).frozen_settings})
    (files / name).unlink()
    with pytest.raises(SlurmGPUError, match=f"Missing since the run was planned: .*{name}. Restore"):
        workload.load(TaskContext("cpu", 0, None))


def test_a_class_that_changed_since_planning_is_not_used(files):
    settings = {**FILES, "top_k": 2, **own_model(files)}
    workload = Tracin(**{**settings, **Tracin(**settings).frozen_settings})
    (files / "dot.py").write_text(OWN.replace("softplus(-", "softplus(-2 * "))
    with pytest.raises(SlurmGPUError, match=r"dot\.py changed since this run was planned"):
        workload.load(TaskContext("cpu", 0, None))


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ({"seed": 0}, {"seed": 1}, "seed is 0 and 1"),
        ({"loss": "ce"}, {"loss": "kvsall"}, "loss is ce and kvsall"),
        ({"dropouts": [0.2]}, {"dropouts": [0.1]}, r"dropouts is \[0.2\] and \[0.1\]"),
    ],
)
@pytest.mark.parametrize("is_own", [False, True])
def test_checkpoints_of_two_trainings_are_not_summed(files, one, other, what, is_own):
    import torch

    settings = own_model(files) if is_own else {}
    content = torch.load(files / "model.pt") | {"model_state_dict": torch.load(files / "dot.pt")} if is_own else {}
    for number, told in enumerate((one, other)):
        write_model(files / f"two-{number}.pt", model_config={"image": [3, 4], "stack": "height", **told})
        if is_own:
            torch.save({**content, "model_config": told}, files / f"two-{number}.pt")
    with pytest.raises(SlurmGPUError, match=rf"two-0\.pt and two-1\.pt are from two trainings: {what}"):
        Tracin(**{**FILES, **settings, "model": "two-*.pt"}).facts  # noqa: B018


def test_dictionaries_that_are_not_those_of_training_are_refused(files):
    from slurmgpu.util.hashing import digest_of

    digests = {"entities": digest_of(files / "node_dict.txt"), "relations": digest_of(files / "rel_dict.txt")}
    write_model(files / "model.pt", model_config={"image": [3, 4], "stack": "height", "dictionaries": digests})
    assert Tracin(**FILES).facts.n_train == N_TRAIN
    permuted = [*ENTITIES[1:], ENTITIES[0]]
    (files / "node_dict.txt").write_text("".join(f"{name}\t{number}\n" for number, name in enumerate(permuted)))
    with pytest.raises(
        SlurmGPUError, match=r"model\.pt was trained with a different dictionary of entities than node_di"
    ):
        Tracin(**FILES).facts  # noqa: B018


@pytest.mark.parametrize("is_own", [False, True])
def test_dictionaries_that_differ_from_those_in_a_checkpoint_of_pykeen_are_refused(files, is_own):
    import torch

    settings = {**FILES, **(own_model(files) if is_own else {})}
    path = files / settings["model"]
    state = torch.load(path)
    content = {"model_state_dict": state} if is_own else state
    ids = {name: number for number, name in enumerate(ENTITIES)}
    first, last = ENTITIES[0], len(ENTITIES) - 1
    torch.save({**content, "entity_to_id_dict": ids}, path)
    assert Tracin(**settings).facts.n_train == N_TRAIN
    for others, said in (
        ({name: (number - 1) % len(ids) for name, number in ids.items()}, f"has the id {last}"),
        ({name: number for name, number in ids.items() if name != first}, "is missing"),
    ):
        torch.save({**content, "entity_to_id_dict": others}, path)
        expected = rf"different dictionary of entities than .*'{first}', which has the id 0 there, {said} in the"
        with pytest.raises(SlurmGPUError, match=expected):
            Tracin(**settings).facts  # noqa: B018


def test_a_compressed_file_is_called_so(files):
    import gzip

    (files / "a b.txt").write_bytes(gzip.compress((files / "train.txt").read_bytes()))
    with pytest.raises(
        SlurmGPUError, match=r"a b\.txt is compressed by gzip; expected plain text.*--keep '\S*a b\.txt'"
    ):
        Tracin(**{**FILES, "train": "a b.txt"}).facts  # noqa: B018


def test_a_run_is_planned_from_another_folder_too(files, slurmgpu):
    (files / "sub").mkdir()
    (files / "sub" / "node_dict.txt").write_text("nobody\t0\n")  # another than that beside the run file
    done = slurmgpu("submit", "../tracin.toml", "--dry-run", cwd=files / "sub", expect=0)
    assert "60 training triples" in done.stdout
    assert '"top_k": 5' in done.stdout
    assert "digests" not in done.stdout


def test_the_merge_needs_neither_model_nor_graph(files):
    frozen = {**FILES, **Tracin(**FILES).frozen_settings}
    for name in FILES.values():
        (files / name).unlink()
    assert list(Tracin(**frozen).columns)[:3] == ["triple", "line", "proponents"]


def test_the_plan_says_what_is_computed_and_that_one_gpu_is_used(files):
    lines = Tracin(**FILES, top_k=5, parameters="last").place(Share(gpus=2)).lines
    assert lines[0] == (
        "tracin: conve, checkpoint model.pt, learning rate 0.001 "
        "(assumed: the checkpoints have none, and learning_rate is not set)"
    )
    assert lines[1].startswith("60 training triples, ")
    assert lines[1].endswith("4,096 MB of working memory")
    assert "does not approximate" in lines[2]
    assert "submit with --array" in lines[3]
    with pytest.raises(SlurmGPUError, match="per-gpu"):
        Tracin(**FILES).place(Share(gpus=2, processes="per-gpu"))


def test_planning_needs_no_torch(files, slurmgpu):
    (files / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    done = slurmgpu("submit", "tracin.toml", "--dry-run", cwd=files, expect=0, PYTHONPATH=str(files))
    assert "60 training triples" in done.stdout


def test_the_groups_of_planning_are_those_of_the_models():
    from slurmgpu.workloads.tracin.models import MODELS

    sizes = {"conve": {"image": (3, 4), "channels": 2}}
    for name, cls in MODELS.items():
        model = cls(5, 2, 12, **sizes.get(name, {}))
        assert {parameter: group_of(parameter) for parameter, _ in model.named_parameters()} == dict(model.groups)


def test_a_setting_of_another_type_is_refused(files, slurmgpu):
    done = slurmgpu("submit", "tracin.toml", "--set", "directions=sideways", cwd=files, expect=2)
    assert "directions" in done.stderr
    done = slurmgpu("submit", "tracin.toml", "--set", "lerning_rate=1", cwd=files, expect=2)
    assert "Did you mean 'learning_rate'?" in done.stderr
