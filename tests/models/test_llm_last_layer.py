"""The last layer, computed only for the tokens whose logits are asked for."""

import numpy as np
import pytest
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.engine import Passage, Prompt, Question, Request, Sampling
from tests.support.engines import engine
from tests.support.tiny_models import make_gpt_oss, make_llama, make_qwen3

CHOICES = ("yes", "yesterday", "no", "12", "13")
PROMPTS = ["of unequal length", "a", "some words", "a longer prompt than the others", "of unequal length"]
N_LAYERS = 2

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


def answers(ours):
    requests = [Request(i, Prompt(text), Sampling(max_tokens=4)) for i, text in enumerate(PROMPTS)]
    found = {each.id: each.tokens.tolist() for each in ours.generate(requests)}
    return [found[i] for i in range(len(PROMPTS))]


def scores(ours):
    found = {
        each.id: each.logprobs for each in ours.score([Question(i, Prompt(t), CHOICES) for i, t in enumerate(PROMPTS)])
    }
    return np.array([found[i] for i in range(len(PROMPTS))])


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("make", [make_llama, make_qwen3])
def test_answers_and_scores_are_those_of_a_whole_last_layer(tmp_path, make, packs):
    folder = make(tmp_path / "model")
    ours, whole = engine(folder), engine(folder)
    assert ours._prefill._last_layer is not None
    whole._prefill._last_layer = None
    for each in (ours, whole):
        each._prefill._can_pack = packs
    assert answers(ours) == answers(whole)
    np.testing.assert_allclose(scores(ours), scores(whole), atol=2e-5)


def test_the_last_layer_computes_no_token_whose_logits_nobody_asks_for(llama):
    ours, seen = engine(llama), [[] for _ in range(N_LAYERS)]
    for layer, shapes in zip(ours._loaded.model.model.layers, seen, strict=True):
        layer.mlp.gate_proj.register_forward_hook(lambda _, inputs, __, to=shapes: to.append(inputs[0].shape[1]))
    different = [*dict.fromkeys(PROMPTS)]
    n_tokens = sum(len(ours._loaded.tokenizer(text)["input_ids"]) for text in different)
    list(ours.generate([Request(i, Prompt(text), Sampling(max_tokens=1)) for i, text in enumerate(PROMPTS)]))
    assert seen == [[n_tokens], [len(different)]]
    for shapes in seen:
        shapes.clear()
    # All tokens of a text are asked for.
    list(ours.likelihoods([Passage(0, Prompt("some words"))]))
    assert seen[0] == seen[1]


def test_a_model_whose_last_layer_mixes_tokens_computes_all_of_it_and_is_refused(llama, monkeypatch, caplog):
    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x.cumsum(1)))
    # A cache does not have what it mixes.
    with (
        caplog.at_level("INFO"),
        pytest.raises(SlurmGPUError, match="computes other logits for a token after its cache"),
    ):
        engine(llama)
    assert "LlamaForCausalLM: computing its last layer for all tokens: logits are off by" in caplog.text


def test_a_model_that_reads_other_tokens_behind_its_last_layer_computes_all_of_it(llama, monkeypatch, caplog):
    """However little it reads, as Inkling's convolutions do in 16 bits."""
    own = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: own(self, x + 1e-9 * x.roll(1, 1)))
    with caplog.at_level("INFO"):
        assert engine(llama)._prefill._last_layer is None
    assert "computing its last layer for all tokens: logits are off by nan" in caplog.text


def test_a_model_whose_last_layer_gives_something_else_computes_all_of_it(tmp_path, caplog):
    with caplog.at_level("INFO"):
        assert engine(make_gpt_oss(tmp_path))._prefill._last_layer is None
    assert "GptOssForCausalLM: computing its last layer for all tokens: AttributeError" in caplog.text
