"""The small trainer: what it leaves, and that it learns."""

import numpy as np
import pytest
import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.hashing import digest_of
from slurmgpu.workloads.tracin.kge.checkpoints import adam_weights, load_checkpoint, read_layout
from slurmgpu.workloads.tracin.kge.conve import ConvE
from slurmgpu.workloads.tracin.kge.graph import read_dictionary
from slurmgpu.workloads.tracin.kge.layouts import check
from slurmgpu.workloads.tracin.kge.queries import Known
from slurmgpu.workloads.tracin.kge.shallow import ComplEx, DistMult, TransE
from slurmgpu.workloads.tracin.kge.torch_archive import peek
from slurmgpu.workloads.tracin.kge.train import main, train
from slurmgpu.workloads.tracin.kge.trainer import Recipe, Trainer, filtered_ranks, summary

pytestmark = pytest.mark.usefixtures("one_thread")

N_ENTITIES = 12
# Relation 0 leads to the next entity, 1 to the one after it, around a circle.
CIRCLE = np.array([(h, r, (h + r + 1) % N_ENTITIES) for h in range(N_ENTITIES) for r in range(2)])
MODELS = {"conve": ConvE, "distmult": DistMult, "complex": ComplEx, "transe": TransE}
PARTS = {"entities": "node", "relations": "rel"}
SMALL = {"dim": 16, "channels": 4, "kernel": (2, 2), "dropouts": (0.0, 0.0, 0.0), "batch_size": 8}


def small(**options):
    return Recipe(**{**SMALL, "epochs": 1, **options})


@pytest.fixture
def files(tmp_path):
    """Triples of the circle, with names."""
    lines = [f"e{h:02}\tr{r}\te{t:02}\n" for h, r, t in CIRCLE]
    (tmp_path / "train.txt").write_text("".join(lines[:-2]))
    (tmp_path / "test.txt").write_text("".join(lines[-2:]))
    return tmp_path


@pytest.mark.parametrize("loss", ["kvsall", "bce-1n", "ce", "ns:4"])
@pytest.mark.parametrize("model", MODELS)
def test_each_model_learns_with_each_loss(model, loss):
    recipe = small(model=model, loss=loss, learning_rate=0.02, epochs=2 if model == "conve" else 5)
    trainer = Trainer(torch.from_numpy(CIRCLE), N_ENTITIES, 2, recipe)
    losses = [trainer.train_epoch() for _ in range(4 * recipe.epochs)]
    assert losses[-1] < losses[0]


def test_conve_learns_a_circle_by_heart():
    trainer = train(CIRCLE, N_ENTITIES, 2, small(epochs=80, learning_rate=0.01))
    for ranks in trainer.ranks(torch.from_numpy(CIRCLE), torch.from_numpy(CIRCLE)).values():
        assert summary(ranks)["hits@1"] > 0.9


@pytest.mark.parametrize("loss", ["kvsall", "ns:2"])
def test_the_same_seed_gives_the_same_checkpoint_and_another_seed_another(loss):
    def parameters(seed):
        torch.rand(7)  # what else was drawn does not matter
        recipe = small(epochs=2, seed=seed, loss=loss, dropouts=(0.2, 0.2, 0.2))
        return torch.nn.utils.parameters_to_vector(train(CIRCLE, N_ENTITIES, 2, recipe).module.parameters())

    assert torch.equal(parameters(1), parameters(1))
    assert not torch.equal(parameters(1), parameters(2))


def test_training_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    train(CIRCLE, N_ENTITIES, 2, small())
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("inverse", ["appended", "interleaved", "none"])
@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_says_all_that_is_needed_to_load_it(model, inverse, files):
    options = {"image": (2, 8), "stack": "width", "kernel": (2, 3), "channels": 3, "norm": 2, "learning_rate": 0.005}
    trained = train(CIRCLE, N_ENTITIES, 2, small(model=model, inverse=inverse, **options), files)
    path = files / "checkpoint-1.pt"
    (files / "node_dict.txt").write_text("".join(f"e{i:02}\t{i}\n" for i in range(N_ENTITIES)))
    (files / "rel_dict.txt").write_text("r0\t0\nr1\t1\n")
    entities, relations = (read_dictionary(files / f"{kind}_dict.txt") for kind in ("node", "rel"))

    layout = check(read_layout(path), path, entities, relations)
    assert (layout.architecture, layout.inverse) == (model, inverse)
    assert (layout.learning_rate.value, layout.loss, layout.told["label_smoothing"]) == (0.005, "kvsall", 0.1)
    loaded = MODELS[model].from_layout(layout)
    assert not loaded.load_state_dict(load_checkpoint(path, layout), strict=False).unexpected_keys
    queries = torch.tensor([0, 3, 5]), torch.tensor([0, 1, 1])
    assert torch.equal(loaded.eval().scores(*queries), trained.module.scores(*queries))
    weights = adam_weights(path, layout)
    shapes = {name: value.shape for name, value in loaded.named_parameters()}
    assert {name: weight.shape for name, weight in weights.items()} == shapes


def test_ranks_are_among_all_entities_that_make_no_other_true_triple():
    module = DistMult(6, 2, 3).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for table in (module.entity, module.relation):
            table.copy_(torch.randint(-2, 3, table.shape, generator=draw))  # many scores are equal
    true = torch.tensor([(0, 0, 1), (0, 0, 2), (3, 1, 2), (0, 0, 5), (4, 0, 0)])
    tested = torch.cat([true[:3], torch.tensor([(4, 0, 3)])])
    ranks = filtered_ranks(module, Known(true, 2), tested, 2)
    for (head, relation, tail), rank in zip(tested.tolist(), ranks.tolist(), strict=True):
        own, *others = (
            (module.entity[head] * module.relation[relation] * module.entity[entity]).sum().item()
            for entity in [tail, *(k for k in range(6) if k != tail and [head, relation, k] not in true.tolist())]
        )
        best = 1 + sum(score > own for score in others)
        assert rank == (best + best + sum(score == own for score in others)) / 2


def test_a_model_that_knows_nothing_ranks_by_chance_or_last():
    module = DistMult(9, 1, 2).eval()
    known = Known(torch.zeros(1, 3).long(), 1)
    for value, expected in ((0.0, 5), (torch.nan, 9)):
        torch.nn.init.constant_(module.entity, value)
        assert filtered_ranks(module, known, torch.tensor([(3, 0, 4)]), 1).tolist() == [expected]


def test_the_command_leaves_checkpoints_and_dictionaries_and_says_how_it_ranks(files, monkeypatch, capsys):
    monkeypatch.chdir(files)  # tests/models/test_templates.py types it
    options = ["--model", "distmult", "--dim", "4", "--epochs", "3", "--every", "2", "--device", "cpu"]
    assert main(["train.txt", "--test", "test.txt", "-o", "out", *options]) == 0
    assert sorted(path.name for path in (files / "out").iterdir()) == [
        "checkpoint-2.pt",
        "checkpoint-3.pt",
        "node_dict.txt",
        "rel_dict.txt",
    ]
    assert read_dictionary(files / "out" / "node_dict.txt").size == N_ENTITIES
    tails, heads = capsys.readouterr().out.splitlines()
    assert tails.startswith("test.txt: tails of 2 triples, filtered: mrr 0.")
    assert heads.startswith("test.txt: heads of 2 triples, filtered: mrr 0.")


def test_names_may_have_characters_that_end_lines_elsewhere(files):
    """Only a newline ends a line of triples."""
    (files / "train.txt").write_text("a\u2028b\tr\tc\x0c\nc\x0c\tr\ta\u2028b\n", encoding="utf-8")
    argv = [files / "train.txt", "-o", files / "out", "--device", "cpu", "--model", "distmult", "--dim", "4"]
    assert main([str(arg) for arg in [*argv, "--epochs", "1"]]) == 0
    assert read_dictionary(files / "out" / "node_dict.txt").ids == {"a\u2028b": 0, "c\x0c": 1}


def test_a_checkpoint_knows_the_dictionaries_that_its_model_was_trained_with(files):
    argv = [files / "train.txt", "-o", files / "out", "--device", "cpu", "--model", "distmult", "--dim", "4"]
    assert main([str(arg) for arg in [*argv, "--epochs", "1"]]) == 0
    digests = {part: digest_of(files / "out" / f"{name}_dict.txt") for part, name in PARTS.items()}
    assert peek(files / "out" / "checkpoint-1.pt")["model_config"]["dictionaries"] == digests


@pytest.mark.parametrize("option", [["--seed", "1"], []])
def test_checkpoints_of_two_trainings_are_never_in_one_folder(files, capsys, option):
    argv = [str(files / "train.txt"), "-o", str(files / "out"), "--device", "cpu", "--model", "distmult", "--dim", "4"]
    assert main([*argv, "--epochs", "2"]) == 0
    before = (files / "out" / "checkpoint-2.pt").read_bytes()
    assert main([*argv, "--epochs", "4", "--every", "1", *option]) == 2
    said = capsys.readouterr().err
    assert "has checkpoint-2.pt from another training" in said
    assert "choose another folder with -o" in said
    assert [path.name for path in (files / "out").glob("*.pt")] == ["checkpoint-2.pt"]
    assert (files / "out" / "checkpoint-2.pt").read_bytes() == before
    with pytest.raises(SlurmGPUError, match="from another training"):
        train(CIRCLE, N_ENTITIES, 2, small(), files / "out")


def test_dictionaries_that_are_there_are_taken(files):
    (files / "node_dict.txt").write_text("".join(f"e{i:02}\t{i + 5}\n" for i in range(N_ENTITIES)))
    argv = ["--entities", files / "node_dict.txt", "--model", "distmult", "--dim", "4", "--epochs", "1"]
    assert main([str(arg) for arg in [files / "train.txt", "-o", files, "--device", "cpu", *argv]]) == 0
    assert read_layout(files / "checkpoint-1.pt").n_entities == N_ENTITIES + 5


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "conva"], "Did you mean 'conve'?"),
        (["--loss", "bce-pos"], "'ns:K'"),
        (["--loss", "ns:0"], "'ns:K'"),
        (["--inverse", "sideways"], "'interleaved'"),
        (["--epochs", "0"], "epochs is 0"),
        (["--label-smoothing", "1"], "label smoothing"),
        (["--dropouts", "0.1"], "dropouts has 1 numbers; expected three"),
        (["--dropouts", "0.1", "0", "2"], "dropouts from 0"),
        (["--dim", "12", "--image", "5", "2"], "image is 5 x 2; expected a product of 12"),
        (["--dim", "4", "--kernel", "5", "5"], "kernel is 5 x 5; expected at most"),
        (["--model", "transe", "--norm", "0.5"], "norm is 0.5"),
        (["--device", "cuda:999"], "device is 'cuda:999'"),
        (["--entities", "unwritten/node_dict.txt"], "unwritten"),
        (["--test", "nowhere.txt"], "nowhere.txt"),
        (["--test", "bad.txt"], "bad.txt, line 2"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(argv, said, files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    (files / "bad.txt").write_text("e00\tr0\te01\ne00\tr0\n")
    assert main(["train.txt", "-o", "out", *argv]) == 2
    assert said in capsys.readouterr().err
    assert not list(files.glob("out/*.pt"))


def test_a_single_query_is_no_training_set():
    with pytest.raises(SlurmGPUError, match="only one pair of head and relation"):
        train(CIRCLE[:1], N_ENTITIES, 2, small(inverse="none"))
