"""Architectures with other caches, masks or positions than Llama's: all is as the model says of each prompt alone."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.heads.engine import HeadEngine
from slurmgpu.llm.heads.head import HeadInput, read_head
from slurmgpu.llm.interface.engine import EngineOptions, Passage, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.prompts.structures import structure_of
from slurmgpu.llm.transformers_engine import caches
from slurmgpu.llm.transformers_engine.call_lengths import CallLengths
from slurmgpu.llm.transformers_engine.cuda_graphs import obstacle_to
from slurmgpu.llm.transformers_engine.loading import load_model
from tests.support.engines import engine, with_seen_shapes
from tests.support.tiny_heads import make_head
from tests.support.tiny_models import CHARACTERS, SPECIAL, _save, longrope, make_llama, make_phi3

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


def assert_as_alone(ours, prompts, most=(12, 3, 8)):
    """Answers, scores of choices and likelihoods are those of bare forward passes over one text each."""
    tokenizer, model = ours._loaded.tokenizer, ours._loaded.model

    def said(prompt, answer):
        """The log-probabilities from which each token of the answer comes, where all of them are read at once."""
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1)[len(prompt) - 1 :]

    ids = [tokenizer(text)["input_ids"] for text in prompts]
    limits = [most[place % len(most)] for place in range(len(prompts))]
    asked = [Request(i, Prompt(text), Sampling(max_tokens=limits[i], logprobs=True)) for i, text in enumerate(prompts)]
    # RecurrentGemma keeps its states in the model, which a pass in between would change.
    for output in list(ours.generate(asked)):
        assert output.error is None
        tokens = output.tokens.tolist()
        each = [said(ids[output.id] + tokens[:place], [token])[0] for place, token in enumerate(tokens)]
        own = np.array([float(logprobs[token]) for logprobs, token in zip(each, tokens, strict=True)])
        np.testing.assert_allclose(output.logprobs, own, atol=1e-4)
        assert all(float(logprobs.max()) < one + 1e-4 for logprobs, one in zip(each, own, strict=True))
        assert len(tokens) == limits[output.id] or tokens[-1] == SIZES["eos_token_id"]
    for scores in ours.score([Question(i, Prompt(text), CHOICES) for i, text in enumerate(prompts)]):
        assert scores.error is None
        for choice, logprob in zip(CHOICES, scores.logprobs, strict=True):
            tokens = tokenizer(choice, add_special_tokens=False)["input_ids"]
            expected = float(said(ids[scores.id], tokens)[range(len(tokens)), tokens].sum())
            assert logprob == pytest.approx(expected, abs=1e-4)
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
    with pytest.raises(SlurmGPUError, match=r"has the type openai-gpt, and the engine .* \"vllm\" may"):
        engine(tmp_path)
    folder = make_llama(tmp_path / "llama")
    from transformers import LlamaForCausalLM

    def without(self, input_ids=None, attention_mask=None):
        raise AssertionError

    def passing_on(self, input_ids=None, attention_mask=None, **more):
        return without(self, input_ids, attention_mask, **more)

    for forward in (without, passing_on):
        monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
        with pytest.raises(SlurmGPUError, match=r"is a LlamaForCausalLM, whose forward pass takes no cache"):
            load_model(EngineOptions(find_model(str(folder)), precision="fp32"), Place("cpu"))


def test_a_cache_among_the_keywords_of_a_forward_pass_is_used_or_the_model_refused(tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM, MambaForCausalLM

    class PassingOn(MambaForCausalLM):
        def forward(self, input_ids=None, **more):
            return super().forward(input_ids=input_ids, **more)

    assert caches.argument_of(object.__new__(PassingOn)) in ("cache_params", "cache")  # that of its parent
    folder, own = make_llama(tmp_path), LlamaForCausalLM.forward

    def passing_on(self, input_ids=None, **more):
        return own(self, input_ids=input_ids, **more)

    def ignoring(self, input_ids=None, attention_mask=None, past_key_values=None, **more):
        return own(self, input_ids=input_ids, attention_mask=attention_mask, **more)

    monkeypatch.setattr(LlamaForCausalLM, "forward", passing_on)
    assert_as_alone(engine(folder), PROMPTS[:3])
    monkeypatch.setattr(
        LlamaForCausalLM, "forward", lambda self, input_ids=None, **more: ignoring(self, input_ids, **more)
    )
    with pytest.raises(SlurmGPUError, match="LlamaForCausalLM computes other logits for a token after its cache"):
        engine(folder)


def test_a_model_that_fails_with_a_cache_is_refused_with_a_sentence(tmp_path, monkeypatch):
    """As those do whose caches are classes of the models' own."""
    from transformers import LlamaForCausalLM

    own = LlamaForCausalLM.forward

    def with_states(self, input_ids=None, past_key_values=None, **more):
        if past_key_values is not None:
            past_key_values.conv_cache  # noqa: B018
        return own(self, input_ids=input_ids, **more)

    folder = make_llama(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "forward", with_states)
    with pytest.raises(SlurmGPUError, match=r"fails with the cache of transformers 5\..* 'conv_cache'. Use a later"):
        engine(folder)


def test_a_model_that_is_wrong_behind_its_cache_is_refused_with_a_sentence(tmp_path, monkeypatch):
    folder = make("mamba", tmp_path, **MAMBA)
    monkeypatch.setattr(caches, "keyword_of", lambda model: "other")  # which it ignores
    with pytest.raises(SlurmGPUError, match=r"MambaForCausalLM computes other logits for a token after its cache"):
        engine(folder)


# Models in which padding, or a longer neighbour, changes what is said of a text.

GEMMA = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
GEMMA |= {"lru_width": 32, "attention_window_size": 12, "block_types": ["recurrent", "attention"]}
DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
DECODER |= {"max_position_embeddings": 256, "is_decoder": True, "is_encoder_decoder": False}
EQUAL = ("12+3=15", "they are kind", "47+85=1", "we were there", "a")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("recurrent_gemma", {**GEMMA, "num_hidden_layers": 2}),
        ("bart", DECODER),
        pytest.param("marian", DECODER, marks=pytest.mark.nightly),
    ],
)
def test_texts_of_equal_length_alone_share_a_batch_where_padding_changes_values(tmp_path, monkeypatch, name, sizes):
    ours = engine(make(name, tmp_path, **sizes))
    assert not ours._prefill.takes_padding
    assert_as_alone(ours, [*PROMPTS, *EQUAL])
    assert_as_alone(ours, [SHARED + text for text in EQUAL[:3]])
    seen = with_seen_shapes(ours, monkeypatch)
    list(ours.generate([Request(i, Prompt(text), Sampling(max_tokens=1)) for i, text in enumerate(EQUAL)]))
    assert [n_rows for n_rows, _ in seen] == [2, 2, 1]
    with pytest.raises(
        SlurmGPUError, match=r"impossible .* (layers other|padding a text to the length of a longer one)"
    ):
        engine(tmp_path, batching="continuous")


# Windows over columns.


def make_gpt_neo(folder, max_position_embeddings=256):
    """A GPT-Neo that looks back 12 tokens in every other layer."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_layers": 2, "window_size": 12}
    return make(
        "gpt_neo",
        folder,
        **sizes,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=max_position_embeddings,
    )


def test_prompts_share_no_beginning_in_a_model_that_looks_back_by_columns(tmp_path):
    ours = engine(make_gpt_neo(tmp_path))
    assert_as_alone(ours, [SHARED + text for text in PROMPTS])
    on_a_gpu = dataclasses.replace(ours._loaded, device=torch.device("cuda"))
    assert "look back by columns" in obstacle_to(on_a_gpu, Place("cuda"))


def test_rows_have_no_more_columns_than_a_model_has_a_mask_for(tmp_path):
    ours = engine(make_gpt_neo(tmp_path, max_position_embeddings=128))
    asked = [Request(0, Prompt("a" * 100), Sampling(max_tokens=20))]
    asked += [Request(i, Prompt("bc" * (i % 3 + 1)), Sampling(max_tokens=110)) for i in range(1, 20)]
    found = {output.id: output.tokens.tolist() for output in ours.generate(asked)}
    alone = {output.id: output.tokens.tolist() for each in asked[:4] for output in ours.generate([each])}
    assert {number: found[number] for number in alone} == alone
    assert len(found) == len(asked)


# Positions whose frequencies depend on the longest text of a call.

BORDER = 64
ENDING = "abcdefghijklmnopqrstuvwxyz0123456789" * 3


def of_length(n_tokens, before=""):
    """A text of so many tokens, with the one before it that tokenizers add."""
    return (before + ENDING)[: n_tokens - 1]


ACROSS = [of_length(n) for n in (5, 20, 40, 52, 53, 54, 60, 61, 62, 63, 64, 65, 66, 100, 90)]


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    return make_phi3(tmp_path_factory.mktemp("phi3"))


def test_texts_on_both_sides_of_the_border_of_longrope_are_as_alone(phi3):
    assert_as_alone(engine(phi3), [*ACROSS, ACROSS[3]], most=(6, 14, 2))


@pytest.mark.nightly
@pytest.mark.parametrize("n_shared", [45, 63, 70])
def test_what_texts_share_is_read_once_on_one_side_of_the_border_alone(phi3, n_shared):
    before = of_length(n_shared)
    assert_as_alone(engine(phi3), [before + text for text in ("a", "bc", "0", "def1234567890", "?" * 25)])


def test_answers_that_cross_the_border_are_those_of_transformers_own_generate(phi3):
    """Since transformers 5.20: before, `generate` reads one token alone there, without those before it."""
    ours = engine(phi3)
    outputs = ours.generate([Request(i, Prompt(text), Sampling(max_tokens=30)) for i, text in enumerate(ACROSS)])
    for output in outputs:
        ids = torch.tensor([ours._loaded.tokenizer(ACROSS[output.id])["input_ids"]])
        made = ours._loaded.model.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :]
        assert output.tokens.tolist() == made.tolist()


def test_rows_that_cross_the_border_go_on_with_their_samples_and_structures(phi3):
    form = structure_of(regex="[a-f0-9]{4,40}")
    samplings = [
        Sampling(max_tokens=30, temperature=1.0, logprobs=True),
        Sampling(max_tokens=30, structure=form),
        Sampling(max_tokens=30, temperature=1.0, structure=form, stop=("zz",)),
    ]
    asked = [Request(i, Prompt(text), samplings[i % 3], key=i) for i, text in enumerate(ACROSS)]
    alone = [output for each in asked for output in engine(phi3).generate([each])]
    together = {output.id: output for output in engine(phi3).generate(asked)}
    for output in alone:
        assert output.error is None
        assert together[output.id].tokens.tolist() == output.tokens.tolist()
        assert (output.logprobs is None) == (output.id % 3 > 0)
        if output.logprobs is not None:
            np.testing.assert_allclose(together[output.id].logprobs, output.logprobs, atol=1e-5)
            assert len(output.logprobs) == len(output.tokens)


def test_rows_that_cross_the_border_do_so_together_and_short_ones_share_a_batch(phi3, monkeypatch):
    ours = engine(phi3)
    seen = with_seen_shapes(ours, monkeypatch)
    list(ours.generate([Request(i, Prompt(of_length(50 + i)), Sampling(max_tokens=30)) for i in range(8)]))
    assert sum(n_rows for n_rows, n_columns in seen if n_columns == 1) > 3 * sum(1 for each in seen if each[1] == 1)
    assert [n_columns for n_rows, n_columns in seen if n_columns > 1 and n_rows == 8] == [BORDER + 1]


def test_memory_that_runs_out_after_the_border_loses_nothing(phi3, monkeypatch):
    ours = engine(phi3, batch_tokens=2000)
    asked = [Request(i, Prompt(text), Sampling(max_tokens=20)) for i, text in enumerate(ACROSS[3:10])]
    expected = {output.id: output.tokens.tolist() for output in ours.generate(asked)}
    forward, calls = ours._prefill.forward, []
    for moment in (5, 20, 28):
        calls.clear()
        ours._static._budget.tokens = 2000

        def failing(ids, *more, moment=moment, **options):
            calls.append(len(ids))
            if len(calls) == moment:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return forward(ids, *more, **options)

        monkeypatch.setattr(ours._prefill, "forward", failing)
        found = [(output.id, output.tokens.tolist()) for output in ours.generate(asked)]
        assert len(calls) > moment + 5
        assert dict(found) == expected
        assert len(found) == len(expected)


def test_heads_are_as_alone_on_both_sides_of_the_border(tmp_path):
    folder = make_head(tmp_path, "phi3", **longrope())
    options = EngineOptions(find_model(str(folder)), precision="fp32")
    ours = HeadEngine(options, Place("cpu"), read_head(options.model, steps=False))
    assert ours._padding
    found = {each.id: each.logits for each in ours.score([HeadInput(i, Prompt(text)) for i, text in enumerate(ACROSS)])}
    for number, text in enumerate(ACROSS):
        with torch.inference_mode():
            alone = ours._loaded.model(torch.tensor([ours._loaded.tokenizer(text)["input_ids"]])).logits[0]
        np.testing.assert_allclose(found[number], alone.double().numpy(), atol=1e-5)


def test_continuous_batches_have_answers_on_one_side_of_the_border_alone(phi3, monkeypatch):
    ours, served = engine(phi3, batching="continuous"), []
    serve = ours._continuous._serve
    monkeypatch.setattr(ours._continuous, "_serve", lambda asked: served.extend(asked) or serve(asked))
    asked = [Request(i, Prompt(text), Sampling(max_tokens=8)) for i, text in enumerate(ACROSS)]
    found = {output.id: output.tokens.tolist() for output in ours.generate(asked)}
    assert found == {output.id: output.tokens.tolist() for output in engine(phi3).generate(asked)}
    assert not ours._continuous.given_up
    assert {len(each.tokens) for each in served} == {5, 20, 40, 52, 53, 54}


def test_the_border_is_where_a_configuration_has_it():
    def of(**config):
        return CallLengths.of(SimpleNamespace(model_type="x", **{"max_position_embeddings": 900, **config}))

    assert of() == of(rope_parameters={"rope_type": "dynamic"}) == CallLengths()
    assert of(rope_scaling={"type": "su"}, original_max_position_embeddings=40) == CallLengths(40)
    each = {"a": {"rope_type": "longrope", "original_max_position_embeddings": 30}, "b": {"rope_type": "default"}}
    assert of(rope_parameters=each) == CallLengths(30)
    each["b"] = {"rope_type": "longrope", "original_max_position_embeddings": 20}
    assert of(rope_parameters=each) == CallLengths(20, has_two=False)
    doge = CallLengths.of(SimpleNamespace(model_type="doge", keep_window_size=100))
    assert doge == CallLengths(50, has_two=False)
    assert [*doge.groups([(20, 31), (60, 1), (20, 30), (60, 1), (9, 1)], lambda each: each)] == [
        [(20, 30), (9, 1)],
        [(20, 31)],
        [(60, 1)],
        [(60, 1)],
    ]
    assert doge.n_alike([70, 70, 60, 5]) == 2
    assert doge.n_alike([50, 20]) == 2


@pytest.mark.nightly
def test_a_model_that_counts_columns_computes_long_texts_alone(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ours = engine(make("doge", tmp_path, **sizes, num_key_value_heads=2, keep_window_size=30))
    asked = [Request(i, Prompt(text), Sampling(max_tokens=9, logprobs=True)) for i, text in enumerate(ACROSS)]
    alone = [output for each in asked for output in ours.generate([each])]
    together = {output.id: output for output in ours.generate(asked)}
    for output in alone:
        assert together[output.id].tokens.tolist() == output.tokens.tolist()
        np.testing.assert_allclose(together[output.id].logprobs, output.logprobs, atol=1e-4)
