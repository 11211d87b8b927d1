"""Quantised variants: the package that makes each, what they cost in quality, and what cannot be had."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

pytest.importorskip("transformers")


from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Place, Prompt, Question
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.transformers_engine import quantization
from slurmgpu.llm.transformers_engine.quantization import package_for, quantization_config
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

LETTERS = ("1", "2", "3", "a", "b", "=")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    # Wide enough for nf4's blocks of 64, with weights as small as real ones.
    return make_llama(tmp_path_factory.mktemp("models") / "llama", hidden_size=128, intermediate_size=256)


def options(name, precision="fp32"):
    return EngineOptions(find_model(str(name)), precision=precision)


def scores(engine):
    questions = [Question(number, Prompt(f"{number}+{number}="), LETTERS) for number in range(8)]
    return np.stack([each.logprobs for each in sorted(engine.score(questions), key=lambda each: each.id)])


@pytest.fixture(scope="module")
def exact(llama):
    engine = open_engine(options(llama), Place("cpu"))
    yield scores(engine)
    engine.close()


@pytest.mark.parametrize(
    ("suffix", "package", "kind", "bytes_a_weight", "error"),
    [
        ("-8bit", "bitsandbytes", "Int8Params", 1, 0.35),
        ("-4bit", "bitsandbytes", "Params4bit", 0.5, 2.0),
        ("-fp8", "torchao", "Float8Tensor", 1, 1.0),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_suffix_makes_weights_smaller_and_answers_little_worse(
    llama, exact, suffix, package, kind, bytes_a_weight, error, precision
):
    pytest.importorskip(package)
    engine = open_engine(options(f"{llama}{suffix}", precision), Place("cpu"))
    weight = engine._loaded.model.model.layers[0].mlp.up_proj.weight
    assert type(weight).__name__ == kind
    stored = weight.qdata if kind == "Float8Tensor" else weight
    assert stored.numel() * stored.element_size() == bytes_a_weight * 128 * 256
    found = scores(engine)
    assert np.abs(found - exact).mean() < error * exact.std()
    assert np.abs(found - exact).max() > 0, "nothing was quantised"
    engine.close()


@pytest.mark.parametrize(
    ("variant", "tensor_parallel", "package"),
    [
        ("8bit", False, "bitsandbytes"),
        ("4bit", False, "bitsandbytes"),
        ("fp8", False, "torchao"),
        ("8bit", True, "torchao"),
        ("fp8", True, "torchao"),
        ("4bit", True, None),
    ],
)
def test_which_package_makes_a_variant(variant, tensor_parallel, package):
    assert package_for(variant, tensor_parallel=tensor_parallel) == package


def test_a_model_as_it_is_needs_no_package(llama, monkeypatch):
    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda name: None)
    assert quantization_config(options(llama), Place("cpu")) is None


def test_four_bits_cannot_be_split_over_processes(llama):
    with pytest.raises(
        SlurmGPUError, match=r'cannot be split over 2 processes\. Use the -8bit variant, or processes = "one"'
    ):
        quantization_config(options(f"{llama}-4bit"), Place("cpu", world_size=2))


@pytest.mark.parametrize(
    ("suffix", "world_size", "package"),
    [("-8bit", 1, "bitsandbytes"), ("-8bit", 2, "torchao"), ("-4bit", 1, "bitsandbytes"), ("-fp8", 1, "torchao")],
)
def test_an_image_without_the_package_is_told_its_name(llama, monkeypatch, suffix, world_size, package):
    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SlurmGPUError, match=f"needs the Python package {package}.*`pip install {package}`"):
        quantization_config(options(f"{llama}{suffix}"), Place("cpu", world_size=world_size))


def test_what_is_quantised_already_is_loaded_as_it_is(llama, tmp_path):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert quantization_config(options(tmp_path), Place("cpu")) is None


def test_eight_bits_share_batches_of_texts_of_unequal_length_also_from_a_checkpoint(tmp_path):
    pytest.importorskip("bitsandbytes")
    import torch
    from transformers import LlamaForCausalLM

    folder = make_llama(tmp_path / "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=8)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim == 2:
                each.normal_(0, 0.15, generator=torch.Generator().manual_seed(0))
        for layer in model.model.layers:  # a large feature, as trained models have
            layer.input_layernorm.weight[7] = layer.post_attention_layernorm.weight[7] = 8
    model.save_pretrained(folder)
    rows = [(3, 11, 5, 7, 2, 13, 9, 12), (4, 6, 8), (8, 2, 5, 14)]
    stored = tmp_path / "stored"
    for source in (f"{folder}-8bit", stored):
        engine = open_engine(options(source), Place("cpu"))
        with torch.inference_mode():
            beside = engine._prefill._read_rows(rows, (), 0, has_padding=True).logits[1]
            alone = engine._prefill._read_rows(rows[1:2], (), 0, has_padding=False).logits[0]
        assert float((beside - alone).abs().max()) > 1e-3, "neighbours change nothing"
        assert engine._prefill.takes_padding
        if source != stored:
            engine._loaded.model.save_pretrained(stored)
            engine._loaded.tokenizer.save_pretrained(stored)
        engine.close()


def test_no_version_is_allowed_that_transformers_refuses():
    from transformers.dependency_versions_table import deps
    from transformers.utils import import_utils

    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    tables = [re.search(rf"^{extra} = (\[.*\])$", project, re.MULTILINE)[1] for extra in ("llm", "quantized")]
    allowed = [Requirement(text) for table in tables for text in re.findall(r'"(.+?)"', table)]
    [torch] = Requirement(deps["torch"]).specifier
    needed = {
        "accelerate": import_utils.ACCELERATE_MIN_VERSION,
        "bitsandbytes": import_utils.BITSANDBYTES_MIN_VERSION,
        "torch": torch.version,
        "torchao": import_utils.TORCHAO_MIN_VERSION,
    }
    found = {each.name for each in allowed}
    assert needed.keys() <= found
    too_old = {
        f"{each} before {needed[each.name]}"
        for each in allowed
        for bound in each.specifier
        if each.name in needed and Version(bound.version) < Version(needed[each.name])
    }
    assert too_old == set()
