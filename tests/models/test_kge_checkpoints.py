"""Checkpoints as PyKEEN, the replaced system and others write them: what is recognised, loaded and refused."""

import collections
import logging
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from pykeen.models import ComplEx, ConvE, DistMult, TransE  # first: see test_kge_conve.py
from pykeen.training import SLCWATrainingLoop
from pykeen.triples import CoreTriplesFactory
from torch import nn

from slurmgpu.errors import SlurmGPUError
from slurmgpu.workloads.tracin.kge import checkpoints, layouts
from slurmgpu.workloads.tracin.kge.conve import ConvE as OurConvE
from slurmgpu.workloads.tracin.kge.graph import Dictionary
from slurmgpu.workloads.tracin.kge.shallow import ComplEx as OurComplEx
from slurmgpu.workloads.tracin.kge.shallow import DistMult as OurDistMult
from slurmgpu.workloads.tracin.kge.shallow import TransE as OurTransE
from slurmgpu.workloads.tracin.kge.torch_archive import Shape, peek

pytestmark = pytest.mark.usefixtures("one_thread")

N, R = 7, 3
ENTITIES = Dictionary("node_dict.txt", {f"e{i}": i for i in range(N)})
RELATIONS = Dictionary("rel_dict.txt", {f"r{i}": i for i in range(R)})
TRIPLES = torch.tensor([[0, 0, 1], [1, 2, 3], [4, 1, 4], [6, 2, 0], [5, 0, 2]])

PYKEEN = {
    "conve": (ConvE, {"embedding_dim": 15, "output_channels": 2, "embedding_height": 3, "embedding_width": 5}),
    "distmult": (DistMult, {"embedding_dim": 6}),
    "complex": (ComplEx, {"embedding_dim": 5}),
    "transe": (TransE, {"embedding_dim": 6}),
}
OURS = {"conve": OurConvE, "distmult": OurDistMult, "complex": OurComplEx, "transe": OurTransE}


def shaken(model):
    """The model with other numbers in every parameter and buffer, so that none is left at 0 or 1."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=draw) * 0.5)
    return model.eval()


def pykeen_model(architecture, inverse=False):
    logging.getLogger("pykeen").setLevel(logging.ERROR)
    factory = CoreTriplesFactory(TRIPLES, num_entities=N, num_relations=R, create_inverse_triples=inverse)
    made, options = PYKEEN[architecture]
    return shaken(made(triples_factory=factory, random_seed=0, **options))


class Original(nn.Module):
    """ConvE under the names of the replaced system: images side by side, no bias for each tail."""

    def __init__(self, image=(3, 4), channels=2, n_relations=R):
        super().__init__()
        self.image = image
        d = image[0] * image[1]
        self.entity_embeddings = nn.Embedding(N, d)
        self.relation_embeddings = nn.Embedding(n_relations, d)
        self.bn0 = nn.BatchNorm2d(1)
        self.conv1 = nn.Conv2d(1, channels, 3)
        self.bn1 = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels * (image[0] - 2) * (2 * image[1] - 2), d)
        self.bn2 = nn.BatchNorm1d(d)

    def forward(self, heads, relations):
        images = [table(index).view(-1, 1, *self.image) for table, index in self.pairs(heads, relations)]
        maps = torch.relu(self.bn1(self.conv1(self.bn0(torch.cat(images, 3)))))
        return torch.relu(self.bn2(self.fc(maps.flatten(1)))) @ self.entity_embeddings.weight.T

    def pairs(self, heads, relations):
        return (self.entity_embeddings, heads), (self.relation_embeddings, relations)


def save(tmp_path, content, **options):
    path = tmp_path / "model.pt"
    torch.save(content, path, **options)
    return path


def loaded(path, layout):
    """Our model with the checkpoint's tensors."""
    model = OURS[layout.architecture].from_layout(layout)
    model.load_state_dict(checkpoints.load_checkpoint(path, layout))
    return model.eval()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("architecture", PYKEEN)
def test_a_pykeen_model_scores_here_as_it_does_there(tmp_path, architecture, inverse):
    theirs = pykeen_model(architecture, inverse)
    path = tmp_path / "model.pt"
    theirs.save_state(path)
    layout = checkpoints.read_layout(path, architecture=architecture, norm=1 if architecture == "transe" else None)
    layout = layouts.check(layout, path, ENTITIES, RELATIONS)
    assert layout.inverse == ("interleaved" if inverse else "none")
    assert (layout.n_entities, layout.n_relations) == (N, 2 * R if inverse else R)
    rows = 2 * TRIPLES[:, 1] if inverse else TRIPLES[:, 1]
    with torch.no_grad():
        ours = loaded(path, layout).scores(TRIPLES[:, 0], rows)
        assert torch.allclose(ours, theirs.predict_t(TRIPLES[:, :2]), atol=1e-5)
        assert torch.allclose(ours.gather(1, TRIPLES[:, 2:]), theirs.predict_hrt(TRIPLES), atol=1e-5)
        if inverse:
            ours = loaded(path, layout).scores(TRIPLES[:, 2], rows + 1)
            assert torch.allclose(ours, theirs.predict_h(TRIPLES[:, 1:]), atol=1e-5)


def shapes_of_model_pt(state, optimizer):
    """The shapes that model.pt may have."""
    config = {"embedding_dim": 12, "output_channels": 2}
    sized = {"num_entities": N, "num_relations": R, "embedding_height": 3, "embedding_width": 4}
    epoch = {"epoch": 3, "model_state_dict": state, "optimizer_state_dict": optimizer, "model_config": sized}
    return {
        "bare": state,
        "config": {"model_state_dict": state, "config": config},
        "version": {"state_dict": state, "version": 1},
        "epoch": epoch,
        "metrics": {**epoch, "metrics": {"hits@10": 0.5}},
        "compiled": collections.OrderedDict((f"_orig_mod.{key}", value) for key, value in state.items()),
        "distributed": {"state_dict": {f"module._orig_mod.{key}": value for key, value in state.items()}},
    }


@pytest.mark.parametrize("shape", ["bare", "config", "version", "epoch", "metrics", "compiled", "distributed"])
def test_the_original_conve_is_loaded_from_every_shape_of_model_pt(tmp_path, shape):
    theirs = shaken(Original())
    optimizer = torch.optim.Adam(theirs.parameters(), lr=2e-4).state_dict()
    path = save(tmp_path, shapes_of_model_pt(theirs.state_dict(), optimizer)[shape])
    layout = checkpoints.read_layout(path)
    assert (layout.image, layout.stack, layout.channels, layout.kernel) == ((3, 4), "width", 2, (3, 3))
    assert not layout.has_bias
    assert layout.learning_rate.value == (2e-4 if shape in ("epoch", "metrics") else None)
    with torch.no_grad():
        ours = loaded(path, layout).scores(TRIPLES[:, 0], TRIPLES[:, 1])
        assert torch.allclose(ours, theirs(TRIPLES[:, 0], TRIPLES[:, 1]), atol=1e-6)


def test_pykeens_conve_is_stacked_by_height_and_has_a_bias_for_each_tail(tmp_path):
    path = save(tmp_path, {"model_state_dict": pykeen_model("conve").state_dict(), "config": {}})
    layout = checkpoints.read_layout(path)
    assert (layout.image, layout.stack, layout.has_bias) == ((3, 5), "height", True)
    assert checkpoints.load_checkpoint(path, layout)["bias"].shape == (N,) == layout.shapes["bias"]


def renamed(state, **names):
    """A state dict under other names: those of layers, or whole ones."""
    found = {}
    for key, value in state.items():
        layer, _, rest = key.partition(".")
        found[names[key] if key in names else f"{names.get(layer, layer)}.{rest}"] = value
    return found


def test_a_checkpoint_that_the_replaced_system_converted_keeps_its_images_side_by_side(tmp_path):
    """Its names are PyKEEN's but for one, its model is not."""
    layers = {"bn0": "hr2d.0", "conv1": "hr2d.2", "bn1": "hr2d.3", "fc": "hr1d.0", "bn2": "hr1d.1"}
    state = renamed(
        Original().state_dict(),
        **{layer: f"interaction.{name}" for layer, name in layers.items()},
        entity_embeddings="entity_representations.0._embeddings",
        relation_embeddings="relation_representations.0._embeddings",
    )
    layout = checkpoints.read_layout(save(tmp_path, state))
    assert (layout.stack, layout.inverse, layout.has_bias) == ("width", "appended", False)


def test_the_paper_authors_conve_is_recognised(tmp_path):
    """An image of 3 x 5, one above the other: 2 channels of 4 x 3."""
    state = renamed(Original((3, 5)).state_dict(), entity_embeddings="emb_e", relation_embeddings="emb_rel")
    state |= {"fc.weight": torch.zeros(15, 24), "b": torch.zeros(N)}
    layout = checkpoints.read_layout(save(tmp_path, state))
    assert (layout.image, layout.stack, layout.inverse, layout.has_bias) == ((3, 5), "height", None, True)


@pytest.mark.parametrize("architecture", OURS)
def test_our_own_checkpoints_say_what_they_are(tmp_path, architecture):
    options = {"image": (3, 4), "channels": 2, "stack": "width"} if architecture == "conve" else {}
    options |= {"norm": 2} if architecture == "transe" else {}
    model = shaken(OURS[architecture](N, 2 * R, 12, **options))
    config = {"model": architecture, "inverse": "appended", "loss": "bce-1n", "label_smoothing": 0.1}
    config |= {"embedding_height": 3, "embedding_width": 4, "stack": "width"} if architecture == "conve" else {}
    config |= {"norm": 2} if architecture == "transe" else {}
    path = save(tmp_path, {"model_state_dict": model.state_dict(), "model_config": config})
    layout = layouts.check(checkpoints.read_layout(path), path, ENTITIES, RELATIONS)
    assert (layout.architecture, layout.inverse, layout.embedding_dim) == (architecture, "appended", 12)
    assert (layout.loss, layout.told["label_smoothing"]) == ("bce-1n", 0.1)
    assert layout.norm == (2 if architecture == "transe" else None)
    with torch.no_grad():
        found = loaded(path, layout).scores(TRIPLES[:, 0], TRIPLES[:, 1])
        assert torch.equal(found, model.scores(TRIPLES[:, 0], TRIPLES[:, 1]))


# What the shapes leave open


def ambiguous(**content):
    """Embeddings of 200 numbers whose fc layer fits two images: 20 x 10 and 5 x 40, one above the other."""
    state = {key: Shape(tuple(value.shape), "float32") for key, value in pykeen_model("conve").state_dict().items()}
    sizes = {"entity_representations.0": (N, 200), "relation_representations.0": (R, 200)}
    state |= {f"{name}._embeddings.weight": Shape(shape, "float32") for name, shape in sizes.items()}
    state["interaction.hr1d.0.weight"] = Shape((200, 2 * 38 * 8), "float32")
    state |= {f"interaction.hr1d.2.{kind}": Shape((200,), "float32") for kind in ("weight", "bias")}
    state |= {f"interaction.hr1d.2.running_{kind}": Shape((200,), "float32") for kind in ("mean", "var")}
    state["interaction.hr1d.0.bias"] = Shape((200,), "float32")
    return {"model_state_dict": state, **content}


def test_an_ambiguous_reshape_is_refused_with_its_candidates():
    with pytest.raises(SlurmGPUError, match=r"model\.pt: 5×40 and 20×10 all fit the 608 inputs .* Set image to"):
        layouts.recognise(ambiguous(), "model.pt")


def test_an_ambiguous_reshape_is_what_the_setting_says_or_else_the_config():
    told = ambiguous(config={"embedding_height": 20, "embedding_width": 10})
    assert layouts.recognise(told, "model.pt").image == (20, 10)
    assert layouts.recognise(told, "model.pt", image=[5, 40]).image == (5, 40)
    assert layouts.recognise(ambiguous(), "model.pt", image=[5, 40]).image == (5, 40)


def test_an_image_that_does_not_fit_is_refused_with_what_does():
    with pytest.raises(SlurmGPUError, match=r"an image of 8×25 does not fit .* Images that fit: 5×40 and 20×10"):
        layouts.recognise(ambiguous(), "model.pt", image=[8, 25])
    # The images of train_pytorch.py under PyKEEN's names: 32 · 8 · 38.
    with pytest.raises(SlurmGPUError, match=r'an image of 10×20 does not fit .* It fits with stack = "width"'):
        layouts.recognise(ambiguous(model_config={"embedding_height": 10, "embedding_width": 20}), "model.pt")


@pytest.mark.parametrize("architecture", ["distmult", "complex", "transe"])
def test_two_tables_alone_do_not_say_which_model_they_are(tmp_path, architecture):
    path = save(tmp_path, pykeen_model(architecture).state_dict())
    with pytest.raises(SlurmGPUError, match=r"as DistMult, ComplEx and TransE have. Set architecture"):
        checkpoints.read_layout(path)


def test_the_norm_of_transe_is_told_or_set_and_never_guessed(tmp_path):
    state = pykeen_model("transe").state_dict()
    path = save(tmp_path, state)
    with pytest.raises(SlurmGPUError, match=r"does not say which norm .* PyKEEN's default is 1"):
        checkpoints.read_layout(path, architecture="transe")
    assert checkpoints.read_layout(path, architecture="transe", norm=2).norm == 2
    path = save(tmp_path, {"state_dict": state, "config": {"norm": 2}})
    assert checkpoints.read_layout(path, architecture="transe").norm == 2
    assert checkpoints.read_layout(path, architecture="transe", norm=1).norm == 1
    with pytest.raises(SlurmGPUError, match=r"is read as distmult. Remove norm"):
        checkpoints.read_layout(path, architecture="distmult", norm=1)


@pytest.mark.parametrize(
    ("rows", "implied", "setting", "found"),
    [
        (3, "interleaved", None, "none"),
        (3, None, "none", "none"),
        (6, "interleaved", None, "interleaved"),
        (6, "appended", None, "appended"),
        (6, "interleaved", "appended", "appended"),
        (6, None, None, "half of the rows are inverse relations, and the checkpoint does not say which. Set inverse"),
        (6, "none", None, "half of the rows are inverse relations, and the checkpoint does not say which. Set inverse"),
        (5, "interleaved", None, "model.pt has 5 relation rows, and rel_dict.txt has ids for 3; expected"),
        (3, "interleaved", "appended", 'no inverse relations, but inverse is "appended". Remove inverse'),
        (6, "interleaved", "none", 'has 6 relation rows, .* but inverse is "none". Set it to "interleaved"'),
        (5, None, "none", "model.pt has 5 relation rows, and rel_dict.txt has ids for 3; expected the same"),
    ],
)
def test_where_inverse_relations_lie_is_known_or_refused(rows, implied, setting, found):
    layout = checkpoints.Layout("distmult", N, rows, 4, {}, inverse=implied)
    if found in ("none", "interleaved", "appended"):
        assert layouts.check(layout, "model.pt", ENTITIES, RELATIONS, setting).inverse == found
    else:
        with pytest.raises(SlurmGPUError, match=found):
            layouts.check(layout, "model.pt", ENTITIES, RELATIONS, setting)


def test_a_table_of_entities_that_does_not_fit_the_dictionary_is_refused_with_both_numbers():
    layout = checkpoints.Layout("distmult", N + 1, R, 4, {})
    with pytest.raises(SlurmGPUError, match=r"model.pt has 8 entity rows, and the ids of node_dict.txt need 7\."):
        layouts.check(layout, "model.pt", ENTITIES, RELATIONS)


def without(content, *keys):
    return {key: value for key, value in content.items() if key not in keys}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"extra.weight": torch.zeros(3)}, "also has extra.weight, which ConvE does not have"),
        (lambda s: without(s, "bn1.running_var"), "found no bn1.running_var"),
        (lambda s: s | {"bn2.weight": torch.zeros(5)}, r"expected bn2.weight of shape \(12,\), .*, found \(5,\)"),
        (lambda s: s | {"fc.weight": torch.zeros(12, 13)}, "no image fits the 13 inputs of fc for embeddings of 12"),
        (lambda s: s | {"conv1.weight": torch.zeros(2, 2, 3, 3)}, r"expected a convolution \(channels, 1, height"),
        (lambda s: without(s, "entity_embeddings.weight"), "expected the tables of entities and relations"),
        (lambda s: {"weights": s}, "expected a model's state dict, or one under .*, found weights"),
        (lambda s: {}, "found nothing"),
    ],
)
def test_a_model_of_which_a_part_would_be_left_out_or_is_missing_is_refused(tmp_path, change, message):
    path = save(tmp_path, change(dict(Original().state_dict())))
    with pytest.raises(SlurmGPUError, match=f"{re.escape(str(path))}.*{message}"):
        checkpoints.read_layout(path)


def test_a_conve_is_no_other_architecture(tmp_path):
    path = save(tmp_path, Original().state_dict())
    with pytest.raises(SlurmGPUError, match='holds a ConvE, and architecture is "transe"'):
        checkpoints.read_layout(path, architecture="transe")


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    state = Original().state_dict()
    state["fc.bias"][3] = float("nan")
    path = save(tmp_path, state)
    with pytest.raises(SlurmGPUError, match=r"fc\.bias has values that are not finite"):
        checkpoints.load_checkpoint(path, checkpoints.read_layout(path))


# Files


def shapes(content):
    """The same with a Shape for each tensor."""
    if isinstance(content, torch.Tensor):
        return Shape(tuple(content.shape), str(content.dtype).removeprefix("torch."))
    if isinstance(content, dict):
        return {key: shapes(value) for key, value in content.items()}
    return [shapes(value) for value in content] if isinstance(content, list) else content


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_peeking_tells_what_torch_would(tmp_path, protocol):
    model = Original()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    model(TRIPLES[:, 0], TRIPLES[:, 1]).sum().backward()
    optimizer.step()
    content = shapes_of_model_pt(model.state_dict(), optimizer.state_dict())["metrics"]
    content["others"] = {
        "parameter": nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)),
        "half": torch.zeros(3, dtype=torch.bfloat16),
        "new": torch.zeros(4, dtype=torch.uint16),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
    }
    found = peek(save(tmp_path, content, pickle_protocol=protocol))
    expected = shapes(content)
    expected["others"] |= {"dtype": "float16", "size": (1, 2)}
    assert found == expected


def test_planning_a_checkpoint_imports_no_torch(tmp_path):
    path = save(tmp_path, Original().state_dict())
    code = (
        f"import sys; from slurmgpu.workloads.tracin.kge import checkpoints, graph, hop_filter; "
        f"print(checkpoints.read_layout({str(path)!r}).architecture, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["conve", "False"]


def test_a_file_of_an_older_pytorch_is_read_by_pytorch(tmp_path):
    theirs = shaken(Original())
    path = save(tmp_path, theirs.state_dict(), _use_new_zipfile_serialization=False)
    assert peek(path) is None
    layout = checkpoints.read_layout(path)
    assert torch.equal(checkpoints.load_checkpoint(path, layout)["fc.weight"], theirs.fc.weight)


class Evil:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("content", [Evil(), {"model_state_dict": {}, "extra": Evil()}])
def test_nothing_in_a_file_is_run(tmp_path, capsys, content, zipped):
    path = save(tmp_path, content, _use_new_zipfile_serialization=zipped)
    with pytest.raises(SlurmGPUError, match=r"loading that could run code from the file; expected only weights"):
        checkpoints.read_layout(path)
    assert "ran" not in capsys.readouterr().out


def test_a_whole_pickled_model_is_refused_with_what_to_do(tmp_path):
    path = save(tmp_path, pykeen_model("distmult"))
    with pytest.raises(SlurmGPUError, match=r"holds an object of pykeen\..*weights_only=False.*model.state_dict\(\)"):
        checkpoints.read_layout(path)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    whole = save(tmp_path, Original().state_dict()).read_bytes()
    path = tmp_path / "other.pt"
    older = save(tmp_path, Original().state_dict(), _use_new_zipfile_serialization=False).read_bytes()
    cut = [content[: len(content) // 2] for content in (whole, older)]
    for content in (*cut, b"version https://git-lfs", b"", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(SlurmGPUError, match=r"other\.pt is not a complete PyTorch checkpoint"):
            checkpoints.read_layout(path)
    path.write_bytes(whole.replace(b"torch._utils", b"torch._utilz"))
    with pytest.raises(SlurmGPUError, match=r"other\.pt"):
        checkpoints.read_layout(path)
    torch.save(torch.zeros(3), path)
    with pytest.raises(SlurmGPUError, match=r"holds a tensor, and loading"):
        checkpoints.read_layout(path)
    with pytest.raises(SlurmGPUError, match=r"Cannot read .*: No such file"):
        checkpoints.read_layout(tmp_path / "nothing.pt")


# Adam's weights


def trained(optimizer_of, n_steps=3):
    """A model after steps of an optimizer, its optimizer, and what the last step did: the gradients, the changes."""
    model = Original().train()
    optimizer = optimizer_of(model)
    for _ in range(n_steps):
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        optimizer.zero_grad()
        (model(TRIPLES[:, 0], TRIPLES[:, 1]) ** 2).sum().backward()
        optimizer.step()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    changes = {name: value.detach() - before[name] for name, value in model.named_parameters()}
    content = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    return content, gradients, changes


def halves(model):
    named = list(model.named_parameters())
    return [{"params": named[:5]}, {"params": named[5:]}]


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.0, 0.9)),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.0, 0.9), eps=1e-3, amsgrad=True),
        lambda model: torch.optim.Adam(reversed(list(model.named_parameters())), lr=0.01, betas=(0.0, 0.9)),
        lambda model: torch.optim.Adam(halves(model)[::-1], lr=0.01, betas=(0.0, 0.9)),
    ],
    ids=["adam", "amsgrad", "named in another order", "named in two groups"],
)
def test_adams_weights_are_what_a_step_multiplies_gradients_by(tmp_path, optimizer_of):
    content, gradients, changes = trained(optimizer_of)
    path = save(tmp_path, content)
    layout = checkpoints.read_layout(path)
    weights = checkpoints.adam_weights(path, layout)
    assert weights.keys() == {name for name in layout.names if "running" not in name}
    for name, weight in weights.items():
        key = layout.names[name]
        expected = -changes[key] / 0.01
        assert torch.allclose(weight * gradients[key].double(), expected.double(), rtol=1e-3, atol=1e-3), name


def test_adams_weights_of_pykeen_models_have_our_shapes(tmp_path):
    model = pykeen_model("complex")
    optimizer = torch.optim.Adam(model.parameters())
    model.score_hrt(TRIPLES).sum().backward()
    optimizer.step()
    path = save(tmp_path, {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()})
    layout = checkpoints.read_layout(path, architecture="complex")
    found = checkpoints.adam_weights(path, layout)
    assert {name: tuple(weight.shape) for name, weight in found.items()} == layout.shapes
    moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    seen = 1 / ((moment / 0.001).sqrt() + 1e-8)
    assert torch.allclose(found["entity"].float(), torch.cat([seen[:, 0::2], seen[:, 1::2]], 1), rtol=1e-4)


def test_a_checkpoint_of_pykeens_training_loop_is_read_without_its_random_state(tmp_path):
    factory = CoreTriplesFactory(TRIPLES, num_entities=N, num_relations=R)
    model = DistMult(triples_factory=factory, random_seed=0, embedding_dim=6)
    loop = SLCWATrainingLoop(
        model=model, triples_factory=factory, optimizer=torch.optim.Adam(model.parameters(), lr=0.02)
    )
    loop.train(
        factory,
        num_epochs=1,
        use_tqdm=False,
        pin_memory=False,
        checkpoint_name="ours.pt",
        checkpoint_directory=tmp_path,
        checkpoint_frequency=0,
    )
    path = tmp_path / "ours.pt"
    assert checkpoints.read_layout(path, architecture="distmult").learning_rate.value == 0.02
    layout = checkpoints.read_layout(path, architecture="distmult")
    tables = {name: getattr(model, f"{name}_representations")[0]() for name in ("entity", "relation")}
    found = checkpoints.load_checkpoint(path, layout)
    assert all(torch.equal(found[name], table) for name, table in tables.items())
    assert checkpoints.adam_weights(path, layout).keys() == tables.keys()


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_what_numpy_wrote_is_left_out_but_for_numbers(tmp_path, protocol):
    content = {
        "state_dict": Original().state_dict(),
        "config": {"learning_rate": np.float64(0.25), "image": [3, 4]},
        "others": [np.arange(3), np.array([[1.5]], order="F"), np.array(["a", None], dtype=object), np.dtype("f4")],
    }
    path = save(tmp_path, content, pickle_protocol=protocol)
    assert checkpoints.read_layout(path).learning_rate.value == 0.25
    for found in (peek(path), checkpoints.read_content(path)):
        assert {type(other).__name__ for other in found["others"]} == {"LeftOut"}


def two_groups(model):
    named = [value for _, value in model.named_parameters()]
    return torch.optim.Adam([{"params": named[:5]}, {"params": named[5:]}])


@pytest.mark.parametrize(
    ("optimizer_of", "message"),
    [
        (two_groups, "the optimizer has 2 parameter groups without parameter names"),
        (lambda model: torch.optim.Adam(list(model.parameters())[1:]), "the optimizer has 11 parameters"),
        (lambda model: torch.optim.Adam(list(model.parameters())[::-1]), "expected a second moment of Adam for"),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "expected a second moment of Adam"),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "has no optimizer_state_dict with a state"),
    ],
)
def test_an_optimizer_that_cannot_be_matched_is_refused(tmp_path, optimizer_of, message):
    path = save(tmp_path, trained(optimizer_of)[0])
    with pytest.raises(SlurmGPUError, match=message):
        checkpoints.adam_weights(path, checkpoints.read_layout(path))


def test_a_layout_can_be_compared(tmp_path):
    """Planning compares those of several checkpoints."""
    path = save(tmp_path, Original().state_dict())
    layout = checkpoints.read_layout(path)
    assert layout == checkpoints.read_layout(path) != replace(layout, image=(4, 3))
