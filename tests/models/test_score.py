"""The built-in workload `score`: outputs of trained heads as transformers computes them one by one, and runs."""

import json

import numpy as np
import pytest

from slurmgpu import results
from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.settings import engine_options
from slurmgpu.shards.columns import Array, Ragged, Text
from slurmgpu.workload import Item, Share
from slurmgpu.workloads.score.outputs import activated, distribution, path_score
from slurmgpu.workloads.score.workload import Score
from tests.support.engines import load_on_cpu
from tests.support.runs import report
from tests.support.tiny_heads import CHAT, make_head
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["they are kind", "47+85=", "a", "we were singing " * 6, "who is here?"]
BOUND = 1e-5
"""How far an output may be from that of the text alone, in fp32, by the largest; docs/how-to/score-text.md says so."""


def assert_close(found, expected):
    """Fail unless outputs are those expected, but for rounding."""
    np.testing.assert_allclose(found, expected, atol=BOUND * max(1.0, np.abs(expected).max()), rtol=0)


def loaded(model, **settings):
    return load_on_cpu(Score(model=str(model), precision="fp32", **settings))


def rows_of(workload, data):
    return workload([Item(number, each) for number, each in enumerate(data)])


def by_transformers(folder, task, rows):
    """The logits of each row of tokens, or of keyword arguments, by transformers alone, one at a time."""
    import torch
    import transformers

    model = getattr(transformers, f"AutoModelFor{task}").from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for row in rows:
        arguments = row if isinstance(row, dict) else {"input_ids": row}
        tensors = {name: torch.tensor([list(value)]) for name, value in arguments.items()}
        with torch.inference_mode():
            found.append(model(**tensors).logits[0].double().numpy())
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tests.support.tiny_models import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHAT)


@pytest.fixture(scope="module")
def process_model(tmp_path_factory):
    """A Llama with two classes for each token, a chat template, and a token that ends steps."""
    return make_head(tmp_path_factory.mktemp("process"), task="TokenClassification", template=CHAT, added=["<extra_0>"])


# Outputs.


def test_a_classifiers_scores_are_those_of_transformers_in_any_batch_and_order(classifier, tokenizer):
    workload = loaded(classifier, prompt="{text}")
    assert workload.columns == {"label": Text(), "scores": Array("float32", (3,)), "n_tokens": Array("int32")}
    logits = np.array(by_transformers(classifier, "SequenceClassification", [tokenizer(t)["input_ids"] for t in TEXTS]))
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    rows = rows_of(workload, [{"text": text} for text in TEXTS])
    assert_close([row["scores"] for row in rows], expected)
    assert [row["label"] for row in rows] == [("bad", "good", "other")[each] for each in logits.argmax(1)]
    assert [row["n_tokens"] for row in rows] == [len(text) + 1 for text in TEXTS]
    backwards = rows_of(workload, [{"text": text} for text in reversed(TEXTS)])
    assert_close([row["scores"] for row in backwards[::-1]], expected)
    assert np.ptp(expected, axis=0).max() > 0.1


def test_raw_outputs_and_the_score_of_one_label_are_there_on_demand(classifier, tokenizer):
    workload = loaded(classifier, prompt="{text}", activation="none", positive="good")
    [logits] = by_transformers(classifier, "SequenceClassification", [tokenizer(TEXTS[0])["input_ids"]])
    [row] = rows_of(workload, [{"text": TEXTS[0]}])
    assert_close(row["scores"], logits)
    assert row["score"] == row["scores"][1]


@pytest.mark.parametrize("pad", [0, 2, None])
def test_a_reward_is_that_of_the_whole_chat_alone_whatever_pads_the_batch(tmp_path, pad):
    """Also where a model has no token for padding, or that of the end, with which its template ends."""
    from transformers import AutoTokenizer

    folder = make_head(tmp_path, num_labels=1, template=CHAT, pad_token_id=pad)
    data = [{"q": "47+85=", "a": text} for text in TEXTS]
    rows = rows_of(loaded(folder, prompt="{q}", system="add", answer="{a}"), data)
    chats = [
        [
            {"role": "system", "content": "add"},
            {"role": "user", "content": each["q"]},
            {"role": "assistant", "content": each["a"]},
        ]
        for each in data
    ]
    tokens = [AutoTokenizer.from_pretrained(folder).apply_chat_template(chat)["input_ids"] for chat in chats]
    expected = by_transformers(folder, "SequenceClassification", tokens)
    assert_close([row["score"] for row in rows], np.ravel(expected))
    assert np.ptp(expected) > 0.1
    messages = rows_of(loaded(folder, messages="chat"), [{"chat": chat} for chat in chats])
    assert_close([row["score"] for row in messages], np.ravel(expected))


def test_a_model_without_a_vocabulary_scores_texts_of_any_characters(tmp_path):
    from transformers import CanineConfig, CanineForSequenceClassification, CanineTokenizer

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CanineConfig(**sizes, num_labels=1, num_hash_buckets=64, max_position_embeddings=512)
    CanineForSequenceClassification(config).save_pretrained(tmp_path)
    CanineTokenizer().save_pretrained(tmp_path)
    tokens = CanineTokenizer()("漢字")["input_ids"]
    [row] = rows_of(loaded(tmp_path, prompt="{text}"), [{"text": "漢字"}])
    assert_close(row["score"], by_transformers(tmp_path, "SequenceClassification", [tokens])[0])


def test_a_pair_has_the_segments_and_separators_of_its_tokenizer(tmp_path):
    from tokenizers import processors
    from transformers import AutoTokenizer

    folder = make_head(tmp_path, "bert", num_labels=1)
    own = AutoTokenizer.from_pretrained(folder)
    own.backend_tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    own.save_pretrained(folder)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    own = AutoTokenizer.from_pretrained(folder)
    pairs = [("who?", text) for text in TEXTS]
    inputs = [dict(own(*pair)) for pair in pairs]
    assert set(inputs[0]["token_type_ids"]) == {0, 1}
    rows = rows_of(loaded(folder, pair=["{query}", "{text}"]), [{"query": q, "text": t} for q, t in pairs])
    expected = np.ravel(by_transformers(folder, "SequenceClassification", inputs))
    assert_close([row["score"] for row in rows], expected)


def test_steps_are_scored_at_the_tokens_that_end_them_in_a_chat(process_model):
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(process_model)
    steps = [["7+5=12", "4+8=12", "132"], ["it is 3"], ["a", "b"]]
    workload = loaded(process_model, prompt="{q}", steps="s", step_end="<extra_0>", path_by="product")
    assert workload.columns["step_scores"] == Ragged("float32")
    rows = rows_of(workload, [{"q": "47+85=", "s": each} for each in steps])
    for row, each in zip(rows, steps, strict=True):
        answer = "".join(f"{step}<extra_0>" for step in each)
        chat = [{"role": "user", "content": "47+85="}, {"role": "assistant", "content": answer}]
        tokens = own.apply_chat_template(chat)["input_ids"]
        [logits] = by_transformers(process_model, "TokenClassification", [tokens])
        places = [place for place, token in enumerate(tokens) if token == own.convert_tokens_to_ids("<extra_0>")]
        expected = 1 / (1 + np.exp(logits[places, 0] - logits[places, 1]))
        assert len(places) == len(each)
        assert_close(row["step_scores"], expected)
        assert row["score"] == pytest.approx(expected.prod(), abs=1e-4)


def test_without_a_chat_template_steps_have_the_tokens_that_trl_trains_with(tmp_path, tokenizer):
    folder = make_head(tmp_path, task="TokenClassification", num_labels=2)
    workload = loaded(folder, prompt="{q}", steps="s")
    [row] = rows_of(workload, [{"q": "47+85=", "s": "7+5=12\n4+8=12\n132"}])
    steps = ["7+5=12", "4+8=12", "132"]
    # trl 0.24, PRMTrainer.tokenize_row: the beginning, the prompt, and behind each step the separator, which has its
    # label.
    bare = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("47+85=", "\n", *steps)]
    tokens, places = [1, *bare[0]], []
    for step in bare[2:]:
        tokens += step + bare[1]
        places.append(len(tokens) - 1)
    [logits] = by_transformers(folder, "TokenClassification", [tokens])
    assert_close(row["step_scores"], 1 / (1 + np.exp(logits[places, 0] - logits[places, 1])))
    assert row["score"] == pytest.approx(min(row["step_scores"]))
    assert row["n_tokens"] == len(tokens)


def test_a_decoder_that_says_how_good_a_step_is_is_asked_behind_each(tmp_path, tokenizer):
    folder = make_llama(tmp_path)
    workload = loaded(folder, prompt="{q}", steps="s", choices=["y", "n"])
    rows = rows_of(workload, [{"q": "47+85=", "s": ["7+5=12", "132"]}, {"q": "1+1=", "s": ["2"]}])
    tokens = tokenizer("47+85=7+5=12\n132\n")["input_ids"]
    [logits] = by_transformers(folder, "CausalLM", [tokens])
    yes, no = tokenizer.convert_tokens_to_ids(["y", "n"])
    places = [place for place, token in enumerate(tokens) if token == tokenizer.convert_tokens_to_ids("\n")]
    assert_close(rows[0]["step_scores"], 1 / (1 + np.exp(logits[places, no] - logits[places, yes])))
    assert len(rows[1]["step_scores"]) == 1


def test_a_model_whose_outputs_padding_changes_gets_batches_of_equal_length(tmp_path, caplog):
    """XLNet's classifier reads the last column, also where that is padding."""
    from transformers import AutoTokenizer

    changes = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "num_labels": 1, "pad_token_id": 0}
    folder = make_head(tmp_path, "xlnet", **changes)
    workload = loaded(folder, prompt="{text}")
    assert "batches only have texts of equal length" in caplog.text
    own = AutoTokenizer.from_pretrained(folder)
    expected = by_transformers(folder, "SequenceClassification", [own(text)["input_ids"] for text in TEXTS])
    rows = rows_of(workload, [{"text": text} for text in TEXTS])
    assert_close([row["score"] for row in rows], np.ravel(expected))


def test_a_batch_too_large_for_memory_is_halved_and_loses_no_text(classifier, monkeypatch):
    workload = loaded(classifier, prompt="{text}", batch_tokens=64)
    expected = rows_of(workload, [{"text": text} for text in TEXTS])
    read, sizes = workload._heads._read, []

    def failing(batch):
        sizes.append(len(batch))
        if len(batch) > 1 or len(batch[0].tokens) > 90:
            raise MemoryError
        return read(batch)

    monkeypatch.setattr(workload._heads, "_read", failing)
    rows = rows_of(workload, [{"text": text} for text in TEXTS])
    long = next(number for number, text in enumerate(TEXTS) if len(text) > 90)
    assert str(rows[long]) == "out of memory for this text alone, which has 97 tokens"
    for number, row in enumerate(rows):
        if number != long:
            assert_close(row["scores"], expected[number]["scores"])
    assert max(sizes) > 1


# Items that cannot be scored.


def test_an_item_looks_like_no_special_token_and_a_bad_one_costs_itself(reward_model, process_model):
    workload = loaded(reward_model, prompt="{q}", answer="{a}")
    good, ended, short = rows_of(workload, [{"q": "a", "a": "b"}, {"q": "a</s>", "a": "b"}, {"q": "a"}])
    assert ended["n_tokens"] == good["n_tokens"] + 4  # </s> is four characters to this tokenizer
    assert str(short) == "no field 'a'. Known: q."
    [long] = rows_of(workload, [{"q": "a", "a": "b" * 200}])
    assert str(long) == "the text has 208 tokens; the model takes at most 128"
    steps = loaded(process_model, prompt="{q}", steps="s", step_end="<extra_0>")
    rows = rows_of(steps, [{"q": "a", "s": value} for value in ([], ["a", " "], [1], "x<extra_0>y", ["x"])])
    assert [str(row) for row in rows[:3]] == [
        "field 's' has no steps",
        "field 's' has an empty step",
        "field 's' holds [1]; expected a list of texts, or a text",
    ]
    assert len(rows[3]["step_scores"]) == 1  # of the item it is text, and no end of a step
    assert rows[3]["n_tokens"] > rows[4]["n_tokens"] + 3


def test_cut_cuts_the_text_or_the_second_of_a_pair_and_the_row_says_so(classifier):
    [long, whole] = rows_of(
        loaded(classifier, prompt="{text}", cut=True), [{"text": "ab" * 100}, {"text": ("ab" * 100)[:127]}]
    )
    assert (long["is_cut"], long["n_tokens"], whole["is_cut"]) == (True, 128, False)
    assert_close(long["scores"], whole["scores"])
    pairs = loaded(classifier, pair=["{q}", "{text}"], cut=True)
    rows = rows_of(pairs, [{"q": "who?", "text": "ab" * 100}, {"q": "w" * 200, "text": "ab"}])
    assert (rows[0]["is_cut"], rows[0]["n_tokens"]) == (True, 128)
    assert "leaves no room for the second" in str(rows[1])


# Settings and planning.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompt": None}, "neither is set"),
        ({"pair": ["{a}"], "prompt": None}, "pair has 1 texts; expected two templates"),
        ({"pair": ["{a}", "{b}"]}, "pair and prompt are both set"),
        ({"answer": "{a}", "steps": "s"}, "answer and steps are both set"),
        ({"choices": ["+", "-"]}, "choices are the tokens that a model rates each step with, and steps is not set"),
        ({"engine": "vllm"}, "engine is 'vllm'; score only runs with transformers."),
        ({"adapter": "x"}, "adapter is set, and score does not load adapters"),
        ({"batching": "static"}, "batching is set, which has no effect in score."),
        ({"positive": "nice"}, "positive is 'nice', which is not a label of the model."),
        ({"labels": ["a", "b"]}, "labels has 2 names, and the model's head has 3 outputs: bad, good, other"),
        ({"answer": "{a}", "cut": True}, "cut removes the end of a text"),
        ({"answer": "{a}", "chat": False}, "chat is false, and answer is set"),
        ({"steps": "s"}, "it scores texts, not steps. Remove steps"),
        ({"steps": "s", "choices": ["+", "-"]}, "choices is set, and model"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(classifier, settings, said):
    with pytest.raises(SlurmGPUError) as raised:
        Score(**{"model": str(classifier), "prompt": "{text}", **settings})
    assert said in str(raised.value)


def test_a_model_without_a_fitting_head_is_refused_with_what_would_do(tmp_path, process_model):
    llama = str(make_llama(tmp_path))
    for settings, said in (
        ({"model": llama}, "is a LlamaForCausalLM by its config.json; expected a model with a trained head"),
        ({"model": llama, "steps": "s"}, 'set choices to these tokens, such as ["+", "-"]'),
        ({"model": str(process_model)}, "it scores tokens, not texts. Set steps"),
    ):
        with pytest.raises(SlurmGPUError) as raised:
            Score(**{"prompt": "{text}", **settings})
        assert said in str(raised.value)


def test_planning_fits_the_model_and_freezes_what_the_head_says(classifier, reward_model):
    workload = Score(model=str(reward_model), prompt="{q}", answer="{a}")
    one, spread = workload.place(Share(1, gpu_memory=10**10)), workload.place(Share(2, gpu_memory=10**10))
    assert "On one GPU of 10.0 GB" in one.lines[1]
    assert "Spread by layers over 2 GPUs" in spread.lines[1]
    assert "One GPU suffices" in spread.lines[2]
    with pytest.raises(SlurmGPUError, match="That does not fit one GPU of"):
        workload.place(Share(1, gpu_memory=1_500_000_000))
    with pytest.raises(SlurmGPUError, match="Remove processes"):
        workload.place(Share(2, processes="per-gpu"))
    with pytest.raises(SlurmGPUError, match="has no chat template, which answer needs"):
        Score(model=str(classifier), prompt="{q}", answer="{a}").place(Share(0))
    frozen = workload.frozen_settings
    assert frozen["activation"] == "none"
    # A merge needs the model no more.
    again = Score(model="/gone", prompt="{q}", answer="{a}", **frozen)
    assert again.columns == workload.columns


def test_the_layers_of_a_model_with_a_head_are_spread_over_gpus(reward_model):
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from slurmgpu.llm.transformers_engine.loading import even_device_map

    config = AutoConfig.from_pretrained(reward_model)
    found = even_device_map(AutoModelForSequenceClassification, config, 2, torch.float32)
    assert set(found.values()) == {0, 1}
    assert "score" in found


def test_activations_and_path_scores_are_what_they_are_called():
    logits = np.array([[-800.0, 800.0], [0.0, 0.0]])
    np.testing.assert_allclose(activated(logits, "sigmoid"), [[0, 1], [0.5, 0.5]])
    np.testing.assert_allclose(activated(logits, "softmax"), [[0, 1], [0.5, 0.5]])
    assert activated(logits, "none") is logits
    steps = np.array([0.5, 0.2, 0.4])
    found = [path_score(steps, how) for how in ("min", "product", "mean", "last")]
    assert found == pytest.approx([0.2, 0.04, 1.1 / 3, 0.4])
    assert distribution(np.empty(0))["mean_score"] is None
    assert distribution(np.arange(5))["score_quartiles"] == [0, 1, 2, 3, 4]


def test_options_of_a_head_are_those_of_a_model(classifier):
    assert engine_options(str(classifier), {}).precision == "bf16"


# A run.


def test_a_run_scores_every_item_and_the_report_describes_the_scores(slurmgpu, tmp_path, classifier):
    items = [{"text": text} for text in TEXTS] + [{"body": "x"}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(each) + "\n" for each in items))
    (tmp_path / "score.toml").write_text(
        f'input = "items.jsonl"\nrun_dir = "run"\nworkload.use = "score"\n[settings]\nmodel = "{classifier}"\n'
        'prompt = "{text}"\npositive = "good"\nprecision = "fp32"\n[resources]\ngpus = 0\nexecutor = "debug"\n'
    )
    slurmgpu("submit", "score.toml", cwd=tmp_path, expect=0)
    with results.open(tmp_path / "run" / "merged.h5") as merged:
        scores, labels, failed = merged["score"][:], list(merged["label"][:]), merged.failed
    assert failed.tolist() == [False] * 5 + [True]
    summary = report(tmp_path)["summary"]
    assert summary["labels"] == {name: labels[:5].count(name) for name in ("bad", "good", "other")}
    assert summary["n_failed"] == 1
    assert summary["mean_score"] == pytest.approx(scores[:5].mean())


def test_a_failed_row_of_a_run_is_not_scored_as_an_empty_answer(reward_model):
    workload = loaded(reward_model, prompt="{q}", answer="{text}")
    row = {"index": 0, "q": "3+4", "text": "", "error": "item_error: too dark"}
    [failed, empty] = rows_of(workload, [row, {"q": "3+4", "text": ""}])
    assert str(failed) == "the scored item failed: item_error: too dark"
    assert empty["n_tokens"] > 0
