"""The transformers engine: its tokens are those of transformers' own generate, whatever the batch."""

import dataclasses
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.batching import Budget, Load, common_prefix, n_that_fit
from slurmgpu.llm.interface.engine import EngineOptions, Passage, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.prompts.questions import ROUNDING, exclusive
from tests.support.engines import engine, texts, tokens_of
from tests.support.tiny_models import (
    CHARACTERS,
    _save,
    _sizes,
    make_gpt_oss,
    make_llama,
    make_qwen3,
)

MAKERS = {"llama": make_llama, "qwen3": make_qwen3, "gpt-oss": make_gpt_oss}
SHARED = "a rubric that all of the prompts begin with: "

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints in fp32, one of each architecture."""
    base = tmp_path_factory.mktemp("models")
    return {name: make(base / name) for name, make in MAKERS.items()}


@pytest.fixture(params=MAKERS)
def folder(folders, request):
    return folders[request.param]


def requests_of(prompts, seed=0, **sampling):
    """A request for each prompt, with a limit of its own."""
    rng = random.Random(seed)
    return [
        Request(i, Prompt(text), Sampling(**{"max_tokens": rng.randint(1, 30), **sampling}), key=1000 + i)
        for i, text in enumerate(prompts)
    ]


def logits_of(engine, tokens):
    """What the model says at each place of one row, by a bare forward pass: (place, token)."""
    with torch.inference_mode():
        return engine._loaded.model(input_ids=torch.tensor([tokens])).logits[0].double()


def encode(engine, text):
    return engine._loaded.tokenizer(text)["input_ids"]


# Generation


def test_greedy_tokens_are_those_of_transformers_own_generate(folder):
    ours = engine(folder, batch_tokens=500)
    requests = requests_of(texts(12))
    found = {output.id: output for output in ours.generate(requests)}
    for request in requests:
        prompt = torch.tensor([encode(ours, request.prompt.text)])
        limit = request.sampling.max_tokens
        made = ours._loaded.model.generate(prompt, do_sample=False, max_new_tokens=limit)[0, prompt.shape[1] :]
        output = found[request.id]
        assert output.tokens.tolist() == made.tolist()
        assert output.n_prompt_tokens == prompt.shape[1]
        assert output.finish_reason == ("stop" if made[-1] == 2 else "length")
        assert output.text == ours._loaded.tokenizer.decode(made, skip_special_tokens=True)


def test_tokens_do_not_depend_on_order_batch_neighbours_or_shared_beginnings(folder):
    some = texts(8, most=40)
    prompts = [*some, *(SHARED + text for text in some), *[some[0]] * 3]
    greedy = requests_of(prompts)
    sampled = requests_of(prompts, temperature=1.3, top_p=0.95)
    requests = [request if request.id % 3 else sampled[request.id] for request in greedy]
    alone = tokens_of(engine(folder, batch_tokens=1).generate(requests))
    assert len({tuple(tokens) for tokens in alone.values()}) > len(some)
    shuffled = random.Random(1).sample(requests, len(requests))
    for budget in (300, 1000, 100_000):
        assert tokens_of(engine(folder, batch_tokens=budget).generate(shuffled)) == alone
    # A call in which all prompts share their beginning, so that it is read once, and kept for the next call.
    with_rubric, ours = [request for request in requests if request.prompt.text.startswith(SHARED)], engine(folder)
    for _ in range(2):
        found = tokens_of(ours.generate(with_rubric))
        assert found == {number: alone[number] for number in found}
        assert len(found) == len(some)


def test_what_prompts_have_in_common_is_read_once(folders, monkeypatch):
    ours = engine(folders["llama"])
    read = []
    forward = type(ours._prefill).forward
    monkeypatch.setattr(
        type(ours._prefill),
        "forward",
        lambda self, ids, *more, **options: read.append(ids.numel()) or forward(self, ids, *more, **options),
    )
    prompts = [SHARED + ending for ending in ("1+1=", "2+2=", "3+3=")] * 4
    list(ours.generate(requests_of(prompts, max_tokens=1)))
    n_shared = len(encode(ours, SHARED))
    assert read == [n_shared, 3 * 4]
    list(ours.generate(requests_of(prompts, max_tokens=1)))
    assert read[2:] == [3 * 4]


def make_mpt(folder):
    from transformers import MptConfig, MptForCausalLM

    sizes = {"vocab_size": len(CHARACTERS) + 10, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}
    return _save(MptForCausalLM(MptConfig(**sizes, initializer_range=0.3)), folder, None)


def test_a_model_that_counts_columns_shares_no_beginning(tmp_path):
    ours = engine(make_mpt(tmp_path))
    assert ours._loaded.context == 256
    prompts = [SHARED + "1" * (3 * i + 1) for i in range(4)]
    for output in ours.generate(requests_of(prompts, max_tokens=3, logprobs=True)):
        tokens = encode(ours, prompts[output.id])
        expected = logits_of(ours, tokens + output.tokens.tolist())[len(tokens) - 1 : -1].log_softmax(-1)
        own = expected[range(len(output.tokens)), output.tokens.tolist()]
        assert np.allclose(output.logprobs, own, atol=1e-4)


def test_samples_of_one_prompt_differ_by_their_keys_alone(folders):
    ours = engine(folders["llama"])
    sampling = Sampling(max_tokens=12, temperature=1.0)
    requests = [Request(i, Prompt("12+34="), sampling, key=i // 2) for i in range(8)]
    tokens = tokens_of(ours.generate(requests))
    assert all(tokens[i] == tokens[i + 1] for i in range(0, 8, 2))
    assert len({tuple(found) for found in tokens.values()}) == 4


def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(folders):
    ours = engine(folders["llama"])
    [whole] = ours.generate(requests_of(["abc"], max_tokens=40))
    stop = whole.text[5:8]
    n_before = whole.text.index(stop)
    [output] = ours.generate(requests_of(["abc"], max_tokens=40, stop=("never said", stop), logprobs=True))
    assert output.text == whole.text[:n_before]
    assert output.finish_reason == "stop"
    assert output.tokens.tolist() == whole.tokens[: len(output.tokens)].tolist()
    assert len(output.tokens) == len(output.logprobs) == n_before + len(stop)


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_a_special_token_that_is_a_stop_text_ends_the_answer_which_does_not_show_it(folders, batching):
    ours = engine(folders["llama"], batching=batching)
    [unknown] = ours._loaded.tokenizer.convert_tokens_to_ids(["<unk>"])
    requests = {each.id: each for each in requests_of(texts(30), max_tokens=30)}
    whole = next(each for each in ours.generate([*requests.values()]) if unknown in each.tokens[1:])
    asked = requests[whole.id]
    sampling = dataclasses.replace(asked.sampling, stop=("never said", "<unk>"))
    [output] = ours.generate([dataclasses.replace(asked, sampling=sampling)])
    n_tokens = whole.tokens.tolist().index(unknown) + 1
    assert output.tokens.tolist() == whole.tokens[:n_tokens].tolist()
    assert (output.finish_reason, output.text) == ("stop", whole.text[: n_tokens - 1])


def test_log_probabilities_are_those_of_a_direct_forward_pass(folder):
    ours = engine(folder)
    requests = [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, logprobs=True, temperature=t))
        for request, t in zip(requests_of(texts(4)), [0.0, 2.0, 0.0, 0.5], strict=True)
    ]
    for output in ours.generate(requests):
        prompt, answer = encode(ours, requests[output.id].prompt.text), output.tokens.tolist()
        direct = logits_of(ours, prompt + answer)[len(prompt) - 1 : -1].log_softmax(-1)
        np.testing.assert_allclose(output.logprobs, direct[range(len(answer)), answer], atol=1e-5)


def test_log_probabilities_are_left_out_unless_asked_for(folders):
    asked, other = requests_of(["ab", "cd"])
    asked = dataclasses.replace(asked, sampling=Sampling(max_tokens=3, logprobs=True))
    found = {output.id: output.logprobs for output in engine(folders["llama"]).generate([asked, other])}
    assert len(found[0]) == 3
    assert found[1] is None


def test_outputs_come_as_they_finish(folders):
    ours = engine(folders["llama"], batch_tokens=100_000)
    requests = [Request(i, Prompt("abc" + text), Sampling(max_tokens=4 + 8 * i)) for i, text in enumerate("9731")]
    outputs = ours.generate(requests)
    lengths = [len(output.tokens) for output in outputs]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2


# Scores


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("prefix", ["", SHARED])
def test_scores_are_those_of_a_direct_forward_pass(folder, budget, prefix):
    ours = engine(folder, batch_tokens=budget)
    choices = ("y", "n", "they are", "they were kind", "ok")
    questions = [Question(i, Prompt(prefix + text), choices[: 2 + i % 4]) for i, text in enumerate(texts(5))]
    found = {scores.id: scores for scores in ours.score(questions)}
    for question in questions:
        prompt, scores = encode(ours, question.prompt.text), found[question.id]
        for place, choice in enumerate(question.choices):
            whole = encode(ours, question.prompt.text + choice)
            direct = logits_of(ours, whole)[:-1].log_softmax(-1)[range(len(whole) - 1), whole[1:]]
            assert scores.logprobs[place] == pytest.approx(float(direct[len(prompt) - 1 :].sum()), abs=1e-4)
        assert scores.n_tokens.tolist() == [len(choice) for choice in question.choices]
        assert scores.error is None


def test_choices_that_begin_alike_exclude_each_other(folders):
    """As "1" and "10" do where each digit is a token: what begins with 1 and goes on to 10 or 12 is no 1."""
    ours = engine(folders["llama"])
    choices = ("1", "10", "2", "12", "123", " 1", "1")
    [scores] = ours.score([Question(0, Prompt("a="), choices, n_ways=7)])
    begins = {}
    for choice in choices:
        whole = encode(ours, f"a={choice}")
        direct = logits_of(ours, whole)[:-1].log_softmax(-1)[range(len(whole) - 1), whole[1:]]
        begins[choice] = float(direct[len(encode(ours, "a=")) - 1 :].sum().exp())
    expected = begins | {"1": begins["1"] - begins["10"] - begins["12"], "12": begins["12"] - begins["123"]}
    assert np.exp(scores.logprobs[:-1]).tolist() == pytest.approx([expected[each] for each in choices[:-1]], abs=1e-6)
    assert scores.logprobs[-1] == -np.inf  # the same way once more
    assert scores.n_tokens.tolist() == [1, 2, 1, 2, 3, 2, 1]


@pytest.mark.parametrize("begins", [0.0, -1e-12, 1e-9])
def test_rounding_makes_no_choice_impossible_that_always_goes_on(begins):
    found = exclusive([(1,), (1, 2)], np.array([-0.5, -0.5 + begins]))
    assert found[0] == pytest.approx(-0.5 + np.log(ROUNDING), abs=1)
    assert exclusive([(1,), (1, 2)], np.array([-np.inf, -np.inf])).tolist() == [-np.inf, -np.inf]


def test_a_choice_that_grows_together_with_the_prompt_is_compared_from_before_it(folders, tmp_path):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, "x": 2, "a": 3, "b": 4, "c": 5, "ab": 6}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    made.decoder = decoders.Fuse()
    folder = make_llama(tmp_path / "merging")
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    ours = engine(folder)
    [scores] = ours.score([Question(0, Prompt("xa"), ("b", "c"))])
    x_ab, x_a_c = logits_of(ours, [2, 6]).log_softmax(-1), logits_of(ours, [2, 3, 5]).log_softmax(-1)
    assert scores.logprobs.tolist() == pytest.approx([float(x_ab[0, 6]), float(x_a_c[0, 3] + x_a_c[1, 5])], abs=1e-5)
    assert scores.n_tokens.tolist() == [1, 2]
    [scores, _] = ours.score([Question(i, Prompt(text), ("bc", "cc")) for i, text in enumerate(("a", "xa"))])
    assert (
        scores.error
        == "the prompt's only token merges with a choice, so no token is before it; expected a longer prompt"
    )
    passages = [Passage(i, Prompt(text, answer="bc")) for i, text in enumerate(("a", "xa", "x"))]
    lone, merged, plain = sorted(ours.likelihoods(passages), key=lambda each: each.id)
    assert (
        lone.error == "the prompt's only token merges with the text, so no token is before it; expected a longer prompt"
    )
    assert [each.tokens.tolist() for each in (lone, merged, plain)] == [[], [6, 5], [4, 5]]


def test_models_with_recurrent_layers_are_served_as_well(tmp_path):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts |= {"shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"]}
    states = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config = Qwen3NextConfig(**_sizes(initializer_range=0.2, linear_num_key_heads=2, **experts, **states))
    folder = _save(Qwen3NextForCausalLM(config), tmp_path / "recurrent", None)
    requests = requests_of([*texts(5), *texts(1)])
    alone = tokens_of(engine(folder, batch_tokens=1).generate(requests))
    assert tokens_of(engine(folder).generate(requests)) == alone
    questions = [Question(i, request.prompt, ("y", "they are", "they")) for i, request in enumerate(requests)]
    single, together = (
        {scores.id: scores.logprobs for scores in engine(folder, batch_tokens=tokens).score(questions)}
        for tokens in (1, 10_000)
    )
    for number, expected in single.items():
        # Their states are computed in pieces of a batch's length, which round differently.
        np.testing.assert_allclose(together[number], expected, atol=1e-3)


# What cannot be


def test_a_request_that_cannot_be_is_its_own_error(folders):
    ours = engine(folders["llama"], max_context=64)
    long = Request(1, Prompt("1" * 60), Sampling(max_tokens=10))
    requests = [*requests_of(["ab"], max_tokens=5), long, Request(2, Prompt(messages=({"role": "user"},)), Sampling())]
    found = {output.id: output for output in ours.generate(requests)}
    assert found[0].error is None
    expected = "the prompt has 61 tokens, which with max_tokens = 10 exceeds the context of 64 tokens"
    assert (found[1].error, found[1].finish_reason) == (expected, "error")
    assert "no chat template" in found[2].error


def test_a_question_that_cannot_be_is_its_own_error(folders):
    ours = engine(folders["llama"], max_context=64)
    asked = [("ab", ("y", "n")), ("1" * 64, ("y", "n")), ("ab", ()), ("ab", ("y", "")), ("ab", ("y", "É", "Ü"))]
    found = {each.id: each for each in ours.score([Question(i, Prompt(a), b) for i, (a, b) in enumerate(asked)])}
    assert [found[i].error is None for i in range(5)] == [True, False, False, False, False]
    assert found[4].error.startswith("'É' and 'Ü' have the same tokens in this model")
    assert "exceeds the context of 64 tokens" in found[1].error
    assert np.isnan(found[1].logprobs).all()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 3}])
def test_an_answer_whose_logits_are_not_finite_is_an_error(folders, sampling):
    ours = engine(folders["llama"])
    prompts = texts(6)
    good = {output.id: output.text for output in ours.generate(requests_of(prompts, **sampling))}
    lost = encode(ours, prompts[1])
    read = ours._prefill._forward

    def overflow(ids, *rest, **more):
        logits = read(ids, *rest, **more)
        return logits.masked_fill((ids == lost[-1]).any(-1)[:, None, None], torch.nan)

    ours._prefill._can_pack = False
    ours._prefill._forward = overflow
    found = {output.id: output for output in ours.generate(requests_of(prompts, **sampling))}
    assert found[1].error == 'the logits are not finite; precision = "fp32" has a larger range'
    others = [output for output in found.values() if output.error is None]
    assert all(output.text == good[output.id] for output in others)
    assert len(others) < len(prompts)


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_a_token_that_was_added_without_an_embedding_is_its_prompts_error_and_pads_nothing(tmp_path, batching):
    from transformers import AutoTokenizer

    folder = make_llama(tmp_path)
    asked = texts(8)
    good = tokens_of(engine(folder).generate(requests_of(asked)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    ours = engine(folder, batching=batching)
    ours._prefill._can_pack = False  # padded, as on a GPU
    assert ours._prefill.takes_padding
    found = {output.id: output for output in ours.generate(requests_of([*asked, "1<new>", "1[PAD]"]))}
    assert {number: found[number].tokens.tolist() for number in range(8)} == good
    assert "the tokenizer has '<new>' as token 50, and the model has only 49 tokens" in found[8].error
    assert found[9].error is None  # a special token in an item is plain text
    [scores, others] = ours.score([Question(0, Prompt("1<new>"), ("y", "n")), Question(1, Prompt("1"), ("y", "n"))])
    assert "without embeddings" in scores.error
    assert others.error is None
    [passage] = ours.likelihoods([Passage(0, Prompt("1<new>"))])
    assert "without embeddings" in passage.error


def test_a_token_beyond_the_vocabulary_that_has_an_embedding_is_known(tmp_path):
    from transformers import AutoModelForCausalLM

    from slurmgpu.llm.transformers_engine.loading import Loaded

    model = AutoModelForCausalLM.from_pretrained(make_llama(tmp_path))
    n_tokens = model.config.vocab_size
    loaded = Loaded(model, SimpleNamespace(pad_token_id=n_tokens), frozenset(), 64, 1, "cpu")
    assert (loaded.n_known, loaded.pad_id) == (n_tokens, 0)
    model.set_input_embeddings(torch.nn.Embedding(n_tokens + 8, model.config.hidden_size))
    assert (loaded.n_known, loaded.pad_id) == (n_tokens + 8, n_tokens)


def test_an_encoder_decoder_model_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(SlurmGPUError, match=r"encoder-decoder model \(t5\).* expected a decoder"):
        engine(tmp_path)


OUT_OF_MEMORY = """
import json, resource, sys
import torch
from slurmgpu.llm.interface.engine import *
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.models.source import find_model

torch.set_num_threads(1)
notes = []
place = Place("cpu", note=lambda name, value: notes.append((name, value)))
engine = open_engine(EngineOptions(find_model(sys.argv[1]), precision="fp32", batch_tokens=1_000_000), place)
sampling = Sampling(max_tokens=4, temperature=0.9)
requests = [Request(i, Prompt(f"{i}+" + "1" * 400 + f"+{i}="), sampling, i) for i in range(24)]
questions = [Question(i, request.prompt, ("y", "no")) for i, request in enumerate(requests)]


def work(some, others):
    answers = {output.id: output.error or output.tokens.tolist() for output in engine.generate(some)}
    return answers, {scores.id: scores.error or scores.logprobs.tolist() for scores in engine.score(others)}


alone = [work([request], [question]) for request, question in zip(requests, questions)]
expected = [{i: pair[kind][i] for i, pair in enumerate(alone)} for kind in (0, 1)]
engine._prefill.forget()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), resource.RLIM_INFINITY))
found = work(requests, questions)
near = [abs(one - other) < 1e-4 for i in found[1] for one, other in zip(expected[1][i], found[1][i], strict=True)]
equal = expected[0] == found[0], len(found[1]) == len(questions) and all(near)
print(json.dumps({"equal": equal, "notes": notes}))
"""


def test_a_real_lack_of_memory_halves_the_batch_and_loses_nothing(folders, slurmgpu):
    done = slurmgpu.code(OUT_OF_MEMORY, folders["llama"], 8 << 20)
    found, log = json.loads(done.stdout), done.stderr
    assert found["equal"] == [True, True]
    assert "out of memory with a batch of" in log
    names, budgets = zip(*found["notes"], strict=True)
    assert set(names) == {"batch_tokens"}
    assert max(budgets) < 24 * 400


def test_memory_that_runs_out_at_any_moment_loses_nothing_and_doubles_nothing(folders, monkeypatch):
    ours = engine(folders["llama"], batch_tokens=400)
    requests = requests_of(texts(12, most=30))
    expected = [(output.id, output.tokens.tolist()) for output in ours.generate(requests)]
    forward, calls = ours._prefill.forward, []

    def fail_at(moment):
        def failing(ids, *more, **options):
            calls.append(len(ids))
            if len(calls) == moment:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return forward(ids, *more, **options)

        return failing

    for moment in range(1, 40, 5):
        calls.clear()
        ours._static._budget.tokens = 400
        monkeypatch.setattr(ours._prefill, "forward", fail_at(moment))
        found = [(output.id, output.tokens.tolist()) for output in ours.generate(requests)]
        assert len(calls) > moment
        assert sorted(found) == sorted(expected)


def test_a_prompt_too_large_for_the_memory_is_its_own_error(folders, monkeypatch):
    ours = engine(folders["llama"])
    forward = ours._prefill.forward

    def fail_on_long(ids, *more, **options):
        if ids.shape[1] > 50:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(ids, *more, **options)

    monkeypatch.setattr(ours._prefill, "forward", fail_on_long)
    requests = requests_of([*texts(4, most=30), "1" * 70], max_tokens=3)
    found = {output.id: output for output in ours.generate(requests)}
    assert [found[i].error is None for i in range(5)] == [True, True, True, True, False]
    assert found[4].error == "out of memory for this prompt alone, which has 71 tokens, with max_tokens = 3"
    scores = {
        each.id: each.error for each in ours.score([Question(i, r.prompt, ("y",)) for i, r in enumerate(requests)])
    }
    assert [scores[i] is None for i in range(5)] == [True, True, True, True, False]


CODES = tuple(f"{a}{b}{c}" for a in "123" for b in "456" for c in "789")


def with_seen_rows(ours, monkeypatch, most=1_000):
    """The numbers of rows that are read together, of which more than `most` tokens find no memory."""
    forward, seen = ours._prefill.forward, []

    def see(ids, *more, **options):
        if ids.numel() > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        seen.append(len(ids))
        return forward(ids, *more, **options)

    monkeypatch.setattr(ours._prefill, "forward", see)
    return seen


def test_choices_too_many_for_the_memory_are_read_a_few_at_a_time(folders, monkeypatch):
    question = Question(0, Prompt("ab"), CODES)
    (expected,) = engine(folders["llama"]).score([question])
    ours = engine(folders["llama"])
    seen = with_seen_rows(ours, monkeypatch, most=16)
    (found,) = ours.score([question])
    assert found.error is None
    assert np.allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert max(seen) > 1


def test_so_many_choices_are_read_together_that_their_logits_have_room(folders, monkeypatch):
    question = Question(0, Prompt("ab"), CODES)
    ours = engine(folders["llama"])
    (expected,) = ours.score([question])
    n_logits = 2 * ours._loaded.model.config.vocab_size
    monkeypatch.setattr("slurmgpu.llm.transformers_engine.scoring.MOST_LOGITS", 5 * n_logits)
    seen = with_seen_rows(ours, monkeypatch)
    (found,) = ours.score([question])
    assert np.allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert max(seen) == 5


def test_ranks_of_a_group_do_not_halve_on_their_own(folders, monkeypatch):
    ours = engine(folders["llama"])
    group = dataclasses.replace(Place("cpu"), world_size=2)
    monkeypatch.setattr(ours._static._budget, "_place", group)
    monkeypatch.setattr(ours._prefill, "forward", lambda *args, **options: bytearray(1 << 60))
    with pytest.raises(MemoryError):
        list(ours.generate(requests_of(["ab", "cd"])))


# Batches


def test_a_budget_grows_once_after_twenty_clean_batches():
    notes = []
    budget = Budget(1000, Place("cpu", note=lambda *note: notes.append(note)))
    budget.succeed()
    budget.reduce(900)
    assert budget.tokens == 450
    for _ in range(50):
        budget.succeed()
    assert budget.tokens == 562
    assert {value for _, value in notes} == {450, 562}
    budget.reduce(500)
    assert budget.tokens == 250


def test_rows_are_taken_until_the_longest_of_prompt_and_answer_fills_the_budget():
    rows = [(60, 20), (50, 40), (40, 1), (30, 1)]
    assert n_that_fit(Load(), rows, 300)[0] == 3
    assert n_that_fit(Load(), rows, 10) == (1, Load(1, 60, 20))
    assert n_that_fit(Load(1, 10, 5), rows, 10) == (0, Load(1, 10, 5))


def test_a_common_prefix_leaves_each_row_a_token():
    assert common_prefix([(1, 2, 3), (1, 2, 4)]) == 2
    assert common_prefix([(1, 2), (1, 2, 4)]) == 1
    assert common_prefix([(1, 2, 3)]) == 0


def test_layers_are_spread_evenly_over_devices(folders, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from slurmgpu.llm.transformers_engine.loading import even_device_map

    config = AutoConfig.from_pretrained(make_llama(tmp_path / "deep", num_hidden_layers=8))
    placed = even_device_map(AutoModelForCausalLM, config, 4, torch.float32)
    layers = [placed[f"model.layers.{i}"] for i in range(8)]
    assert layers == sorted(layers)
    assert sorted(layers.count(device) for device in range(4)) == [2, 2, 2, 2]


def test_a_vocabulary_that_transformers_cannot_divide_is_a_sentence(tmp_path, monkeypatch):
    def refuse(**_):
        # In the words of transformers 5.20.
        raise ValueError("The output size of `lm_head` (49) must be divisible by the tensor parallel size (2) when …")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    options = EngineOptions(find_model(str(make_llama(tmp_path / "m"))), precision="fp32")
    with pytest.raises(SlurmGPUError, match=r"`lm_head` \(49\) must be .* set processes = \"one\" in \[resources\]"):
        open_engine(options, Place("cpu"))
