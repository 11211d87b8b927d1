"""Continuous batching gives what static batches give, and whatever becomes of it, every request is answered."""

import logging
import random
import threading

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm import continuous, continuous_sampling, selfcheck
from slurmgpu.llm.engine import EngineOptions, Place, Prompt, Question, Request, Sampling, open_engine
from slurmgpu.llm.models import find_model
from tests.tiny_models import make_gpt_oss, make_llama, make_qwen3

WORDS = "0123456789+=? abc"
MAKERS = {"llama": make_llama, "qwen3": make_qwen3, "gpt_oss": make_gpt_oss}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: make(root / kind) for kind, make in MAKERS.items()}


@pytest.fixture(scope="module")
def opened(folders):
    """Engines, each made once: `opened("llama", "static")`."""
    engines = {}

    def get(kind, batching, precision="fp32"):
        if (kind, batching, precision) not in engines:
            engines[kind, batching, precision] = new_engine(folders[kind], batching=batching, precision=precision)
        return engines[kind, batching, precision]

    yield get
    for engine in engines.values():
        engine.close()


def new_engine(folder, **options):
    notes = {}
    place = Place("cpu", note=notes.__setitem__)
    engine = open_engine(EngineOptions(find_model(str(folder)), **{"precision": "fp32"} | options), place)
    engine.notes = notes
    return engine


def requests(n=10, seed=0, prefix="", **sampling):
    rng = random.Random(seed)
    return [
        Request(
            number,
            Prompt(prefix + "".join(rng.choices(WORDS, k=rng.randint(1, 40)))),
            Sampling(max_tokens=rng.randint(1, 24), **sampling),
            key=rng.getrandbits(63),
        )
        for number in range(n)
    ]


def answers(engine, asked):
    found = {}
    for output in engine.generate(asked):
        assert output.id not in found
        assert output.error is None
        found[output.id] = (output.text, output.tokens.tolist(), output.finish_reason, output.n_prompt_tokens)
    assert sorted(found) == sorted(request.id for request in asked)
    return found


def used(engine, caplog):
    """Whether continuous batching has not been given up."""
    return "given up" not in caplog.text and "static_batches" not in engine.notes


WAYS = {
    "greedy": {},
    "sampled": {"temperature": 1.2},
    "narrowed": {"temperature": 1.0, "top_k": 7, "top_p": 0.8, "min_p": 0.01},
    "stopped": {"temperature": 1.0, "stop": ("a", "9=")},
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [*(("llama", way) for way in WAYS), ("qwen3", "sampled"), ("gpt_oss", "greedy"), ("gpt_oss", "sampled")],
)
def test_answers_are_those_of_static_batches(opened, caplog, kind, way):
    asked = requests(**WAYS[way])
    engine = opened(kind, "continuous")
    assert answers(engine, asked) == answers(opened(kind, "static"), asked)
    assert used(engine, caplog)


def test_greedy_and_sampled_requests_go_together(opened, caplog):
    asked = [
        *requests(5),
        *(Request(5 + each.id, *rest(each)) for each in requests(5, seed=1, temperature=0.9, top_k=3)),
    ]
    engine = opened("llama", "continuous")
    assert answers(engine, asked) == answers(opened("llama", "static"), asked)
    assert used(engine, caplog)


def rest(request):
    return request.prompt, request.sampling, request.key


def test_requests_are_fed_as_others_finish_and_share_what_their_prompts_begin_with(opened, caplog, monkeypatch):
    monkeypatch.setattr(continuous, "MOST_REQUESTS", 2)
    engine = opened("llama", "continuous")
    engine._continuous.release()
    prefix = "".join(random.Random(3).choices(WORDS, k=100))
    asked = requests(9, prefix=prefix, temperature=1.0)
    assert answers(engine, asked) == answers(opened("llama", "static"), asked)
    assert used(engine, caplog)
    assert engine._continuous._manager.batch_processor.cache.use_prefix_sharing
    engine._continuous.release()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
def test_log_probabilities_are_the_models_own(opened, caplog, sampling):
    asked = requests(6, logprobs=True, **sampling)
    engine = opened("llama", "continuous")
    expected = {each.id: each for each in opened("llama", "static").generate(asked)}
    for output in engine.generate(asked):
        assert output.tokens.tolist() == expected[output.id].tokens.tolist()
        np.testing.assert_allclose(output.logprobs, expected[output.id].logprobs, atol=1e-4)
    assert used(engine, caplog)


def test_in_lower_precision_the_check_allows_for_rounding(opened, caplog):
    engine = opened("llama", "continuous", "bf16")
    answers(engine, requests())
    answers(engine, requests(temperature=1.0))
    assert used(engine, caplog)


def test_between_calls_the_model_is_free_and_no_thread_runs(opened):
    engine = opened("gpt_oss", "continuous")
    before = threading.active_count()
    answers(engine, requests(3))
    assert threading.active_count() == before
    question = Question(0, Prompt("1+1"), ("a", "bc"))
    [scores], [expected] = (list(each.score([question])) for each in (engine, opened("gpt_oss", "static")))
    np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=1e-5)
    assert answers(engine, requests(3)) == answers(opened("gpt_oss", "static"), requests(3))


def test_who_stops_listening_can_ask_again(opened, caplog):
    engine = opened("llama", "continuous")
    first = iter(engine.generate(requests()))
    next(first)
    first.close()
    assert answers(engine, requests()) == answers(opened("llama", "static"), requests())
    assert used(engine, caplog)


def test_a_longer_request_than_before_finds_room(folders, opened, caplog, monkeypatch):
    monkeypatch.setattr(continuous, "CPU_TOKENS", 64)
    engine = new_engine(folders["llama"], batching="continuous")
    for prompt in ("1+", "1+" * 100, "1+" * 300):
        asked = [Request(0, Prompt(prompt), Sampling(max_tokens=8))]
        assert answers(engine, asked) == answers(opened("llama", "static"), asked)
    assert used(engine, caplog)
    engine.close()


# What goes wrong


def test_without_memory_for_the_cache_all_is_computed_in_static_batches(folders, opened, caplog, monkeypatch):
    engine = new_engine(folders["llama"], batching="continuous")
    monkeypatch.setattr(continuous, "CPU_TOKENS", 10**13)  # more than there is
    assert answers(engine, requests()) == answers(opened("llama", "static"), requests())
    assert "continuous batching is given up, 10 requests go on in static batches" in caplog.text
    assert engine.notes == {"static_batches": 1}
    caplog.clear()
    monkeypatch.undo()
    answers(engine, requests())  # it is not tried again
    assert not caplog.text
    engine.close()


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])  # the manager changes the latter's attention
def test_a_manager_that_fails_on_the_way_costs_no_answer(kind, folders, opened, caplog, monkeypatch):
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    engine = new_engine(folders[kind], batching="continuous")
    answers(engine, requests())
    left = iter(range(8))
    step = ContinuousBatchProcessor._generation_step

    def fail_later(self, model):
        if next(left, None) is None:
            raise RuntimeError("something broke")
        step(self, model)

    monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", fail_later)
    asked = requests(seed=5)
    assert answers(engine, asked) == answers(opened(kind, "static"), asked)
    assert "something broke" in caplog.text
    assert engine.notes == {"static_batches": 1}
    engine.close()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
def test_answers_that_differ_are_found_before_they_are_used(folders, opened, caplog, monkeypatch, sampling):
    if sampling:
        monkeypatch.setattr(continuous_sampling, "perturb_all", lambda logits, *_, **__: logits)
    else:
        model_runner = pytest.importorskip("transformers.generation.continuous_batching.model_runner")
        sample = model_runner.ModelRunner._sample
        wrong = lambda self, scores, output_ids: sample(self, -scores, output_ids)  # noqa: E731
        monkeypatch.setattr(model_runner.ModelRunner, "_sample", wrong)
    engine = new_engine(folders["llama"], batching="continuous")
    assert answers(engine, requests(**sampling)) == answers(opened("llama", "static"), requests(**sampling))
    assert "it disagrees with static batches: tokens [" in caplog.text
    engine.close()


def test_two_tokens_that_are_all_but_tied_may_change_places(opened):
    engine = opened("llama", "static")
    loaded, [request] = engine._loaded, requests(1)
    encoded = engine._codec.encode(request)
    [reference] = engine._static.generate([encoded])
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([encoded.tokens])).logits[0, -1]
    second = int(logits.argsort()[-2])
    other = type(reference)(encoded, (second,), "length")
    gap = float((logits.max() - logits[second]) / (logits.max() - logits.mean()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(selfcheck.TOLERANCE, "bf16", gap * 1.1)
        assert selfcheck.difference(loaded.model, [reference], [other], "bf16") is None
        patch.setitem(selfcheck.TOLERANCE, "bf16", gap * 0.9)
        assert f"tokens [{second}] instead of" in selfcheck.difference(loaded.model, [reference], [other], "bf16")


# When it is used


def test_on_a_cpu_static_batches_are_chosen_and_a_reason_is_logged(folders, caplog):
    with caplog.at_level(logging.INFO):
        engine = new_engine(folders["llama"])
    assert engine._continuous is None
    assert "no continuous batching: it computes on the CPU" in caplog.text


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("hf_device_map", {"model.layers.0": 0, "model.layers.1": 1}, "spread over 2 devices"),
        ("layer_types", ["full_attention", "linear_attention"], "another kind than attention: linear_attention"),
    ],
)
def test_a_model_that_cannot_be_served_so_is_refused_where_that_was_asked_for(
    folders, monkeypatch, attribute, value, reason
):
    from slurmgpu.llm import transformers_engine

    load = transformers_engine.load_model

    def load_changed(*arguments):
        loaded = load(*arguments)
        setattr(loaded.model.config if attribute == "layer_types" else loaded.model, attribute, value)
        return loaded

    monkeypatch.setattr(transformers_engine, "load_model", load_changed)
    with pytest.raises(SlurmGPUError, match=f'batching = "continuous" is impossible for .*{reason}'):
        new_engine(folders["llama"], batching="continuous")
    if attribute == "hf_device_map":
        assert new_engine(folders["llama"])._continuous is None
