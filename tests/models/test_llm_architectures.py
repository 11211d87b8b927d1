"""Architectures with other caches, masks or positions than Llama's: all is as the model says of each prompt alone."""

import json

import numpy as np
import pytest
import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Passage, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.transformers_engine.loading import load_model
from tests.support.tiny_models import CHARACTERS, SPECIAL, _save, make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ("12+3=15", "a", "they are kind", "all of them were here", "we sing: 7", "47+85=")
CHOICES = ("yes", " no", "maybe so")
SHARED = "a rubric that all of the prompts begin with: "

SIZES = {"vocab_size": len(SPECIAL) + len(CHARACTERS), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def make(name, folder, **changes):
    """A random model of an architecture, whose weights are large enough for what it says to depend on its prompt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **changes)).float().eval()
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim >= 2 and float(each.std()) < 0.1:
                each.normal_(0, 0.25)
    return _save(model, folder, None)


def engine(folder, **options):
    return open_engine(EngineOptions(find_model(str(folder)), precision="fp32", **options), Place("cpu"))


def assert_as_alone(ours, prompts, most=(12, 3, 8)):
    """Answers, scores of choices and likelihoods are those of bare forward passes over one text each."""
    tokenizer, model = ours._loaded.tokenizer, ours._loaded.model

    def said(prompt, answer):
        """The log-probabilities behind each token of the prompt and the answer, from the prompt's last on."""
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1)[len(prompt) - 1 : -1]

    ids = [tokenizer(text)["input_ids"] for text in prompts]
    limits = [most[place % len(most)] for place in range(len(prompts))]
    asked = [Request(i, Prompt(text), Sampling(max_tokens=limits[i], logprobs=True)) for i, text in enumerate(prompts)]
    for output in ours.generate(asked):
        assert output.error is None
        tokens = output.tokens.tolist()
        expected = said(ids[output.id], tokens)
        own = expected[range(len(tokens)), tokens]
        np.testing.assert_allclose(output.logprobs, own, atol=1e-4)
        assert float((expected.amax(-1) - own).max()) < 1e-4
        assert len(tokens) == limits[output.id] or tokens[-1] == SIZES["eos_token_id"]
    for scores in ours.score([Question(i, Prompt(text), CHOICES) for i, text in enumerate(prompts)]):
        assert scores.error is None
        for choice, logprob in zip(CHOICES, scores.logprobs, strict=True):
            tokens = tokenizer(choice, add_special_tokens=False)["input_ids"]
            assert float(said(ids[scores.id], tokens)[range(len(tokens)), tokens].sum()) == pytest.approx(
                logprob, abs=1e-4
            )
    for found in ours.likelihoods([Passage(i, Prompt(text)) for i, text in enumerate(prompts)]):
        assert found.error is None
        first, *rest = ids[found.id]
        np.testing.assert_allclose(found.logprobs, said([first], rest)[range(len(rest)), rest], atol=1e-4)


# Recurrent states.

MAMBA = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mamba", {}),
        pytest.param(
            "mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}, marks=pytest.mark.nightly
        ),
        pytest.param("falcon_mamba", {}, marks=pytest.mark.nightly),
    ],
)
def test_a_model_whose_cache_has_another_name_goes_on_from_its_state(tmp_path, name, sizes):
    ours = engine(make(name, tmp_path, **MAMBA, **sizes))
    assert_as_alone(ours, PROMPTS)
    assert_as_alone(ours, [SHARED + text for text in PROMPTS[:3]])


def test_a_model_without_a_cache_is_refused_with_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "openai-gpt"}))
    with pytest.raises(SlurmGPUError, match=r"has the type openai-gpt, whose cache the engine .* \"vllm\" may"):
        engine(tmp_path)
    folder = make_llama(tmp_path / "llama")
    from transformers import LlamaForCausalLM

    def forward(self, input_ids=None, attention_mask=None, **more):
        raise AssertionError

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(SlurmGPUError, match=r"is a LlamaForCausalLM, whose forward pass takes no cache"):
        load_model(EngineOptions(find_model(str(folder)), precision="fp32"), Place("cpu"))
