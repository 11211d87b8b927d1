"""Texts that are read one behind the other in one row, without padding."""

import random

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from slurmgpu.llm.interface.engine import Passage, Prompt, Question, Request, Sampling
from slurmgpu.llm.transformers_engine import packing
from tests.support.engines import engine, with_seen_shapes
from tests.support.tiny_models import CHARACTERS, _save, _sizes, make_gpt_oss, make_llama, make_qwen3

WINDOW = 24
SHARED = "a rubric that all of the prompts begin with: "
CHOICES = ("yes", "yesterday", "no", "12", "13")


def make_sliding(folder):
    """A model whose layers look back through a window."""
    torch.manual_seed(0)
    config = MistralConfig(**_sizes(), initializer_range=0.3, sliding_window=WINDOW)
    return _save(MistralForCausalLM(config), folder, None)


MAKERS = {"llama": make_llama, "qwen3": make_qwen3, "sliding": make_sliding}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: make(base / name) for name, make in MAKERS.items()}


def texts(n_texts, most, shared=""):
    rng = random.Random(0)
    return [shared + "".join(rng.choices(CHARACTERS, k=rng.randint(1, most))) for _ in range(n_texts)]


def asked_of(ours, prompts):
    """All that an engine says about prompts: answers, scores of choices of several tokens, and likelihoods."""
    requests = [Request(i, Prompt(text), Sampling(max_tokens=5), i) for i, text in enumerate(prompts)]
    answers = {each.id: each.tokens.tolist() for each in ours.generate(requests)}
    questions = [Question(i, Prompt(text), CHOICES) for i, text in enumerate(prompts)]
    scores = {each.id: each.logprobs for each in ours.score(questions)}
    likelihoods = {
        each.id: each.logprobs for each in ours.likelihoods([Passage(i, Prompt(t)) for i, t in enumerate(prompts)])
    }
    return [(answers[i], scores[i], likelihoods[i]) for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("name", "most", "shared"),
    [("llama", 40, ""), ("llama", 20, SHARED), ("qwen3", 20, ""), ("sliding", 20, ""), ("sliding", 60, "")],
)
def test_texts_behind_each_other_are_what_they_are_as_rows(folders, name, most, shared):
    prompts = texts(9, most, shared)
    prompts.append(prompts[0])
    ours, padded = engine(folders[name]), engine(folders[name])
    assert ours._prefill._can_pack
    padded._prefill._can_pack = False
    for found, expected in zip(asked_of(ours, prompts), asked_of(padded, prompts), strict=True):
        assert found[0] == expected[0]
        np.testing.assert_allclose(found[1], expected[1], atol=2e-5)
        np.testing.assert_allclose(found[2], expected[2], atol=2e-5)


def test_no_token_is_computed_that_is_not_asked_for(folders, monkeypatch):
    ours = engine(folders["llama"])
    prompts = texts(6, 40)
    n_tokens = [len(ours._loaded.tokenizer(text)["input_ids"]) for text in prompts]
    seen = with_seen_shapes(ours, monkeypatch)
    list(ours.generate([Request(i, Prompt(text), Sampling(max_tokens=1)) for i, text in enumerate(prompts)]))
    assert seen == [(1, sum(n_tokens))]
    seen.clear()
    # Of "yes", "yesterday", "12" and "13" all but the last characters; two begin with 1.
    list(ours.score([Question(i, Prompt(text), CHOICES) for i, text in enumerate(prompts)]))
    assert seen == [(1, sum(n_tokens) + len(prompts) * (2 + 8 + 1 + 1))]
    seen.clear()
    list(ours.likelihoods([Passage(i, Prompt(text)) for i, text in enumerate(prompts)]))
    assert seen == [(1, sum(n_tokens) - len(prompts))]


def test_a_text_longer_than_the_window_is_a_row(folders, monkeypatch):
    ours = engine(folders["sliding"])
    seen = with_seen_shapes(ours, monkeypatch)
    list(ours.score([Question(0, Prompt("1" * 40), CHOICES), Question(1, Prompt("1" * 38), CHOICES)]))
    assert seen[0] == (2, 41)


def test_a_model_without_its_own_attention_in_a_pack_is_padded(folders, monkeypatch):
    monkeypatch.setattr(packing, "ATTENTION", "sdpa")  # which knows nothing of the texts of a row
    assert not engine(folders["llama"])._prefill._can_pack


def test_a_model_whose_attention_is_its_own_is_padded(tmp_path):
    assert not engine(make_gpt_oss(tmp_path))._prefill._can_pack


def test_many_texts_are_several_packs(folders, monkeypatch):
    monkeypatch.setattr("slurmgpu.llm.interface.batching.PACK_TOKENS", 50)
    prompts, ours = texts(12, 30), engine(folders["llama"])
    expected = asked_of(engine(folders["llama"], batch_tokens=1), prompts)
    seen = with_seen_shapes(ours, monkeypatch)
    for found, alone in zip(asked_of(ours, prompts), expected, strict=True):
        assert found[0] == alone[0]
        np.testing.assert_allclose(found[1], alone[1], atol=2e-5)
        np.testing.assert_allclose(found[2], alone[2], atol=2e-5)
    packs = [n_columns for n_rows, n_columns in seen if n_rows == 1]
    assert len(packs) > 6
    assert max(packs) <= 50
