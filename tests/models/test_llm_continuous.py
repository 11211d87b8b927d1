"""Continuous batching gives what static batches give, and whatever becomes of it, every request is answered."""

import dataclasses
import gc
import json
import logging
import random
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.interface.sampling import choose
from slurmgpu.llm.interface.sampling_rules import Kinds, Rules
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.prompts.encoded import Encoded, Finished
from slurmgpu.llm.transformers_engine import continuous, continuous_sampling, continuous_support, selfcheck
from slurmgpu.llm.transformers_engine.continuous import Needs
from tests.support.engines import tokens_of
from tests.support.nightly import by_night
from tests.support.tiny_models import make_gpt_oss, make_llama, make_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = "0123456789+=? abc"
MAKERS = {"llama": make_llama, "qwen3": make_qwen3, "gpt_oss": make_gpt_oss}


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
    [
        *(("llama", way) for way in ("greedy", "narrowed", "stopped")),
        ("gpt_oss", "sampled"),
        *map(by_night, ("llama", "qwen3", "gpt_oss"), ("sampled", "sampled", "greedy")),
    ],
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


def test_one_manager_serves_all_that_need_no_more_than_it_was_made_for(folders, opened, caplog, monkeypatch):
    made = []
    make = continuous.Continuous._make
    monkeypatch.setattr(continuous.Continuous, "_make", lambda self, *needs: made.append(needs) or make(self, *needs))
    engine = new_engine(folders["llama"], batching="continuous")
    stopped = [dataclasses.replace(each, id=5 + each.id) for each in requests(5, **WAYS["stopped"])]
    for asked in ([*requests(5), *stopped], requests(5), stopped, requests(5, temperature=1.0)):
        assert answers(engine, asked) == answers(opened("llama", "static"), asked)
    assert len(made) == 1
    assert used(engine, caplog)
    engine.close()


def test_the_cache_is_free_as_soon_as_it_is_released(folders):
    engine = new_engine(folders["llama"], batching="continuous")
    answers(engine, requests(3))
    cache = weakref.ref(engine._continuous._manager.batch_processor.cache)
    gc.disable()
    try:
        engine._continuous.release()
        assert cache() is None
    finally:
        gc.enable()


def test_only_continuous_batches_have_flash_attention(folders, opened, caplog, monkeypatch):
    seen = {"static": set(), "continuous": set(), "compared": set()}
    monkeypatch.setattr(continuous, "flash_attention", lambda model: "sdpa")  # as what a CPU can do
    monkeypatch.setattr(continuous, "agree", lambda *_: False)
    engine = new_engine(folders["llama"], batching="static")
    model, static, place = engine._loaded.model, engine._static.generate, Place("cpu", note=engine.notes.__setitem__)
    model.set_attn_implementation("eager")

    def watch(name, work):
        used_now = lambda: model.config._attn_implementation.removeprefix("paged|")  # noqa: E731  (before 5.20)
        return lambda *args: seen[name].add(used_now()) or work(*args)

    options = EngineOptions(find_model(str(folders["llama"])), precision="fp32")
    monkeypatch.setattr(continuous, "difference", watch("compared", continuous.difference))
    monkeypatch.setattr(continuous.Continuous, "_read", watch("continuous", continuous.Continuous._read))
    parts = (engine._codec, engine._grammars, watch("static", static))
    ours = continuous.Continuous(engine._loaded, options, place, *parts)
    engine._continuous = ours
    for asked in (requests(), requests(3)):
        assert answers(engine, asked) == answers(opened("llama", "static"), asked)
        assert model.config._attn_implementation == "eager"
    assert seen == {"static": {"eager"}, "continuous": {"sdpa"}, "compared": {"eager"}}
    assert used(engine, caplog)
    engine.close()


# What goes wrong


def test_a_comparison_that_fails_costs_no_answer_and_had_the_caches_memory(folders, opened, caplog, monkeypatch):
    engine = new_engine(folders["llama"], batching="continuous")
    serve = continuous.Continuous._serve
    managers = []

    def serve_wrongly(self, asked):
        for finished in serve(self, asked):
            yield dataclasses.replace(finished, tokens=(*finished.tokens[:-1], 5))

    def compare(*_):
        managers.append(engine._continuous._manager)
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(continuous.Continuous, "_serve", serve_wrongly)
    monkeypatch.setattr(selfcheck, "_worst_miss", compare)
    assert answers(engine, requests()) == answers(opened("llama", "static"), requests())
    assert managers == [None]
    assert "the comparison with static batches failed: OutOfMemoryError: no memory left" in caplog.text
    assert engine.notes == {"static_batches": 1}
    engine.close()


def test_without_memory_for_the_cache_all_is_computed_in_static_batches(folders, opened, caplog, monkeypatch):
    engine = new_engine(folders["llama"], batching="continuous")
    monkeypatch.setattr(continuous, "CPU_TOKENS", 10**13)  # more than there is
    assert answers(engine, requests()) == answers(opened("llama", "static"), requests())
    assert "continuous batching failed; 10 requests continue in static batches" in caplog.text
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
        monkeypatch.setattr(continuous_sampling, "leave_next", lambda logits, *_: logits)
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
    compared = (loaded.model, engine._grammars, [reference], [other], "bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(selfcheck.TOLERANCE, "bf16", gap * 1.1)
        assert selfcheck.difference(*compared) is None
        patch.setitem(selfcheck.TOLERANCE, "bf16", gap * 0.9)
        assert f"tokens [{second}] instead of" in selfcheck.difference(*compared)


@pytest.mark.parametrize(
    "filters", [{"top_k": 20, "top_p": 0.8, "temperature": 0.7}, {"top_p": 0.3}, {"top_k": 50}, {"min_p": 0.05}]
)
def test_a_token_that_rounding_moves_over_the_edge_of_a_filter_is_no_difference(opened, filters):
    n_rows, sampling = 200, Sampling(**{"temperature": 1.0, **filters})
    logits = 2.5 * torch.randn(n_rows, 2000, generator=torch.Generator().manual_seed(0))
    logits[:, :20] += 6 * torch.rand(n_rows, 20, generator=torch.Generator().manual_seed(1))
    rounded = logits + 0.01 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) * logits.amax()

    def chosen(scores, how):
        rules = Rules.of([how] * n_rows, [7] * n_rows)
        return tuple(choose(scores.bfloat16(), rules, torch.arange(n_rows)).tolist())

    def said(tokens):
        model = lambda **_: SimpleNamespace(logits=logits.bfloat16()[None])  # noqa: E731
        model.device = torch.device("cpu")
        encoded = Encoded(Request(0, Prompt("a"), sampling, key=7), (1,))
        reference = Finished(encoded, chosen(logits, sampling), "length")
        assert reference.tokens != tokens
        found = Finished(encoded, tokens, "length")
        return selfcheck.difference(model, opened("llama", "static")._grammars, [reference], [found], "bf16")

    assert said(chosen(rounded, sampling)) is None
    assert "instead of" in said(chosen(rounded, Sampling(temperature=sampling.temperature)))


# When it is used


def test_on_a_cpu_static_batches_are_chosen_and_a_reason_is_logged(folders, caplog):
    with caplog.at_level(logging.INFO):
        engine = new_engine(folders["llama"])
    assert engine._continuous is None
    assert "no continuous batching: the model is on the CPU" in caplog.text


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("hf_device_map", {"model.layers.0": 0, "model.layers.1": 1}, "layers are on 2 devices"),
        ("layer_types", ["full_attention", "linear_attention"], "layers other than attention: linear_attention"),
        ("attn_logit_softcapping", 50.0, "transformers ignores attn_logit_softcapping"),
    ],
)
def test_a_model_that_cannot_be_served_so_is_refused_where_that_was_asked_for(
    folders, monkeypatch, attribute, value, reason
):
    from slurmgpu.llm.transformers_engine import engine as transformers_engine

    load = transformers_engine.load_model

    def load_changed(*arguments):
        loaded = load(*arguments)
        setattr(loaded.model if attribute == "hf_device_map" else loaded.model.config, attribute, value)
        return loaded

    monkeypatch.setattr(transformers_engine, "load_model", load_changed)
    with pytest.raises(SlurmGPUError, match=f'batching = "continuous" is impossible for .*{reason}'):
        new_engine(folders["llama"], batching="continuous")
    if attribute == "hf_device_map":
        assert new_engine(folders["llama"])._continuous is None


class OnAGPU:
    """A model as far as its attention goes: it `exchanges` some implementations for others, or raises."""

    device = torch.device("cuda")
    dtype = torch.bfloat16

    def __init__(self, own="sdpa", **exchanges):
        self.config = SimpleNamespace(_attn_implementation=own, get_text_config=lambda: SimpleNamespace(model_type="x"))
        self.exchanges = exchanges

    def init_continuous_batching(self):
        raise NotImplementedError

    def set_attn_implementation(self, name):
        found = self.exchanges.get(name, name)
        if isinstance(found, Exception):
            raise found
        self.config._attn_implementation = found


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (OnAGPU(), "flash_attention_3"),
        (OnAGPU(flash_attention_3=ValueError("no"), flash_attention_2="some/flash-kernel"), "some/flash-kernel"),
        (OnAGPU("eager", flash_attention_3=OSError("offline"), flash_attention_2=ImportError("no kernels")), None),
        (OnAGPU("eager", flash_attention_3="eager", flash_attention_2="eager"), None),
    ],
)
def test_flash_attention_is_what_the_model_takes_of_what_is_installed(monkeypatch, model, found):
    monkeypatch.setattr(continuous_support, "_installed", lambda _: iter(["flash_attention_3", "flash_attention_2"]))
    own = model.config._attn_implementation
    assert continuous_support.flash_attention(model) == found
    assert model.config._attn_implementation == own
    reason = continuous_support.advisable(SimpleNamespace(model=model))
    assert reason == (None if found else "flash attention is not installed here, or the model cannot use it")


@pytest.mark.parametrize("caps", [True, False])
def test_flash_attention_alone_caps_scores_in_continuous_batches(monkeypatch, caps):
    """Gemma 2 has such scores; before 5.19 transformers had another function for pages, which did not."""
    monkeypatch.setattr(continuous_support, "_installed", lambda _: iter(["flash_attention_2"]))
    if not caps:
        monkeypatch.setattr("transformers.modeling_flash_attention_utils._flash_attention_forward", lambda: None)
    model, without = OnAGPU("eager"), OnAGPU("eager", flash_attention_2=ImportError("no kernels"))
    for each in (model, without):
        capped = SimpleNamespace(model_type="x", attn_logit_softcapping=50.0)
        each.config.get_text_config = lambda capped=capped: capped
    reason = "transformers ignores attn_logit_softcapping of its attention there"
    assert continuous_support.available(SimpleNamespace(model=model)) == (None if caps else reason)
    assert continuous_support.available(SimpleNamespace(model=without)) == reason


def test_eight_bit_weights_of_bitsandbytes_advise_static_batches(monkeypatch):
    monkeypatch.setattr(continuous_support, "_installed", lambda _: iter(["flash_attention_2"]))
    model = OnAGPU()
    model.is_loaded_in_8bit = True
    loaded = SimpleNamespace(model=model, context=512)
    assert "8-bit weights of bitsandbytes" in continuous_support.advisable(loaded)
    assert continuous.settings(Needs(), 9, loaded, flash=True)["use_cuda_graph"] is False


@pytest.mark.parametrize(("context", "pages"), [(8192, 33), (8200, 34), (10**9, 513)])
def test_on_a_gpu_the_manager_knows_of_the_sampler_and_of_the_context(context, pages):
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    loaded = SimpleNamespace(model=OnAGPU(), context=context)
    sampled = continuous.settings(Needs(Kinds(free=True)), 9, loaded, flash=True)
    greedy = continuous.settings(Needs(), 9, loaded, flash=False)
    assert (sampled["max_memory_percent"], sampled["max_blocks_per_request"]) == (0.8, pages)
    assert not {"max_memory_percent", "max_blocks_per_request"} & set(greedy)
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    assert {"max_memory_percent", "max_blocks_per_request", "use_cuda_graph"} <= names


def test_a_call_beside_another_that_goes_on_has_the_samplings_of_its_own(tmp_path):
    """A model's own settings may say that answers are sampled."""
    folder = make_llama(tmp_path)
    settings = {**json.loads((folder / "generation_config.json").read_text()), "do_sample": True, "temperature": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(settings))

    def asked(n):
        return [Request(i, Prompt("12+5=" + "1" * i), Sampling(max_tokens=n)) for i in range(6)]

    expected = tokens_of(new_engine(folder, batching="static").generate(asked(20)))
    ours = new_engine(folder, batching="continuous")
    assert len(tokens_of(ours.generate(asked(9)))) == 6
    first = ours.generate(asked(20))  # longer ones, by another manager
    found = tokens_of([next(first)])
    assert tokens_of(ours.generate(asked(20))) == expected
    assert found | tokens_of(first) == expected
