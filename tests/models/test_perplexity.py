"""Log-probabilities of texts: those of the model one text at a time, in one window or in several, and their summary."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MambaConfig,
    MambaForCausalLM,
)

from slurmgpu import results
from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.engine import Passage, Prompt
from slurmgpu.llm.prompts.windows import windows_of
from slurmgpu.llm.transformers_engine import token_scoring
from slurmgpu.llm.transformers_engine.call_lengths import depends_on_length
from slurmgpu.workload import Item
from slurmgpu.workloads.perplexity import Perplexity
from tests.support.engines import engine, with_seen_shapes
from tests.support.tiny_models import _save, _sizes, make_gpt_oss, make_llama, make_phi3, make_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["12+3=15", "they are kind", "a", "we sing here: " * 12, "all of them were here, and 47+85=132 " * 3]
BOS, EOS = 1, 2


def make_mamba(folder):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "initializer_range": 0.2}
    return _save(MambaForCausalLM(MambaConfig(**_sizes() | sizes)), folder, None)


MAKERS = {"phi3": make_phi3, "llama": make_llama, "qwen3": make_qwen3, "gpt-oss": make_gpt_oss, "mamba": make_mamba}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: make(base / name) for name, make in MAKERS.items()}


def ids_of(folder, text):
    return AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]


def by_hand(folder, ids, n_before=1, context=None, stride=None):
    """The log-probability of each token after the first ones, each window read by the model alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    context = context or len(ids)
    found, first = [], n_before
    stop = min(len(ids), context + 1)
    while first < len(ids):
        seen = ids[max(0, stop - 1 - context) : stop]
        with torch.inference_mode():
            logprobs = model(torch.tensor([seen[:-1]])).logits[0].log_softmax(-1)
        found += [float(logprobs[place, seen[place]]) for place in range(first - stop, 0)]
        first, stop = stop, min(len(ids), stop + (stride or context))
    return found


def passages_of(texts):
    return [Passage(number, Prompt(text)) for number, text in enumerate(texts)]


def found_by(engine, passages):
    found = sorted(engine.likelihoods(passages), key=lambda each: each.id)
    assert [each.error for each in found] == [None] * len(passages)
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_every_tokens_probability_is_that_of_the_model_alone(folders, name):
    found = found_by(engine(folders[name]), passages_of(TEXTS))
    for text, each in zip(TEXTS, found, strict=True):
        ids = ids_of(folders[name], text)
        assert each.tokens.tolist() == ids
        np.testing.assert_allclose(each.logprobs, by_hand(folders[name], [BOS, *ids]), atol=2e-5)


def test_a_text_is_the_same_beside_a_longer_one_where_positions_depend_on_the_longest(folders):
    texts = ["we sing here" * 5, "they are kind" * 6]  # 60 and 78 tokens, on both sides of the 64
    for text, found in zip(texts, found_by(engine(folders["phi3"]), passages_of(texts)), strict=True):
        expected = by_hand(folders["phi3"], [BOS, *ids_of(folders["phi3"], text)])
        np.testing.assert_allclose(found.logprobs, expected, atol=2e-5)


def test_logits_of_a_few_columns_at_a_time_are_the_same(folders, monkeypatch):
    for name in ("llama", "gpt-oss"):  # of which one looks back through a window
        assert not depends_on_length(AutoConfig.from_pretrained(folders[name]))
        whole = found_by(engine(folders[name]), passages_of(TEXTS))
        monkeypatch.setattr(token_scoring, "MOST_LOGITS", 3 * 7 * _sizes()["vocab_size"])
        ours = engine(folders[name])
        seen = with_seen_shapes(ours, monkeypatch)
        for one, other in zip(whole, found_by(ours, passages_of(TEXTS)), strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
        assert all(rows * columns <= 3 * 7 for rows, columns in seen)
        assert any(columns > 1 for _, columns in seen)


def test_a_text_that_is_longer_than_the_context_is_read_in_windows(folders):
    text = TEXTS[-1]
    ids = [BOS, *ids_of(folders["llama"], text)]
    ours = engine(folders["llama"], max_context=32)
    for stride in (None, 8, 31, 40):
        [found] = found_by(ours, [Passage(0, Prompt(text), stride)])
        assert len(found.logprobs) == len(ids) - 1
        by_it = None if stride == 40 else stride  # more than a window has
        np.testing.assert_allclose(found.logprobs, by_hand(folders["llama"], ids, 1, 32, by_it), atol=2e-5)


@pytest.mark.parametrize(
    ("n_tokens", "context", "stride"), [(100, 32, None), (100, 32, 5), (33, 32, None), (34, 32, 1)]
)
def test_windows_score_every_token_once_and_read_no_more_than_the_context(n_tokens, context, stride):
    windows = windows_of(n_tokens, 1, context, stride)
    assert [place for _, first, stop in windows for place in range(first, stop)] == [*range(1, n_tokens)]
    assert all(stop - 1 - start <= context and start < first for start, first, stop in windows)
    assert all(stop - 1 - start == context for start, _, stop in windows[:-1])
    if stride is not None:
        assert all(stop - first <= stride for _, first, stop in windows[1:])


def test_a_text_behind_a_prompt_is_measured_alone(folders):
    prompt, text = "what is 47+85?", "132 they said"
    before, after = (ids_of(folders["llama"], each) for each in (prompt, text))
    [found] = found_by(engine(folders["llama"]), [Passage(0, Prompt(prompt, answer=text))])
    assert found.tokens.tolist() == after
    expected = by_hand(folders["llama"], [BOS, *before, *after], 1 + len(before))
    np.testing.assert_allclose(found.logprobs, expected, atol=2e-5)


def test_a_text_that_looks_like_a_special_token_is_text(folders):
    [found] = found_by(engine(folders["llama"]), [Passage(0, Prompt("a</s>b"))])
    assert EOS not in found.tokens
    assert len(found.tokens) > 3


def test_without_a_token_of_the_beginning_the_one_of_the_end_stands_there(folders, tmp_path):
    folder = make_llama(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        told = json.loads((folder / name).read_text())
        told.pop("bos_token", None)
        if "post_processor" in told:
            told["post_processor"] = None
        (folder / name).write_text(json.dumps(told))
    ids = ids_of(folder, "12+3")
    [found] = found_by(engine(folder), [Passage(0, Prompt("12+3"))])
    np.testing.assert_allclose(found.logprobs, by_hand(folder, [EOS, *ids]), atol=2e-5)


def test_a_text_behind_a_prompt_must_fit_the_context_and_its_neighbours_are_measured(folders):
    ours = engine(folders["llama"], max_context=32)
    passages = [
        Passage(0, Prompt("a" * 20, answer="b" * 20)),
        Passage(1, Prompt("a", answer="b")),
        Passage(2, Prompt("")),
    ]
    by_id = {each.id: each for each in ours.likelihoods(passages)}
    assert by_id[0].error == "prompt and text have 41 tokens, more than the context of 32 tokens"
    assert (by_id[1].error, len(by_id[1].logprobs)) == (None, 1)
    assert by_id[2].error is not None


@pytest.mark.parametrize("most", [1, 40])
def test_when_memory_runs_out_smaller_batches_and_fewer_columns_give_the_same(folders, monkeypatch, most):
    whole = found_by(engine(folders["llama"]), passages_of(TEXTS))
    ours = engine(folders["llama"])
    forward, refused = ours._prefill.forward, []

    def limited(ids, *rest, **more):
        if ids.numel() > most:
            refused.append(ids.shape)
            raise MemoryError
        return forward(ids, *rest, **more)

    monkeypatch.setattr(ours._prefill, "forward", limited)
    for one, other in zip(whole, found_by(ours, passages_of(TEXTS)), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    assert refused


def test_what_no_memory_suffices_for_is_that_items_error(folders, monkeypatch):
    ours = engine(folders["llama"])
    forward = ours._prefill.forward

    def limited(ids, mask, positions, *rest, **more):
        if int(positions.max()) > 100:
            raise MemoryError
        return forward(ids, mask, positions, *rest, **more)

    monkeypatch.setattr(ours._prefill, "forward", limited)
    by_id = {each.id: each for each in ours.likelihoods(passages_of(TEXTS))}
    assert set(by_id) == {0, 1, 2, 3, 4}
    assert {number for number, each in by_id.items() if each.error} == {3, 4}
    assert "out of memory for this text alone, which has" in by_id[3].error


def test_a_run_has_a_row_for_each_text_and_a_summary_of_all(slurmgpu, folders, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (*TEXTS, "")))
    options = {"model": folders["llama"], "text": "{text}", "precision": "fp32", "logprobs": "true", "tokens": "true"}
    (tmp_path / "run.toml").write_text('input = "texts.jsonl"\nshard_items = 2\n[workload]\nuse = "perplexity"\n')
    words = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    slurmgpu("submit", "run.toml", "--executor", "debug", "--gpus", "0", *words, cwd=tmp_path, expect=0)
    folder = tmp_path / "runs" / "run"
    with results.open(folder / "merged.h5") as merged:
        assert merged.failed.tolist() == [False] * 5 + [True]
        assert "the text is empty; expected at least one token" in merged.errors[5]
        for number, text in enumerate(TEXTS):
            ids = ids_of(folders["llama"], text)
            logprobs = by_hand(folders["llama"], [BOS, *ids])
            row = merged.row(number)
            assert row["logprob"] == pytest.approx(sum(logprobs), abs=1e-3)
            assert row["perplexity"] == pytest.approx(math.exp(-sum(logprobs) / len(ids)), rel=1e-4)
            assert (row["n_tokens"], row["n_bytes"]) == (len(ids), len(text))
            assert row["tokens"].tolist() == ids
            np.testing.assert_allclose(row["logprobs"], logprobs, atol=2e-5)
        total, n_bytes = float(merged["logprob"][:5].sum()), sum(map(len, TEXTS))
    summary = json.loads((folder / "report.json").read_text())["summary"]
    assert summary["n_tokens"] == sum(len(ids_of(folders["llama"], text)) for text in TEXTS)
    assert summary["perplexity"] == pytest.approx(math.exp(-total / summary["n_tokens"]))
    assert summary["bits_per_byte"] == pytest.approx(-total / n_bytes / math.log(2))
    assert summary["byte_perplexity"] == pytest.approx(math.exp(-total / n_bytes))


def test_an_answer_in_a_chat_is_measured_behind_its_template(folders, tmp_path):
    folder = make_llama(tmp_path / "model", template="{{ messages[0]['content'] }}#")
    workload = Perplexity(model=str(folder), text="{answer}", messages="messages", precision="fp32")
    workload.engine = engine(folder)
    chat = [{"role": "user", "content": "12+3?"}, {"role": "assistant", "content": "16"}]
    [row] = workload([Item(0, {"messages": chat, "answer": "15"}, 0)])
    ids = ids_of(folder, "12+3?#15")
    assert row["logprob"] == pytest.approx(sum(by_hand(folder, ids, len(ids) - 2)), abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stride": 0}, "stride is 0; expected at least 1"),
        ({"stride": 4, "prompt": "{q}"}, "stride is for long texts without a prompt"),
        ({"system": "s"}, "system is for a prompt before the text, and neither prompt nor messages is set."),
        ({"chat": True}, "chat is for a prompt before the text"),
        ({"engine": "server", "url": "http://127.0.0.1:1"}, "it does not return the probabilities of a text's tokens."),
    ],
)
def test_settings_that_say_nothing_are_refused(settings, sentence):
    with pytest.raises(SlurmGPUError) as raised:
        Perplexity(**{"model": "nowhere", "text": "{text}", **settings})
    assert sentence in str(raised.value)
